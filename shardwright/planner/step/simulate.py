"""A discrete-event simulation of the step: stages over ranks and lanes, each as long as predicted.

It follows the runtime. Every rank issues its calls in order; without a pipeline, all ranks have the same. Calls on lane
`main` run on the rank's thread; on a CPU, calls on lane `read` do, too. Calls on another lane are queued on it in issue
order, received messages apart from others. A call starts once all calls that it depends on have ended: where work
blocks the thread (a CPU), the thread waits for them; where the device orders work (streams), the lane does. A
collective, or a message, starts when its last rank has reached it, and ends at the same time on all its ranks.

Calls in flight share resources. Collectives and messages share network links (shared_links.py). A collective and the
computation on `main` of its ranks slow each other down as measured. A loader worker that shares a rank's processor
slows down that rank's computation, and is slowed down by it (`Task.shared_rate`).
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from shardwright.errors import UserError
from shardwright.planner.step.rank_calls import JointKey, RankCalls, Task
from shardwright.planner.step.shared_links import RunningOp, sharing_rates
from shardwright.spec.calls import Call
from shardwright.spec.lanes import MAIN, READ
from shardwright.spec.plan import Stage
from shardwright.spec.timeline import Event, Timeline

THREAD_LANES = (READ, MAIN)  # lanes whose calls run on the rank's thread where work blocks it
MIN_RATE = 0.05  # of computation, whatever overlaps with it
EPSILON_SECONDS = 1e-12  # rounding error


@dataclass(slots=True)
class _SharedProcessor:
    """A rank's processor while a loader worker uses it."""

    worker: int  # call of the loader worker
    rate: float  # speed of each call while there are two
    seconds_left: dict[int, float]  # by call (of the worker, of the rank's thread), at full speed

    @property
    def pace(self) -> float:
        return self.rate if len(self.seconds_left) > 1 else 1.0


@dataclass(slots=True)
class _Processors:
    """The processors of ranks with the same calls: collectives slow all of them down alike."""

    ranks: list[int]
    now: float = 0.0  # seconds of computation at full speed
    rate: float = 1.0
    ends: list[tuple[float, int, int, int]] = field(default_factory=list[tuple[float, int, int, int]])  # in `now`


def simulate_calls(calls: Sequence[Call], tasks: Mapping[str, Task], num_ranks: int, *, blocking: bool) -> Timeline:
    """Simulate when each call runs on each rank. `blocking`: whether work blocks the thread, as on a CPU."""
    return simulate_ranks([RankCalls(calls, tasks)] * num_ranks, blocking=blocking)


def simulate_ranks(rank_calls: Sequence[RankCalls], *, blocking: bool, serial: bool = False) -> Timeline:
    """Simulate ranks with calls of their own. `serial`: the thread waits for what each call has written, as the serial
    executor does."""
    return Timeline("predicted", tuple(_Simulator(rank_calls, blocking, serial).events()))


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


@dataclass(slots=True)
class _RankState:
    calls: RankCalls
    processors: _Processors
    lanes: list[str]  # by call, the queue that it waits in
    holds_thread: list[bool]  # by call, whether it keeps the rank's thread until it ends
    position: int = 0  # in the list of calls
    working: bool = False  # whether its thread runs a call
    queues: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    busy: dict[str, int] = field(default_factory=dict[str, int])  # by lane, the running call
    starts: dict[int, float] = field(default_factory=dict[int, float])  # by call
    done: dict[int, float] = field(default_factory=dict[int, float])  # by call, when it ended

    def takes_part(self, call: int, rank: int) -> bool:
        ranks = self.calls.tasks[call].ranks
        return ranks is None or rank in ranks


class _Simulator:
    def __init__(self, rank_calls: Sequence[RankCalls], blocking: bool, serial: bool) -> None:
        self.num_ranks, self.blocking = len(rank_calls), blocking
        self.on_thread = THREAD_LANES if blocking else (MAIN,)
        self.processors: list[_Processors] = []
        self.ranks = self._make_ranks(rank_calls, serial)
        self.arrived: dict[JointKey, list[tuple[int, int]]] = defaultdict(list)  # calls and ranks at a collective
        self.collectives: list[RunningOp] = []
        self.now = 0.0
        self.other_ends: list[tuple[float, int, int, int]] = []  # ends of calls that do not compute
        self.shared: dict[int, _SharedProcessor] = {}  # ranks whose loader worker runs: in no other list of ends
        self.tie = count()

    def _make_ranks(self, rank_calls: Sequence[RankCalls], serial: bool) -> list[_RankState]:
        by_calls: dict[int, tuple[_Processors, list[str], list[bool]]] = {}
        ranks: list[_RankState] = []
        for rank, own in enumerate(rank_calls):
            if id(own.calls) not in by_calls:
                self.processors.append(_Processors([]))
                stages = [call.stage for call in own.calls]
                holds_thread = [stage.lane in self.on_thread or (serial and bool(stage.writes)) for stage in stages]
                by_calls[id(own.calls)] = self.processors[-1], list(map(_queue_name, stages, own.tasks)), holds_thread
            ranks.append(_RankState(own, *by_calls[id(own.calls)]))
            ranks[-1].processors.ranks.append(rank)
        return ranks

    def events(self) -> Iterator[Event]:
        """Simulate all calls, and return their events."""
        for rank in range(self.num_ranks):
            self._advance(rank)
        while self.other_ends or self.collectives or self.shared or any(group.ends for group in self.processors):
            self._step_to_next_end()
        for call, rank in self._call_ranks():
            if call not in self.ranks[rank].done:
                stuck = self.ranks[rank].calls.calls[call]
                raise UserError(f'rank {rank} waits forever at stage "{stuck.stage.name}" of step {stuck.step}')
        return self._make_events()

    # Issuing calls

    def _is_ready(self, call: int, rank: int) -> bool:
        state = self.ranks[rank]
        for prior in state.calls.dependencies[call]:
            if prior not in state.done and state.takes_part(prior, rank):
                return False
        return True

    def _advance(self, rank: int) -> None:
        """Issue calls of a rank's thread until it must wait."""
        state = self.ranks[rank]
        while state.position < len(state.lanes) and not (self.blocking and state.working):
            call = state.position
            if not state.takes_part(call, rank):
                state.position += 1
                continue
            if not self._is_ready(call, rank) if self.blocking else self._is_too_far_ahead(call, rank):
                return
            state.position += 1
            lane = state.lanes[call]
            state.working = state.working or state.holds_thread[call]
            state.queues[lane].append(call)
            self._start(rank, lane)

    def _is_too_far_ahead(self, call: int, rank: int) -> bool:
        """Whether the rank's own computation is more than a tick behind this call."""
        state = self.ranks[rank]
        oldest = state.busy.get(MAIN, next(iter(state.queues[MAIN]), call))
        return state.calls.calls[call].tick > state.calls.calls[oldest].tick + 1

    def _start(self, rank: int, lane: str) -> None:
        state = self.ranks[rank]
        queue = state.queues[lane]
        if lane in state.busy or not queue or not self._is_ready(queue[0], rank):
            return
        call = queue.popleft()
        task = state.calls.tasks[call]
        state.busy[lane] = call
        state.starts[call] = self.now
        if task.shared_rate < 1:
            self._start_worker(rank, call, task)
            return
        if not task.is_collective:
            self._run(rank, call, task.seconds_on(rank), computes=lane in self.on_thread)
            return
        key = state.calls.joint_keys[call]
        arrived = self.arrived[key]
        arrived.append((call, rank))
        if len(arrived) == (self.num_ranks if task.ranks is None else len(task.ranks)):
            self.collectives.append(RunningOp(key, task.seconds_on(rank), task))

    def _run(self, rank: int, call: int, seconds: float, *, computes: bool) -> None:
        if computes and rank in self.shared:
            self.shared[rank].seconds_left[call] = seconds
            return
        processors = self.ranks[rank].processors
        ends, now = (processors.ends, processors.now) if computes else (self.other_ends, self.now)
        heapq.heappush(ends, (now + seconds, next(self.tie), call, rank))

    def _start_worker(self, rank: int, call: int, task: Task) -> None:
        """Start a loader worker: the computation of its rank goes on at the shared rate."""
        processors = self.ranks[rank].processors
        self.shared[rank] = _SharedProcessor(call, task.shared_rate, {call: task.seconds_on(rank)})
        for entry in [end for end in processors.ends if end[3] == rank]:
            processors.ends.remove(entry)
            heapq.heapify(processors.ends)
            self.shared[rank].seconds_left[entry[2]] = entry[0] - processors.now

    # Advancing time

    def _set_rates(self) -> list[float]:
        """Set the rates of computation; return the rate of each collective in flight."""
        rates = sharing_rates(self.collectives)
        for index, op in enumerate(self.collectives):
            if op.task.slowdown and self._computes(op.task):
                rates[index] *= 1 - op.task.slowdown
        slowing = [
            (op.task, rate) for op, rate in zip(self.collectives, rates, strict=True) if op.task.compute_slowdown
        ]
        for group in self.processors:
            slowdown = sum(task.compute_slowdown * rate * _share_of(group.ranks, task) for task, rate in slowing)
            group.rate = max(MIN_RATE, 1 - slowdown)
        return rates

    def _computes(self, task: Task) -> bool:
        """Whether a rank of a collective computes."""
        if any(task.ranks is None or rank in task.ranks for rank in self.shared):
            return True
        return any(task.ranks is None or end[3] in task.ranks for group in self.processors for end in group.ends)

    def _step_to_next_end(self) -> None:
        rates = self._set_rates()
        waits = [op.seconds_left / rate for op, rate in zip(self.collectives, rates, strict=True)]
        waits += [(group.ends[0][0] - group.now) / group.rate for group in self.processors if group.ends]
        if self.other_ends:
            waits.append(self.other_ends[0][0] - self.now)
        waits += [
            left / (self.ranks[rank].processors.rate * cpu.pace)
            for rank, cpu in self.shared.items()
            for left in cpu.seconds_left.values()
        ]
        elapsed = max(0.0, min(waits))
        self.now += elapsed
        for group in self.processors:
            group.now += elapsed * group.rate
        for op, rate in zip(self.collectives, rates, strict=True):
            op.seconds_left -= elapsed * rate
        ended_ops = [op for op in self.collectives if op.seconds_left <= EPSILON_SECONDS]
        self.collectives = [op for op in self.collectives if op.seconds_left > EPSILON_SECONDS]
        finished = [pair for op in ended_ops for pair in sorted(self.arrived.pop(op.key), key=_rank_of)]
        finished += self._progress_shared(elapsed)
        for ends, now in (*((group.ends, group.now) for group in self.processors), (self.other_ends, self.now)):
            while ends and ends[0][0] <= now + EPSILON_SECONDS:
                _, _, call, rank = heapq.heappop(ends)
                finished.append((call, rank))
        self._finish(finished)

    def _progress_shared(self, elapsed: float) -> list[tuple[int, int]]:
        """Run the calls of ranks with a loader worker for `elapsed` seconds, and return the calls that ended.

        If the worker ended, the rank's computation goes on at full speed.
        """
        finished: list[tuple[int, int]] = []
        for rank, cpu in list(self.shared.items()):
            worked = elapsed * self.ranks[rank].processors.rate
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
            state = self.ranks[rank]
            state.done[call] = self.now
            del state.busy[state.lanes[call]]
            if state.holds_thread[call]:
                state.working = False
        for rank in dict.fromkeys(rank for _, rank in finished):
            for lane in list(self.ranks[rank].queues):
                self._start(rank, lane)
            self._advance(rank)

    def _make_events(self) -> Iterator[Event]:
        ids = {(call, rank): event_id for event_id, (call, rank) in enumerate(self._call_ranks())}
        for (call, rank), event_id in ids.items():
            state = self.ranks[rank]
            issued, task = state.calls.calls[call], state.calls.tasks[call]
            yield Event(
                id=event_id,
                name=issued.stage.name,
                kind=task.kind or ("collective" if task.is_collective else "compute"),
                rank=rank,
                lane=issued.stage.lane,
                step=issued.step,
                micro=issued.micro,
                start=state.starts[call],
                end=state.done[call],
                bytes_=task.bytes_,
                flops=task.flops,
                after=tuple(ids[before, rank] for before in state.calls.dependencies[call] if (before, rank) in ids),
            )

    def _call_ranks(self) -> Iterator[tuple[int, int]]:
        """Every call with every rank that takes part in it."""
        for call in range(max(len(state.lanes) for state in self.ranks)):
            for rank, state in enumerate(self.ranks):
                if call < len(state.lanes) and state.takes_part(call, rank):
                    yield call, rank


def _queue_name(stage: Stage, task: Task) -> str:
    """The lane; messages that are received have a queue of their own, since they do not wait for those sent."""
    return f"{stage.lane} in" if task.message and stage.writes else stage.lane


def _share_of(ranks: Sequence[int], task: Task) -> float:
    """The share of these ranks that take part in a task."""
    return 1.0 if task.ranks is None else sum(rank in task.ranks for rank in ranks) / len(ranks)


def _rank_of(pair: tuple[int, int]) -> int:
    return pair[1]
