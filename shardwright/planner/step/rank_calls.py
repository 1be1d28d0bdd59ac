"""What each rank does in the simulated steps: its calls, what each costs, and which calls wait for which.

Ranks with the same calls and the same tasks share one `RankCalls`. In a pipeline the ranks differ.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.errors import UserError, did_you_mean
from shardwright.planner.price.axis_groups import Link
from shardwright.spec.calls import Call, CallOrder, Schedule, flatten_bodies
from shardwright.spec.plan import Stage
from shardwright.spec.stage_checks import is_persistent

WHOLE_STEP = -1  # in place of a micro-batch: the slot belongs to the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The duration and the resources of a stage on each rank that takes part in it."""

    seconds: float | tuple[float, ...] = 0.0  # by rank, or a single value for all
    ranks: tuple[int, ...] | None = None  # None: all
    is_collective: bool = False  # starts when the last of its ranks has reached it
    message: str = ""  # of a message from the first of two `ranks` to the second: what both call it
    levels: tuple[str, ...] = ()  # network levels that a collective uses
    links: tuple[Link, ...] = ()  # the links of these levels that it uses; empty: all of them
    link_share: float = 1.0  # the share of their bandwidth that it uses where nothing else does
    compute_slowdown: float = 0.0  # computation lost to it, as a share of its duration
    slowdown: float = 0.0  # of a collective: the share of its speed that it loses while its ranks compute
    shared_rate: float = 1.0  # speed of this task and of its rank's computation while both run; 1: not shared
    kind: str = ""
    bytes_: int = 0
    flops: int = 0
    link_seconds: float = 0.0  # seconds that each rank spends on messages
    latency_seconds: float = 0.0  # the part of `link_seconds` that does not depend on bytes

    def seconds_on(self, rank: int) -> float:
        return self.seconds[rank] if isinstance(self.seconds, tuple) else self.seconds

    def lengthen(self, seconds: float) -> "Task":
        """The task with `seconds` more on every rank."""
        if isinstance(self.seconds, tuple):
            return replace(self, seconds=tuple(time + seconds for time in self.seconds))
        return replace(self, seconds=self.seconds + seconds)


# What the ranks of a collective or message have in common: its name, its ranks, step and micro-batch.
JointKey = tuple[str, tuple[int, ...] | None, int, int]


def joint_key(task: Task, name: str, step: int, micro: int) -> JointKey:
    return task.message or name, task.ranks, step, micro


class RankCalls:
    """The calls of a rank, in order, each with its task and the earlier calls that must have ended."""

    def __init__(
        self,
        calls: Sequence[Call],
        tasks: Mapping[str, Task],
        dependencies: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        """`dependencies`: of these calls, if another rank with the same calls has them already."""
        for call in calls:
            if call.stage.name not in tasks:
                raise UserError(f'no price of stage "{call.stage.name}"{did_you_mean(call.stage.name, tasks)}')
        self.calls, self.task_of = calls, tasks
        self.tasks = [tasks[call.stage.name] for call in calls]
        self.dependencies = call_dependencies(calls) if dependencies is None else dependencies

    @cached_property
    def joint_keys(self) -> list[JointKey]:
        """By call, the key that it has in common with the calls of other ranks."""
        pairs = zip(self.calls, self.tasks, strict=True)
        return [joint_key(task, call.stage.name, call.step, call.micro) for call, task in pairs]


def expand_calls(
    stages: Sequence[Stage], num_steps: int, micro_batches: int = 1, schedule: Schedule = ()
) -> list[Call]:
    """The calls of a rank in the first `num_steps` steps, with the stages of bodies in place of stages with a body."""
    end = num_steps * micro_batches
    if not schedule:
        order = CallOrder(flatten_bodies(stages), micro_batches=micro_batches, end=end)
        return [call for _, calls in order.ticks() for call in calls if not call.is_end]
    order = CallOrder(stages, micro_batches=micro_batches, schedule=schedule, end=end)
    return [part for _, calls in order.ticks() for call in calls if not call.is_end for part in _body_calls(call)]


def _body_calls(call: Call) -> Iterator[Call]:
    """The call, or those of the stages in its body; stages per step only with the step's last micro-batch."""
    for stage in flatten_bodies([call.stage]):
        if call.is_last or stage.per == "micro" or call.stage.per == "step":
            yield replace(call, stage=stage)


def call_dependencies(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    """By call, the earlier calls that must have ended.

    They are the writers of the slots that it reads, and the readers and writers of persistent slots that it writes.
    """
    writer: dict[tuple[str, int, int], int] = {}
    readers: dict[str, list[int]] = defaultdict(list)
    dependencies: list[tuple[int, ...]] = []
    for number, call in enumerate(calls):
        before: set[int] = set()
        for slot in call.stage.reads:
            before.update(writer[key] for key in _keys_read(slot, call) if key in writer)
            if is_persistent(slot):
                readers[slot].append(number)
        for slot in call.stage.writes:
            key = _slot_key(slot, call)
            if is_persistent(slot):
                before.update(readers.pop(slot, ()))
                if key in writer:
                    before.add(writer[key])
            writer[key] = number
            if call.stage.per == "step" and not is_persistent(slot):
                writer[slot, call.step, WHOLE_STEP] = number
        dependencies.append(tuple(sorted(before - {number})))
    return dependencies


def _keys_read(slot: str, call: Call) -> Iterator[tuple[str, int, int]]:
    """The slot of the micro-batch or of its step; where the call is of a whole step, the slot of each micro-batch."""
    yield _slot_key(slot, call)
    yield slot, call.step, WHOLE_STEP
    if call.stage.per == "step" and not is_persistent(slot):
        yield from ((slot, call.step, micro) for micro in range(call.micro))


def _slot_key(slot: str, call: Call) -> tuple[str, int, int]:
    return (slot, -1, -1) if is_persistent(slot) else (slot, call.step, call.micro)
