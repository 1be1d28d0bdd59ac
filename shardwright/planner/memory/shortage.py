"""What is missing if the tables do not fit in memory, and what would make them fit."""

from shardwright.planner.memory import row_tiers
from shardwright.planner.memory.budget import bytes_text, memory_budget
from shardwright.planner.problem import Problem
from shardwright.spec.row_cache import DISK, SERVERS


def describe_shortage(problem: Problem) -> str:
    """How many bytes are missing, in which tier or for which table, and the remedies."""
    memory, num = memory_budget(problem), problem.cluster.num_ranks
    room = sum(memory.free_bytes)
    name = problem.cluster.name
    if memory.free_bytes[0] <= 0:
        reason, most_bytes = max(memory.memory_parts, key=lambda part: part[1])
        can_split = problem.workload.experts and not problem.experts
        remedy = ", split the experts (plan.experts=0)," if can_split else ","
        return (
            f"{name}: without any table a rank needs "
            f"{bytes_text(sum(bytes_ for _, bytes_ in memory.memory_parts))} of its "
            f"{bytes_text(memory.tiers[0].bytes_)} of {memory.tiers[0].name}, {bytes_text(most_bytes)} of them for "
            f"{reason}: make the batch smaller{remedy} or take more ranks"
        )
    sizes = [(load.table_bytes, load) for load in problem.table_loads]
    total = sum(size for size, _ in sizes)
    largest, load = max(sizes, key=lambda pair: pair[0])
    tiers = " and ".join(tier.name for tier in memory.tiers)
    if total > room * num:
        shortage = (
            f"{name}: the tables and their optimizer need {bytes_text(total)}; {num} ranks have "
            f"{bytes_text(room * num)} of {tiers}"
        )
        return f"{shortage}, short by {bytes_text(total - room * num)}. {_suggest_remedies(problem, total, room)}"
    if len(memory.tiers) > 1 and (least := row_tiers.least_bytes(problem)) > memory.free_bytes[0] * num:
        return (
            f"{name}: the rows of the steps in flight need {bytes_text(least)} of {memory.tiers[0].name}; {num} ranks "
            f"have room for {bytes_text(memory.free_bytes[0] * num)}: give them more memory, make the batch smaller, "
            f"or take more ranks"
        )
    return (
        f"{name}: the tables need {bytes_text(total)} of {bytes_text(room * num)} of {tiers}, but no sharding found "
        f'gives every rank at most {bytes_text(room)}; the largest table is "{load.table.name}" with '
        f"{bytes_text(largest)}: take more ranks, or remove pins"
    )


def _suggest_remedies(problem: Problem, total: float, room: float) -> str:
    """The number of ranks that have enough memory, and what would make the tables smaller."""
    options: list[str] = []
    weights = sum(load.num_values * load.weight_bytes for load in problem.table_loads)
    if any(load.weight_bytes == 4 for load in problem.table_loads):
        options.append(f'"tables.fp16" allowed ({bytes_text(weights / 2)} less)')
    state = sum(load.num_values * load.state_column_bytes for load in problem.table_loads)
    if state:
        options.append(f"row-wise AdaGrad (about {bytes_text(state)} less)")
    last = problem.cluster.device.tiers[-1].name
    if last == SERVERS:
        options.append("more or larger table servers (servers.start, servers.addresses, servers.memory)")
    elif last != DISK:
        options.append("rows on disk (a cluster file that `shardwright measure` wrote has its disk)")
    hint = f"; to need fewer: {', '.join(options)}" if options else ""
    return f"It takes {-(-total // room):,.0f} ranks{hint}"
