"""Routing for benchmarks/moe.py: rows of each expert by rank, recorded or generated, for a draw's number.

Draws are like iterations: those of "drift", "trace", W6 and W7 depend on the number, the others differ by noise. W0 to
W7 isolate what those of Megatron-LM's benchmark of token imbalance isolate (pull request 7488), with numbers of ours.

Shape legend: R ranks, E experts.
"""

from collections.abc import Callable
from functools import cache
from io import BytesIO
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Shares = NDArray[np.float64]
SEED = 5
HOT_SHARE = 0.6  # of all rows, that the hot experts of W1, W2, W3, W6 and W7 get
DRIFT_PERIOD, DRIFT_SPREAD = 40, 1.2  # draws until popularity returns; its logarithm's amplitude
ROTATION = 3  # draws until W6's hot rank is the next
BURST_PERIOD, BURST = 5, 1  # W7: this draw of each period is the burst


@cache
def read_trace(path: str) -> IntArray:
    """(iterations, ranks, layers, micro-batches, experts) of a recorded run: expert_counts_u16.npy.zst."""
    import pyarrow

    with pyarrow.input_stream(path, compression="zstd") as stream:
        return np.load(BytesIO(stream.read())).astype(np.int64)


def fold_trace(trace: IntArray, number: int, num_ranks: int, num_experts: int, rows: int, *, lag: int = 0) -> IntArray:
    """A drawn iteration and layer after the first tenth of the run, with as many rows on each rank.

    Recorded experts are folded in order: several become one. `lag`: the same layer, so many recorded iterations before.
    """
    draw = np.random.default_rng(SEED + number)
    iteration, layer = draw.integers(len(trace) // 10, len(trace)), draw.integers(trace.shape[2])
    counts_RE = trace[iteration - lag, :num_ranks, layer].sum(1)
    folded_RE = counts_RE.reshape(num_ranks, num_experts, -1).sum(2)
    return scale_rows(folded_RE, rows)


def zipf_routing(number: int, num_ranks: int, num_experts: int, rows: int, exponent: float = 1.2) -> IntArray:
    """Popularity by a Zipf law in a drawn order of the experts; ranks differ by a tenth."""
    draw = np.random.default_rng(SEED + number)
    shares_E = np.arange(1, num_experts + 1) ** -exponent
    shares_RE = draw.permutation(shares_E) * draw.uniform(0.9, 1.1, (num_ranks, num_experts))
    return scale_rows(shares_RE, rows)


def even_routing(num_ranks: int, num_experts: int, rows: int) -> IntArray:
    return scale_rows(np.ones((num_ranks, num_experts)), rows)


def drifting_routing(number: int, num_ranks: int, num_experts: int, rows: int) -> IntArray:
    """Each expert's popularity rises and falls slowly, so that their order changes."""
    phases_E = np.random.default_rng(SEED).uniform(0, 2 * np.pi, num_experts)
    shares_E = np.exp(DRIFT_SPREAD * np.cos(2 * np.pi * number / DRIFT_PERIOD + phases_E))
    return scale_rows(_with_noise(shares_E, number, num_ranks), rows)


def hot_set(number: int, num_ranks: int, num_experts: int, rows: int) -> IntArray:
    """W1: as many neighbouring experts as a rank has, of two ranks, get most rows."""
    first = num_experts // num_ranks // 2
    return _hot(range(first, first + num_experts // num_ranks), number, num_ranks, num_experts, rows)


def hot_rank(number: int, num_ranks: int, num_experts: int, rows: int, rank: int = 0) -> IntArray:
    """W2: the experts of one rank get most rows."""
    size = num_experts // num_ranks
    return _hot(range(rank * size, (rank + 1) * size), number, num_ranks, num_experts, rows)


def spread_hot(number: int, num_ranks: int, num_experts: int, rows: int) -> IntArray:
    """W3: as many rows go to hot experts, but these are one on each rank."""
    return _hot(range(0, num_experts, num_experts // num_ranks), number, num_ranks, num_experts, rows)


def source_ragged(number: int, num_ranks: int, num_experts: int, rows: int) -> IntArray:
    """W4: from half to one and a half times as many rows on a rank; for every expert as many."""
    wanted_R = np.random.default_rng(SEED + number).permutation(np.linspace(0.5, 1.5, num_ranks)) * rows
    pairs_R = np.diff(np.rint(wanted_R.cumsum() / 2), prepend=0).astype(np.int64)  # a token has two rows
    return np.concatenate([even_routing(1, num_experts, 2 * pairs) for pairs in pairs_R.tolist()])


def zero_expert_rank(number: int, num_ranks: int, num_experts: int, rows: int) -> IntArray:
    """W5: the second half of the experts, and so of the ranks, get no rows."""
    shares_E = (np.arange(num_experts) < (num_experts + 1) // 2).astype(np.float64)
    return scale_rows(_with_noise(shares_E, number, num_ranks), rows)


def rotating(number: int, num_ranks: int, num_experts: int, rows: int) -> IntArray:
    """W6: the hot rank is the next one every few draws."""
    return hot_rank(number, num_ranks, num_experts, rows, number // ROTATION % num_ranks)


def burst(number: int, num_ranks: int, num_experts: int, rows: int) -> IntArray:
    """W7: balanced, with one draw of each period as W2."""
    if number % BURST_PERIOD == BURST:
        return hot_rank(number, num_ranks, num_experts, rows)
    return even_routing(num_ranks, num_experts, rows)


GENERATORS: MappingProxyType[str, Callable[[int, int, int, int], IntArray]] = MappingProxyType(
    {
        "zipf": zipf_routing,
        "drift": drifting_routing,
        "W0": lambda _, num_ranks, num_experts, rows: even_routing(num_ranks, num_experts, rows),
        "W1": hot_set,
        "W2": hot_rank,
        "W3": spread_hot,
        "W4": source_ragged,
        "W5": zero_expert_rank,
        "W6": rotating,
        "W7": burst,
    }
)


def scale_rows(shares_RE: NDArray[np.float64] | IntArray, rows: int) -> IntArray:
    """Whole numbers close to the shares, `rows` for each rank."""
    ends_RE = np.rint((shares_RE / shares_RE.sum(1, keepdims=True)).cumsum(1) * rows).astype(np.int64)
    ends_RE[:, -1] = rows
    return np.diff(ends_RE, axis=1, prepend=0)


def _hot(experts: range, number: int, num_ranks: int, num_experts: int, rows: int) -> IntArray:
    shares_E = np.full(num_experts, (1 - HOT_SHARE) / (num_experts - len(experts)))
    shares_E[experts] = HOT_SHARE / len(experts)
    return scale_rows(_with_noise(shares_E, number, num_ranks), rows)


def _with_noise(shares_E: Shares, number: int, num_ranks: int) -> Shares:
    """The shares of each rank, which differ by a twentieth."""
    draw = np.random.default_rng(SEED + number)
    return shares_E * draw.uniform(0.95, 1.05, (num_ranks, len(shares_E)))
