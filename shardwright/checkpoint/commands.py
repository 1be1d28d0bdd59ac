"""`shardwright checkpoint`: look at one, check it, cut it anew, take its tensors elsewhere."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

checkpoint = typer.Typer(help="Look at checkpoints, check them, take them elsewhere.", no_args_is_help=True)

CheckpointArgument = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run or folder of several: its last is meant.")
]
MAX_SHOWN = 20  # tensors, the largest


@checkpoint.command()
def inspect(path: CheckpointArgument) -> None:
    """Show what a checkpoint holds: step, size, and of the largest tensors how they lie in its files.

    \b
    shardwright checkpoint inspect runs/mine
    shardwright checkpoint inspect runs/mine/checkpoint/step-00000400
    """
    from rich.table import Table

    from shardwright.checkpoint import portable, step_directories

    console, found = Console(width=max(Console().width, 112)), step_directories.resolve_checkpoint(path)
    manifest = step_directories.read_manifest(found)
    for line in portable.describe_checkpoint(found, manifest):
        console.print(line, highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(("tensor", "of", "MB here", "pieces")):
        table.add_column(column, justify="right" if number == 2 else "left", no_wrap=True)
    rows = portable.tensor_table(manifest)
    for row in rows[:MAX_SHOWN]:
        table.add_row(*row)
    console.print(table)
    if len(rows) > MAX_SHOWN:
        console.print(f"and {len(rows) - MAX_SHOWN} smaller ones", highlight=False)


@checkpoint.command()
def verify(path: CheckpointArgument) -> None:
    """Read all of a checkpoint, and of those it goes on from, and compare every block with its digest.

    \b
    shardwright checkpoint verify runs/mine
    """
    import time

    from shardwright.checkpoint import step_directories
    from shardwright.checkpoint.reading import Checkpoint

    console, start = Console(), time.perf_counter()
    with closing(Checkpoint(step_directories.resolve_checkpoint(path))) as found, console.status("") as status:
        bytes_ = found.verify(lambda done: status.update(f"{done / 1e6:,.0f} MB"))
    seconds = time.perf_counter() - start
    console.print(f"{found.path}: whole, {bytes_ / 1e6:,.1f} MB in {seconds:.1f} s", highlight=False, soft_wrap=True)


@checkpoint.command()
def reshard(
    path: CheckpointArgument,
    output: Annotated[Path, typer.Argument(help="A folder; the checkpoint is made in it, under its step's name.")],
    files: Annotated[int, typer.Option(help="How many files its rows are spread over.")] = 1,
) -> None:
    """Write a checkpoint anew: whole, in the order of ids, in so many files. Nothing else needs it: a job of any plan
    reads any checkpoint.

    \b
    shardwright checkpoint reshard runs/mine whole --files 4
    """
    from shardwright.checkpoint import portable, step_directories

    made = portable.reshard(step_directories.resolve_checkpoint(path), output, files)
    Console().print(f"checkpoint  {made}", highlight=False, soft_wrap=True)


@checkpoint.command()
def export(
    path: CheckpointArgument,
    output: Annotated[Path, typer.Argument(help="A .safetensors file.")],
    prefix: Annotated[str, typer.Option(help="Only names of the model that begin so, without it: sparse.")] = "",
) -> None:
    """The model's weights, whole tables, by the names of its state_dict: for any library that reads one.

    \b
    shardwright checkpoint export runs/mine model.safetensors
    shardwright checkpoint export runs/mine tables.safetensors --prefix sparse.     for torchrec
    """
    from shardwright.checkpoint import portable, step_directories

    num, bytes_ = portable.export_state_dict(step_directories.resolve_checkpoint(path), output, prefix)
    Console().print(f"{output}: {num} tensors, {bytes_ / 1e6:,.1f} MB", highlight=False, soft_wrap=True)
