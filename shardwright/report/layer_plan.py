"""Report of a plan of a model of layers: the best splits, parts of their steps, and memory by pipeline rank."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from shardwright.planner.layers.layer_names import PART_NAMES, degrees_name, max_offload, sharding_name
from shardwright.planner.layers.layer_search import LayerSplit, SearchResult, Training
from shardwright.planner.layers.memory import StageMemory
from shardwright.planner.layers.step_time import Part, step_parts
from shardwright.report import html_template, layer_figures
from shardwright.report.html_template import Grid
from shardwright.report.layer_figures import GIB
from shardwright.report.layer_roofline import roofline_figure
from shardwright.report.layer_timeline import timeline_figure
from shardwright.report.plan import to_sentence
from shardwright.report.plots import Figure
from shardwright.report.units import bytes_text, time_text
from shardwright.spec import files

NUM_BEST = 5
SHOWN_ROWS = 16  # maximum rows of a grid on a terminal
BEST_TITLE = "Best splits (PP: ranks x chunks; micro: sequences of a micro-batch; GiB: of the fullest rank)"
MIN_PART = 1e-9  # of a step; a smaller part is what rounding leaves


def render(result: SearchResult, path: Path, notes: Sequence[str]) -> Path:
    """Write the page of a plan; `notes`: sentences at its top."""
    training, plots = result.training, figures(result)
    text = html_template.render_template(
        "cluster.html.j2",
        brand="Shardwright plan",
        curves_title="The best split, and the search",
        title=f"{training.model.name} on {training.num_ranks:,} ranks of {training.cluster.name}",
        notes=tuple(map(to_sentence, notes)),
        grids=grids(result),
        curves=plots,
        figures=plots,
    )
    files.write_text(text, path)
    return path


def figures(result: SearchResult) -> tuple[Figure, ...]:
    """The timeline first: an odd number of figures, the first of which has the full width. Where nothing fits, only
    the search."""
    if not result.splits:
        return (layer_figures.search_figure(result),) if result.oversized else ()
    training, best = result.training, result.splits[0]
    return (
        timeline_figure(training, best),
        layer_figures.memory_figure(training, best),
        layer_figures.parts_figure(training, result.splits[:NUM_BEST]),
        layer_figures.search_figure(result),
        roofline_figure(training, best),
    )


def grids(result: SearchResult) -> tuple[tuple[str, Grid], ...]:
    """Tables with their titles; none where nothing fits."""
    if not result.splits:
        return ()
    training, best = result.training, result.splits[:NUM_BEST]
    return (
        (BEST_TITLE, split_grid(training, best)),
        ("Where the time of a step goes, on the busiest pipeline rank", part_grid(training, best)),
        (f"Memory of a rank by pipeline rank, split 1: {degrees_name(best[0].degrees)}", memory_grid(best[0])),
    )


def split_grid(training: Training, splits: Sequence[LayerSplit]) -> Grid:
    """A row for each split: degrees, memory of the fullest rank, predicted speed. MFU counts the causal half of
    attention. Without columns of offload if no split offloads."""
    limit = f"GiB of {training.memory_bytes / GIB:.3g}"
    has_host = any(split.host_bytes for split in splits)
    rows: list[dict[str, str]] = []
    for number, split in enumerate(splits, 1):
        cells = {"#": f"{number}", **_degree_cells(training, split), limit: f"{split.fullest.total / GIB:.1f}"}
        if has_host:
            cells |= {"offload": f"{max_offload(split):.0%}", "host GiB": f"{split.host_bytes / GIB:.1f}"}
        rows.append(cells | _speed_cells(training, split))
    return Grid(tuple(rows[0]), tuple(tuple(cells.values()) for cells in rows))


def _degree_cells(training: Training, split: LayerSplit) -> dict[str, str]:
    degrees = split.degrees
    cells = {
        "TP": f"{degrees.tensor}",
        "CP": f"{degrees.context}",
        "PP": f"{degrees.pipeline}x{degrees.num_chunks}",
        "DP": f"{degrees.data}",
    }
    if training.model.experts:
        cells["EP"] = f"{degrees.expert}"
    return cells | {
        "micro": f"{split.batch.micro_sequences}",
        "states": sharding_name(degrees),
        "recompute": degrees.recompute,
    }


def _speed_cells(training: Training, split: LayerSplit) -> dict[str, str]:
    tokens_per_second = training.tokens_per_second(split.step)
    shares = training.flops.utilization(tokens_per_second)
    return {
        "step": step_text(split.step.total),
        "tokens/s": f"{tokens_per_second:,.0f}",
        "MFU": f"{shares['mfu']:.1%}",
        "MFU, full": f"{shares['mfu_full']:.1%}",
        "bubble": f"{split.step.bubble:.1%}",
    }


def part_grid(training: Training, splits: Sequence[LayerSplit]) -> Grid:
    """A row for each part of a step that some split has, with its share; the columns add up to the steps."""
    parts = [step_parts(training.timer(split.degrees, split.batch), split.step) for split in splits]
    totals = [split.step.total for split in splits]

    def has_part(part: Part) -> bool:
        return any(each[part] > MIN_PART * total for each, total in zip(parts, totals, strict=True))

    rows = tuple(
        (name, *(_share_text(each[part], total) for each, total in zip(parts, totals, strict=True)))
        for part, name in PART_NAMES.items()
        if has_part(part)
    )
    columns = ("part", *(f"split {number}" for number in range(1, len(splits) + 1)))
    return Grid(columns, rows, total=("step", *map(step_text, totals)))


def step_text(seconds: float) -> str:
    """With four digits, so that the best splits differ."""
    return f"{seconds:,.3f} s" if seconds >= 1 else time_text(seconds)


def _share_text(seconds: float, total: float) -> str:
    return f"{time_text(seconds)} ({seconds / total:.0%})" if seconds > MIN_PART * total else "0"


def memory_grid(split: LayerSplit) -> Grid:
    """Memory of each pipeline rank by component; equal neighbors have one row. Without components that are 0."""
    by_stage = [_stage_cells(stage) for stage in split.memory]
    names = [name for name in by_stage[0] if any(cells[name] for cells in by_stage)]
    texts = [tuple(bytes_text(cells[name]) for name in names) for cells in by_stage]
    rows: list[tuple[str, ...]] = []
    for cells, group in groupby(range(len(texts)), key=lambda stage: texts[stage]):
        stages = list(group)
        label = f"{stages[0]}" if len(stages) == 1 else f"{stages[0]} to {stages[-1]}"
        rows.append((label, *cells))
    return Grid(("pipeline rank", *names), tuple(rows))


def _stage_cells(stage: StageMemory) -> dict[str, float]:
    components = {name: getattr(stage, field) for field, name in layer_figures.COMPONENTS.items()}
    return components | {"total": stage.total, "host": stage.host}
