"""The part of a run's page about its mixtures of experts, from the recorded routing (routing.jsonl).

Shape legend: R ranks that have a mixture.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, permutations
from math import log2
from types import MappingProxyType
from typing import Any

import numpy as np

from shardwright.planner.expert_assignment import Assignment
from shardwright.report.expert_loads import (
    Ranks,
    RoutedCall,
    bytes_between,
    imbalance,
    link_level,
    mean_or_none,
    rank_imbalance,
    ranks_of_mixture,
    read_calls,
)
from shardwright.report.expert_roofline import price_strategies, roofline_figure
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure, axis, figure_layout, trace
from shardwright.report.run_record import RunRecord
from shardwright.spec.expert_rows import IntArray
from shardwright.spec.plan import Plan
from shardwright.spec.workload import Mixture

SHOWN_MIXTURES = 4
MAX_STEPS = 50  # of those recorded, evenly spread
MIN_MAP_PIXELS, MAX_MAP_PIXELS, EXPERT_PIXELS, GAP_PIXELS = 96, 160, 14, 34
MAP_RANGE = 3  # colours from 1/8 to 8 times an even share
BUTTON_PIXELS = 28  # above a figure, for plotly's buttons
LEVEL_LABELS = MappingProxyType({"local": "inside a host", "host": "between hosts"})
Calls = Mapping[str, Sequence[RoutedCall]]
Value = Callable[[RoutedCall], float | None]


@dataclass(frozen=True, slots=True)
class ExpertsSection:
    """What the page shows; `summary` has a row by mixture, `links` one by level of the network."""

    text: str
    figures: tuple[Figure, ...]
    summary: Grid
    links: Grid | None


def describe_experts(run: RunRecord) -> ExpertsSection | None:
    """None for a run without recorded routing."""
    if not run.routing:
        return None
    steps = _thin_out(sorted({record.step for record in run.routing}))
    calls = read_calls([record for record in run.routing if record.step in steps], run.plan)
    mixtures = {mixture.module: mixture for mixture in run.workload.experts} if run.workload else {}
    roofline = price_strategies(calls, mixtures, run.timeline)
    figures = (
        load_figure(calls),
        imbalance_figure(calls),
        copies_figure(calls),
        dropped_figure(calls),
        roofline_figure(roofline) if roofline is not None else None,
    )
    text = describe_calls(calls, len({record.step for record in run.routing}))
    if run.config.get("train", {}).get("accumulate", 1) > 1 or run.plan is not None and run.plan.pipeline is not None:
        text += " Rows are sums over the micro-batches of a step."
    priced = [call for call in chain(*calls.values()) if call.split is not None and call.split.exchange == "flat"]
    if any(call.assignments for call in priced) and roofline is None:
        text += " The plan has no costs of experts, so no times are predicted."
    links = link_grid(calls, mixtures, run.plan) if run.plan is not None else None
    return ExpertsSection(text, tuple(figure for figure in figures if figure), summary_grid(calls), links)


def describe_calls(calls: Calls, num_steps: int) -> str:
    num_read = len({call.record.step for call in chain(*calls.values())})
    last = [recorded[-1] for recorded in calls.values()]
    experts = sorted({call.rows_RE.shape[1] for call in last})
    split = next((call.split for call in last if call.split is not None), None)
    place = "Every rank has all of them, so no row travels."
    if split is not None:
        travel = f"in {split.groups} steps" if split.groups > 1 else "at once"
        place = f"They are split over the ranks along {', '.join(split.axes)}; rows travel {travel}."
        if split.exchange == "hosts":
            place = (
                f"They are split over the ranks along {', '.join(split.axes)}; a token goes to each group along "
                f"{split.axes[0]} once, and rows travel {travel} along {', '.join(split.row_axes)}: the bytes of each "
                "link, and times, are not known from recorded rows."
            )
    elif len(last[0].rows_RE) == 1:
        place = "All are on one rank."
    return (
        f"{_count(len(calls), 'mixture')} of {' or '.join(map(str, experts))} experts, {_count(num_steps, 'step')} "
        f"recorded{f', of which {num_read} are shown' if num_read < num_steps else ''}. {place}"
    )


def load_figure(calls: Calls) -> Figure:
    """Heat maps, one above the other, of the most uneven mixtures."""
    ranked = sorted(calls, key=lambda module: -(mean_or_none([imbalance(c.load_E) for c in calls[module]]) or 0.0))
    modules = [module for module in calls if module in ranked[:SHOWN_MIXTURES]]
    sizes = [_map_pixels(calls[module][-1].rows_RE.shape[1]) for module in modules]
    height = sum(sizes) + GAP_PIXELS * len(modules)
    scale = [[0, "var(--hue0)"], [0.5, "var(--raised)"], [1, "var(--hue1)"]]
    ticks = [*range(-MAP_RANGE, MAP_RANGE + 1)]
    labels = [f"1/{2**-tick}" if tick < 0 else str(2**tick) for tick in ticks]
    bar = {"tickvals": ticks, "ticktext": labels, "thickness": 10, "outlinewidth": 0}
    layout = figure_layout(
        xaxis=axis(title={"text": "step"}, tickformat=",d", showgrid=False, anchor=f"y{len(modules)}", zeroline=False),
        margin={"l": 8, "r": 8, "t": BUTTON_PIXELS, "b": 8},
        annotations=[],
    )
    traces, top = list[dict[str, Any]](), 1.0
    for number, (module, pixels) in enumerate(zip(modules, sizes, strict=True), start=1):
        top -= GAP_PIXELS / height
        loads = [*zip(*(call.load_E for call in calls[module]), strict=True)]
        traces.append(
            {
                "type": "heatmap",
                "x": [call.record.step for call in calls[module]],
                "y": list(range(len(loads))),
                "z": [[_color_value(load) for load in row] for row in loads],
                "text": [[f"{load:.2f}" for load in row] for row in loads],
                "zmin": -MAP_RANGE,
                "zmax": MAP_RANGE,
                "colorscale": scale,
                "showscale": number == 1,
                "colorbar": bar,
                "yaxis": f"y{number}" if number > 1 else "y",
                "hovertemplate": f"{module}, expert %{{y}}, step %{{x}}: %{{text}}<extra></extra>",
            }
        )
        layout[f"yaxis{number}" if number > 1 else "yaxis"] = axis(
            domain=[max(0.0, top - pixels / height), top], showgrid=False, zeroline=False, tickformat="d", nticks=6
        )
        label = {"x": 0, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        layout["annotations"].append(label | {"text": module, "showarrow": False, "font": {"size": 12}})
        top -= pixels / height
    caption = "Rows of each expert over an even share: 1 is even; loads below 1/8 or above 8 have the colours of those."
    if len(modules) < len(calls):
        caption += f" Of {len(calls)} mixtures, the {len(modules)} most uneven."
    return Figure("expert_loads", "Load of experts", caption, height + BUTTON_PIXELS + 50, tuple(traces), layout)


def imbalance_figure(calls: Calls) -> Figure:
    """The busiest expert, and the busiest rank before and after copies: means over the mixtures."""
    by_step = _by_step(calls)
    has_copies = any(call.num_copies for call in chain(*calls.values()))
    lines: list[tuple[str, str, Value]] = [("an expert", "var(--hue0)", lambda call: imbalance(call.load_E))]
    if any(call.assignments for call in chain(*calls.values())):
        name = "a rank, without copies" if has_copies else "a rank"
        lines.append((name, "var(--hue1)", lambda call: _rank_imbalance(call, call.without_copies)))
    if has_copies:
        lines.append(("a rank, with copies", "var(--hue2)", lambda call: _rank_imbalance(call, call.assignments)))
    traces = [_mean_trace(by_step, name, color, value) for name, color, value in lines]
    subject = "an expert, or that a rank computes," if len(lines) > 1 else "an expert"
    caption = f"Most rows of {subject} over the mean: 1 is even. Means over the mixtures."
    return _steps_figure("expert_imbalance", "Imbalance", caption, traces, rangemode="tozero")


def copies_figure(calls: Calls) -> Figure | None:
    if not any(call.num_copies for call in chain(*calls.values())):
        return None
    caption = "Pairs of a rank and another rank's expert that it computed rows of. Means over the mixtures."
    line = _mean_trace(_by_step(calls), "copies", "var(--hue2)", lambda call: float(call.num_copies))
    return _steps_figure("expert_copies", "Copies of experts", caption, [line], rangemode="tozero")


def dropped_figure(calls: Calls) -> Figure | None:
    if not any(call.record.dropped for call in chain(*calls.values())):
        return None
    caption = "Choices over the capacity of their expert, of all choices. Mean over the mixtures."
    line = _mean_trace(_by_step(calls), "dropped", "var(--hue3)", lambda call: call.dropped_share)
    return _steps_figure("expert_drops", "Dropped choices", caption, [line], rangemode="tozero", tickformat=".1%")


def summary_grid(calls: Calls) -> Grid:
    """Means over the recorded steps; columns without values are left out."""
    has_copies = any(call.num_copies for call in chain(*calls.values()))
    has_drops = any(call.record.dropped for call in chain(*calls.values()))
    columns: dict[str, Value] = {
        "rows a step": lambda call: float(call.rows_RE.sum()),
        "busiest expert": lambda call: imbalance(call.load_E),
        "busiest rank, without copies": lambda call: _rank_imbalance(call, call.without_copies) if has_copies else None,
        "busiest rank": lambda call: _rank_imbalance(call, call.assignments),
        "copies": lambda call: float(call.num_copies) if has_copies else None,
        "dropped": lambda call: call.dropped_share if has_drops else None,
        "share of even routing, predicted": lambda call: call.ideal_share,
    }
    formats = dict(zip(columns, ("{:,.0f}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.1f}", "{:.1%}", "{:.0%}"), strict=True))
    means = {name: [mean_or_none([*map(value, each)]) for each in calls.values()] for name, value in columns.items()}
    names = [name for name, values in means.items() if any(value is not None for value in values)]
    rows = tuple(
        (module, *(formats[name].format(value) if (value := means[name][index]) is not None else "" for name in names))
        for index, module in enumerate(calls)
    )
    return Grid(("mixture", *names), rows)


def link_grid(calls: Calls, mixtures: Mapping[str, Mixture], plan: Plan) -> Grid | None:
    """Bytes of a step by level of the network, over all mixtures: means over the recorded steps."""
    ranks, steps = ranks_of_mixture(plan), set[int]()
    sent: dict[Ranks, IntArray] = {}  # by group: bytes of rows, and of copies
    for module, recorded in calls.items():
        for call in recorded if module in mixtures else ():
            for group, *bytes_RR in bytes_between(call, mixtures[module]):
                steps.add(call.record.step)
                sent[group] = sent.get(group, 0) + np.stack(bytes_RR)
    totals: dict[str, IntArray] = {}
    for group, (rows_RR, copies_RR) in sent.items():
        for sender, receiver in permutations(range(len(group)), 2):
            level = link_level(plan, ranks[group[sender]], ranks[group[receiver]])
            totals[level] = totals.get(level, 0) + np.array([rows_RR[sender, receiver], copies_RR[sender, receiver]])
    if not totals:
        return None
    rows = tuple(
        (LEVEL_LABELS.get(level, level), *(f"{bytes_ / len(steps) / 1e6:,.2f}" for bytes_ in (*parts, parts.sum())))
        for level, parts in totals.items()
    )
    return Grid(("link", "MB of rows and outputs", "MB of copies and their gradients", "MB a step"), rows)


def _rank_imbalance(call: RoutedCall, assignments: Sequence[Assignment]) -> float | None:
    return rank_imbalance(assignments) if call.assignments else None


def _by_step(calls: Calls) -> dict[int, list[RoutedCall]]:
    by_step: dict[int, list[RoutedCall]] = defaultdict(list)
    for call in chain(*calls.values()):
        by_step[call.record.step].append(call)
    return {step: by_step[step] for step in sorted(by_step)}


def _mean_trace(by_step: Mapping[int, Sequence[RoutedCall]], name: str, color: str, value: Value) -> dict[str, Any]:
    means = {step: mean_or_none([value(call) for call in calls]) for step, calls in by_step.items()}
    return trace(name, list(means), list(means.values()), color=color)


def _steps_figure(name: str, title: str, caption: str, traces: Sequence[dict[str, Any]], **yaxis: Any) -> Figure:
    layout = figure_layout(
        xaxis=axis(title={"text": "step"}, tickformat=",d"),
        yaxis=axis(hoverformat=".3~r", **yaxis),
        hovermode="x unified",
        showlegend=len(traces) > 1,
    )
    return Figure(name, title, caption, 260, tuple(traces), layout)


def _thin_out(steps: Sequence[int]) -> set[int]:
    """At most MAX_STEPS of them, evenly spread, with the first and the last."""
    num = min(len(steps), MAX_STEPS)
    return {steps[round(index * (len(steps) - 1) / max(1, num - 1))] for index in range(num)}


def _color_value(load: float) -> float:
    return max(-MAP_RANGE, min(MAP_RANGE, log2(load))) if load else -MAP_RANGE


def _map_pixels(num_experts: int) -> int:
    return min(MAX_MAP_PIXELS, max(MIN_MAP_PIXELS, EXPERT_PIXELS * num_experts))


def _count(num: int, noun: str) -> str:
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"
