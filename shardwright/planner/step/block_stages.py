"""The dense part block by block: the stages inside forward and backward, and what each takes.

lane main     load, forward and backward of each block; what arrives of vectors before the first that needs them, and
              what leaves behind its backward pass
lane gather   where weights are cut, those of a block before its turn, forward and backward, those of `ahead` more
              beside it; a block that had its turn makes room. The last one stays whole between its two turns
lane scatter  behind a block's backward pass its gradient, added up to each rank's part
lane dense    that over the replicas, once the next block's backward pass has ended; where nothing is cut, gradients as
              soon as there are enough of them for a bucket
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

from shardwright.planner.memory.dense_model import needs_unshard
from shardwright.planner.price import overheads, primitives
from shardwright.planner.problem import Problem
from shardwright.planner.step import block_tasks, traffic
from shardwright.planner.step.simulate import Task
from shardwright.planner.step.stages import BACKWARD_BODY, FORWARD_BODY, REDUCED_SLOTS
from shardwright.spec.plan import Stage
from shardwright.spec.workload import Block

CollectivePhase = tuple[str, tuple[str, ...], int, float]  # a collective, its levels, its bytes and its seconds
BUCKET_BYTES = 1 << 20  # as dense/replicated.py has them
WEIGHT_PASSES = 3  # of the optimizer over dense parameters: gradient and weight read, weight written
MOMENT_PASSES = 4  # over what it keeps of them: two moments read and written
# Small calls of torch, with the Python around them, that a block takes beside its own, with what the thread waits for
# ranks of its host that come later: by a block's forward and backward turns in the lab, 2 hosts x 2 ranks.
COLLECTIVE_CALLS = MappingProxyType({"gather": 300, "scatter": 500, "reduce": 200})


def expands_blocks(problem: Problem) -> bool:
    """Whether blocks are played one by one: where one's turn moves weights, or gradients beside another's."""
    if not problem.expand_blocks:
        return False
    moving = any(needs_unshard(problem, block) for block in problem.workload.blocks)
    return moving or (len(_buckets(problem)) > 2 and problem.cluster.num_ranks > 1)


def stage_bodies(problem: Problem) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """What is inside forward and backward."""
    if not expands_blocks(problem):
        return FORWARD_BODY, BACKWARD_BODY
    return tuple(_forward(problem)), _with_end(tuple(_backward(problem)))


def extra_lanes(problem: Problem) -> tuple[str, ...]:
    """That no other step has."""
    return ("gather", "scatter") if any(needs_unshard(problem, one) for one in problem.workload.blocks) else ()


def body_tasks(problem: Problem, vector_seconds: float, gradient_seconds: float) -> dict[str, Task]:
    """`arrive`, `leave`: seconds of handling vectors, and gradients of these."""
    found = {"arrive": Task(seconds=vector_seconds), "leave": Task(seconds=gradient_seconds)}
    for block in problem.workload.blocks:
        found[f"forward {block.name}"] = _with_calls(
            problem, block, block_tasks.pass_task(problem, [block], "forward"), "gather"
        )
        back = _with_calls(problem, block, block_tasks.backward_task(problem, [block]), "gather", "scatter", "reduce")
        found[f"backward {block.name}"] = back
        found[f"load {block.name}"] = Task(seconds=_load_seconds(problem, block), kind="copy")
        found[f"gather {block.name}"] = _gather(problem, block)
        found[f"scatter {block.name}"] = _scatter(problem, block)
        if needs_unshard(problem, block):
            found[f"reduce {block.name}"] = _reduce(problem, block)
    buckets = _buckets(problem).items()
    return found | {
        f"reduce {name}": traffic.gradient_reduce_task(problem, bytes_, sustained=True) for name, bytes_ in buckets
    }


def optimizer_seconds(problem: Problem) -> float:
    """Of a step of the dense optimizer on a rank's own part, and of gradients on their way to a slower tier."""
    tiers, near, far = problem.cluster.device.tiers, 0.0, 0.0
    for block in problem.workload.blocks:
        own = block.parameter_bytes / problem.num_shards(block)
        near, far = (near, far + own) if block.name in problem.dense.offload else (near + own, far)
    passes = WEIGHT_PASSES + MOMENT_PASSES * problem.moment_share
    seconds = passes * near / tiers[0].read_bytes_per_second
    if far:
        moved = primitives.copy_cost(problem.cluster.device, round(far), tiers[0].name, tiers[1].name).seconds
        seconds += passes * far / tiers[1].read_bytes_per_second + moved
    return seconds


# Stages


def _order(problem: Problem) -> tuple[list[Block], list[Block]]:
    """Below the vectors, and above; where none needs them they are waited for by all."""
    low = [block for block in problem.workload.blocks if not block.needs_vectors]
    top = [block for block in problem.workload.blocks if block.needs_vectors]
    return (low, top) if top else ([], low)


def _buckets(problem: Problem) -> dict[str, int]:
    """Bytes of gradients that are summed whole, by the block in whose backward pass they are enough, or the last."""
    low, top = _order(problem)
    found: dict[str, int] = {}
    waiting, last = 0, ""
    for block in (*reversed(top), *reversed(low)):
        if block.parameter_bytes and not needs_unshard(problem, block):
            waiting, last = waiting + block.parameter_bytes, block.name
            if waiting >= BUCKET_BYTES:
                found[last], waiting = waiting, 0
    return found | ({last: waiting} if waiting else {})


def _forward(problem: Problem) -> Iterator[Stage]:
    low, top = _order(problem)
    order = [*low, *top]
    units = [block for block in order if needs_unshard(problem, block)]
    begun, before = 0, "batch"
    for block in order:
        if top and block is top[0]:
            yield Stage("arrive", "main", ("batch", before, "vectors"), ("arrived",))
            before = "arrived"
        whole: tuple[str, ...] = ("state.dense",)
        if block in units:
            end = min(len(units), units.index(block) + 1 + problem.dense.ahead)
            for at in range(begun, end):
                yield from _gathered(problem, units, at, "out", "whole")
            begun, whole = end, (f"{block.name}.whole",)
        last = ("logits", "loss") if block is order[-1] else ()
        yield Stage(f"forward {block.name}", "main", (before, *whole), (f"{block.name}.out", *last))
        before = f"{block.name}.out"


def _gathered(problem: Problem, units: Sequence[Block], at: int, freed: str, made: str) -> Iterator[Stage]:
    """In the place of the one that had its turn `ahead` turns before."""
    block, before = units[at], at - 1 - problem.dense.ahead
    room = (f"{units[before].name}.{freed}",) if before >= 0 else ()
    if block.name in problem.dense.offload and problem.cluster.device.kind == "cpu":
        yield Stage(f"load {block.name}", "main", ("state.dense", *room), (f"{block.name}.loaded.{made}",))
        room = (*room, f"{block.name}.loaded.{made}")
    yield Stage(f"gather {block.name}", "gather", ("state.dense", *room), (f"{block.name}.{made}",))


def _backward(problem: Problem) -> Iterator[Stage]:
    low, top = _order(problem)
    order = [*reversed(top), *reversed(low)]
    units = [block for block in order if needs_unshard(problem, block)]
    buckets = _buckets(problem)
    begun, before = 1, "loss"  # the last of the forward pass is whole
    waiting: Block | None = None
    for block in order:
        whole: tuple[str, ...] = ("state.dense",)
        if block in units:
            end = min(len(units), units.index(block) + 1 + problem.dense.ahead)
            for at in range(begun, end):
                yield from _gathered(problem, units, at, "gradient", "again")
            begun, whole = max(begun, end), (f"{block.name}.{'whole' if block is units[0] else 'again'}",)
        reads = (before, *whole)
        yield Stage(f"backward {block.name}", "main", reads, (f"{block.name}.gradient", f"{block.name}.sum"))
        before = f"{block.name}.gradient"
        if block in units:
            yield from _reduced(problem, waiting)
            yield from _scattered(problem, block)
            waiting = block
        elif block.name in buckets and problem.cluster.num_ranks > 1:
            yield Stage(f"reduce {block.name}", "dense", (f"{block.name}.sum",), (f"{block.name}.reduced",))
        if top and block is top[0]:
            yield Stage("leave", "main", (before,), ("gradients.vectors",))
            yield next(one for one in BACKWARD_BODY if one.name == "gradients")
    yield from _reduced(problem, waiting)


def _scattered(problem: Problem, block: Block) -> Iterator[Stage]:
    if problem.shard_levels:
        yield Stage(f"scatter {block.name}", "scatter", (f"{block.name}.sum",), (f"{block.name}.scattered",))


def _reduced(problem: Problem, block: Block | None) -> Iterator[Stage]:
    """Over replicas, where there are any."""
    if block is not None and traffic.replica_levels(problem):
        made = "scattered" if problem.shard_levels else "sum"
        yield Stage(f"reduce {block.name}", "dense", (f"{block.name}.{made}",), (f"{block.name}.reduced",))


def _with_end(body: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """What the optimizer waits for is written by the last of each lane that sums."""
    names = {stage.lane: stage.name for stage in body if stage.lane in ("scatter", "dense")}
    names = names or {"main": body[-1].name}
    ends = list(names.values())
    slots = {ends[0]: REDUCED_SLOTS[:1], ends[-1]: REDUCED_SLOTS[1:]} if len(ends) > 1 else {ends[0]: REDUCED_SLOTS}
    return tuple(replace(one, writes=(*one.writes, *slots.get(one.name, ()))) for one in body)


# What they take


def _gather(problem: Problem, block: Block) -> Task:
    """From a slower tier, on a GPU; then over the ranks of equal place of other hosts, then inside each."""
    loaded = _load_seconds(problem, block) if problem.cluster.device.kind == "cuda" else 0.0
    found = _over_levels(problem, "all_gather", block.parameter_bytes) if needs_unshard(problem, block) else Task()
    return replace(found, seconds=found.seconds_on(0) + loaded)


def _scatter(problem: Problem, block: Block) -> Task:
    return _over_levels(problem, "reduce_scatter", block.parameter_bytes) if needs_unshard(problem, block) else Task()


def _over_levels(problem: Problem, op: str, bytes_: int) -> Task:
    names, phases, moved = tuple(level.name for level in problem.shard_levels), list[CollectivePhase](), 0
    for each, levels, size in traffic.collectives_by_level(problem, op, bytes_):
        found = primitives.sustained_cost(problem.cluster, each, levels, size)
        phases.append((each, levels, size, found.seconds))
        moved += found.bytes_
    return _joint(problem, names, phases, moved) if phases else Task()


def _reduce(problem: Problem, block: Block) -> Task:
    names = traffic.replica_levels(problem)
    if not names:
        return Task()
    bytes_ = max(1, traffic.gradient_wire_bytes(problem, block.parameter_bytes / problem.num_shards(block)))
    found = primitives.sustained_cost(problem.cluster, "all_reduce", names, bytes_)
    return _joint(problem, names, [("all_reduce", names, bytes_, found.seconds)], found.bytes_)


def _joint(problem: Problem, names: tuple[str, ...], phases: Sequence[CollectivePhase], moved: int) -> Task:
    """One task of phases, each of which takes its part from computation beside it. Two are under way at a time, one in
    each phase: the longest counts."""
    seconds = max(one for *_, one in phases)
    taken = sum(
        primitives.compute_slowdown(problem.cluster, op, levels, size) * one for op, levels, size, one in phases
    )
    op, levels, _, longest = max(phases, key=lambda phase: phase[-1])
    return Task(
        seconds=seconds,
        is_collective=True,
        levels=names,
        compute_slowdown=taken / seconds if seconds else 0.0,
        bytes_=moved,
        link_seconds=seconds,
        latency_seconds=min(longest, primitives.collective_cost(problem.cluster, op, levels, 1).seconds),
    )


def _load_seconds(problem: Problem, block: Block) -> float:
    """Of a rank's own part from a slower tier."""
    if block.name not in problem.dense.offload:
        return 0.0
    tiers, own = problem.cluster.device.tiers, round(block.parameter_bytes / problem.num_shards(block))
    return primitives.copy_cost(problem.cluster.device, own, tiers[1].name, tiers[0].name).seconds


def _with_calls(problem: Problem, block: Block, task: Task, *what: str) -> Task:
    """With what each of these takes of the thread, where there are ranks for it."""
    sent = {"gather": problem.shard_levels, "scatter": problem.shard_levels, "reduce": traffic.replica_levels(problem)}
    num = sum(COLLECTIVE_CALLS[one] for one in what if needs_unshard(problem, block) and sent[one])
    return replace(task, seconds=task.seconds_on(0) + num * overheads.op_overhead_seconds(problem.cluster.device))
