"""Checks of a plan's stages: names, lanes, and data hazards (reads or writes out of order).

In each tick the stages run in list order; a stage with lead L works on the batch that is L ahead, so a batch runs the
stages with the largest lead first. A per-batch slot has one writer and lives until its last reader. A "state." slot is
shared by all batches, so a lead changes which version is read. "state.X.idle" is the part of "state.X" that no batch
in flight uses: a stage may access it ahead of others if a slot that it writes holds what the batch uses, and if every
stage that accesses "state.X" reads this slot.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from shardwright.errors import did_you_mean
from shardwright.spec.checks import check_unique

if TYPE_CHECKING:
    from shardwright.spec.plan import Contract, Plan, Stage
    from shardwright.spec.workload import Workload

Check = Callable[["Plan", "Workload | None", "Mapping[str, Contract] | None"], Iterator[str]]


ORDERING_SLOT = "state.wire"  # has no value: stages that read it only wait for its writer
IDLE = ".idle"  # after the name of a state


def is_persistent(slot: str) -> bool:
    return slot.startswith("state.")


def max_staleness(allow: tuple[str, ...]) -> float:
    """The largest N of the entries "staleness<=N", 0 without one: updates of a row that a read may miss, or steps of
    lead across a write."""
    matches = (re.fullmatch(r"staleness<=(\d+|inf)", entry) for entry in allow)
    return max((float(match[1]) for match in matches if match), default=0)


def sort_by_lead(stages: "Iterable[Stage]") -> "tuple[Stage, ...]":
    """The order in which one batch runs through the stages, as if nothing overlapped."""
    return tuple(sorted(stages, key=lambda stage: -stage.lead))


def _flatten_bodies(stages: "tuple[Stage, ...]") -> "Iterator[Stage]":
    for stage in stages:
        yield stage
        yield from _flatten_bodies(stage.body)


def _writer_by_slot(plan: "Plan") -> "dict[str, Stage]":
    return {slot: stage for stage in plan.stages for slot in stage.writes}


def duplicate_names(plan: "Plan", *_: object) -> Iterator[str]:
    yield from check_unique("stage", (stage.name for stage in plan.stages))
    yield from check_unique("lane", plan.lanes)


def unknown_lane(plan: "Plan", *_: object) -> Iterator[str]:
    for stage in _flatten_bodies(plan.stages):
        if stage.lane not in plan.lanes:
            yield f'stage "{stage.name}" runs on unknown lane "{stage.lane}"{did_you_mean(stage.lane, plan.lanes)}'


def negative_lead(plan: "Plan", *_: object) -> Iterator[str]:
    for stage in _flatten_bodies(plan.stages):
        if stage.lead < 0:
            yield f'stage "{stage.name}" has lead {stage.lead}; wanted 0 or more'


def read_before_write(plan: "Plan", *_: object) -> Iterator[str]:
    written_slots: set[str] = set()
    writers = _writer_by_slot(plan)
    for stage in sort_by_lead(plan.stages):
        for slot in stage.reads:
            is_late = slot in writers and writers[slot].lead < stage.lead  # reported by reader_ahead_of_writer
            if not is_persistent(slot) and slot not in written_slots and not is_late:
                yield f'stage "{stage.name}" reads slot "{slot}" before any stage has written it'
        written_slots.update(stage.writes)


def two_writers(plan: "Plan", *_: object) -> Iterator[str]:
    first: dict[str, str] = {}
    for stage in sort_by_lead(plan.stages):
        for slot in stage.writes:
            if slot in first and not is_persistent(slot):
                yield f'stage "{stage.name}" writes slot "{slot}", which stage "{first[slot]}" has already written'
            first.setdefault(slot, stage.name)


def unread_slot(plan: "Plan", *_: object) -> Iterator[str]:
    read = set(chain.from_iterable(stage.reads for stage in plan.stages))
    for stage in plan.stages:
        for slot in stage.writes:
            if not is_persistent(slot) and slot not in read:
                yield f'stage "{stage.name}" writes slot "{slot}" that no stage reads'


def reader_ahead_of_writer(plan: "Plan", *_: object) -> Iterator[str]:
    writers = _writer_by_slot(plan)
    for stage in plan.stages:
        for slot in stage.reads:
            writer = writers.get(slot, stage)
            if not is_persistent(slot) and stage.lead > writer.lead:
                yield (
                    f'stage "{stage.name}" with lead {stage.lead} reads slot "{slot}", which does not exist '
                    f'yet: stage "{writer.name}" writes it with lead {writer.lead}'
                )


def stale_read(plan: "Plan", *_: object) -> Iterator[str]:
    allowed = max_staleness(plan.allow)
    for reader, writer in _pairs_by_lead(plan):
        staleness = _staleness(plan, reader, writer)
        for slot in _shared_persistent_slots(reader.reads, writer.writes):
            if staleness > allowed and slot != ORDERING_SLOT:  # which has no value
                yield (
                    f'stage "{reader.name}" with lead {reader.lead} reads slot "{slot}" before stage '
                    f'"{writer.name}" with lead {writer.lead} has written it: lower the lead, or '
                    f'allow "staleness<={staleness}"'
                )


def early_write(plan: "Plan", *_: object) -> Iterator[str]:
    for writer, later in _pairs_by_lead(plan):
        if _staleness(plan, writer, later) <= 0:
            continue
        for slot in _shared_persistent_slots(writer.writes, later.reads + later.writes):
            yield (
                f'stage "{writer.name}" with lead {writer.lead} writes slot "{slot}" while stage '
                f'"{later.name}" with lead {later.lead} still needs its value of an earlier batch: use one lead'
            )


def _pairs_by_lead(plan: "Plan") -> "Iterator[tuple[Stage, Stage]]":
    """Every pair of stages in which the first has the larger lead."""
    return ((ahead, later) for ahead in plan.stages for later in plan.stages if ahead.lead > later.lead)


def _staleness(plan: "Plan", ahead: "Stage", later: "Stage") -> int:
    """How many batches `ahead` runs before `later`: the difference of leads, less 1 if it is listed after `later`."""
    return ahead.lead - later.lead - (plan.stages.index(ahead) > plan.stages.index(later))


def _shared_persistent_slots(slots: tuple[str, ...], others: tuple[str, ...]) -> list[str]:
    return sorted(slot for slot in set(slots) & set(others) if is_persistent(slot))


def unheld_state(plan: "Plan", *_: object) -> Iterator[str]:
    """A stage moves idle parts of a state while another stage uses a part that it does not hold."""
    for mover in plan.stages:
        for state in sorted({slot.removesuffix(IDLE) for slot in mover.reads + mover.writes if slot.endswith(IDLE)}):
            held = {slot for slot in mover.writes if not is_persistent(slot)}
            for stage in plan.stages:
                if state in stage.reads + stage.writes and not held & {*stage.reads, *stage.writes}:
                    slots = " or ".join(f'"{slot}"' for slot in sorted(held))
                    yield (
                        f'stage "{mover.name}" moves what no batch in flight uses of "{state}", which stage '
                        f'"{stage.name}" uses without reading {slots or "a slot that holds its part"}'
                    )


def misplaced_step_stage(plan: "Plan", *_: object) -> Iterator[str]:
    """Stages that run once a step run after the step's last micro-batch, except under the schedule of a pipeline."""
    if plan.pipeline is not None:
        return
    writers = _writer_by_slot(plan)
    for stage in plan.stages:
        if stage.per == "step" and stage.lead:
            yield f'stage "{stage.name}" runs once a step, with lead {stage.lead}; leads are for micro-batches'
        for slot in stage.reads if stage.per == "micro" else ():
            writer = writers.get(slot, stage)
            if writer.per == "step" and not is_persistent(slot):
                yield (
                    f'stage "{stage.name}" runs for each micro-batch and reads slot "{slot}", which stage '
                    f'"{writer.name}" writes once a step'
                )


def invalid_pipeline(plan: "Plan", *_: object) -> Iterator[str]:
    if plan.pipeline is None:
        return
    num, blocks = plan.num_pipeline_ranks, plan.pipeline.blocks
    if num < 2:
        yield f"a pipeline over {num} rank; give the plan an axis of role pipe with 2 or more ranks"
    elif len(blocks) % num or not blocks:
        yield f"a pipeline of {len(blocks)} chunks over {num} ranks; each rank needs the same number of chunks"
    if min(blocks, default=1) < 1:
        yield f"a pipeline with chunks of {list(blocks)} blocks; each needs one or more: use fewer ranks or chunks"
    if plan.pipeline.micro_batches < 1:
        yield f"a pipeline with {plan.pipeline.micro_batches} micro-batches; wanted 1 or more"
    if plan.pipeline.schedule == "1f1b" and len(blocks) > num:
        yield f'schedule "1f1b" with {len(blocks)} chunks over {num} ranks; use "interleaved" for several chunks a rank'


def broken_contract(plan: "Plan", _: object, contracts: "Mapping[str, Contract] | None") -> Iterator[str]:
    if contracts is None:
        return
    for stage in plan.stages:
        contract = contracts.get(stage.name)
        if contract is None:
            yield f'stage "{stage.name}" has no function{did_you_mean(stage.name, contracts)}'
            continue
        for slot in sorted(set(contract.reads) - set(stage.reads)):
            yield f'stage "{stage.name}" lacks the edge from slot "{slot}": its function reads it'
        for slot in sorted(set(contract.writes) - set(stage.writes)):
            yield f'stage "{stage.name}" lacks the edge to slot "{slot}": its function writes it'
        for slot in sorted(set(stage.reads) - {*contract.reads, ORDERING_SLOT}):
            yield f'stage "{stage.name}" has an edge from slot "{slot}" that its function never reads'
        for slot in sorted(set(stage.writes) - {*contract.writes, ORDERING_SLOT}):
            yield f'stage "{stage.name}" has an edge to slot "{slot}" that its function never writes'


CHECKS: tuple[Check, ...] = (
    duplicate_names,
    unknown_lane,
    negative_lead,
    read_before_write,
    two_writers,
    unread_slot,
    reader_ahead_of_writer,
    stale_read,
    early_write,
    unheld_state,
    misplaced_step_stage,
    invalid_pipeline,
    broken_contract,
)
