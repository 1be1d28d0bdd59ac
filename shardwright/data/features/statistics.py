"""Statistics of a split of a click log: counts of each column's values, moments of its numbers.

The counters have a memory limit: counts are exact while all distinct values of a column fit, else too large by at most
`ValueCounts.max_error` (kernels/hashing.LossyCounter). They are computed once per split and stored in the cache.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardwright.kernels.hashing import LossyCounter
from shardwright.spec.workload import FeatureStatistics

COUNTER_BYTES_PER_VALUE = 64  # upper bound on a counter's memory per distinct value
REFERENCE_BATCH_SIZE = 2048  # batch size of `FeatureStatistics.distinct_share`
DISTINCT_BATCH_SIZES = (32, 256, 2048, 16_384, 131_072)  # global and local batch sizes of `FeatureStatistics.distinct`


@dataclass(frozen=True)
class ValueCounts:
    """The values of one column: codes and counts, most frequent first."""

    codes: np.ndarray  # (C,) uint64
    counts: np.ndarray  # (C,) int64
    num_distinct: int
    max_error: int  # by how much a count may be too large
    total: int  # number of values that are not missing
    rows: int

    @property
    def missing(self) -> float:
        """Share of rows without a value; for list columns a lower bound."""
        return max(0.0, 1 - self.total / self.rows)

    def share_of_hottest(self, num: int) -> float:
        """Share of all values that the `num` most frequent distinct values account for."""
        return float(self.counts[:num].sum() / self.total) if self.total else 0.0

    def distinct_share(self, batch_size: int) -> float:
        """Expected distinct values / values, in a batch of `batch_size` rows drawn at random."""
        values = batch_size * self.total / self.rows
        if not values:
            return 1.0
        shares = self.counts / self.total
        num_counted = -np.expm1(values * np.log1p(-np.minimum(shares, 1 - 1e-12))).sum()
        rest = max(0.0, 1 - shares.sum()) * values  # values dropped from the counts are rare: all distinct
        return min(1.0, float(num_counted + rest) / values)

    def exponent(self) -> float | None:
        """Zipf exponent s of count ~ rank^-s, fitted over ranks 2 to 1,000; None if there are too few values."""
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
    """Mean and standard deviation of a numeric column, over the values that are not missing."""

    mean: float
    deviation: float
    missing: float  # share of rows without a number


@dataclass(frozen=True)
class SplitStatistics:
    """Statistics of one split of a click log, by column."""

    rows: int
    base_rate: float  # mean of the first label
    counts: Mapping[str, ValueCounts]
    plain: Mapping[str, Moments]
    logarithmic: Mapping[str, Moments]  # of log1p(|x|) with the sign of x
    labels: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # by name: rows that have it, and its mean

    @property
    def warning(self) -> str:
        """Why nothing can be learned from these rows; empty if something can."""
        if len(self.labels) < 2:
            if self.rows and self.base_rate in (0, 1):
                return (
                    f"all {self.rows:,} training labels are {self.base_rate:.0f}: nothing can be learned, and NE and "
                    "AUC are undefined; check the label column, and `positive` in the schema"
                )
            return ""
        for name, (known, rate) in self.labels.items():
            if self.rows and rate in (0, 1):
                return (
                    f'label "{name}": all {known:,} that the {self.rows:,} training rows have are {rate:.0f}: nothing '
                    "can be learned, and NE and AUC are undefined; check its column, and `positives` in the schema"
                )
        return ""


ColumnChunk = Mapping[str, np.ndarray]  # by column: the values of some rows, or all codes of a list column


def signed_log1p(numbers: np.ndarray) -> np.ndarray:
    return np.sign(numbers) * np.log1p(np.abs(numbers))


def collect_statistics(
    chunks: Iterator[ColumnChunk],
    labels: Mapping[str, str],
    categories: tuple[str, ...],
    numbers: tuple[str, ...],
    memory: int,
) -> SplitStatistics:
    """Collect the statistics of all chunks; counters take about `memory` bytes. `labels`: their columns, by name."""
    max_values = max(1024, memory // COUNTER_BYTES_PER_VALUE // max(1, len(categories)))
    counters = {name: LossyCounter(max_values) for name in categories}
    totals = dict.fromkeys(categories, 0)
    sums = {name: np.zeros((2, 3)) for name in numbers}  # plain and logarithmic: count, sum, sum of squares
    rows, label_sums = 0, {name: np.zeros(2) for name in labels}  # rows that have it, sum
    for chunk in chunks:
        for name, column in labels.items():
            known = chunk[column][~np.isnan(chunk[column])]
            label_sums[name] += len(known), float(known.sum())
        rows += len(chunk[next(iter(labels.values()))])
        for name in categories:
            counters[name].add(chunk[name])
            totals[name] += int(np.count_nonzero(chunk[name]))
        for name in numbers:
            valid = chunk[name][~np.isnan(chunk[name])].astype(np.float64)
            for row, values in enumerate((valid, signed_log1p(valid))):
                sums[name][row] += (len(values), values.sum(), (values**2).sum())
    counts = {
        name: ValueCounts(*counter.most_common(), counter.num_distinct, counter.max_error, totals[name], rows)
        for name, counter in counters.items()
    }
    plain, logarithmic = ({name: _moments(sums[name][row], rows) for name in numbers} for row in range(2))
    rates = {name: (int(known), float(total / known) if known else 0.0) for name, (known, total) in label_sums.items()}
    return SplitStatistics(rows, next(iter(rates.values()))[1], counts, plain, logarithmic, rates)


def load_or_compute(path: Path, compute: Callable[[], SplitStatistics]) -> SplitStatistics:
    """Load statistics from a file; if it does not exist, compute and save them first."""
    if not path.exists():
        _save(compute(), path)
    return _load(path)


def _moments(sums: np.ndarray, rows: int) -> Moments:
    count, total, squares = sums
    if not count:
        return Moments(0.0, 1.0, 1.0)
    mean = total / count
    deviation = np.sqrt(max(0.0, squares / count - mean**2))
    is_constant = deviation <= 1e-6 * max(1.0, abs(mean))  # rounding error of the difference of squares
    return Moments(float(mean), 1.0 if is_constant else float(deviation), float(1 - count / rows))


def _to_arrays(split: SplitStatistics) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {"rows": np.array([split.rows]), "base_rate": np.array([split.base_rate])}
    for name, counts in split.counts.items():
        arrays[f"codes/{name}"], arrays[f"counts/{name}"] = counts.codes, counts.counts
        arrays[f"about/{name}"] = np.array([counts.num_distinct, counts.max_error, counts.total])
    arrays |= {f"label/{name}": np.array(values) for name, values in split.labels.items()}
    for kind in ("plain", "logarithmic"):
        for name, moments in getattr(split, kind).items():
            arrays[f"{kind}/{name}"] = np.array([moments.mean, moments.deviation, moments.missing])
    return arrays


def _save(split: SplitStatistics, path: Path) -> None:
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        np.savez(file, **_to_arrays(split))  # pyright: ignore[reportArgumentType]
    Path(draft).replace(path)


def _load(path: Path) -> SplitStatistics:
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    rows = int(arrays["rows"][0])
    keys = {kind: [key for key in arrays if key.startswith(kind)] for kind in ("codes/", "plain/", "logarithmic/")}
    counts = {}
    for name in (key.removeprefix("codes/") for key in keys["codes/"]):
        distinct, error, total = (int(number) for number in arrays[f"about/{name}"])
        counts[name] = ValueCounts(arrays[f"codes/{name}"], arrays[f"counts/{name}"], distinct, error, total, rows)
    plain, logarithmic = (
        {key.partition("/")[2]: Moments(*(float(number) for number in arrays[key])) for key in keys[kind]}
        for kind in ("plain/", "logarithmic/")
    )
    labels = {
        key.partition("/")[2]: (int(known), float(rate))
        for key, (known, rate) in ((key, array) for key, array in arrays.items() if key.startswith("label/"))
    }
    return SplitStatistics(rows, float(arrays["base_rate"][0]), counts, plain, logarithmic, labels)
