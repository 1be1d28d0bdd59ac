"""Refuse plans with settings that this version does not implement; the error names the setting."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

from shardwright.errors import UserError
from shardwright.spec.plan import TABLE_DTYPES, Plan, TablePlan, single_rank_table_plan, widest_dtype
from shardwright.spec.workload import Table


def num_ranks(plan: Plan) -> int:
    """The number of ranks that the plan is for."""
    return math.prod(size for _, size in plan.axes)


def check_supported(plan: Plan, tables: Sequence[Table], is_sharded: bool) -> None:
    """Raise for the first setting of the plan that is not supported for a model with these tables.

    `is_sharded`: the plan's stages exchange ids and vectors between ranks, so tables may be placed on any rank.
    """
    specs = {table.name: table for table in tables}
    planned = {table.table for table in plan.tables}
    if planned != set(specs):
        raise UserError(f"the plan has tables {sorted(planned)}, the model {sorted(specs)}; plan this model again")
    if not tables and num_ranks(plan) > 1:
        raise UserError("the plan's axes: a model without tables trains in one process in this version")
    wire_dtypes = {plan.wire.vectors, plan.wire.gradients, plan.wire.dense}
    checks = [
        ("axes", num_ranks(plan) != 1 and not is_sharded),
        ("experts", bool(plan.experts)),
        ("wire", not is_sharded and wire_dtypes != {widest_dtype(tables)}),
        ("dense.shard", bool(plan.dense.shard) and not is_sharded),
    ]
    unsupported = [name for name, is_unsupported in checks if is_unsupported]
    unsupported += [name for table in plan.tables for name in _check_table(plan, table, specs[table.table], is_sharded)]
    if unsupported:
        raise UserError(
            f"the plan's {unsupported[0]}: this version keeps tables in one memory tier, in the model's precision or "
            f"a 16-bit one that the plan's allow permits"
            f"{'' if is_sharded else ', unsharded and in one process'}; plan this model again"
        )


def _check_table(plan: Plan, planned: TablePlan, table: Table, is_sharded: bool) -> Iterator[str]:
    """Yield the fields of a table's plan whose values this version does not support."""
    dtype = planned.placement.weight_dtype
    is_allowed = any(entry in plan.allow and allowed == dtype for entry, allowed in TABLE_DTYPES.items())
    supported = single_rank_table_plan(table, dtype if is_allowed else None)
    for settings, expected in ((planned, supported), (planned.placement, supported.placement)):
        ignored = ("placement", "order", "rects", "travel", "scheme") if is_sharded else ("placement", "scheme")
        for field in fields(settings):
            if field.name not in ignored and getattr(settings, field.name) != getattr(expected, field.name):
                yield f"{field.name} of table {planned.table}"
