"""What this version can do of what a plan may ask: the rest is refused by name, never done in part."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

from shardwright.errors import UserError
from shardwright.spec.plan import TABLE_DTYPES, Plan, TablePlan, single_rank_table_plan, widest_dtype
from shardwright.spec.workload import Table


def num_ranks(plan: Plan) -> int:
    """The ranks it is for."""
    return math.prod(size for _, size in plan.axes)


def check_supported(plan: Plan, tables: Sequence[Table], is_sharded: bool) -> None:
    """`cut`: its stages send ids and vectors between ranks, so that tables may lie anywhere."""
    mine = {table.name: table for table in tables}
    planned = {table.table for table in plan.tables}
    if planned != set(mine):
        raise UserError(f"the plan holds tables {sorted(planned)}, the model {sorted(mine)}; plan this model anew")
    if not tables and num_ranks(plan) > 1:
        raise UserError("the plan's axes: a model without tables trains in one process in this version")
    wires = {plan.wire.vectors, plan.wire.gradients, plan.wire.dense}
    asked = [
        ("axes", num_ranks(plan) != 1 and not is_sharded),
        ("experts", bool(plan.experts)),
        ("wire", not is_sharded and wires != {widest_dtype(tables)}),
        ("dense.shard", bool(plan.dense.shard) and not is_sharded),
    ]
    refused = [what for what, unable in asked if unable]
    refused += [what for table in plan.tables for what in _of_table(plan, table, mine[table.table], is_sharded)]
    if refused:
        raise UserError(
            f"the plan's {refused[0]}: this version keeps tables in one tier, in the model's precision or the one "
            f"of 16 bits that the plan's allow names"
            f"{'' if is_sharded else ', whole and in one process'}; plan this model anew"
        )


def _of_table(plan: Plan, planned: TablePlan, table: Table, cut: bool) -> Iterator[str]:
    dtype = planned.placement.weight_dtype
    permitted = any(entry in plan.allow and rounded == dtype for entry, rounded in TABLE_DTYPES.items())
    able = single_rank_table_plan(table, dtype if permitted else None)
    for part, honoured in ((planned, able), (planned.placement, able.placement)):
        free = ("placement", "order", "rects", "travel", "scheme") if cut else ("placement", "scheme")
        for field in fields(part):
            if field.name not in free and getattr(part, field.name) != getattr(honoured, field.name):
                yield f"{field.name} of table {planned.table}"
