"""Experts that are split over ranks: the stages of their exchange inside a pass of a block, and what each costs.

Forward and backward of a mixture have the same stages, in as many steps as the plan has groups: `send` rows (or their
gradients) to the ranks of their experts, `experts` on those received, `return` the results. `copy` moves the weights of
copied experts from the start of the block on (experts/prefetch.py). In backward, `copy` moves the gradients of copies,
whose rows are the first, and `weights`, the gradients of weights, are computed last. If tokens are exchanged by hosts,
`hosts` is first and last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.planner.price.axis_groups import AxisGroups, group_cost
from shardwright.planner.price.primitives import compute_slowdown
from shardwright.planner.problem import Problem, SplitExperts
from shardwright.planner.step import block_tasks, traffic
from shardwright.planner.step.rank_calls import Task
from shardwright.spec.lanes import COPIES, EXPERTS, MAIN
from shardwright.spec.plan import ExpertCosts, SharedLink, Stage
from shardwright.spec.wire import EXPERT_PART_BYTES
from shardwright.spec.workload import Block, Mixture, Product


def expert_costs(problem: Problem, mixture: Mixture, groups: AxisGroups, num_ranks: int = 0) -> ExpertCosts:
    """The costs of one mixture whose experts are split over each of these groups of ranks, or over `num_ranks` that
    exchange rows inside these groups.

    By the rates of links, scaled so that an exchange with even routing takes as long as an even all-to-all.
    """
    rows = mixture.rows * problem.local_batch_share  # of a rank
    compute = block_tasks.pass_task(
        problem, [experts_of_rank(mixture, num_ranks or groups.size)], "forward"
    ).seconds_on(0)
    row_bytes = (mixture.row_bytes + mixture.result_bytes) / 2
    expert_bytes = mixture.experts.parameter_bytes / mixture.num_experts
    links = [(1, 1 / min(level.bytes_per_second for level in groups.levels)), *_shared_links(groups)]
    busy = max(rows * row_bytes * num * (1 - num / groups.size) * per_byte for num, per_byte in links)
    exchange = group_cost(groups, "all_to_all", max(1, round(rows * row_bytes)), sustained=True)
    scale = exchange.seconds / busy if busy else 1.0
    (_, own), *shared = ((num, scale * per_byte) for num, per_byte in links)
    return ExpertCosts(
        compute / max(1.0, rows),
        row_bytes * own,
        expert_bytes * own,
        tuple(SharedLink(num, row_bytes * per_byte, expert_bytes * per_byte) for num, per_byte in shared),
        min(expert_bytes, EXPERT_PART_BYTES) * own,
        compute_slowdown(groups.cluster, "all_to_all", groups.level_names, max(1, round(rows * row_bytes))),
    )


def _shared_links(groups: AxisGroups) -> Iterator[tuple[int, float]]:
    """Links that several ranks share: how many consecutive ranks of a group, and seconds of a byte, of which ranks of
    other groups take their part."""
    num = 1
    for level in groups.levels:
        if level.group_bytes_per_second is not None:
            yield num, groups.num_on_link(level) / level.group_bytes_per_second
        num *= level.num


def experts_of_rank(mixture: Mixture, num_ranks: int) -> Block:
    """The block of a rank's experts, with the rows that all ranks have for them if routing is even."""

    def gather(product: Product) -> Product:
        if product.grows == "num":
            return product
        fewer = max(1, round(product.num / num_ranks))
        larger = getattr(product, product.grows) * product.num / fewer
        return replace(product, num=fewer, **{product.grows: round(larger)})

    block = mixture.experts
    return replace(
        block,
        parameters=block.parameters // num_ranks,
        parameter_bytes=block.parameter_bytes // num_ranks,
        forward_products=tuple(map(gather, block.forward_products)),
        backward_products=tuple(map(gather, block.backward_products)),
    )


def call_seconds(part: SplitExperts) -> tuple[float, float]:
    """Seconds of the stages of a call, forward and backward: on a rank's link one message after the other, and its
    computation of a step's rows as soon as they are there. Weights that were not prefetched, and gradients, follow the
    rows."""
    compute, message = part.step_seconds
    computed, rows = 0.0, part.plan.groups * message
    forward, backward = rows + part.late_copy_seconds, rows + part.copy_seconds
    for step in range(part.plan.groups):
        computed = max(computed, (step + 1) * message) + compute
        forward, backward = (max(link, computed) + message for link in (forward, backward))
    hosts = 2 * part.host_seconds
    return forward + hosts, max(backward, computed + part.compute_seconds) + hosts


def added_seconds(problem: Problem, blocks: Sequence[Block], direction: str) -> float:
    """What the exchange of experts adds to a pass of these blocks, whose computation counts even routing."""
    parts = [part for block in blocks for part in problem.experts_of(block)]
    if direction == "forward":
        return sum(call_seconds(part)[0] - part.even_seconds for part in parts)
    return sum(call_seconds(part)[1] - 2 * part.even_seconds for part in parts)


def prefetch_stages(problem: Problem, block: Block, source: str) -> Iterator[Stage]:
    """The copies of a block's experts that leave before its forward pass, once the slot `source` is there."""
    return (_copy_stage(part, source) for part in problem.experts_of(block) if part.is_prefetched)


def _copy_stage(part: SplitExperts, source: str) -> Stage:
    return Stage(f"copy {part.plan.module}", COPIES, (source,), (f"{part.plan.module}.copied",))


def exchange_stages(
    problem: Problem, block: Block, source: str, outputs: tuple[str, ...], *, backward: bool = False
) -> Iterator[Stage]:
    """The stages of a block's mixtures, after the slot `source`; the last to return rows writes `outputs`."""
    prefix, parts = "gradient." if backward else "", problem.experts_of(block)
    for index, part in enumerate(reversed(parts) if backward else parts):
        name, num = part.plan.module, part.plan.groups
        slots = [[f"{prefix}{name}.{kind}.{step}" for step in range(num)] for kind in ("received", "computed", "back")]
        copied = (f"{prefix}{name}.copied",) if part.copy_seconds and not backward else ()
        by_hosts, written_last = part.plan.exchange == "hosts", outputs if index + 1 == len(parts) else None
        if by_hosts:
            there = f"{prefix}{name}.there"
            yield Stage(f"hosts {name}", EXPERTS, (source,), (there,))
            source = there
        yield from (Stage(f"send {name}", EXPERTS, (source,), (received,)) for received in slots[0])
        if copied and not part.is_prefetched:
            yield _copy_stage(part, source)
        for step, (received, computed, back) in enumerate(zip(*slots, strict=True)):
            is_last = step + 1 == num
            yield Stage(f"experts {name}", MAIN, (received, *(copied if is_last else ())), (computed,))
            written = written_last if is_last and written_last and not by_hosts else (back,)
            yield Stage(f"return {name}", EXPERTS, (computed,), written)
            source = back
            if backward and step == 0 and part.copy_seconds:
                yield Stage(f"copy {name}", COPIES, (computed,), (f"{prefix}{name}.copied",))
        if backward:
            yield Stage(f"weights {name}", MAIN, (slots[1][-1],), (f"{prefix}{name}.weights",))
        if by_hosts:
            home = f"{prefix}{name}.home"
            yield Stage(f"hosts {name}", EXPERTS, (source,), written_last or (home,))
            source = home


def without_experts(problem: Problem, block: Block, forward: Task, backward: Task) -> tuple[Task, Task]:
    """The passes of a block without the computation of its split experts. A recomputed forward pass repeats it all."""
    even = sum(part.even_seconds for part in problem.experts_of(block))
    recomputed, policy = 0.0, dict(problem.dense.recompute).get(block.name)
    if policy is not None:  # experts run again with all of their products
        recomputed = added_seconds(problem, [block], "forward") + even * (policy == "products")
    paces = (block_tasks.measured_pace(problem, [block], direction) for direction in ("forward", "backward"))
    forward_pace, backward_pace = paces
    return forward.lengthen(-even * forward_pace), backward.lengthen(recomputed - 2 * even * backward_pace)


def exchange_tasks(problem: Problem, block: Block) -> dict[str, Task]:
    """The task of each of these stages."""
    tasks, pace = dict[str, Task](), block_tasks.measured_pace(problem, [block], "forward")
    for part in problem.experts_of(block):
        name, (compute, message) = part.plan.module, part.step_seconds
        groups, hosts = (
            AxisGroups(problem.cluster, problem.mesh_axes, axes, problem.chunk_ranks)
            for axes in (part.plan.row_axes, part.plan.axes[:1])
        )
        rows = part.mixture.rows * problem.local_batch_share / part.plan.groups
        bytes_ = round(rows * (part.mixture.row_bytes + part.mixture.result_bytes) / 2)
        tasks[f"send {name}"] = tasks[f"return {name}"] = traffic.collective_task(groups, "all_to_all", message, bytes_)
        if part.host_seconds:
            tasks[f"hosts {name}"] = traffic.collective_task(hosts, "all_to_all", part.host_seconds, bytes_)
        tasks[f"experts {name}"] = Task(seconds=compute * pace)
        tasks[f"weights {name}"] = Task(seconds=part.compute_seconds * pace)
        if part.copy_seconds:
            tasks[f"copy {name}"] = traffic.collective_task(groups, "all_to_all", part.copy_seconds, 0)
    return tasks
