"""`shardwright plan`: of a model with tables, of a model of layers by its sizes, or of recorded routing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console

from shardwright.errors import UserError, did_you_mean
from shardwright.spec import files, presets, routing_trace

if TYPE_CHECKING:
    from shardwright.planner.layers.layer_search import SearchResult
    from shardwright.planner.routing_gains import RoutingGains
    from shardwright.report.html_template import Grid

ENGINES = ("megatron", "torchtitan")
EXPORTS = ("torchrec", *ENGINES)


class PlanArguments(NamedTuple):
    """What was asked on the command line. `batch`: 0: the recipe's."""

    recipe: str
    overrides: Sequence[str]
    cluster: str
    batch: int
    explain: bool
    export: str
    output: Path


def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A built-in recipe, a .toml file, fuxictr:FILE, a workload .json, a transformer by name, its "
            "config.json, or recorded routing .jsonl, or a script .sh with arguments of Megatron-LM."
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            help=f"A cluster file of `shardwright measure`, or a preset: {', '.join(presets.cluster_names())}."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to set.")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=0, help="Global batch size; of a transformer, in sequences. Default: the recipe's.")
    ] = 0,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Print all tables and all parallelism strategies; of a transformer, why pinned degrees are slower.",
        ),
    ] = False,
    compare: Annotated[Path | None, typer.Option(help="Compare with another plan of this workload.")] = None,
    export: Annotated[
        str,
        typer.Option(
            help='"torchrec": also plan for TorchRec, and write that plan as a Python module. Of a transformer, '
            '"megatron" or "torchtitan": write the flags that start the best configuration.'
        ),
    ] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("plan.json"),
) -> None:
    """Plan the sharding of tables and the schedule of a step, and predict its time; write the plan and a page.

    Both also show the predicted step if rows were read from stale copies: docs/staleness.md.

    For a transformer by its sizes, plan degrees of parallelism, recomputation and offload: docs/layers.md.

    For recorded routing of experts, predict the gain of copies and of exchange in steps, and place experts:
    docs/routing.md.

    \b
    shardwright plan synthetic-dlrm --cluster cluster.toml
    shardwright plan synthetic-dlrm --cluster zionex-128-a100 --batch 65536 --explain
    shardwright plan workload.json --cluster cluster.toml allow='["wire.bf16"]' plan.pins.site=row
    shardwright plan moe-gpt --cluster cluster.toml plan.routing=routing.jsonl
    shardwright plan llama-65b --cluster h800-256 --batch 256 length=4096
    shardwright plan llama-65b --cluster h800-256 --batch 256 pins.tensor=8 --explain
    shardwright plan config.json --cluster h800-256 ranks=64 --export megatron
    shardwright plan pretrain.sh --cluster h100 ranks=64
    shardwright plan routing.jsonl --cluster johnny experts.channels=4096 experts.hidden=1536 experts.form=swiglu
    """
    arguments = PlanArguments(recipe, overrides or (), cluster, batch, explain, export, output)
    if output.suffix != ".json":
        raise UserError(f"{output}: a plan is a .json file; set --output to a name that ends in .json")
    if export not in ("", *EXPORTS):
        raise UserError(f'export="{export}"; allowed: {", ".join(EXPORTS)}')
    _plan(Console(width=max(Console().width, 130)), arguments, compare)


def _plan(console: Console, arguments: PlanArguments, compare: Path | None) -> None:
    """Plan what the recipe names: a script, recorded routing, a transformer, or a model with tables."""
    from shardwright import config
    from shardwright.runtime import layer_request, routing_request
    from shardwright.spec.transformer import transformer_names

    recipe, export = arguments.recipe, arguments.export
    if Path(recipe).suffix == ".sh":
        options = {"batch": arguments.batch, "compare": compare, "export torchrec": export == "torchrec"}
        _refuse_options(f"{recipe} has arguments of Megatron-LM", "a recipe", options)
        _plan_layers(console, arguments, is_script=True)
    elif routing_trace.is_trace(recipe):
        options = {"batch": arguments.batch, "explain": arguments.explain, "compare": compare, "export": export}
        _refuse_options(f"{recipe} is recorded routing", "a recipe", options)
        gains = routing_request.analyse_trace(recipe, arguments.overrides, arguments.cluster)
        _print_gains(console, gains, arguments.output)
    elif layer_request.is_layer_model(recipe):
        options = {"compare": compare, "export torchrec": export == "torchrec"}
        _refuse_options(f"{recipe} is a model of layers", "a model with tables", options)
        _plan_layers(console, arguments)
    else:
        names = [*config.recipes(), *transformer_names()]
        is_name = Path(recipe).stem == recipe and ":" not in recipe and not Path(recipe).exists()
        if is_name and recipe not in names:
            raise UserError(f'no recipe or transformer "{recipe}"{did_you_mean(recipe, names)}')
        _refuse_options(f"{recipe} is no transformer", "a model of layers", {f"export {export}": export in ENGINES})
        _plan_tables(console, arguments, compare)


def _refuse_options(subject: str, wanted: str, options: Mapping[str, object]) -> None:
    if given := [name for name, value in options.items() if value]:
        raise UserError(f"{subject}: --{given[0]} is for {wanted}; drop it")


def _plan_tables(console: Console, arguments: PlanArguments, compare: Path | None) -> None:
    """Plan a recipe or a workload."""
    from shardwright.report import plan as page
    from shardwright.report import terminal
    from shardwright.report.staleness_frontier import describe_frontier
    from shardwright.runtime import routing_request
    from shardwright.runtime.planning import read_plan_request

    output = arguments.output
    planning = read_plan_request(*arguments[:4])
    result = planning.make_plan()
    torchrec = planning.make_plan(torchrec=True) if arguments.export else None
    other = page.read_other_plan(result, compare) if compare else None
    result.plan.verify(result.candidate.problem.workload)
    files.write(result.plan, output)
    stale = describe_frontier(result)
    _print_tables(console, page.table_plan_grid(result), 0 if arguments.explain else page.SHOWN_ROWS)
    bounds = "What bounds the step", page.bound_grid(result)
    for title, grid in (*page.dense_grids(result, arguments.explain), bounds, *stale.grids):
        console.print(terminal.rich_table(title, grid))
    if other:
        console.print(terminal.rich_table("Compared", page.comparison_grid(result, other)))
    for reason in (*page.step_reasons(result, torchrec), *stale.notes):
        console.print(reason, highlight=False)
    if torchrec:
        module = page.write_torchrec_plan(torchrec, output.with_suffix(".torchrec.py"), result)
        console.print(f"torchrec  {module}", soft_wrap=True)
    console.print(f"plan  {output}", highlight=False, soft_wrap=True)
    gains = routing_request.analyse_plan(planning, result)
    if gains:
        _print_gains(console, gains, output, has_page=False)
    target = page.render(result, output.with_suffix(".html"), torchrec, gains, stale)
    console.print(f"page  {target}", highlight=False, soft_wrap=True)


def _print_tables(console: Console, tables: "Grid", max_rows: int) -> None:
    """`max_rows`: 0 for all."""
    from shardwright.report import terminal

    console.print(terminal.rich_table("Tables", tables, max_rows))
    if max_rows and len(tables.rows) > max_rows:
        console.print(f"... and {len(tables.rows) - max_rows:,} smaller tables; --explain shows all", highlight=False)


def _print_gains(console: Console, gains: "RoutingGains", output: Path, *, has_page: bool = True) -> None:
    """Print the gains of recorded routing, and write the placement; `has_page`: and a page of its own."""
    from shardwright.report import routing, terminal

    for title, grid in routing.grids(gains):
        console.print(terminal.rich_table(title, grid))
    for line in (*routing.notes(gains), *routing.write_placement(gains, output)):
        console.print(line, highlight=False, soft_wrap=True)
    if has_page:
        console.print(f"page  {routing.render(gains, output.with_suffix('.html'))}", highlight=False, soft_wrap=True)


def _plan_layers(console: Console, arguments: PlanArguments, *, is_script: bool = False) -> None:
    """Plan a transformer, and write the flags of another engine, if wanted; `is_script`: the recipe is one."""
    from shardwright.planner.layers import layer_reasons
    from shardwright.planner.layers.layer_plan import make_layer_plan, untrained_roles
    from shardwright.planner.layers.layer_reasons import no_split_text, split_reasons
    from shardwright.planner.layers.layer_search import price_split, search
    from shardwright.report import layer_plan as layer_page
    from shardwright.runtime import layer_request

    output, job = arguments.output, None
    if is_script:
        script = Path(arguments.recipe)
        training, job, assumed = layer_request.read_megatron_request(script, arguments.overrides, arguments.cluster)
    else:
        can_offload = not arguments.export
        training, assumed = layer_request.read_layer_request(*arguments[:4], can_offload=can_offload)
    with console.status("searching") as status:
        result = search(training, lambda line: status.update(f"searching: {line}"))
        free = None
        if arguments.explain and training.pins.fixed_values:
            free = search(layer_reasons.without_pins(training), lambda line: status.update(f"without pins: {line}"))
    own = [layer_reasons.job_text(result, price_split(training, job.degrees, job.batch))] if job else []
    explained = [*(layer_reasons.explain_pins(free, result) if free else ()), *own]
    if not result.splits:
        raise UserError("; ".join(explained if free else [*own, no_split_text(result)]))
    reasons = [*split_reasons(result), *explained]
    layer_plan = make_layer_plan(training, result.splits[0], [("split", reason) for reason in reasons])
    files.write(layer_plan, output)
    notes = [*reasons, *assumed, *layer_reasons.assumption_notes(training)]
    if roles := untrained_roles(layer_plan):
        notes.append(f"this version plans {', '.join(roles)}, and cannot train with them yet")
    flags = _export_flags(result, arguments.export, output) if arguments.export else []
    _print_layers(console, layer_page.grids(result), [*notes, *flags])
    console.print(f"plan  {output}", highlight=False, soft_wrap=True)
    target = layer_page.render(result, output.with_suffix(".html"), notes)
    console.print(f"page  {target}", highlight=False, soft_wrap=True)


def _print_layers(console: Console, grids: "Sequence[tuple[str, Grid]]", notes: Sequence[str]) -> None:
    from shardwright.report import layer_plan as layer_page
    from shardwright.report import terminal

    for title, grid in grids:
        console.print(terminal.rich_table(title, grid, layer_page.SHOWN_ROWS))
        if len(grid.rows) > layer_page.SHOWN_ROWS:
            console.print(f"... and {len(grid.rows) - layer_page.SHOWN_ROWS} more on the page", highlight=False)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)


def _export_flags(result: "SearchResult", engine: str, output: Path) -> list[str]:
    """Write the flags of the best split that the engine can run; returns what to say of them."""
    from shardwright.planner.engines.megatron import megatron_flags
    from shardwright.planner.engines.torchtitan import torchtitan_config
    from shardwright.planner.layers.layer_names import describe_split

    make_flags = {"megatron": megatron_flags, "torchtitan": torchtitan_config}[engine]
    path, refusal = output.with_suffix(f".{engine}.sh"), ""
    for place, split in enumerate(result.splits, 1):
        try:
            flags = make_flags(result.training, split)
        except UserError as error:
            refusal = refusal or str(error)
            continue
        lines = [f"# {describe_split(split)}: written by shardwright plan", *(f"# {note}" for note in flags.notes)]
        lines += [f"{engine.upper()}_ARGS=(", *(f"  {flag}" for flag in flags.flags), ")", ""]
        files.write_text("\n".join(lines), path)
        skipped = f"number {place}: {engine} cannot run the best ({refusal}); " if place > 1 else ""
        return [*flags.notes, f"{engine}  {path} ({skipped}{describe_split(split)})"]
    raise UserError(f"{engine} can run none of {len(result.splits):,} configurations: {refusal}")
