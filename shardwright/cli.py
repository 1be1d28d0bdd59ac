"""Command line: few commands with few options; all other settings are keys of the recipe."""

import errno
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardwright.checkpoint.commands import checkpoint
from shardwright.data.commands import data
from shardwright.errors import UserError, check_file_name
from shardwright.lab.commands import lab
from shardwright.report.cache_commands import cache_sim
from shardwright.report.plan_command import plan
from shardwright.runtime.run.evaluate_command import evaluate
from shardwright.runtime.run.reader import reader
from shardwright.runtime.run.table_server import serve_tables
from shardwright.serving import commands as serving
from shardwright.serving.scoring.commands import predict
from shardwright.spec import presets

if TYPE_CHECKING:
    from shardwright.config import Settings

app = typer.Typer(
    help="Shardwright trains models that outgrow a device.",
    epilog="Start here:  shardwright train synthetic-dlrm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(data, name="data")
app.add_typer(reader, name="reader")
app.add_typer(lab, name="lab")
app.add_typer(checkpoint, name="checkpoint")
app.command()(serving.export)
app.command()(serving.serve)
app.command()(evaluate)
app.command()(predict)
app.command("cache-sim")(cache_sim)
app.command()(plan)
app.command("serve-tables")(serve_tables)


def _print_version(requested: bool) -> None:
    if requested:
        from shardwright import __version__

        print(f"shardwright {__version__}")
        raise typer.Exit


@app.callback()
def shardwright(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Shardwright trains models that outgrow a device: it plans their sharding, trains them, and reports."""


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe, a .toml file, or fuxictr:FILE.")] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to set.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved settings and the plan without training.")
    ] = False,
) -> None:
    """Train a recipe into a run directory and write its report.

    \b
    shardwright train                                      list the recipes
    shardwright train synthetic-dlrm                       under a minute on two cores
    shardwright train synthetic-dlrm train.steps=2000 tables.lr=0.02
    shardwright train synthetic-dlrm ranks=2               two processes, tables sharded by the planner
    shardwright train gpt data=books                       a language model on a folder of texts
    shardwright train synthetic-dlrm run.name=mine         name the run, to resume it later
    shardwright train runs/mine/config.toml run.resume=true
    shardwright train my.toml model.kind=my_models:make    an nn.Module of your code
    shardwright train fuxictr:model_config.yaml            a model configuration of FuxiCTR: docs/fuxictr.md
    shardwright train synthetic-dlrm ranks=2 --dry-run     print all settings and the plan without training
    \b
    On Ctrl-C, SIGTERM or SIGHUP the run finishes the step, saves a checkpoint and prints how to resume; a second
    signal stops it at once. ranks=N starts N processes on this host, which listen on loopback only. For several
    hosts, use torchrun in a trusted network: docs/sharding.md.
    """
    from shardwright import config

    console = Console()
    if not recipe:
        _list_recipes(console)
        return
    settings = config.load(recipe, overrides or ())
    if dry_run:
        _print_preview(settings)
        return
    from shardwright.comm.mesh import is_first_rank
    from shardwright.runtime.launch import launcher
    from shardwright.runtime.run import train as training
    from shardwright.runtime.run.directory import next_run_name

    if settings.ranks > 1 and not launcher.join_launch():
        arguments = ["-m", "shardwright.cli", "train", recipe, *(overrides or ())]
        if settings.restarts and not settings.run.name:
            arguments.append(f"run.name={next_run_name(settings)}")
        raise typer.Exit(launcher.launch_ranks(settings.ranks, arguments, settings.restarts))
    launcher.join_launch()
    launcher.die_with_launcher()
    if not is_first_rank():
        if stop_signal := training.train(settings).stop_signal:
            raise typer.Exit(128 + stop_signal)
        return
    _train_and_report(settings, console)


def _train_and_report(settings: "Settings", console: Console) -> None:
    """Train with progress on the terminal, then write the report page."""
    from shardwright.report import terminal
    from shardwright.report.run_page import describe_disturbance, render
    from shardwright.report.run_record import read_machine_windows
    from shardwright.runtime.run import train as training

    with terminal.ProgressDisplay(console) as display:
        try:
            result = training.train(settings, [display])
        except KeyboardInterrupt:
            raise typer.Exit(display.report_stop()) from None
        if result.stop_signal:
            raise typer.Exit(display.report_stop(result.stop_signal, result.step))
    page = render(result.path)
    if disturbance := describe_disturbance(tuple(read_machine_windows(result.path / "machine.jsonl"))):
        console.print(disturbance, highlight=False, soft_wrap=True)
    console.print(terminal.summary(result.evaluation, result.samples_per_second, result.rates), highlight=False)
    if result.pause_seconds:
        console.print(terminal.format_checkpoint_pauses(result.pause_seconds), highlight=False)
    console.print(f"report  {page}", highlight=False, soft_wrap=True)


@app.command("recipe")
def print_recipe(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]", help="A recipe, or a kind of model; without a name, list the built-in recipes."
        ),
    ] = "",
) -> None:
    """Print a recipe, to read it or as the start of a new recipe; of a kind of model its keys and their defaults.

    \b
    shardwright recipe                             list the recipes
    shardwright recipe criteo-dlrm > mine.toml     a copy to edit
    shardwright recipe dlrm                        the keys of model.kind=dlrm, with types and defaults
    """
    from shardwright import config

    if not name:
        _list_recipes(Console())
        return
    is_recipe, is_kind = name in config.recipes(), name.isidentifier() and _is_model_kind(name)
    if is_recipe or not is_kind:
        print(config.recipe_text(name), end="")
    if is_kind:
        _print_model_keys(name, prefix="# " if is_recipe else "")


def _is_model_kind(name: str) -> bool:
    from shardwright.models.names import MODELS

    return name in MODELS


def _print_model_keys(kind: str, prefix: str) -> None:
    """Print the keys of a kind of model, and the recipes that use it; `prefix` makes the lines comments of a recipe."""
    from shardwright import config
    from shardwright.models.keys import format_keys

    users = [name for name in config.recipes() if config.recipe_values(name)["model"]["kind"] == kind]
    for line in (f'keys of model.kind = "{kind}"; recipes: {", ".join(users) or "none"}', *format_keys(kind)):
        print(f"{prefix}{line}")


def _list_recipes(console: Console) -> None:
    from shardwright import config

    for name, title in config.recipes().items():
        console.print(f"[bold]{name}[/]  {title}", highlight=False)


def _print_preview(settings: "Settings") -> None:
    """Print the resolved settings as TOML, with the plan in comments."""
    from shardwright import config
    from shardwright.runtime.planning import preview

    resolved, run_plan = preview(settings)
    print(config.dump(resolved))
    print(f"# plan for {run_plan.num_ranks} rank(s)")
    for subject, reason in run_plan.why:
        print(f"# {subject}: {reason}")
    print(f"# stages: {', '.join(stage.name for stage in run_plan.stages)}")


@app.command()
def measure(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write; an existing file is extended.")],
    layers: Annotated[
        bool, typer.Option("--layers", help="Also products and attention of transformers, in bfloat16.")
    ] = False,
) -> None:
    """Measure machines: matrix products, memory, disk, and the network between the ranks of this launch.

    \b
    shardwright measure -o cluster.toml                              one process on this machine
    shardwright measure --layers -o cluster.toml                     to plan transformers: docs/layers.md
    torchrun --nproc-per-node 2 -m shardwright.cli measure -o cluster.toml
    shardwright lab run -- shardwright measure -o cluster.toml       every link of the lab
    """
    from shardwright.comm.mesh import is_first_rank
    from shardwright.measure import machine
    from shardwright.report import cluster as page
    from shardwright.report import terminal
    from shardwright.spec import files

    console = Console(quiet=not is_first_rank(), width=max(Console().width, 104))
    if output.suffix != ".toml":
        raise UserError(f"{output}: a cluster is a .toml file; set --output to a name that ends in .toml")
    previous = presets.load_cluster(output) if output.exists() else None
    start = time.monotonic()
    with console.status("measuring") as status:
        cluster = machine.measure_cluster(
            output.stem,
            output.resolve().parent,
            lambda what: status.update(f"measuring {what}"),
            with_layers=layers,
        )
    if not is_first_rank():
        return
    cluster = machine.merge_clusters(previous, cluster) if previous else cluster
    cluster.verify()
    files.write(cluster, output)
    for title, grid in page.grids(cluster):
        console.print(terminal.rich_table(title, grid))
    for note in page.notes(cluster):
        console.print(note, highlight=False)
    console.print(f"measured in {time.monotonic() - start:.0f} s", highlight=False)
    console.print(f"cluster  {output}", highlight=False, soft_wrap=True)
    console.print(f"page     {page.render(cluster, output.with_suffix('.html'))}", highlight=False, soft_wrap=True)


@app.command()
def check_scheme(
    module: Annotated[
        str, typer.Argument(help="A Python module that defines sharding schemes, such as my_package.schemes.")
    ],
) -> None:
    """Check your own sharding schemes: plan, train on four local ranks, compare with nn.EmbeddingBag, export.

    \b
    shardwright check-scheme my_package.schemes
    """
    from shardwright.check_scheme import check_schemes, load_schemes

    for line in check_schemes(load_schemes(module)):
        print(line, flush=True)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories, such as runs/synthetic-dlrm-001; or a cluster."),
    ],
    output: Annotated[Path | None, typer.Option(help="The page to write instead of the default.")] = None,
) -> None:
    """Write the report of a run, of a cluster, or a comparison of runs, as a self-contained HTML page.

    \b
    shardwright report runs/mine                   runs/mine/report.html
    shardwright report runs/mine runs/yours        runs/compare.html
    shardwright report cluster.toml                cluster.html: measurements of machines and links
    shardwright report zionex-128-a100             the page of a published cluster
    """
    from shardwright.report import cluster, compare, run_page

    if runs[0].suffix == ".toml" or str(runs[0]) in presets.cluster_names():
        if runs[1:]:
            raise UserError(f"{len(runs)} arguments, the first of them a cluster; give a single cluster, or only runs")
        page = cluster.render(presets.load_cluster(str(runs[0])), output or Path(f"{runs[0].with_suffix('')}.html"))
    else:
        page = run_page.render(runs[0], output=output) if len(runs) == 1 else compare.render(runs, output=output)
    Console().print(f"report  {page}", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; user errors and failed allocations print a one-line message and exit with 2."""
    try:
        for argument in sys.argv[1:]:
            check_file_name(argument)
        app()
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        sys.stderr.write(f"shardwright: {UserError(str(error))}\n")  # at once: the launcher recognizes equal errors
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        from shardwright.runtime.memory_check import out_of_memory_message

        if (line := out_of_memory_message(error)) is None:
            raise
        print(f"shardwright: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
