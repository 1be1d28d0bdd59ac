"""How unevenly lookups are spread over the rows of tables, from the statistics of ids that the plan was made with.

Shape legend: I intervals of rows that count as equally popular.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.planner.tables.sharding import TableLoad, make_table_loads
from shardwright.report.plots import Figure, axis, figure_layout, trace
from shardwright.spec.workload import Workload

SHOWN_TABLES = 6  # with most lookups
QUOTED_ROWS = 0.1  # share of the rows whose share of the lookups the text gives
LEAST_SHOWN_ROWS = 1e-6  # share of the rows where the axis begins


@dataclass(frozen=True, slots=True)
class PopularityCurve:
    """By share of the rows, most popular first, their share of the lookups; both start at 0 and end at 1."""

    row_shares: np.ndarray
    lookup_shares: np.ndarray

    def lookups_of(self, row_share: float) -> float:
        return float(np.interp(row_share, self.row_shares, self.lookup_shares))

    def rows_with(self, lookup_share: float) -> float:
        """The share of the rows that has this share of the lookups."""
        return float(np.interp(lookup_share, self.lookup_shares, self.row_shares))


@dataclass(frozen=True, slots=True)
class PopularitySection:
    text: str
    figure: Figure


def describe_popularity(workload: Workload | None) -> PopularitySection | None:
    """None if the popularity of no table is known."""
    if workload is None:
        return None
    loads = [load for load in make_table_loads(workload) if load.popularity and load.ids_per_sample]
    if not loads:
        return None
    curves = {load.table.name: popularity_curve([load]) for load in loads}
    total = popularity_curve(loads)
    by_lookups = sorted(loads, key=lambda load: -load.ids_per_sample)[:SHOWN_TABLES]
    shown = {"all tables": total, **{load.table.name: curves[load.table.name] for load in by_lookups}}
    shown = shown if len(loads) > 1 else curves
    num_unknown = len(workload.tables) - len(loads)
    text = (
        f"{QUOTED_ROWS:.0%} of the rows have {total.lookups_of(QUOTED_ROWS):.1%} of the lookups, and "
        f"{_percent(total.rows_with(0.5))} of them have half"
    )
    if len(loads) > 1:
        of_tables = sorted((curve.lookups_of(QUOTED_ROWS), name) for name, curve in curves.items())
        (least, flattest), (most, steepest) = of_tables[0], of_tables[-1]
        text += f"; by table, {QUOTED_ROWS:.0%} have from {least:.1%} ({flattest}) to {most:.1%} ({steepest})"
    text += ". From the statistics of ids that the plan was made with; runs do not count the uses of each row."
    if num_unknown:
        text += f" The popularity of the rows of {num_unknown} of {len(workload.tables)} tables is not known."
    return PopularitySection(text, _figure(shown))


def popularity_curve(loads: Sequence[TableLoad]) -> PopularityCurve:
    """Of the rows of all these tables; rows of popular tables come first."""
    rows, lookups = list[float](), list[float]()
    for load in loads:
        ends = np.unique([*(k for k, _ in load.popularity), load.table.rows])
        rows += np.diff(ends, prepend=0).tolist()
        lookups += (load.ids_per_sample * np.diff(load.hot_id_share(ends), prepend=0.0)).tolist()
    rows_I, lookups_I = np.array(rows), np.array(lookups)
    order = np.argsort(-lookups_I / rows_I, kind="stable")
    parts = (np.concatenate([[0.0], np.cumsum(values[order])]) for values in (rows_I, lookups_I))
    return PopularityCurve(*(values / values[-1] for values in parts))


def _figure(curves: dict[str, PopularityCurve]) -> Figure:
    data = [
        trace(
            name,
            [100 * share for share in curve.row_shares.tolist()[1:]],
            [100 * share for share in curve.lookup_shares.tolist()[1:]],
            color="var(--ink)" if name == "all tables" else f"var(--hue{number})",
        )
        for number, (name, curve) in enumerate(curves.items())
    ]
    first = max(LEAST_SHOWN_ROWS, min(float(curve.row_shares[1]) for curve in curves.values()))
    layout = figure_layout(
        xaxis=axis(
            title={"text": "rows, % of the table, most popular first"},
            type="log",
            range=[np.log10(100 * first).item(), 2.0],
            tickformat="~g",
            hoverformat=".3~g",
        ),
        yaxis=axis(title={"text": "lookups, %"}, hoverformat=".1f", range=[0, 102]),
        hovermode="closest",
        showlegend=len(curves) > 1,
    )
    caption = "Share of the lookups, ids of batches, that read the most popular rows."
    if len(curves) > 1:
        caption += f" The {len(curves) - 1} tables with most lookups are drawn, and all tables together."
    return Figure("popularity", "Popularity of rows", caption, 320, tuple(data), layout)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
