"""Where the time of a predicted step goes: its critical path, split by resource.

The critical path is walked backward from the end of the last counted step. The predecessor of an event is the one on
the same rank that ended last before the event began; a collective begins on the rank that reaches it last. The seconds
by resource add up to the step.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping

from shardwright.planner.price import roofline
from shardwright.planner.search import Candidate
from shardwright.planner.step import tasks as steps
from shardwright.planner.step.rank_calls import Task
from shardwright.spec.timeline import Event, Timeline

MEMORY, MATMULS, OP_OVERHEAD = "memory", "products", "small calls of torch"
COPIES, LINKS, LATENCY = "copies between tiers", "links: bytes", "links: latency"
RESOURCES: tuple[str, ...] = (MEMORY, MATMULS, OP_OVERHEAD, COPIES, LINKS, LATENCY)
ROUNDING_SECONDS = 1e-11


def seconds_by_resource(candidate: Candidate) -> dict[str, float]:
    """Seconds of one step by resource, in the order of RESOURCES; their sum is the predicted step."""
    problem = candidate.problem
    timeline = steps.predict_timeline(problem, candidate.placed, candidate.loads, candidate.ids_after)
    tasks = steps.stage_tasks(problem, candidate.placed, candidate.loads)
    first, last = steps.WARM_STEPS - 1, steps.WARM_STEPS + steps.COUNTED_STEPS - 1
    calls = steps.call_seconds(problem, candidate.placed)
    has_products = any(task.flops for task in tasks.values())
    peak = roofline.peak_flops_per_second(problem.cluster, problem.precision.matmuls) if has_products else 1.0
    total: dict[str, float] = dict.fromkeys(RESOURCES, 0.0)
    for (name, rank), seconds in _path_seconds(timeline, first, last).items():
        for resource, share in _shares(tasks[name], rank, tasks[name].flops / peak, calls.get(name, 0.0)).items():
            total[resource] += float(seconds * share / (last - first))
    return total


def latency_seconds(candidate: Candidate) -> float:
    """Sum of the latencies of a step's messages, on the lane where it is largest."""
    seconds_by_lane: dict[str, float] = defaultdict(float)
    tasks = steps.stage_tasks(candidate.problem, candidate.placed, candidate.loads)
    for stage in steps.required_stages(candidate.problem, candidate.loads, candidate.ids_after):
        for leaf in stage.body or (stage,):
            seconds_by_lane[leaf.lane] += tasks[leaf.name].latency_seconds
    return max(seconds_by_lane.values())


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


def _path_seconds(timeline: Timeline, first: int, last: int) -> dict[tuple[str, int], float]:
    """Seconds on the critical path by stage and rank, between the ends of steps `first` and `last`."""
    ends: dict[int, float] = defaultdict(float)
    by_rank: dict[int, list[Event]] = defaultdict(list)
    arrivals: dict[tuple[str, int], Event] = {}  # of a collective, on the rank that reaches it last
    for event in timeline.events:
        ends[event.step] = max(ends[event.step], event.end)
        key = event.name, event.step
        if event.kind == "collective" and (key not in arrivals or event.start > arrivals[key].start):
            arrivals[key] = event
        if event.end - event.start > ROUNDING_SECONDS:  # a shorter event would be its own predecessor, without end
            by_rank[event.rank].append(event)
    sorted_events = {rank: sorted(events, key=lambda event: event.end) for rank, events in by_rank.items()}
    ends_by_rank = {rank: [event.end for event in events] for rank, events in sorted_events.items()}
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    now = ends[last]
    event = next(e for e in timeline.events if e.end == now and e.step == last)
    while now > ends[first]:
        event = arrivals.get((event.name, event.step), event)
        start = max(event.start, ends[first])
        seconds[event.name, event.rank] += max(0.0, now - start)
        now = min(now, start)
        index = bisect_right(ends_by_rank[event.rank], event.start + ROUNDING_SECONDS) - 1
        if index < 0:
            break
        event = sorted_events[event.rank][index]
    return seconds
