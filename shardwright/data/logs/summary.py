"""Summary of a click log before training: its columns, their skew, and suggested table sizes."""

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
    """Summary of a category or list column."""

    name: str
    num_distinct: int
    is_exact: bool  # False: `num_distinct` is an estimate to about 1 %
    missing: float  # share of rows without a value
    values_per_row: float
    top_ten_share: float  # share of all values that the ten most frequent distinct values account for
    exponent: float | None  # exponent of the power law fitted to its counts
    duplicate_shares: tuple[float, ...]  # share of a batch's values that are duplicates, for each of BATCH_SIZES
    rows: int  # rows of its table
    dim: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """Result of `inspect_log`."""

    converted_log: ConvertedLog
    statistics: SplitStatistics  # of the training split
    columns: tuple[ColumnSummary, ...]


def inspect_log(log: ClickLog) -> Inspection:
    """Summarize the training split of a log; for all rows, open it with empty validation and test splits."""
    statistics = log.training_statistics
    rows = {name: rows for name, rows, _ in log.features}
    columns = tuple(_summarize_column(name, counts, rows[name]) for name, counts in statistics.counts.items())
    return Inspection(files.read(ConvertedLog, Path(log.cache) / "log.json"), statistics, columns)


def log_statistics(inspection: Inspection) -> LogStatistics:
    """Convert an inspection to the statistics file that the planner reads."""
    features = tuple(counts.feature_statistics(name) for name, counts in inspection.statistics.counts.items())
    statistics = inspection.statistics
    return LogStatistics(
        1, inspection.converted_log.origin, statistics.rows, statistics.base_rate, REFERENCE_BATCH_SIZE, features
    )


def format_inspection(inspection: Inspection) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Yield tables of text: title, column names, rows."""
    log, statistics = inspection.converted_log, inspection.statistics
    order = "file order" if log.schema.time is None else f'order of "{log.schema.time}"'
    facts = [
        ("rows", f"{log.rows:,}"),
        ("malformed rows", f"{log.malformed:,}"),
        *_label_facts(statistics),
        ("in time", order),
        *((("warning", statistics.warning),) if statistics.warning else ()),
    ]
    yield log.origin, ("", ""), facts
    names = ("column", "distinct", "missing", "per row", "top 10", "skew")
    duplicates = tuple(f"dup@{size}" for size in BATCH_SIZES)
    rows = [_format_column(column) for column in inspection.columns]
    yield "categories (dup@B: duplicate values in a batch of B samples)", (*names, *duplicates, "rows", "dim"), rows
    numbers = [
        (name, f"{moments.missing:.1%}", f"{moments.mean:.4g}", f"{moments.deviation:.4g}")
        for name, moments in statistics.plain.items()
    ]
    if numbers:
        yield "numbers", ("column", "missing", "mean", "deviation"), numbers


def _label_facts(statistics: SplitStatistics) -> Iterator[tuple[str, str]]:
    if len(statistics.labels) < 2:
        yield "base rate", f"{statistics.base_rate:.4f}"
        return
    for name, (known, rate) in statistics.labels.items():
        yield f"base rate of {name}", f"{rate:.4f}, of {known / max(1, statistics.rows):.1%} of the rows"


def _summarize_column(name: str, counts: ValueCounts, rows: int) -> ColumnSummary:
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
        _suggest_dim(rows),
    )


def _suggest_dim(rows: int) -> int:
    """Suggested embedding dimension: six times the fourth root of the rows, rounded to a multiple of four."""
    return min(MAX_DIM, max(MIN_DIM, 4 * round(6 * rows**0.25 / 4)))


def _format_column(column: ColumnSummary) -> tuple[str, ...]:
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
