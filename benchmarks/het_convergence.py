"""Convergence against time (HET, Figure 6): seconds until a model reaches an AUC, by side and rate of the links.

    python -m benchmarks.het_convergence [--quality FILE] [--servers FILE] [--write NAME]

Combines two results files; nothing is trained. Steps until an AUC are those of benchmarks.het_quality, a simulation
with narrower tables and layers than those whose milliseconds per step benchmarks.het_servers has measured: 8 workers
with 128 samples each in both. Sides without staleness need the steps of synchronous training. A JSON line per model,
side and rate: `seconds` until each AUC, null if it is not reached, and `speedup` over the side without a cache.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results_file

SYNCHRONOUS, BASE = "synchronous", "no cache"
# By side of benchmarks.het_servers, the mode of benchmarks.het_quality.
MODES = {
    **dict.fromkeys(("all on the server", "no duplicates removed", BASE, "exact, copies"), SYNCHRONOUS),
    **dict.fromkeys(("exact, rows on workers", "sharded"), SYNCHRONOUS),
    **{f"bounded {bound}": f"bounded {bound}" for bound in (10, 100)},
}
SHARES = (0.5, 0.75, 0.9, 0.98)  # of the way from the first point of the synchronous curve to its last
WORKERS, LOCAL_BATCH = 8, 128
Line = dict[str, Any]


def steps_until(curve: Sequence[Sequence[float]], area: float) -> float | None:
    """Steps until the AUC of a curve is `area`, between points on a straight line; None if it is not reached."""
    samples, areas = np.array([point[:2] for point in curve]).T
    above = np.flatnonzero(areas >= area)
    if not len(above):
        return None
    last = max(1, int(above[0]))
    part = slice(last - 1, last + 1)
    return float(np.interp(area, areas[part], samples[part])) / (WORKERS * LOCAL_BATCH)


def convergence(quality: Sequence[Line], servers: Sequence[Line]) -> Iterator[Line]:
    for model in dict.fromkeys(line["model"] for line in servers):
        curves = {line["mode"]: line["curve"] for line in quality if line["model"] == model}
        if SYNCHRONOUS not in curves:
            continue
        first, last = (curves[SYNCHRONOUS][point][1] for point in (0, -1))
        wanted = [round(first + share * (last - first), 4) for share in SHARES]
        steps = {mode: [steps_until(curve, area) for area in wanted] for mode, curve in curves.items()}
        own = [line for line in servers if line["model"] == model and MODES.get(line["side"]) in curves]
        base_ms = {(line["links"], line["rate"]): line["ms"][0] for line in own if line["side"] == BASE}
        for line in own:
            base = [number and number * base_ms[line["links"], line["rate"]] for number in steps[SYNCHRONOUS]]
            mine = [number and number * line["ms"][0] for number in steps[MODES[line["side"]]]]
            result = {"benchmark": "het_convergence", "model": model, "links": line["links"], "rate": line["rate"]}
            result |= {"side": line["side"], "auc": wanted}
            result |= {"seconds": [ms and round(ms / 1e3) for ms in mine]}
            ratios = zip(base, mine, strict=True)
            yield result | {"speedup": [ms and before and round(before / ms, 2) for before, ms in ratios]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, file in (("quality", "het_quality-2cores"), ("servers", "het_servers-2cores-avx512")):
        default = [str(results_file.FOLDER / f"{file}.json")]
        parser.add_argument(f"--{name}", nargs="*", default=default, metavar="FILE", help=f"results of het_{name}")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the same: it takes no time")
    args = parser.parse_args(arguments)
    quality, servers = (
        [line for file in files for line in results_file.read(Path(file))] for files in (args.quality, args.servers)
    )
    lines = list(convergence(quality, servers))
    for line in lines:
        print(json.dumps(line))
    if args.write:
        results_file.write(args.write, "het_convergence", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
