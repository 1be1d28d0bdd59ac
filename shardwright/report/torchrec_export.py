"""Export a plan to TorchRec as a Python module whose `sharding_plan(path)` returns a ShardingPlan.

Exports only plans of `make_plan(torchrec=True)`; other plans may use features that TorchRec does not have.
"""

from textwrap import fill

from shardwright.errors import UserError
from shardwright.planner.plan import PlanningResult
from shardwright.planner.tables.schemes import find_scheme
from shardwright.report.units import time_text
from shardwright.spec.plan import TablePlan

SOURCE_HEAD = '''\
"""A plan by Shardwright, for TorchRec: DistributedModelParallel(model, plan=sharding_plan("sparse"), ...).

{slowdown}
Set the precision of tables in the model, and the precision of messages in its QCommsConfig: the plan assumes tables in
{tables}, vectors in {vectors} and their gradients in {gradients}.
"""

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

LOCAL_RANKS = {local}
DEVICE = "{device}"
# table: sharding type, kernel, rows, columns, number of column shards, ranks (by column shard)
TABLES = {
'''
SOURCE_TAIL = '''}


def shards(rows, columns, column_shards, ranks):
    """Yield the shards of a table: each column shard is split into even blocks of rows over its ranks."""
    row_shards, width = len(ranks) // column_shards, columns // column_shards
    block = -(-rows // row_shards)
    for index, rank in enumerate(ranks):
        column_shard, row_shard = divmod(index, row_shards)
        start, end = min(row_shard * block, rows), min((row_shard + 1) * block, rows)
        placement = f"rank:{rank}/cpu" if DEVICE == "cpu" else f"rank:{rank}/cuda:{rank % LOCAL_RANKS}"
        yield ShardMetadata([start, column_shard * width], [end - start, width], placement)


def sharding_plan(path: str) -> ShardingPlan:
    """The plan of the module at `path` that holds the tables; an empty path is the model itself.

    Tables MEMBER.NAME, of an EmbeddingBagsDict, are in the module MEMBER of that module.
    """
    modules = {}
    for name, (kind, kernel, rows, columns, column_shards, ranks) in TABLES.items():
        is_replicated = kind == "data_parallel"
        spec = None if is_replicated else EnumerableShardingSpec(list(shards(rows, columns, column_shards, ranks)))
        member, _, table = name.rpartition(".")
        tables = modules.setdefault(".".join(filter(None, (path, member))), EmbeddingModuleShardingPlan())
        tables[table] = ParameterSharding(kind, kernel, ranks=list(ranks), sharding_spec=spec)
    return ShardingPlan(modules)
'''


def plan_source(torchrec_result: PlanningResult, slowdown: str = "") -> str:
    """Source of the Python module; `slowdown` compares `torchrec_result` with the unrestricted plan."""
    cluster, wire = torchrec_result.candidate.problem.cluster, torchrec_result.plan.wire
    values = {
        "slowdown": fill(slowdown or f"Predicted: {time_text(torchrec_result.candidate.seconds)} per step.", 119),
        "tables": " and ".join(sorted({table.placement.weight_dtype for table in torchrec_result.plan.tables})),
        "vectors": wire.vectors,
        "gradients": wire.gradients,
        "local": str(cluster.levels[0].num if cluster.levels else 1),
        "device": cluster.device.kind,
    }
    head = SOURCE_HEAD
    for name, value in values.items():
        head = head.replace(f"{{{name}}}", value)
    lines = [
        f"    {table.table!r}: {_table_entry(torchrec_result, index)},\n"
        for index, table in enumerate(torchrec_result.plan.tables)
    ]
    return head + "".join(lines) + SOURCE_TAIL


def describe_slowdown(result: PlanningResult, torchrec_result: PlanningResult) -> str:
    """Compare the predicted step within TorchRec's limits with `result`; name features that TorchRec lacks."""
    ours, theirs = result.candidate.seconds, torchrec_result.candidate.seconds
    missing: list[str] = []
    if num_row_exchange := sum(table.travel == "rows" for table in result.plan.tables):
        missing.append(f"deduplicated row exchange ({_num_tables_text(num_row_exchange)})")
    if num_row_orders := sum(table.order != "id" for table in result.plan.tables):
        missing.append(f"rows split by load or hash ({_num_tables_text(num_row_orders)})")
    if num_replicated := sum(
        result.candidate.sharding(number).num_replicas > 1 for number in range(len(result.plan.tables))
    ):
        missing.append(f"replicas per host ({_num_tables_text(num_replicated)})")
    step = f"Within the limits of TorchRec a step is predicted to take {time_text(theirs)}"
    if not missing:
        return f"{step}: this plan uses only features that TorchRec has."
    return (
        f"{step}, {theirs / ours:.3g}x as long as with this plan ({time_text(ours)}). "
        f"TorchRec has no {' and no '.join(missing)}."
    )


def _num_tables_text(num: int) -> str:
    return f"{num} table{'s' * (num > 1)}"


def _table_entry(result: PlanningResult, index: int) -> str:
    planned, table = result.plan.tables[index], result.candidate.problem.table_loads[index].table
    sharding_type = find_scheme(planned.scheme).torchrec
    if not sharding_type or planned.travel == "rows":
        raise UserError(f'table "{planned.table}" has a layout that TorchRec does not have; plan with torchrec=True')
    by_columns = _ranks_by_columns(planned)
    ranks = [rank for group in by_columns.values() for rank in group]
    kernel = (
        "dense"
        if sharding_type == "data_parallel"
        else "fused_uvm_caching"
        if len(planned.placement.tiers) > 1
        else "fused"
    )
    return f"({sharding_type!r}, {kernel!r}, {table.rows}, {table.dim}, {len(by_columns)}, {_ranks_text(ranks)})"


def _ranks_text(ranks: list[int]) -> str:
    consecutive = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"range({ranks[0]}, {ranks[-1] + 1})" if consecutive else repr(ranks)


def _ranks_by_columns(table_plan: TablePlan) -> dict[tuple[int, int], list[int]]:
    """Ranks of each column shard, ascending as in TorchRec."""
    ranks_by_columns: dict[tuple[int, int], list[int]] = {}
    for rect in sorted(table_plan.rects, key=lambda rect: rect.cols):
        ranks_by_columns.setdefault(rect.cols, []).extend(rect.ranks)
    return {columns: sorted(ranks) for columns, ranks in ranks_by_columns.items()}
