"""`shardwright lab`: create an emulated cluster, run commands on it, show its traffic, remove it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

lab = typer.Typer(
    help="Emulate a cluster on this machine: hosts as namespaces, links with a rate, CPU quotas.", no_args_is_help=True
)
LabName = Annotated[str, typer.Option(help="The lab's name.")]


@lab.command("up")
def lab_up(
    shape: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A .toml file with the lab's shape.")] = None,
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks per host.")] = 1,
    uplink: Annotated[str, typer.Option(help="Rate of each host's uplink, such as 1gbit. Default: no limit.")] = "",
    local: Annotated[str, typer.Option(help="Rate of each rank's link to its host. Default: no limit.")] = "",
    front: Annotated[str, typer.Option(help="Add a second network: the rate of each host on it.")] = "",
    cpu: Annotated[float, typer.Option(help="CPU quota of each rank, in cores; 0: no limit.")] = 0.0,
    name: LabName = "lab",
) -> None:
    """Create the hosts, the namespaces of their ranks and the links between them. Needs root.

    \b
    shardwright lab up --hosts 2 --ranks 2 --uplink 1gbit --cpu 0.5
    shardwright lab up racks.toml                          hosts that differ, two tiers of uplinks: docs/lab.md
    """
    from shardwright.lab.emulated_cluster import Lab
    from shardwright.lab.shape import Host, Shape
    from shardwright.spec import files

    host = Host(ranks=ranks, uplink=uplink, local=local, front=front, cpu=cpu)
    cluster = Lab(files.read(Shape, shape) if shape else Shape((host,) * hosts), name)
    cluster.start()
    num_hosts, num_ranks = len(cluster.shape.hosts), cluster.shape.num_ranks
    Console().print(f'lab "{name}" is up: {num_hosts} hosts, {num_ranks} ranks', highlight=False)


@lab.command("run")
def lab_run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command that every rank runs.")],
    shape: Annotated[
        Path | None, typer.Option(help="Create a lab of this shape for this command only; needs no root.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time limit of the run in seconds; 0: none.")] = 0.0,
    name: LabName = "lab",
) -> None:
    """Run a command as every rank, with torchrun's variables; if one rank fails, all are stopped.

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
        else nullcontext(emulated_cluster.Lab.open(name)) as cluster
    ):
        before = cluster.traffic()
        rank_exit = cluster.run(command, timeout_seconds=seconds)
        Console(stderr=True).print(_link_table(cluster.traffic(), before))
    if rank_exit.rank is not None:
        why = f"ran longer than {seconds:g} s" if rank_exit.timed_out else describe_exit(rank_exit.status)
        host = cluster.shape.host_of(rank_exit.rank)
        print(f"shardwright: rank {rank_exit.rank} of host {host} {why}; all ranks were ended", file=sys.stderr)
        raise typer.Exit(rank_exit.status if rank_exit.status > 0 else 128 - rank_exit.status)


@lab.command("status")
def lab_status() -> None:
    """List the labs that are up, with the bytes that their links have carried."""
    from shardwright.lab import emulated_cluster

    console = Console()
    for name in emulated_cluster.list_labs():
        if not emulated_cluster.is_complete(name):
            console.print(f'lab "{name}": left behind; remove it: shardwright lab down --name {name}', highlight=False)
            continue
        cluster = emulated_cluster.Lab.open(name)
        num_hosts, num_ranks = len(cluster.shape.hosts), cluster.shape.num_ranks
        console.print(f'lab "{name}": {num_hosts} hosts, {num_ranks} ranks', highlight=False)
        console.print(_link_table(cluster.traffic()))


@lab.command("down")
def lab_down(
    name: LabName = "lab",
    all_: Annotated[bool, typer.Option("--all", help="Every lab, and the remains of killed ones.")] = False,
) -> None:
    """End all processes of a lab and remove it."""
    from shardwright.lab import emulated_cluster

    if not all_ and name not in emulated_cluster.list_labs():
        raise emulated_cluster.no_such_lab_error(name)
    for lab_name in emulated_cluster.list_labs() if all_ else [name]:
        emulated_cluster.remove_lab(lab_name)
        Console().print(f'lab "{lab_name}" is down', highlight=False)


def _link_table(traffic: Sequence[Any], before: Sequence[Any] = ()) -> Any:
    """A table of the bytes that the links have carried since `before`."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("link")
    table.add_column("MB towards the core", justify="right")
    table.add_column("MB from the core", justify="right")
    past = {entry.link: entry for entry in before}
    for entry in traffic:
        sent_bytes, received_bytes = (
            getattr(entry, counter) - (getattr(past[entry.link], counter) if past else 0)
            for counter in ("sent_bytes", "received_bytes")
        )
        table.add_row(entry.link, f"{sent_bytes / 1e6:,.3f}", f"{received_bytes / 1e6:,.3f}")
    return table
