"""Run every benchmark, or those named: python -m benchmarks [NAME ...]."""

import runpy
import sys
from pathlib import Path

scripts = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
for name in sys.argv[1:] or scripts:
    if name not in scripts:
        sys.exit(f"no benchmark {name}; there are: {', '.join(scripts)}")
    sys.argv = [name]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
