"""The wheel, alone in a new environment: it installs, imports, and brings its compiled kernels."""

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


def output(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    output(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT)
    return next(folder.glob("shardwright-*.whl"))


def test_wheel_beside_these_dependencies(wheel, tmp_path):
    """Fast: torch and the rest are seen through a path file, so that only the wheel itself is on trial."""
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    output(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    site = Path(output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    seen = tmp_path / "seen"
    seen.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("shardwright", "pip", "setuptools")):
            (seen / path.name).symlink_to(path)
    (site / "dependencies.pth").write_text(f"{seen}\n")
    assert "-py3-none-" in wheel.name
    assert output(python, "-I", "-c", PROBE.format(folder=str(site))).strip() == "[0, 1, 3]"
    assert "synthetic-dlrm" in output(tmp_path / "bin" / "shardwright", "train")


@pytest.mark.slow
def test_wheel_with_its_own_dependencies(wheel, tmp_path):
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    output(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", "torch")
    output(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    site = output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    assert output(python, "-I", "-c", PROBE.format(folder=site)).strip() == "[0, 1, 3]"
