"""A plan as a page and as tables: each table's layout and why, load and memory of every rank, the step, its bounds."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from shardwright.planner import dense_strategies, plan, reprice
from shardwright.planner.memory import budget
from shardwright.planner.plan import PlanningResult
from shardwright.planner.price import roofline
from shardwright.planner.search import Candidate
from shardwright.planner.step import critical_path, tasks, traffic
from shardwright.planner.tables.balance import imbalance
from shardwright.report import html_template, plots, torchrec_export
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure
from shardwright.report.units import axis_byte_unit, axis_time_unit, time_text
from shardwright.spec import files
from shardwright.spec.plan import Plan, TablePlan
from shardwright.spec.timeline import Timeline

SHOWN_ROWS = 40  # of tables, on a terminal
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


def render(result: PlanningResult, path: Path, torchrec_result: PlanningResult | None = None) -> Path:
    figures = tuple(plan_figures(result))
    problem = result.candidate.problem
    what = f"{len(problem.table_loads):,} tables at a batch of {problem.batch_size:,} on {problem.cluster.name}"
    text = html_template.render_template(
        "cluster.html.j2",
        brand="Shardwright plan",
        curves_title="Load, memory and schedule",
        title=problem.cluster.name,
        notes=(f"{what}. All times are predicted.", *map(to_sentence, step_reasons(result, torchrec_result))),
        grids=(("Tables", table_plan_grid(result)), *dense_grids(result), ("What bounds the step", bound_grid(result))),
        curves=figures,
        figures=figures,
    )
    files.write_text(text, path)
    return path


def to_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def write_torchrec_plan(torchrec_result: PlanningResult, path: Path, result: PlanningResult | None = None) -> Path:
    """Write the TorchRec plan as a Python module, with its loss against our plan, if given."""
    lost = torchrec_export.describe_slowdown(result, torchrec_result) if result else ""
    files.write_text(torchrec_export.plan_source(torchrec_result, lost), path)
    return path


def read_other_plan(result: PlanningResult, path: Path) -> PlanningResult:
    """Another plan of the same workload, priced where this one was."""
    other = files.read(Plan, path)
    other.verify(result.candidate.problem.workload)
    return PlanningResult(other, reprice.reprice_plan(result.candidate.problem, other))


def step_reasons(result: PlanningResult, torchrec_result: PlanningResult | None = None) -> Iterator[str]:
    """The reasons that concern the whole step; and the loss within TorchRec's limits, if planned."""
    yield from (reason for subject, reason in result.plan.why if not subject.startswith("table "))
    if torchrec_result:
        yield torchrec_export.describe_slowdown(result, torchrec_result)


def table_plan_grid(result: PlanningResult) -> Grid:
    """The largest first."""
    found, reasons = result.candidate, dict(result.plan.why)
    rows: list[tuple[float, tuple[str, ...]]] = []
    for number, table in enumerate(result.plan.tables):
        demand = found.problem.table_loads[number]
        bytes_ = demand.table.rows * demand.row_bytes(demand.table.dim)
        cut = found.sharding(number)
        scheme = cut.scheme + (f" x {cut.column_shards}" if cut.column_shards > 1 else "")
        seconds = time_text(plan.table_seconds(found, number))
        words = (table.table, scheme, rank_text(table), tier_text(table), reasons[f"table {table.table}"])
        rows.append((bytes_, (*words, budget.bytes_text(bytes_), seconds)))
    rows.sort(key=lambda row: -row[0])
    columns = ("table", "scheme", "ranks", "tiers", "why", "bytes", "lookup and update")
    return Grid(columns, tuple(cells for _, cells in rows), num_text_columns=5)


def dense_grids(result: PlanningResult, explain: bool = False) -> Iterator[tuple[str, Grid]]:
    """Asked for, or where DDP alone is not what was chosen."""
    best = dense_strategies.fastest_candidate(result.dense_candidates)
    if explain or (best is not None and best.strategy.num_techniques):
        yield "The dense part", dense_strategy_grid(result)


def rank_text(table: TablePlan) -> str:
    found = sorted({rank for rect in table.rects for rank in rect.ranks})
    if len(found) > 4 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return ", ".join(str(rank) for rank in found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")


def tier_text(table: TablePlan) -> str:
    return ", ".join(
        tier if rows is None else f"{rows:,} rows of each rank in {tier}" for tier, rows in table.placement.tiers
    )


def dense_strategy_grid(result: PlanningResult) -> Grid:
    """Every way to hold the dense part, where tables lie as they were placed first: the smallest set of techniques
    first. Bytes are those of a rank's fastest tier, at the fullest moment of a step."""
    found = result.dense_candidates or dense_strategies.evaluate_strategies(
        result.candidate.problem, result.candidate.placed, result.candidate.ids_after
    )
    best, rule = dense_strategies.fastest_candidate(found), dense_strategies.smallest_candidate(found)
    rows: list[tuple[str, ...]] = []
    for one in found:
        marks = [word for word, other in (("chosen", best), ("paper's rule", rule)) if one is other]
        fits = (
            ", ".join(marks)
            if one.fits
            else f"{budget.bytes_text(-one.free_bytes)} too much"
            if one.free_bytes < 0
            else "no room"
        )
        sizes = (
            budget.bytes_text(bytes_) if bytes_ else ""
            for bytes_ in (*_grouped(one), one.peak_bytes, one.offloaded_bytes)
        )
        rows.append((one.strategy.name, fits, time_text(one.seconds), *sizes))
    far = any(one.offloaded_bytes for one in found)
    columns = ("dense part", "fits", "step", *MEMORY_COLUMNS, "total", *(["slower tier"] if far else []))
    return Grid(columns, tuple(row if far else row[:-1] for row in rows), num_text_columns=2)


def _grouped(one: dense_strategies.DenseCandidate) -> Iterator[float]:
    parts = dict(one.memory_parts)
    yield from (sum(parts[name] for name in names) for names in MEMORY_COLUMNS.values())


def bound_grid(result: PlanningResult) -> Grid:
    """What the step's critical path spends on each resource, which adds up to the step; and as a lower bound what the
    resource alone, at its full rate, would take."""
    step, alone = result.candidate.seconds, lower_bound_seconds(result)
    rows = [
        (name, time_text(seconds), f"{100 * seconds / step:.1f} %", time_text(alone[name]) if name in alone else "")
        for name, seconds in critical_path.seconds_by_resource(result.candidate).items()
        if seconds or alone.get(name)
    ]
    total = ("predicted step", time_text(step), "100 %", time_text(max(alone.values())))
    return Grid(("resource", "on the critical path", "of the step", "lower bound, alone"), tuple(rows), total=total)


def lower_bound_seconds(result: PlanningResult) -> dict[str, float]:
    """What each resource would take if it were the only limit; for links, the slowest level."""
    found: dict[str, float] = {}
    for name, seconds in roofline.step_bound(
        result.candidate.problem.cluster, plan.resource_usage(result.candidate)
    ).seconds_by_resource:
        part = LOWER_BOUNDS.get(name, critical_path.LINKS)
        found[part] = max(found.get(part, 0.0), seconds)
    return found | {critical_path.LATENCY: critical_path.latency_seconds(result.candidate)}


def plan_figures(result: PlanningResult) -> Iterator[Figure]:
    found = result.candidate
    parts = [
        ("lookup", found.loads.lookup_R),
        ("update", found.loads.update_R),
        ("fetching rows from slower tiers", found.loads.prefetch_R),
    ]
    unit, length = axis_time_unit([float(np.sum([seconds_R for _, seconds_R in parts], 0).max())])
    yield rank_bars_figure(
        "load",
        "Load of each rank",
        "Predicted time of reading and updating rows in a step, by rank.",
        [(name, seconds_R / length) for name, seconds_R in parts if seconds_R.any()],
        unit,
    )
    held = [("tables and optimizer state", found.loads.bytes_R)]
    held += [
        (name, np.full(len(found.loads.bytes_R), bytes_))
        for name, bytes_ in budget.memory_budget(found.problem).memory_parts
    ]
    unit, size = axis_byte_unit([float(np.sum([bytes_R for _, bytes_R in held], 0).max())])
    yield rank_bars_figure(
        "memory",
        "Memory of each rank",
        "Memory by rank, all tiers together.",
        [(name, bytes_R / size) for name, bytes_R in held if np.asarray(bytes_R).any()],
        unit,
    )
    yield roofline_figure(result)
    timeline = tasks.predict_timeline(found.problem, found.placed, found.loads, found.ids_after)
    last = tasks.WARM_STEPS + tasks.COUNTED_STEPS
    figure = plots.gantt(Timeline(timeline.source, tuple(one for one in timeline.events if one.step < last)))
    yield Figure(figure.name, "Predicted steps", figure.caption, figure.height, figure.data, figure.layout)


def roofline_figure(result: PlanningResult) -> Figure:
    """A bar for what each resource alone would take, above that of the step."""
    cluster, latency = result.candidate.problem.cluster, critical_path.latency_seconds(result.candidate)
    parts = [
        *roofline.step_bound(cluster, plan.resource_usage(result.candidate)).seconds_by_resource,
        (critical_path.LATENCY, latency),
    ]
    names = [name for name, _ in parts] + ["predicted step"]
    unit, length = axis_time_unit([result.candidate.seconds])
    bar = {
        "type": "bar",
        "orientation": "h",
        "name": unit,
        "y": names,
        "x": [seconds / length for _, seconds in parts] + [result.candidate.seconds / length],
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
    return Figure("roofline", "Each resource alone", caption, 80 + 36 * len(names), (bar,), layout)


def rank_bars_figure(name: str, title: str, caption: str, parts: Sequence[tuple[str, np.ndarray]], unit: str) -> Figure:
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": part,
            "x": list(range(len(values))),
            "y": [float(value) for value in values],
            "marker": {"color": f"var(--hue{number % plots.NUM_HUES})"},
            "hovertemplate": f"rank %{{x}}: %{{y:.4~r}} {unit}<extra>{part}</extra>",
        }
        for number, (part, values) in enumerate(parts)
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
    """This plan against another of the same workload, priced on the same cluster."""
    rows: list[tuple[str, ...]] = []

    def row(name: str, values: Sequence[float], form: Callable[[float], str]) -> None:
        mine, theirs = values
        if mine or theirs:
            change = f"{100 * (mine / theirs - 1):+.1f} %" if theirs else ""
            rows.append((name, form(mine), form(theirs), change))

    pair = result.candidate, other.candidate
    row("step", [found.seconds for found in pair], time_text)
    row(
        "imbalance of lookup (slowest rank over average)",
        [imbalance(found.loads.lookup_R) for found in pair],
        ratio_text,
    )
    row("imbalance of update", [imbalance(found.loads.update_R) for found in pair], ratio_text)
    row("memory of tables, fullest rank", [float(found.loads.bytes_R.max()) for found in pair], budget.bytes_text)
    row("sent, busiest rank", [max_sent_bytes(found) for found in pair], budget.bytes_text)
    stages = [plan.slowest_stage_seconds(found) for found in pair]
    for name in [name for name in stages[0] if name in stages[1]]:
        seconds = [one[name] for one in stages]
        if max(seconds) - min(seconds) <= 1e-3 * max(seconds):
            continue
        row(f"stage {name}, slowest rank", seconds, time_text)
        if name in ("lookup", "update"):
            parts = [float(getattr(found.loads, f"{name}_R").max()) for found in pair]
            row(f"of {name}: rows of tables", parts, time_text)
            rest = [max(0.0, whole - part) for whole, part in zip(seconds, parts, strict=True)]
            row(f"of {name}: ids, conversion and messages", rest, time_text)
    return Grid(("in a step", "this plan", "other plan", "change"), tuple(rows))


def ratio_text(value: float) -> str:
    return f"{value:.2f}x"


def max_sent_bytes(candidate: Candidate) -> float:
    """Bytes that the busiest rank sends in a step, in the precision of the wire."""
    return float(traffic.step_traffic(candidate.problem, candidate.placed).sum(1).max())
