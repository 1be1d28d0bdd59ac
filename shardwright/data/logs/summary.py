"""A look at a log before anything is trained on it: its columns, their skew, and the tables they would want."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwright.data.features.statistics import REFERENCE_BATCH_SIZE, SplitStatistics, ValueCounts
from shardwright.data.logs.convert import ConvertedLog
from shardwright.data.sources.clicks import ClickLog
from shardwright.spec import files
from shardwright.spec.statistics import LogStatistics

BATCH_SIZES = (512, 2048, 8192)
MIN_DIM, MAX_DIM = 4, 128


@dataclass(frozen=True, slots=True)
class ColumnSummary:
    """A category or list of a log."""

    name: str
    num_distinct: int
    is_exact: bool  # else estimated to about 1 %
    missing: float  # share of rows
    values_per_row: float
    top_ten_share: float  # their share of all values
    exponent: float | None  # of the power law that its counts follow
    duplicate_shares: tuple[float, ...]  # share of a batch's values that repeat another, by BATCH_SIZES
    rows: int  # of a table with a row for each value seen `min_count` times
    dim: int


@dataclass(frozen=True, slots=True)
class Inspection:
    converted_log: ConvertedLog
    statistics: SplitStatistics  # of all rows
    columns: tuple[ColumnSummary, ...]


def inspect_log(log: ClickLog) -> Inspection:
    """Of all rows of the log, whatever its split."""
    found = log.training_statistics
    rows = {name: rows for name, rows, _ in log.features}
    columns = tuple(_column(name, counts, rows[name]) for name, counts in found.counts.items())
    return Inspection(files.read(ConvertedLog, Path(log.cache) / "log.json"), found, columns)


def log_statistics(inspection: Inspection) -> LogStatistics:
    """The part of it that a planner reads."""
    features = tuple(counts.feature_statistics(name) for name, counts in inspection.statistics.counts.items())
    statistics = inspection.statistics
    return LogStatistics(
        1, inspection.converted_log.origin, statistics.rows, statistics.base_rate, REFERENCE_BATCH_SIZE, features
    )


def format_inspection(inspection: Inspection) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Tables of text: title, columns, rows."""
    about, statistics = inspection.converted_log, inspection.statistics
    order = "file order" if about.schema.time is None else f'order of "{about.schema.time}"'
    facts = [
        ("rows", f"{about.rows:,}"),
        ("malformed rows", f"{about.malformed:,}"),
        ("base rate", f"{statistics.base_rate:.4f}"),
        ("in time", order),
        *((("warning", statistics.warning),) if statistics.warning else ()),
    ]
    yield about.origin, ("", ""), facts
    names = ("column", "distinct", "missing", "per row", "top 10", "skew")
    repeats = tuple(f"dup@{size}" for size in BATCH_SIZES)
    rows = [_told(column) for column in inspection.columns]
    yield "categories (dup@B: values of a batch of B that repeat another)", (*names, *repeats, "rows", "dim"), rows
    numbers = [
        (name, f"{one.missing:.1%}", f"{one.mean:.4g}", f"{one.deviation:.4g}")
        for name, one in statistics.plain.items()
    ]
    if numbers:
        yield "numbers", ("column", "missing", "mean", "deviation"), numbers


def _column(name: str, counts: ValueCounts, rows: int) -> ColumnSummary:
    return ColumnSummary(
        name,
        counts.num_distinct,
        counts.max_error == 0,
        counts.missing,
        counts.total / counts.rows,
        counts.share_of_hottest(10),
        counts.exponent(),
        tuple(1 - counts.distinct_share(size) for size in BATCH_SIZES),
        rows,
        _dim(rows),
    )


def _dim(rows: int) -> int:
    """A start: six times the fourth root of the rows, to a multiple of four."""
    return min(MAX_DIM, max(MIN_DIM, 4 * round(6 * rows**0.25 / 4)))


def _told(column: ColumnSummary) -> tuple[str, ...]:
    return (
        column.name,
        f"{column.num_distinct:,}" if column.is_exact else f"~{column.num_distinct:,}",
        f"{column.missing:.1%}",
        f"{column.values_per_row:.3g}",
        f"{column.top_ten_share:.1%}",
        "" if column.exponent is None else f"{column.exponent:.2f}",
        *(f"{share:.0%}" for share in column.duplicate_shares),
        f"{column.rows:,}",
        str(column.dim),
    )
