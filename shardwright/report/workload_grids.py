"""Grids of a workload for the report of a run: its tables and its blocks."""

from collections.abc import Sequence
from dataclasses import replace

from shardwright.report.html_template import Grid
from shardwright.report.units import bytes_text, si_text
from shardwright.spec.workload import Workload

ABSENT = "not measured"
HOTTEST_ROWS = 100  # the grid of tables shows the share of ids that read this many hottest rows


def table_grid(workload: Workload) -> Grid:
    rows = []
    for table in workload.tables:
        only_table = replace(workload, tables=(table,))
        names = [feature.name for feature in workload.features if feature.table == table.name]
        ids_per_sample = [entry.ids_per_sample for entry in workload.statistics if entry.feature in names]
        ids = f"{sum(ids_per_sample):.4g}" if names and len(ids_per_sample) == len(names) else ABSENT
        sizes = (
            f"{table.rows:,}",
            str(table.dim),
            table.dtype,
            bytes_text(only_table.table_bytes),
            bytes_text(only_table.state_bytes),
        )
        hottest = [entry.popularity for entry in workload.statistics if entry.feature in names and entry.popularity]
        hot_share = f"{hottest_share(hottest[0], HOTTEST_ROWS):.0%}" if len(hottest) == len(names) == 1 else ABSENT
        rows.append((table.name, ", ".join(names), ids, hot_share, *sizes))
    num_rows = f"{sum(table.rows for table in workload.tables):,}"
    total = ("total", "", "", "", num_rows, "", "", bytes_text(workload.table_bytes), bytes_text(workload.state_bytes))
    columns = (
        "table",
        "features",
        "ids per sample",
        f"ids in {HOTTEST_ROWS} hottest rows",
        "rows",
        "dim",
        "dtype",
        "bytes",
        "optimizer state",
    )
    return Grid(columns, tuple(rows), num_text_columns=2, total=total)


def hottest_share(popularity: Sequence[tuple[int, float]], rows: int) -> float:
    """Share of all ids that read the hottest `rows` rows, or the largest measured number of rows below."""
    return max((share for num, share in popularity if num <= rows), default=0.0)


def block_grid(workload: Workload) -> Grid:
    rows = tuple(
        (
            block.name,
            f"{block.parameters:,}",
            bytes_text(block.parameter_bytes),
            si_text(block.forward_flops),
            si_text(block.backward_flops),
            bytes_text(block.activation_bytes),
        )
        for block in workload.blocks
    )
    total = (
        "total",
        f"{workload.dense_parameters:,}",
        bytes_text(workload.dense_bytes),
        si_text(sum(block.forward_flops for block in workload.blocks)),
        si_text(sum(block.backward_flops for block in workload.blocks)),
        bytes_text(sum(block.activation_bytes for block in workload.blocks)),
    )
    columns = ("block", "parameters", "bytes", "forward FLOPs", "backward FLOPs", "activations")
    return Grid(columns, rows, total=total)
