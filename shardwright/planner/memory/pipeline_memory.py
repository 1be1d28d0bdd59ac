"""Memory of a rank of a pipeline: its chunks, and the activations of micro-batches between forward and backward."""

from collections.abc import Sequence

from shardwright.planner.chunks import blocks_problem, boundary_bytes, chunk_blocks, pipeline_of, ranks_by_stage
from shardwright.planner.memory import dense_model
from shardwright.planner.memory.dense_model import MemoryParts
from shardwright.planner.problem import Problem
from shardwright.spec.pipeline import FORWARD, SCHEDULES, Chunk, rank_chunks
from shardwright.spec.workload import Block

MESSAGES_IN_FLIGHT = 4  # activations that are received and sent, and their gradients


def memory_by_stage(problem: Problem) -> list[MemoryParts]:
    """Bytes of the fastest tier by purpose, at the peak of a step, of each pipeline rank."""
    stages = ranks_by_stage(problem)
    return [_rank_memory(problem, index, ranks, len(stages)) for index, ranks in enumerate(stages)]


def _rank_memory(problem: Problem, index: int, ranks: tuple[int, ...], num_ranks: int) -> MemoryParts:
    """At the peak of its schedule, which is in the backward pass of a micro-batch through one of the rank's chunks."""
    pipeline, chunks = pipeline_of(problem), rank_chunks(pipeline_of(problem), num_ranks, index)
    own = [blocks_problem(problem, chunk_blocks(problem.workload, chunk), ranks) for chunk in chunks]
    saved = [sum(dense_model.saved_activation_bytes(chunk, block) for block in chunk.blocks) for chunk in own]
    messages = MESSAGES_IN_FLIGHT * max(_message_bytes(problem, chunk) for chunk in chunks)
    in_backward = [_chunk_memory(chunk, own[:number] + own[number + 1 :]) for number, chunk in enumerate(own)]
    peaks: list[MemoryParts] = []
    all_saved, gathered = 0.0, dict[int, float]()  # by chunk, its last block, which stays gathered for backward
    for token in SCHEDULES[pipeline.schedule](num_ranks, index, len(own), pipeline.micro_batches):
        if token.pass_ == FORWARD:
            all_saved += saved[token.chunk]
            gathered[token.chunk] = sum(block.parameter_bytes for block in _sharded_blocks(own[token.chunk])[-1:])
            continue
        all_saved -= saved[token.chunk]
        gathered.pop(token.chunk, None)
        parts = dict(in_backward[token.chunk])
        parts["activations"] += all_saved
        parts["gathered weights"] += sum(gathered.values())
        peaks.append((*parts.items(), ("messages", messages)))
    return max(peaks, key=dense_model.total_bytes)


def _chunk_memory(chunk: Problem, others: Sequence[Problem]) -> dict[str, float]:
    """Memory in the backward pass of a micro-batch through a chunk, with weights and gradients of `others`, the other
    chunks of the rank."""
    scattering = max((blocks[0].parameter_bytes for blocks in map(_sharded_blocks, others) if blocks), default=0.0)
    parts = dict(dense_model.peak_memory(chunk, scattering))
    for other in others:
        held = dict(dense_model.peak_memory(other))
        for name in ("dense weights", "dense optimizer"):
            parts[name] += held[name]
    if chunk.micro_batches > 1:
        parts["dense gradients"] = 0.0
        for part in (chunk, *others):  # sums of this micro-batch, apart from those of earlier ones
            sums = sum(block.parameter_bytes / part.num_shards(block) for block in _sharded_blocks(part))
            parts["dense gradients"] += dense_model.all_gradient_bytes(part) + sums
    return parts


def _sharded_blocks(chunk: Problem) -> list[Block]:
    """In forward order."""
    return [block for block in chunk.blocks if dense_model.needs_unshard(chunk, block)]


def _message_bytes(problem: Problem, chunk: Chunk) -> float:
    """Bytes of the largest message of a chunk."""
    received = 0.0 if chunk.is_first else boundary_bytes(problem, chunk.number)
    return max(received, 0.0 if chunk.is_last else boundary_bytes(problem, chunk.number + 1))
