"""What reading and metrics cost of a DLRM step, as the report shows it: shares of the traced time of the last 50 steps.

    python -m benchmarks.click_overhead FILE [--rounds N] [--write NAME]

One JSON line per round (a whole epoch of the recipe criteo-dlrm), then medians and ranges.
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
    parser.add_argument("data", nargs="?", default="", help="a Criteo log")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    if not (asked.data or asked.smoke):
        parser.error("name a Criteo log")
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        if asked.smoke:
            asked.data, asked.rounds = f"{directory}/log.tsv", 1
            criteo_like.write(Path(asked.data), 1 << 20)
        for number in range(asked.rounds):
            lines.append({"round": number} | shares(asked.data, directory))
            print(json.dumps(lines[-1]), flush=True)
    overhead = [sum(line[name] for name in COUNTED) for line in lines]
    summary = {"benchmark": "click_overhead", "read_and_metrics": [median(overhead), min(overhead), max(overhead)]}
    print(json.dumps(summary))
    if asked.write:
        results_file.write(asked.write, "click_overhead", [*lines, summary])
    return 0


if __name__ == "__main__":
    sys.exit(main())
