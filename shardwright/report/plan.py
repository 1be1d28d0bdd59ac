"""A plan as a page and as tables: each table's layout and why, load and memory of every rank, the step, its bounds."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from shardwright.planner import dense_strategies, plan, reprice
from shardwright.planner.memory import budget
from shardwright.planner.plan import Answer
from shardwright.planner.price import roofline
from shardwright.planner.search import Found
from shardwright.planner.step import critical_path, tasks, traffic
from shardwright.planner.tables.balance import imbalance
from shardwright.report import html_template, plots, torchrec_export
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure
from shardwright.report.units import axis_bytes, axis_unit, time_text
from shardwright.spec import files
from shardwright.spec.plan import Plan, TablePlan
from shardwright.spec.timeline import Timeline

SHOWN_ROWS = 40  # of tables, on a terminal
LOWER_BOUNDS = MappingProxyType(
    {"memory": critical_path.MEMORY, "products": critical_path.PRODUCTS, "host copy": critical_path.COPIES}
)
HELD = MappingProxyType(
    {
        "weights": ("dense weights",),
        "optimizer": ("dense optimizer",),
        "gradients": ("dense gradients", "gradients in flight"),
        "gathered": ("gathered weights",),
        "activations": ("activations", "current block"),
    }
)


def render(made: Answer, path: Path, torchrec_answer: Answer | None = None) -> Path:
    figures = tuple(drawn(made))
    problem = made.found.problem
    what = f"{len(problem.demands):,} tables at a batch of {problem.batch_size:,} on {problem.cluster.name}"
    text = html_template.page(
        "cluster.html.j2",
        brand="Shardwright plan",
        curves_title="Load, memory and schedule",
        title=problem.cluster.name,
        notes=(f"{what}. All times are predicted.", *map(sentence, facts(made, torchrec_answer))),
        grids=(("Tables", tables(made)), *dense_part(made), ("What bounds the step", bounds(made))),
        curves=figures,
        figures=figures,
    )
    files.write_text(text, path)
    return path


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def exported(torchrec_answer: Answer, path: Path, made: Answer | None = None) -> Path:
    """Write the TorchRec plan as a Python module, with its loss against our plan, if given."""
    lost = torchrec_export.loss(made, torchrec_answer) if made else ""
    files.write_text(torchrec_export.exported(torchrec_answer, lost), path)
    return path


def read_other(made: Answer, path: Path) -> Answer:
    """Another plan of the same workload, priced where this one was."""
    other = files.read(Plan, path)
    other.verify(made.found.problem.workload)
    return Answer(other, reprice.priced(made.found.problem, other))


def facts(made: Answer, torchrec_answer: Answer | None = None) -> Iterator[str]:
    """The reasons that concern the whole step; and the loss within TorchRec's limits, if planned."""
    yield from (reason for subject, reason in made.plan.why if not subject.startswith("table "))
    if torchrec_answer:
        yield torchrec_export.loss(made, torchrec_answer)


def tables(made: Answer) -> Grid:
    """The largest first."""
    found, reasons = made.found, dict(made.plan.why)
    rows: list[tuple[float, tuple[str, ...]]] = []
    for number, table in enumerate(made.plan.tables):
        demand = found.problem.demands[number]
        bytes_ = demand.table.rows * demand.row_bytes(demand.table.dim)
        cut = found.cut(number)
        scheme = cut.name + (f" x {cut.columns}" if cut.columns > 1 else "")
        seconds = time_text(plan.table_seconds(found, number))
        words = (table.table, scheme, ranks(table), tiers(table), reasons[f"table {table.table}"])
        rows.append((bytes_, (*words, budget.told(bytes_), seconds)))
    rows.sort(key=lambda row: -row[0])
    columns = ("table", "scheme", "ranks", "tiers", "why", "bytes", "lookup and update")
    return Grid(columns, tuple(cells for _, cells in rows), words=5)


def dense_part(made: Answer, explain: bool = False) -> Iterator[tuple[str, Grid]]:
    """Asked for, or where DDP alone is not what was chosen."""
    best = dense_strategies.fastest(made.ways)
    if explain or (best is not None and best.way.techniques):
        yield "The dense part", ways(made)


def ranks(table: TablePlan) -> str:
    found = sorted({rank for rect in table.rects for rank in rect.ranks})
    if len(found) > 4 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return ", ".join(str(rank) for rank in found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")


def tiers(table: TablePlan) -> str:
    return ", ".join(
        tier if rows is None else f"{rows:,} rows of each rank in {tier}" for tier, rows in table.placement.tiers
    )


def ways(made: Answer) -> Grid:
    """Every way to hold the dense part, where tables lie as they were placed first: the smallest set of techniques
    first. Bytes are those of a rank's fastest tier, at the fullest moment of a step."""
    found = made.ways or dense_strategies.combinations(made.found.problem, made.found.placed, made.found.behind)
    best, rule = dense_strategies.fastest(found), dense_strategies.smallest(found)
    rows: list[tuple[str, ...]] = []
    for one in found:
        marks = [word for word, other in (("chosen", best), ("paper's rule", rule)) if one is other]
        fits = ", ".join(marks) if one.fits else f"{budget.told(-one.room)} too much" if one.room < 0 else "no room"
        sizes = (budget.told(bytes_) if bytes_ else "" for bytes_ in (*_grouped(one), one.bytes_, one.far_bytes))
        rows.append((one.way.name, fits, time_text(one.seconds), *sizes))
    far = any(one.far_bytes for one in found)
    columns = ("dense part", "fits", "step", *HELD, "total", *(["slower tier"] if far else []))
    return Grid(columns, tuple(row if far else row[:-1] for row in rows), words=2)


def _grouped(one: dense_strategies.Combination) -> Iterator[float]:
    parts = dict(one.parts)
    yield from (sum(parts[name] for name in names) for names in HELD.values())


def bounds(made: Answer) -> Grid:
    """What the step's critical path spends on each resource, which adds up to the step; and as a lower bound what the
    resource alone, at its full rate, would take."""
    step, alone = made.found.seconds, alone_seconds(made)
    rows = [
        (name, time_text(seconds), f"{100 * seconds / step:.1f} %", time_text(alone[name]) if name in alone else "")
        for name, seconds in critical_path.step_parts(made.found).items()
        if seconds or alone.get(name)
    ]
    total = ("predicted step", time_text(step), "100 %", time_text(max(alone.values())))
    return Grid(("resource", "on the critical path", "of the step", "lower bound, alone"), tuple(rows), total=total)


def alone_seconds(made: Answer) -> dict[str, float]:
    """What each resource would take if it were the only limit; for links, the slowest level."""
    found: dict[str, float] = {}
    for name, seconds in roofline.bound(made.found.problem.cluster, plan.load(made.found)).parts:
        part = LOWER_BOUNDS.get(name, critical_path.LINKS)
        found[part] = max(found.get(part, 0.0), seconds)
    return found | {critical_path.LATENCY: critical_path.latency_seconds(made.found)}


def drawn(made: Answer) -> Iterator[Figure]:
    found = made.found
    parts = [
        ("lookup", found.loads.lookup_R),
        ("update", found.loads.update_R),
        ("fetching rows from slower tiers", found.loads.prefetch_R),
    ]
    unit, length = axis_unit([float(np.sum([seconds_R for _, seconds_R in parts], 0).max())])
    yield by_rank(
        "load",
        "Load of each rank",
        "Predicted time of reading and updating rows in a step, by rank.",
        [(name, seconds_R / length) for name, seconds_R in parts if seconds_R.any()],
        unit,
    )
    held = [("tables and optimizer state", found.loads.bytes_R)]
    held += [(name, np.full(len(found.loads.bytes_R), bytes_)) for name, bytes_ in budget.budget(found.problem).parts]
    unit, size = axis_bytes([float(np.sum([bytes_R for _, bytes_R in held], 0).max())])
    yield by_rank(
        "memory",
        "Memory of each rank",
        "Memory by rank, all tiers together.",
        [(name, bytes_R / size) for name, bytes_R in held if np.asarray(bytes_R).any()],
        unit,
    )
    yield roof(made)
    timeline = tasks.timeline(found.problem, found.placed, found.loads, found.behind)
    last = tasks.WARM_STEPS + tasks.COUNTED_STEPS
    figure = plots.gantt(Timeline(timeline.source, tuple(one for one in timeline.events if one.step < last)))
    yield Figure(figure.name, "Predicted steps", figure.caption, figure.height, figure.data, figure.layout)


def roof(made: Answer) -> Figure:
    """A bar for what each resource alone would take, above that of the step."""
    cluster, latency = made.found.problem.cluster, critical_path.latency_seconds(made.found)
    parts = [*roofline.bound(cluster, plan.load(made.found)).parts, (critical_path.LATENCY, latency)]
    names = [name for name, _ in parts] + ["predicted step"]
    unit, length = axis_unit([made.found.seconds])
    bar = {
        "type": "bar",
        "orientation": "h",
        "name": unit,
        "y": names,
        "x": [seconds / length for _, seconds in parts] + [made.found.seconds / length],
        "text": [time_text(seconds) for _, seconds in parts] + [time_text(made.found.seconds)],
        "textposition": "auto",
        "insidetextfont": {"color": "var(--on-hue)"},
        "outsidetextfont": {"color": "var(--ink)"},
        "marker": {"color": ["var(--hue0)"] * len(parts) + ["var(--hue1)"]},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "showlegend": False,
    }
    layout = plots.frame(
        xaxis=plots.axis(title={"text": unit}, rangemode="tozero"),
        yaxis=plots.axis(autorange="reversed", automargin=True),
        bargap=0.3,
    )
    caption = "Lower bounds: a step limited only by this resource, at its full rate, on the rank that uses it most."
    return Figure("roofline", "Each resource alone", caption, 80 + 36 * len(names), (bar,), layout)


def by_rank(name: str, title: str, caption: str, parts: Sequence[tuple[str, np.ndarray]], unit: str) -> Figure:
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": part,
            "x": list(range(len(values))),
            "y": [float(value) for value in values],
            "marker": {"color": f"var(--hue{number % plots.HUES})"},
            "hovertemplate": f"rank %{{x}}: %{{y:.4~r}} {unit}<extra>{part}</extra>",
        }
        for number, (part, values) in enumerate(parts)
    ]
    layout = plots.frame(
        xaxis=plots.axis(title={"text": "rank"}),
        yaxis=plots.axis(title={"text": unit}, rangemode="tozero"),
        barmode="stack",
        bargap=0.15,
        showlegend=True,
    )
    return Figure(name, title, caption, 320 if len(parts) <= 4 else 420, tuple(data), layout)  # a legend of many rows


def compared(made: Answer, other: Answer) -> Grid:
    """This plan against another of the same workload, priced on the same cluster."""
    rows: list[tuple[str, ...]] = []

    def row(name: str, values: Sequence[float], form: Callable[[float], str]) -> None:
        mine, theirs = values
        if mine or theirs:
            change = f"{100 * (mine / theirs - 1):+.1f} %" if theirs else ""
            rows.append((name, form(mine), form(theirs), change))

    pair = made.found, other.found
    row("step", [found.seconds for found in pair], time_text)
    row("imbalance of lookup (slowest rank over average)", [imbalance(found.loads.lookup_R) for found in pair], ratio)
    row("imbalance of update", [imbalance(found.loads.update_R) for found in pair], ratio)
    row("memory of tables, fullest rank", [float(found.loads.bytes_R.max()) for found in pair], budget.told)
    row("sent, busiest rank", [sent_bytes(found) for found in pair], budget.told)
    stages = [plan.stage_seconds(found) for found in pair]
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


def ratio(value: float) -> str:
    return f"{value:.2f}x"


def sent_bytes(found: Found) -> float:
    """Bytes that the busiest rank sends in a step, in the precision of the wire."""
    return float(traffic.traffic(found.problem, found.placed).sum(1).max())
