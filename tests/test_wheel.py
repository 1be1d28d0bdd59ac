"""The wheel in new environments: it installs, imports, trains, and contains its compiled kernels."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
SHORT = ("train.steps=4", "train.batch_size=64", "train.eval_samples=256", "data.workers=0")
PROBE = """
import shardwright, torch
from shardwright.kernels import native
library = native.native_library()
assert library is not None and library._name.startswith({folder!r}), library
assert shardwright.__file__.startswith({folder!r}), shardwright.__file__
print(native.lengths_to_offsets(torch.tensor([1, 2])).tolist())
"""


def run(*args: object, folder: Path = Path("/")) -> str:
    """Run a command; returns its output."""
    result = subprocess.run([str(arg) for arg in args], capture_output=True, text=True, check=False, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT)
    return next(folder.glob("shardwright-*.whl"))


def test_wheel_with_the_dependencies_of_this_environment(wheel, tmp_path):
    """Fast: a .pth file makes torch and the other dependencies importable, so that only the wheel is installed."""
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    dependencies = tmp_path / "dependencies"
    dependencies.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("shardwright", "pip", "setuptools")):
            (dependencies / path.name).symlink_to(path)
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    assert "-py3-none-" in wheel.name
    assert run(python, "-I", "-c", PROBE.format(folder=str(site))).strip() == "[0, 1, 3]"
    assert "synthetic-dlrm" in run(tmp_path / "bin" / "shardwright", "train")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", PYTHONS)
def test_the_one_wheel_with_its_own_dependencies(wheel, tmp_path, version):
    own_python = find_python(version)
    run(own_python, "-m", "venv", tmp_path / "venv")
    python, command = (tmp_path / "venv" / "bin" / name for name in ("python", "shardwright"))
    install = (python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    skip_without_cpu_torch(install, version)
    run(*install, "torch")
    run(*install, wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    assert run(python, "-I", "-c", PROBE.format(folder=site)).strip() == "[0, 1, 3]"
    assert "train" in run(command, "--help")
    output = run(command, "train", "synthetic-dlrm", *SHORT, "run.name=short", folder=tmp_path)
    assert "report" in output and (tmp_path / "runs" / "short" / "report.html").exists()


def find_python(version: str) -> Path:
    """The interpreter of a version that is on the path, or that pyenv has installed; skips the test if none runs."""
    name = f"python{version}"
    on_path = shutil.which(name)
    candidates = [Path(on_path)] if on_path else []
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))
    for candidate in candidates:
        if not subprocess.run([candidate, "-c", "import ensurepip"], capture_output=True, check=False).returncode:
            return candidate
    pytest.skip(f"no {name} with ensurepip on this machine: install it, or put it on the path")


def skip_without_cpu_torch(install: tuple[object, ...], version: str) -> None:
    """Skip the test where torch for this Python would bring gigabytes of CUDA packages."""
    planned = json.loads(run(*install, "--dry-run", "--ignore-installed", "--report", "-", "torch"))
    names = [package["metadata"]["name"] for package in planned["install"]]
    if any(name.startswith("nvidia-") for name in names):
        pytest.skip(f"pip finds torch for Python {version} with CUDA only: give it an index with the CPU build")
