"""A plan as a page and as tables: who holds what and why, loads and memory of every rank, one step, what bounds it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from shardwright.planner import answer, dense, memory, roofline, steps, written
from shardwright.planner.answer import Answer
from shardwright.planner.balance import imbalance
from shardwright.report import frame, plots, torchrec
from shardwright.report.frame import Grid
from shardwright.report.plots import Figure
from shardwright.spec import files
from shardwright.spec.plan import Plan, TablePlan
from shardwright.spec.timeline import Timeline

SHOWN_ROWS = 40  # of tables, on a terminal
HELD = MappingProxyType(
    {
        "weights": ("dense weights",),
        "optimizer": ("dense optimizer",),
        "gradients": ("dense gradients", "gradients on their way"),
        "gathered": ("gathered weights",),
        "activations": ("activations", "the block at work"),
    }
)


def render(made: Answer, target: Path) -> Path:
    figures = tuple(drawn(made))
    problem = made.found.problem
    what = f"{len(problem.demands):,} tables at a batch of {problem.batch_size:,} on {problem.cluster.name}"
    text = frame.page(
        "cluster.html.j2",
        brand="Shardwright plan",
        curves_title="Ranks and steps",
        title=problem.cluster.name,
        notes=(f"{what}. All times are predicted.", *(f"{told[0].upper()}{told[1:]}." for told in facts(made.plan))),
        grids=(("Tables", tables(made)), *dense_part(made), ("What bounds the step", bounds(made))),
        curves=figures,
        figures=figures,
    )
    files.write_text(text, target)
    return target


def exported(made: Answer, target: Path) -> Path:
    files.write_text(torchrec.exported(made), target)
    return target


def read_other(made: Answer, path: Path) -> Answer:
    """Another plan of the same workload, priced where this one was."""
    other = files.read(Plan, path)
    other.verify(made.found.problem.workload)
    return Answer(other, written.priced(made.found.problem, other))


def facts(plan: Plan) -> Iterator[str]:
    """What is not about one table."""
    yield from (told for subject, told in plan.why if not subject.startswith("table "))


def tables(made: Answer) -> Grid:
    """The largest first."""
    found, reasons = made.found, dict(made.plan.why)
    rows: list[tuple[float, tuple[str, ...]]] = []
    for number, table in enumerate(made.plan.tables):
        demand = found.problem.demands[number]
        bytes_ = demand.table.rows * demand.row_bytes(demand.table.dim)
        cut = answer.cut_of(found, number)
        scheme = cut.name + (f" x {cut.columns}" if cut.columns > 1 else "")
        milliseconds = f"{1e3 * answer.table_seconds(found, number):.3g}"
        words = (table.table, scheme, ranks(table), tiers(table), reasons[f"table {table.table}"])
        rows.append((bytes_, (*words, memory.told(bytes_), milliseconds)))
    rows.sort(key=lambda row: -row[0])
    columns = ("table", "scheme", "ranks", "tiers", "why", "bytes", "ms of a rank")
    return Grid(columns, tuple(cells for _, cells in rows), words=5)


def dense_part(made: Answer, explain: bool = False) -> Iterator[tuple[str, Grid]]:
    """Asked for, or where DDP alone is not what was chosen."""
    best = dense.fastest(made.ways)
    if explain or (best is not None and best.way.techniques):
        yield "The dense part", ways(made)


def ranks(table: TablePlan) -> str:
    found = sorted({rank for rect in table.rects for rank in rect.ranks})
    if len(found) > 4 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return ", ".join(str(rank) for rank in found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")


def tiers(table: TablePlan) -> str:
    return ", ".join(
        tier if rows is None else f"{rows:,} rows of each in {tier}" for tier, rows in table.placement.tiers
    )


def ways(made: Answer) -> Grid:
    """Every way to hold the dense part, where tables lie as they were placed first: the smallest set of techniques
    first. Bytes are those of a rank's fastest tier, at the fullest moment of a step."""
    found = made.ways or dense.combinations(made.found.problem, made.found.placed, made.found.behind)
    best, rule = dense.fastest(found), dense.smallest(found)
    rows: list[tuple[str, ...]] = []
    for one in found:
        marks = [word for word, other in (("chosen", best), ("paper's rule", rule)) if one is other]
        fits = ", ".join(marks) if one.fits else f"{memory.told(-one.room)} too much" if one.room < 0 else "no room"
        sizes = (memory.told(bytes_) if bytes_ else "" for bytes_ in (*_grouped(one), one.bytes_, one.far_bytes))
        rows.append((one.way.name, fits, f"{1e3 * one.seconds:.4g}", *sizes))
    far = any(one.far_bytes for one in found)
    columns = ("dense part", "fits", "ms", *HELD, "all", *(["slower tier"] if far else []))
    return Grid(columns, tuple(row if far else row[:-1] for row in rows), words=2)


def _grouped(one: dense.Combination) -> Iterator[float]:
    parts = dict(one.parts)
    yield from (sum(parts[name] for name in names) for names in HELD.values())


def bounds(made: Answer) -> Grid:
    """Each resource at its full rate, and the step that is predicted."""
    step = made.found.seconds
    bound = roofline.bound(made.found.problem.cluster, answer.load(made.found))
    rows = [(name, f"{1e3 * seconds:.3g}", f"{100 * seconds / step:.0f} %") for name, seconds in bound.parts]
    rows.append(
        ("the slowest alone", f"{1e3 * bound.overlapped_seconds:.3g}", f"{100 * bound.overlapped_seconds / step:.0f} %")
    )
    rows.append(("predicted step", f"{1e3 * step:.3g}", "100 %"))
    return Grid(("resource", "ms", "of the step"), tuple(rows))


def drawn(made: Answer) -> Iterator[Figure]:
    found = made.found
    parts = [
        ("lookup", found.loads.lookup_R),
        ("update", found.loads.update_R),
        ("fetching rows", found.loads.prefetch_R),
    ]
    yield by_rank(
        "load",
        "Load of each rank",
        "Milliseconds of a step by rank, predicted.",
        [(name, 1e3 * seconds_R) for name, seconds_R in parts if seconds_R.any()],
        "ms",
    )
    held = [("tables and their optimizer", found.loads.bytes_R)]
    held += [(name, np.full(len(found.loads.bytes_R), bytes_)) for name, bytes_ in memory.budget(found.problem).parts]
    yield by_rank(
        "memory",
        "Memory of each rank",
        "Gigabytes by rank, over all tiers.",
        [(name, 1e-9 * bytes_R) for name, bytes_R in held if np.asarray(bytes_R).any()],
        "GB",
    )
    yield roof(made)
    timeline = steps.timeline(found.problem, found.placed, found.loads, found.behind)
    last = steps.WARM_STEPS + steps.COUNTED_STEPS
    figure = plots.gantt(Timeline(timeline.source, tuple(one for one in timeline.events if one.step < last)))
    yield Figure(figure.name, "Steps, as predicted", figure.caption, figure.height, figure.data, figure.layout)


def roof(made: Answer) -> Figure:
    """What each resource alone would take, under the step."""
    parts = roofline.bound(made.found.problem.cluster, answer.load(made.found)).parts
    names = [name for name, _ in parts] + ["predicted step"]
    bar = {
        "type": "bar",
        "orientation": "h",
        "name": "ms",
        "y": names,
        "x": [1e3 * seconds for _, seconds in parts] + [1e3 * made.found.seconds],
        "marker": {"color": ["var(--hue0)"] * len(parts) + ["var(--hue1)"]},
        "hovertemplate": "%{y}: %{x:.4~r} ms<extra></extra>",
        "showlegend": False,
    }
    layout = plots.frame(
        xaxis=plots.axis(title={"text": "ms"}, rangemode="tozero"),
        yaxis=plots.axis(autorange="reversed", automargin=True),
        bargap=0.3,
    )
    caption = "Milliseconds of each resource at its full rate, on the rank that needs most of it: no step is shorter."
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
    return Figure(name, title, caption, 320, tuple(data), layout)


def compared(made: Answer, other: Answer) -> Grid:
    """This plan against another of the same workload, priced on the same cluster."""
    rows: list[tuple[str, ...]] = []

    def row(name: str, mine: float, theirs: float, unit: str = "") -> None:
        more = f"{100 * (mine / theirs - 1):+.1f} %" if theirs else ""
        rows.append((name, f"{mine:.4g}{unit}", f"{theirs:.4g}{unit}", more))

    row("step", 1e3 * made.found.seconds, 1e3 * other.found.seconds, " ms")
    for name in ("lookup_R", "update_R", "prefetch_R", "bytes_R", "sent_R"):
        mine, theirs = getattr(made.found.loads, name), getattr(other.found.loads, name)
        if mine.any() or theirs.any():
            scale, unit = (1e-6, " MB") if name in ("bytes_R", "sent_R") else (1e3, " ms")
            said = name.removesuffix("_R")
            row(f"{said}, fullest rank", scale * mine.max(), scale * theirs.max(), unit)
            if mine.any() and theirs.any():
                row(f"{said}, fullest over mean", imbalance(mine), imbalance(theirs))
    mine_, theirs_ = answer.stage_seconds(made.found), answer.stage_seconds(other.found)
    for name in mine_:
        if name in theirs_ and abs(mine_[name] - theirs_[name]) > 1e-3 * max(mine_[name], theirs_[name]):
            row(f"stage {name}", 1e3 * mine_[name], 1e3 * theirs_[name], " ms")
    return Grid(("", "this plan", "the other", "more"), tuple(rows))
