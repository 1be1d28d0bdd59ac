"""Report of caches of rows: hit rates by size and policy, and what the misses cost."""

from collections.abc import Iterator
from pathlib import Path

from shardwright.report import html_template, plots
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure
from shardwright.report.units import bytes_text, time_text
from shardwright.runtime.run.cache_sizes import CacheSizes
from shardwright.spec import files
from shardwright.spec.cluster import Tier

CAPTION = (
    "Share of the distinct rows of a batch that are in the cache, over the second half of the batches. Dotted: without "
    "the rows that no earlier batch used, which no cache can hold."
)


def render(sizes: CacheSizes, title: str, disk: Tier | None, path: Path) -> Path:
    figures = (hit_figure(sizes),)
    text = html_template.render_template(
        "cluster.html.j2",
        brand="Shardwright caches",
        curves_title="Hit rates",
        title=title,
        notes=tuple(notes(sizes, disk)),
        grids=grids(sizes, disk),
        curves=figures,
        figures=figures,
    )
    files.write_text(text, path)
    return path


def notes(sizes: CacheSizes, disk: Tier | None) -> Iterator[str]:
    rows = sum(table.num_rows for table in sizes.tables)
    yield (
        f"{len(sizes.tables)} tables with {rows:,} rows, {bytes_text(sizes.table_bytes)} with their optimizer state; "
        f"{sizes.num_batches} batches, of which the last {sizes.num_counted} are counted."
    )
    if sizes.small:
        yield f"{len(sizes.small)} tables stay in memory: of them the smallest cache does not hold the rows of a batch."
    if disk is None:
        yield "The time of reads and writes needs the rates of a disk: give --cluster."
    else:
        yield (
            "Reads and writes at the disk's rate of large reads, which pages at random may not reach; they overlap "
            "with a step, and add to it only what is longer."
        )


def grids(sizes: CacheSizes, disk: Tier | None) -> tuple[tuple[str, Grid], ...]:
    names = [policy.name for policy in sizes.policies]
    rates = tuple(
        (f"{100 * size.share:g} %", bytes_text(size.bytes_), *(f"{100 * size.total(name).rate:.1f}" for name in names))
        for size in sizes.sizes
    )
    found = [("Hit rates (%)", Grid(("cache, share of rows", "memory", *names), rates))]
    if disk is not None:
        times = tuple(
            (f"{100 * size.share:g} %", *(time_text(sizes.disk_seconds(size, name, disk)) for name in names))
            for size in sizes.sizes
        )
        found.append(("Reads and writes of a batch", Grid(("cache, share of rows", *names), times)))
    return tuple(found)


def hit_figure(sizes: CacheSizes) -> Figure:
    x = [100 * size.share for size in sizes.sizes]
    data = [
        plots.trace(
            policy.name, x, [100 * size.total(policy.name).rate for size in sizes.sizes], color=f"var(--hue{number})"
        )
        for number, policy in enumerate(sizes.policies)
    ]
    hits = sizes.sizes[0].total(sizes.policies[0].name)
    bound = 100 * (1 - hits.new / max(1, hits.rows))
    layout = plots.figure_layout(
        xaxis=plots.axis(title={"text": "cache, % of the rows"}, rangemode="tozero"),
        yaxis=plots.axis(title={"text": "hits, %"}),
        shapes=[plots.dotted_line(y0=bound, y1=bound, xref="paper", x0=0, x1=1)],
        showlegend=True,
    )
    return Figure("cache_hits", "Hit rate by size", CAPTION, 420, tuple(data), layout)
