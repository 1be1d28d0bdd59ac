"""What the dense part of a model takes of a rank's memory: weights, gradients, optimizer, gathered parts, activations.

Phases of a step, block by block. Forward adds what each block keeps. Backward takes the blocks in turn from the last:
of the one at work there is all it computed, if need be a second time, and its whole gradient; beside it the weights of
`ahead` more blocks are gathered, and the gradient of the block behind it is added up. What blocks before it keep is
still there, what those behind it kept has become gradients. The fullest of these moments counts.
"""

from collections.abc import Iterator, Sequence

from shardwright.planner.problem import REST_BLOCK, Problem
from shardwright.spec.workload import Block

NUM_MOMENTS = 2  # of the dense optimizer, beside weights and gradients
MemoryParts = tuple[tuple[str, float], ...]


def peak_memory(problem: Problem) -> MemoryParts:
    """Bytes of the fastest tier by what needs them, at the fullest moment of a step."""
    return max(_moments(problem), key=total_bytes)


def total_bytes(parts: MemoryParts) -> float:
    return sum(bytes_ for _, bytes_ in parts)


def offloaded_bytes(problem: Problem) -> float:
    """Of the next slower tier: what is offloaded, weights, gradients and optimizer."""
    offloaded = (block for block in problem.workload.blocks if block.name in problem.dense.offload)
    kept = 2 + NUM_MOMENTS * problem.moment_share
    return sum(kept * block.parameter_bytes / problem.num_shards(block) for block in offloaded)


def saved_activation_bytes(problem: Problem, block: Block) -> float:
    """Bytes of a block that stay from its forward to its backward pass."""
    how = dict(problem.dense.recompute).get(block.name)
    if how is None:
        cast = block.parameter_bytes / 2 if problem.precision.matmuls == "bfloat16" else 0.0  # weights, as multiplied
        return block.activation_bytes * problem.local_batch_share + cast
    return (block.input_bytes + (block.product_bytes if how == "products" else 0)) * problem.local_batch_share


def uses_unshard(problem: Problem) -> bool:
    """Whether weights are whole only around the turn of their block."""
    return bool(problem.dense.shard or problem.dense.offload)


def _moments(problem: Problem) -> Iterator[MemoryParts]:
    """One at the turn of each block in the backward pass, the last first, and one behind it."""
    blocks = problem.workload.blocks
    near = [block for block in blocks if block.name not in problem.dense.offload]
    weights = sum(block.parameter_bytes / problem.num_shards(block) for block in near)
    moments = NUM_MOMENTS * problem.moment_share * weights
    gradients, left = _lasting(problem, blocks), sum(saved_activation_bytes(problem, block) for block in blocks)
    moved = [block.parameter_bytes for block in blocks if needs_unshard(problem, block)]
    behind = 0.0  # bytes of the weights whose turn was before
    for block in reversed(blocks):
        mine = [moved.pop()] if needs_unshard(problem, block) else []
        left -= saved_activation_bytes(problem, block)
        gradients += block.parameter_bytes / problem.num_shards(block)
        ahead = moved[max(0, len(moved) - problem.dense.ahead) :]
        under_way = sum(mine) + _arriving(problem) * behind
        work = _at_work(problem, block)
        yield _parts(weights, moments, gradients, sum(mine) + sum(ahead), under_way, left, work)
        behind = sum(mine) or behind
    yield _parts(weights, moments, gradients, 0.0, _arriving(problem) * behind, 0.0, 0.0)


def _parts(
    weights: float, moments: float, gradients: float, gathered: float, under_way: float, left: float, work: float
) -> MemoryParts:
    return (
        ("dense weights", weights),
        ("dense optimizer", moments),
        ("dense gradients", gradients),
        ("gathered weights", gathered),
        ("gradients in flight", under_way),
        ("activations", left),
        ("current block", work),
    )


def needs_unshard(problem: Problem, block: Block) -> bool:
    """Whether its weights are whole only around its turn."""
    return uses_unshard(problem) and block.name != REST_BLOCK and block.parameter_bytes > 0


def _lasting(problem: Problem, blocks: Sequence[Block]) -> float:
    """Of gradients: buckets of those that are summed whole, and what rounding takes, which is added to the next sum."""
    rounded = problem.precision.dense_gradients == "bfloat16"
    buckets = [block.parameter_bytes for block in blocks if not needs_unshard(problem, block)]
    cut = [block.parameter_bytes / problem.num_shards(block) for block in blocks if needs_unshard(problem, block)]
    several = problem.cluster.num_ranks > 1
    return several * (1 + rounded) * sum(buckets) + rounded * bool(problem.dense.replicate) * sum(cut)


def _arriving(problem: Problem) -> float:
    """A gradient that is summed, and what others of the host send of it, as parts of itself."""
    return 2 - 1 / problem.shard_levels[0].num if problem.shard_levels else 1.0


def _at_work(problem: Problem, block: Block) -> float:
    """What it was called with, and what it makes of that, with gradients on their way through it."""
    kept_of = saved_activation_bytes(problem, block)
    computed = block.peak_bytes or block.activation_bytes
    return (
        max(computed * problem.local_batch_share, kept_of - block.input_bytes * problem.local_batch_share)
        + block.input_bytes * problem.local_batch_share
    )
