"""Report of a plan: shardings with reasons, load and memory of ranks, the predicted step and its bounds.

Shape legend: R ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from shardwright.planner import dense_strategies, plan, reprice
from shardwright.planner.memory import budget
from shardwright.planner.plan import PlanningResult
from shardwright.planner.price import roofline
from shardwright.planner.routing_gains import RoutingGains
from shardwright.planner.search import Candidate
from shardwright.planner.step import critical_path, prediction, traffic
from shardwright.planner.tables.balance import imbalance
from shardwright.report import html_template, plots, routing, torchrec_export
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure
from shardwright.report.staleness_frontier import FrontierSection
from shardwright.report.units import axis_byte_unit, axis_time_unit, time_text
from shardwright.spec import files
from shardwright.spec.plan import Plan, TablePlan
from shardwright.spec.timeline import Timeline

SHOWN_ROWS = 40  # maximum rows of the grid of tables on a terminal
LOWER_BOUNDS = MappingProxyType(
    {"memory": critical_path.MEMORY, "products": critical_path.MATMULS, "host copy": critical_path.COPIES}
)
MEMORY_COLUMNS = MappingProxyType(
    {
        "weights": ("dense weights",),
        "optimizer": ("dense optimizer",),
        "gradients": ("dense gradients", "gradients in flight"),
        "gathered": ("gathered weights",),
        "activations": ("activations", "current block"),
    }
)


def render(
    result: PlanningResult,
    path: Path,
    torchrec_result: PlanningResult | None = None,
    gains: RoutingGains | None = None,
    stale: FrontierSection | None = None,
) -> Path:
    """Write the page of a plan; `torchrec_result` is the plan within TorchRec's limits, if any; `gains`: of recorded
    routing, if given; `stale`: what staleness would buy."""
    stale = stale or FrontierSection()
    figures = (*stale.figures, *plan_figures(result))
    if gains:
        figures = (routing.gain_figure(gains), *figures)
    problem = result.candidate.problem
    summary = f"{len(problem.table_loads):,} tables at a batch of {problem.batch_size:,} on {problem.cluster.name}"
    text = html_template.render_template(
        "cluster.html.j2",
        brand="Shardwright plan",
        curves_title="Load, memory and schedule",
        title=problem.cluster.name,
        notes=(
            f"{summary}. All times are predicted.",
            *map(to_sentence, step_reasons(result, torchrec_result)),
            *(map(to_sentence, gains.notes) if gains else ()),
            *stale.notes,
        ),
        grids=(
            *(routing.grids(gains) if gains else ()),
            ("Tables", table_plan_grid(result)),
            *dense_grids(result),
            ("What bounds the step", bound_grid(result)),
            *stale.grids,
        ),
        curves=figures,
        figures=figures,
    )
    files.write_text(text, path)
    return path


def to_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def write_torchrec_plan(torchrec_result: PlanningResult, path: Path, result: PlanningResult | None = None) -> Path:
    """Write the TorchRec plan as a Python module, with its slowdown against `result`, if given."""
    slowdown = torchrec_export.describe_slowdown(result, torchrec_result) if result else ""
    files.write_text(torchrec_export.plan_source(torchrec_result, slowdown), path)
    return path


def read_other_plan(result: PlanningResult, path: Path) -> PlanningResult:
    """Read another plan of the same workload and price it on the same cluster."""
    other = files.read(Plan, path)
    other.verify(result.candidate.problem.workload)
    return PlanningResult(other, reprice.reprice_plan(result.candidate.problem, other))


def step_reasons(result: PlanningResult, torchrec_result: PlanningResult | None = None) -> Iterator[str]:
    """Yield the reasons that are not about a table, and the slowdown within TorchRec's limits, if planned."""
    yield from (reason for subject, reason in result.plan.why if not subject.startswith("table "))
    if torchrec_result:
        yield torchrec_export.describe_slowdown(result, torchrec_result)


def table_plan_grid(result: PlanningResult) -> Grid:
    """Sharding, reason, bytes and time of every table, the largest table first."""
    candidate, reasons = result.candidate, dict(result.plan.why)
    rows: list[tuple[float, tuple[str, ...]]] = []
    for index, table in enumerate(result.plan.tables):
        table_load = candidate.problem.table_loads[index]
        bytes_ = table_load.table.rows * table_load.row_bytes(table_load.table.dim)
        sharding = candidate.sharding(index)
        scheme = sharding.scheme + (f" x {sharding.column_shards}" if sharding.column_shards > 1 else "")
        seconds = time_text(plan.table_seconds(candidate, index))
        text_cells = (table.table, scheme, rank_text(table), tier_text(table), reasons[f"table {table.table}"])
        rows.append((bytes_, (*text_cells, budget.bytes_text(bytes_), seconds)))
    rows.sort(key=lambda row: -row[0])
    columns = ("table", "scheme", "ranks", "tiers", "why", "bytes", "lookup and update")
    return Grid(columns, tuple(cells for _, cells in rows), num_text_columns=5)


def dense_grids(result: PlanningResult, explain: bool = False) -> Iterator[tuple[str, Grid]]:
    """Yield the strategies of the dense model, with `explain` or if the chosen strategy is not plain DDP."""
    best = dense_strategies.fastest_candidate(result.dense_candidates)
    if explain or (best is not None and best.strategy.num_techniques):
        yield "The dense model", dense_strategy_grid(result)


def rank_text(table: TablePlan) -> str:
    ranks = sorted({rank for rect in table.rects for rank in rect.ranks})
    if len(ranks) > 4 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(str(rank) for rank in ranks[:6]) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")


def tier_text(table: TablePlan) -> str:
    return ", ".join(
        tier if rows is None else f"{rows:,} rows of each rank in {tier}" for tier, rows in table.placement.tiers
    )


def dense_strategy_grid(result: PlanningResult) -> Grid:
    """All parallelism strategies of the dense model, those with the fewest techniques first.

    Each is priced with the initial table placement. Bytes are the peak memory of a step in a rank's fastest tier.
    """
    candidates = result.dense_candidates or dense_strategies.evaluate_strategies(
        result.candidate.problem, result.candidate.placed, result.candidate.ids_after
    )
    best, smallest = dense_strategies.fastest_candidate(candidates), dense_strategies.smallest_candidate(candidates)
    rows: list[tuple[str, ...]] = []
    for candidate in candidates:
        marks = [mark for mark, choice in (("chosen", best), ("paper's rule", smallest)) if candidate is choice]
        fits = (
            ", ".join(marks)
            if candidate.fits
            else f"{budget.bytes_text(-candidate.free_bytes)} too much"
            if candidate.free_bytes < 0
            else "no memory free"
        )
        sizes = (
            budget.bytes_text(bytes_) if bytes_ else ""
            for bytes_ in (*_bytes_by_column(candidate), candidate.peak_bytes, candidate.offloaded_bytes)
        )
        rows.append((candidate.strategy.name, fits, time_text(candidate.seconds), *sizes))
    any_offloaded = any(candidate.offloaded_bytes for candidate in candidates)
    columns = ("dense model", "fits", "step", *MEMORY_COLUMNS, "total", *(["slower tier"] if any_offloaded else []))
    return Grid(columns, tuple(row if any_offloaded else row[:-1] for row in rows), num_text_columns=2)


def _bytes_by_column(candidate: dense_strategies.DenseCandidate) -> Iterator[float]:
    bytes_by_part = dict(candidate.memory_parts)
    yield from (sum(bytes_by_part[name] for name in names) for names in MEMORY_COLUMNS.values())


def bound_grid(result: PlanningResult) -> Grid:
    """Seconds of each resource on the step's critical path, which add up to the step, and lower bounds.

    A lower bound is the time of the step if it used only that resource, at its full rate.
    """
    step, bounds = result.candidate.seconds, lower_bound_seconds(result)
    rows = [
        (name, time_text(seconds), f"{100 * seconds / step:.1f} %", time_text(bounds[name]) if name in bounds else "")
        for name, seconds in critical_path.seconds_by_resource(result.candidate).items()
        if seconds or bounds.get(name)
    ]
    total = ("predicted step", time_text(step), "100 %", time_text(max(bounds.values())))
    return Grid(("resource", "on the critical path", "of the step", "lower bound"), tuple(rows), total=total)


def lower_bound_seconds(result: PlanningResult) -> dict[str, float]:
    """Seconds of a step if a resource were the only limit, by resource; for links, at the slowest level."""
    bounds: dict[str, float] = {}
    for name, seconds in roofline.step_bound(
        result.candidate.problem.cluster, plan.resource_usage(result.candidate)
    ).seconds_by_resource:
        resource = LOWER_BOUNDS.get(name, critical_path.LINKS)
        bounds[resource] = max(bounds.get(resource, 0.0), seconds)
    return bounds | {critical_path.LATENCY: critical_path.latency_seconds(result.candidate)}


def plan_figures(result: PlanningResult) -> Iterator[Figure]:
    candidate = result.candidate
    parts = [
        ("lookup", candidate.loads.lookup_R),
        ("update", candidate.loads.update_R),
        ("fetching rows from slower tiers", candidate.loads.expect_R + candidate.loads.prefetch_R),
    ]
    unit, unit_seconds = axis_time_unit([float(np.sum([seconds_R for _, seconds_R in parts], 0).max())])
    yield rank_bars_figure(
        "load",
        "Load of each rank",
        "Predicted time of reading and updating rows in a step, by rank.",
        [(name, seconds_R / unit_seconds) for name, seconds_R in parts if seconds_R.any()],
        unit,
    )
    memory_parts = [("tables and optimizer state", candidate.loads.bytes_R)]
    memory_parts += budget.memory_parts_by_rank(candidate.problem).items()
    unit, unit_bytes = axis_byte_unit([float(np.sum([bytes_R for _, bytes_R in memory_parts], 0).max())])
    yield rank_bars_figure(
        "memory",
        "Memory of each rank",
        "Memory by rank, summed over all tiers.",
        [(name, bytes_R / unit_bytes) for name, bytes_R in memory_parts if np.asarray(bytes_R).any()],
        unit,
    )
    yield roofline_figure(result)
    timeline = prediction.predict_timeline(candidate.problem, candidate.placed, candidate.loads, candidate.ids_after)
    end_step = prediction.WARM_STEPS + prediction.COUNTED_STEPS
    figure = plots.gantt(Timeline(timeline.source, tuple(event for event in timeline.events if event.step < end_step)))
    yield Figure(figure.name, "Predicted steps", figure.caption, figure.height, figure.data, figure.layout)


def roofline_figure(result: PlanningResult) -> Figure:
    """Bars for the lower bound of each resource, above the bar of the predicted step."""
    cluster, latency = result.candidate.problem.cluster, critical_path.latency_seconds(result.candidate)
    parts = [
        *roofline.step_bound(cluster, plan.resource_usage(result.candidate)).seconds_by_resource,
        (critical_path.LATENCY, latency),
    ]
    names = [name for name, _ in parts] + ["predicted step"]
    unit, unit_seconds = axis_time_unit([result.candidate.seconds])
    bar = {
        "type": "bar",
        "orientation": "h",
        "name": unit,
        "y": names,
        "x": [seconds / unit_seconds for _, seconds in parts] + [result.candidate.seconds / unit_seconds],
        "text": [time_text(seconds) for _, seconds in parts] + [time_text(result.candidate.seconds)],
        "textposition": "auto",
        "insidetextfont": {"color": "var(--on-hue)"},
        "outsidetextfont": {"color": "var(--ink)"},
        "marker": {"color": ["var(--hue0)"] * len(parts) + ["var(--hue1)"]},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "showlegend": False,
    }
    layout = plots.figure_layout(
        xaxis=plots.axis(title={"text": unit}, rangemode="tozero"),
        yaxis=plots.axis(autorange="reversed", automargin=True),
        bargap=0.3,
    )
    caption = "Lower bounds: a step limited only by this resource, at its full rate, on the rank that uses it most."
    return Figure("roofline", "Lower bound of each resource", caption, 80 + 36 * len(names), (bar,), layout)


def rank_bars_figure(name: str, title: str, caption: str, parts: Sequence[tuple[str, np.ndarray]], unit: str) -> Figure:
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": part,
            "x": list(range(len(values))),
            "y": [float(value) for value in values],
            "marker": {"color": f"var(--hue{index % plots.NUM_HUES})"},
            "hovertemplate": f"rank %{{x}}: %{{y:.4~r}} {unit}<extra>{part}</extra>",
        }
        for index, (part, values) in enumerate(parts)
    ]
    layout = plots.figure_layout(
        xaxis=plots.axis(title={"text": "rank"}),
        yaxis=plots.axis(title={"text": unit}, rangemode="tozero"),
        barmode="stack",
        bargap=0.15,
        showlegend=True,
    )
    return Figure(name, title, caption, 320 if len(parts) <= 4 else 420, tuple(data), layout)  # a legend of many rows


def comparison_grid(result: PlanningResult, other: PlanningResult) -> Grid:
    """Compare two plans of the same workload, priced on the same cluster."""
    rows: list[tuple[str, ...]] = []

    def add_row(name: str, values: Sequence[float], formatter: Callable[[float], str]) -> None:
        ours, theirs = values
        if ours or theirs:
            change = f"{100 * (ours / theirs - 1):+.1f} %" if theirs else ""
            rows.append((name, formatter(ours), formatter(theirs), change))

    pair = result.candidate, other.candidate
    add_row("step", [side.seconds for side in pair], time_text)
    add_row(
        "imbalance of lookup (slowest rank over average)",
        [imbalance(side.loads.lookup_R) for side in pair],
        ratio_text,
    )
    add_row("imbalance of update", [imbalance(side.loads.update_R) for side in pair], ratio_text)
    add_row("memory of tables, fullest rank", [float(side.loads.bytes_R.max()) for side in pair], budget.bytes_text)
    add_row("sent, busiest rank", [max_sent_bytes(side) for side in pair], budget.bytes_text)
    stages = [plan.slowest_stage_seconds(side) for side in pair]
    for name in [name for name in stages[0] if name in stages[1]]:
        seconds = [seconds_by_stage[name] for seconds_by_stage in stages]
        if max(seconds) - min(seconds) <= 1e-3 * max(seconds):
            continue
        add_row(f"stage {name}, slowest rank", seconds, time_text)
        if name in ("lookup", "update"):
            row_seconds = [float(getattr(side.loads, f"{name}_R").max()) for side in pair]
            add_row(f"{name}, table rows", row_seconds, time_text)
            other_seconds = [max(0.0, total - part) for total, part in zip(seconds, row_seconds, strict=True)]
            add_row(f"{name}, ids, conversion and messages", other_seconds, time_text)
    return Grid(("in a step", "this plan", "other plan", "change"), tuple(rows))


def ratio_text(value: float) -> str:
    return f"{value:.2f}x"


def max_sent_bytes(candidate: Candidate) -> float:
    """Bytes that the busiest rank sends in a step, in the wire precision."""
    return float(traffic.step_traffic(candidate.problem, candidate.placed).sum(1).max())
