"""`make check` itself, on a copy of this checkout: green as it is, red with the remedy for each planted violation.

The frozen options and import-linter are planted in test_architecture.py: an editable install hides a copy from them.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_gates import REMEDIES, planted

ROOT = Path(__file__).parent.parent
TOOLS = {
    "ruff format": ("shardwright/kernels/a.py", "x  =  1\n", "would be reformatted"),
    "ruff": ("shardwright/kernels/a.py", "import sys\n", "`sys` imported but unused"),
    "pyright": ("shardwright/kernels/a.py", 'x: int = "a"\n', "not assignable"),
}
# What breaks the tiny tree may be lost in this one, or lean on a class that is not in it.
MORE = {
    "overriding": "from shardwright.layers.mlp import MLP\nclass E(MLP):\n    def forward(self, x): ...\n",
    "line budget": "y = 1\n" * 8000,
    "function tail": "".join(f"def f{i}():\n" + "    x = 1\n" * 50 for i in range(160)),
}
ALONE = {gate: (path, content) for gate, path, content in reversed(list(planted())) if "Noisy" not in content}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy with this environment's tools, where planting hurts nobody."""
    copy = tmp_path_factory.mktemp("checkout") / "copy"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(sys.prefix)
    return copy


def check(checkout: Path) -> tuple[int, str]:
    words = ["make", "--old-file=.venv/ready", "check"]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_green_as_it_is(checkout):
    code, said = check(checkout)
    assert code == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("gate", [*ALONE, *TOOLS])
def test_red_with_its_remedy(checkout, gate):
    path, content, remedy = TOOLS[gate] if gate in TOOLS else (*ALONE[gate], REMEDIES[gate])
    content += MORE.get(gate, "")
    file = checkout / path
    before = file.read_text() if file.exists() else None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if before is None else before + content)
    try:
        code, said = check(checkout)
    finally:
        file.unlink() if before is None else file.write_text(before)
    assert code != 0 and remedy in said, said
