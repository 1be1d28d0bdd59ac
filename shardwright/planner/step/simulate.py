"""A step played on paper: the stages of a plan over ranks and lanes, each as long as it was priced.

One rule, that of the runtime: every rank goes through the same list of calls. Those on the lane of its thread (`main`)
run there, and on a CPU those of `read`, too; on any other lane a call is issued, and waits for its turn there. What a
call reads must have ended: where work blocks the thread (a CPU) the thread waits for it, where it is ordered by the
device (streams) the lane does. A joint call (a collective) begins when the last of its ranks has come to it, and ends
for all at once.

Calls under way together share what they need: joint ones that use a level of the network have equal parts of it, and
computation on `main` loses the part that was measured beside them. A loader worker that shares a rank's processor
slows that rank's computation down, and is slowed down by it (`Task.shared_rate`).
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from shardwright.errors import UserError, did_you_mean
from shardwright.spec.plan import Stage
from shardwright.spec.stage_checks import is_persistent
from shardwright.spec.timeline import Event, Timeline

MAIN = "main"
THREAD_LANES = ("read", MAIN)  # lanes whose calls run on the rank's thread where work blocks it
MIN_RATE = 0.05  # of computation, however much runs beside it
EPSILON_SECONDS = 1e-12  # seconds that are rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a stage takes on each rank that takes part in it."""

    seconds: float | tuple[float, ...] = 0.0  # of each rank; one number: of all alike
    ranks: tuple[int, ...] | None = None  # None: all
    is_collective: bool = False
    levels: tuple[str, ...] = ()  # of the network, that a joint task keeps busy
    compute_slowdown: float = 0.0  # what computation beside it loses, as a part of its time
    shared_rate: float = 1.0  # of it and of its rank's computation while both run; below 1 they share a processor
    kind: str = ""
    bytes_: int = 0
    flops: int = 0
    link_seconds: float = 0.0  # seconds of each rank that are spent on messages
    latency_seconds: float = 0.0  # the part of `links` that does not depend on the number of bytes

    def seconds_on(self, rank: int) -> float:
        return self.seconds[rank] if isinstance(self.seconds, tuple) else self.seconds


@dataclass(frozen=True, slots=True)
class Call:
    """A stage for one batch, or for one of its micro-batches."""

    stage: Stage
    step: int
    micro: int = 0
    tick: int = 0  # in which it is issued: a thread that does not wait is at most one tick ahead of its own work


@dataclass(slots=True)
class _Joint:
    call: int
    left: float  # seconds of it, were it alone
    task: Task


@dataclass(slots=True)
class _Shared:
    """A rank's processor while a loader worker uses it."""

    worker: int  # the worker's call
    rate: float  # of each call while there are two
    left: dict[int, float]  # by call, the worker's and that of the rank's thread, seconds of it, were it alone

    @property
    def pace(self) -> float:
        return self.rate if len(self.left) > 1 else 1.0


def expand_calls(stages: Sequence[Stage], num_steps: int) -> list[Call]:
    """The order of the runtime: tick by tick through the list, each stage for the batch that is its lead ahead."""
    flat = [part for stage in stages for part in _parts(stage)]
    first = -max((lead for _, lead in flat), default=0)
    return [
        Call(stage, tick + lead, tick=tick)
        for tick in range(first, num_steps)
        for stage, lead in flat
        if 0 <= tick + lead < num_steps
    ]


def simulate_calls(calls: Sequence[Call], tasks: Mapping[str, Task], num_ranks: int, *, blocking: bool) -> Timeline:
    """When each call runs on each rank; `blocking`: whether work makes the thread wait, as on a CPU."""
    for call in calls:
        if call.stage.name not in tasks:
            raise UserError(f'no price of stage "{call.stage.name}"{did_you_mean(call.stage.name, tasks)}')
    player = _Player(calls, [tasks[call.stage.name] for call in calls], num_ranks, blocking)
    return Timeline("predicted", tuple(player.events()))


def steady_step_seconds(timeline: Timeline, warm_steps: int = 2, tail_steps: int = 0) -> float:
    """Of one step where they follow each other: the first `warm` steps start with nothing to overlap, behind the last
    `tail` nothing runs ahead."""
    ends: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        ends[event.step] = max(ends[event.step], event.end)
    last = max(ends) - tail_steps
    if last <= warm_steps:
        raise UserError(f"a timeline of {max(ends) + 1} steps; wanted {warm_steps + tail_steps + 2} or more")
    return (ends[last] - ends[warm_steps]) / (last - warm_steps)


def call_dependencies(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    """By call, the earlier ones that must have ended: who wrote what it reads, and, of lasting slots, who still reads
    what it writes."""
    writer: dict[tuple[str, int, int], int] = {}
    readers: dict[str, list[int]] = defaultdict(list)
    found: list[tuple[int, ...]] = []
    for number, call in enumerate(calls):
        before: set[int] = set()
        for slot in call.stage.reads:
            key = _key(slot, call)
            if key in writer:
                before.add(writer[key])
            if is_persistent(slot):
                readers[slot].append(number)
        for slot in call.stage.writes:
            key = _key(slot, call)
            if is_persistent(slot):
                before.update(readers.pop(slot, ()))
                if key in writer:
                    before.add(writer[key])
            writer[key] = number
        found.append(tuple(sorted(before - {number})))
    return found


def _key(slot: str, call: Call) -> tuple[str, int, int]:
    return (slot, -1, -1) if is_persistent(slot) else (slot, call.step, call.micro)


def _parts(stage: Stage, lead: int = 0) -> Iterator[tuple[Stage, int]]:
    """A stage, or what is inside it, with the lead of the whole."""
    if not stage.body:
        yield stage, lead + stage.lead
    for part in stage.body:
        yield from _parts(part, lead + stage.lead)


@dataclass(slots=True)
class _Rank:
    position: int = 0  # in the list
    working: bool = False  # its thread runs a call
    queues: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    busy: dict[str, int] = field(default_factory=dict[str, int])  # lane to call


class _Player:
    def __init__(self, order: Sequence[Call], tasks: Sequence[Task], num_ranks: int, blocking: bool) -> None:
        self.order, self.tasks, self.num, self.blocking = order, tasks, num_ranks, blocking
        self.needs = call_dependencies(order)
        self.ranks = [_Rank() for _ in range(num_ranks)]
        self.done: list[dict[int, float]] = [{} for _ in range(num_ranks)]  # call to its end
        self.starts: list[dict[int, float]] = [{} for _ in range(num_ranks)]
        self.arrived: dict[int, int] = defaultdict(int)
        self.joints: list[_Joint] = []
        self.now = self.worked = 0.0  # seconds; seconds of computation that a busy `main` would have done
        self.slow: list[tuple[float, int, int, int]] = []  # ends on `main`, in `worked`
        self.plain: list[tuple[float, int, int, int]] = []  # ends elsewhere
        self.shared: dict[int, _Shared] = {}  # ranks whose loader worker runs: their ends are in neither of the above
        self.on_thread = THREAD_LANES if blocking else (MAIN,)
        self.tie = count()

    def events(self) -> Iterator[Event]:
        for rank in range(self.num):
            self._advance(rank)
        while self.slow or self.plain or self.joints or self.shared:
            self._next()
        for call, rank in self._pairs():
            if call not in self.done[rank]:
                one = self.order[call]
                raise UserError(f'rank {rank} waits for ever at stage "{one.stage.name}" of step {one.step}')
        return self._told()

    # What a rank may do

    def _takes_part(self, call: int, rank: int) -> bool:
        ranks = self.tasks[call].ranks
        return ranks is None or rank in ranks

    def _ready(self, call: int, rank: int) -> bool:
        return all(before in self.done[rank] or not self._takes_part(before, rank) for before in self.needs[call])

    def _advance(self, rank: int) -> None:
        """The thread of a rank goes on as far as it can."""
        one = self.ranks[rank]
        while one.position < len(self.order) and not (self.blocking and one.working):
            call = one.position
            if not self._takes_part(call, rank):
                one.position += 1
                continue
            if not self._ready(call, rank) if self.blocking else self._ahead(call, rank):
                return
            one.position += 1
            lane = self.order[call].stage.lane
            one.working = one.working or lane in self.on_thread
            one.queues[lane].append(call)
            self._start(rank, lane)

    def _ahead(self, call: int, rank: int) -> bool:
        """Whether its own thread's work is more than a tick behind this call."""
        one = self.ranks[rank]
        oldest = one.busy.get(MAIN, next(iter(one.queues[MAIN]), call))
        return self.order[call].tick > self.order[oldest].tick + 1

    def _start(self, rank: int, lane: str) -> None:
        one = self.ranks[rank]
        queue = one.queues[lane]
        if lane in one.busy or not queue or not self._ready(queue[0], rank):
            return
        call = queue.popleft()
        task = self.tasks[call]
        one.busy[lane] = call
        self.starts[rank][call] = self.now
        if task.shared_rate < 1:
            self._share(rank, call, task)
            return
        if not task.is_collective:
            self._run(rank, call, task.seconds_on(rank), computes=lane in self.on_thread)
            return
        self.arrived[call] += 1
        if self.arrived[call] == (self.num if task.ranks is None else len(task.ranks)):
            self.joints.append(_Joint(call, task.seconds_on(rank), task))

    def _run(self, rank: int, call: int, seconds: float, *, computes: bool) -> None:
        if computes and rank in self.shared:
            self.shared[rank].left[call] = seconds
            return
        ends, at = (self.slow, self.worked) if computes else (self.plain, self.now)
        heapq.heappush(ends, (at + seconds, next(self.tie), call, rank))

    def _share(self, rank: int, call: int, task: Task) -> None:
        """A loader worker begins: what its rank computes goes on beside it."""
        self.shared[rank] = _Shared(call, task.shared_rate, {call: task.seconds_on(rank)})
        for entry in [one for one in self.slow if one[3] == rank]:
            self.slow.remove(entry)
            heapq.heapify(self.slow)
            self.shared[rank].left[entry[2]] = entry[0] - self.worked

    # How time goes on

    def _rates(self) -> tuple[float, list[float]]:
        """Of computation on `main`, and of each joint call."""
        users: dict[str, int] = defaultdict(int)
        for one in self.joints:
            for level in one.task.levels:
                users[level] += 1
        rates = [1 / max((users[level] for level in one.task.levels), default=1) for one in self.joints]
        lost = sum(one.task.compute_slowdown * rate for one, rate in zip(self.joints, rates, strict=True))
        return max(MIN_RATE, 1 - lost), rates

    def _next(self) -> None:
        compute, rates = self._rates()
        after = [one.left / rate for one, rate in zip(self.joints, rates, strict=True)]
        if self.slow:
            after.append((self.slow[0][0] - self.worked) / compute)
        if self.plain:
            after.append(self.plain[0][0] - self.now)
        after += [left / (compute * one.pace) for one in self.shared.values() for left in one.left.values()]
        passed = max(0.0, min(after))
        self.now += passed
        self.worked += passed * compute
        for one, rate in zip(self.joints, rates, strict=True):
            one.left -= passed * rate
        ended = [one for one in self.joints if one.left <= EPSILON_SECONDS]
        self.joints = [one for one in self.joints if one.left > EPSILON_SECONDS]
        finished = [(one.call, rank) for one in ended for rank in self._members(one.task)]
        finished += self._pass_shared(passed * compute)
        for ends, at in ((self.slow, self.worked), (self.plain, self.now)):
            while ends and ends[0][0] <= at + EPSILON_SECONDS:
                _, _, call, rank = heapq.heappop(ends)
                finished.append((call, rank))
        self._finish(finished)

    def _pass_shared(self, worked: float) -> list[tuple[int, int]]:
        """The calls that end in this time on ranks whose loader worker runs; behind the worker computation is alone."""
        finished: list[tuple[int, int]] = []
        for rank, one in list(self.shared.items()):
            left = {call: seconds - worked * one.pace for call, seconds in one.left.items()}
            finished += [(call, rank) for call, seconds in left.items() if seconds <= EPSILON_SECONDS]
            one.left = {call: seconds for call, seconds in left.items() if seconds > EPSILON_SECONDS}
            if one.worker not in one.left:
                del self.shared[rank]
                for call, seconds in one.left.items():
                    self._run(rank, call, seconds, computes=True)
        return finished

    def _members(self, task: Task) -> Sequence[int]:
        return range(self.num) if task.ranks is None else task.ranks

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

    def _told(self) -> Iterator[Event]:
        ids = {(call, rank): number for number, (call, rank) in enumerate(self._pairs())}
        for (call, rank), number in ids.items():
            one, task = self.order[call], self.tasks[call]
            yield Event(
                id=number,
                name=one.stage.name,
                kind=task.kind or ("collective" if task.is_collective else "compute"),
                rank=rank,
                lane=one.stage.lane,
                step=one.step,
                micro=one.micro,
                start=self.starts[rank][call],
                end=self.done[rank][call],
                bytes_=task.bytes_,
                flops=task.flops,
                after=tuple(ids[before, rank] for before in self.needs[call] if (before, rank) in ids),
            )

    def _pairs(self) -> Iterator[tuple[int, int]]:
        for call in range(len(self.order)):
            for rank in range(self.num):
                if self._takes_part(call, rank):
                    yield call, rank
