"""Which modules of this folder are benchmarks: those that take --smoke, their smallest case from end to end."""

from pathlib import Path

HERE = Path(__file__)
OPTION = '.add_argument("--smoke"'
SCRIPTS = tuple(path.stem for path in sorted(HERE.parent.glob("*.py")) if path != HERE and OPTION in path.read_text())
