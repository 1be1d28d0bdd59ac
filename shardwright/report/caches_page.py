"""The part of a run's page about tables with caches of rows in front of slower memory, from the recorded windows
(caches.jsonl)."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardwright.planner.tables import cache_hits
from shardwright.planner.tables.sharding import make_table_loads
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure, axis, figure_layout, trace
from shardwright.report.run_record import RunRecord
from shardwright.report.units import bytes_text
from shardwright.spec.cache_record import CacheWindow
from shardwright.spec.plan import Plan, TablePlan
from shardwright.spec.row_cache import DISK, HOST, SERVERS

# By tier: where the rows without a line are, and where the lines are.
PLACES = MappingProxyType(
    {
        DISK: ("on disk", "in memory"),
        SERVERS: ("on table servers", "in memory"),
        HOST: ("in host memory", "in GPU memory"),
    }
)
UNKNOWN_PLACE = ("in slower memory", "in faster memory")  # without a plan


@dataclass(frozen=True, slots=True)
class CachesSection:
    """What the page shows; `tables` has a row by table. `note`: what its columns mean."""

    title: str
    text: str
    note: str
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
    slow, fast = _places(run.plan, names)
    text = (
        f"{len(names)} {'table has' if len(names) == 1 else 'tables have'} rows {slow}, and lines of a cache {fast} "
        "for those used most. Hits of rows count a row once per batch, hits of lookups every id; batches of "
        "evaluations count too."
    )
    if conflicts:
        text += f" For {conflicts:,} rows all lines of their set were in use, so they were put into another one."
    note = "Over the second half of the recorded windows; written and read are means of a step, bytes of rows " + slow
    if any(window.lookups for window in run.caches):
        note += "; ids are counted in one batch of 16"
    loads = make_table_loads(run.workload) if run.workload else ()
    if any(load.table.name in names and not load.popularity for load in loads):
        note += ". Where the popularity of rows is not known, hits are predicted as if all rows were equally popular"
    figure = _hits_figure(run.caches, slow, fast)
    return CachesSection(f"Tables with rows {slow}", text, f"{note}.", figure, _table_grid(run, last))


def _places(plan: Plan | None, names: Sequence[str]) -> tuple[str, str]:
    """Where rows without a line are, and where lines are; a plan has one such pair of tiers."""
    tiers = {table.placement.tiers[-1].tier for table in plan.tables if table.table in names} if plan else set[str]()
    return PLACES.get(tiers.pop(), UNKNOWN_PLACE) if len(tiers) == 1 else UNKNOWN_PLACE


def hits(windows: Sequence[CacheWindow]) -> float:
    """The share of distinct rows that were in the cache."""
    rows = sum(window.rows for window in windows)
    return 1 - sum(window.missing for window in windows) / rows if rows else 0.0


def lookup_hits(windows: Sequence[CacheWindow]) -> float | None:
    """The share of ids whose row was in the cache; None if ids were not counted."""
    lookups = sum(window.lookups for window in windows)
    return 1 - sum(window.missing_lookups for window in windows) / lookups if lookups else None


def _hits_figure(windows: Sequence[CacheWindow], slow: str, fast: str) -> Figure:
    steps = sorted({window.step for window in windows})
    by_step = [[window for window in windows if window.step == step] for step in steps]
    data = [
        trace("rows", steps, [100 * hits(own) for own in by_step], color="var(--hue0)"),
        trace(
            "rows, lowest of a table",
            steps,
            [100 * min(hits([each]) for each in own) for own in by_step],
            color="var(--hue1)",
        ),
    ]
    by_lookup = [(step, 100 * share) for step, own in zip(steps, by_step, strict=True) if (share := lookup_hits(own))]
    if by_lookup:
        data.append(trace("lookups", *zip(*by_lookup, strict=True), color="var(--hue2)"))
    caption = (
        f"Share of the distinct rows of batches, and of their ids, found {fast}; over all tables with rows {slow}."
    )
    layout = figure_layout(
        xaxis=axis(title={"text": "step"}, tickformat=",d"),
        yaxis=axis(title={"text": "hits, %"}, hoverformat=".1f"),
        hovermode="x unified",
        showlegend=True,
    )
    return Figure("cache_hits", "Hits of caches", caption, 300, tuple(data), layout)


def _table_grid(run: RunRecord, windows: dict[str, list[CacheWindow]]) -> Grid:
    loads = {load.table.name: load for load in make_table_loads(run.workload)} if run.workload else {}
    plans = {table.table: table for table in run.plan.tables} if run.plan else {}
    batch_size = run.workload.batch_size if run.workload else 0
    rows: list[tuple[str, ...]] = []
    for name, own in windows.items():
        num_steps = max(1, sum(window.steps for window in own))
        lines, load = _num_lines(plans[name]) if name in plans else 0, loads.get(name)
        num_ids = batch_size * load.ids_per_sample if load else 0.0
        expected = cache_hits.found_share(load, lines, num_ids) if load and lines else None
        expected_lookups = cache_hits.found_lookups_share(load, lines, num_ids) if load and lines else None
        rows.append(
            (
                name,
                f"{load.table.rows:,}" if load else "",
                f"{lines:,}" if lines else "",
                *map(_percent, (hits(own), expected, lookup_hits(own), expected_lookups)),
                f"{sum(window.written_back for window in own) / num_steps:,.0f}",
                bytes_text(sum(window.bytes_read for window in own) / num_steps),
                bytes_text(sum(window.bytes_written for window in own) / num_steps),
            )
        )
    columns = (
        *("table", "rows", "lines", "hits, % of rows", "predicted", "hits, % of lookups", "predicted"),
        *("rows written back", "read", "written"),
    )
    return Grid(columns, tuple(rows))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _num_lines(table: TablePlan) -> int:
    """Lines of all row ranges."""
    lines = table.placement.tiers[0].rows or 0
    return sum(min(lines, rect.rows[1] - rect.rows[0]) for rect in table.rects if not rect.cols[0])
