"""The chunks of a pipeline: their blocks, their ranks, and each as a problem of its own."""

from collections.abc import Sequence
from dataclasses import replace

from shardwright.errors import UserError
from shardwright.planner.memory.dense_model import needs_unshard
from shardwright.planner.problem import REST_BLOCK, Problem
from shardwright.planner.step.stages import pipeline_stages
from shardwright.spec.lanes import LANES, PIPELINE_LANES, SHARD_LANES
from shardwright.spec.pipeline import Chunk
from shardwright.spec.plan import Pipeline, Plan
from shardwright.spec.workload import Block, Workload

BLOCKS, FIRST_BLOCK, LAST_BLOCKS = "blocks.", "embed", ("head", REST_BLOCK)


def pipeline_of(problem: Problem) -> Pipeline:
    if problem.pipeline is None:
        raise UserError("the problem has no pipeline")
    return problem.pipeline


def skeleton_plan(problem: Problem) -> Plan:
    """A plan with the problem's axes, pipeline and stages, without what does not change the calls."""
    is_sharded = any(needs_unshard(problem, block) for block in problem.blocks)
    return Plan(
        version=4,
        workload_digest="",
        axes=problem.mesh_axes,
        lanes=(*LANES, *PIPELINE_LANES, *(SHARD_LANES if is_sharded else ())),
        tables=(),
        dense=problem.dense,
        pipeline=pipeline_of(problem),
        stages=pipeline_stages(),
    )


def cut_blocks(workload: Workload) -> list[Block]:
    """The blocks between which a pipeline may cut the model."""
    return [block for block in workload.blocks if block.name.startswith(BLOCKS)]


def uncuttable_reason(workload: Workload) -> str:
    """Why the runtime cannot cut the model into a pipeline; empty if it can."""
    if workload.tables:
        return "it has embedding tables"
    names = [block.name for block in workload.blocks]
    if not cut_blocks(workload):
        return f"it has no blocks to cut between; it needs embed, blocks.0, blocks.1, ... and head, and has {names}"
    unknown = [name for name in names if not name.startswith(BLOCKS) and name not in (FIRST_BLOCK, *LAST_BLOCKS)]
    if unknown:
        return f'its block "{unknown[0]}" belongs to no chunk; allowed: embed, blocks.0, blocks.1, ... and head'
    head = next((block for block in workload.blocks if block.name == "head"), None)
    if head is not None and any(product.k * product.n > head.parameters for product in head.forward_products):
        return "its head multiplies by a weight of another block: give the head its own weight (for GPT: tied=False)"
    return ""


def check_blocks(workload: Workload, pipeline: Pipeline) -> None:
    """Raise if the pipeline's chunks are not those of the model."""
    if reason := uncuttable_reason(workload):
        raise UserError(f"this model cannot be a pipeline: {reason}")
    num = len(cut_blocks(workload))
    if sum(pipeline.blocks) != num:
        raise UserError(f"the pipeline's chunks have {sum(pipeline.blocks)} blocks, and the model has {num}")


def chunk_blocks(workload: Workload, chunk: Chunk) -> tuple[Block, ...]:
    """The blocks of a chunk; the embedding belongs to the first, the head and the loss to the last."""
    first = [block for block in workload.blocks if block.name == FIRST_BLOCK and chunk.is_first]
    last = [block for block in workload.blocks if block.name in LAST_BLOCKS and chunk.is_last]
    return (*first, *cut_blocks(workload)[slice(*chunk.blocks)], *last)


def boundary_bytes(problem: Problem, chunk_number: int) -> float:
    """Bytes of the activations of a micro-batch that a chunk, not the first, receives."""
    pipeline = pipeline_of(problem)
    block = cut_blocks(problem.workload)[sum(pipeline.blocks[:chunk_number])]
    return block.input_bytes * problem.local_batch_share / pipeline.micro_batches


def ranks_by_stage(problem: Problem) -> list[tuple[int, ...]]:
    """The ranks of each pipeline rank; those at one position have the same samples."""
    plan = skeleton_plan(problem)
    stages: list[list[int]] = [[] for _ in range(plan.num_pipeline_ranks)]
    for rank in range(plan.num_ranks):
        stages[plan.pipeline_rank(rank)].append(rank)
    return [tuple(ranks) for ranks in stages]


def blocks_problem(problem: Problem, blocks: Sequence[Block], ranks: Sequence[int]) -> Problem:
    """The problem of some blocks of a pipeline, at the size of a micro-batch, on the ranks that have them."""
    workload, micro_batches = replace(problem.workload, blocks=tuple(blocks)), pipeline_of(problem).micro_batches
    return replace(
        problem, workload=workload, chunk_ranks=tuple(ranks), micro_batches=micro_batches, expand_blocks=True
    )
