"""Durations of the dense model's blocks on a rank: matrix products by shape, and memory traffic."""

from collections.abc import Sequence
from dataclasses import replace

from shardwright.planner.price import overheads, primitives
from shardwright.planner.problem import Problem
from shardwright.planner.step.rank_calls import Task
from shardwright.spec.cluster import Device
from shardwright.spec.plan import RecomputePolicy
from shardwright.spec.workload import Block, Dtype, Product

CAST_BYTES = 6  # per number: read in float32 and written in bfloat16, or the reverse


def split_blocks(problem: Problem) -> tuple[list[Block], list[Block]]:
    """Blocks that need no vectors (bottom), and the others (top)."""
    blocks = problem.blocks
    return [block for block in blocks if not block.needs_vectors], [block for block in blocks if block.needs_vectors]


def pass_task(problem: Problem, blocks: Sequence[Block], direction: str) -> Task:
    """The forward or backward pass of some blocks as one task. `direction`: "forward" or "backward"."""
    task = _priced_pass(problem, blocks, direction)
    return replace(task, seconds=task.seconds_on(0) * measured_pace(problem, blocks, direction))


def _priced_pass(problem: Problem, blocks: Sequence[Block], direction: str) -> Task:
    """A pass by the device's prices."""
    device, share = problem.cluster.device, problem.local_batch_share
    products = [product for block in blocks for product in getattr(block, f"{direction}_products")]
    flops = sum(getattr(block, f"{direction}_flops") for block in blocks)
    bytes_ = sum(getattr(block, f"{direction}_bytes") for block in blocks) * share
    fallback = 0.0 if bytes_ else sum(block.parameter_bytes + block.activation_bytes * share for block in blocks)
    if not blocks:
        return Task()
    dtype = problem.precision.matmuls
    if bytes_ and dtype == "bfloat16":  # block inputs are cast down, their gradients up again
        cast = [block for block in blocks if block.needs_vectors or direction == "forward"]
        bytes_ += CAST_BYTES * share * sum(x.m * x.k for block in cast for x in block.forward_products[:1])
    other_flops = max(0, flops - sum(product.flops for product in products)) * share
    seconds = primitives.flops_cost(device, other_flops, fallback, dtype).seconds
    seconds += sum(_product_seconds(device, product, share, dtype) for product in products)
    seconds += memory_pass_seconds(device, bytes_)
    return Task(seconds=seconds, flops=int(flops * share), bytes_=int(fallback + bytes_))


def measured_pace(problem: Problem, blocks: Sequence[Block], direction: str) -> float:
    """Measured over priced seconds of a pass of these blocks, with what it recomputes; 1 if not measured."""
    pace = problem.top_pace if any(block.needs_vectors for block in blocks) else problem.bottom_pace
    return pace[direction == "backward"]


def recompute_task(problem: Problem, block: Block, policy: RecomputePolicy) -> Task:
    """A block's forward pass repeated in its backward, by the device's prices: all of it ("nothing" is saved), or all
    but products."""
    forward = _priced_pass(problem, [block], "forward")
    if policy == "nothing":
        return forward
    device, bytes_ = problem.cluster.device, block.forward_bytes * problem.local_batch_share
    fallback = 0.0 if bytes_ else block.activation_bytes * problem.local_batch_share
    seconds = primitives.flops_cost(device, 0.0, fallback, problem.precision.matmuls).seconds
    seconds += memory_pass_seconds(device, bytes_)
    return Task(seconds=min(seconds, forward.seconds_on(0)))


def backward_task(problem: Problem, blocks: Sequence[Block]) -> Task:
    """The backward pass of some blocks, with the forward passes that activation checkpointing repeats."""
    backward, policy = _priced_pass(problem, blocks, "backward"), dict(problem.dense.recompute)
    recomputed = [block for block in blocks if block.name in policy]
    recompute_tasks = [recompute_task(problem, block, policy[block.name]) for block in recomputed]
    counts: list[tuple[RecomputePolicy, int]] = [(policy[block.name], block.forward_calls) for block in recomputed]
    seconds = backward.seconds_on(0) + sum(task.seconds_on(0) for task in recompute_tasks)
    seconds += overheads.recompute_overhead_seconds(problem.cluster.device, counts)
    return Task(
        seconds=seconds * measured_pace(problem, blocks, "backward"),
        flops=backward.flops + sum(task.flops for task in recompute_tasks),
        bytes_=backward.bytes_,
    )


def total_parameter_bytes(blocks: Sequence[Block]) -> int:
    return sum(block.parameter_bytes for block in blocks)


def memory_pass_seconds(device: Device, bytes_: float) -> float:
    """Seconds of moving bytes through the fastest tier: half of them read, half written."""
    memory = device.tiers[0]
    return bytes_ * (1 / memory.read_bytes_per_second + 1 / memory.write_bytes_per_second) / 2


def _product_seconds(device: Device, product: Product, share: float, dtype: Dtype) -> float:
    """Seconds of a matrix product; the dimension that grows with the batch is scaled to the local batch."""
    sizes = {name: getattr(product, name) * (share if name == product.grows else 1) for name in ("m", "k", "n", "num")}
    m, k, n = (max(1, round(sizes[name])) for name in ("m", "k", "n"))
    across = product.grows == "k" and overheads.has_price(device, "matmul.across", dtype)
    op = "matmul.across" if across else "matmul"
    return sizes["num"] * primitives.matmul_cost(device, m, k, n, dtype, op).seconds
