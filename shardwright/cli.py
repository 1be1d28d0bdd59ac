"""The command line: few commands, few options; everything else is a key of the recipe."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.errors import UserError, nearest

# Keys of a recipe's section data that a look has use for.
INSPECTED = ("schema", "encoding", "strict", "memory", "cache")

app = typer.Typer(
    help="Shardwright trains models that outgrow a device.",
    epilog="Start here:  shardwright train synthetic-dlrm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


data = typer.Typer(help="Look at logs.", no_args_is_help=True)
app.add_typer(data, name="data")
lab = typer.Typer(
    help="A cluster on this machine: hosts in namespaces, shaped links, cpu quotas.", no_args_is_help=True
)
app.add_typer(lab, name="lab")
LabName = Annotated[str, typer.Option(help="The lab's name.")]


@app.callback()
def shardwright() -> None:
    """Shardwright trains models that outgrow a device: it plans who holds what, trains, and reports."""


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or a .toml file of your own.")] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to set.")
    ] = None,
) -> None:
    """Train a recipe into a run directory and write its report.

    \b
    shardwright train                                      list the recipes
    shardwright train synthetic-dlrm                       one minute on two cores
    shardwright train synthetic-dlrm train.steps=2000 tables.lr=0.02
    shardwright train synthetic-dlrm run.name=mine         name the run, so that it can be resumed
    shardwright train runs/mine/config.toml run.resume=true
    shardwright train my.toml model.kind=my_models:make    your own nn.Module
    """
    from shardwright import config

    console = Console()
    if not recipe:
        for name, path in config.recipes().items():
            console.print(f"[bold]{name}[/]  {path.read_text().splitlines()[0].lstrip('# ')}", highlight=False)
        return
    settings = config.load(recipe, overrides or ())
    from shardwright.report.page import render
    from shardwright.runtime import loop

    with Follower(console, settings.train.steps) as follower:
        try:
            finished = loop.train(settings, follower)
        except KeyboardInterrupt:
            raise typer.Exit(follower.stopped()) from None
    page = render(finished.path)
    console.print(_summary(finished.evaluation, finished.samples_per_second), highlight=False)
    console.print(f"report  {page}", highlight=False, soft_wrap=True)


@data.command()
def inspect(
    path: Annotated[str, typer.Argument(metavar="FILE", help="A log: a file, plain or compressed, or a directory.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of a recipe's section data.")
    ] = None,
) -> None:
    """Show what a log holds: rows, base rate, and of every column its values, their skew and the table they want.

    \b
    shardwright data inspect train.tsv.gz                        Criteo and Avazu logs are known by their columns
    shardwright data inspect ml-100k                             a MovieLens directory
    shardwright data inspect mine.parquet schema=mine.toml       any other: say what its columns are
    shardwright data inspect train.tsv.gz strict=false output=statistics.json
    """
    from rich.table import Table

    from shardwright.config import overridden
    from shardwright.data import inspect as looking
    from shardwright.data.logs import guess, open_log
    from shardwright.spec import files

    keys: dict[str, Any] = overridden({}, settings or ())
    output = keys.pop("output", "")
    kind = keys.pop("kind", "") or ("log" if "schema" in keys else guess(path))
    for key in keys:
        if key not in INSPECTED:
            raise UserError(f'unknown key "{key}"{nearest(key, (*INSPECTED, "kind", "output"))}')
    found = looking.inspect(open_log(kind, path, split={"test": 0.0}, **keys))
    console = Console(width=max(Console().width, 104))
    for title, columns, rows in looking.told(found):
        table = Table(title=title, title_justify="left", box=None, show_header=any(columns), pad_edge=False)
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table, soft_wrap=True)
        console.print()
    if output:
        files.write(looking.log_statistics(found), output)
        console.print(f"statistics  {output}", highlight=False, soft_wrap=True)


@app.command()
def measure(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write; one that is there is added to.")],
) -> None:
    """Find out what these machines do: products, memory, disk, and the network between the ranks of this launch.

    \b
    shardwright measure -o cluster.toml                              one process, this machine
    torchrun --nproc-per-node 2 -m shardwright.cli measure -o cluster.toml
    shardwright lab run -- shardwright measure -o cluster.toml       every link of the lab
    """
    from shardwright.comm.mesh import first_rank
    from shardwright.measure import machine
    from shardwright.report import cluster as page
    from shardwright.spec import files, presets

    console = Console(quiet=not first_rank(), width=max(Console().width, 104))
    if output.suffix != ".toml":
        raise UserError(f"{output}: a cluster is a .toml file")
    before = presets.cluster(output) if output.exists() else None
    start = time.monotonic()
    with console.status("measuring") as status:
        found = machine.measure(output.stem, output.resolve().parent, lambda what: status.update(f"measuring {what}"))
    if not first_rank():
        return
    found = machine.merged(before, found) if before else found
    found.verify()
    files.write(found, output)
    for title, grid in page.grids(found):
        console.print(_table(title, grid))
    for note in page.notes(found):
        console.print(note, highlight=False)
    console.print(f"measured in {time.monotonic() - start:.0f} s", highlight=False)
    console.print(f"cluster  {output}", highlight=False, soft_wrap=True)
    console.print(f"page     {page.render(found, output.with_suffix('.html'))}", highlight=False, soft_wrap=True)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories, as runs/synthetic-dlrm-001; or one cluster."),
    ],
    output: Annotated[Path | None, typer.Option(help="Where to write the page instead.")] = None,
) -> None:
    """Write the report of a run, a comparison of several, or a cluster: one self-contained page for any browser.

    \b
    shardwright report runs/mine                   runs/mine/report.html
    shardwright report runs/mine runs/yours        runs/compare.html
    shardwright report cluster.toml                cluster.html: what its machines and links do
    shardwright report zionex-128-a100             the same of a published cluster
    """
    from shardwright.report import cluster, compare, page
    from shardwright.spec import presets

    if runs[0].suffix == ".toml" or str(runs[0]) in presets.names():
        if runs[1:]:
            raise UserError("a page shows one cluster; give one")
        made = cluster.render(presets.cluster(str(runs[0])), output or Path(f"{runs[0].with_suffix('')}.html"))
    else:
        made = page.render(runs[0], output=output) if len(runs) == 1 else compare.render(runs, output=output)
    Console().print(f"report  {made}", highlight=False, soft_wrap=True)


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
    from shardwright.lab.cluster import Lab
    from shardwright.lab.shape import Host, Shape
    from shardwright.spec import files

    host = Host(ranks=ranks, uplink=uplink, local=local, front=front, cpu=cpu)
    made = Lab(files.read(Shape, shape) if shape else Shape((host,) * hosts), name)
    made.up()
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

    from shardwright.lab import cluster
    from shardwright.lab.shape import Shape
    from shardwright.spec import files

    if shape is not None:
        cluster.become_root()
    with cluster.Lab(files.read(Shape, shape), name) if shape else nullcontext(cluster.Lab.named(name)) as made:
        before = made.traffic()
        ended = made.run(command, timeout_seconds=seconds)
        Console(stderr=True).print(_links(made.traffic(), before))
    if ended.rank is not None:
        why = f"ran longer than {seconds:g} s" if ended.late else f"ended with status {ended.status}"
        print(f"shardwright: rank {ended.rank} {why}; all ranks were ended", file=sys.stderr)
        raise typer.Exit(ended.status if ended.status > 0 else 128 - ended.status)


@lab.command("status")
def lab_status() -> None:
    """What is up, and what its links have carried."""
    from shardwright.lab import cluster

    console = Console()
    for name in cluster.up():
        if not cluster.whole(name):
            console.print(f'lab "{name}": left behind; shardwright lab down --name {name}', highlight=False)
            continue
        made = cluster.Lab.named(name)
        console.print(f'lab "{name}": {len(made.shape.hosts)} hosts, {made.shape.num_ranks} ranks', highlight=False)
        console.print(_links(made.traffic()))


@lab.command("down")
def lab_down(
    name: LabName = "lab",
    all_: Annotated[bool, typer.Option("--all", help="Every lab, and what killed ones left behind.")] = False,
) -> None:
    """End what runs in a lab and remove it."""
    from shardwright.lab import cluster

    if not all_ and name not in cluster.up():
        raise cluster.none_up(name)
    for one in cluster.up() if all_ else [name]:
        cluster.down(one)
        Console().print(f'lab "{one}" is down', highlight=False)


def _table(title: str, grid: Any) -> Any:
    """A page's grid on a terminal."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(grid.columns):
        table.add_column(column, justify="left" if number < grid.words else "right", no_wrap=True)
    for row in grid.rows:
        table.add_row(*row)
    return table


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
            getattr(line, way) - (getattr(past[line.link], way) if past else 0) for way in ("sent", "received")
        )
        table.add_row(line.link, f"{sent / 1e6:,.3f}", f"{received / 1e6:,.3f}")
    return table


class Follower:
    """Shows a run: a progress bar on a terminal; elsewhere its evaluations, and a line of training now and then."""

    SECONDS_BETWEEN_LINES = 5.0

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("training", total=steps, facts="")
        self._printed = 0.0
        self._path: Path | None = None

    def __enter__(self) -> "Follower":
        if self._terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._bar.stop()

    def begin(self, path: Path) -> None:
        self._path = path
        self._console.print(f"run     {path}", highlight=False, soft_wrap=True)

    def stopped(self) -> int:
        """Say how to go on after an interrupt; the exit code of one."""
        if self._path is not None:
            self._bar.stop()
            command = f"shardwright train {self._path / 'config.toml'} run.resume=true"
            print(f"stopped; to continue from the last checkpoint:  {command}", file=sys.stderr)
        return 130

    def step(self, step: int, samples: int) -> None:
        self._bar.update(self._task, completed=step)

    def line(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "progressive":
            return
        if line["kind"] == "train":
            facts = [f"{line['samples_per_second']:,.0f} samples/s"]
            facts += [f"NE {line['ne']:.4f}"] if "ne" in line else [f"loss {line['loss']:.4f}"]
            self._bar.update(self._task, facts="  ".join(facts))
            if self._terminal or time.monotonic() - self._printed < self.SECONDS_BETWEEN_LINES:
                return
            self._printed = time.monotonic()
        self._console.print(_told(line), highlight=False, soft_wrap=True)


def _told(line: Mapping[str, Any]) -> str:
    parts = [f"step {line['step']:>6}", f"{line['kind']:<5}"]
    for key, name in (("loss", "loss"), ("ne", "NE"), ("bound_ne", "bound"), ("auc", "AUC"), ("grouped_auc", "GAUC")):
        if key in line:
            parts.append(f"{name} {line[key]:.4f}")
    if "samples_per_second" in line:
        parts.append(f"{line['samples_per_second']:,.0f} samples/s")
    return "  ".join(parts)


def _summary(evaluation: Mapping[str, Any], samples_per_second: float) -> str:
    parts = []
    if "ne" in evaluation:
        bound = f" (best reachable {evaluation['bound_ne']:.4f})" if "bound_ne" in evaluation else ""
        parts.append(f"NE {evaluation['ne']:.4f}{bound}")
    if "auc" in evaluation:
        parts.append(f"AUC {evaluation['auc']:.4f}")
    if "loss" in evaluation:
        parts.append(f"loss {evaluation['loss']:.4f}")
    return "  ".join((*parts, f"{samples_per_second:,.0f} samples/s"))


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"shardwright: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
