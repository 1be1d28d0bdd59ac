"""The part of a run's page about the messages of a step: bytes by kind and link, measured and predicted, and the steps
that the planner has compared if staleness was allowed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner.memory.budget import bytes_text
from shardwright.report.html_template import Grid
from shardwright.report.run_record import RunRecord
from shardwright.report.staleness_frontier import STEP_COLUMNS, exact_step, step_cells, step_name
from shardwright.spec.traffic import BETWEEN_HOSTS, KINDS, LINKS, PredictedStep, TrafficWindow

Part = tuple[str, str]  # kind and link


@dataclass(frozen=True, slots=True)
class TrafficSection:
    """`steps`: of exact training and of stale copies, described by `note`; None if the planner has not compared any."""

    text: str
    kinds: Grid
    note: str = ""
    steps: Grid | None = None


def describe_traffic(run: RunRecord) -> TrafficSection | None:
    """None for a run that has recorded no messages, and whose plan predicts none."""
    measured, predicted = mean_bytes(run.traffic), run.predicted_steps
    if not measured and not any(step.traffic for step in predicted):
        return None
    text = "Bytes of all ranks and of their table servers in a training step, without those of TCP and IP."
    if measured:
        total, between = (
            sum(measured.values()),
            sum(size for (_, link), size in measured.items() if link == BETWEEN_HOSTS),
        )
        text += f" Measured: {bytes_text(total)}{f', of it {bytes_text(between)} between hosts' if between else ''}"
        text += ", over the second half of the recorded windows."
    if len(predicted) < 2:
        return TrafficSection(text, _kinds_grid(measured, predicted))
    exact = exact_step(predicted)
    rows = tuple((step_name(step), f"{step.max_missed:,}", *step_cells(step, exact)) for step in predicted)
    note = (
        "The steps that the planner has compared, as predicted, by pull and push of copies of rows. Without the "
        "training loop's own work (reading, metrics). Waits are for messages."
    )
    return TrafficSection(text, _kinds_grid(measured, predicted), note, Grid(STEP_COLUMNS, rows))


def mean_bytes(windows: Sequence[TrafficWindow]) -> dict[Part, float]:
    """Bytes of a step, over the second half of the windows."""
    ends = sorted({window.step for window in windows})
    late = [window for window in windows if window.step in ends[len(ends) // 2 :]]
    steps, totals = sum({window.step: window.steps for window in late}.values()), Counter[Part]()
    for window in late:
        totals[window.kind, window.link] += window.bytes_
    return {part: bytes_ / max(1, steps) for part, bytes_ in totals.items()}


def _kinds_grid(measured: dict[Part, float], steps: Sequence[PredictedStep]) -> Grid:
    predicted = [{(part.kind, part.link): float(part.bytes_) for part in step.traffic} for step in steps]
    columns = [*([("measured", measured)] if measured else [])]
    for step, sizes in zip(steps, predicted, strict=True):
        name = f"predicted, {step_name(step)}" if len(steps) > 1 else "predicted"
        columns += [(name, sizes)] if sizes else []
    parts = [(kind, link) for kind in KINDS for link in LINKS if any((kind, link) in sizes for _, sizes in columns)]
    rows = tuple((*part, *(_cell(sizes.get(part, 0.0)) for _, sizes in columns)) for part in parts)
    total = "total", "", *(_cell(sum(sizes.values())) for _, sizes in columns)
    return Grid(("messages", "link", *(name for name, _ in columns)), rows, num_text_columns=2, total=total)


def _cell(bytes_: float) -> str:
    return bytes_text(bytes_) if bytes_ else ""
