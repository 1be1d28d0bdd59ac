"""The predicted step of a plan that already exists, made by the planner or by hand."""

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
    """Predict the step of a plan at this problem's batch size, on its cluster, with the plan's shards, tiers and
    precision. Its stages are kept if the planner could have made them; else the best order is taken."""
    num = problem.cluster.num_ranks
    if prod(size for _, size in plan.axes) != num:
        raise UserError(f"the plan is for axes {dict(plan.axes)}; {problem.cluster.name} has {num} ranks")
    precision = Precision(
        None, plan.wire.vectors, plan.wire.gradients, plan.wire.dense, plan.dense.dtype, plan.dense.state
    )
    dtypes = {table.table: table.placement.weight_dtype for table in plan.tables}
    vector_loads, row_loads = (
        tuple(replace(load, weight_bytes=DTYPE_BYTES[dtypes[load.table.name]]) for load in loads)
        for loads in (problem.table_loads, problem.row_exchange_loads)
    )
    problem = replace(
        problem,
        precision=precision,
        table_loads=vector_loads,
        row_exchange_loads=row_loads,
        dense=plan.dense,
        expand_blocks=True,
    )
    number_of = {load.table.name: number for number, load in enumerate(vector_loads)}
    placements: list[tuple[ShardUnit, tuple[int, ...]]] = []
    data_parallel: list[int] = []
    for table in plan.tables:
        if len(table.rects) == 1 and len(table.rects[0].ranks) == num > 1:
            data_parallel.append(number_of[table.table])
        else:
            placements += _placed_units(problem, number_of[table.table], table)
    units, ranks = (tuple(column) for column in zip(*placements, strict=True)) if placements else ((), ())
    placed = PlacedTables(units, ranks, tuple(data_parallel))
    fast_rows = [_fast_rows(problem, placed, number_of[table.table], table) for table in plan.tables]
    rows = [rows for _, rows in sorted(fast_rows)]
    if not budget.fits_memory(problem, placed, rows):
        raise UserError(f"the plan does not fit the memory of {problem.cluster.name}")
    fast_id_shares = tuple(
        float(load.hot_id_share(num_rows)) for load, num_rows in zip(problem.placed_loads(placed), rows, strict=True)
    )
    tiers = {number_of[table.table]: table.placement.tiers for table in plan.tables}
    loads = tasks.rank_loads(problem, placed, fast_id_shares)
    matching = tuple(after for after in stages.IDS_AFTER if tasks.required_stages(problem, loads, after) == plan.stages)
    return Candidate(
        problem,
        search.Proposal(),
        placed,
        loads,
        fast_id_shares,
        tuple(tiers[number] for number in range(len(vector_loads))),
        *tasks.predict_step(problem, placed, loads, matching or tuple(stages.IDS_AFTER)),
    )


def _fast_rows(problem: Problem, placed: PlacedTables, number: int, table: TablePlan) -> tuple[int, int]:
    """The table's number, and how many of its rows are in the fastest tier."""
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


def _placed_units(problem: Problem, number: int, table: TablePlan) -> Iterator[tuple[ShardUnit, tuple[int, ...]]]:
    """A unit for each column shard of the plan, and its ranks. Its rows per rank are those of the fullest rank."""
    cluster, num_replicas = problem.cluster, _num_replicas(problem.cluster, table)
    row_exchange = table.travel == "rows" and problem.table_loads[number].local_pooling is None
    load = (problem.row_exchange_loads if row_exchange else problem.table_loads)[number]
    by_columns: dict[tuple[int, int], list[Rect]] = {}
    for rect in table.rects:
        by_columns.setdefault(rect.cols, []).append(rect)
    for i, (columns, rects) in enumerate(sorted(by_columns.items())):
        by_rows = sorted(rects, key=lambda rect: rect.rows)
        ranks_by_replica = list(zip(*(sorted(rect.ranks) for rect in by_rows), strict=True))
        shape = replace(
            _row_sharding(cluster, table, ranks_by_replica),
            column_shards=len(by_columns),
            row_exchange=row_exchange,
            num_replicas=num_replicas,
        )
        row_ranges = [rect.rows for rect in by_rows]
        max_rows = max(end - start for start, end in row_ranges)
        yield (
            sharding.make_shard_unit(
                number,
                load,
                shape,
                i,
                columns,
                cluster,
                problem.batch_size,
                sharding.RowSplit(table.order, max_rows, sharding.id_shares(load, row_ranges, table.order)),
            ),
            tuple(chain.from_iterable(ranks_by_replica)),
        )


def _row_sharding(cluster: Cluster, table: TablePlan, ranks_by_replica: list[tuple[int, ...]]) -> Sharding:
    """The sharding of rows over the ranks of a whole group, or over any ranks if there are no replicas."""
    sizes = [prod(level.num for level in cluster.levels[:reach]) for reach in range(len(cluster.levels) + 1)]
    for ranks in ranks_by_replica:
        first = min(ranks) // len(ranks) * len(ranks)
        if len(ranks) not in sizes or sorted(ranks) != list(range(first, first + len(ranks))):
            if len(ranks_by_replica) == 1:
                return sharding.rows_on_ranks(table.scheme, ranks, cluster)
            raise UserError(f'table "{table.table}" has its rows on ranks {ranks}, which is no whole group of a level')
    return Sharding(table.scheme, row_levels=sizes.index(len(ranks_by_replica[0])))


def _num_replicas(cluster: Cluster, table: TablePlan) -> int:
    """The number of replicas of a table: one, or one in each group that some of the levels join."""
    nums = {len(rect.ranks) for rect in table.rects}
    if nums == {1}:
        return 1
    replicas, num = max(nums), cluster.num_ranks
    groups = {prod(level.num for level in cluster.levels[at:]) for at in range(1, len(cluster.levels))} - {num}
    for rect in table.rects:
        if replicas not in groups or [rank * replicas // num for rank in sorted(rect.ranks)] != list(range(replicas)):
            raise UserError(
                f'table "{table.table}" has replicas on ranks {rect.ranks}; what can be priced is the whole table on '
                "every rank, or one copy of all its rows and columns in every group of a level"
            )
    return replicas
