"""The names of the benchmarks: the modules of this folder with the option --smoke, which runs their smallest case."""

from pathlib import Path

SELF = Path(__file__)
OPTION = '.add_argument("--smoke"'
SCRIPTS = tuple(path.stem for path in sorted(SELF.parent.glob("*.py")) if path != SELF and OPTION in path.read_text())
