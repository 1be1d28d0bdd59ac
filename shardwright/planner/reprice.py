"""A plan that was made before, by whomever: what its step takes on this cluster."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import prod

from shardwright.errors import UserError
from shardwright.planner import search
from shardwright.planner.memory import budget
from shardwright.planner.problem import PlacedTables, Precision, Problem
from shardwright.planner.search import Candidate
from shardwright.planner.step import stages, tasks
from shardwright.planner.tables import sharding
from shardwright.planner.tables.sharding import Sharding, ShardUnit
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Plan, Rect, TablePlan
from shardwright.spec.workload import DTYPE_BYTES


def reprice_plan(problem: Problem, plan: Plan) -> Candidate:
    """The step of a plan that was made before, by whomever, at this batch size on this cluster: its rectangles, tiers
    and precision. Its stages too where they are of the planner's kind, else the best of these."""
    num = problem.cluster.num_ranks
    if prod(size for _, size in plan.axes) != num:
        raise UserError(f"the plan is for axes {dict(plan.axes)}; {problem.cluster.name} has {num} ranks")
    precision = Precision(
        None, plan.wire.vectors, plan.wire.gradients, plan.wire.dense, plan.dense.dtype, plan.dense.state
    )
    dtypes = {table.table: table.placement.weight_dtype for table in plan.tables}
    demands, by_row = (
        tuple(replace(demand, weight_bytes=DTYPE_BYTES[dtypes[demand.table.name]]) for demand in each)
        for each in (problem.table_loads, problem.row_exchange_loads)
    )
    problem = replace(
        problem,
        precision=precision,
        table_loads=demands,
        row_exchange_loads=by_row,
        dense=plan.dense,
        expand_blocks=True,
    )
    by_name = {demand.table.name: number for number, demand in enumerate(demands)}
    pieces: list[tuple[ShardUnit, tuple[int, ...]]] = []
    replicas: list[int] = []
    for table in plan.tables:
        if len(table.rects) == 1 and len(table.rects[0].ranks) == num > 1:
            replicas.append(by_name[table.table])
        else:
            pieces += _pieces(problem, by_name[table.table], table)
    units, ranks = (tuple(column) for column in zip(*pieces, strict=True)) if pieces else ((), ())
    placed = PlacedTables(units, ranks, tuple(replicas))
    kept = [_kept(problem, placed, by_name[table.table], table) for table in plan.tables]
    rows = [rows for _, rows in sorted(kept)]
    if not budget.fits_memory(problem, placed, rows):
        raise UserError(f"the plan does not fit the memory of {problem.cluster.name}")
    near = tuple(
        float(demand.hot_id_share(most)) for demand, most in zip(problem.placed_loads(placed), rows, strict=True)
    )
    shares = {by_name[table.table]: table.placement.tiers for table in plan.tables}
    loads = tasks.rank_loads(problem, placed, near)
    orders = tuple(one for one in stages.IDS_AFTER if tasks.required_stages(problem, loads, one) == plan.stages)
    return Candidate(
        problem,
        search.Proposal(),
        placed,
        loads,
        near,
        tuple(shares[at] for at in range(len(demands))),
        *tasks.predict_step(problem, placed, loads, orders or tuple(stages.IDS_AFTER)),
    )


def _kept(problem: Problem, placed: PlacedTables, number: int, table: TablePlan) -> tuple[int, int]:
    """The table's number, and how many of its rows lie in the fastest tier."""
    rows = problem.table_loads[number].table.rows
    known = [tier.name for tier in problem.cluster.device.tiers]
    for tier, _ in table.placement.tiers:
        if tier not in known:
            raise UserError(
                f'table "{table.table}" lies in tier "{tier}"; {problem.cluster.name} has {", ".join(known)}'
            )
    first = table.placement.tiers[0]
    if first.tier != problem.cluster.device.tiers[0].name:
        return number, 0
    return number, rows if first.rows is None else min(rows, first.rows * placed.num_row_shards(number))


def _pieces(problem: Problem, number: int, table: TablePlan) -> Iterator[tuple[ShardUnit, tuple[int, ...]]]:
    """Column by column, what the planner would have called a piece: each rank has as much as the fullest."""
    levels, copies = problem.cluster.levels, _copies(problem.cluster, table)
    by_row = table.travel == "rows" and problem.table_loads[number].local_pooling is None
    demand = (problem.row_exchange_loads if by_row else problem.table_loads)[number]
    sizes = [prod(level.num for level in levels[:reach]) for reach in range(len(levels) + 1)]
    by_columns: dict[tuple[int, int], list[Rect]] = {}
    for rect in table.rects:
        by_columns.setdefault(rect.cols, []).append(rect)
    for at, (columns, rects) in enumerate(sorted(by_columns.items())):
        rows = sorted(rects, key=lambda rect: rect.rows)
        of_copies = list(zip(*(sorted(rect.ranks) for rect in rows), strict=True))
        for ranks in of_copies:
            first = min(ranks) // len(ranks) * len(ranks)
            if len(ranks) not in sizes or sorted(ranks) != list(range(first, first + len(ranks))):
                raise UserError(
                    f'table "{table.table}" has its rows on ranks {ranks}, which is no whole group of a level'
                )
        reach = sizes.index(len(rows))
        name = "row" if reach == len(levels) > 0 else ("table", "table-row")[reach > 0]
        if len(by_columns) > 1:
            name = "column-row" if reach else "column"
        if copies > 1:
            name = "copy-row" if reach else "copy-column" if len(by_columns) > 1 else "copy-table"
        parts = [rect.rows for rect in rows]
        most_rows = max(end - start for start, end in parts)
        yield (
            sharding.make_shard_unit(
                number,
                demand,
                Sharding(name, len(by_columns), reach, row_exchange=by_row, num_replicas=copies),
                at,
                columns,
                problem.cluster,
                problem.batch_size,
                (table.order, most_rows, sharding.id_shares(demand, parts, table.order)),
            ),
            tuple(chain.from_iterable(of_copies)),
        )


def _copies(cluster: Cluster, table: TablePlan) -> int:
    """How many there are of a table: one, or one in each group that some of the levels join."""
    nums = {len(rect.ranks) for rect in table.rects}
    if nums == {1}:
        return 1
    copies, num = max(nums), cluster.num_ranks
    groups = {prod(level.num for level in cluster.levels[at:]) for at in range(1, len(cluster.levels))} - {num}
    for rect in table.rects:
        if copies not in groups or [rank * copies // num for rank in sorted(rect.ranks)] != list(range(copies)):
            raise UserError(
                f'table "{table.table}" has replicas on ranks {rect.ranks}; what can be priced is the whole table on '
                "every rank, or one copy of all its rows and columns in every group of a level"
            )
    return copies
