"""`make check` on a copy of this checkout: passes unchanged, fails with the remedy for each planted violation.

The frozen options and import-linter are tested in test_architecture.py: an editable install hides a copy from them.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_gates import REMEDIES, planted_violations

ROOT = Path(__file__).parent.parent
TOOLS = {
    "ruff format": ("shardwright/kernels/a.py", "x  =  1\n", "would be reformatted"),
    "ruff": ("shardwright/kernels/a.py", "import sys\n", "`sys` imported but unused"),
    "pyright": ("shardwright/kernels/a.py", 'x: int = "a"\n', "not assignable"),
}
# Added to violations of the small tree that would be too few in this one, or that need a class it lacks.
ADDED = {
    "overriding": "from shardwright.layers.mlp import MLP\nclass E(MLP):\n    def forward(self, x): ...\n",
    "line budget": "y = 1\n" * 8000,
    "function tail": "".join(f"def f{i}():\n" + "    x = 1\n" * 50 for i in range(160)),
}
PLANTS = {gate: (path, text) for gate, path, text in reversed(list(planted_violations())) if "Noisy" not in text}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the working tree with this environment's tools, in which files may be changed."""
    copy = tmp_path_factory.mktemp("checkout") / "copy"
    paths = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in paths.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(sys.prefix)
    return copy


def check(checkout: Path) -> tuple[int, str]:
    command = ["make", "--old-file=.venv/ready", "check"]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
def test_passes_unchanged(checkout):
    code, output = check(checkout)
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("gate", [*PLANTS, *TOOLS])
def test_fails_with_the_remedy_for_each_planted_violation(checkout, gate):
    path, content, remedy = TOOLS[gate] if gate in TOOLS else (*PLANTS[gate], REMEDIES[gate])
    content += ADDED.get(gate, "")
    file = checkout / path
    before = file.read_text() if file.exists() else None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if before is None else before + content)
    try:
        code, output = check(checkout)
    finally:
        file.unlink() if before is None else file.write_text(before)
    assert code != 0 and remedy in output, output
