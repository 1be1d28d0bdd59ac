"""Refuse plans with settings that this version does not implement; the error names the setting."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from shardwright.errors import UserError
from shardwright.spec.plan import TABLE_DTYPES, Bounded, Exact, Plan, TablePlan, single_rank_table_plan, widest_dtype
from shardwright.spec.row_cache import DISK, GPU, HOST, SERVERS
from shardwright.spec.workload import Table

CPU_REMEDY = 'set run.device=cpu, or build on Mesh(device="cpu")'
EXACT_REMEDY = 'remove "staleness<=N" from allow, or leave the table out of allow_staleness or keep_on_servers'


def is_single_process(plan: Plan) -> bool:
    """Whether one rank has every table as a whole, in memory, with rows in the order of their ids."""
    return plan.num_ranks + plan.servers == 1 and all(
        table.order == "id" and len(table.rects) == 1 and cached_rows(table) is None for table in plan.tables
    )


def cached_rows(planned: TablePlan) -> int | None:
    """Of a table with rows on disk or on table servers, the number of rows of each shard that are in memory at a
    time."""
    tiers = planned.placement.tiers
    return tiers[0].rows if len(tiers) == 2 and tiers[1].tier in (DISK, SERVERS) else None


def is_cached_from_servers(planned: TablePlan) -> bool:
    """Whether ranks own a table's shards, and have room for some of their rows: the others are on table servers."""
    return planned.placement.tiers[-1].tier == SERVERS


def gpu_rows(planned: TablePlan) -> int | None:
    """Of a table in host memory, the number of rows that are in GPU memory at a time."""
    tiers = planned.placement.tiers
    return tiers[0].rows if [share.tier for share in tiers] == [GPU, HOST] else None


def check_supported(plan: Plan, tables: Sequence[Table]) -> None:
    """Raise for the first setting of the plan that is not supported for a model with these tables."""
    stages = {stage.name for stage in plan.stages}
    if plan.version < 4 or ("prefetch" in stages and "expect" not in stages):
        raise UserError(
            f"this plan of version {plan.version} was written by an earlier Shardwright, whose steps have other "
            "stages; plan this model again"
        )
    specs, is_local = {table.name: table for table in tables}, is_single_process(plan)
    planned = {table.table for table in plan.tables}
    if planned != set(specs):
        raise UserError(f"the plan has tables {sorted(planned)}, the model {sorted(specs)}; plan this model again")
    wire_dtypes = {plan.wire.vectors, plan.wire.gradients, plan.wire.dense}
    roles = {axis.role for axis in plan.axes if axis.size > 1}
    supported_roles = {"data"} if plan.pipeline is None else {"data", "pipe"}
    checks = [
        *((f"axes: {role} parallelism", True) for role in sorted(roles - supported_roles)),
        ("pipeline", plan.pipeline is not None and bool(plan.tables)),
        ("wire", is_local and wire_dtypes != {widest_dtype(tables)}),
        ("dense.shard", is_local and bool(plan.dense.shard)),
        ("dense.shard_optimizer", bool(plan.dense.shard_optimizer)),
        ("dense.offload_activations", bool(plan.dense.offload_activations)),
    ]
    unsupported = [name for name, is_unsupported in checks if is_unsupported]
    unsupported += [name for table in plan.tables for name in _check_table(plan, table, specs[table.table])]
    if unsupported:
        raise UserError(
            f"the plan's {unsupported[0]}: this version keeps tables in memory, with rows on disk, or in one process "
            "in host memory with rows in GPU memory, in the model's precision or a 16-bit one that the plan's allow "
            "permits; plan this model again"
        )


def gpu_obstacle(plan: Plan, tables: Sequence[Table]) -> str:
    """What this version computes on CPUs only, of a plan and the tables of its model; empty: nothing."""
    growing = next((table.name for table in tables if table.growth is not None), None)
    cached = next((table.table for table in plan.tables if cached_rows(table) is not None), None)
    bounded = next((table.table for table in plan.tables if isinstance(table.placement.sync, Bounded)), None)
    obstacles = [
        (f'table "{growing}" grows', growing is not None),
        ("tables are on table servers", plan.servers > 0),
        (f'table "{cached}" has rows on disk', cached is not None),
        (f'table "{bounded}" has bounded staleness', bounded is not None),
        ("the plan has a pipeline", plan.pipeline is not None),
        ("the plan splits experts over ranks", bool(plan.experts)),
    ]
    return next((text for text, applies in obstacles if applies), "")


def check_gpu(plan: Plan, tables: Sequence[Table]) -> None:
    """Raise for a plan that this version does not compute on GPUs."""
    if obstacle := gpu_obstacle(plan, tables):
        raise UserError(f"{obstacle}, and the job is on a GPU: this version computes that on CPUs only; {CPU_REMEDY}")


def _check_table(plan: Plan, planned: TablePlan, table: Table) -> Iterator[str]:
    """Yield the fields of a table's plan whose values this version does not support."""
    if table.growth is not None:
        yield from _check_growing(planned)
    if cached_rows(planned) is not None:
        if any(len(rect.ranks) > 1 for rect in planned.rects):
            yield f"replicas of table {planned.table}, which has rows on disk or on servers"
        if is_cached_from_servers(planned) and planned.placement.weight_dtype not in ("float32", "float64"):
            yield f"weights in {planned.placement.weight_dtype} of table {planned.table}, which has rows on servers"
        planned = replace(
            planned, placement=replace(planned.placement, tiers=(planned.placement.tiers[0]._replace(rows=None),))
        )
    if gpu_rows(planned) is not None and plan.num_ranks == 1 and table.growth is None:
        planned = replace(planned, placement=replace(planned.placement, tiers=planned.placement.tiers[1:]))
    if isinstance(planned.placement.sync, Bounded):
        _refuse_bounded(plan, planned, table)
        planned = replace(planned, placement=replace(planned.placement, sync=Exact()))
    dtype = planned.placement.weight_dtype
    is_allowed = any(entry in plan.allow and allowed == dtype for entry, allowed in TABLE_DTYPES.items())
    supported = single_rank_table_plan(table, dtype if is_allowed else None).placement
    for field in fields(supported):
        if getattr(planned.placement, field.name) != getattr(supported, field.name):
            yield f"{field.name} of table {planned.table}"


def _refuse_bounded(plan: Plan, planned: TablePlan, table: Table) -> None:
    """Raise for what this version does not support for a table with bounded staleness."""
    placement, wire = planned.placement, plan.wire
    faults = [
        ("grows", table.growth is not None),
        (f"weights in {placement.weight_dtype}", placement.weight_dtype not in ("float32", "float64")),
        (f"vectors in {wire.vectors} between ranks", wire.vectors in ("float16", "bfloat16")),
        (f"gradients in {wire.gradients} between ranks", wire.gradients in ("float16", "bfloat16")),
    ]
    for fault, is_fault in faults:
        if is_fault:
            raise UserError(
                f'table "{planned.table}" has bounded staleness or is on servers, and {fault}, which this version '
                f"does not support together: {EXACT_REMEDY}"
            )


def _check_growing(planned: TablePlan) -> Iterator[str]:
    """Yield what this version does not support for a table that grows."""
    if planned.order != "hash:0":
        yield f"order of table {planned.table}, which grows"
    if planned.travel != "vectors":
        yield f"row exchange of table {planned.table}, which grows"
    if any(len(rect.ranks) > 1 for rect in planned.rects):
        yield f"replicas of table {planned.table}, which grows"
    if cached_rows(planned) is not None:
        yield f"rows on disk or on servers of table {planned.table}, which grows"
