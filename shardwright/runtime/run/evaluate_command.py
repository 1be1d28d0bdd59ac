"""`shardwright evaluate`: all metrics of a finished run on held-out rows."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardwright.errors import UserError

MAX_SHOWN = 20  # values of a column on the terminal; the file has more
COLUMNS = ("rows", "base_rate", "ne", "auc", "log_loss", "calibration")


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or one of its checkpoints.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="data=FILE, or keys of the recipe to set.")
    ] = None,
    by: Annotated[str, typer.Option(help="A category column: metrics of each of its values.")] = "",
) -> None:
    """Evaluate a finished run: all metrics of its best, or else last, checkpoint on its held-out rows.

    \b
    shardwright evaluate runs/mine                            the test rows, or else the validation rows
    shardwright evaluate runs/mine data=june.csv              another file, with the run's vocabularies and moments
    shardwright evaluate runs/mine --by device ranks=4        metrics of each device, over four processes
    shardwright evaluate runs/mine/checkpoint                 the last checkpoint, where the best is kept too
    \b
    The result is also written into the run directory, as evaluations/STEP[-FILE][-by-COLUMN].json.
    """
    from shardwright.comm.mesh import is_first_rank
    from shardwright.runtime.launch import launcher
    from shardwright.runtime.run import evaluate as evaluation

    keys = [key for key in overrides or () if not key.startswith("data=")]
    data = next((key.partition("=")[2] for key in overrides or () if key.startswith("data=")), "")
    for key in keys:
        is_of_run = key.startswith(("run.", "model.", "tables.", "dense.", "seed="))
        if is_of_run and not key.startswith("run.device="):
            raise UserError(
                f"{key}: the run has its own; set data=FILE, ranks=N, run.device, or keys of train and plan"
            )
    settings = evaluation.load_settings(evaluation.find_run(run)[0], keys)
    if settings.ranks > 1 and not launcher.join_launch():
        command = ["-m", "shardwright.cli", "evaluate", str(run), *(overrides or ()), *(["--by", by] if by else [])]
        raise typer.Exit(launcher.launch_ranks(settings.ranks, command, remedy="evaluate again"))
    launcher.join_launch()
    launcher.die_with_launcher()
    result, path = evaluation.evaluate(run, keys, data, by)
    if is_first_rank():
        _print(Console(), result, path)


def _print(console: Console, result: Any, path: Path) -> None:
    from rich.table import Table

    console.print(f"checkpoint  {result.checkpoint}", highlight=False, soft_wrap=True)
    console.print(f"rows        {result.rows:,} of {result.data or 'the held-out rows'}", highlight=False)
    for name, value in result.metrics.items():
        console.print(f"{name:<11} {value:.6f}", highlight=False)
    for label in (name.removesuffix("log_loss") for name in result.metrics if name.endswith("log_loss")):
        if f"{label}auc" not in result.metrics:
            note = f"note        {label.rstrip('.') or 'the label'} has the same value in all rows: no NE, no AUC"
            console.print(note, highlight=False, soft_wrap=True)
    for column, values in result.by.items():
        names = dict.fromkeys(name for each in values for name in each)
        shown = [name for column in COLUMNS for name in names if name.rpartition(".")[2] == column]
        table = Table(box=None, pad_edge=False)
        for index, name in enumerate((column, *shown)):
            table.add_column(name, justify="right" if index else "left", no_wrap=True)
        for each in values[:MAX_SHOWN]:
            table.add_row(str(each["value"]), *(_format(each.get(name)) for name in shown))
        console.print(table)
        if len(values) > MAX_SHOWN:
            console.print(f"and {len(values) - MAX_SHOWN:,} more values in the file", highlight=False)
    console.print(f"metrics     {path}", highlight=False, soft_wrap=True)


def _format(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
