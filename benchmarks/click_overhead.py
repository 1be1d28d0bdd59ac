"""Share of reading and metrics in a DLRM step, as in the report: of the traced time of the last 50 steps.

    python -m benchmarks.click_overhead FILE [--rounds N] [--write NAME]

A JSON line per round (an epoch of the recipe criteo-dlrm), then medians and ranges.
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks import criteo_like, results_file
from shardwright import config
from shardwright.runtime.run import train
from shardwright.spec.timeline import Timeline

COUNTED = ("read", "metrics")


def shares(data: str, directory: str) -> dict[str, float]:
    settings = config.load("criteo-dlrm", [f"data={data}", f"run.directory={directory}"])
    trace = train.train(settings).path / "trace.json"
    seconds: dict[str, float] = defaultdict(float)
    for event in Timeline.from_chrome(trace.read_text()).events:
        seconds[event.name] += event.end - event.start
    steps = {event.step for event in Timeline.from_chrome(trace.read_text()).events}
    total = sum(seconds.values())
    return {"step_milliseconds": 1e3 * total / len(steps)} | {name: seconds[name] / total for name in seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="", help="a Criteo click log")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if not (args.data or args.smoke):
        parser.error("give the path of a Criteo click log, or --smoke")
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        if args.smoke:
            args.data, args.rounds = f"{directory}/log.tsv", 1
            criteo_like.write(Path(args.data), 1 << 20)
        for number in range(args.rounds):
            lines.append({"round": number} | shares(args.data, directory))
            print(json.dumps(lines[-1]), flush=True)
    overhead = [sum(line[name] for name in COUNTED) for line in lines]
    summary = {"benchmark": "click_overhead", "read_and_metrics": [median(overhead), min(overhead), max(overhead)]}
    print(json.dumps(summary))
    if args.write:
        results_file.write(args.write, "click_overhead", [*lines, summary])
    return 0


if __name__ == "__main__":
    sys.exit(main())
