"""Where the time of a predicted step goes: its critical path, split by resource.

The critical path is walked backward from the end of the last counted step. The predecessor of an event is the one on
the same rank that ended last before the event began; a collective, or a message, begins on the rank that reaches it
last. The seconds by resource add up to the step.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardwright.planner.price import roofline
from shardwright.planner.search import Candidate
from shardwright.planner.step import prediction, simulate, tasks
from shardwright.planner.step.rank_calls import JointKey, RankCalls, Task, joint_key
from shardwright.spec.timeline import Event, Timeline

MEMORY, MATMULS, OP_OVERHEAD = "memory", "products", "small calls of torch"
COPIES, LINKS, LATENCY = "copies between tiers", "links: bytes", "links: latency"
RESOURCES: tuple[str, ...] = (MEMORY, MATMULS, OP_OVERHEAD, COPIES, LINKS, LATENCY)
ROUNDING_SECONDS = 1e-11


def seconds_by_resource(candidate: Candidate) -> dict[str, float]:
    """Seconds of one step by resource, in the order of RESOURCES; their sum is the predicted step."""
    problem = candidate.problem
    by_rank = prediction.step_calls(problem, candidate.placed, candidate.loads, candidate.ids_after)
    timeline = simulate.simulate_ranks(by_rank, blocking=problem.cluster.device.kind == "cpu")
    first, last = prediction.WARM_STEPS - 1, prediction.WARM_STEPS + prediction.COUNTED_STEPS - 1
    calls = tasks.call_seconds(problem, candidate.placed)
    has_products = any(task.flops for own in by_rank for task in own.task_of.values())
    peak = roofline.peak_flops_per_second(problem.cluster, problem.precision.matmuls) if has_products else 1.0
    total: dict[str, float] = dict.fromkeys(RESOURCES, 0.0)
    for (name, rank), seconds in _path_seconds(timeline, by_rank, first, last).items():
        task = by_rank[rank].task_of[name]
        for resource, share in _shares(task, rank, task.flops / peak, calls.get(name, 0.0)).items():
            total[resource] += float(seconds * share / (last - first))
    return total


def latency_seconds(candidate: Candidate) -> float:
    """Sum of the latencies of a step's messages, on the rank and lane where it is largest."""
    by_rank = prediction.step_calls(candidate.problem, candidate.placed, candidate.loads, candidate.ids_after)
    most, step = 0.0, prediction.WARM_STEPS
    for own in dict.fromkeys(by_rank):
        seconds_by_lane: dict[str, float] = defaultdict(float)
        for call, task in zip(own.calls, own.tasks, strict=True):
            seconds_by_lane[call.stage.lane] += task.latency_seconds if call.step == step else 0.0
        most = max(most, *seconds_by_lane.values())
    return most


def _shares(task: Task, rank: int, products: float, calls: float) -> Mapping[str, float]:
    """The share of a task's time by resource; computation except products and calls counts as memory."""
    total = max(task.seconds_on(rank), 1e-300)
    links = min(task.link_seconds, total)
    latency = min(task.latency_seconds, links)
    products = min(products, total - links)
    calls = min(calls, total - links - products)
    rest = COPIES if task.kind == "copy" else MEMORY
    seconds = {LATENCY: latency, LINKS: links - latency, MATMULS: products, OP_OVERHEAD: calls}
    seconds[rest] = total - links - products - calls
    return {resource: time / total for resource, time in seconds.items()}


def _path_seconds(
    timeline: Timeline, by_rank: Sequence[RankCalls], first: int, last: int
) -> dict[tuple[str, int], float]:
    """Seconds on the critical path by stage and rank, between the ends of steps `first` and `last`."""
    ends: dict[int, float] = defaultdict(float)
    events_by_rank: dict[int, list[Event]] = defaultdict(list)
    arrivals: dict[tuple[JointKey, float], Event] = {}  # of a collective or message, on the rank that reaches it last
    for event in timeline.events:
        ends[event.step] = max(ends[event.step], event.end)
        key = _joint_key(event, by_rank)
        is_joint = by_rank[event.rank].task_of[event.name].is_collective
        if is_joint and (key not in arrivals or event.start > arrivals[key].start):
            arrivals[key] = event
        if event.end - event.start > ROUNDING_SECONDS:  # a shorter event would be its own predecessor, without end
            events_by_rank[event.rank].append(event)
    sorted_events = {rank: sorted(events, key=lambda event: event.end) for rank, events in events_by_rank.items()}
    ends_by_rank = {rank: [event.end for event in events] for rank, events in sorted_events.items()}
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    now = ends[last]
    event = next(e for e in timeline.events if e.end == now and e.step == last)
    while now > ends[first]:
        event = arrivals.get(_joint_key(event, by_rank), event)
        start = max(event.start, ends[first])
        seconds[event.name, event.rank] += max(0.0, now - start)
        now = min(now, start)
        index = bisect_right(ends_by_rank[event.rank], event.start + ROUNDING_SECONDS) - 1
        if index < 0:
            break
        event = sorted_events[event.rank][index]
    return seconds


def _joint_key(event: Event, by_rank: Sequence[RankCalls]) -> tuple[JointKey, float]:
    """What the events of a collective have in common: also their end, since a step may have several of one name."""
    return joint_key(by_rank[event.rank].task_of[event.name], event.name, event.step, event.micro), event.end
