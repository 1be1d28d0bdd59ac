"""One script per claim; each prints a JSON line per case, with --write also to benchmarks/results/.

How to run them: README, "Working on it".
"""

from importlib.util import find_spec
from pathlib import Path

_package, _here = find_spec("shardwright"), Path(__file__).resolve().parents[1]
if _package is not None and _package.origin and Path(_package.origin).resolve().parents[1] != _here:
    # An editable install comes before the current folder. Results would name this checkout's commit.
    raise SystemExit(
        f"benchmarks are in {_here}, and Python imports shardwright from {Path(_package.origin).parent}: run "
        "`make setup` here, and use .venv/bin/python"
    )
