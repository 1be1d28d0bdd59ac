"""A plan in TorchRec's form: a Python module whose `sharding_plan(path)` is its ShardingPlan for the module there."""

from collections.abc import Iterator
from types import MappingProxyType

from shardwright.errors import UserError
from shardwright.planner.answer import Answer
from shardwright.spec.plan import TablePlan
from shardwright.spec.workload import Table

TYPES = MappingProxyType(
    {
        "table": "table_wise",
        "column": "column_wise",
        "row": "row_wise",
        "table-row": "table_row_wise",
        "table-column": "table_column_wise",
        "column-row": "grid_shard",
        "data": "data_parallel",
    }
)
HEAD = '''"""A plan by Shardwright, for TorchRec: DistributedModelParallel(model, plan=sharding_plan("sparse"), ...).

TorchRec cuts rows by id into even blocks; where the plan cuts them by load, this file cuts them evenly. The precision
of tables is the model's own to set: {precision}.
Vectors travel there, whatever the plan says: {travel}.
"""

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

# table: sharding type, kernel, ranks, shards (row and column where it starts, rows and columns, place)
TABLES = {
'''
TAIL = '''}


def sharding_plan(path: str) -> ShardingPlan:
    """For the module of that name whose tables these are; empty for the model itself."""
    tables = EmbeddingModuleShardingPlan()
    for name, (kind, kernel, ranks, shards) in TABLES.items():
        cut = [ShardMetadata(list(start), list(size), place) for start, size, place in shards]
        spec = EnumerableShardingSpec(cut) if shards else None
        tables[name] = ParameterSharding(kind, kernel, ranks=ranks, sharding_spec=spec)
    return ShardingPlan({path: tables})
'''


def exported(made: Answer) -> str:
    lines = [f"    {one.table!r}: {_told(made, number)},\n" for number, one in enumerate(made.plan.tables)]
    dtypes = sorted({one.placement.weight_dtype for one in made.plan.tables})
    rows = sum(one.travel == "rows" for one in made.plan.tables)
    head = HEAD.replace("{precision}", f"the plan has tables in {' and '.join(dtypes)}")
    head = head.replace(
        "{travel}", f"it has distinct rows travel of {rows} tables" if rows else "it asks for nothing else"
    )
    return head + "".join(lines) + TAIL


def _told(made: Answer, number: int) -> str:
    planned = made.plan.tables[number]
    name = made.found.cut(number).name
    if name not in TYPES:
        raise UserError(
            f'table "{planned.table}" has copies in groups of ranks, which TorchRec\'s plan of it cannot say'
        )
    ranks = [rank for group in _by_columns(planned).values() for rank in group]
    if name == "data":
        return repr((TYPES[name], "dense", ranks, []))
    table = made.found.problem.demands[number].table
    kernel = "fused_uvm_caching" if len(planned.placement.tiers) > 1 else "fused"
    return repr((TYPES[name], kernel, ranks, list(_shards(made, planned, table))))


def _by_columns(planned: TablePlan) -> dict[tuple[int, int], list[int]]:
    """The ranks with the rows of each piece, in TorchRec's order: rising."""
    found: dict[tuple[int, int], list[int]] = {}
    for rect in planned.rects:
        found.setdefault(rect.cols, []).extend(rect.ranks)
    return {columns: sorted(ranks) for columns, ranks in found.items()}


def _shards(made: Answer, planned: TablePlan, table: Table) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    cluster = made.found.problem.cluster
    local = cluster.levels[0].num if cluster.levels else 1
    for (left, right), ranks in _by_columns(planned).items():
        block = -(-table.rows // len(ranks))
        for at, rank in enumerate(ranks):
            top, bottom = min(at * block, table.rows), min((at + 1) * block, table.rows)
            place = f"rank:{rank}/cpu" if cluster.device.kind == "cpu" else f"rank:{rank}/cuda:{rank % local}"
            yield (top, left), (bottom - top, right - left), place
