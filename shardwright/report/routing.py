"""Report of recorded routing: what copies, steps and a permanent placement of experts would gain, and the placement."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from shardwright.planner.routing_gains import FloatArray, MixtureGains, RoutingGains
from shardwright.report import html_template, plots
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure
from shardwright.report.units import bytes_text, time_text
from shardwright.spec import files

TITLE = "Experts: what copies and steps would gain"
POLICY_NAMES = MappingProxyType(
    {
        "shadows": "shadows",
        "steps": "steps",
        "even": "even copies",
        "fastest": "fastest, in steps",
        "ideal": "even routing",
    }
)
CAPTION = (
    "Predicted seconds of plain expert parallelism, forward and backward, over those of each policy: median and range "
    "of the passes. Shadows: FasterMoE's Algorithm 1. Steps: messages overlap with computation. Even copies: as "
    "many as it takes for even loads. Fastest, in steps: the choice of copies with the least time, none included. Even "
    "routing, in steps: if the router balanced all loads. Placement: made from the first half of the passes, priced on "
    "the second."
)


def render(gains: RoutingGains, path: Path) -> Path:
    """Write the page of recorded routing without a model."""
    figures = (gain_figure(gains),)
    text = html_template.render_template(
        "cluster.html.j2",
        brand="Shardwright plan",
        curves_title=TITLE,
        title=gains.problem.cluster.name,
        notes=tuple(notes(gains)),
        grids=grids(gains),
        curves=figures,
        figures=figures,
    )
    files.write_text(text, path)
    return path


def grids(gains: RoutingGains) -> tuple[tuple[str, Grid], ...]:
    first = f"{TITLE} (predicted gain over plain expert parallelism: median, range)"
    return (first, gain_grid(gains)), ("Experts: loads, copies and placement (median, range)", load_grid(gains))


def notes(gains: RoutingGains) -> Iterator[str]:
    """What the predictions are of, and how they were made, in sentences."""
    cluster = gains.problem.cluster
    rates = ""
    if cluster.source == "preset":
        rates = f", at the published rates of {cluster.name}; real machines do not reach them"
    yield f"All times are predicted{rates}."
    yield from (f"{note[0].upper()}{note[1:]}." for note in gains.notes)


def gain_grid(gains: RoutingGains) -> Grid:
    """By mixture, the time of plain expert parallelism and the gains over it: median, least to most."""
    rows = tuple(
        (
            each.mixture.module,
            time_text(float(np.median(each.seconds("plain")))),
            *(range_text(each.gains(policy)) for policy in POLICY_NAMES),
        )
        for each in gains.mixtures
    )
    total = (
        "all",
        time_text(float(np.median(gains.total_seconds("plain")))),
        *(range_text(gains.total_gains(policy)) for policy in POLICY_NAMES),
    )
    return Grid(("mixture", "plain", *POLICY_NAMES.values()), rows, total=total)


def load_grid(gains: RoutingGains) -> Grid:
    """By mixture, the largest over the mean load of a rank before and after copies, copies, and the placement."""
    columns = ("mixture", "max / mean load", "with copies", "copies of a rank", "their memory", "placed", "its gain")
    return Grid(columns, tuple(map(_load_cells, gains.mixtures)))


def _load_cells(each: MixtureGains) -> tuple[str, ...]:
    num_copies = [price.num_copies for price in each.prices]
    return (
        each.mixture.module,
        range_text(np.array([price.imbalance for price in each.prices])),
        range_text(np.array([price.imbalance_left for price in each.prices])),
        f"{np.median(num_copies):.0f}, {min(num_copies)}-{max(num_copies)}",
        bytes_text(each.copy_bytes),
        range_text(each.placed_imbalance),
        range_text(each.placed_gains),
    )


def range_text(values: FloatArray) -> str:
    return f"{np.median(values):.2f}, {values.min():.2f}-{values.max():.2f}"


def gain_figure(gains: RoutingGains) -> Figure:
    """Bars of the median gain of each policy by mixture, with the range."""
    data = [
        _gain_bars(POLICY_NAMES[policy], number, {each.mixture.module: each.gains(policy) for each in gains.mixtures})
        for number, policy in enumerate(POLICY_NAMES)
    ]
    data.append(_gain_bars("placement", len(data), {each.mixture.module: each.placed_gains for each in gains.mixtures}))
    layout = plots.figure_layout(
        xaxis=plots.axis(type="category", title={"text": "mixture"}),
        yaxis=plots.axis(title={"text": "gain over plain expert parallelism"}, rangemode="tozero"),
        shapes=[plots.dotted_line(y0=1, y1=1, xref="paper", x0=0, x1=1)],
        barmode="group",
        bargap=0.2,
        showlegend=True,
    )
    return Figure("expert_gains", "Gain of each policy by mixture", CAPTION, 420, tuple(data), layout)


def _gain_bars(name: str, hue: int, gains_by_module: Mapping[str, FloatArray]) -> dict[str, Any]:
    values = list(gains_by_module.values())
    medians = [float(np.median(each)) for each in values]
    return {
        "type": "bar",
        "name": name,
        "x": list(gains_by_module),
        "y": medians,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [float(each.max()) - median for each, median in zip(values, medians, strict=True)],
            "arrayminus": [median - float(each.min()) for each, median in zip(values, medians, strict=True)],
            "color": "var(--muted)",
            "thickness": 1,
            "width": 2,
        },
        "marker": {"color": f"var(--hue{hue % plots.NUM_HUES})"},
        "hovertext": [range_text(each) for each in values],
        "hovertemplate": f"%{{x}}: %{{hovertext}}<extra>{name}</extra>",
    }


def write_placement(gains: RoutingGains, output: Path) -> Iterator[str]:
    """Write the placement beside `output`, and in SGLang's form if it has one; yield a line about each file."""
    gains.placement.verify()
    path = output.with_suffix(".placement.json")
    files.write(gains.placement, path)
    yield f"placement  {path}"
    path, sglang = output.with_suffix(".sglang.json"), gains.placement.to_sglang()
    if isinstance(sglang, str):
        yield f"not for SGLang: {sglang}"
        return
    files.write_text(json.dumps(sglang) + "\n", path)
    yield f"placement for SGLang's --init-expert-location  {path}"
