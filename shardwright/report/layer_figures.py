"""Figures of a plan of a model of layers: memory by pipeline rank, parts of the best steps, and the search."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardwright.planner.layers.layer_names import PART_NAMES, degrees_name, describe_split
from shardwright.planner.layers.layer_search import NUM_SIMULATED, LayerSplit, SearchResult, Training
from shardwright.planner.layers.step_time import Part, step_parts
from shardwright.report import plots
from shardwright.report.plots import Figure
from shardwright.report.units import axis_time_unit, bytes_text, time_text

GIB = float(2**30)
COMPONENTS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "weights",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "activations": "activations",
        "logits": "logits",
        "gathered": "gathered weights",
    }
)
MIN_STAGES_WIDTH = 4  # of the axis, so that bars of few stages are not broad
BAR_WIDTH, HOST_WIDTH = 0.56, 0.2
STAGE_TICKS = 16
MAX_POINTS = 4000
MIN_LOG_TICKS_RANGE = 8  # largest over smallest value
LEGEND_BELOW: Mapping[str, Any] = MappingProxyType(
    {
        "showlegend": True,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "margin": {"l": 8, "r": 12, "t": 28, "b": 8},  # the buttons are above the bars
    }
)
# Hue and opacity by part: computation is blue and green, exposed communication red and brown.
PART_COLORS: Mapping[Part, tuple[str, float]] = MappingProxyType(
    {
        "products": ("var(--hue0)", 1.0),
        "attention": ("var(--hue6)", 1.0),
        "memory": ("var(--hue2)", 1.0),
        "tensor": ("var(--hue1)", 1.0),
        "context": ("var(--hue4)", 1.0),
        "experts": ("var(--hue5)", 1.0),
        "sharded weights": ("var(--hue4)", 0.55),
        "chunks": ("var(--hue7)", 1.0),
        "offload": ("var(--hue3)", 1.0),
        "bubble": ("var(--hue7)", 0.35),
        "gradients": ("var(--hue1)", 0.55),
        "optimizer": ("var(--hue2)", 0.55),
    }
)


def memory_figure(training: Training, split: LayerSplit) -> Figure:
    """Stacked bars of device memory by component for each pipeline rank, and bars of host memory."""
    num = len(split.memory)
    has_host = any(stage.host for stage in split.memory)
    width = BAR_WIDTH if has_host else BAR_WIDTH + HOST_WIDTH
    start = -(width + (HOST_WIDTH if has_host else 0)) / 2
    traces: list[dict[str, Any]] = []
    below = [0.0] * num
    for hue, (field, name) in enumerate(COMPONENTS.items()):
        sizes = [getattr(stage, field) for stage in split.memory]
        if any(sizes):
            place = {"base": [base / GIB for base in below], "width": width, "offset": start}
            traces.append(_memory_bars(name, f"var(--hue{hue})", sizes) | place)
            below = [base + size for base, size in zip(below, sizes, strict=True)]
    if has_host:
        host = _memory_bars("host (offload)", "var(--hue7)", [stage.host for stage in split.memory])
        traces.append(host | {"width": HOST_WIDTH, "offset": start + width})
    limit = training.memory_bytes / GIB
    middle, half = (num - 1) / 2, max(num, MIN_STAGES_WIDTH) / 2
    layout = plots.figure_layout(
        xaxis=plots.axis(
            title={"text": "pipeline rank"},
            range=[middle - half, middle + half],
            tickvals=list(range(0, num, -(-num // STAGE_TICKS))),
            showgrid=False,
            zeroline=False,
        ),
        yaxis=plots.axis(title={"text": "GiB"}, rangemode="tozero"),
        barmode="overlay",
        shapes=[plots.dotted_line(y0=limit, y1=limit, xref="paper", x0=0, x1=1)],
        **LEGEND_BELOW,
    )
    caption = f"Of a rank, at its peak: {describe_split(split)}. Dotted: the limit of {bytes_text(limit * GIB)}."
    return Figure("layer_memory", "Memory by pipeline rank, split 1", caption, 420, tuple(traces), layout)


def _memory_bars(name: str, color: str, sizes: Sequence[float]) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": list(range(len(sizes))),
        "y": [size / GIB for size in sizes],
        "marker": {"color": color},
        "text": [bytes_text(size) for size in sizes],
        "textposition": "none",
        "hovertemplate": f"pipeline rank %{{x}}: {name} %{{text}}<extra></extra>",
    }


def parts_figure(training: Training, splits: Sequence[LayerSplit]) -> Figure:
    """Stacked horizontal bars of the parts of each split's step."""
    parts = [step_parts(training.timer(split.degrees, split.batch), split.step) for split in splits]
    unit, unit_seconds = axis_time_unit(split.step.total for split in splits)
    labels = [f"{number}: {degrees_name(split.degrees)}" for number, split in enumerate(splits, 1)]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": PART_NAMES[part],
            "x": [max(0.0, each[part]) / unit_seconds for each in parts],
            "y": labels,
            "marker": {"color": color},
            "opacity": opacity,
            "text": [f"{time_text(each[part])} of {time_text(sum(each.values()))}" for each in parts],
            "textposition": "none",
            "hovertemplate": f"{PART_NAMES[part]}: %{{text}}<extra></extra>",
        }
        for part, (color, opacity) in PART_COLORS.items()
        if any(time_share(each, part) > 1e-4 for each in parts)
    ]
    layout = plots.figure_layout(
        xaxis=plots.axis(title={"text": f"{unit} per step"}, rangemode="tozero"),
        yaxis=plots.axis(type="category", categoryorder="array", categoryarray=labels[::-1], showgrid=False),
        barmode="stack",
        bargap=0.35,
        **LEGEND_BELOW,
    )
    height = 90 + 36 * len(splits) + 20 * len(traces)
    caption = "Predicted, on the busiest pipeline rank. Exposed: not hidden by computation."
    return Figure("layer_parts", "Where the time of a step goes", caption, height, tuple(traces), layout)


def time_share(parts: Mapping[Part, float], part: Part) -> float:
    return parts[part] / sum(parts.values())


def search_figure(result: SearchResult) -> Figure:
    """Every configuration: memory of its fullest rank over the time of its step."""
    training = result.training
    splits = (*result.splits, *result.oversized)
    shortest = min((split.step.total for split in splits), default=0.0)
    unit, unit_seconds = axis_time_unit([shortest])
    every = max(1, -(-len(splits) // MAX_POINTS))
    traces = [
        _points("does not fit", result.oversized[::every], unit_seconds, color="var(--hue1)", size=5),
        _points("fits", result.splits[::every], unit_seconds, color="var(--hue0)", size=5),
        _points("least time for each memory", frontier_splits(splits), unit_seconds, color="var(--ink)", size=5),
        _points("split 1", result.splits[:1], unit_seconds, color="var(--ink)", size=14),
    ]
    traces[2] |= {"mode": "lines+markers", "line": {"color": "var(--ink)", "width": 1.5, "shape": "vh"}}
    traces[3]["marker"]["symbol"] = "star"
    traces = [trace for trace in traces if trace["x"]]
    limit = training.memory_bytes / GIB
    layout = plots.figure_layout(
        xaxis=log_axis(f"{unit} per step", [split.step.total for split in splits]),
        yaxis=log_axis("GiB on the fullest rank", [split.fullest.total for split in splits]),
        shapes=[plots.dotted_line(y0=limit, y1=limit, xref="paper", x0=0, x1=1)],
        **LEGEND_BELOW,
    )
    caption = " ".join(_search_caption(result, every))
    return Figure("layer_search", "The search", caption, 420, tuple(traces), layout)


def log_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """With ticks at 1, 2, 5, 10 and so on; with even ticks where the range of the values is narrow."""
    ticks = {"dtick": "D2"} if max(values) > MIN_LOG_TICKS_RANGE * min(values) else {}
    return plots.axis(title={"text": title}, type="log", tickformat="~r", **ticks)


def _search_caption(result: SearchResult, every: int) -> Iterator[str]:
    num, limit = len(result.splits) + len(result.oversized), bytes_text(result.training.memory_bytes)
    yield f"{num:,} configurations, of which {len(result.splits):,} fit into {limit} (dotted)."
    if any(split.host_bytes for split in result.splits):
        yield "Offload fills many of them up to the limit."
    yield f"Steps are estimated, and simulated pass by pass for the best {NUM_SIMULATED}."
    if every > 1:
        yield f"One in {every} is drawn, and all of the line."


def frontier_splits(splits: Sequence[LayerSplit]) -> list[LayerSplit]:
    """Those than which no other is as small and as fast, smallest first."""
    frontier: list[LayerSplit] = []
    for split in sorted(splits, key=lambda split: (split.fullest.total, split.step.total)):
        if not frontier or split.step.total < frontier[-1].step.total:
            frontier.append(split)
    return frontier


def _points(name: str, splits: Sequence[LayerSplit], unit_seconds: float, *, color: str, size: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": name,
        "mode": "markers",
        "x": [split.step.total / unit_seconds for split in splits],
        "y": [split.fullest.total / GIB for split in splits],
        "text": [_point_text(split) for split in splits],
        "hovertemplate": f"%{{text}}<extra>{name}</extra>",
        "marker": {"color": color, "size": size, "opacity": 0.6 if size < 10 else 1.0},
    }


def _point_text(split: LayerSplit) -> str:
    host = f", {bytes_text(split.host_bytes)} on the host" if split.host_bytes else ""
    degrees, _, rest = describe_split(split).partition(", ")
    return (
        f"<b>{degrees}</b><br>{rest}<br>{time_text(split.step.total)} a step, {bytes_text(split.fullest.total)}{host}"
    )
