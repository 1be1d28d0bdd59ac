"""Compare runs on one page: final results, evaluation curves, and the settings that differ."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardwright.errors import UserError
from shardwright.report import html_template, plots
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure
from shardwright.report.run_page import flatten_settings
from shardwright.report.run_record import Metrics, RunRecord, read_record
from shardwright.report.units import bytes_text, count_text, decimal_text, duration_text
from shardwright.report.workload_grids import ABSENT
from shardwright.spec import files

CURVES = (
    ("ne", "Normalized entropy", "Log loss over the entropy of the labels' mean rate: lower is better."),
    ("auc", "AUC", "How often a click is ranked above a non-click."),
    ("grouped_auc", "Grouped AUC", "The mean of each group's AUC, weighted by the group."),
    ("calibration", "Calibration", "Predicted over observed rate: 1 is exact."),
    ("loss", "Loss", "The mean of the model's loss."),
    ("accuracy", "Accuracy", "The share of samples whose class has the highest score."),
    ("recall_at_100", "Recall@100", "The share of a user's held-out positives that are among the 100 best items."),
    ("ndcg_at_100", "NDCG@100", "As Recall@100, but an item counts less the later it comes."),
    ("perplexity", "Perplexity", "The exponential of the loss of the next token."),
    ("samples_per_second", "Throughput", "Samples per second in each training window."),
    ("tokens_per_second", "Throughput, tokens", "Tokens per second in each training window."),
)
IGNORED_SETTINGS = ("run.name", "run.directory", "run.resume")


def render(runs: Sequence[Path], *, output: Path | None = None) -> Path:
    """Write the comparison of run directories; by default to compare.html in the parent of the first."""
    records = [read_record(run) for run in runs]
    names = [record.name for record in records]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f'two runs have the name "{name}"; pass each run once, with different names')
    target = output or runs[0].resolve().parent / "compare.html"
    files.write_text(comparison_html(records), target)
    return target


def comparison_html(runs: Sequence[RunRecord]) -> str:
    curves = [*task_figures(runs), *overlay_figures(runs)]
    return html_template.render_template(
        "compare.html.j2",
        title=", ".join(run.name for run in runs),
        notes=tuple(notes(runs)),
        outcome=outcome_grid(runs),
        curves=curves,
        differences=difference_grid(runs),
        figures=curves,
    )


def notes(runs: Sequence[RunRecord]) -> Iterator[str]:
    for run in runs:
        if run.metrics.end is None:
            yield f"{run.name} has not ended, or was killed."
    data_settings = {str(run.config.get("data")) for run in runs}
    if len(data_settings) > 1:
        yield "Not all runs have the same data settings: see the settings that differ."


def task_names(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """The tasks of all runs whose models have several."""
    return tuple(dict.fromkeys(name for run in runs for name in run.metrics.tasks))


def outcome_grid(runs: Sequence[RunRecord]) -> Grid:
    """A row per run; of models with several tasks, a row per task and run, the runs of a task below each other."""
    columns = ("steps", "NE", "AUC", "log loss", "calibration", "samples/s", "time", "peak memory")
    rows = [(run.name, "", *outcome_cells(run, run.metrics)) for run in runs if not run.metrics.tasks]
    tasks = task_names(runs)
    if not tasks:
        return Grid(("run", *columns), tuple((name, *cells) for name, _, *cells in rows))
    for task in tasks:
        with_task = (run for run in runs if task in run.metrics.tasks)
        rows += [(run.name, task, *outcome_cells(run, run.metrics.of_task(task))) for run in with_task]
    return Grid(("run", "task", *columns), tuple(rows), num_text_columns=2)


def outcome_cells(run: RunRecord, metrics: Metrics) -> tuple[str, ...]:
    """The last scores of `metrics`, which are those of a run or of one of its tasks, and the speed of the run."""
    final, end = metrics.final, run.metrics.end
    return (
        f"{end.step:,}" if end else ABSENT,
        *(
            format_or_absent(getattr(final, name, None), decimal_text)
            for name in ("ne", "auc", "log_loss", "calibration")
        ),
        format_or_absent(getattr(end, "samples_per_second", None), count_text),
        format_or_absent(getattr(end, "seconds", None), duration_text),
        format_or_absent(getattr(end, "peak_rss_bytes", None), bytes_text),
    )


def format_or_absent(value: float | None, formatter: Callable[[float], str]) -> str:
    return ABSENT if value is None else formatter(value)


def overlay_figures(runs: Sequence[RunRecord]) -> Iterator[Figure]:
    """The curves that at least one run has."""
    for curve in CURVES:
        if figure := overlay_figure(runs, *curve):
            yield figure


def task_figures(runs: Sequence[RunRecord]) -> Iterator[Figure]:
    """The curves of each task of models with several."""
    for task in task_names(runs):
        for figure in overlay_figures([replace(run, metrics=run.metrics.of_task(task)) for run in runs]):
            yield replace(figure, name=f"{task}-{figure.name}", title=f"{task}: {figure.title}", height=260)


def overlay_figure(runs: Sequence[RunRecord], name: str, title: str, caption: str) -> Figure | None:
    """A curve per run: its evaluations, or its training windows if it has no evaluations."""
    traces = []
    for index, run in enumerate(runs):
        lines = run.metrics.evals if plots.metric_series(run.metrics.evals, name)[0] else run.metrics.train
        x, y = plots.metric_series(lines, name)
        if x:
            color, dash = f"var(--hue{index % plots.NUM_HUES})", "solid" if index < plots.NUM_HUES else "dot"
            markers = lines is run.metrics.evals
            traces.append(plots.trace(run.name, x, y, color=color, dash=dash, markers=markers))
    if not traces:
        return None
    figure = plots.samples_figure(name, title, traces, caption=caption, height=340 if name == "ne" else 260)
    figure.layout["showlegend"] = True  # a single curve may be that of any run
    return figure


def difference_grid(runs: Sequence[RunRecord]) -> Grid:
    settings_by_run = [dict(flatten_settings(run.config)) for run in runs]
    keys = dict.fromkeys(key for settings in settings_by_run for key in settings if key not in IGNORED_SETTINGS)
    rows = [(key, *(settings.get(key, "") for settings in settings_by_run)) for key in keys]
    columns = ("key", *(run.name for run in runs))
    return Grid(columns, tuple(row for row in rows if len(set(row[1:])) > 1), num_text_columns=len(columns))
