"""What the dense part of a model takes of a rank's memory: weights, gradients, optimizer, gathered parts, activations.

Phases of a step, block by block. Forward adds what each block keeps. Backward takes the blocks in turn from the last:
of the one at work there is all it computed, if need be a second time, and its whole gradient; beside it the weights of
`ahead` more blocks are gathered, and the gradient of the block behind it is added up. What blocks before it keep is
still there, what those behind it kept has become gradients. The fullest of these moments counts.
"""

from collections.abc import Iterator, Sequence

from shardwright.planner.problem import REST, Problem
from shardwright.spec.workload import Block

MOMENTS = 2  # of the dense optimizer, beside weights and gradients
Parts = tuple[tuple[str, float], ...]


def fullest(problem: Problem) -> Parts:
    """Bytes of the fastest tier by what needs them, at the fullest moment of a step."""
    return max(_moments(problem), key=total)


def total(parts: Parts) -> float:
    return sum(bytes_ for _, bytes_ in parts)


def far_bytes(problem: Problem) -> float:
    """Of the next slower tier: what is offloaded, weights, gradients and optimizer."""
    offloaded = (block for block in problem.workload.blocks if block.name in problem.dense.offload)
    return sum((2 + MOMENTS) * block.parameter_bytes / problem.cut(block) for block in offloaded)


def kept(problem: Problem, block: Block) -> float:
    """Bytes of a block that stay from its forward to its backward pass."""
    how = dict(problem.dense.recompute).get(block.name)
    if how is None:
        return block.activation_bytes * problem.part
    return (block.input_bytes + (block.product_bytes if how == "products" else 0)) * problem.part


def by_blocks(problem: Problem) -> bool:
    """Whether weights are whole only around the turn of their block."""
    return bool(problem.dense.shard or problem.dense.offload)


def _moments(problem: Problem) -> Iterator[Parts]:
    """One at the turn of each block in the backward pass, and one behind it."""
    blocks = problem.workload.blocks
    near = [block for block in blocks if block.name not in problem.dense.offload]
    parts = [block.parameter_bytes / problem.cut(block) for block in near]
    for at in range(-1, len(blocks)):
        left = sum(kept(problem, block) for block in blocks[: max(at, 0)])
        yield (
            ("dense weights", sum(parts)),
            ("dense optimizer", MOMENTS * sum(parts)),
            ("dense gradients", _gradients(problem, blocks, at)),
            ("gathered weights", _gathered(problem, blocks, at)),
            ("gradients on their way", _on_their_way(problem, blocks, at)),
            ("activations", left),
            ("the block at work", _at_work(problem, blocks[at]) if at >= 0 else 0.0),
        )


def _gradients(problem: Problem, blocks: Sequence[Block], at: int) -> float:
    """Of a rank's own parts; where nothing is cut each parameter has one, and a place in a bucket that is summed."""
    made = blocks[max(at, 0) :]
    whole = [block for block in blocks if not by_blocks(problem) or block.name == REST]
    buckets = sum(block.parameter_bytes for block in whole) if problem.cluster.num_ranks > 1 else 0
    if problem.precision.reduced == "bfloat16":  # what rounding takes is added to the next sum
        buckets *= 2
    return buckets + sum(block.parameter_bytes / problem.cut(block) for block in made)


def _gathered(problem: Problem, blocks: Sequence[Block], at: int) -> float:
    if not by_blocks(problem) or at < 0:
        return 0.0
    before = _weighty(blocks[:at])
    return sum(_weighty(blocks[at : at + 1])) + sum(before[max(0, len(before) - problem.dense.ahead) :])


def _on_their_way(problem: Problem, blocks: Sequence[Block], at: int) -> float:
    """The whole gradient of the block at work, and of the one behind it with what others send of that."""
    if not by_blocks(problem):
        return 0.0
    inside = problem.sharding[0].num if problem.sharding else 1
    arriving = 2 - 1 / inside
    return sum(_weighty(blocks[max(at, 0) : at + 1])) + arriving * sum(_weighty(blocks[at + 1 :])[:1])


def _weighty(blocks: Sequence[Block]) -> list[int]:
    """The bytes of weights that are gathered, of blocks that have any."""
    return [block.parameter_bytes for block in blocks if block.name != REST and block.parameter_bytes]


def _at_work(problem: Problem, block: Block) -> float:
    """What it was called with, and what it makes of that, with gradients on their way through it."""
    kept_of = kept(problem, block)
    computed = block.peak_bytes or block.activation_bytes
    return max(computed * problem.part, kept_of - block.input_bytes * problem.part) + block.input_bytes * problem.part
