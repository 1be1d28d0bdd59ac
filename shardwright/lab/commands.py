"""`shardwright lab`: make an emulated cluster, run in it, look at it, remove it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

lab = typer.Typer(
    help="A cluster on this machine: hosts in namespaces, shaped links, cpu quotas.", no_args_is_help=True
)
LabName = Annotated[str, typer.Option(help="The lab's name.")]


@lab.command("up")
def lab_up(
    shape: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A .toml file with the lab's shape.")] = None,
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks of each.")] = 1,
    uplink: Annotated[str, typer.Option(help="Rate between a host and the others, as 1gbit. Default: unshaped.")] = "",
    local: Annotated[str, typer.Option(help="Rate between a rank and its host.")] = "",
    front: Annotated[str, typer.Option(help="A second network: the rate of each host on it.")] = "",
    cpu: Annotated[float, typer.Option(help="Cores of each rank; 0: no limit.")] = 0.0,
    name: LabName = "lab",
) -> None:
    """Make hosts, their ranks' namespaces and the links between. As root.

    \b
    shardwright lab up --hosts 2 --ranks 2 --uplink 1gbit --cpu 0.5
    shardwright lab up racks.toml                          hosts that differ, two tiers of uplinks: docs/lab.md
    """
    from shardwright.lab.emulated_cluster import Lab
    from shardwright.lab.shape import Host, Shape
    from shardwright.spec import files

    host = Host(ranks=ranks, uplink=uplink, local=local, front=front, cpu=cpu)
    made = Lab(files.read(Shape, shape) if shape else Shape((host,) * hosts), name)
    made.start()
    Console().print(f'lab "{name}" is up: {len(made.shape.hosts)} hosts, {made.shape.num_ranks} ranks', highlight=False)


@lab.command("run")
def lab_run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What every rank runs.")],
    shape: Annotated[
        Path | None, typer.Option(help="Bring up a lab of this shape for this command alone; needs no root.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="End the run after this time; 0: never.")] = 0.0,
    name: LabName = "lab",
) -> None:
    """Run a command as every rank, with torchrun's variables; the first rank that fails ends all.

    \b
    shardwright lab run -- python train.py
    shardwright lab run --shape racks.toml -- python train.py
    """
    from contextlib import nullcontext

    from shardwright.lab import emulated_cluster
    from shardwright.lab.shape import Shape
    from shardwright.runtime.launch.supervisor import describe_exit
    from shardwright.spec import files

    if shape is not None:
        emulated_cluster.become_root()
    with (
        emulated_cluster.Lab(files.read(Shape, shape), name)
        if shape
        else nullcontext(emulated_cluster.Lab.open(name)) as made
    ):
        before = made.traffic()
        ended = made.run(command, timeout_seconds=seconds)
        Console(stderr=True).print(_links(made.traffic(), before))
    if ended.rank is not None:
        why = f"ran longer than {seconds:g} s" if ended.timed_out else describe_exit(ended.status)
        host = made.shape.host_of(ended.rank)
        print(f"shardwright: rank {ended.rank} of host {host} {why}; all ranks were ended", file=sys.stderr)
        raise typer.Exit(ended.status if ended.status > 0 else 128 - ended.status)


@lab.command("status")
def lab_status() -> None:
    """What is up, and what its links have carried."""
    from shardwright.lab import emulated_cluster

    console = Console()
    for name in emulated_cluster.list_labs():
        if not emulated_cluster.is_complete(name):
            console.print(f'lab "{name}": left behind; shardwright lab down --name {name}', highlight=False)
            continue
        made = emulated_cluster.Lab.open(name)
        console.print(f'lab "{name}": {len(made.shape.hosts)} hosts, {made.shape.num_ranks} ranks', highlight=False)
        console.print(_links(made.traffic()))


@lab.command("down")
def lab_down(
    name: LabName = "lab",
    all_: Annotated[bool, typer.Option("--all", help="Every lab, and what killed ones left behind.")] = False,
) -> None:
    """End what runs in a lab and remove it."""
    from shardwright.lab import emulated_cluster

    if not all_ and name not in emulated_cluster.list_labs():
        raise emulated_cluster.no_such_lab_error(name)
    for one in emulated_cluster.list_labs() if all_ else [name]:
        emulated_cluster.remove_lab(one)
        Console().print(f'lab "{one}" is down', highlight=False)


def _links(now: Sequence[Any], before: Sequence[Any] = ()) -> Any:
    """A table of what links have carried, since then."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("link")
    table.add_column("MB towards the core", justify="right")
    table.add_column("MB from it", justify="right")
    past = {line.link: line for line in before}
    for line in now:
        sent, received = (
            getattr(line, way) - (getattr(past[line.link], way) if past else 0)
            for way in ("sent_bytes", "received_bytes")
        )
        table.add_row(line.link, f"{sent / 1e6:,.3f}", f"{received / 1e6:,.3f}")
    return table
