"""`shardwright checkpoint`: inspect, verify, reshard or export a checkpoint."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

checkpoint = typer.Typer(help="Inspect, verify, reshard and export checkpoints.", no_args_is_help=True)

CheckpointArgument = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run or folder whose last checkpoint is used.")
]
MAX_SHOWN = 20  # number of tensors that `inspect` lists


@checkpoint.command()
def inspect(path: CheckpointArgument) -> None:
    """Show the step and size of a checkpoint, and how its largest tensors are stored.

    \b
    shardwright checkpoint inspect runs/mine
    shardwright checkpoint inspect runs/mine/checkpoint/step-00000400
    """
    from rich.table import Table

    from shardwright.checkpoint import portable, step_directories

    console, resolved = Console(width=max(Console().width, 112)), step_directories.resolve_checkpoint(path)
    manifest = step_directories.read_manifest(resolved)
    for line in portable.describe_checkpoint(resolved, manifest):
        console.print(line, highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(("tensor", "dtype and shape", "MB", "stored as")):
        table.add_column(column, justify="right" if index == 2 else "left", no_wrap=True)
    rows = portable.tensor_table(manifest)
    for row in rows[:MAX_SHOWN]:
        table.add_row(*row)
    console.print(table)
    if len(rows) > MAX_SHOWN:
        console.print(f"and {len(rows) - MAX_SHOWN} smaller tensors", highlight=False)


@checkpoint.command()
def verify(path: CheckpointArgument) -> None:
    """Read a checkpoint and its bases, and compare every header and block with the manifest.

    \b
    shardwright checkpoint verify runs/mine
    """
    import time

    from shardwright.checkpoint import step_directories
    from shardwright.checkpoint.reading import Checkpoint

    console, start = Console(), time.perf_counter()
    with closing(Checkpoint(step_directories.resolve_checkpoint(path))) as source, console.status("") as status:
        bytes_ = source.verify(lambda done: status.update(f"{done / 1e6:,.0f} MB"))
    seconds = time.perf_counter() - start
    console.print(f"{source.path}: intact, {bytes_ / 1e6:,.1f} MB in {seconds:.1f} s", highlight=False, soft_wrap=True)


@checkpoint.command()
def reshard(
    path: CheckpointArgument,
    output: Annotated[Path, typer.Argument(help="The folder to write the checkpoint in, named by its step.")],
    files: Annotated[int, typer.Option(help="The number of files to split its rows over.")] = 1,
) -> None:
    """Write a full copy of a checkpoint with rows in id order; jobs read any checkpoint and do not need it.

    \b
    shardwright checkpoint reshard runs/mine whole --files 4
    """
    from shardwright.checkpoint import portable, step_directories

    resharded = portable.reshard(step_directories.resolve_checkpoint(path), output, files)
    Console().print(f"checkpoint  {resharded}", highlight=False, soft_wrap=True)


@checkpoint.command()
def export(
    path: CheckpointArgument,
    output: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    prefix: Annotated[str, typer.Option(help="Export only names that begin with this, and remove it: sparse.")] = "",
) -> None:
    """Export the model's state_dict, with unsharded tables, as a safetensors file for any library.

    \b
    shardwright checkpoint export runs/mine model.safetensors
    shardwright checkpoint export runs/mine tables.safetensors --prefix sparse.     for torchrec
    """
    from shardwright.checkpoint import portable, step_directories

    num, bytes_ = portable.export_state_dict(step_directories.resolve_checkpoint(path), output, prefix)
    Console().print(f"{output}: {num} tensors, {bytes_ / 1e6:,.1f} MB", highlight=False, soft_wrap=True)
