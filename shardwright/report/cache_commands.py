"""`shardwright cache-sim`: hit rates of caches of table rows, by size and policy, on a recipe's batches."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwright.errors import UserError
from shardwright.spec import files, presets
from shardwright.spec.row_cache import DISK


def cache_sim(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe, or a .toml file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to set.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Sizes of the cache, in % of the rows.")] = "1,3,5,10,15,30",
    batches: Annotated[int, typer.Option(min=2, help="Batches to read; the second half is counted.")] = 200,
    cluster: Annotated[
        str, typer.Option(help="A cluster file with a measured disk, to predict the time of misses.")
    ] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("cache.html"),
    write: Annotated[
        Path | None, typer.Option(help="Also write the hits for the planner to this .json file: plan.hits=FILE.")
    ] = None,
) -> None:
    """Simulate caches of table rows in front of a disk on a recipe's batches: hits by size and policy, and their cost.

    Compares LRU, LFU, LFU whose counts age, set dueling between it and LRU with the next batches known, as training has
    it, and Belady's optimum, all in a cache of 32 ways. A row counts once per batch.

    \b
    shardwright cache-sim synthetic-dlrm
    shardwright cache-sim criteo-dlrm data.path=train.tsv.gz --cluster cluster.toml --sizes 1,2,5,10
    """
    from shardwright import config
    from shardwright.report import cache_sizes as page
    from shardwright.report import terminal
    from shardwright.runtime.run.cache_sizes import compare_sizes

    if write is not None and write.suffix != ".json":
        raise UserError(f"{write}: hits are written to a .json file; set --write to a name that ends in .json")
    if output.suffix != ".html":
        raise UserError(f"{output}: the page is an .html file; set --output to a name that ends in .html")
    shares = _parse_sizes(sizes)
    tiers = {tier.name: tier for tier in presets.load_cluster(cluster).device.tiers} if cluster else {}
    if cluster and DISK not in tiers:
        raise UserError(
            f'{cluster}: no memory tier "{DISK}"; measure this machine: shardwright measure -o cluster.toml'
        )
    console = Console(width=max(Console().width, 120))
    settings = config.load(recipe, overrides or ())
    with console.status("reading batches") as status:
        found = compare_sizes(settings, shares, batches, status.update)
    for title, grid in page.grids(found, tiers.get(DISK)):
        console.print(terminal.rich_table(title, grid))
    for note in page.notes(found, tiers.get(DISK)):
        console.print(note, highlight=False)
    target = page.render(found, recipe, tiers.get(DISK), output)
    console.print(f"page  {target}", highlight=False, soft_wrap=True)
    if write is not None:
        files.write(found.recorded_hits(recipe), write)
        console.print(f"hits  {write}", highlight=False, soft_wrap=True)


def _parse_sizes(text: str) -> list[float]:
    try:
        shares = [float(part) / 100 for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UserError(f'--sizes "{text}"; wanted percentages of the rows, such as 1,5,10')
    return sorted(shares)
