"""Memory of a rank of a pipeline: its chunks, and the activations of micro-batches between forward and backward."""

from collections.abc import Collection, Sequence
from functools import cache, partial

from shardwright.planner.chunks import blocks_problem, boundary_bytes, chunk_blocks, pipeline_of, ranks_by_stage
from shardwright.planner.memory import dense_model
from shardwright.planner.memory.dense_model import MemoryParts
from shardwright.planner.problem import Problem
from shardwright.spec.pipeline import FORWARD, SCHEDULES, Chunk, rank_chunks
from shardwright.spec.workload import Block

MESSAGES_IN_FLIGHT = 2  # with each neighbor: activations and their gradients


def memory_by_stage(problem: Problem) -> list[MemoryParts]:
    """Bytes of the fastest tier by purpose, at the peak of a step, of each pipeline rank."""
    stages = ranks_by_stage(problem)
    return [_rank_memory(problem, index, ranks, len(stages)) for index, ranks in enumerate(stages)]


def _rank_memory(problem: Problem, index: int, ranks: tuple[int, ...], num_ranks: int) -> MemoryParts:
    """At the peak of its schedule, which is in the backward pass of a micro-batch through one of the rank's chunks."""
    pipeline, chunks = pipeline_of(problem), rank_chunks(pipeline_of(problem), num_ranks, index)
    own = [blocks_problem(problem, chunk_blocks(problem.workload, chunk), ranks) for chunk in chunks]
    saved = [sum(dense_model.saved_activation_bytes(chunk, block) for block in chunk.blocks) for chunk in own]
    messages = max(_message_bytes(problem, chunk) for chunk in chunks)
    logits = _logit_bytes(own[-1]) if chunks[-1].is_last else 0.0
    others = ("messages", messages), ("outputs", (2 * problem.accumulate * pipeline.micro_batches - 1) * logits)
    peaks: list[MemoryParts] = []
    in_backward = cache(partial(_chunk_memory, own))
    begun = frozenset[int]()  # chunks whose gradients have been allocated in this step
    all_saved, gathered = 0.0, dict[int, float]()  # by chunk, its last block, which stays gathered for backward
    tokens = [*SCHEDULES[pipeline.schedule](num_ranks, index, len(own), pipeline.micro_batches)]
    last = {token.chunk: number for number, token in enumerate(tokens)}  # its last pass is a backward pass
    for number, token in enumerate(tokens):
        if token.pass_ == FORWARD:
            all_saved += saved[token.chunk]
            gathered[token.chunk] = sum(block.parameter_bytes for block in _sharded_blocks(own[token.chunk])[-1:])
            continue
        all_saved -= saved[token.chunk]
        gathered.pop(token.chunk, None)
        parts = dict(in_backward(token.chunk, begun, number == last[token.chunk]))
        begun |= {token.chunk}
        parts["activations"] += all_saved
        parts["gathered weights"] += sum(gathered.values())
        peaks.append((*parts.items(), *others))
    if logits:  # a batch's logits are joined: all of the step before, of this step, and those being joined
        kept = {
            name: bytes_ for name, bytes_ in in_backward(len(own) - 1, begun, True).items() if name.startswith("dense")
        }
        num = (2 * problem.accumulate + 1) * pipeline.micro_batches
        peaks.append((*kept.items(), ("outputs", num * logits)))
    return max(peaks, key=dense_model.total_bytes)


def _chunk_memory(own: Sequence[Problem], number: int, begun: Collection[int], is_last: bool) -> dict[str, float]:
    """Memory in the backward pass of a micro-batch through a chunk of a rank.

    `begun`: chunks through which an earlier micro-batch of the step has gone backward; others have no gradients yet.
    `is_last`: no later micro-batch of the step goes backward through this chunk.
    """
    others = [index for index in range(len(own)) if index != number]
    sharded = [blocks for index in others if (blocks := _sharded_blocks(own[index]))]
    scattering = max((blocks[0].parameter_bytes for blocks in sharded), default=0.0)
    gradients = dense_model.all_gradient_bytes(own[number]) if number in begun else None
    parts = dict(dense_model.peak_memory(own[number], scattering, gradients, is_last))
    for index in others:
        held = dict(dense_model.peak_memory(own[index]))
        for name in ("dense weights", "dense optimizer"):
            parts[name] += held[name]
        gradients = _gradient_bytes(own[index]) if index in begun else dense_model.buffer_bytes(own[index])
        parts["dense gradients"] += gradients
    return parts


def _gradient_bytes(chunk: Problem) -> float:
    """Gradients of a chunk between its backward passes: the sums of the last micro-batch, apart from those of earlier
    ones, and buffers."""
    sums = sum(block.parameter_bytes / chunk.num_shards(block) for block in _sharded_blocks(chunk))
    return dense_model.all_gradient_bytes(chunk) + sums


def _sharded_blocks(chunk: Problem) -> list[Block]:
    """In forward order."""
    return [block for block in chunk.blocks if dense_model.needs_unshard(chunk, block)]


def _message_bytes(problem: Problem, chunk: Chunk) -> float:
    """Bytes of the messages of a chunk that are in flight."""
    numbers = [*([] if chunk.is_first else [chunk.number]), *([] if chunk.is_last else [chunk.number + 1])]
    return MESSAGES_IN_FLIGHT * sum(boundary_bytes(problem, number) for number in numbers)


def _logit_bytes(chunk: Problem) -> float:
    """Bytes of the logits of a micro-batch: the products of the head. They are kept until the batch is given out, and
    the loop has those of the step before."""
    head = next((block.product_bytes for block in reversed(chunk.blocks) if block.product_bytes), 0.0)
    return head * chunk.local_batch_share
