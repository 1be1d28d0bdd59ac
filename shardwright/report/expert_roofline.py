"""The DDL-Roofline of FasterMoE (section 3.3): strategies to train a run's experts, predicted from recorded routing.

R_CC is the time of computation over the time of communication of an iteration, forward and backward; P is the FLOP/s of
a rank while it computes, achieved P the mean FLOPs of a rank over the time of the iteration. With all communication
overlapped it is at most P min(1, R_CC), without overlap P R_CC / (R_CC + 1): ideal and semi-ideal. Uneven loads are
below both.

Shape legend: R ranks that share experts; E experts.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.planner.expert_assignment import COMPUTE_PASSES, EXCHANGES, TRANSFERS, Assignment
from shardwright.planner.experts import choose_copies, select_shadows, with_shadows, without_copies
from shardwright.report.expert_loads import RoutedCall
from shardwright.report.plots import Figure, axis, figure_layout, trace
from shardwright.report.step_times import FLIGHT, WAIT
from shardwright.spec.timeline import Event, Timeline
from shardwright.spec.workload import Mixture

NUM_STEPS = 5  # the last recorded steps that strategies are priced for
CALLS_OF_STEP = 2  # forward, backward
NUM_LINE_POINTS = 60
MEASURED = "this run, measured"
MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x")


@dataclass
class Point:
    """A strategy: sums over mixtures and steps, of a rank."""

    flops: float = 0.0
    compute_seconds: float = 0.0
    message_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """R_CC."""
        return self.compute_seconds / self.message_seconds if self.message_seconds else 0.0

    @property
    def rate(self) -> float:
        """Achieved FLOP/s of a rank."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass
class Roofline:
    """Points by strategy, and the FLOP/s of a rank while it computes."""

    points: dict[str, Point] = field(default_factory=lambda: defaultdict(Point))
    flops: float = 0.0
    compute_seconds: float = 0.0  # of these FLOPs, at the planner's cost of a row

    @property
    def peak(self) -> float:
        return self.flops / self.compute_seconds


def price_strategies(
    calls: Mapping[str, Sequence[RoutedCall]], mixtures: Mapping[str, Mixture], timeline: Timeline | None
) -> Roofline | None:
    """None where the plan has no costs of experts."""
    roofline = Roofline()
    for module, recorded in calls.items():
        seconds = measured_seconds(timeline, module) if timeline is not None else {}
        for call in recorded[-NUM_STEPS:]:
            if module not in mixtures or not call.assignments or call.split is None or call.split.costs is None:
                continue
            mixture = mixtures[module]
            row_flops = COMPUTE_PASSES * mixture.experts.forward_flops / max(1, mixture.rows)
            rows = call.rows_RE.sum() / len(call.rows_RE)
            roofline.flops += rows * row_flops
            roofline.compute_seconds += rows * COMPUTE_PASSES * call.split.costs.compute_row
            for name, assignment_seconds in _strategies(call).items():
                _add(roofline.points[name], rows * row_flops, *assignment_seconds)
            if (step := call.record.step - 1) in seconds:  # the trace counts from 0
                slowest = max(call.assignments, key=lambda each: each.seconds)
                times = (slowest.compute_seconds, slowest.exchange_seconds + slowest.copy_seconds)
                _add(roofline.points[MEASURED], rows * row_flops, *times, seconds[step])
    return roofline if roofline.compute_seconds else None


def _add(point: Point, flops: float, compute_seconds: float, message_seconds: float, seconds: float) -> None:
    point.flops += flops
    point.compute_seconds += compute_seconds
    point.message_seconds += message_seconds
    point.seconds += seconds


def _strategies(call: RoutedCall) -> dict[str, tuple[float, float, float]]:
    """Seconds of computation, of communication and of the whole by strategy; the slowest group of ranks counts."""
    by_name: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for recorded in call.assignments:
        for name, seconds in _group_strategies(recorded):
            by_name[name].append(seconds)
    return {name: max(options, key=lambda seconds: seconds[2]) for name, options in by_name.items()}


def _group_strategies(recorded: Assignment) -> Iterator[tuple[str, tuple[float, float, float]]]:
    layer, chosen_RE, costs = recorded.layer, recorded.chosen_RE, recorded.layer.costs
    num_ranks, num_experts = chosen_RE.shape
    row, mean_rows = COMPUTE_PASSES * costs.compute_row, chosen_RE.sum() / num_ranks
    # A ring all-reduce of all experts' gradients; rows to all ranks, and partial outputs back, forward and backward.
    all_reduce = TRANSFERS * (num_ranks - 1) / num_ranks * num_experts * costs.send_expert
    everywhere = EXCHANGES * (num_ranks - 1) * mean_rows * costs.send_row
    for name, compute, messages in (
        ("data parallel", float(chosen_RE.sum(1).max(initial=0)) * row, all_reduce),
        ("model parallel (simulated)", mean_rows * row, everywhere),
    ):
        yield name, (compute, messages, compute + messages)
    plain = without_copies(layer, chosen_RE)
    shadows = with_shadows(layer, chosen_RE, select_shadows(layer, chosen_RE))
    for name, assignment, in_steps in (
        ("expert parallel", plain, False),
        ("shadows", shadows, False),
        ("steps", plain, True),
        ("shadows, steps", shadows, True),
        ("ours", choose_copies(layer, chosen_RE, in_steps=True), True),
    ):
        sequential = assignment.exchange_seconds + assignment.copy_seconds
        messages = assignment.message_seconds if in_steps else sequential
        seconds = assignment.stepped_seconds if in_steps else assignment.seconds
        yield name, (assignment.compute_seconds, messages, seconds)


def measured_seconds(timeline: Timeline, module: str) -> dict[int, float]:
    """By step, the seconds of a mixture's calls: each from its first message to the end of its last wait.

    A call sends rows before it receives results: rows that leave after results came belong to the next call.
    """
    send, back = f"send {module}", f"return {module}"
    by_step: dict[int, list[list[Event]]] = defaultdict(list)
    for event in sorted(timeline.events, key=lambda event: event.start):
        if event.name in (send, back) and event.kind in (FLIGHT, WAIT):
            calls = by_step[event.step]
            is_sending = event.name == send and event.kind == FLIGHT
            if not calls or is_sending and any(other.name == back for other in calls[-1]):
                calls.append([])
            calls[-1].append(event)
    return {
        step: sum(max(event.end for event in call) - call[0].start for call in calls)
        for step, calls in by_step.items()
        if len(calls) % CALLS_OF_STEP == 0
    }


def roofline_figure(roofline: Roofline) -> Figure:
    """Achieved FLOP/s of a rank over R_CC."""
    points = {name: point for name, point in roofline.points.items() if point.ratio and point.rate}
    ratios = [point.ratio for point in points.values()]
    scale, unit = next(
        (s, u) for s, u in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, "")) if roofline.peak >= s or s == 1
    )
    x = np.geomspace(min(0.1, *ratios) / 1.5, max(10.0, *ratios) * 1.5, NUM_LINE_POINTS)
    peak = roofline.peak / scale
    lines = (
        ("ideal: all communication overlapped", peak * np.minimum(1, x), "solid"),
        ("semi-ideal: none overlapped", peak * x / (x + 1), "dash"),
    )
    traces = [trace(name, x.tolist(), y.tolist(), color="var(--muted)", dash=dash) for name, y, dash in lines]
    for number, (name, point) in enumerate(points.items()):
        marker = {"color": f"var(--hue{number % 8})", "size": 11, "symbol": MARKERS[number % len(MARKERS)]}
        if name == MEASURED:
            marker = {"color": "var(--ink)", "size": 14, "symbol": "star"}
        mark = trace(name, [point.ratio], [point.rate / scale], color="")
        hover = f"{name}: R_CC %{{x:.3~r}}, %{{y:.3~r}} {unit}FLOP/s<extra></extra>"
        traces.append(mark | {"mode": "markers", "marker": marker, "hovertemplate": hover})
    layout = figure_layout(
        xaxis=axis(title={"text": "R_CC: computation / communication"}, type="log", tickformat="~r", dtick="D2"),
        yaxis=axis(title={"text": f"{unit}FLOP/s of a rank"}, type="log", tickformat="~r", dtick="D2"),
        legend={"x": 1.02, "y": 1, "xanchor": "left", "yanchor": "top"},
        margin={"l": 8, "r": 12, "t": 28, "b": 8},  # the buttons are above the legend
    )
    measured = "The star is measured on the first rank, at the predicted R_CC of what it ran."
    if MEASURED not in points:
        measured = "Nothing is measured: the trace has no complete call of these steps."
    caption = (
        "Predicted by the complete model from the last recorded steps and the plan's costs; in steps, messages overlap "
        f"with computation. {measured} Points below the lines lose time to uneven loads."
    )
    return Figure("expert_roofline", "DDL-Roofline of the experts", caption, 420, tuple(traces), layout)
