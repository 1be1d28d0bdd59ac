"""How much of a step ranks wait for communication, and for rows from slower memory: measured and predicted.

Measured: the thread's waits for work in flight on lanes of collectives, for rows of table servers, and for rows that
are copied from slower memory. Predicted: the time in which collectives run and the rank's thread does nothing.
"""

from dataclasses import dataclass, replace

from shardwright.planner.step.exposed import SLOW_MEMORY_STAGE, exposed_seconds
from shardwright.report import step_times
from shardwright.report.html_template import Grid
from shardwright.report.run_record import RunRecord
from shardwright.report.step_times import FLIGHT, WAIT
from shardwright.report.units import time_text
from shardwright.spec.lanes import HOST, MAIN, READ
from shardwright.spec.plan import Bounded, Plan
from shardwright.spec.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ExposedWaits:
    """Seconds of a step in which a rank waits: for messages, and for rows from slower memory; means over ranks."""

    step: float
    messages: float
    rows: float

    @property
    def message_share(self) -> float:
        return self.messages / self.step


@dataclass(frozen=True, slots=True)
class CommunicationSection:
    text: str
    shares: Grid


def describe_communication(run: RunRecord) -> CommunicationSection | None:
    """None without a trace of a run with several ranks, servers or caches."""
    plan, timeline = run.plan, run.timeline
    if plan is None or timeline is None:
        return None
    measured = measured_waits(timeline)
    predicted = predicted_waits(run.predicted_timeline) if run.predicted_timeline is not None else None
    has_caches = any(stage.name == SLOW_MEMORY_STAGE for stage in plan.stages)
    has_messages = plan.num_ranks > 1 or bool(plan.servers)
    if not has_messages and not has_caches:
        return None
    measured = measured if has_messages else replace(measured, messages=0.0)  # the wait is for threads of this process
    text = "What other work hides does not count as a wait."
    if has_messages:
        text += f" Waits for messages, and for slower ranks, are {measured.message_share:.1%} of a step"
        text += f"; the plan predicted {predicted.message_share:.1%}." if predicted is not None else "."
    if has_caches:
        text += f" Waits for rows of slower memory are {measured.rows / measured.step:.1%} of a step."
    rows = [_row(f"measured, {_describe_reads(plan)}", measured)]
    rows += [_row(f"predicted, {_describe_reads(plan)}", predicted)] if predicted is not None else []
    columns = ("", "step", "waits for messages", "% of the step", "waits for rows of slower memory", "% of the step")
    return CommunicationSection(text, Grid(columns, tuple(rows)))


def measured_waits(timeline: Timeline) -> ExposedWaits:
    """Of the traced ranks, over complete steps. What the thread waits for inside a stage of its own lane, such as a
    backward pass, is a collective that the stage has issued."""
    flights = {event.name: event.lane for event in timeline.events if event.kind == FLIGHT}
    steps = step_times.complete_steps(timeline)
    begin, end = step_times.time_window(timeline, steps)
    num = len(steps) * len({event.rank for event in timeline.events})
    waits = [event for event in timeline.events if event.kind == WAIT and event.start >= begin and event.end <= end]
    messages = sum(
        event.end - event.start
        for event in waits
        if event.name != SLOW_MEMORY_STAGE and flights.get(event.name, MAIN) not in (HOST, READ)
    )
    rows = sum(event.end - event.start for event in waits if event.name == SLOW_MEMORY_STAGE)
    return ExposedWaits(step_times.mean_step_seconds(timeline), messages / num, rows / num)


def predicted_waits(timeline: Timeline) -> ExposedWaits:
    steps = step_times.complete_steps(timeline)
    begin, end = step_times.time_window(timeline, steps)
    messages, rows = exposed_seconds(timeline.events, begin, end)
    num = len({event.rank for event in timeline.events}) * len(steps)
    return ExposedWaits(step_times.mean_step_seconds(timeline), messages / num, rows / num)


def _describe_reads(plan: Plan) -> str:
    """How ranks read rows."""
    has_copies = any(
        isinstance(table.placement.sync, Bounded) and table.placement.sync.has_copies for table in plan.tables
    )
    has_caches = any(stage.name == SLOW_MEMORY_STAGE for stage in plan.stages)
    parts = ["rows from copies" if has_copies else "exact", *(["rows from caches"] if has_caches else [])]
    return ", ".join(parts)


def _row(name: str, waits: ExposedWaits) -> tuple[str, ...]:
    seconds = waits.messages, waits.rows
    return (
        name,
        time_text(waits.step),
        *(cell for own in seconds for cell in (time_text(own), f"{100 * own / waits.step:.1f}")),
    )
