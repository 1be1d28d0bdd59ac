"""The step of a pipeline: the calls of each rank, in the order in which the runtime runs them, and their prices.

Each chunk is priced as a model of its own: the blocks between two cuts, at the size of a micro-batch, on the ranks that
have the chunk. `rank_stages`, `rank_schedule` and `CallOrder` give the calls; a chunk's passes have the bodies of the
planner where gradients are reduced or blocks are sharded.

Shape legend: R ranks (RR: from, to).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from shardwright.planner.chunks import (
    blocks_problem,
    boundary_bytes,
    chunk_blocks,
    pipeline_of,
    ranks_by_stage,
    skeleton_plan,
)
from shardwright.planner.price import overheads
from shardwright.planner.price.axis_groups import AxisGroups, connecting_level, message_links, send_cost
from shardwright.planner.price.primitives import collective_slowdown, compute_slowdown
from shardwright.planner.problem import Problem
from shardwright.planner.step import block_stages, block_tasks, traffic
from shardwright.planner.step.rank_calls import RankCalls, Task, call_dependencies, expand_calls
from shardwright.planner.step.stages import REDUCED_SLOTS
from shardwright.spec.calls import Call, without_leads
from shardwright.spec.lanes import DENSE, MAIN
from shardwright.spec.pipeline import BACKWARD, FORWARD, Chunk, rank_chunks, rank_schedule, rank_stages
from shardwright.spec.plan import Stage
from shardwright.spec.stage_checks import is_persistent
from shardwright.spec.wire import REQUEST_HEADER_BYTES

ONE_WAY = 2  # a message slows computation half as much as an exchange of its bytes, which go both ways


def pipeline_calls(
    problem: Problem, num_steps: int, accumulate: int = 1, *, one_replica: bool = False, overlap: bool = True
) -> list[RankCalls]:
    """What each rank does in these steps, of `accumulate` batches each.

    `one_replica`: only the ranks at the first position of each pipeline rank. The others do the same at the same time,
    so the messages of all replicas share the links.
    """
    stages = ranks_by_stage(problem)
    simulated = [ranks[0] for ranks in stages] if one_replica else sorted(rank for ranks in stages for rank in ranks)
    numbers = {rank: number for number, rank in enumerate(simulated)}
    by_rank: dict[int, RankCalls] = {}
    for index, ranks in enumerate(stages):
        chunks = rank_chunks(pipeline_of(problem), len(stages), index)
        calls, tasks = (
            _calls_of(problem, chunks, ranks, num_steps, accumulate, overlap),
            _tasks_of(problem, chunks, ranks),
        )
        dependencies = call_dependencies(calls)
        for rank in (rank for rank in ranks if rank in numbers):
            own = tasks | _message_tasks(problem, chunks, stages, ranks.index(rank), one_replica)
            own = {name: _renumber_ranks(task, numbers) for name, task in own.items()}
            by_rank[rank] = RankCalls(calls, own, dependencies)
    return [by_rank[rank] for rank in simulated]


def pipeline_traffic(problem: Problem) -> np.ndarray:
    """Bytes of the messages and of the collectives of gradients in a step, from rank to rank."""
    return message_traffic(problem) + gradient_traffic(problem)


def message_traffic(problem: Problem) -> np.ndarray:
    """Bytes of activations and of their gradients in a step, from rank to rank."""
    num = problem.cluster.num_ranks
    total_RR = np.zeros((num, num))
    for own in pipeline_calls(problem, 1):
        for call, task in zip(own.calls, own.tasks, strict=True):
            if task.message and task.ranks is not None and not call.stage.writes:
                total_RR[task.ranks] += task.bytes_
    return total_RR


def gradient_traffic(problem: Problem) -> np.ndarray:
    """Bytes of the collectives of gradients in a step, from rank to rank."""
    num, stages = problem.cluster.num_ranks, ranks_by_stage(problem)
    total_RR = np.zeros((num, num))
    for index, ranks in enumerate(stages):
        for chunk in rank_chunks(pipeline_of(problem), len(stages), index):
            total_RR += traffic.dense_traffic(_chunk_problem(problem, chunk, ranks))
    return total_RR


# Calls


def _calls_of(
    problem: Problem, chunks: Sequence[Chunk], ranks: Sequence[int], num_steps: int, accumulate: int, overlap: bool
) -> list[Call]:
    plan, micro_batches = skeleton_plan(problem), accumulate * pipeline_of(problem).micro_batches
    stages = _add_bodies(rank_stages(plan, ranks[0]), problem, chunks, ranks)
    stages = stages if overlap else without_leads(stages)
    schedule = rank_schedule(plan, ranks[0], micro_batches, overlap=overlap)
    return expand_calls(stages, num_steps, micro_batches, schedule)


def _add_bodies(
    stages: Sequence[Stage], problem: Problem, chunks: Sequence[Chunk], ranks: Sequence[int]
) -> tuple[Stage, ...]:
    """The stages, with the bodies of those passes in which gradients are reduced or blocks are sharded."""
    with_body: dict[str, Stage] = {}
    by_name = {stage.name: stage for stage in stages}
    for chunk in chunks:
        own = _chunk_problem(problem, chunk, ranks)
        forward, backward = by_name[f"{FORWARD}{chunk.suffix}"], by_name[f"{BACKWARD}{chunk.suffix}"]
        if block_stages.expands_blocks(own):
            bodies = block_stages.stage_bodies(own)
            with_body[forward.name] = replace(forward, body=_fit_forward(bodies[0], forward))
            with_body[backward.name] = replace(backward, body=_fit_backward(bodies[1], backward, chunk))
        elif own.sample_groups.size > 1:
            with_body[backward.name] = replace(backward, body=_reduced_backward(backward, chunk))
    parts = [part for stage in with_body.values() for part in stage.body]
    reduced = tuple(dict.fromkeys(slot for part in parts for slot in part.writes if slot.startswith("reduced")))
    step = by_name["step"]
    with_body["step"] = replace(step, reads=(*step.reads, *(slot for slot in reduced if slot not in step.reads)))
    return tuple(with_body.get(stage.name, stage) for stage in stages)


def _fit_forward(body: Sequence[Stage], stage: Stage) -> tuple[Stage, ...]:
    """The body of the forward pass of a whole model, between the inputs and the outputs of a chunk's stage."""
    inputs = tuple(slot for slot in stage.reads if not is_persistent(slot))
    return tuple(
        replace(
            part,
            reads=_replace_slots(part.reads, {"batch": inputs}),
            writes=_replace_slots(part.writes, {"logits": stage.writes, "loss": ()}),
        )
        for part in body
    )


def _fit_backward(body: Sequence[Stage], stage: Stage, chunk: Chunk) -> tuple[Stage, ...]:
    """The body of the backward pass of a whole model, between the inputs and the outputs of a chunk's stage."""
    reduced = {slot: (f"{slot}{chunk.suffix}",) for slot in REDUCED_SLOTS}
    gradients = tuple(slot for slot in stage.writes if not slot.startswith("reduced"))
    last = [part for part in body if part.lane == MAIN][-1]
    return tuple(
        replace(
            part,
            reads=_replace_slots(part.reads, {"loss": stage.reads}),
            writes=(*_replace_slots(part.writes, reduced), *(gradients if part is last else ())),
        )
        for part in body
    )


def _reduced_backward(stage: Stage, chunk: Chunk) -> tuple[Stage, ...]:
    """A backward pass, and the reduction of the gradients that the micro-batches of the step have accumulated."""
    reduced, sums = f"reduced{chunk.suffix}", f"sums{chunk.suffix}"
    others = tuple(slot for slot in stage.writes if slot != reduced)
    return (
        replace(stage, writes=(*others, sums)),
        Stage(f"reduce{chunk.suffix}", DENSE, (sums,), (reduced,), per="step"),
    )


def _replace_slots(slots: Sequence[str], replacements: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(new for slot in slots for new in replacements.get(slot, (slot,)))


# Tasks


def _chunk_problem(problem: Problem, chunk: Chunk, ranks: Sequence[int]) -> Problem:
    return blocks_problem(problem, chunk_blocks(problem.workload, chunk), ranks)


def _tasks_of(problem: Problem, chunks: Sequence[Chunk], ranks: Sequence[int]) -> dict[str, Task]:
    """The tasks of the ranks with these chunks, except messages."""
    device, blocks = (
        problem.cluster.device,
        [block for chunk in chunks for block in chunk_blocks(problem.workload, chunk)],
    )
    rank_problem = blocks_problem(problem, blocks, ranks)
    calls = overheads.stage_overhead_seconds(device, 0, rank_problem.sample_groups.size - 1, 0)
    tasks = {
        "read": Task(kind="read"),
        "to_device": Task(kind="copy"),
        "request": Task(seconds=calls.get("request", 0.0)),
        "lengths": traffic.even_all_to_all_task(problem, REQUEST_HEADER_BYTES * problem.cluster.num_ranks),
        "weigh": Task(),
        "step": Task(seconds=block_stages.optimizer_seconds(rank_problem) + calls.get("step", 0.0)),
        "emit": Task(seconds=calls.get("emit", 0.0)),
    }
    for chunk in chunks:
        own = _chunk_problem(problem, chunk, ranks)
        if block_stages.expands_blocks(own):
            tasks |= block_stages.body_tasks(own, 0.0, 0.0)
            continue
        blocks = own.blocks
        reduced_bytes = block_tasks.total_parameter_bytes(blocks)
        tasks |= {
            f"{FORWARD}{chunk.suffix}": block_tasks.pass_task(own, blocks, "forward").lengthen(calls.get("top", 0.0)),
            f"{BACKWARD}{chunk.suffix}": block_tasks.backward_task(own, blocks).lengthen(
                calls.get("top.backward", 0.0)
            ),
            f"reduce{chunk.suffix}": traffic.gradient_reduce_task(own, reduced_bytes),
        }
    return tasks


def _message_tasks(
    problem: Problem, chunks: Sequence[Chunk], stages: Sequence[Sequence[int]], position: int, one_replica: bool
) -> dict[str, Task]:
    """The messages of the rank at a position of a pipeline rank that has these chunks."""
    num, num_chunks, tasks = len(stages), len(pipeline_of(problem).blocks), dict[str, Task]()
    task = partial(_message_task, problem, one_replica)
    for chunk in chunks:
        here, suffix = stages[chunk.number % num][position], chunk.suffix
        before, after = (stages[(chunk.number + offset) % num][position] for offset in (-1, 1))
        if not chunk.is_first:
            bytes_ = round(boundary_bytes(problem, chunk.number))
            tasks[f"receive{suffix}"] = task(f"activations {chunk.number}", before, here, bytes_)
            tasks[f"send.{BACKWARD}{suffix}"] = task(f"gradients {chunk.number}", here, before, bytes_)
        if chunk.number + 1 < num_chunks:
            bytes_ = round(boundary_bytes(problem, chunk.number + 1))
            tasks[f"send{suffix}"] = task(f"activations {chunk.number + 1}", here, after, bytes_)
            tasks[f"receive.{BACKWARD}{suffix}"] = task(f"gradients {chunk.number + 1}", after, here, bytes_)
    return tasks


def _message_task(problem: Problem, one_replica: bool, name: str, source: int, target: int, bytes_: int) -> Task:
    cluster, level = problem.cluster, connecting_level(problem.cluster, source, target)
    pipelines = AxisGroups(cluster, problem.mesh_axes, skeleton_plan(problem).pipeline_axes)
    num = pipelines.num_on_link(level) if one_replica else 1
    cost, latency = send_cost(cluster, source, target, max(1, bytes_)), send_cost(cluster, source, target, 1).seconds
    seconds = max(cost.seconds, latency + num * (cost.seconds - latency)) if bytes_ else 0.0
    exchange = cluster, "all_to_all", (level.name,), max(1, bytes_)  # was measured together with products
    return Task(
        seconds=seconds,
        ranks=(source, target),
        is_collective=True,
        message=name,
        levels=(level.name,),
        links=message_links(cluster, source, target),
        link_share=min(1.0, num * cost.link_share * cost.seconds / seconds) if seconds else 1.0,
        compute_slowdown=compute_slowdown(*exchange) / ONE_WAY,
        slowdown=collective_slowdown(*exchange) / ONE_WAY,
        kind="message",
        bytes_=bytes_,
        link_seconds=seconds,
        latency_seconds=min(seconds, latency),
    )


def _renumber_ranks(task: Task, numbers: Mapping[int, int]) -> Task:
    """The task among the ranks that are simulated."""
    if task.ranks is None:
        return task
    return replace(task, ranks=tuple(numbers[rank] for rank in task.ranks if rank in numbers))
