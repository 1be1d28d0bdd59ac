"""Change where a plan has the rows of tables, and how fresh they are."""

from collections.abc import Mapping
from dataclasses import replace

from shardwright.errors import UserError, did_you_mean
from shardwright.planner.servers import on_servers
from shardwright.planner.step.stages import has_copies, with_copies, with_prefetch
from shardwright.spec.plan import Bounded, Plan, Share
from shardwright.spec.row_cache import DISK, GPU, HOST, SERVERS, WAYS
from shardwright.spec.stage_checks import max_staleness


def keep_on_disk(plan: Plan, rows_in_memory: Mapping[str, int]) -> Plan:
    """The plan with the rows of these tables on disk; of each of their shards, so many rows are in memory at a time.

    They must hold the rows of the batches in flight: of this and the next step. The rows are stored below the folder
    for temporary files (TMPDIR).
    """
    return replace(_cached(plan, rows_in_memory, HOST, DISK), stages=with_prefetch(plan.stages))


def keep_in_host_memory(plan: Plan, rows_in_gpu_memory: Mapping[str, int]) -> Plan:
    """The plan with these tables in host memory; so many rows of each are in GPU memory at a time.

    For one process: `build(model, plan, Mesh(device="cuda"))`. The rows in GPU memory must hold those of the batches in
    flight: of this and the next step.
    """
    plan = _cached(plan, rows_in_gpu_memory, GPU, HOST)
    return replace(plan, stages=with_prefetch(plan.stages, from_host=True))


def allow_staleness(plan: Plan, bounds: Mapping[str, Bounded]) -> Plan:
    """The plan in which ranks read rows of these tables from copies that may be stale within these bounds.

    Adds the needed "staleness<=N" to `allow`. Each row needs one owner: a table is one shard, or has row shards.
    """
    names = [table.table for table in plan.tables]
    for name in bounds:
        if name not in names:
            raise UserError(f'no table "{name}" in the plan{did_you_mean(name, names)}')
    tables = tuple(
        replace(table, placement=replace(table.placement, sync=bounds[table.table]), travel="rows")
        if table.table in bounds
        else table
        for table in plan.tables
    )
    if plan.num_ranks == 1:
        raise UserError("bounded staleness is for copies of rows of other ranks, and this plan is for one process")
    most = max((sync.max_missed(plan.num_ranks) for sync in bounds.values()), default=0)
    if not most:
        return replace(plan, tables=tables)
    allow = plan.allow if max_staleness(plan.allow) >= most else (*plan.allow, f"staleness<={most}")
    return replace(plan, tables=tables, stages=with_copies(plan.stages), allow=allow)


def keep_on_servers(plan: Plan, tables: Mapping[str, Bounded | int], servers: int = 1) -> Plan:
    """The plan with the rows of these tables on `servers` table servers, in equal parts.

    A number: ranks own the rows, as the plan has shared them out, and each has so many rows of each of its shards in
    memory; the others are on servers. Exact. A `Bounded(pull, push, copies)`: servers own the rows, and each rank reads
    and updates any of them through copies; `Bounded(0, 0, copies)` is exact: a rank asks for each batch which of its
    copies other ranks have changed. Larger bounds ask less often; they add the needed "staleness<=N" to `allow`. One
    plan has numbers or bounds, not both.
    """
    if servers < 1:
        raise UserError(f"servers is {servers}; wanted 1 or more")
    rows = {name: num for name, num in tables.items() if isinstance(num, int)}
    bounds = {name: sync for name, sync in tables.items() if isinstance(sync, Bounded)}
    if rows and bounds:
        raise UserError(
            f'keep_on_servers: table "{next(iter(rows))}" has a number of rows in memory, and "{next(iter(bounds))}" '
            "has bounds; give all tables the same"
        )
    if rows:
        plan = _cached(plan, rows, HOST, SERVERS)
        return replace(plan, servers=servers, stages=with_prefetch(plan.stages))
    return _owned_by_servers(plan, bounds, servers)


def _owned_by_servers(plan: Plan, bounds: Mapping[str, Bounded], servers: int) -> Plan:
    """The plan in which servers own the rows of these tables."""
    names = [table.table for table in plan.tables]
    for name in bounds:
        if name not in names:
            raise UserError(f'no table "{name}" in the plan{did_you_mean(name, names)}')
    if has_copies(plan.stages):
        raise UserError(
            "the plan has tables with bounded staleness on ranks, or on servers, already: start from one without"
        )
    tables = tuple(
        on_servers(table, bounds[table.table], plan.num_ranks, servers) if table.table in bounds else table
        for table in plan.tables
    )
    most = max((sync.max_missed(plan.num_ranks) for sync in bounds.values()), default=0)
    allow = plan.allow if max_staleness(plan.allow) >= most else (*plan.allow, f"staleness<={most}")
    stages = with_copies(plan.stages, of_servers=True)
    return replace(plan, tables=tables, servers=servers, stages=stages, allow=allow)


def _cached(plan: Plan, lines: Mapping[str, int], fast: str, slow: str) -> Plan:
    """The plan with so many rows of each shard of these tables in a fast tier, and all others in a slow one."""
    names = [table.table for table in plan.tables]
    for name, rows in lines.items():
        if name not in names:
            raise UserError(f'no table "{name}" in the plan{did_you_mean(name, names)}')
        if rows < WAYS:
            raise UserError(f'{rows} rows of table "{name}" in faster memory; wanted {WAYS} or more')
    tables = tuple(
        replace(table, placement=replace(table.placement, tiers=(Share(fast, lines[table.table]), Share(slow))))
        if table.table in lines
        else table
        for table in plan.tables
    )
    return replace(plan, tables=tables)
