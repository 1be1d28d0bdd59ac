# Every verb does its own set-up: `make train` works on a machine with only Python 3.11+, a C++ compiler and git.
PYTHON ?= python3
BIN := .venv/bin
RECIPE ?= synthetic-dlrm
SOURCES := $(shell find csrc CMakeLists.txt pyproject.toml constraints.txt)
READY := .venv/ready
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder

setup: $(READY)                         ## virtual environment, dependencies, native build
train: $(READY)  ; $(BIN)/shardwright train $(RECIPE) $(WITH)
# tests/dist comes after the others: pytest enters a folder of this name only if it is told to.
test: $(READY) .venv/triton ; $(PYTEST) && $(PYTEST) tests/dist
check: $(READY)  ; $(BIN)/python -m pytest tests/test_architecture.py && $(BIN)/lint-imports && $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/pyright --pythonpath $(BIN)/python
bench: $(READY)  ; $(BIN)/python -m benchmarks
bless: $(READY)  ; $(BIN)/python -m pytest tests/golden --bless
fault: $(READY)  ; $(BIN)/python -m pytest tests/fault
rivals: .rivals/ready                  ## the environment of TorchRec and FBGEMM, for --peer and --torchrec of benchmarks
moe-rivals: .rivals-moe/ready          ## the environment of torchtitan and transformers, for benchmarks.moe_peers
nightly: $(READY) .venv/triton ; $(BIN)/python -m pytest tests tests/dist
sanitize:        ; tests/native/sanitize.sh
docs: .venv-docs/ready ; .venv-docs/bin/mkdocs build --strict --quiet
wheel: $(READY)  ; $(BIN)/python -m build --wheel
check-wheel: $(READY) ; $(BIN)/python -m pytest -rs tests/test_wheel.py
fmt: $(READY)    ; $(BIN)/ruff format . && $(BIN)/ruff check --fix .

# torch comes first and pinned: without a version, pip takes the newest build with gigabytes of CUDA packages.
$(READY): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# The GPU kernels are tested in Triton's interpreter; builds of torch for a GPU bring a Triton of their own.
.venv/triton: $(READY)
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check triton==3.6.0
	touch $@

# mkdocs reads docstrings without importing the package, so its environment has neither torch nor the native build.
.venv-docs/ready: pyproject.toml constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" \
		> .venv-docs/requirements.txt
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r .venv-docs/requirements.txt
	touch $@

# Dependencies of TorchRec, FBGEMM and Shardwright. torchrec requires fbgemm-gpu with gigabytes of CUDA; fbgemm-gpu-cpu replaces
# it, so both are installed without dependencies, which are listed here.
.rivals/ready: pyproject.toml constraints.txt
	test -x .rivals/bin/python || $(PYTHON) -m venv .rivals
	.rivals/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
		> .rivals/requirements.txt
	.rivals/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.rivals/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r .rivals/requirements.txt \
		tensordict torchmetrics==1.0.3 tqdm pyre-extensions
	.rivals/bin/pip install --quiet --disable-pip-version-check --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
	.rivals/bin/python -c "import torchrec, fbgemm_gpu"
	touch $@

# torchtitan requires packages for data sets and logging that its mixture of experts does not import; those it does are
# listed here.
.rivals-moe/ready: pyproject.toml constraints.txt
	test -x .rivals-moe/bin/python || $(PYTHON) -m venv .rivals-moe
	.rivals-moe/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
		> .rivals-moe/requirements.txt
	.rivals-moe/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.rivals-moe/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r .rivals-moe/requirements.txt \
		transformers==5.24.0 triton==3.6.0 tyro==1.0.17
	.rivals-moe/bin/pip install --quiet --disable-pip-version-check --no-deps torchtitan==0.3.0 spmd_types==0.2.3
	.rivals-moe/bin/python -c "import torchtitan.models.common.moe, transformers.models.mixtral.modeling_mixtral"
	touch $@

.PHONY: setup train test check bench bless fault nightly rivals moe-rivals sanitize docs wheel check-wheel fmt
