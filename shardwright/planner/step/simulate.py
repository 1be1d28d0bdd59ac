"""A discrete-event simulation of the step: stages over ranks and lanes, each as long as predicted.

It follows the runtime. Every rank issues the same list of calls. Calls on lane `main` run on the rank's thread; on a
CPU, calls on lane `read` do, too. Calls on another lane are queued on it in issue order. A call starts once all calls
that it depends on have ended: where work blocks the thread (a CPU), the thread waits for them; where the device orders
work (streams), the lane does. A collective starts when its last rank has reached it, and ends at the same time on all
ranks.

Calls in flight share resources. Collectives that use the same network level share its bandwidth equally. A collective
slows down computation on `main` as measured. A loader worker that shares a rank's processor slows down that rank's
computation, and is slowed down by it (`Task.shared_rate`).
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from shardwright.errors import UserError, did_you_mean
from shardwright.spec.calls import Call, CallOrder, flatten_bodies
from shardwright.spec.lanes import MAIN, READ
from shardwright.spec.plan import Stage
from shardwright.spec.stage_checks import is_persistent
from shardwright.spec.timeline import Event, Timeline

THREAD_LANES = (READ, MAIN)  # lanes whose calls run on the rank's thread where work blocks it
MIN_RATE = 0.05  # of computation, whatever overlaps with it
EPSILON_SECONDS = 1e-12  # rounding error


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The duration and the resources of a stage on each rank that takes part in it."""

    seconds: float | tuple[float, ...] = 0.0  # by rank, or a single value for all
    ranks: tuple[int, ...] | None = None  # None: all
    is_collective: bool = False
    levels: tuple[str, ...] = ()  # network levels that a collective uses
    compute_slowdown: float = 0.0  # computation lost to it, as a share of its duration
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


@dataclass(slots=True)
class _RunningCollective:
    call: int
    seconds_left: float  # at full bandwidth
    task: Task


@dataclass(slots=True)
class _SharedProcessor:
    """A rank's processor while a loader worker uses it."""

    worker: int  # call of the loader worker
    rate: float  # speed of each call while there are two
    seconds_left: dict[int, float]  # by call (of the worker, of the rank's thread), at full speed

    @property
    def pace(self) -> float:
        return self.rate if len(self.seconds_left) > 1 else 1.0


def expand_calls(stages: Sequence[Stage], num_steps: int, micro_batches: int = 1) -> list[Call]:
    """The calls of a rank in the first `num_steps` steps, with the stages of bodies in place of stages with a body."""
    order = CallOrder(flatten_bodies(stages), micro_batches=micro_batches, end=num_steps * micro_batches)
    return [call for _, calls in order.ticks() for call in calls if not call.is_end]


def simulate_calls(calls: Sequence[Call], tasks: Mapping[str, Task], num_ranks: int, *, blocking: bool) -> Timeline:
    """Simulate when each call runs on each rank. `blocking`: whether work blocks the thread, as on a CPU."""
    for call in calls:
        if call.stage.name not in tasks:
            raise UserError(f'no price of stage "{call.stage.name}"{did_you_mean(call.stage.name, tasks)}')
    simulator = _Simulator(calls, [tasks[call.stage.name] for call in calls], num_ranks, blocking)
    return Timeline("predicted", tuple(simulator.events()))


def steady_step_seconds(timeline: Timeline, warm_steps: int = 2, tail_steps: int = 0) -> float:
    """Seconds of one step in steady state.

    The first `warm_steps` and the last `tail_steps` do not count: they lack earlier or later batches to overlap with.
    """
    ends: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        ends[event.step] = max(ends[event.step], event.end)
    last = max(ends) - tail_steps
    if last <= warm_steps:
        raise UserError(f"a timeline of {max(ends) + 1} steps is too short; {warm_steps + tail_steps + 2} are needed")
    return (ends[last] - ends[warm_steps]) / (last - warm_steps)


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
        dependencies.append(tuple(sorted(before - {number})))
    return dependencies


def _keys_read(slot: str, call: Call) -> Iterator[tuple[str, int, int]]:
    """The slot; where the call is of a whole step, the slot of each micro-batch."""
    yield _slot_key(slot, call)
    if call.stage.per == "step" and not is_persistent(slot):
        yield from ((slot, call.step, micro) for micro in range(call.micro))


def _slot_key(slot: str, call: Call) -> tuple[str, int, int]:
    return (slot, -1, -1) if is_persistent(slot) else (slot, call.step, call.micro)


@dataclass(slots=True)
class _RankState:
    position: int = 0  # in the list of calls
    working: bool = False  # whether its thread runs a call
    queues: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    busy: dict[str, int] = field(default_factory=dict[str, int])  # by lane, the running call


class _Simulator:
    def __init__(self, order: Sequence[Call], tasks: Sequence[Task], num_ranks: int, blocking: bool) -> None:
        self.order, self.tasks, self.num_ranks, self.blocking = order, tasks, num_ranks, blocking
        self.dependencies = call_dependencies(order)
        self.ranks = [_RankState() for _ in range(num_ranks)]
        self.done: list[dict[int, float]] = [{} for _ in range(num_ranks)]  # by call, when it ended
        self.starts: list[dict[int, float]] = [{} for _ in range(num_ranks)]
        self.num_arrived: dict[int, int] = defaultdict(int)
        self.collectives: list[_RunningCollective] = []
        self.now = self.compute_time = 0.0  # seconds; seconds of computation at full speed
        self.compute_ends: list[tuple[float, int, int, int]] = []  # ends of computation, in `compute_time`
        self.other_ends: list[tuple[float, int, int, int]] = []  # ends of other calls, in `now`
        self.shared: dict[int, _SharedProcessor] = {}  # ranks whose loader worker runs: in neither of the above
        self.on_thread = THREAD_LANES if blocking else (MAIN,)
        self.tie = count()

    def events(self) -> Iterator[Event]:
        """Simulate all calls, and return their events."""
        for rank in range(self.num_ranks):
            self._advance(rank)
        while self.compute_ends or self.other_ends or self.collectives or self.shared:
            self._step_to_next_end()
        for call, rank in self._call_ranks():
            if call not in self.done[rank]:
                stuck = self.order[call]
                raise UserError(f'rank {rank} waits forever at stage "{stuck.stage.name}" of step {stuck.step}')
        return self._make_events()

    # Issuing calls

    def _takes_part(self, call: int, rank: int) -> bool:
        ranks = self.tasks[call].ranks
        return ranks is None or rank in ranks

    def _is_ready(self, call: int, rank: int) -> bool:
        return all(prior in self.done[rank] or not self._takes_part(prior, rank) for prior in self.dependencies[call])

    def _advance(self, rank: int) -> None:
        """Issue calls of a rank's thread until it must wait."""
        state = self.ranks[rank]
        while state.position < len(self.order) and not (self.blocking and state.working):
            call = state.position
            if not self._takes_part(call, rank):
                state.position += 1
                continue
            if not self._is_ready(call, rank) if self.blocking else self._is_too_far_ahead(call, rank):
                return
            state.position += 1
            lane = self.order[call].stage.lane
            state.working = state.working or lane in self.on_thread
            state.queues[lane].append(call)
            self._start(rank, lane)

    def _is_too_far_ahead(self, call: int, rank: int) -> bool:
        """Whether the rank's own computation is more than a tick behind this call."""
        state = self.ranks[rank]
        oldest = state.busy.get(MAIN, next(iter(state.queues[MAIN]), call))
        return self.order[call].tick > self.order[oldest].tick + 1

    def _start(self, rank: int, lane: str) -> None:
        state = self.ranks[rank]
        queue = state.queues[lane]
        if lane in state.busy or not queue or not self._is_ready(queue[0], rank):
            return
        call = queue.popleft()
        task = self.tasks[call]
        state.busy[lane] = call
        self.starts[rank][call] = self.now
        if task.shared_rate < 1:
            self._start_worker(rank, call, task)
            return
        if not task.is_collective:
            self._run(rank, call, task.seconds_on(rank), computes=lane in self.on_thread)
            return
        self.num_arrived[call] += 1
        if self.num_arrived[call] == (self.num_ranks if task.ranks is None else len(task.ranks)):
            self.collectives.append(_RunningCollective(call, task.seconds_on(rank), task))

    def _run(self, rank: int, call: int, seconds: float, *, computes: bool) -> None:
        if computes and rank in self.shared:
            self.shared[rank].seconds_left[call] = seconds
            return
        ends, now = (self.compute_ends, self.compute_time) if computes else (self.other_ends, self.now)
        heapq.heappush(ends, (now + seconds, next(self.tie), call, rank))

    def _start_worker(self, rank: int, call: int, task: Task) -> None:
        """Start a loader worker: the computation of its rank goes on at the shared rate."""
        self.shared[rank] = _SharedProcessor(call, task.shared_rate, {call: task.seconds_on(rank)})
        for entry in [end for end in self.compute_ends if end[3] == rank]:
            self.compute_ends.remove(entry)
            heapq.heapify(self.compute_ends)
            self.shared[rank].seconds_left[entry[2]] = entry[0] - self.compute_time

    # Advancing time

    def _rates(self) -> tuple[float, list[float]]:
        """The rate of computation on `main`, and of each collective in flight."""
        users: dict[str, int] = defaultdict(int)
        for op in self.collectives:
            for level in op.task.levels:
                users[level] += 1
        rates = [1 / max((users[level] for level in op.task.levels), default=1) for op in self.collectives]
        slowdown = sum(op.task.compute_slowdown * rate for op, rate in zip(self.collectives, rates, strict=True))
        return max(MIN_RATE, 1 - slowdown), rates

    def _step_to_next_end(self) -> None:
        compute_rate, rates = self._rates()
        waits = [op.seconds_left / rate for op, rate in zip(self.collectives, rates, strict=True)]
        if self.compute_ends:
            waits.append((self.compute_ends[0][0] - self.compute_time) / compute_rate)
        if self.other_ends:
            waits.append(self.other_ends[0][0] - self.now)
        waits += [
            left / (compute_rate * cpu.pace) for cpu in self.shared.values() for left in cpu.seconds_left.values()
        ]
        elapsed = max(0.0, min(waits))
        self.now += elapsed
        self.compute_time += elapsed * compute_rate
        for op, rate in zip(self.collectives, rates, strict=True):
            op.seconds_left -= elapsed * rate
        ended_ops = [op for op in self.collectives if op.seconds_left <= EPSILON_SECONDS]
        self.collectives = [op for op in self.collectives if op.seconds_left > EPSILON_SECONDS]
        finished = [(op.call, rank) for op in ended_ops for rank in op.task.ranks or range(self.num_ranks)]
        finished += self._progress_shared(elapsed * compute_rate)
        for ends, now in ((self.compute_ends, self.compute_time), (self.other_ends, self.now)):
            while ends and ends[0][0] <= now + EPSILON_SECONDS:
                _, _, call, rank = heapq.heappop(ends)
                finished.append((call, rank))
        self._finish(finished)

    def _progress_shared(self, worked: float) -> list[tuple[int, int]]:
        """Run the calls of ranks with a loader worker for `worked` seconds, and return the calls that ended.

        If the worker ended, the rank's computation goes on at full speed.
        """
        finished: list[tuple[int, int]] = []
        for rank, cpu in list(self.shared.items()):
            remaining = {call: seconds - worked * cpu.pace for call, seconds in cpu.seconds_left.items()}
            finished += [(call, rank) for call, seconds in remaining.items() if seconds <= EPSILON_SECONDS]
            cpu.seconds_left = {call: seconds for call, seconds in remaining.items() if seconds > EPSILON_SECONDS}
            if cpu.worker not in cpu.seconds_left:
                del self.shared[rank]
                for call, seconds in cpu.seconds_left.items():
                    self._run(rank, call, seconds, computes=True)
        return finished

    def _finish(self, finished: Sequence[tuple[int, int]]) -> None:
        for call, rank in finished:
            lane = self.order[call].stage.lane
            self.done[rank][call] = self.now
            del self.ranks[rank].busy[lane]
            if lane in self.on_thread:
                self.ranks[rank].working = False
        for rank in dict.fromkeys(rank for _, rank in finished):
            for lane in list(self.ranks[rank].queues):
                self._start(rank, lane)
            self._advance(rank)

    def _make_events(self) -> Iterator[Event]:
        ids = {(call, rank): event_id for event_id, (call, rank) in enumerate(self._call_ranks())}
        for (call, rank), event_id in ids.items():
            issued, task = self.order[call], self.tasks[call]
            yield Event(
                id=event_id,
                name=issued.stage.name,
                kind=task.kind or ("collective" if task.is_collective else "compute"),
                rank=rank,
                lane=issued.stage.lane,
                step=issued.step,
                micro=issued.micro,
                start=self.starts[rank][call],
                end=self.done[rank][call],
                bytes_=task.bytes_,
                flops=task.flops,
                after=tuple(ids[before, rank] for before in self.dependencies[call] if (before, rank) in ids),
            )

    def _call_ranks(self) -> Iterator[tuple[int, int]]:
        """Every call with every rank that takes part in it."""
        for call in range(len(self.order)):
            for rank in range(self.num_ranks):
                if self._takes_part(call, rank):
                    yield call, rank
