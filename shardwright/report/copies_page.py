"""The part of a run's page about tables whose rows ranks read from copies, from the recorded windows (copies.jsonl).

Other ranks own the rows, with bounded staleness, or table servers do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner import staleness
from shardwright.planner.tables.sharding import make_table_loads
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure, axis, figure_layout, trace
from shardwright.report.run_record import RunRecord
from shardwright.spec.cache_record import CopyWindow
from shardwright.spec.plan import Bounded, Plan

SHARES = (("validated", "validated"), ("sent by owners", "sent"), ("with updates pushed", "pushed"))


@dataclass(frozen=True, slots=True)
class CopiesSection:
    """What the page shows; `tables` has a row for each set of tables that share copies. `note`: of what they
    are shares."""

    title: str
    text: str
    note: str
    figures: tuple[Figure, ...]
    tables: Grid


def describe_copies(run: RunRecord) -> CopiesSection | None:
    """None for a run without bounded staleness."""
    if not run.copies:
        return None
    names = list(dict.fromkeys(window.tables for window in run.copies))
    windows = {name: [window for window in run.copies if window.tables == name] for name in names}
    last = {name: own[len(own) // 2 :] for name, own in windows.items()}
    tables = [table for name in names for table in name.split(", ")]
    has_served, is_exact = _is_served(run.plan, tables), _is_exact(run.plan, tables)
    owner = "a table server" if has_served else "another rank"
    text = (
        f"Ranks read rows that {owner} owns from copies. "
        f"{'Training is exact: each' if is_exact else 'A'} copy is validated "
        f"{'in every batch' if is_exact else 'when its lease has expired'}; then its owner "
        f"{'confirms it' if is_exact else 'renews the lease'}, or sends the row if the copy misses "
        f"{'an update' if is_exact else 'too many updates'}. Counts are of distinct rows per batch and rank."
    )
    title = "Tables on table servers" if has_served else "Tables with bounded staleness"
    if has_served and not is_exact:
        title += ", with bounded staleness"
    source = "table servers" if has_served else "other ranks"
    note = f"Percent of the distinct rows read from {source}, in the second half of the recorded windows."
    has_missed = any(sum(window.missed) for own in last.values() for window in own)  # else all had no copy yet
    figures = (_shares_figure(run.copies, source), *((_missed_figure(last),) if has_missed else ()))
    return CopiesSection(title, text, note, figures, _table_grid(run, last))


def _is_served(plan: Plan | None, tables: Sequence[str]) -> bool:
    """Whether table servers own the rows; of a plan they own those of all these tables, or of none."""
    return plan is not None and any(
        rank >= plan.num_ranks
        for table in plan.tables
        if table.table in tables
        for rect in table.rects
        for rank in rect.ranks
    )


def _is_exact(plan: Plan | None, tables: Sequence[str]) -> bool:
    syncs = [table.placement.sync for table in plan.tables if table.table in tables] if plan is not None else []
    others = plan is not None and plan.num_ranks > 1  # whose updates a copy may miss
    return others and bool(syncs) and not any(isinstance(sync, Bounded) and sync.has_copies for sync in syncs)


def _share(windows: Sequence[CopyWindow], field: str) -> float:
    """Percent of the rows that were read."""
    return 100 * sum(getattr(window, field) for window in windows) / max(1, sum(window.read for window in windows))


def _shares_figure(windows: Sequence[CopyWindow], source: str) -> Figure:
    steps = sorted({window.step for window in windows})
    by_step = [[window for window in windows if window.step == step] for step in steps]
    data = tuple(
        trace(name, steps, [_share(own, field) for own in by_step], color=f"var(--hue{number})")
        for number, (name, field) in enumerate(SHARES)
    )
    layout = figure_layout(
        xaxis=axis(title={"text": "step"}, tickformat=",d"),
        yaxis=axis(title={"text": "rows, %"}, hoverformat=".1f", rangemode="tozero"),
        hovermode="x unified",
        showlegend=True,
    )
    caption = f"Percent of the distinct rows that batches read from {source}, over all tables with copies."
    return Figure("copied_rows", "Rows validated, sent and pushed", caption, 300, data, layout)


def _missed_figure(windows: dict[str, list[CopyWindow]]) -> Figure:
    counts = [sum(column) for column in zip(*(each.missed for own in windows.values() for each in own), strict=True)]
    num_bins = max((number + 1 for number, count in enumerate(counts) if count), default=1)
    labels = ["0", "1", *(f"{1 << k:,} to {(2 << k) - 1:,}" for k in range(1, len(counts) - 1))][:num_bins]
    total = max(1, sum(counts))
    shares = [100 * count / total for count in counts[:num_bins]]
    layout = figure_layout(
        xaxis=axis(title={"text": "updates of other ranks that a copy missed"}, type="category"),
        yaxis=axis(title={"text": "validated copies, %"}, hoverformat=".1f", rangemode="tozero"),
    )
    data = ({"type": "bar", "x": labels, "y": shares, "marker": {"color": "var(--hue0)"}, "name": "copies"},)
    caption = "When they were validated; updates that other ranks had not pushed yet are not counted."
    return Figure("missed_updates", "Updates missed by validated copies", caption, 300, data, layout)


def _table_grid(run: RunRecord, windows: dict[str, list[CopyWindow]]) -> Grid:
    rows: list[tuple[str, ...]] = []
    for name, own in windows.items():
        tables = name.split(", ")
        first = name if len(tables) == 1 else f"{tables[0]} and {len(tables) - 1} more"
        num_steps = max(1, sum(window.steps for window in own))
        measured = [f"{_share(own, field):.1f}" for _, field in SHARES]
        predicted = [f"{share:.1f}" for share in _predicted_shares(run, tables)] or [""] * len(SHARES)
        pairs = [text for pair in zip(measured, predicted, strict=True) for text in pair]
        lookups = sum(window.lookups for window in own)
        hits = f"{100 - 100 * sum(window.sent_lookups for window in own) / lookups:.1f}" if lookups else ""
        rows.append((first, f"{sum(window.read for window in own) / num_steps:,.0f}", hits, *pairs))
    headings = [text for _, field in SHARES for text in (f"{field}, %", "predicted")]
    return Grid(("tables", "rows read per step", "hits, % of lookups", *headings), tuple(rows))


def _predicted_shares(run: RunRecord, tables: Sequence[str]) -> list[float]:
    """Percent of the rows, by the fields of SHARES; empty if the plan or the workload is missing."""
    if run.workload is None or run.plan is None or run.plan.num_ranks == 1:
        return []
    loads = {load.table.name: load for load in make_table_loads(run.workload)}
    syncs = {table.table: table.placement.sync for table in run.plan.tables}
    totals, all_rows = [0.0] * len(SHARES), 0.0
    for table in tables:
        sync, load = syncs.get(table), loads.get(table)
        if not isinstance(sync, Bounded) or load is None:
            return []
        num_ranks = run.plan.num_ranks
        num_ids = run.workload.batch_size * load.ids_per_sample / num_ranks
        rows, shares = staleness.exchanged_shares(load, sync, num_ranks, num_ids)
        totals = [total + rows * share for total, share in zip(totals, shares, strict=True)]
        all_rows += rows
    return [100 * total / max(all_rows, 1e-300) for total in totals]
