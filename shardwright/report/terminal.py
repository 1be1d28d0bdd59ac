"""Show a run on a terminal: a progress bar, or lines if the output is not a terminal."""

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from statistics import median
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from shardwright.report.html_template import Grid
from shardwright.report.units import time_text
from shardwright.runtime.run.callback import Callback, RunStart
from shardwright.runtime.run.directory import resume_hint

MAX_NO_WRAP_CHARACTERS = 40  # longer cells are wrapped
LINE_METRICS = MappingProxyType(
    {
        "loss": "loss",
        "bound_loss": "bound",
        "perplexity": "perplexity",
        "accuracy": "accuracy",
        "ne": "NE",
        "bound_ne": "bound",
        "auc": "AUC",
        "grouped_auc": "GAUC",
        "recall@10": "Recall@10",
        "recall@100": "Recall@100",
        "ndcg@10": "NDCG@10",
        "ndcg@100": "NDCG@100",
    }
)


BAR_METRICS = ("loss", "auc", "accuracy")  # those that fit beside the bar


class ProgressDisplay(Callback):
    """Shows a run: a progress bar on a terminal; else a line for each line of metrics."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._is_terminal = console.is_terminal
        self._clock = clock
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),  # the only column that shrinks on a narrow terminal
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[facts]}"),
            console=console,
        )
        self._task = self._bar.add_task("training", total=None, visible=False, facts="")
        self._metrics = ""  # of the last window
        self._run: RunStart | None = None
        self._start = 0.0

    def __enter__(self) -> "ProgressDisplay":
        if self._is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._bar.stop()

    def begin(self, run: RunStart) -> None:
        self._run, self._start = run, self._clock()
        self._console.print(f"run     {run.path}", highlight=False, soft_wrap=True)
        self._bar.update(self._task, total=run.steps or None, completed=run.step, visible=True)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def report_stop(self, number: int = signal.SIGINT, step: int = 0) -> int:
        """Print how to resume after a signal; returns the exit code. `step` of the checkpoint; 0: unknown."""
        if self._run is not None:
            self._bar.stop()
            saved = f" after step {step}, whose checkpoint is written" if step else "; the last checkpoint is kept"
            print(f"stopped by {signal.Signals(number).name}{saved}; {resume_hint(self._run.path)}", file=sys.stderr)
        return 128 + number

    def step(self, step: int, samples: int) -> None:
        if self._is_terminal:
            what = self._epoch(samples) or "training"
            facts = "  ".join(filter(None, (self._metrics, self._time_left(step))))
            self._bar.update(self._task, completed=step, description=what, facts=facts)

    def line(self, line: Mapping[str, Any]) -> None:
        if line["kind"] in ("progressive", "end"):
            return
        is_training = line["kind"] == "train"
        if is_training and self._is_terminal:
            speed = format_speed(line["samples_per_second"], line)
            self._metrics = "  ".join((speed, *_metric_texts(line, BAR_METRICS)))
            return
        parts = [format_metrics_line(line, self._run.steps if self._run else 0)]
        parts += [self._epoch(line["samples"]), self._time_left(line["step"])] if is_training else []
        self._console.print("  ".join(filter(None, parts)), highlight=False, soft_wrap=True)

    def _epoch(self, samples: int) -> str:
        """The epoch of the last sample, of the epochs of the run; empty if the data source has no end."""
        if self._run is None or not (size := self._run.samples_per_epoch):
            return ""
        train = self._run.settings.train
        total = train.epochs or -(-train.steps * train.samples_per_step // size)
        return f"epoch {-(-samples // size)}" + (f"/{total}" if total else "")

    def _time_left(self, step: int) -> str:
        """The time until the last step, at the mean speed since this process began, evaluations included."""
        if self._run is None or not self._run.steps or step <= self._run.step:
            return ""
        seconds_per_step = (self._clock() - self._start) / (step - self._run.step)
        return f"{timedelta(seconds=round(seconds_per_step * (self._run.steps - step)))} left"


def format_metrics_line(line: Mapping[str, Any], steps: int = 0) -> str:
    """A line of metrics of a run of so many steps; 0: it has no last step."""
    total = f"/{steps}" if steps else ""
    parts = [f"step {line['step']:>6}{total}", f"{line['kind']:<5}", *_metric_texts(line, tuple(LINE_METRICS))]
    if "samples_per_second" in line:
        parts.append(format_speed(line["samples_per_second"], line))
    return "  ".join(parts)


def _metric_texts(line: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    return [f"{LINE_METRICS[key]} {line[key]:.4f}" for key in keys if key in line]


def format_speed(samples_per_second: float, rates: Mapping[str, float]) -> str:
    """Samples per second; of a model of tokens, tokens per second, and the MFU if it is known."""
    if "tokens_per_second" not in rates:
        return f"{samples_per_second:,.0f} samples/s"
    mfu = f"  MFU {rates['mfu']:.1%}" if "mfu" in rates else ""
    return f"{rates['tokens_per_second']:,.0f} tokens/s{mfu}"


def format_checkpoint_pauses(pauses: Sequence[float]) -> str:
    """Median and maximum time that training waited for a checkpoint."""
    times = f"{time_text(median(pauses))} for each (median), {time_text(max(pauses))} at most"
    return f"{len(pauses)} checkpoint{'s' * (len(pauses) > 1)}; training waited {times}"


def _task_scores(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """NE and AUC of each task of a model with several."""
    for key, value in evaluation.items():
        task, _, name = key.rpartition(".")
        if not task or name not in ("ne", "auc"):
            continue
        best = evaluation.get(f"{task}.bound_ne") if name == "ne" else None
        yield f"{task} {name.upper()} {value:.4f}" + ("" if best is None else f" (best reachable {best:.4f})")


def summary(
    evaluation: Mapping[str, Any], samples_per_second: float, rates: Mapping[str, float] = MappingProxyType({})
) -> str:
    parts = ["progressive"] if evaluation.get("kind") == "progressive" else []
    if "ne" in evaluation:
        bound = f" (best reachable {evaluation['bound_ne']:.4f})" if "bound_ne" in evaluation else ""
        parts.append(f"NE {evaluation['ne']:.4f}{bound}")
    if "auc" in evaluation:
        parts.append(f"AUC {evaluation['auc']:.4f}")
    parts += _task_scores(evaluation)
    if "accuracy" in evaluation:
        everything = evaluation.get("accuracy_all_neighbors")
        note = "" if everything is None else f" (all neighbors {everything:.4f})"
        parts.append(f"accuracy {evaluation['accuracy']:.4f}{note}")
    parts += [f"{LINE_METRICS[key]} {evaluation[key]:.4f}" for key in ("recall@100", "ndcg@100") if key in evaluation]
    if "loss" in evaluation:
        bound = f" (best reachable {evaluation['bound_loss']:.4f})" if "bound_loss" in evaluation else ""
        parts.append(f"loss {evaluation['loss']:.4f}{bound}")
    if "perplexity" in evaluation:
        parts.append(f"perplexity {evaluation['perplexity']:.3f}")
    return "  ".join((*parts, format_speed(samples_per_second, rates)))


def rich_table(title: str, grid: Grid, max_rows: int = 0) -> Table:
    """A rich Table of the first `max_rows` rows of a grid (0: all rows)."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(grid.columns):
        justify = "left" if index < grid.num_text_columns else "right"
        has_long_cells = any(len(row[index]) > MAX_NO_WRAP_CHARACTERS for row in grid.rows)
        table.add_column(column, justify=justify, no_wrap=not has_long_cells)
    for row in grid.rows[:max_rows] if max_rows else grid.rows:
        table.add_row(*row)
    if grid.total:
        table.add_section()
        table.add_row(*grid.total, style="bold")
    return table
