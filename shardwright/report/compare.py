"""A comparison of runs on one page: final results, curves of their evaluations, and the settings that differ."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardwright.errors import UserError
from shardwright.report import html_template, plots
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure
from shardwright.report.run_page import ABSENT, count, decimal, dotted, duration, size
from shardwright.report.run_record import RunRecord, read_record
from shardwright.spec import files

CURVES = (
    ("ne", "Normalized entropy", "Log loss over the entropy of the labels' mean rate: lower is better."),
    ("auc", "AUC", "How often a click is ranked above a non-click."),
    ("grouped_auc", "Grouped AUC", "The mean of each group's AUC, weighted by the group."),
    ("calibration", "Calibration", "Predicted over observed rate: 1 is exact."),
    ("loss", "Loss", "Mean per sample."),
    ("samples_per_second", "Throughput", "Samples per second in each training window."),
)
UNINTERESTING = ("run.name", "run.directory", "run.resume")


def render(runs: Sequence[Path], *, output: Path | None = None) -> Path:
    """Write the comparison of these run directories; by default as compare.html beside the first."""
    records = [read_record(run) for run in runs]
    names = [record.name for record in records]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f'two of the runs are called "{name}"; name each run once')
    target = output or runs[0].resolve().parent / "compare.html"
    files.write_text(page(records), target)
    return target


def page(runs: Sequence[RunRecord]) -> str:
    curves = [curve for curve in (overlaid(runs, *about) for about in CURVES) if curve]
    return html_template.page(
        "compare.html.j2",
        title=", ".join(run.name for run in runs),
        notes=tuple(notes(runs)),
        outcome=outcome(runs),
        curves=curves,
        differences=differences(runs),
        figures=curves,
    )


def notes(runs: Sequence[RunRecord]) -> Iterator[str]:
    for run in runs:
        if run.metrics.end is None:
            yield f"{run.name} has not ended, or was killed."
    sets = {str(run.config.get("data")) for run in runs}
    if len(sets) > 1:
        yield "The runs did not all train on the same data: see the settings that differ."


def outcome(runs: Sequence[RunRecord]) -> Grid:
    figures = ("ne", "auc", "log_loss", "calibration")
    rows = []
    for run in runs:
        final = run.metrics.test or (run.metrics.evals[-1] if run.metrics.evals else None)
        end = run.metrics.end
        shown = (
            f"{end.step:,}" if end else ABSENT,
            *(told(getattr(final, name, None), decimal) for name in figures),
            told(getattr(end, "samples_per_second", None), count),
            told(getattr(end, "seconds", None), duration),
            told(getattr(end, "peak_rss_bytes", None), size),
        )
        rows.append((run.name, *shown))
    columns = ("run", "steps", "NE", "AUC", "log loss", "calibration", "samples/s", "time", "peak memory")
    return Grid(columns, tuple(rows))


def told(value: float | None, form: Callable[[float], str]) -> str:
    return ABSENT if value is None else form(value)


def overlaid(runs: Sequence[RunRecord], name: str, title: str, caption: str) -> Figure | None:
    """One curve per run: its evaluations, or where it has none its windows of training."""
    traces = []
    for number, run in enumerate(runs):
        lines = run.metrics.evals if plots.column(run.metrics.evals, name)[0] else run.metrics.train
        x, y = plots.column(lines, name)
        if x:
            color, dash = f"var(--hue{number % plots.HUES})", "solid" if number < plots.HUES else "dot"
            markers = lines is run.metrics.evals
            traces.append(plots.trace(run.name, x, y, color=color, dash=dash, markers=markers))
    if not traces:
        return None
    return plots.samples_figure(name, title, traces, caption=caption, height=340 if name == "ne" else 260)


def differences(runs: Sequence[RunRecord]) -> Grid:
    flat = [dict(dotted(run.config)) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings if key not in UNINTERESTING)
    rows = [(key, *(settings.get(key, "") for settings in flat)) for key in keys]
    columns = ("key", *(run.name for run in runs))
    return Grid(columns, tuple(row for row in rows if len(set(row[1:])) > 1), words=len(columns))
