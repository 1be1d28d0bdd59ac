"""Figures of the report as plain plotly dicts (traces and layout), one function per figure.

Colours are CSS variables, such as "var(--ink)": the page's script replaces them by colours of the reader's light or
dark scheme. Figures without measured values are None.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import isfinite
from statistics import fmean
from typing import Any

from shardwright.report import step_times
from shardwright.report.run_record import MachineWindow, Metrics, MetricsLine
from shardwright.report.units import axis_time_unit, time_text
from shardwright.spec.timeline import Event, Timeline

NUM_HUES = 8
SHOWN_STEPS = 3
SHOWN_RANKS = 4


@dataclass(frozen=True, slots=True)
class Figure:
    """A plotly figure with its title and caption; height in pixels."""

    name: str
    title: str
    caption: str
    height: int
    data: tuple[dict[str, Any], ...]
    layout: dict[str, Any]


def curves(metrics: Metrics, machine: Sequence[MachineWindow] = ()) -> tuple[Figure, ...]:
    """Figures of all metrics over samples, the most important first."""
    ranking = (auc(metrics), grouped_auc(metrics))
    speed = (throughput(metrics, machine), utilization(metrics))
    scores = normalized_entropy(metrics), *ranking, calibration(metrics), accuracy(metrics)
    by_task = (figure for name in metrics.tasks for figure in task_curves(name, metrics.of_task(name)))
    figures = (*scores, *retrieval(metrics), *by_task, loss(metrics), perplexity(metrics), *speed)
    return tuple(figure for figure in figures if figure)


def task_curves(name: str, metrics: Metrics) -> Iterator[Figure]:
    """Figures of one task of a model with several."""
    for figure in (normalized_entropy(metrics), auc(metrics), grouped_auc(metrics), calibration(metrics)):
        if figure:
            yield replace(figure, name=f"{name}-{figure.name}", title=f"{name}: {figure.title}", height=260)


def normalized_entropy(metrics: Metrics) -> Figure | None:
    caption = "Log loss over the entropy of the labels' mean rate: 1 is a constant guess, lower is better."
    bound = metric_series(metrics.evals, "bound_ne")
    if not bound[0]:
        return metric_figure("ne", "Normalized entropy", metrics, caption=caption, height=340)
    dashed = trace("best reachable", *bound, color="var(--muted)", dash="dash")
    caption += " Dashed: the score of the true click probabilities on the same samples."
    return metric_figure("ne", "Normalized entropy", metrics, extra=(dashed,), caption=caption, height=340)


def auc(metrics: Metrics) -> Figure | None:
    return metric_figure("auc", "AUC", metrics, caption="How often a click is ranked above a non-click.")


def grouped_auc(metrics: Metrics) -> Figure | None:
    return metric_figure(
        "grouped_auc", "Grouped AUC", metrics, caption="The mean of each group's AUC, weighted by the group."
    )


def calibration(metrics: Metrics) -> Figure | None:
    figure = metric_figure("calibration", "Calibration", metrics, caption="Predicted over observed rate: 1 is exact.")
    if figure:
        figure.layout["shapes"] = [dotted_line(y0=1, y1=1, xref="paper", x0=0, x1=1)]
    return figure


def accuracy(metrics: Metrics) -> Figure | None:
    caption = "The share of samples whose class has the highest score."
    return metric_figure("accuracy", "Accuracy", metrics, caption=caption, height=340)


def retrieval(metrics: Metrics) -> Iterator[Figure | None]:
    """Recall and NDCG of two towers, which only evaluations have."""
    for number in (10, 100):
        caption = (
            f"The share of a user's held-out positives that are among the {number} best items, the mean over users."
        )
        yield metric_figure(f"recall_at_{number}", f"Recall@{number}", metrics, caption=caption, rangemode="tozero")
        caption = f"As Recall@{number}, but an item counts less the later it comes."
        yield metric_figure(f"ndcg_at_{number}", f"NDCG@{number}", metrics, caption=caption, rangemode="tozero")


def is_retrieval(metrics: Metrics) -> bool:
    """Whether the run's model retrieves items."""
    return any(line.recall_at_10 is not None for line in metrics.evals)


def loss(metrics: Metrics) -> Figure | None:
    if not has_tokens(metrics):
        return metric_figure("loss", "Loss", metrics, caption="Mean per sample.")
    caption, floor = "Cross entropy of the next token in nats, the mean over tokens.", []
    bound = metric_series(metrics.evals, "bound_loss")
    if bound[0]:
        floor = [trace("best reachable", *bound, color="var(--muted)", dash="dash")]
        caption += " Dashed: the loss of the true probabilities on the same tokens."
    return metric_figure("loss", "Loss", metrics, extra=floor, caption=caption, height=340)


def perplexity(metrics: Metrics) -> Figure | None:
    # Without a format, ticks between powers of ten would have only their first digit.
    return metric_figure(
        "perplexity",
        "Perplexity",
        metrics,
        caption="The exponential of the loss.",
        height=340,
        type="log",
        tickformat="~s",
    )


def utilization(metrics: Metrics) -> Figure | None:
    """MFU by both conventions."""
    full = metric_series(metrics.train, "mfu_full")
    whole = trace("full attention matrix", *full, color="var(--muted)", dash="dash")
    caption = "Model FLOPs per second over the machine's peak, with the causal half of attention."
    return metric_figure("mfu", "MFU", metrics, caption=caption, extra=(whole,), tickformat=".0%", rangemode="tozero")


def has_tokens(metrics: Metrics) -> bool:
    """Whether the run's model predicts tokens."""
    return any(line.perplexity is not None for line in (*metrics.train, *metrics.evals))


def has_classes(metrics: Metrics) -> bool:
    """Whether the run's model predicts one of several classes."""
    return any(line.accuracy is not None for line in (*metrics.train, *metrics.evals))


def throughput(metrics: Metrics, machine: Sequence[MachineWindow] = ()) -> Figure | None:
    """Samples or tokens per second; windows in which processor time was taken away are shaded and have a marker."""
    name = "tokens_per_second" if metric_series(metrics.train, "tokens_per_second")[0] else "samples_per_second"
    caption = f"{name.partition('_')[0].capitalize()} per second in each training window."
    windows = [window for window in machine if window.disturbance]
    speed_by_samples = {line.samples: getattr(line, name) for line in metrics.train}
    marks: list[dict[str, Any]] = []
    if windows:
        caption += " Shaded: processor time was taken away from this run; markers show the cause."
        x, y = [window.samples for window in windows], [speed_by_samples.get(window.samples) for window in windows]
        mark = trace("processor taken away", x, y, color="var(--hue1)", markers=True) | {"mode": "markers"}
        marks.append(mark | {"text": [window.disturbance for window in windows], "hovertemplate": "%{y:,.0f}: %{text}"})
    figure = metric_figure(
        name,
        "Throughput",
        metrics,
        caption=caption,
        extra=marks,
        tickformat="~s",
        rangemode="tozero",
    )
    if figure and windows:
        figure.layout["shapes"] = [shade(window.before, window.samples) for window in windows]
    return figure


def metric_figure(
    name: str,
    title: str,
    metrics: Metrics,
    *,
    caption: str,
    extra: Iterable[dict[str, Any]] = (),
    height: int = 260,
    **yaxis: Any,
) -> Figure | None:
    """A metric over the number of samples trained on: training windows and evaluations."""
    train, evals = metric_series(metrics.train, name), metric_series(metrics.evals, name)
    traces = [trace("train window", *train, color="var(--hue0)")] if train[0] else []
    if evals[0]:
        traces.append(trace("evaluation", *evals, color="var(--hue1)", markers=True))
    if not traces:
        return None
    progressive = metric_series(metrics.progressive, name)
    if progressive[0]:
        traces.append(trace("progressive, whole run", *progressive, color="var(--hue2)"))
    return samples_figure(name, title, [*traces, *extra], caption=caption, height=height, **yaxis)


def samples_figure(
    name: str, title: str, traces: Sequence[dict[str, Any]], *, caption: str, height: int, **yaxis: Any
) -> Figure:
    layout = figure_layout(
        xaxis=axis(title={"text": "samples"}, tickformat="~s", hoverformat=",d", rangemode="tozero"),
        yaxis=axis(hoverformat=",.5~r", **yaxis),
        hovermode="x unified",
        showlegend=len(traces) > 1,
    )
    return Figure(name, title, caption, height, tuple(traces), layout)


def metric_series(lines: Sequence[MetricsLine], name: str) -> tuple[list[int], list[float | None]]:
    """Samples and values of the lines with a metric; values that are not finite become None, a gap."""
    lines = [line for line in lines if getattr(line, name) is not None]
    values = [getattr(line, name) for line in lines]
    return [line.samples for line in lines], [value if isfinite(value) else None for value in values]


def trace(
    name: str, x: Sequence[float], y: Sequence[Any], *, color: str, dash: str = "solid", markers: bool = False
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": name,
        "x": list(x),
        "y": list(y),
        "mode": "lines+markers" if markers or len(x) == 1 else "lines",
        "line": {"color": color, "dash": dash, "width": 1.75},
        "marker": {"color": color, "size": 6},
    }


def stage_figure(timeline: Timeline) -> Figure:
    seconds = step_times.stage_seconds(timeline)
    hue_by_stage = stage_hues(timeline)
    means = sorted((fmean(values), name) for name, values in seconds.items())
    unit, unit_seconds = axis_time_unit(mean for mean, _ in means)
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [mean / unit_seconds for mean, _ in means],
        "y": [escape(name, quote=False) for _, name in means],
        "text": [time_text(mean) for mean, _ in means],
        "customdata": [len(seconds[name]) for _, name in means],
        "hovertemplate": "%{y}: %{text}, mean of %{customdata}<extra></extra>",
        "textposition": "auto",
        "cliponaxis": False,
        "insidetextfont": {"color": "var(--on-hue)"},
        "outsidetextfont": {"color": "var(--ink)"},
        "marker": {"color": [hue_by_stage[name] for _, name in means]},
    }
    layout = figure_layout(
        xaxis=axis(title={"text": f"{unit} per step"}, rangemode="tozero"),
        yaxis=axis(type="category", showgrid=False),
        bargap=0.28,
        showlegend=False,
        margin={"l": 8, "r": 12, "t": 28, "b": 8},  # the buttons are above the first bar
    )
    caption = "Means over the traced steps. Lanes overlap, so the bars may add up to more than a step."
    return Figure("stages", "Time per stage", caption, 90 + 26 * len(means), (bars,), layout)


def gantt(timeline: Timeline) -> Figure:
    """Gantt chart of the last traced steps, with a row per rank and lane, for at most SHOWN_RANKS ranks."""
    steps = step_times.complete_steps(timeline)[-SHOWN_STEPS:]
    ranks = sorted({event.rank for event in timeline.events})
    begin, end = step_times.time_window(timeline, steps)
    recent = [
        event
        for event in timeline.events
        if event.start < end
        and event.end > begin
        and event.rank in ranks[:SHOWN_RANKS]
        and event.kind != step_times.WAIT
    ]
    begin = min(event.start for event in recent)
    lanes = list(dict.fromkeys(event.lane for event in sorted(recent, key=lambda event: event.start)))
    rows = [row_label(rank, lane, ranks) for rank in ranks[:SHOWN_RANKS] for lane in lanes]
    unit, unit_seconds = axis_time_unit([max(event.end for event in recent) - begin])
    hue_by_stage = stage_hues(timeline)
    traces = tuple(
        gantt_bars([event for event in recent if event.name == name], begin, unit_seconds, ranks, color=color)
        for name, color in hue_by_stage.items()
        if any(event.name == name for event in recent)
    )
    ends = [(step, (max(e.end for e in recent if e.step == step) - begin) / unit_seconds) for step in steps]
    layout = figure_layout(
        xaxis=axis(title={"text": unit}, zeroline=False),
        yaxis=axis(type="category", categoryorder="array", categoryarray=rows[::-1], showgrid=False, fixedrange=True),
        barmode="overlay",
        bargap=0.22,
        showlegend=False,
        uniformtext={"minsize": 11, "mode": "hide"},
        shapes=[dotted_line(x0=x, x1=x, yref="paper", y0=0, y1=1) for _, x in ends],
        annotations=[step_annotation(step, x) for step, x in ends],
        margin={"l": 8, "r": 12, "t": 28, "b": 8},
    )
    caption = "Each bar is an event; dotted lines are ends of steps. Drag to zoom, double-click to reset."
    if len(ranks) > SHOWN_RANKS:
        caption += f" Ranks {ranks[0]} to {ranks[SHOWN_RANKS - 1]} of {len(ranks)} are drawn."
    title = f"The last {len(steps)} traced steps" if len(steps) > 1 else "The only traced step"
    return Figure("gantt", title, caption, 90 + 34 * len(rows), traces, layout)


def gantt_bars(
    events: Sequence[Event], begin: float, unit: float, ranks: Sequence[int], *, color: str
) -> dict[str, Any]:
    name = escape(events[0].name, quote=False)
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [row_label(event.rank, event.lane, ranks) for event in events],
        "base": [(event.start - begin) / unit for event in events],
        "x": [(event.end - event.start) / unit for event in events],
        "text": [name] * len(events),
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": "var(--on-hue)", "size": 11},
        "hovertext": [event_text(event) for event in events],
        "hoverinfo": "text",
        "marker": {"color": color, "line": {"color": "var(--page)", "width": 1}},
    }


def event_text(event: Event) -> str:
    lines = [
        f"<b>{escape(event.name, quote=False)}</b>",
        time_text(event.end - event.start),
        f"step {event.step}, rank {event.rank}, lane {escape(event.lane, quote=False)}",
    ]
    if event.bytes_:
        lines.append(f"{event.bytes_:,} bytes")
    if event.flops:
        lines.append(f"{event.flops:,} flops")
    return "<br>".join(lines)


def row_label(rank: int, lane: str, ranks: Sequence[int]) -> str:
    return escape(lane if len(ranks) == 1 else f"{rank} {lane}", quote=False)


def stage_hues(timeline: Timeline) -> dict[str, str]:
    """Colour of each stage and of each part of a step, the same in all figures; the events of a part have one."""
    names = dict.fromkeys(event.name for event in sorted(timeline.events, key=lambda event: event.start))
    parts = dict.fromkeys(step_times.part_name(name) for name in names)
    hues = {part: f"var(--hue{index % NUM_HUES})" for index, part in enumerate(parts)}
    return hues | {name: hues[step_times.part_name(name)] for name in names}


def figure_layout(**layout: Any) -> dict[str, Any]:
    """Layout shared by all figures: no background, small margins."""
    clear = "rgba(0,0,0,0)"
    return {
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "font": {"color": "var(--ink)", "size": 12, "family": "var(--font)"},
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "legend": {"orientation": "h", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"},
        "hoverlabel": {
            "bgcolor": "var(--raised)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)"},
        },
        "uirevision": "kept",
        **layout,
    }


def axis(**settings: Any) -> dict[str, Any]:
    return {
        "automargin": True,
        "exponentformat": "none",  # "600u" on an axis in "ms" is not a unit
        "gridcolor": "var(--line)",
        "linecolor": "var(--line)",
        "zerolinecolor": "var(--line)",
        "tickfont": {"color": "var(--muted)"},
        **settings,
    }


def shade(x0: float, x1: float) -> dict[str, Any]:
    """A shaded rectangle from x0 to x1 over the full height."""
    color = {"fillcolor": "var(--hue1)", "opacity": 0.15, "line": {"width": 0}, "layer": "below"}
    return {"type": "rect", "x0": x0, "x1": x1, "yref": "paper", "y0": 0, "y1": 1, **color}


def dotted_line(**ends: Any) -> dict[str, Any]:
    return {"type": "line", "line": {"color": "var(--muted)", "width": 1, "dash": "dot"}, **ends}


def step_annotation(step: int, x: float) -> dict[str, Any]:
    return {
        "text": f"step {step}",
        "x": x,
        "y": 1,
        "yref": "paper",
        "xanchor": "right",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": "var(--muted)", "size": 11},
    }
