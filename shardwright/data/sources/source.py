"""Source protocol (samples by index) and sample order (which samples form batch k), without torch.

Worker processes import this file, worker.py and their source. None of them may import torch, which would cost each
worker 3 s and 300 MB. Random numbers are counter-based hashes, so nothing in this module has state.

Shape legend: F features, B samples, N values, D numeric features, S keys.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from shardwright.data.sources.dealing import DealCost, deal_by_cost, sample_costs
from shardwright.errors import UserError

GAMMA = np.uint64(0x9E3779B97F4A7C15)
SHUFFLE_WINDOW = 64  # batches per shuffle window of an endless stream
FEISTEL_ROUNDS = 4
MAX_PREFETCH = 64  # requests must fit a pipe's buffer: a worker that blocks on sending an answer reads no requests

Position = tuple[int, int]  # epoch, batch
Pause = Callable[[float], None]  # sleeps for that many seconds; raises if the result is no longer needed


@dataclass(frozen=True, slots=True)
class NumpyBatch:
    """Numpy counterpart of `Batch` in worker processes: F features of B samples, values feature-major."""

    features: tuple[str, ...]
    values: np.ndarray  # (N,) int64
    lengths: np.ndarray  # (F, B) int64
    dense: np.ndarray | None  # (B, D) float32
    labels: dict[str, np.ndarray]  # each (B,)
    weights: np.ndarray | None = None  # (B,) float32, per sample

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, each contiguous, for transfer between processes."""
        arrays = {"lengths": self.lengths, "values": self.values, "dense": self.dense, "weights": self.weights}
        arrays |= {f"label {name}": label for name, label in self.labels.items()}
        return {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}

    @classmethod
    def from_arrays(cls, features: Sequence[str], arrays: Mapping[str, np.ndarray]) -> "NumpyBatch":
        """Inverse of `arrays`."""
        labels = {name.removeprefix("label "): array for name, array in arrays.items() if name.startswith("label ")}
        dense, weights = arrays.get("dense"), arrays.get("weights")
        return cls(tuple(features), arrays["values"], arrays["lengths"], dense, labels, weights)


class Source(Protocol):
    """Samples by index: an immutable, picklable value whose repr identifies the samples.

    Optional members: a growing source has `wait(num, pause)`, which returns once samples 0 to num - 1 exist and calls
    pause(seconds) between polls. `in_order = True` marks a source that cannot be shuffled. If the repr does not
    identify the samples, `history_digest(num)` returns a plain value that does, and `verify(value)` raises an error if
    samples 0 to num - 1 differ from those it was computed for. `span` limits the shuffle window of a finite source.
    `partitions` of a finite source: its samples are sorted by partition, and batches have equal shares of each.
    `history_lengths(indices)` returns the number of ids of each sample's histories, to deal samples to ranks by them.
    """

    @property
    def size(self) -> int | None:
        """Number of samples; None: endless."""
        ...

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """Read the samples at `indices` (int64, may be empty): a pure function of the indices."""
        ...


@dataclass(frozen=True, slots=True)
class Subset:
    """Samples lo to hi - 1 of another source, as a finite source."""

    source: Source
    lo: int
    hi: int

    def __post_init__(self) -> None:
        size = self.source.size
        if not 0 <= self.lo < self.hi or (size is not None and self.hi > size):
            limit = "" if size is None else f" <= {size}"
            raise UserError(f"window {self.lo}..{self.hi} of {self.source!r}: wanted 0 <= lo < hi{limit}")

    @property
    def size(self) -> int:
        return self.hi - self.lo

    def take(self, indices: np.ndarray) -> NumpyBatch:
        return self.source.take(indices + self.lo)


def splitmix64(state: np.ndarray) -> np.ndarray:
    """Output function of splitmix64 (Steele, Lea, Flood 2014): a pseudorandom bijection of 64-bit words."""
    state = (state ^ (state >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> 27)) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> 31)


def stream_keys(*words: int, num: int) -> np.ndarray:
    """`num` independent 64-bit keys of the random stream named by `words`."""
    key = np.zeros(1, np.uint64)
    for word in words:
        key = splitmix64((key ^ np.uint64(word & 0xFFFFFFFFFFFFFFFF)) + GAMMA)
    return splitmix64((key ^ np.arange(num, dtype=np.uint64)) + GAMMA)


def draw_bits(keys_S: np.ndarray, counters_B: np.ndarray) -> np.ndarray:
    """Draw 64 random bits (S, B) per key and counter: a pure function of the two."""
    return splitmix64(keys_S[:, None] + counters_B.astype(np.uint64) * GAMMA)


def permute_positions(positions: np.ndarray, size: int, *words: int) -> np.ndarray:
    """Map `positions` by the random permutation of range(size) named by `words`, without O(size) memory.

    A Feistel network on a nearly square grid that contains the range: each half-round adds to one coordinate a hash
    of the other, which is a bijection. Results >= size are permuted again until they are below it (cycle walking).
    """
    num_cols = math.isqrt(size - 1) + 1
    num_rows = -(-size // num_cols)
    round_keys = stream_keys(*words, num=2 * FEISTEL_ROUNDS).reshape(FEISTEL_ROUNDS, 2, 1)
    result, is_outside = positions.astype(np.uint64), np.ones(len(positions), bool)
    while is_outside.any():
        row, col = np.divmod(result[is_outside], np.uint64(num_cols))
        for row_key, col_key in round_keys:
            row = (row + draw_bits(row_key, col)[0] % num_rows) % num_rows
            col = (col + draw_bits(col_key, row)[0] % num_cols) % num_cols
        result[is_outside] = row * num_cols + col
        is_outside = result >= size
    return result.astype(np.int64)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Which samples form batch k: defined for the global batch, then sliced contiguously by rank.

    With `deal`, a rank has as many of its samples, but those that `deal_by_cost` gives it.
    """

    size: int | None
    batch_size: int
    seed: int
    shuffle: bool
    shard: tuple[int, int]  # rank, number of ranks
    span: int | None = None  # samples per shuffle window of a finite source; None: all samples
    partitions: int = 1
    deal: DealCost | None = None

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch, including a partial last batch; None for an endless source."""
        return None if self.size is None else -(-self.size // self.batch_size)

    def next_position(self, epoch: int, batch: int) -> tuple[int, int]:
        """(epoch, batch) of the next batch."""
        return (epoch + 1, 0) if batch + 1 == self.num_batches else (epoch, batch + 1)

    def num_samples(self, batch: int) -> int:
        """Number of samples of a global batch; the last batch of an epoch may be smaller."""
        return self.batch_size if self.size is None else min(self.batch_size, self.size - batch * self.batch_size)

    def bounds(self, batch: int) -> tuple[int, int]:
        """The places in a global batch of this rank's first sample, and after its last."""
        (rank, num_ranks), num = self.shard, self.num_samples(batch)
        return num * rank // num_ranks, num * (rank + 1) // num_ranks

    def start(self, batch: int) -> int | None:
        """The place of this rank's first sample in a global batch; None if its samples are not consecutive there."""
        return self.bounds(batch)[0] if self.deal is None else None

    def indices(self, epoch: int, batch: int) -> np.ndarray:
        """Indices of this rank's samples of a global batch; may be empty if it is smaller than the world size."""
        lo = batch * self.batch_size
        positions = lo + np.arange(*self.bounds(batch), dtype=np.int64)
        if self.partitions > 1 and self.size is not None:
            return self._partitioned(positions, self.size, epoch, batch)
        if not self.shuffle:
            return positions
        if self.size is not None and self.span is None:
            return permute_positions(positions, self.size, self.seed, epoch)
        batches_per_window = SHUFFLE_WINDOW if self.span is None else max(1, self.span // self.batch_size)
        window, span = batch // batches_per_window, batches_per_window * self.batch_size
        start = window * span
        end = start + span if self.size is None else min(start + span, self.size)
        words = (window,) if self.size is None else (epoch, window)
        return start + permute_positions(positions - start, end - start, self.seed, *words)

    def _partitioned(self, positions: np.ndarray, size: int, epoch: int, batch: int) -> np.ndarray:
        """Indices at positions of a batch, whose slice p has samples of range p.

        Range p has as many samples as the slices p of all batches, so that an epoch has each sample once.
        """
        cuts, full_cuts, last_cuts = (
            num * np.arange(self.partitions + 1) // self.partitions
            for num in (self.num_samples(batch), self.batch_size, size % self.batch_size)
        )
        starts = size // self.batch_size * full_cuts + last_cuts  # of the ranges
        offsets = positions - batch * self.batch_size
        slices = np.searchsorted(cuts, offsets, side="right") - 1
        indices = positions.copy()
        for number in np.unique(slices).tolist():
            is_own = slices == number
            places = batch * (full_cuts[number + 1] - full_cuts[number]) + offsets[is_own] - cuts[number]
            if self.shuffle:
                places = permute_positions(places, int(starts[number + 1] - starts[number]), self.seed, epoch, number)
            indices[is_own] = starts[number] + places
        return indices


def make_order(
    source: Source, batch_size: int, seed: int, shuffle: bool, shard: tuple[int, int] = (0, 1)
) -> SampleOrder:
    """Create the sample order of a source; raises UserError if a run on this source could not be resumed."""
    if not 1 <= batch_size < 2**31:
        raise UserError(f"loader: batch_size = {batch_size}; wanted 1 to {2**31 - 1}")
    if not 0 <= shard[0] < shard[1]:
        raise UserError(f"loader: shard = {shard}; wanted (rank, number of ranks), 0 <= rank < number")
    if source.size == 0:
        raise UserError(f"loader: {source!r} has no samples")
    if re.search(r" at 0x[0-9a-f]+>", repr(source)):
        remedy = "make it a frozen dataclass, or give it a __repr__ that identifies its samples"
        raise UserError(f"loader: the repr of the source is {source!r}, so no run on it could be resumed; {remedy}")
    if shuffle and getattr(source, "in_order", False):
        problem = f"{type(source).__name__} cannot be shuffled: its samples come in order of arrival"
        raise UserError(f"loader: {problem}; set data.shuffle=false (in Python shuffle=False)")
    span, partitions = getattr(source, "span", None), getattr(source, "partitions", 1)
    return SampleOrder(source.size, batch_size, seed, shuffle, shard, span, partitions)


def with_deal(source: Source, order: SampleOrder, cost: DealCost) -> SampleOrder:
    """The order with samples dealt to ranks by the cost of their histories."""
    if not hasattr(source, "history_lengths") or not len(getattr(source, "histories", ("",))):
        raise UserError(
            f"data.deal=length, and samples of {type(source).__name__} have no histories; set data.history, declare "
            "histories in the schema, or drop data.deal"
        )
    return replace(order, deal=cost)


def read_batch(source: Source, order: SampleOrder, position: Position, pause: Pause = time.sleep) -> NumpyBatch:
    """Read this rank's samples of a global batch; a growing source waits for the entire global batch."""
    wait = getattr(source, "wait", None)
    if wait is not None:
        wait(position[1] * order.batch_size + order.num_samples(position[1]), pause)
    if order.deal is None:
        return source.take(order.indices(*position))
    rank, num_ranks = order.shard
    indices = replace(order, shard=(0, 1)).indices(*position)
    lengths: np.ndarray = source.history_lengths(indices)  # pyright: ignore[reportAttributeAccessIssue]
    return source.take(indices[deal_by_cost(sample_costs(lengths, order.deal), num_ranks)[rank]])


def order_identity(source: Source, order: SampleOrder) -> dict[str, Any]:
    """All values that the samples of global batch k depend on, and with `deal` those that their ranks do."""
    identity: dict[str, Any] = {} if order.deal is None else {"deal": list(order.deal)}
    return identity | {
        "seed": order.seed,
        "batch_size": order.batch_size,
        "shuffle": order.shuffle,
        "span": order.span,
        "size": order.size,
        "source": repr(source),
    }
