"""Memory of a rank of a pipeline: its chunks, and the activations of micro-batches between forward and backward."""

from shardwright.planner.chunks import blocks_problem, boundary_bytes, chunk_blocks, pipeline_of, ranks_by_stage
from shardwright.planner.memory import dense_model
from shardwright.planner.memory.dense_model import MemoryParts
from shardwright.planner.problem import Problem
from shardwright.spec.pipeline import FORWARD, SCHEDULES, Chunk, rank_chunks

MESSAGES_IN_FLIGHT = 4  # activations that are received and sent, and their gradients


def memory_by_stage(problem: Problem) -> list[MemoryParts]:
    """Bytes of the fastest tier by purpose, at the peak of a step, of each pipeline rank."""
    stages = ranks_by_stage(problem)
    return [_rank_memory(problem, index, ranks, len(stages)) for index, ranks in enumerate(stages)]


def _rank_memory(problem: Problem, index: int, ranks: tuple[int, ...], num_ranks: int) -> MemoryParts:
    chunks = rank_chunks(pipeline_of(problem), num_ranks, index)
    blocks = [block for chunk in chunks for block in chunk_blocks(problem.workload, chunk)]
    own = blocks_problem(problem, blocks, ranks)
    parts = dict(dense_model.peak_memory(own))  # of one micro-batch at a time
    saved = {
        chunk.index: sum(dense_model.saved_activation_bytes(own, b) for b in chunk_blocks(problem.workload, chunk))
        for chunk in chunks
    }
    parts["activations"] += max(0.0, _peak_saved_bytes(problem, saved, index, num_ranks) - sum(saved.values()))
    if own.micro_batches > 1:
        parts["dense gradients"] = dense_model.all_gradient_bytes(own)
    parts["messages"] = MESSAGES_IN_FLIGHT * max(_message_bytes(problem, chunk) for chunk in chunks)
    return tuple(parts.items())


def _peak_saved_bytes(problem: Problem, saved: dict[int, float], index: int, num_ranks: int) -> float:
    """The most bytes that a rank saves at a time, in the order of its schedule. `saved`: by chunk, of a micro-batch."""
    pipeline = pipeline_of(problem)
    peak = now = 0.0
    for token in SCHEDULES[pipeline.schedule](num_ranks, index, len(saved), pipeline.micro_batches):
        now += saved[token.chunk] if token.pass_ == FORWARD else -saved[token.chunk]
        peak = max(peak, now)
    return peak


def _message_bytes(problem: Problem, chunk: Chunk) -> float:
    """Bytes of the largest message of a chunk."""
    received = 0.0 if chunk.is_first else boundary_bytes(problem, chunk.number)
    return max(received, 0.0 if chunk.is_last else boundary_bytes(problem, chunk.number + 1))
