"""Run every benchmark, or those named; or list the results files whose code has changed since they were measured.

python -m benchmarks [NAME ...]
python -m benchmarks --stale
"""

import subprocess
import sys

from benchmarks import results_file
from benchmarks.scripts import SCRIPTS


def list_stale() -> int:
    """Print a line per stale results file: the number of files changed since its commit, and the first three."""
    found = results_file.stale()
    for name, changed in found.items():
        taken = results_file.read_taken(results_file.FOLDER / name)
        print(f"{name}: {len(changed)} files changed since {taken['commit'][:10]}, among them {', '.join(changed[:3])}")
    print(f"{len(found)} of {len(list(results_file.FOLDER.glob('*.json')))} results files are out of date")
    return 1 if found else 0


def main() -> int:
    names = sys.argv[1:]
    if names == ["--stale"]:
        return list_stale()
    if unknown := [name for name in names if name not in SCRIPTS]:
        sys.exit(f"no benchmark {unknown[0]}; there are: {', '.join(SCRIPTS)}")
    failed = [
        name
        for name in names or SCRIPTS
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=results_file.ROOT, check=False).returncode
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
