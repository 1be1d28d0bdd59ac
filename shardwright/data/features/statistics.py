"""What the training part of a log says of itself: how often each value occurs, and the spread of its numbers.

Counts are bounded in memory: exact while the distinct values of a column have room, beyond that too large by at most
a stated error (kernels/columns.Counter). They are computed once for a part of a cache and kept beside it.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwright.kernels.hashing import LossyCounter
from shardwright.spec.workload import FeatureStatistics

COUNTER_BYTES_PER_VALUE = 64  # of a counter, at most, for each distinct value it counts
REFERENCE_BATCH_SIZE = 2048  # that the share of distinct ids is told for
DISTINCT_BATCH_SIZES = (
    32,
    256,
    2048,
    16_384,
    131_072,
)  # of batches and of ranks' parts of them, that it is told for besides


@dataclass(frozen=True)
class ValueCounts:
    """The values of one column: codes and counts, most frequent first."""

    codes: np.ndarray  # (C,) uint64
    counts: np.ndarray  # (C,) int64
    num_distinct: int
    max_error: int  # by how much a count may be too large
    total: int  # values, missing ones aside
    rows: int

    @property
    def missing(self) -> float:
        """Share of rows without a value; for lists an estimate from below."""
        return max(0.0, 1 - self.total / self.rows)

    def share_of_hottest(self, num: int) -> float:
        """The share of all values that the `num` most frequent ones make."""
        return float(self.counts[:num].sum() / self.total) if self.total else 0.0

    def distinct_share(self, batch_size: int) -> float:
        """Expected distinct values over values, in a batch of so many rows drawn at random."""
        values = batch_size * self.total / self.rows
        if not values:
            return 1.0
        shares = self.counts / self.total
        counted = -np.expm1(values * np.log1p(-np.minimum(shares, 1 - 1e-12))).sum()
        rest = max(0.0, 1 - shares.sum()) * values  # what was dropped from the counts is rare: all distinct
        return min(1.0, float(counted + rest) / values)

    def exponent(self) -> float | None:
        """The slope s of count ~ rank^-s, fitted over ranks 2 to 1,000; None with too few values to tell."""
        top = self.counts[1:1000]
        if len(top) < 10:
            return None
        ranks = np.log(np.arange(2, len(top) + 2))
        slope, _ = np.polyfit(ranks, np.log(top), 1, w=1 / np.sqrt(ranks))
        return float(-slope)

    def feature_statistics(self, feature: str, batch_size: int = REFERENCE_BATCH_SIZE) -> FeatureStatistics:
        ranks = np.unique(np.geomspace(1, max(1, len(self.counts)), 48).astype(np.int64))
        popularity = tuple((int(rank), self.share_of_hottest(int(rank))) for rank in ranks)
        share = self.distinct_share(batch_size)
        if not self.total:
            return FeatureStatistics(feature, 0.0, share)
        distinct = tuple((size, self.distinct_share(size)) for size in DISTINCT_BATCH_SIZES)
        return FeatureStatistics(feature, self.total / self.rows, share, popularity, distinct)


@dataclass(frozen=True)
class Moments:
    """Mean and deviation of a column of numbers, missing ones aside."""

    mean: float
    deviation: float
    missing: float


@dataclass(frozen=True)
class SplitStatistics:
    """Of one part of a log."""

    rows: int
    base_rate: float
    counts: Mapping[str, ValueCounts]
    plain: Mapping[str, Moments]
    logarithmic: Mapping[str, Moments]  # of log1p(|x|) with the sign of x

    @property
    def warning(self) -> str:
        """Why training on these rows is useless; empty if it is not."""
        if self.rows and self.base_rate in (0, 1):
            return (
                f"all {self.rows:,} training labels are {self.base_rate:.0f}: nothing can be learned, and NE and AUC "
                "are undefined; check the label column, and `positive` in the schema"
            )
        return ""


ColumnChunk = Mapping[str, np.ndarray]  # per column the values of some rows; of a list all its codes


def signed_log1p(numbers: np.ndarray) -> np.ndarray:
    return np.sign(numbers) * np.log1p(np.abs(numbers))


def collect_statistics(
    chunks: Iterator[ColumnChunk], label: str, categories: tuple[str, ...], numbers: tuple[str, ...], memory: int
) -> SplitStatistics:
    """Of these columns, in about so many bytes."""
    most = max(1024, memory // COUNTER_BYTES_PER_VALUE // max(1, len(categories)))
    counters = {name: LossyCounter(most) for name in categories}
    totals = dict.fromkeys(categories, 0)
    sums = {name: np.zeros((2, 3)) for name in numbers}  # plain and logarithmic: number, sum, sum of squares
    rows, clicks = 0, 0.0
    for chunk in chunks:
        rows += len(chunk[label])
        clicks += float(chunk[label].sum())
        for name in categories:
            counters[name].add(chunk[name])
            totals[name] += int(np.count_nonzero(chunk[name]))
        for name in numbers:
            present = chunk[name][~np.isnan(chunk[name])].astype(np.float64)
            for row, values in enumerate((present, signed_log1p(present))):
                sums[name][row] += (len(values), values.sum(), (values**2).sum())
    counts = {
        name: ValueCounts(*counter.most_common(), counter.num_distinct, counter.max_error, totals[name], rows)
        for name, counter in counters.items()
    }
    plain, logarithmic = ({name: _moments(sums[name][row], rows) for name in numbers} for row in range(2))
    return SplitStatistics(rows, clicks / rows if rows else 0.0, counts, plain, logarithmic)


def load_or_compute(path: Path, compute: Callable[[], SplitStatistics]) -> SplitStatistics:
    """The statistics in a file; made and written first if it is not there."""
    if not path.exists():
        _save(compute(), path)
    return _load(path)


def _moments(sums: np.ndarray, rows: int) -> Moments:
    number, total, squares = sums
    if not number:
        return Moments(0.0, 1.0, 1.0)
    mean = total / number
    deviation = np.sqrt(max(0.0, squares / number - mean**2))
    constant = deviation <= 1e-6 * max(1.0, abs(mean))  # what rounding leaves of a difference of squares
    return Moments(float(mean), 1.0 if constant else float(deviation), float(1 - number / rows))


def _to_arrays(found: SplitStatistics) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {"rows": np.array([found.rows]), "base_rate": np.array([found.base_rate])}
    for name, counts in found.counts.items():
        arrays[f"codes/{name}"], arrays[f"counts/{name}"] = counts.codes, counts.counts
        arrays[f"about/{name}"] = np.array([counts.num_distinct, counts.max_error, counts.total])
    for kind in ("plain", "logarithmic"):
        for name, one in getattr(found, kind).items():
            arrays[f"{kind}/{name}"] = np.array([one.mean, one.deviation, one.missing])
    return arrays


def _save(found: SplitStatistics, path: Path) -> None:
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        np.savez(file, **_to_arrays(found))  # pyright: ignore[reportArgumentType]
    Path(draft).replace(path)


def _load(path: Path) -> SplitStatistics:
    with np.load(path, allow_pickle=False) as arrays:
        held = {name: arrays[name] for name in arrays.files}
    rows = int(held["rows"][0])
    of = {kind: [name for name in held if name.startswith(kind)] for kind in ("codes/", "plain/", "logarithmic/")}
    counts = {}
    for name in (path_.removeprefix("codes/") for path_ in of["codes/"]):
        distinct, error, total = (int(number) for number in held[f"about/{name}"])
        counts[name] = ValueCounts(held[f"codes/{name}"], held[f"counts/{name}"], distinct, error, total, rows)
    plain, logarithmic = (
        {key.partition("/")[2]: Moments(*(float(number) for number in held[key])) for key in of[kind]}
        for kind in ("plain/", "logarithmic/")
    )
    return SplitStatistics(rows, float(held["base_rate"][0]), counts, plain, logarithmic)
