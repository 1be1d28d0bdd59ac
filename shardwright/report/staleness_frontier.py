"""The part of a plan's page about staleness: the predicted step, exact and with bounds of copies of rows, beside the
change of AUC that was measured on another model."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner import frontier
from shardwright.planner.frontier import EXACT
from shardwright.planner.memory.budget import bytes_text
from shardwright.planner.plan import PlanningResult
from shardwright.report.html_template import Grid
from shardwright.report.plots import Figure, axis, figure_layout, trace
from shardwright.report.staleness_quality import MeasuredQuality, read_quality
from shardwright.report.units import axis_time_unit, time_text
from shardwright.spec.plan import Bounded
from shardwright.spec.traffic import PredictedStep

TITLE = "Staleness"
STEP_COLUMNS = ("pull, push", "updates missed at most", "step", "speed", "waits, %", "bytes of a step")
NOT_WORTH_IT = "Copies of rows that may miss updates (staleness) would not make the predicted step shorter."


@dataclass(frozen=True, slots=True)
class FrontierSection:
    """`notes`: what the columns mean, or that no bound makes the step shorter; empty: no table may have copies."""

    notes: tuple[str, ...] = ()
    grids: tuple[tuple[str, Grid], ...] = ()
    figures: tuple[Figure, ...] = ()


def describe_frontier(result: PlanningResult) -> FrontierSection:
    options = result.staleness
    if options is None:
        return FrontierSection()
    points = frontier.frontier(options, result.candidate)
    if not any(point.has_copies for point in points):
        return FrontierSection((NOT_WORTH_IT,))
    steps = [frontier.predict_step(point, result.candidate) for point in points]
    used = [point.has_copies or point.sync == EXACT for point in points]
    quality, exact = read_quality(), exact_step(steps)
    rows = tuple(
        (
            step_name(step, has_copies=own),
            f"{step.max_missed:,}",
            *step_cells(step, exact),
            _change(step, quality),
        )
        for step, own in zip(steps, used, strict=True)
    )
    owners = "table servers" if result.candidate.problem.served_tables else "other ranks"
    note = (
        f"Staleness: the predicted step if ranks may read rows of {owners} from copies that miss updates, by pull and "
        'push (equal: HET\'s s); allow=["staleness<=N"] permits N updates. Waits are for messages, bytes those of all '
        f"ranks. {quality.origin}."
    )
    return FrontierSection(
        (note,), ((TITLE, Grid((*STEP_COLUMNS, "AUC elsewhere"), rows)),), (_figure(steps, quality),)
    )


def exact_step(steps: Sequence[PredictedStep]) -> PredictedStep:
    return next(step for step in steps if not step.max_missed)


def step_name(step: PredictedStep, *, has_copies: bool = True) -> str:
    bound = f"{step.pull:,}, {step.push:,}" if step.max_missed else "exact"
    return f"{bound}{'' if has_copies else ' (no copies)'}{' (chosen)' if step.is_chosen else ''}"


def step_cells(step: PredictedStep, exact: PredictedStep) -> tuple[str, ...]:
    """Its time, speed, waits and bytes."""
    sent = sum(part.bytes_ for part in step.traffic)
    return (
        time_text(step.seconds),
        f"{exact.seconds / step.seconds:.2f}",
        f"{100 * step.waits / step.seconds:.1f}",
        bytes_text(sent) if step.traffic else "",
    )


def _change(step: PredictedStep, quality: MeasuredQuality) -> str:
    return quality.change(Bounded(step.pull, step.push)) if step.max_missed else ""


def _figure(steps: Sequence[PredictedStep], quality: MeasuredQuality) -> Figure:
    unit, length = axis_time_unit([step.seconds for step in steps])
    names = [step_name(step) for step in steps]
    labels = [f"AUC {change}" if (change := _change(step, quality)) else "" for step in steps]
    step_line = trace("step", (), [step.seconds / length for step in steps], color="var(--hue0)", markers=True)
    wait_line = trace(
        "waits for messages", (), [step.waits / length for step in steps], color="var(--hue1)", dash="dash"
    )
    step_line |= {"x": names, "text": labels, "textposition": "top center", "mode": "lines+markers+text"}
    step_line |= {"cliponaxis": False, "hovertemplate": f"%{{x}}: %{{y:.4~r}} {unit}<extra>step</extra>"}
    wait_line |= {"x": names, "mode": "lines+markers"}
    wait_line |= {"hovertemplate": f"%{{x}}: %{{y:.4~r}} {unit}<extra>waits for messages</extra>"}
    top = 1.15 * max(step.seconds for step in steps) / length
    layout = figure_layout(
        xaxis=axis(title={"text": "pull, push"}, type="category"),
        yaxis=axis(title={"text": f"{unit} a step, predicted"}, range=[0, top]),
        showlegend=True,
    )
    caption = (
        "Predicted step by how stale copies of rows may be. Labels: the change of AUC in points that was measured on "
        "another model, not a prediction for yours."
    )
    return Figure("staleness", "What staleness would buy", caption, 320, (step_line, wait_line), layout)
