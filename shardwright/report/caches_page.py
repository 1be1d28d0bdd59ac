"""The part of a run's page about tables with rows on disk, from the recorded windows (caches.jsonl)."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner.tables import cache_hits
from shardwright.planner.tables.sharding import TableLoad, make_table_loads
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure, axis, figure_layout, trace
from shardwright.report.run_record import RunRecord
from shardwright.report.units import bytes_text
from shardwright.spec.cache_record import CacheWindow
from shardwright.spec.plan import TablePlan


@dataclass(frozen=True, slots=True)
class CachesSection:
    """What the page shows; `tables` has a row by table."""

    text: str
    figure: Figure
    tables: Grid


def describe_caches(run: RunRecord) -> CachesSection | None:
    """None for a run whose tables are all in memory."""
    if not run.caches:
        return None
    names = list(dict.fromkeys(window.table for window in run.caches))
    windows = {name: [window for window in run.caches if window.table == name] for name in names}
    last = {name: own[len(own) // 2 :] for name, own in windows.items()}
    conflicts = sum(window.conflicts for window in run.caches)
    text = (
        f"{len(names)} {'table has' if len(names) == 1 else 'tables have'} rows on disk, and lines of a cache in "
        "memory for those used most. A row counts once per batch; batches of evaluations count too."
    )
    if conflicts:
        text += f" For {conflicts:,} rows all lines of their set were in use, so they were put into another one."
    return CachesSection(text, _hits_figure(run.caches), _table_grid(run, last))


def hits(windows: Sequence[CacheWindow]) -> float:
    """The share of distinct rows that were in the cache."""
    rows = sum(window.rows for window in windows)
    return 1 - sum(window.missing for window in windows) / rows if rows else 0.0


def _hits_figure(windows: Sequence[CacheWindow]) -> Figure:
    steps = sorted({window.step for window in windows})
    by_step = [[window for window in windows if window.step == step] for step in steps]
    data = (
        trace("mean", steps, [100 * hits(own) for own in by_step], color="var(--hue0)"),
        trace(
            "lowest of a table",
            steps,
            [100 * min(hits([each]) for each in own) for own in by_step],
            color="var(--hue1)",
        ),
    )
    caption = "Share of the distinct rows of batches that were in memory, over all tables with rows on disk."
    layout = figure_layout(
        xaxis=axis(title={"text": "step"}, tickformat=",d"),
        yaxis=axis(title={"text": "hits, %"}, hoverformat=".1f"),
        hovermode="x unified",
        showlegend=True,
    )
    return Figure("cache_hits", "Hits of caches", caption, 300, data, layout)


def _table_grid(run: RunRecord, windows: dict[str, list[CacheWindow]]) -> Grid:
    loads = {load.table.name: load for load in make_table_loads(run.workload)} if run.workload else {}
    plans = {table.table: table for table in run.plan.tables} if run.plan else {}
    batch_size = run.workload.batch_size if run.workload else 0
    rows: list[tuple[str, ...]] = []
    for name, own in windows.items():
        num_steps = max(1, sum(window.steps for window in own))
        lines = _num_lines(plans[name]) if name in plans else 0
        rows.append(
            (
                name,
                f"{loads[name].table.rows:,}" if name in loads else "",
                f"{lines:,}" if lines else "",
                f"{100 * hits(own):.1f}",
                f"{100 * _expected_hits(loads[name], lines, batch_size):.1f}" if name in loads and lines else "",
                f"{sum(window.written_back for window in own) / num_steps:,.0f}",
                bytes_text(sum(window.bytes_read for window in own) / num_steps),
                bytes_text(sum(window.bytes_written for window in own) / num_steps),
            )
        )
    columns = ("table", "rows", "lines", "hits, %", "predicted, %", "rows written back", "read", "written")
    return Grid(columns, tuple(rows))


def _num_lines(table: TablePlan) -> int:
    """Lines of all row ranges."""
    lines = table.placement.tiers[0].rows or 0
    return sum(min(lines, rect.rows[1] - rect.rows[0]) for rect in table.rects if not rect.cols[0])


def _expected_hits(load: TableLoad, lines: int, batch_size: int) -> float:
    return cache_hits.found_share(load, lines, batch_size * load.ids_per_sample)
