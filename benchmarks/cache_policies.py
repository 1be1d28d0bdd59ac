"""Hits of a cache of rows by size and policy, beside Belady's optimum, on the streams of benchmarks/tiers.py.

    python -m benchmarks.cache_policies [--criteo FILE] [--batches N] [--write NAME]

Simulated: the index of the cache places the rows of N batches of 2,048 samples, and nothing is copied. Hits are of
distinct rows in the second half. Of "criteo", tables whose lines hold all of their rows are left out. A JSON line per
stream and size: by policy, the share of distinct rows that were found, over all tables.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import results_file
from benchmarks.dlrm_step import TABLES
from benchmarks.tiers import ROW_BYTES, write_columns
from benchmarks.tiers_side import Stream, num_lines
from shardwright.embeddings.cache_simulation import Hits, TableAccesses, policies, simulate
from shardwright.spec.row_cache import HALF_LIFE_BATCHES, KNOWN_BATCHES, WAYS

PERCENT = (3, 5, 10, 15)


def measure(stream: str, folder: Path, num_batches: int) -> Iterator[dict[str, Any]]:
    source = Stream(stream, folder)
    batches = [source.batch(number).features.values.view(TABLES, -1) for number in range(num_batches)]
    for percent in PERCENT:
        hits: dict[str, Hits] = {}
        for table, (rows, lines) in enumerate(
            zip(source.rows, num_lines(stream, source.rows, percent / 100), strict=True)
        ):
            if lines >= rows:
                continue
            accesses = TableAccesses("", rows, ROW_BYTES, tuple(torch.unique(ids[table]) for ids in batches))
            for policy in policies(HALF_LIFE_BATCHES, KNOWN_BATCHES):
                found = simulate(accesses, lines // WAYS * WAYS, policy)
                hits[policy.name] = hits.get(policy.name, Hits()) + found
        line: dict[str, Any] = {"benchmark": "cache_policies", "stream": stream, "percent": percent}
        yield line | {"simulated_hits": {name: round(each.rate, 4) for name, each in hits.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--criteo", default="", metavar="FILE", help="rows in Criteo's format; empty: without them")
    parser.add_argument("--batches", type=int, default=800)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    num_batches, lines = 6 if args.smoke else args.batches, []
    with tempfile.TemporaryDirectory() as folder:
        if args.criteo:
            write_columns(args.criteo, Path(folder))
        for stream in ("zipf", *(["criteo"] if args.criteo else [])):
            for line in measure(stream, Path(folder), num_batches):
                lines.append(line)
                print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "cache_policies", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
