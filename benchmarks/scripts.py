"""The names of the benchmarks: the modules of this folder with the option --smoke, which runs their smallest case."""

from pathlib import Path

HERE = Path(__file__)
OPTION = '.add_argument("--smoke"'
SCRIPTS = tuple(path.stem for path in sorted(HERE.parent.glob("*.py")) if path != HERE and OPTION in path.read_text())
