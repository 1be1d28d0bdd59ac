"""Show a run on a terminal: a progress bar, or lines if the output is not a terminal."""

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shardwright.report.html_template import Grid
from shardwright.report.units import time_text
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
    }
)


class ProgressDisplay:
    """Shows a run: a progress bar on a terminal; else evaluations and a training line every few seconds."""

    SECONDS_BETWEEN_LINES = 5.0

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._is_terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("training", total=steps or None, facts="")
        self._last_print_time = 0.0
        self._path: Path | None = None

    def __enter__(self) -> "ProgressDisplay":
        if self._is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._bar.stop()

    def begin(self, path: Path) -> None:
        self._path = path
        self._console.print(f"run     {path}", highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def report_stop(self, number: int = signal.SIGINT, step: int = 0) -> int:
        """Print how to resume after a signal; returns the exit code. `step` of the checkpoint; 0: unknown."""
        if self._path is not None:
            self._bar.stop()
            saved = f" after step {step}, whose checkpoint is written" if step else "; the last checkpoint is kept"
            print(f"stopped by {signal.Signals(number).name}{saved}; {resume_hint(self._path)}", file=sys.stderr)
        return 128 + number

    def step(self, step: int, samples: int) -> None:
        self._bar.update(self._task, completed=step)

    def line(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "progressive":
            return
        if line["kind"] == "train":
            facts = [format_speed(line["samples_per_second"], line)]
            facts += [f"NE {line['ne']:.4f}"] if "ne" in line else [f"loss {line['loss']:.4f}"]
            self._bar.update(self._task, facts="  ".join(facts))
            if self._is_terminal or time.monotonic() - self._last_print_time < self.SECONDS_BETWEEN_LINES:
                return
            self._last_print_time = time.monotonic()
        self._console.print(format_metrics_line(line), highlight=False, soft_wrap=True)


def format_metrics_line(line: Mapping[str, Any]) -> str:
    parts = [f"step {line['step']:>6}", f"{line['kind']:<5}"]
    parts += [f"{name} {line[key]:.4f}" for key, name in LINE_METRICS.items() if key in line]
    if "samples_per_second" in line:
        parts.append(format_speed(line["samples_per_second"], line))
    return "  ".join(parts)


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
