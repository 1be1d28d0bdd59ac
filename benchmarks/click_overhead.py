"""What reading and metrics cost of a DLRM step, as the report shows it: shares of the traced time of the last 50 steps.

    python -m benchmarks.click_overhead FILE [ROUNDS]

One JSON line per round (a whole epoch of the recipe criteo-dlrm), then medians and ranges.
"""

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from shardwright import config
from shardwright.runtime import loop
from shardwright.spec.timeline import Timeline

COUNTED = ("read", "metrics")


def shares(data: str, directory: str) -> dict[str, float]:
    settings = config.load("criteo-dlrm", [f"data={data}", f"run.directory={directory}"])
    trace = loop.train(settings).path / "trace.json"
    seconds: dict[str, float] = defaultdict(float)
    for event in Timeline.from_chrome(trace.read_text()).events:
        seconds[event.name] += event.end - event.start
    steps = {event.step for event in Timeline.from_chrome(trace.read_text()).events}
    total = sum(seconds.values())
    return {"step_milliseconds": 1e3 * total / len(steps)} | {name: seconds[name] / total for name in seconds}


def main() -> int:
    data, *rest = sys.argv[1:]
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(int(rest[0]) if rest else 5):
            lines.append({"round": number} | shares(data, directory))
            print(json.dumps(lines[-1]), flush=True)
    overhead = [sum(line[name] for name in COUNTED) for line in lines]
    summary = {"benchmark": "click_overhead", "read_and_metrics": [median(overhead), min(overhead), max(overhead)]}
    print(json.dumps(summary))
    results = Path(__file__).parent / "results" / "click_overhead-2cores.json"
    results.write_text("".join(json.dumps(line) + "\n" for line in [*lines, summary]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
