"""The wheel in a new environment: it installs, imports, and contains its compiled kernels."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROBE = """
import shardwright, torch
from shardwright.kernels import native
library = native.native_library()
assert library is not None and library._name.startswith({folder!r}), library
assert shardwright.__file__.startswith({folder!r}), shardwright.__file__
print(native.lengths_to_offsets(torch.tensor([1, 2])).tolist())
"""


def run(*args: object) -> str:
    """Run a command; returns its output."""
    result = subprocess.run([str(arg) for arg in args], capture_output=True, text=True, check=False, cwd="/")
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
def test_wheel_with_its_own_dependencies(wheel, tmp_path):
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", "torch")
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    assert run(python, "-I", "-c", PROBE.format(folder=site)).strip() == "[0, 1, 3]"
