"""Timeline of a predicted step: the passes of the pipeline ranks with their bubbles, then collectives and optimizer."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shardwright.planner.layers.layer_names import PART_NAMES, describe_split
from shardwright.planner.layers.layer_search import LayerSplit, Training
from shardwright.planner.layers.step_time import SimulatedPass, chunk_seconds, message_seconds, simulate_passes
from shardwright.report import plots
from shardwright.report.plots import Figure
from shardwright.report.units import axis_time_unit, time_text

MAX_ROWS = 16
MAX_PASSES = 180  # of a row; of a longer step, the first and the last are drawn
MAX_NUMBERED_PASSES = 48  # of a row; only longer bars have room for the number of a micro-batch
LEAST_OPACITY = 0.4  # of a rank's last chunk
GAP = 0.02  # between the beginning and the end, of the width
DIRECTIONS = ((True, "forward", "var(--hue0)"), (False, "backward", "var(--hue2)"))


class Window(NamedTuple):
    """A part of the step, drawn on an x axis of its own."""

    start: float
    end: float
    axis: str
    domain: tuple[float, float]


def timeline_figure(training: Training, split: LayerSplit) -> Figure:
    """A row for each pipeline rank, at most MAX_ROWS of them, with its passes, coloured by direction and chunk."""
    degrees, step = split.degrees, split.step
    timer = training.timer(degrees, split.batch)
    passes = simulate_passes(chunk_seconds(timer), degrees, degrees.micro_batches(split.batch), message_seconds(timer))
    rows = shown_ranks(degrees.pipeline)
    per_row = len(passes) // degrees.pipeline
    windows = step_windows(step.total, step.passes, per_row)
    unit, unit_seconds = axis_time_unit([step.total])
    traces: list[dict[str, Any]] = []
    for window in windows:
        visible = [each for each in passes if each.rank in rows and overlaps(window, each.start, each.end)]
        traces += _pass_traces(split, visible, window, unit_seconds)
        traces += [
            _tail_bars(name, color, rows, (start, end), window, unit_seconds)
            for name, color, start, end in tail_parts(split)
            if overlaps(window, start, end)
        ]
    names = set[str]()
    for trace in traces:  # one entry of the legend for both windows
        trace["showlegend"] = trace["name"] not in names
        names.add(trace["name"])
    labels = [f"{rank}" for rank in reversed(rows)]
    axes = {f"{window.axis.replace('x', 'xaxis')}": _window_axis(window, unit, unit_seconds) for window in windows}
    layout = plots.figure_layout(
        **axes,
        yaxis=plots.axis(
            title={"text": "pipeline rank"},
            type="category",
            categoryorder="array",
            categoryarray=labels,
            showgrid=False,
            fixedrange=True,
        ),
        barmode="overlay",
        bargap=0.15,
        uniformtext={"minsize": 9, "mode": "hide"},
        showlegend=True,
        margin={"l": 8, "r": 12, "t": 28, "b": 8},
    )
    caption = " ".join(_caption(split, windows, len(rows), unit_seconds, unit))
    return Figure(
        "layer_timeline", "Timeline of the step, split 1", caption, 130 + 24 * len(rows), tuple(traces), layout
    )


def shown_ranks(num: int) -> list[int]:
    """At most MAX_ROWS of the pipeline ranks, evenly, the first and the last among them."""
    if num <= MAX_ROWS:
        return list(range(num))
    return [round(row * (num - 1) / (MAX_ROWS - 1)) for row in range(MAX_ROWS)]


def step_windows(total: float, passes: float, per_row: int) -> list[Window]:
    """The whole step, or its beginning and its end with MAX_PASSES passes of mean length of each row."""
    if per_row <= MAX_PASSES:
        return [Window(0.0, total, "x", (0.0, 1.0))]
    length = passes * MAX_PASSES / per_row / 2
    return [
        Window(0.0, length, "x", (0.0, (1 - GAP) / 2)),
        Window(total - length, total, "x2", ((1 + GAP) / 2, 1.0)),
    ]


def overlaps(window: Window, start: float, end: float) -> bool:
    return start < window.end and end > window.start


def tail_parts(split: LayerSplit) -> Iterator[tuple[str, str, float, float]]:
    """What follows the passes: name, colour, start and end."""
    start = split.step.passes
    for name, color, seconds in (
        (PART_NAMES["offload"], "var(--hue3)", split.step.offload),
        (PART_NAMES["gradients"], "var(--hue1)", split.step.gradients),
        (PART_NAMES["optimizer"], "var(--hue4)", split.step.optimizer),
    ):
        if seconds:
            yield name, color, start, start + seconds
        start += seconds


def _caption(
    split: LayerSplit, windows: Sequence[Window], num_rows: int, unit_seconds: float, unit: str
) -> Iterator[str]:
    degrees = split.degrees
    yield f"Predicted: {describe_split(split)}."
    if len(windows) > 1:
        left_out = windows[1].start - windows[0].end
        yield f"The beginning and the end of the step; {left_out / unit_seconds:.3g} {unit} between them are left out."
    if degrees.num_chunks > 1:
        yield "Later chunks of a rank are paler."
    if degrees.recompute != "none":
        yield "Backward passes include recomputation."
    if degrees.pipeline > 1:
        yield f"Gaps are the bubble, {split.step.bubble:.1%} of the passes' time."
        yield "What follows the passes takes as long as on the slowest rank."
    if num_rows < degrees.pipeline:
        yield f"{num_rows} of {degrees.pipeline} pipeline ranks are drawn."
    yield "Drag to zoom, double-click to reset."


def _window_axis(window: Window, unit: str, unit_seconds: float) -> dict[str, Any]:
    bounds = [window.start / unit_seconds, window.end / unit_seconds]
    return plots.axis(title={"text": unit}, range=bounds, domain=window.domain, zeroline=False, anchor="y")


def _pass_traces(
    split: LayerSplit, passes: Sequence[SimulatedPass], window: Window, unit_seconds: float
) -> Iterator[dict[str, Any]]:
    degrees = split.degrees
    num_of_row = 2 * degrees.micro_batches(split.batch) * degrees.num_chunks
    paler = (1 - LEAST_OPACITY) / max(1, degrees.num_chunks - 1)
    layers = [chunk_text(degrees.chunk_layers(chunk)) for chunk in range(len(degrees.cuts))]
    for is_forward, name, color in DIRECTIONS:
        own = [each for each in passes if each.is_forward == is_forward]
        if not own:
            continue
        opacities = [1 - paler * (each.chunk // degrees.pipeline) for each in own]
        yield _bars(name, own, window, unit_seconds) | {
            "y": [f"{each.rank}" for each in own],
            "text": [f"{each.micro}" for each in own] if num_of_row <= MAX_NUMBERED_PASSES else "",
            "hovertext": [
                f"{name} of micro-batch {each.micro}, rank {each.rank}<br>chunk {each.chunk}: {layers[each.chunk]}<br>"
                f"{time_text(each.end - each.start)}, from {time_text(each.start)}"
                for each in own
            ],
            "marker": {"color": color, "opacity": opacities, "line": {"color": "var(--page)", "width": 0.5}},
        }


def chunk_text(layers: range) -> str:
    """The layers of a chunk."""
    if not layers:
        return "no layer"
    return f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start} to {layers.stop - 1}"


def _bars(name: str, passes: Sequence[SimulatedPass], window: Window, unit_seconds: float) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "legendgroup": name,
        "xaxis": window.axis,
        "base": [each.start / unit_seconds for each in passes],
        "x": [(each.end - each.start) / unit_seconds for each in passes],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": "var(--on-hue)", "size": 10},
        "hoverinfo": "text",
    }


def _tail_bars(
    name: str, color: str, rows: Sequence[int], interval: tuple[float, float], window: Window, unit_seconds: float
) -> dict[str, Any]:
    start, end = interval
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "legendgroup": name,
        "xaxis": window.axis,
        "y": [f"{rank}" for rank in rows],
        "base": [start / unit_seconds] * len(rows),
        "x": [(end - start) / unit_seconds] * len(rows),
        "hovertext": [f"{name}: {time_text(end - start)}"] * len(rows),
        "hoverinfo": "text",
        "marker": {"color": color},
    }
