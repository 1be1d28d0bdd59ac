"""`shardwright predict`: score every row of a file with a run or an export."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shardwright.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from rich.progress import Progress

    from shardwright.serving.scoring.parts import ScoreParts
    from shardwright.serving.scoring.predict import ScoreRequest

KEYS = ("data", "out", "keys", "ranks", "device")
DEVICES = ("auto", "cpu", "cuda")
SECONDS_BETWEEN_COUNTS = 0.5  # of the parts that other processes have written
STOPPED = 130  # exit code after Ctrl-C


def predict(
    model: Annotated[
        Path, typer.Argument(metavar="RUN|EXPORT", help="A run, one of its checkpoints, or an exported model.")
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=f"Keys: {', '.join(KEYS)}.")
    ] = None,
) -> None:
    """Score every row of a click log, in order, into a Parquet or CSV file; labels are not needed.

    \b
    shardwright predict runs/mine data=test.csv out=scores.parquet
    shardwright predict runs/mine data=test.csv out=scores.csv keys=user,item     with columns of the input
    shardwright predict served data=folder out=scores.parquet ranks=8              an export, in 8 processes
    shardwright predict served data=folder out=scores.parquet device=cuda          the dense model on a GPU
    \b
    After a kill the same command continues: it keeps the parts that are complete. The output appears when all are.
    """
    from shardwright.runtime.launch import launcher
    from shardwright.serving.scoring.predict import prepare

    request, ranks = _parse(model, settings or ())
    if launcher.join_launch():
        _score_as_rank(request)
        return
    start = time.monotonic()
    parts = prepare(request)
    try:
        if ranks > 1:
            command = ["-m", "shardwright.cli", "predict", str(model), *(settings or ())]
            with _show_parts(parts, request):
                code = launcher.launch_ranks(ranks, command, remedy="the same command continues")
            if code:
                raise typer.Exit(code)
        else:
            _score_alone(request)
    except KeyboardInterrupt:
        print(f"stopped; complete parts are kept in {parts.directory}, the same command continues", file=sys.stderr)
        raise typer.Exit(STOPPED) from None
    num_rows = parts.assemble()
    console, seconds = Console(), time.monotonic() - start
    console.print(f"{num_rows:,} rows in {seconds:,.1f} s", highlight=False)
    console.print(f"scores  {request.output}", highlight=False, soft_wrap=True)


def _parse(model: Path, settings: "list[str] | tuple[str, ...]") -> "tuple[ScoreRequest, int]":
    """What to score and the number of processes, from keys of the command line."""
    from shardwright.serving.scoring.predict import ScoreRequest

    values: dict[str, str] = {}
    for setting in settings:
        key, equals_sign, text = setting.partition("=")
        if not equals_sign or key not in KEYS:
            raise UserError(f'"{setting}" is no key of predict{did_you_mean(key, KEYS)}')
        values[key] = text
    for key, example in (("data", "test.csv"), ("out", "scores.parquet")):
        if not values.get(key):
            raise UserError(f"{key}=FILE is missing, such as {key}={example}")
    ranks = values.get("ranks", "1")
    if not ranks.isdecimal() or not 1 <= int(ranks) <= 1024:
        raise UserError(f"ranks={ranks}: wanted a number of processes, 1 to 1024")
    if not model.exists():
        raise UserError(f"{model}: no such run or export")
    keys = tuple(filter(None, values.get("keys", "").split(",")))
    if (device := values.get("device", "cpu")) not in DEVICES:
        raise UserError(f"device={device}: wanted one of {', '.join(DEVICES)}")
    request = ScoreRequest(model, Path(values["data"]), Path(values["out"]), keys, device=device)
    return request, int(ranks)


def _score_as_rank(request: "ScoreRequest") -> None:
    """The work of one of several processes, which the command of the user has started."""
    from shardwright.comm.mesh import current_rank, world_size
    from shardwright.runtime.launch import launcher
    from shardwright.serving.scoring.predict import score_parts

    if not launcher.is_started_by_launcher():
        raise UserError("predict starts its own processes: run it once, with ranks=N, not under a launcher")
    launcher.die_with_launcher()
    _set_threads()
    score_parts(request, current_rank(), world_size())


def _score_alone(request: "ScoreRequest") -> None:
    from shardwright.serving.scoring.predict import input_size, score_parts

    _set_threads()
    with _progress() as progress:
        task = progress.add_task("", total=input_size(request), rows=0)
        score_parts(request, show=lambda read, rows: progress.update(task, completed=read, rows=rows))


def _set_threads() -> None:
    """Leave a core to the thread that reads, and the others to the processes of this host."""
    import torch

    from shardwright.comm.mesh import host_topology
    from shardwright.runtime.launch import launcher
    from shardwright.runtime.run.machine import choose_threads

    threads = choose_threads(1, host_topology()[1], launcher.omp_num_threads())
    if not threads.is_set:
        torch.set_num_threads(threads.count)


@contextmanager
def _show_parts(parts: "ScoreParts", request: "ScoreRequest") -> Iterator[None]:
    """Show the rows of the parts that other processes write."""
    ended, part_rows = Event(), request.part_blocks * request.block_rows
    with _progress() as progress:
        task = progress.add_task("", total=None, rows=0)

        def count() -> None:
            while not ended.wait(SECONDS_BETWEEN_COUNTS):
                progress.update(task, rows=parts.num_complete * part_rows)

        thread = Thread(target=count, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _progress() -> "Progress":
    """A bar with the rows so far and the rows per second, on a terminal."""
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class RowSpeed(ProgressColumn):
        """Rows so far, and rows per second since the start."""

        def render(self, task: Any) -> Text:
            rows, seconds = task.fields["rows"], task.elapsed or 0.0
            return Text(f"{rows:,} rows  {rows / seconds if seconds else 0:,.0f} rows/s")

    console = Console(stderr=True)
    columns = (TextColumn("scoring"), BarColumn(), RowSpeed(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
