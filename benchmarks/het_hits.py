"""Hits of one worker's cache of rows in HET's setting, by size and policy.

    python -m benchmarks.het_hits [--criteo FILE] [--batches N] [--passes N] [--write NAME]

Simulated: the index of the cache places the rows of one worker's batches of 128 samples, and nothing is copied. All
tables share a cache, as copies of rows do. The first half of the batches fills it and is not counted. Streams:
    zipf             N batches of a worker of benchmarks.het: ids that are drawn independently
    criteo           the file once, in its order: each of 8 workers has every eighth batch
    criteo, shuffled the file in N passes, each in another order, as HET trains
Caches hold 3, 5, 10 and 15 % of the rows of all tables. A JSON line per stream and size, in percent: by policy, lookups
whose row was in the cache (`lookups`) and distinct rows of a batch that were (`rows`); `most_used`: lookups of as many
rows, those used most in all batches, which no policy that does not know later batches beats if ids are independent;
`new`: distinct rows that were not used before; `rows_for_97`: the share of rows, those used most, that has 97 % of the
lookups.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import results_file
from benchmarks.cache_policies import PERCENT
from benchmarks.het import DIM, LOCAL_BATCH, MODELS, RANKS, ROWS, make_batch
from benchmarks.tiers import write_columns
from shardwright.embeddings.cache_simulation import Policy, TableAccesses, policies, simulate
from shardwright.spec.row_cache import COPIES_HALF_LIFE_BATCHES, HALF_LIFE_BATCHES, KNOWN_BATCHES, WAYS

WANTED_SHARE = 0.97  # of lookups
COMPARED = policies(HALF_LIFE_BATCHES, KNOWN_BATCHES)
COPIES_POLICY = Policy("set dueling", COPIES_HALF_LIFE_BATCHES, adapts=True)  # what copies of rows have
SLOW_POLICY = Policy(f"LFU, halved every {COPIES_HALF_LIFE_BATCHES} batches", COPIES_HALF_LIFE_BATCHES)


def zipf_batches(num_batches: int) -> Iterator[Tensor]:
    """The rows of a worker's batches, numbered over all tables."""
    for number in range(num_batches):
        features = make_batch(MODELS[0], 10_000 + number, LOCAL_BATCH).features
        tables = torch.arange(len(features.features)).repeat_interleave(features.lengths.sum(1))
        yield features.values + ROWS * tables


def criteo_batches(columns: np.ndarray, passes: int) -> Iterator[Tensor]:
    """As `zipf_batches`, of worker 0; in the order of the file if there is one pass."""
    sizes = columns.max(1) + 1
    rows, generator = columns + (np.cumsum(sizes) - sizes)[:, None], np.random.default_rng(0)
    for _ in range(passes):
        order = np.arange(rows.shape[1]) if passes == 1 else generator.permutation(rows.shape[1])
        for first in range(0, rows.shape[1] - LOCAL_BATCH * RANKS + 1, LOCAL_BATCH * RANKS):
            yield torch.from_numpy(rows[:, order[first : first + LOCAL_BATCH]].reshape(-1))


def measure(stream: str, num_rows: int, batches: Iterator[Tensor]) -> Iterator[dict[str, Any]]:
    distinct = [torch.unique(rows, return_counts=True) for rows in batches]
    uses = torch.zeros(num_rows, dtype=torch.int64)
    for rows, counts in distinct:
        uses[rows] += counts
    shares = uses.sort(descending=True).values.cumsum(0) / uses.sum()
    wanted_rows = int((shares < WANTED_SHARE).sum()) + 1
    accesses = TableAccesses(
        "", num_rows, 4 * DIM, tuple(rows for rows, _ in distinct), tuple(counts for _, counts in distinct)
    )
    for percent in PERCENT:
        lines = num_rows * percent // 100 // WAYS * WAYS
        line: dict[str, Any] = {"benchmark": "het_hits", "stream": stream, "percent": percent}
        line |= {"batches": len(distinct), "most_used": _percent(float(shares[lines - 1]))}
        line |= {"rows_for_97": _percent(wanted_rows / num_rows), "lookups": {}, "rows": {}}
        for policy in (*COMPARED[:-1], SLOW_POLICY, COPIES_POLICY, COMPARED[-1]):
            hits = simulate(accesses, lines, policy)
            line["lookups"][policy.name], line["rows"][policy.name] = _percent(hits.lookup_rate), _percent(hits.rate)
            line["new"] = _percent(hits.new / hits.rows)
        yield line


def _percent(share: float) -> float:
    return round(100 * share, 2)


def streams(criteo: str, num_batches: int, passes: int) -> Iterator[tuple[str, int, Iterator[Tensor]]]:
    """Name, rows of all tables, and batches."""
    features = len(make_batch(MODELS[0], 0, 1).features.features)
    yield "zipf", features * ROWS, zipf_batches(num_batches)
    if criteo:
        with tempfile.TemporaryDirectory() as folder:
            write_columns(criteo, Path(folder))
            columns = np.load(Path(folder) / "criteo.npy")
        num_rows = int((columns.max(1) + 1).sum())
        yield "criteo", num_rows, criteo_batches(columns, 1)
        yield "criteo, shuffled", num_rows, criteo_batches(columns, passes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--criteo", default="", metavar="FILE", help="rows in Criteo's format; empty: without them")
    parser.add_argument("--batches", type=int, default=4000, help="of the power law")
    parser.add_argument("--passes", type=int, default=16, help="over the shuffled file")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args(arguments)
    lines: list[dict[str, Any]] = []
    for stream, num_rows, batches in streams(args.criteo, 6 if args.smoke else args.batches, args.passes):
        for line in measure(stream, num_rows, batches):
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "het_hits", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
