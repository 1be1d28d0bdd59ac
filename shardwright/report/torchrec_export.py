"""Export a plan to TorchRec: a Python module whose `sharding_plan(path)` is the ShardingPlan of the module at `path`.

Exports only plans made with `make_plan(torchrec=True)`; others may use features that TorchRec does not have.
"""

from textwrap import fill

from shardwright.errors import UserError
from shardwright.planner.plan import PlanningResult
from shardwright.planner.tables.schemes import find_scheme
from shardwright.report.units import time_text
from shardwright.spec.plan import TablePlan

SOURCE_HEAD = '''\
"""A plan by Shardwright, for TorchRec: DistributedModelParallel(model, plan=sharding_plan("sparse"), ...).

{loss}
Set the precision of tables in the model, and that of messages in its QCommsConfig: the plan assumes tables in
{tables}, vectors in {vectors} and their gradients in {gradients}.
"""

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

LOCAL_RANKS = {local}
DEVICE = "{device}"
# table: sharding type, kernel, rows, columns, column shards, ranks (those of the first column shard first)
TABLES = {
'''
SOURCE_TAIL = '''}


def shards(rows, columns, pieces, ranks):
    """Even blocks of rows, of each column shard over its ranks."""
    spread, width = len(ranks) // pieces, columns // pieces
    block = -(-rows // spread)
    for at, rank in enumerate(ranks):
        piece, part = divmod(at, spread)
        top, bottom = min(part * block, rows), min((part + 1) * block, rows)
        place = f"rank:{rank}/cpu" if DEVICE == "cpu" else f"rank:{rank}/cuda:{rank % LOCAL_RANKS}"
        yield ShardMetadata([top, piece * width], [bottom - top, width], place)


def sharding_plan(path: str) -> ShardingPlan:
    """For the module of that name whose tables these are; empty for the model itself."""
    tables = EmbeddingModuleShardingPlan()
    for name, (kind, kernel, rows, columns, pieces, ranks) in TABLES.items():
        replicated = kind == "data_parallel"
        spec = None if replicated else EnumerableShardingSpec(list(shards(rows, columns, pieces, ranks)))
        tables[name] = ParameterSharding(kind, kernel, ranks=list(ranks), sharding_spec=spec)
    return ShardingPlan({path: tables})
'''


def plan_source(torchrec_result: PlanningResult, slowdown: str = "") -> str:
    """Source of the Python module; `slowdown` describes `torchrec_result` relative to the unrestricted plan."""
    cluster, wire = torchrec_result.candidate.problem.cluster, torchrec_result.plan.wire
    values = {
        "loss": fill(slowdown or f"Predicted: {time_text(torchrec_result.candidate.seconds)} a step.", 119),
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
    """Compare the predicted step within TorchRec's limits with `result`, and name the features that TorchRec lacks."""
    ours, theirs = result.candidate.seconds, torchrec_result.candidate.seconds
    missing: list[str] = []
    if rows := sum(table.travel == "rows" for table in result.plan.tables):
        missing.append(f"deduplicated row exchange ({_num_tables_text(rows)})")
    if reordered := sum(table.order != "id" for table in result.plan.tables):
        missing.append(f"rows split by load or hash ({_num_tables_text(reordered)})")
    if replicated := sum(
        result.candidate.sharding(number).num_replicas > 1 for number in range(len(result.plan.tables))
    ):
        missing.append(f"replicas per host ({_num_tables_text(replicated)})")
    step = f"Within the limits of TorchRec a step is predicted to take {time_text(theirs)}"
    if not missing:
        return f"{step}: this plan uses only what TorchRec has."
    return (
        f"{step}, {theirs / ours:.3g}x as long as with this plan ({time_text(ours)}). "
        f"TorchRec has no {' and no '.join(missing)}."
    )


def _num_tables_text(number: int) -> str:
    return f"{number} table{'s' * (number > 1)}"


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
