"""Where the time of a predicted step goes: its critical path, split by resource.

The critical path is walked backward from the end of the last counted step. The predecessor of an event is the one on
the same rank that ended last before the event began; a collective begins on the rank that reaches it last.
The parts add up to the step.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping

from shardwright.planner.price import overheads, roofline
from shardwright.planner.search import Candidate
from shardwright.planner.step import tasks as steps
from shardwright.planner.step.simulate import Task
from shardwright.spec.timeline import Event, Timeline

MEMORY, MATMULS, OP_OVERHEAD = "memory", "products", "small calls of torch"
COPIES, LINKS, LATENCY = "copies between tiers", "links: bytes", "links: latency"
RESOURCES: tuple[str, ...] = (MEMORY, MATMULS, OP_OVERHEAD, COPIES, LINKS, LATENCY)
ROUNDING_SECONDS = 1e-11


def seconds_by_resource(candidate: Candidate) -> dict[str, float]:
    """Seconds of one step by resource, in the order of PARTS; their sum is the predicted step."""
    problem = candidate.problem
    timeline = steps.predict_timeline(problem, candidate.placed, candidate.loads, candidate.ids_after)
    tasks = steps.stage_tasks(problem, candidate.placed, candidate.loads)
    first, last = steps.WARM_STEPS - 1, steps.WARM_STEPS + steps.COUNTED_STEPS - 1
    calls = overheads.stage_overhead_seconds(
        problem.cluster.device,
        len(problem.workload.features),
        problem.cluster.num_ranks - 1,
        len(candidate.placed.row_exchange_tables) + len(candidate.placed.data_parallel_tables),
    )
    peak = (
        roofline.peak_flops_per_second(problem.cluster, problem.precision.matmuls)
        if any(t.flops for t in tasks.values())
        else 1.0
    )
    total: dict[str, float] = dict.fromkeys(RESOURCES, 0.0)
    for (name, rank), seconds in _path_seconds(timeline, first, last).items():
        for part, share in _shares(tasks[name], rank, tasks[name].flops / peak, calls.get(name, 0.0)).items():
            total[part] += float(seconds * share / (last - first))
    return total


def latency_seconds(candidate: Candidate) -> float:
    """Sum of the latencies of a step's messages, on the lane where it is largest."""
    lanes: dict[str, float] = defaultdict(float)
    tasks = steps.stage_tasks(candidate.problem, candidate.placed, candidate.loads)
    for stage in steps.required_stages(candidate.problem, candidate.loads, candidate.ids_after):
        for part in stage.body or (stage,):
            lanes[part.lane] += tasks[part.name].latency_seconds
    return max(lanes.values())


def _shares(task: Task, rank: int, products: float, calls: float) -> Mapping[str, float]:
    """The share of a task's time by resource; the rest of computation is memory."""
    whole = max(task.seconds_on(rank), 1e-300)
    links = min(task.link_seconds, whole)
    latency = min(task.latency_seconds, links)
    products = min(products, whole - links)
    calls = min(calls, whole - links - products)
    rest = COPIES if task.kind == "copy" else MEMORY
    seconds = {LATENCY: latency, LINKS: links - latency, MATMULS: products, OP_OVERHEAD: calls}
    seconds[rest] = whole - links - products - calls
    return {part: one / whole for part, one in seconds.items()}


def _path_seconds(timeline: Timeline, first: int, last: int) -> dict[tuple[str, int], float]:
    """Seconds of each stage and rank on the critical path, between the ends of these two steps."""
    ends: dict[int, float] = defaultdict(float)
    by_rank: dict[int, list[Event]] = defaultdict(list)
    arrivals: dict[tuple[str, int], Event] = {}  # of a collective, on the rank that reaches it last
    for event in timeline.events:
        ends[event.step] = max(ends[event.step], event.end)
        key = event.name, event.step
        if event.kind == "collective" and (key not in arrivals or event.start > arrivals[key].start):
            arrivals[key] = event
        if event.end - event.start > ROUNDING_SECONDS:  # a shorter one would be found before itself, for ever
            by_rank[event.rank].append(event)
    ordered = {rank: sorted(events, key=lambda event: event.end) for rank, events in by_rank.items()}
    times = {rank: [event.end for event in events] for rank, events in ordered.items()}
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    now = ends[last]
    event = next(one for one in timeline.events if one.end == now and one.step == last)
    while now > ends[first]:
        event = arrivals.get((event.name, event.step), event)
        begin = max(event.start, ends[first])
        seconds[event.name, event.rank] += max(0.0, now - begin)
        now = min(now, begin)
        at = bisect_right(times[event.rank], event.start + ROUNDING_SECONDS) - 1
        if at < 0:
            break
        event = ordered[event.rank][at]
    return seconds
