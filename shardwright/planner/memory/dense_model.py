"""Memory of the dense model on a rank: weights, gradients, optimizer, gathered weights, activations.

The peak is computed over the phases of a step, block by block. Forward adds what each block saves. Backward runs from
the last block to the first. While a block is in its backward, the rank holds all its activations (recomputed if need
be) and its whole gradient, the gathered weights of `ahead` more blocks, and the gradient of the previous backward that
is being reduced. What earlier blocks saved is still held; what later blocks saved has been freed, and their gradients
are held instead.
"""

from collections.abc import Iterator

from shardwright.planner.problem import REST_BLOCK, Problem
from shardwright.spec.wire import DIRECT_REDUCE_BYTES, GRADIENT_BUCKET_BYTES, MAX_RECEIVED_BUCKETS
from shardwright.spec.workload import Block

NUM_MOMENTS = 2  # of the dense optimizer, besides weights and gradients
MemoryParts = tuple[tuple[str, float], ...]


def peak_memory(
    problem: Problem, scattering: float = 0.0, gradients: float | None = None, is_last: bool = True
) -> MemoryParts:
    """Bytes of the fastest tier by purpose, at the peak of a step. `scattering`: bytes of a block of other blocks whose
    gradients are reduce-scattered when the backward pass begins. `gradients`: those of earlier micro-batches, to which
    this pass adds its own; None: it is the first. `is_last`: the step's sums are reduced during this pass."""
    return max(_memory_over_backward(problem, scattering, gradients, is_last), key=total_bytes)


def total_bytes(parts: MemoryParts) -> float:
    return sum(bytes_ for _, bytes_ in parts)


def offloaded_bytes(problem: Problem) -> float:
    """Bytes of the next slower tier: weights, gradients and optimizer state of offloaded blocks."""
    offloaded = (block for block in problem.blocks if block.name in problem.dense.offload)
    values_per_parameter = 2 + NUM_MOMENTS * problem.moment_share
    return sum(values_per_parameter * block.parameter_bytes / problem.num_shards(block) for block in offloaded)


def saved_activation_bytes(problem: Problem, block: Block) -> float:
    """Bytes that a block saves from its forward for its backward."""
    policy = dict(problem.dense.recompute).get(block.name)
    if policy is None:
        # weights in bfloat16
        cast_bytes = block.parameter_bytes / 2 if problem.precision.matmuls == "bfloat16" else 0.0
        copied_bytes = sum(part.copied_bytes for part in problem.experts_of(block))
        return block.activation_bytes * problem.local_batch_share + cast_bytes + copied_bytes
    return (block.input_bytes + (block.product_bytes if policy == "products" else 0)) * problem.local_batch_share


def all_gradient_bytes(problem: Problem) -> float:
    """Bytes of the gradients of all blocks, and of the buffers that reduce them."""
    blocks = problem.blocks
    dense = sum(block.parameter_bytes / problem.num_shards(block) for block in blocks)
    return buffer_bytes(problem) + dense + problem.own_expert_bytes(blocks)


def _memory_over_backward(
    problem: Problem, scattering: float, held: float | None, is_last: bool
) -> Iterator[MemoryParts]:
    """Memory during the backward of each block, from last to first, and once after them."""
    blocks = problem.blocks
    resident = [block for block in blocks if block.name not in problem.dense.offload]
    weights = sum(block.parameter_bytes / problem.num_shards(block) for block in resident)
    weights += problem.own_expert_bytes(blocks)
    moments = NUM_MOMENTS * problem.moment_share * weights
    gradients, saved = (
        buffer_bytes(problem) if held is None else held,
        sum(saved_activation_bytes(problem, block) for block in blocks),
    )
    unsharded = [block.parameter_bytes for block in blocks if needs_unshard(problem, block)]
    previous = scattering  # bytes of the block whose backward ran before
    reduced = 0.0  # bytes of gradients whose all-reduces have begun
    for block in reversed(blocks):
        current = [unsharded.pop()] if needs_unshard(problem, block) else []
        saved -= saved_activation_bytes(problem, block)
        if held is None or needs_unshard(problem, block):  # what is scattered is added to earlier gradients at the end
            gradients += block.parameter_bytes / problem.num_shards(block)
        if held is None:
            gradients += problem.own_expert_bytes([block])
        ahead = unsharded[max(0, len(unsharded) - problem.dense.ahead) :]
        in_flight = sum(current) + _receive_ratio(problem) * previous + _all_reduce_bytes(problem, reduced)
        block_bytes = _running_block_bytes(problem, block)
        yield _memory_parts(weights, moments, gradients, sum(current) + sum(ahead), in_flight, saved, block_bytes)
        previous = sum(current) or previous
        reduced += block.parameter_bytes if is_last and not current else 0.0
    in_flight = _receive_ratio(problem) * previous + _all_reduce_bytes(problem, reduced)
    yield _memory_parts(weights, moments, gradients, 0.0, in_flight, 0.0, 0.0)


def _memory_parts(
    weights: float, moments: float, gradients: float, gathered: float, in_flight: float, saved: float, block: float
) -> MemoryParts:
    return (
        ("dense weights", weights),
        ("dense optimizer", moments),
        ("dense gradients", gradients),
        ("gathered weights", gathered),
        ("gradients in flight", in_flight),
        ("activations", saved),
        ("current block", block),
    )


def needs_unshard(problem: Problem, block: Block) -> bool:
    """Whether the block is unsharded just before it runs, and resharded after."""
    is_split = bool(problem.dense.shard or problem.dense.offload)
    return is_split and block.name != REST_BLOCK and block.parameter_bytes > 0


def buffer_bytes(problem: Problem) -> float:
    """Bytes for reducing gradients, besides the gradients: all-reduce buckets and error feedback residuals.

    Residuals are the rounding errors of bfloat16 gradients; they are added to the next gradients.
    """
    blocks, has_residual = problem.blocks, problem.precision.dense_gradients == "bfloat16"
    buckets = [block.parameter_bytes for block in blocks if not needs_unshard(problem, block)]
    shards = [block.parameter_bytes / problem.num_shards(block) for block in blocks if needs_unshard(problem, block)]
    reduces = problem.sample_groups.size > 1
    return reduces * (1 + has_residual) * sum(buckets) + has_residual * bool(problem.dense.replicate) * sum(shards)


def _receive_ratio(problem: Problem) -> float:
    """Bytes of a gradient in flight and of the shards received from other ranks of the host, over the gradient's."""
    return 2 - 1 / problem.shard_levels[0].num if problem.shard_levels else 1.0


def _all_reduce_bytes(problem: Problem, begun: float) -> float:
    """Bytes received at most, of gradients of `begun` bytes, by a rank that is ahead of the others of its host."""
    groups = problem.sample_groups
    if problem.precision.dense_gradients == "bfloat16" or groups.level_names != (problem.cluster.level_in_host,):
        return 0.0
    received = min(begun, MAX_RECEIVED_BUCKETS * GRADIENT_BUCKET_BYTES)
    return min((groups.size - 1) * received, MAX_RECEIVED_BUCKETS * DIRECT_REDUCE_BYTES)


def _running_block_bytes(problem: Problem, block: Block) -> float:
    """Bytes of a block while its backward runs: its input, its activations and their gradients."""
    saved = saved_activation_bytes(problem, block)
    computed = block.peak_bytes or block.activation_bytes
    return (
        max(computed * problem.local_batch_share, saved - block.input_bytes * problem.local_batch_share)
        + block.input_bytes * problem.local_batch_share
    )
