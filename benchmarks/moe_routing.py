"""Routing for benchmarks/moe.py: rows of each expert by rank, recorded or generated."""

from functools import cache
from io import BytesIO

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
SEED = 5


@cache
def read_trace(path: str) -> IntArray:
    """(iterations, ranks, layers, micro-batches, experts) of a recorded run: expert_counts_u16.npy.zst."""
    import pyarrow

    with pyarrow.input_stream(path, compression="zstd") as stream:
        return np.load(BytesIO(stream.read())).astype(np.int64)


def fold_trace(trace: IntArray, number: int, num_ranks: int, num_experts: int, rows: int) -> IntArray:
    """A drawn iteration and layer after the first 500 iterations, with as many rows on each rank.

    Recorded experts are folded in order: several become one.
    """
    draw = np.random.default_rng(SEED + number)
    iteration, layer = draw.integers(len(trace) // 10, len(trace)), draw.integers(trace.shape[2])
    counts_RE = trace[iteration, :num_ranks, layer].sum(1)
    folded_RE = counts_RE.reshape(num_ranks, num_experts, -1).sum(2)
    return scale_rows(folded_RE / folded_RE.sum(1, keepdims=True), rows)


def zipf_routing(number: int, num_ranks: int, num_experts: int, rows: int, exponent: float = 1.2) -> IntArray:
    """Popularity by a Zipf law in a drawn order of the experts; ranks differ by a tenth."""
    draw = np.random.default_rng(SEED + number)
    shares_E = np.arange(1, num_experts + 1) ** -exponent
    shares_RE = draw.permutation(shares_E) * draw.uniform(0.9, 1.1, (num_ranks, num_experts))
    return scale_rows(shares_RE / shares_RE.sum(1, keepdims=True), rows)


def even_routing(num_ranks: int, num_experts: int, rows: int) -> IntArray:
    return scale_rows(np.full((num_ranks, num_experts), 1 / num_experts), rows)


def scale_rows(shares_RE: NDArray[np.float64], rows: int) -> IntArray:
    """Whole numbers close to the shares, `rows` for each rank."""
    ends_RE = np.rint(shares_RE.cumsum(1) * rows).astype(np.int64)
    ends_RE[:, -1] = rows
    return np.diff(ends_RE, axis=1, prepend=0)
