"""The part of a run's page about tables that grow, from the recorded windows (growth.jsonl)."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure, axis, figure_layout, trace
from shardwright.report.run_record import RunRecord
from shardwright.spec.cache_record import GrowthWindow

SHOWN_TABLES = 6  # of the figure


@dataclass(frozen=True, slots=True)
class GrowthSection:
    """What the page shows; `tables` has a row by table."""

    text: str
    figure: Figure
    tables: Grid


def describe_growth(run: RunRecord) -> GrowthSection | None:
    """None for a run without tables that grow."""
    if not run.growth:
        return None
    last = {window.table: window for window in run.growth}
    evicted = sum(window.evicted for window in last.values())
    text = (
        f"{len(last)} {'table grows' if len(last) == 1 else 'tables grow'}: an id gets a row when it has occurred "
        "often enough, and loses it when no batch has used it for long enough, or to make room."
    )
    if evicted:
        text += f" To make room {evicted:,} rows were evicted: more room would keep them."
    return GrowthSection(text, _rows_figure(run.growth, last), _table_grid(last))


def _rows_figure(windows: Sequence[GrowthWindow], last: dict[str, GrowthWindow]) -> Figure:
    largest = sorted(last, key=lambda table: -last[table].rows)[:SHOWN_TABLES]
    data = tuple(
        trace(
            table,
            [window.step for window in windows if window.table == table],
            [window.rows for window in windows if window.table == table],
            color=f"var(--hue{number})",
        )
        for number, table in enumerate(largest)
    )
    shown = "all" if len(largest) == len(last) else f"the {len(largest)} largest"
    layout = figure_layout(
        xaxis=axis(title={"text": "step"}, tickformat=",d"),
        yaxis=axis(title={"text": "rows"}, hoverformat=",d", rangemode="tozero"),
        hovermode="x unified",
        showlegend=True,
    )
    caption = f"Rows of {shown} of the tables that grow, over all ranks."
    return Figure("table_growth", "Rows of tables that grow", caption, 300, data, layout)


def _table_grid(last: dict[str, GrowthWindow]) -> Grid:
    rows = [
        (
            window.table,
            f"{window.rows:,}",
            f"{window.room:,}",
            f"{window.entries:,}",
            f"{window.expired:,}",
            f"{window.evicted:,}",
        )
        for window in last.values()
    ]
    return Grid(("table", "rows", "room", "ids in the map", "expired so far", "evicted so far"), tuple(rows))
