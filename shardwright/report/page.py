"""One run as one self-contained HTML page: key figures, curves, where the time went, what was trained and why so.

A figure that was not measured is left out or called so, in one plain sentence; this file may invent no number.
Look and script are in page.html.j2, the drawn figures in plots.py, reading in run.py.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from plotly.offline import get_plotlyjs

from shardwright.report import plots
from shardwright.report.run import Metrics, Record, Run, read_run
from shardwright.spec import files
from shardwright.spec.workload import Workload

ABSENT = "not measured"


@dataclass(frozen=True, slots=True)
class Tile:
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of text; the first `words` columns are words, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    total: tuple[str, ...] = ()


def render(run: Path, *, output: Path | None = None) -> Path:
    """Write the report of a run directory, whole or not at all; by default as report.html inside it."""
    target = output or run / "report.html"
    files.write_text(page(read_run(run)), target)
    return target


def page(run: Run) -> str:
    curves = plots.curves(run.metrics)
    times = (plots.stages(run.timeline), plots.gantt(run.timeline)) if run.timeline else ()
    drawn = {figure.name: {"data": figure.data, "layout": figure.layout} for figure in (*curves, *times)}
    text = template().render(
        run=run,
        facts=facts(run),
        notes=tuple(notes(run.metrics)),
        tiles=tiles(run.metrics),
        curves=curves,
        gaps=tuple(gaps(run.metrics)),
        times=times,
        step_time=step_time(run),
        tables=tables(run.workload) if run.workload and run.workload.tables else None,
        blocks=blocks(run.workload) if run.workload and run.workload.blocks else None,
        why=Grid("Why this plan", ("subject", "reason"), run.plan.why, words=2) if run.plan and run.plan.why else None,
        config=settings("Resolved configuration", run.config),
        environment=settings("Environment", run.environment) if run.environment else None,
        drawn=drawn,
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
    )
    return text.encode(errors="replace").decode()


@cache
def template() -> Template:
    loader = PackageLoader("shardwright.report", ".")
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template("page.html.j2")


def facts(run: Run) -> tuple[str, ...]:
    """The line under the title: recipe, date, machine, as far as known."""
    found = (run.config.get("recipe"), run.environment.get("started"), run.environment.get("machine"))
    return tuple(str(fact) for fact in found if fact)


def notes(metrics: Metrics) -> Iterator[str]:
    """What the reader must know before any figure."""
    last = metrics.last
    if last is None:
        yield "The run has written no metrics yet."
    elif metrics.end is None:
        yield f"The run has not ended, or was killed: its last record is of step {last.step:,}."
    if metrics.torn:
        yield "The last line of metrics.jsonl is cut off, as after a kill; it is left out."
    if metrics.replaced:
        yield f"The run was resumed: {metrics.replaced} earlier lines were measured again, and the later ones are shown."


def gaps(metrics: Metrics) -> Iterator[str]:
    """What the curves cannot show."""
    records = (*metrics.train, *metrics.evals)
    names = {"ne": "normalized entropy", "auc": "AUC", "calibration": "calibration"}
    absent = [words for name, words in names.items() if not plots.column(records, name)[0]]
    if records and absent:
        yield f"Not measured in this run: {', '.join(absent)}."
    if metrics.train and not metrics.evals:
        yield "No evaluation has run: the curves are windows of training."


def tiles(metrics: Metrics) -> tuple[Tile, ...]:
    final = metrics.evals[-1] if metrics.evals else None
    clicks = any(record.ne is not None for record in (*metrics.train, *metrics.evals))
    quality = [Tile("Log loss" if clicks else "Loss", *final_figure(metrics, final, "loss"))]
    if clicks:
        value, note = final_figure(metrics, final, "ne")
        if final and final.ne is not None and final.bound_ne is not None:
            note = f"the generator's bound is {final.bound_ne:.4f}"
        auc = Tile("AUC", *final_figure(metrics, final, "auc"))
        quality = [Tile("Normalized entropy", value, note), auc, *quality]
    return (*quality, *speed(metrics))


def final_figure(metrics: Metrics, final: Record | None, name: str) -> tuple[str, str]:
    """Value and note of the last evaluation; before any, the last training window stands in the note alone."""
    value = getattr(final, name) if final else None
    if final and value is not None:
        return decimal(value), f"evaluation at step {final.step:,}"
    windows = plots.column(metrics.train, name)[1]
    return ABSENT, f"last training window: {decimal(windows[-1])}" if windows and windows[-1] is not None else ""


def speed(metrics: Metrics) -> Iterator[Tile]:
    end = metrics.end
    if end and end.samples_per_second is not None:
        yield Tile("Samples per second", count(end.samples_per_second), "whole run")
    else:
        windows = [record.samples_per_second for record in metrics.train if record.samples_per_second is not None]
        value = count(median(windows)) if windows else ABSENT
        yield Tile("Samples per second", value, f"median of {len(windows)} windows" if windows else "")
    seconds = end.seconds if end else None
    yield Tile("Wall time", ABSENT if seconds is None else duration(seconds), f"{end.step:,} steps" if end else "")
    peak = end.peak_rss_bytes if end else None
    yield Tile("Peak memory", ABSENT if peak is None else size(peak), "" if peak is None else "resident, on the host")
