"""The predicted step of a plan that already exists, made by the planner or by hand."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from shardwright.errors import UserError
from shardwright.planner import expert_split, owned_rows, pipelines, search, servers, staleness
from shardwright.planner.chunks import check_blocks
from shardwright.planner.memory import row_tiers
from shardwright.planner.price.axis_groups import check_axes
from shardwright.planner.problem import PlacedTables, PlacedUnit, Precision, Problem, ServerRequest
from shardwright.planner.search import Candidate
from shardwright.planner.step import prediction, stages, tasks
from shardwright.planner.tables import sharding
from shardwright.planner.tables.sharding import Sharding
from shardwright.spec.axes import axes_text
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Bounded, Plan, Rect, TablePlan
from shardwright.spec.workload import DTYPE_BYTES


def reprice_plan(problem: Problem, plan: Plan) -> Candidate:
    """Predict the step of a plan at this problem's batch size, on its cluster, with the plan's shards, tiers and
    precision. Its stages are kept if the planner could have made them; else the best order is taken."""
    num_ranks = problem.cluster.num_ranks
    if plan.num_ranks != num_ranks:
        raise UserError(f"the plan is for {axes_text(plan.axes)}; {problem.cluster.name} has {num_ranks} ranks")
    request = problem.servers or ServerRequest(plan.servers)
    owned = {table.table for table in plan.tables if min(table.rects[0].ranks) >= num_ranks}
    request = replace(request, num=plan.servers, own=bool(owned)) if plan.servers else None
    problem = servers.with_servers(_without_copies(problem), request)
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
    if plan.pipeline is not None:
        check_axes(problem.cluster, plan.axes)
        check_blocks(problem.workload, plan.pipeline)
        problem = replace(problem, axes=plan.axes, pipeline=plan.pipeline)
    if plan.experts:
        parts = pipelines.micro_batch_problem(problem)
        problem = replace(problem, experts=tuple(expert_split.split_as(parts, part) for part in plan.experts))
    number_of = {load.table.name: number for number, load in enumerate(vector_loads)}
    syncs = {number_of[table.table]: table.placement.sync for table in plan.tables}
    copied = {number: sync for number, sync in syncs.items() if isinstance(sync, Bounded)}
    if num_ranks > 1 and not owned:
        bounds = {number: sync for number, sync in copied.items() if sync.has_copies}
        problem = staleness.with_bounds(problem, bounds)
    problem = owned_rows.with_owners(problem, copied if owned else {})
    placements: list[PlacedUnit] = []
    data_parallel: list[int] = []
    for table in plan.tables:
        if table.table in owned:
            continue
        if len(table.rects) == 1 and len(table.rects[0].ranks) == num_ranks > 1:
            data_parallel.append(number_of[table.table])
        else:
            placements += _placed_units(problem, number_of[table.table], table)
    placed = PlacedTables.from_pairs(placements, tuple(data_parallel), problem.served_tables)
    by_number = {number_of[table.table]: table for table in plan.tables}
    rows = [_rows_by_tier(problem, placed, number, by_number[number]) for number in sorted(by_number)]
    if not row_tiers.fits_memory(problem, placed, [*zip(*rows, strict=True)]):
        raise UserError(f"the plan does not fit the memory of {problem.cluster.name}")
    tiers = tuple(
        row_tiers.RowTiers(table.placement.tiers, row_tiers.found_by_tier(problem, load, own))
        for table, load, own in zip(
            (by_number[number] for number in sorted(by_number)), problem.placed_loads(placed), rows, strict=True
        )
    )
    loads = tasks.rank_loads(problem, placed, [table.found for table in tiers])
    choices = tuple(stages.IDS_AFTER) if plan.tables else tuple(stages.IDS_AFTER)[:1]  # without tables there are no ids
    matching = tuple(after for after in choices if tasks.required_stages(problem, loads, after) == plan.stages)
    return Candidate(
        problem,
        search.Proposal(),
        placed,
        loads,
        tiers,
        *prediction.predict_step(problem, placed, loads, matching or choices),
    )


def _without_copies(problem: Problem) -> Problem:
    """The problem before bounds of copies were chosen."""
    if not any(load.copied is not None for load in problem.row_exchange_loads):
        return problem
    fresh = search.define_problem(
        problem.workload, problem.cluster, problem.batch_size, problem.precision, torchrec=problem.torchrec
    )
    return replace(problem, row_exchange_loads=fresh.row_exchange_loads)


def _rows_by_tier(problem: Problem, placed: PlacedTables, number: int, table: TablePlan) -> tuple[int, ...]:
    """By tier, the rows of a table in it and in faster ones."""
    rows, tiers = problem.table_loads[number].table.rows, [tier.name for tier in problem.cluster.device.tiers]
    if number in placed.served_tables:
        return (rows,) * len(tiers)
    for tier, _ in table.placement.tiers:
        if tier not in tiers:
            raise UserError(
                f'table "{table.table}" has rows in tier "{tier}"; {problem.cluster.name} has {", ".join(tiers)}'
            )
    shares = {share.tier: share.rows for share in table.placement.tiers}
    within = [0]
    for tier in tiers:
        own = shares.get(tier, 0)
        within.append(rows if own is None else min(rows, within[-1] + own * placed.num_row_shards(number)))
    return tuple(within[1:])


def _placed_units(problem: Problem, number: int, table: TablePlan) -> Iterator[PlacedUnit]:
    """A unit for each column shard of the plan, with its ranks. Its bytes are those of the rank with most rows."""
    cluster, num_replicas = problem.cluster, _num_replicas(problem.cluster, table)
    row_exchange = table.travel == "rows" and problem.table_loads[number].local_pooling is None
    load = (problem.row_exchange_loads if row_exchange else problem.table_loads)[number]
    by_columns: dict[tuple[int, int], list[Rect]] = {}
    for rect in table.rects:
        by_columns.setdefault(rect.cols, []).append(rect)
    for i, (columns, rects) in enumerate(sorted(by_columns.items())):
        by_rows = sorted(rects, key=lambda rect: rect.rows)
        ranks_by_replica = list(zip(*(sorted(rect.ranks) for rect in by_rows), strict=True))
        unit_sharding = replace(
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
                unit_sharding,
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
    sizes = [cluster.group_size(num_levels) for num_levels in range(len(cluster.levels) + 1)]
    for ranks in ranks_by_replica:
        first = min(ranks) // len(ranks) * len(ranks)
        if len(ranks) not in sizes or sorted(ranks) != list(range(first, first + len(ranks))):
            if len(ranks_by_replica) == 1:
                return sharding.rows_on_ranks(table.scheme, ranks, cluster)
            raise UserError(f'table "{table.table}" has its rows on ranks {ranks}, which are not a group of a level')
    return Sharding(table.scheme, row_levels=sizes.index(len(ranks_by_replica[0])))


def _num_replicas(cluster: Cluster, table: TablePlan) -> int:
    """The number of replicas of a table: one, or one in each group of a level."""
    nums = {len(rect.ranks) for rect in table.rects}
    if nums == {1}:
        return 1
    replicas, num = max(nums), cluster.num_ranks
    replica_counts = {num // cluster.group_size(num_levels) for num_levels in range(1, len(cluster.levels))} - {num}
    for rect in table.rects:
        if replicas not in replica_counts or [rank * replicas // num for rank in sorted(rect.ranks)] != list(
            range(replicas)
        ):
            raise UserError(
                f'table "{table.table}" has replicas on ranks {rect.ranks}; supported are the whole table on every '
                "rank, and one copy of all its rows and columns in every group of a level"
            )
    return replicas
