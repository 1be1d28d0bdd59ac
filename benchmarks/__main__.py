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
    stale_files = results_file.find_stale()
    for name, paths in stale_files.items():
        header = results_file.read_header(results_file.FOLDER / name)
        print(f"{name}: {len(paths)} files changed since {header['commit'][:10]}, among them {', '.join(paths[:3])}")
    print(f"{len(stale_files)} of {len(list(results_file.FOLDER.glob('*.json')))} results files are out of date")
    return 1 if stale_files else 0


def main() -> int:
    names = sys.argv[1:]
    if names == ["--stale"]:
        return list_stale()
    if unknown := [name for name in names if name not in SCRIPTS]:
        sys.exit(f'no benchmark "{unknown[0]}"; choose from {", ".join(SCRIPTS)}')
    failures = [
        name
        for name in names or SCRIPTS
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=results_file.ROOT, check=False).returncode
    ]
    if failures:
        print(f"failed: {', '.join(failures)}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
