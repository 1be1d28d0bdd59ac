"""The dense model block by block: the stages inside forward and backward, and the task of each.

lane main     load, forward and backward of each block, and its split experts (expert_tasks.py); `arrive` places vectors
              before the first block that needs them, `leave` encodes their gradients after that block's backward
lane gather   all-gather of a sharded block's parameters over its shard levels before its forward and its backward,
              `ahead` blocks in advance and overlapped with them. A block is resharded after each of its passes; the
              last block stays unsharded between its forward and its backward
lane scatter  reduce-scatter of a sharded block's gradients over its shard levels, after its backward
lane dense    HSDP: all-reduce of these gradients over the replicas, after the next block's backward; all-reduce of the
              gradients of unsharded blocks as soon as they fill a bucket

Offloaded blocks count as sharded here, even if every rank has all their parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.planner.memory.dense_model import needs_unshard
from shardwright.planner.price import overheads, primitives
from shardwright.planner.price.axis_groups import AxisGroups, collective_links, group_cost
from shardwright.planner.price.primitives import Cost
from shardwright.planner.problem import Problem
from shardwright.planner.step import block_tasks, expert_tasks, traffic
from shardwright.planner.step.rank_calls import Task
from shardwright.planner.step.stages import (
    BACKWARD_BODY,
    DENSE_BACKWARD_BODY,
    DENSE_FORWARD_BODY,
    FORWARD_BODY,
    REDUCED_SLOTS,
)
from shardwright.spec.lanes import DENSE, GATHER, MAIN, SCATTER, SHARD_LANES
from shardwright.spec.plan import Stage
from shardwright.spec.wire import MAX_UNNAMED_BUCKETS, gradient_buckets
from shardwright.spec.workload import Block

CollectivePhase = tuple[str, AxisGroups, int, Cost]  # collective, groups, bytes
WEIGHT_PASSES = 3  # of the dense optimizer over parameters: gradient and weight read, weight written
MOMENT_PASSES = 4  # over its moments: two, read and written


def expands_blocks(problem: Problem) -> bool:
    """Whether every block is simulated: if some blocks are sharded or have split experts, or gradients fill several
    buckets."""
    if any(map(problem.experts_of, problem.blocks)):
        return True
    if not problem.expand_blocks:
        return False
    is_sharded = any(needs_unshard(problem, block) for block in problem.blocks)
    return is_sharded or (len(_buckets(problem)) > MAX_UNNAMED_BUCKETS and problem.sample_groups.size > 1)


def stage_bodies(problem: Problem) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """The stages inside forward and inside backward, in issue order."""
    if not expands_blocks(problem):
        has_tables = bool(problem.workload.tables)
        return (FORWARD_BODY, BACKWARD_BODY) if has_tables else (DENSE_FORWARD_BODY, DENSE_BACKWARD_BODY)
    return tuple(_forward_stages(problem)), _write_reduced_slots(tuple(_backward_stages(problem)))


def extra_lanes(problem: Problem) -> tuple[str, ...]:
    """Lanes that only steps with sharded blocks have."""
    return SHARD_LANES if any(needs_unshard(problem, block) for block in problem.blocks) else ()


def body_tasks(problem: Problem, vector_seconds: float, gradient_seconds: float) -> dict[str, Task]:
    """The task of each body stage. `vector_seconds`, `gradient_seconds`: of `arrive` and of `leave`."""
    tasks = {"arrive": Task(seconds=vector_seconds), "leave": Task(seconds=gradient_seconds)}
    for block in problem.blocks:
        forward, backward = (
            block_tasks.pass_task(problem, [block], "forward"),
            block_tasks.backward_task(problem, [block]),
        )
        if problem.experts_of(block):
            forward, backward = expert_tasks.without_experts(problem, block, forward, backward)
            tasks |= expert_tasks.exchange_tasks(problem, block)
        tasks[f"forward {block.name}"] = _add_overhead(problem, block, forward, "gather")
        tasks[f"backward {block.name}"] = _add_overhead(problem, block, backward, "gather", "scatter", "reduce")
        tasks[f"load {block.name}"] = Task(seconds=_load_seconds(problem, block), kind="copy")
        tasks[f"gather {block.name}"] = _gather_task(problem, block)
        tasks[f"scatter {block.name}"] = _shard_task(problem, block, "reduce_scatter")
        if needs_unshard(problem, block):
            reduce, experts = _replica_reduce_task(problem, block), traffic.expert_reduce_task(problem, [block])
            has_replicas = bool(problem.replica_groups.levels)
            tasks[f"reduce {block.name}"] = reduce.lengthen(experts.seconds_on(0)) if has_replicas else experts
    by_name = {block.name: block for block in problem.blocks}
    for name, blocks in _buckets(problem).items():
        bytes_, members = sum(by_name[block].parameter_bytes for block in blocks), [by_name[block] for block in blocks]
        tasks[f"reduce {name}"] = traffic.gradient_reduce_task(problem, bytes_, members, sustained=True)
    return tasks


def optimizer_seconds(problem: Problem) -> float:
    """Seconds of a dense optimizer step on a rank's shards, with the copies of offloaded blocks' gradients."""
    tiers, fast, slow = problem.cluster.device.tiers, 0.0, 0.0
    for block in problem.blocks:
        shard_bytes = block.parameter_bytes / problem.num_shards(block)
        fast, slow = (fast, slow + shard_bytes) if block.name in problem.dense.offload else (fast + shard_bytes, slow)
    fast += problem.own_expert_bytes(problem.blocks)
    passes = WEIGHT_PASSES + MOMENT_PASSES * problem.moment_share
    seconds = passes * fast / tiers[0].read_bytes_per_second
    if slow:
        time = primitives.copy_cost(problem.cluster.device, round(slow), tiers[0].name, tiers[1].name).seconds
        seconds += passes * slow / tiers[1].read_bytes_per_second + time
    return seconds


# Stages


def _split_blocks(problem: Problem) -> tuple[list[Block], list[Block]]:
    """Blocks that need no vectors (bottom), and the others (top); if no block needs vectors, all count as top."""
    bottom, top = block_tasks.split_blocks(problem)
    return (bottom, top) if top else ([], bottom)


def _first_with_vectors(problem: Problem) -> Block | None:
    """The first block that needs vectors; None in a model without tables."""
    _, top = _split_blocks(problem)
    return top[0] if top and problem.workload.tables else None


def _buckets(problem: Problem) -> dict[str, tuple[str, ...]]:
    """The blocks whose gradients are all-reduced together, by bucket.

    The key is the block whose backward fills the bucket, or the last block.
    """
    bottom, top = _split_blocks(problem)
    bytes_ = {b.name: b.parameter_bytes for b in (*reversed(top), *reversed(bottom)) if not needs_unshard(problem, b)}
    return gradient_buckets(bytes_.items())


def _forward_stages(problem: Problem) -> Iterator[Stage]:
    """Stages inside forward. `source`: the slot that the next block reads."""
    bottom, top = _split_blocks(problem)
    order, first = [*bottom, *top], _first_with_vectors(problem)
    sharded = [block for block in order if needs_unshard(problem, block)]
    start, source = 0, "batch"
    for block in order:
        if block is first:
            yield Stage("arrive", MAIN, ("batch", source, "vectors"), ("arrived",))
            source = "arrived"
        weights: tuple[str, ...] = ("state.dense",)
        if block in sharded:
            end = min(len(sharded), sharded.index(block) + 1 + problem.dense.ahead)
            for index in range(start, end):
                yield from _gather_stages(problem, sharded, index, "out", "whole")
            start, weights = end, (f"{block.name}.whole",)
        outputs = (f"{block.name}.out", *(("logits", "loss") if block is order[-1] else ()))
        has_experts = bool(problem.experts_of(block))
        written = (f"{block.name}.local",) if has_experts else outputs
        yield from expert_tasks.prefetch_stages(problem, block, source)
        yield Stage(f"forward {block.name}", MAIN, (source, *weights), written)
        if has_experts:
            yield from expert_tasks.exchange_stages(problem, block, written[0], outputs)
        source = outputs[0]


def _gather_stages(problem: Problem, sharded: Sequence[Block], index: int, freed: str, output: str) -> Iterator[Stage]:
    """All-gather of a block into slot `<block>.<output>`; on a CPU an offloaded shard is loaded first.

    It reuses the memory of the block `ahead + 1` before, and so waits for that block's slot `freed`.
    """
    block, previous = sharded[index], index - 1 - problem.dense.ahead
    waits = (f"{sharded[previous].name}.{freed}",) if previous >= 0 else ()
    if block.name in problem.dense.offload and problem.cluster.device.kind == "cpu":
        yield Stage(f"load {block.name}", MAIN, ("state.dense", *waits), (f"{block.name}.loaded.{output}",))
        waits = (*waits, f"{block.name}.loaded.{output}")
    yield Stage(f"gather {block.name}", GATHER, ("state.dense", *waits), (f"{block.name}.{output}",))


def _backward_stages(problem: Problem) -> Iterator[Stage]:
    """Stages inside backward. `source`: the slot that the next block reads."""
    bottom, top = _split_blocks(problem)
    order, first = [*reversed(top), *reversed(bottom)], _first_with_vectors(problem)
    sharded = [block for block in order if needs_unshard(problem, block)]
    buckets = _buckets(problem)
    start, source = 1, "loss"  # the last block of the forward pass is still unsharded
    unreduced: Block | None = None
    for block in order:
        weights: tuple[str, ...] = ("state.dense",)
        if block in sharded:
            end = min(len(sharded), sharded.index(block) + 1 + problem.dense.ahead)
            for index in range(start, end):
                yield from _gather_stages(problem, sharded, index, "gradient", "again")
            start, weights = max(start, end), (f"{block.name}.{'whole' if block is sharded[0] else 'again'}",)
        if problem.experts_of(block):
            returned = (f"{block.name}.returned",)
            yield from expert_tasks.exchange_stages(problem, block, source, returned, backward=True)
            (source,) = returned
        reads = (source, *weights)
        yield Stage(f"backward {block.name}", MAIN, reads, (f"{block.name}.gradient", f"{block.name}.sum"))
        source = f"{block.name}.gradient"
        if block in sharded:
            yield from _reduce_stages(problem, unreduced)
            if problem.shard_levels:
                slot = f"{block.name}.scattered"
                yield Stage(f"scatter {block.name}", SCATTER, (f"{block.name}.sum",), (slot,))
            unreduced = block
        elif block.name in buckets and problem.sample_groups.size > 1:
            yield _reduce_stage(block, f"{block.name}.sum")
        if block is first:
            yield Stage("leave", MAIN, (source,), ("gradients.vectors",))
            yield next(stage for stage in BACKWARD_BODY if stage.name == "gradients")
    yield from _reduce_stages(problem, unreduced)


def _reduce_stages(problem: Problem, block: Block | None) -> Iterator[Stage]:
    """All-reduce of a block's gradients, or only of its experts' gradients, over their replicas, if there are any."""
    if block is None:
        return
    has_replicas = problem.expert_replicas is not None and problem.experts_of(block)
    if problem.replica_groups.levels or has_replicas:
        source = "scattered" if problem.shard_levels else "sum"
        yield _reduce_stage(block, f"{block.name}.{source}")


def _reduce_stage(block: Block, source: str) -> Stage:
    """All-reduce of the gradients that the micro-batches of a step have accumulated."""
    return Stage(f"reduce {block.name}", DENSE, (source,), (f"{block.name}.reduced",), per="step")


def _write_reduced_slots(body: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The same stages, but the last on each reducing lane writes the slots that the optimizer step reads."""
    last_by_lane = {stage.lane: stage.name for stage in body if stage.lane in (SCATTER, DENSE)}
    last_by_lane = last_by_lane or {MAIN: body[-1].name}
    last = list(last_by_lane.values())
    slots = {last[0]: REDUCED_SLOTS[:1], last[-1]: REDUCED_SLOTS[1:]} if len(last) > 1 else {last[0]: REDUCED_SLOTS}
    return tuple(replace(stage, writes=(*stage.writes, *slots.get(stage.name, ()))) for stage in body)


# Tasks


def _gather_task(problem: Problem, block: Block) -> Task:
    """All-gather of a block over its shard levels; on a GPU with the load of an offloaded shard."""
    loading = _load_seconds(problem, block) if problem.cluster.device.kind == "cuda" else 0.0
    return _shard_task(problem, block, "all_gather").lengthen(loading)


def _shard_task(problem: Problem, block: Block, op: str) -> Task:
    """A collective of a block over its shard levels, one phase per level; an empty task if it is not sharded."""
    phases, total_bytes = list[CollectivePhase](), 0
    bytes_ = block.parameter_bytes if needs_unshard(problem, block) else 0
    for phase_op, groups, size in traffic.collectives_by_level(problem, op, bytes_):
        cost = group_cost(groups, phase_op, size, sustained=True)
        phases.append((phase_op, groups, size, cost))
        total_bytes += cost.bytes_
    return _overlap_phases(problem.shard_groups, phases, total_bytes) if phases else Task()


def _replica_reduce_task(problem: Problem, block: Block) -> Task:
    """All-reduce of the rank's shard of a block's gradients over the replicas."""
    groups = problem.replica_groups
    if not groups.levels:
        return Task()
    bytes_ = max(1, traffic.gradient_wire_bytes(problem, block.parameter_bytes / problem.num_shards(block)))
    cost = group_cost(groups, "all_reduce", bytes_, sustained=True)
    return _overlap_phases(groups, [("all_reduce", groups, bytes_, cost)], cost.bytes_)


def _overlap_phases(all_groups: AxisGroups, phases: Sequence[CollectivePhase], bytes_: int) -> Task:
    """The phases of a collective as one task that lasts as long as the longest phase.

    Two collectives are in flight at a time, each in another phase. Every phase slows computation down.
    """
    op, groups, _, longest = max(phases, key=lambda phase: phase[-1].seconds)
    task = traffic.collective_task(groups, op, longest.seconds, bytes_, longest.link_share)
    measured = [(groups.cluster, op, groups.level_names, size) for op, groups, size, _ in phases]
    slowed = sum(
        primitives.compute_slowdown(*of) * phase[-1].seconds for of, phase in zip(measured, phases, strict=True)
    )
    beside = max(
        phase[-1].seconds / (1 - primitives.collective_slowdown(*of))
        for of, phase in zip(measured, phases, strict=True)
    )
    return replace(
        task,
        levels=all_groups.level_names,
        links=collective_links(all_groups, all_groups.within),
        compute_slowdown=slowed / longest.seconds if longest.seconds else 0.0,
        slowdown=1 - longest.seconds / beside if beside else 0.0,
    )


def _load_seconds(problem: Problem, block: Block) -> float:
    """Seconds of copying a rank's shard of an offloaded block from the next memory tier."""
    if block.name not in problem.dense.offload:
        return 0.0
    tiers, shard_bytes = problem.cluster.device.tiers, round(block.parameter_bytes / problem.num_shards(block))
    return primitives.copy_cost(problem.cluster.device, shard_bytes, tiers[1].name, tiers[0].name).seconds


def _add_overhead(problem: Problem, block: Block, task: Task, *collectives: str) -> Task:
    """The task with the overhead of these collectives; collectives of a single rank have none."""
    axes = {"gather": problem.shard_levels, "scatter": problem.shard_levels, "reduce": problem.replica_groups.levels}
    issued = [name for name in collectives if needs_unshard(problem, block) and axes[name]]
    return task.lengthen(overheads.collectives_overhead_seconds(problem.cluster.device, issued))
