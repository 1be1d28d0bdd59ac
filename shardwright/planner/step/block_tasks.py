"""What blocks of the dense part take of a rank: products by their shapes where these are known, and what is read and
written beside them."""

from collections.abc import Sequence
from types import MappingProxyType

from shardwright.planner.price import overheads, primitives
from shardwright.planner.problem import Problem
from shardwright.planner.step.simulate import Task
from shardwright.spec.cluster import Device
from shardwright.spec.plan import RecomputePolicy
from shardwright.spec.workload import Block, Dtype, Product

CAST_BYTES = 6  # a number read in float32 and written in bfloat16, or the other way
# Small calls of torch, with the Python around them, that recomputing takes of a block, and of each operation in it: by
# processor time of blocks of 7 and 22 operations on 4 samples, forward and backward, over that of such a call.
RECOMPUTE_CALLS = MappingProxyType[RecomputePolicy, tuple[int, int]]({"nothing": (76, 8), "products": (160, 17)})


def pass_task(problem: Problem, blocks: Sequence[Block], direction: str) -> Task:
    """`way`: forward or backward."""
    device, part = problem.cluster.device, problem.local_batch_share
    products = [one for block in blocks for one in getattr(block, f"{direction}_products")]
    flops = sum(getattr(block, f"{direction}_flops") for block in blocks)
    moved = sum(getattr(block, f"{direction}_bytes") for block in blocks) * part
    kept = 0.0 if moved else sum(block.parameter_bytes + block.activation_bytes * part for block in blocks)
    if not blocks:
        return Task()
    dtype = problem.precision.matmuls
    if moved and dtype == "bfloat16":  # what blocks read is rounded, and gradients of that are told in float32 again
        read = [block for block in blocks if block.needs_vectors or direction == "forward"]
        moved += CAST_BYTES * part * sum(one.m * one.k for block in read for one in block.forward_products[:1])
    others = max(0, flops - sum(one.flops for one in products)) * part
    seconds = primitives.flops_cost(device, others, kept, dtype).seconds
    seconds += sum(_product_seconds(device, one, part, dtype) for one in products)
    pace = problem.top_pace if any(block.needs_vectors for block in blocks) else problem.bottom_pace
    seconds = (seconds + memory_pass_seconds(device, moved)) * pace[direction == "backward"]
    return Task(seconds=seconds, flops=int(flops * part), bytes_=int(kept + moved))


def recompute_task(problem: Problem, block: Block, policy: RecomputePolicy) -> Task:
    """Its forward pass within the backward pass: all of it, or all but products."""
    whole = pass_task(problem, [block], "forward")
    if policy == "nothing":
        return whole
    device, moved = problem.cluster.device, block.forward_bytes * problem.local_batch_share
    unknown = 0.0 if moved else block.activation_bytes * problem.local_batch_share
    seconds = primitives.flops_cost(device, 0.0, unknown, problem.precision.matmuls).seconds + memory_pass_seconds(
        device, moved
    )
    return Task(seconds=min(seconds, whole.seconds_on(0)))


def backward_task(problem: Problem, blocks: Sequence[Block]) -> Task:
    """With what is recomputed in it."""
    plain, kept = pass_task(problem, blocks, "backward"), dict(problem.dense.recompute)
    more = [recompute_task(problem, block, kept[block.name]) for block in blocks if block.name in kept]
    nums = ((RECOMPUTE_CALLS[kept[block.name]], block.forward_calls) for block in blocks if block.name in kept)
    calls = sum(fixed + each * num for (fixed, each), num in nums)
    return Task(
        seconds=plain.seconds_on(0)
        + sum(one.seconds_on(0) for one in more)
        + calls * overheads.op_overhead_seconds(problem.cluster.device),
        flops=plain.flops + sum(one.flops for one in more),
        bytes_=plain.bytes_,
    )


def total_parameter_bytes(blocks: Sequence[Block]) -> int:
    return sum(block.parameter_bytes for block in blocks)


def memory_pass_seconds(device: Device, bytes_: float) -> float:
    """Of bytes that are read or written, half of each."""
    memory = device.tiers[0]
    return bytes_ * (1 / memory.read_bytes_per_second + 1 / memory.write_bytes_per_second) / 2


def _product_seconds(device: Device, product: Product, part: float, dtype: Dtype) -> float:
    sizes = {name: getattr(product, name) * (part if name == product.grows else 1) for name in ("m", "k", "n", "num")}
    m, k, n = (max(1, round(sizes[name])) for name in ("m", "k", "n"))
    across = product.grows == "k" and overheads.has_price(device, "matmul.across", dtype)
    return (
        sizes["num"] * primitives.matmul_cost(device, m, k, n, dtype, "matmul.across" if across else "matmul").seconds
    )
