"""Checks of a plan's tables and experts: shards that do not cover a table exactly once, unknown ranks or
axes, rounding that the plan does not allow.

Coverage is checked by a sweep over the rows of each table, which is fast at 128,000 shards.
"""

import math
import re
from bisect import bisect_left, insort
from collections.abc import Iterator
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardwright.errors import did_you_mean
from shardwright.spec.checks import check_non_negative, check_positive, check_unique
from shardwright.spec.row_cache import FLOAT32_LINES, SERVERS, WAYS
from shardwright.spec.stage_checks import Check, max_staleness
from shardwright.spec.workload import DTYPE_BYTES, Dtype, Table, Workload, state_dtype

if TYPE_CHECKING:
    from shardwright.spec.plan import Plan, Rect, TablePlan

EXCHANGE_MODES = ("vectors", "rows")
DTYPE_SHORT_NAMES = MappingProxyType({"float16": "fp16", "bfloat16": "bf16"})
INCREMENT_DTYPES = MappingProxyType({"increments.fp16": "float16", "increments.int8": "int8"})  # of checkpoints
ALLOW_ENTRIES = (
    *(f"{what}.{name}" for what in ("tables", "wire") for name in DTYPE_SHORT_NAMES.values()),
    "dense.bf16",
    "optimizer.bf16",
    FLOAT32_LINES,
    *INCREMENT_DTYPES,
)


def workload_mismatch(plan: "Plan", workload: Workload | None, *_: object) -> Iterator[str]:
    if workload is not None and plan.workload_digest != workload.digest():
        yield f"the plan is for workload {plan.workload_digest}, not for this workload {workload.digest()}; plan again"


def unknown_allow_entry(plan: "Plan", *_: object) -> Iterator[str]:
    for entry in plan.allow:
        if entry.startswith("state."):
            yield f'allow holds "{entry}", but the optimizer state of tables is never rounded; remove it'
        elif entry not in ALLOW_ENTRIES and not re.fullmatch(r"staleness<=(\d+|inf)", entry):
            yield f'allow holds unknown "{entry}"{did_you_mean(entry, (*ALLOW_ENTRIES, "staleness<=N"))}'


def invalid_axes(plan: "Plan", *_: object) -> Iterator[str]:
    yield from check_unique("axis", (axis.name for axis in plan.axes))
    for axis in plan.axes:
        yield from check_positive(f'axis "{axis.name}"', size=axis.size)


def table_mismatch(plan: "Plan", workload: Workload | None, *_: object) -> Iterator[str]:
    planned = [table.table for table in plan.tables]
    yield from check_unique("plan of table", planned)
    if workload is not None:
        tables = {table.name for table in workload.tables}
        for name in dict.fromkeys(planned):
            if name not in tables:
                yield f'plan of unknown table "{name}"{did_you_mean(name, tables)}'
        for name in sorted(tables - set(planned)):
            yield f'table "{name}" is not planned'


def unknown_order(plan: "Plan", *_: object) -> Iterator[str]:
    for table in plan.tables:
        if not re.fullmatch(r"id|load|hash:\d+", table.order):
            yield f'table "{table.table}" has order "{table.order}"; allowed: id, load, hash:SEED'


def unknown_travel(plan: "Plan", *_: object) -> Iterator[str]:
    for table in plan.tables:
        if table.travel not in EXCHANGE_MODES:
            yield f'table "{table.table}" has travel "{table.travel}"; allowed: {", ".join(EXCHANGE_MODES)}'


def invalid_rects(plan: "Plan", workload: Workload | None, *_: object) -> Iterator[str]:
    tables = _tables_by_name(workload)
    for table in plan.tables:
        rows, dim = _extent(table, tables)
        for rect in table.rects:
            if rect.table != table.table:
                yield f'{_rect_text(rect)} is in the plan of table "{table.table}"'
            if not _is_inside(rect, rows, dim):
                yield f"{_rect_text(rect)} is empty or not inside rows 0..{rows}, columns 0..{dim}"


def incomplete_coverage(plan: "Plan", workload: Workload | None, *_: object) -> Iterator[str]:
    tables = _tables_by_name(workload)
    for table in plan.tables:
        rows, dim = _extent(table, tables)
        if all(_is_inside(rect, rows, dim) for rect in table.rects):
            yield from _check_coverage(table, rows, dim)


def _check_coverage(table: "TablePlan", rows: int, dim: int) -> Iterator[str]:
    """Report the first overlap or gap: at every row the column ranges must be disjoint and add up to `dim`."""
    ends = [(rect.rows[1], False, rect.cols, index) for index, rect in enumerate(table.rects)]
    starts = [(rect.rows[0], True, rect.cols, index) for index, rect in enumerate(table.rects)]
    active: list[tuple[tuple[int, int], int]] = []
    width = checked_rows = 0
    for row, is_start, cols, index in [*sorted(ends + starts), (rows, False, (0, 0), -1)]:
        if row > checked_rows and width < dim:
            yield f'table "{table.table}": no rect holds rows {checked_rows}..{row}, columns {_first_gap(active, dim)}'
            return
        checked_rows = row
        if is_start:
            position = bisect_left(active, (cols, index))
            for (lo, hi), other in active[max(position - 1, 0) : position + 1]:
                if cols[0] < hi and lo < cols[1]:
                    yield f"{_rect_text(table.rects[index])} overlaps {_rect_text(table.rects[other])}"
                    return
            insort(active, (cols, index))
            width += cols[1] - cols[0]
        elif index >= 0:
            del active[bisect_left(active, (cols, index))]
            width -= cols[1] - cols[0]


def _first_gap(active: list[tuple[tuple[int, int], int]], dim: int) -> str:
    position = 0
    for (lo, hi), _ in active:
        if lo > position:
            return f"{position}..{lo}"
        position = hi
    return f"{position}..{dim}"


def invalid_ranks(plan: "Plan", *_: object) -> Iterator[str]:
    for table in plan.tables:
        for rect in table.rects:
            if error := _rank_error(rect.ranks, plan):
                yield f"{_rect_text(rect)} {error}"


def _rank_error(ranks: tuple[int, ...], plan: "Plan") -> str | None:
    num = plan.num_ranks
    if not ranks:
        return "has no rank; wanted one or more"
    if len(set(ranks)) < len(ranks):
        return f"names a rank twice in {ranks}"
    if min(ranks) < 0 or max(ranks) >= num + plan.servers:
        servers = f", the servers are {num}..{num + plan.servers - 1}" if plan.servers else ""
        return f"names ranks {ranks}; the axes have ranks 0..{num - 1}{servers}"
    return None


def invalid_tiers(plan: "Plan", *_: object) -> Iterator[str]:
    for table in plan.tables:
        subject = f'table "{table.table}"'
        yield from check_unique(f"{subject}: tier", (tier for tier, _ in table.placement.tiers))
        *upper, last = [rows for _, rows in table.placement.tiers] or [0]
        if None in upper or last is not None:
            yield f"{subject}: the last tier, and no other, must hold all remaining rows (None)"
        for tier, rows in table.placement.tiers:
            yield from check_non_negative(f'{subject}: tier "{tier}"', rows=rows or 0)


def missing_prefetch(plan: "Plan", *_: object) -> Iterator[str]:
    names = [table.table for table in plan.tables if len(table.placement.tiers) > 1]
    if names and not any(stage.name == "prefetch" for stage in plan.stages):
        yield f'stages: table "{names[0]}" has rows in several tiers, and no stage "prefetch" copies them'


def mixed_tiers(plan: "Plan", *_: object) -> Iterator[str]:
    """Faults of tables with rows on servers that ranks own: all caches of a rank have the same slower tier."""
    by_tier = {table.placement.tiers[-1].tier: table.table for table in plan.tables if len(table.placement.tiers) > 1}
    if SERVERS in by_tier and len(by_tier) > 1:
        other = next(name for tier, name in by_tier.items() if tier != SERVERS)
        yield f'table "{by_tier[SERVERS]}" has rows on servers, and "{other}" has rows in other tiers; use one of both'
    if SERVERS in by_tier and not plan.servers:
        yield f'table "{by_tier[SERVERS]}" has rows on servers, and servers is 0; use keep_on_servers'


def disallowed_sync(plan: "Plan", *_: object) -> Iterator[str]:
    allowed = max_staleness(plan.allow)
    for table in plan.tables:
        subject, sync = f'table "{table.table}"', table.placement.sync
        needed: float = 0
        if sync.kind == "bounded":
            yield from check_non_negative(f"{subject}: sync", pull=sync.pull, push=sync.push)
            yield from _bounded_faults(plan, table)
            needed = sync.max_missed(plan.num_ranks)
        elif sync.kind == "async":
            needed = math.inf
        if needed > allowed:
            yield f'{subject} has sync "{sync.kind}"; it needs allow "staleness<={needed}"'


def invalid_servers(plan: "Plan", *_: object) -> Iterator[str]:
    on_servers = [table for table in plan.tables if _is_on_server(plan, table)]
    for table in on_servers:
        subject = f'table "{table.table}" is on servers'
        if any(min(rect.ranks, default=0) < plan.num_ranks for rect in table.rects):
            yield f"{subject}, and some of its rows are on ranks; put all on servers, or none"
        if table.placement.sync.kind != "bounded" or table.travel != "rows":
            yield f'{subject}; it needs sync "bounded" (0 and 0: exact) and travel "rows": use keep_on_servers'
    others = [table for table in plan.tables if table not in on_servers]
    copied = [table.table for table in others if table.placement.sync.kind == "bounded"]
    if on_servers and copied and plan.num_ranks > 1:
        yield f'table "{copied[0]}" is stale on ranks, and others are on servers; put all of these tables on servers'
    if on_servers and not any(stage.name == "fetch" for stage in plan.stages):
        yield f'stages: table "{on_servers[0].table}" is on servers, and no stage "fetch" reads it; use keep_on_servers'


def _is_on_server(plan: "Plan", table: "TablePlan") -> bool:
    return any(rank >= plan.num_ranks for rect in table.rects for rank in rect.ranks)


def _bounded_faults(plan: "Plan", table: "TablePlan") -> Iterator[str]:
    """Faults of a table with bounded staleness, or on servers, whose rows have copies on all ranks."""
    sync, subject = table.placement.sync, f'table "{table.table}" has bounded staleness'
    is_served = _is_on_server(plan, table)
    if sync.kind != "bounded" or not is_served and (not sync.has_copies or plan.num_ranks == 1):
        return
    if is_served:
        subject = f'table "{table.table}" is on servers'
    if sync.copies < WAYS:
        yield f"{subject} and copies={sync.copies}; wanted {WAYS} or more"
    if any(len(rect.ranks) > 1 for rect in table.rects):
        yield f"{subject} and shards with replicas; use one shard, or row shards on one rank each"
    if len({rect.cols for rect in table.rects}) > 1:
        yield f"{subject} and column shards; use one shard, or row shards on one rank each"
    if tiered := [other.table for other in plan.tables if len(other.placement.tiers) > 1]:
        yield f'{subject}, and table "{tiered[0]}" has rows in several memory tiers; use one of both'
    if not any(stage.name == "copies" for stage in plan.stages):
        yield f"stages: {subject}, and the stages that find and validate copies are missing; use allow_staleness"


def disallowed_rounding(plan: "Plan", workload: Workload | None, *_: object) -> Iterator[str]:
    tables = _tables_by_name(workload)
    for table in plan.tables:
        placement, subject = table.placement, f'table "{table.table}"'
        if table.table in tables:
            dtype = tables[table.table].dtype
            yield from _check_rounding(plan, "tables", f"{subject}: weight_dtype", placement.weight_dtype, dtype)
            if placement.state_dtype != (exact := state_dtype(dtype)):
                yield f"{subject}: state_dtype is {placement.state_dtype}; use {exact}"
    widest: Dtype = "float64" if any(table.dtype == "float64" for table in tables.values()) else "float32"
    for name in ("vectors", "gradients", "dense"):
        dtype: Dtype = getattr(plan.wire, name)
        if DTYPE_BYTES[dtype] < DTYPE_BYTES[widest]:
            yield from _check_rounding(plan, "wire", f"wire: {name}", dtype, widest)
    for what, name in (("dense", "dtype"), ("optimizer", "state")):
        dtype: Dtype = getattr(plan.dense, name)
        if DTYPE_BYTES[dtype] < DTYPE_BYTES[widest]:
            yield from _check_rounding(plan, what, f"dense: {name}", dtype, widest)


def _check_rounding(plan: "Plan", what: str, subject: str, dtype: Dtype, exact: Dtype) -> Iterator[str]:
    entry = f"{what}.{DTYPE_SHORT_NAMES.get(dtype)}"
    if dtype != exact and entry not in plan.allow:
        remedy = f'use that or allow "{entry}"' if dtype in DTYPE_SHORT_NAMES else "use that"
        yield f"{subject} is {dtype}, the model's is {exact}: {remedy}"


def unknown_names(plan: "Plan", workload: Workload | None, *_: object) -> Iterator[str]:
    axes = {axis.name for axis in plan.axes}
    yield from check_unique("axis of dense.replicate and dense.shard", plan.dense.replicate + plan.dense.shard)
    for name in plan.dense.replicate + plan.dense.shard + plan.dense.shard_optimizer:
        if name not in axes:
            yield f'dense names unknown axis "{name}"{did_you_mean(name, axes)}'
    blocks = {block.name for block in workload.blocks} if workload is not None else None
    recomputed_blocks = tuple(recompute.block for recompute in plan.dense.recompute)
    yield from check_unique("dense.recompute of block", recomputed_blocks)
    yield from check_unique("dense.offload of block", plan.dense.offload)
    for name in recomputed_blocks + plan.dense.offload:
        if blocks is not None and name not in blocks:
            yield f'the plan names unknown block "{name}"{did_you_mean(name, blocks)}'


def invalid_experts(plan: "Plan", *_: object) -> Iterator[str]:
    sizes = {axis.name: axis.size for axis in plan.axes}
    token_axes = [axis.name for axis in plan.axes if axis.role != "pipe"]
    yield from check_unique("experts of module", (experts.module for experts in plan.experts))
    for experts in plan.experts:
        subject = f'experts of "{experts.module}"'
        unknown = [axis for axis in experts.axes if axis not in token_axes]
        if unknown or not experts.axes:
            named = f'name axis "{unknown[0]}"' if unknown else "name no axis"
            yield f"{subject} {named}; wanted some of {', '.join(token_axes)}, whose ranks have different tokens"
        elif not 1 <= experts.groups <= prod(sizes[axis] for axis in experts.axes):
            num = prod(sizes[axis] for axis in experts.axes)
            yield f"{subject} are exchanged between {experts.groups} groups of {num} ranks; wanted 1 to {num}"
        if experts.copies in ("shadows", "fastest") and experts.costs is None:
            yield f'{subject} are copied as "{experts.copies}", which needs costs'


def _tables_by_name(workload: Workload | None) -> dict[str, Table]:
    return {table.name: table for table in workload.tables} if workload is not None else {}


def _extent(table: "TablePlan", tables: dict[str, Table]) -> tuple[int, int]:
    """Rows and columns of a table; if it is not in the workload, the extent of its shards."""
    if table.table in tables:
        return tables[table.table].rows, tables[table.table].dim
    rows = max((rect.rows[1] for rect in table.rects), default=0)
    return rows, max((rect.cols[1] for rect in table.rects), default=0)


def _is_inside(rect: "Rect", rows: int, dim: int) -> bool:
    return 0 <= rect.rows[0] < rect.rows[1] <= rows and 0 <= rect.cols[0] < rect.cols[1] <= dim


def _rect_text(rect: "Rect") -> str:
    (top, bottom), (left, right) = rect.rows, rect.cols
    return f'rect (rows {top}..{bottom}, columns {left}..{right}) of table "{rect.table}"'


CHECKS: tuple[Check, ...] = (
    workload_mismatch,
    unknown_allow_entry,
    invalid_axes,
    table_mismatch,
    unknown_order,
    unknown_travel,
    invalid_rects,
    incomplete_coverage,
    invalid_ranks,
    invalid_experts,
    invalid_servers,
    invalid_tiers,
    missing_prefetch,
    mixed_tiers,
    disallowed_sync,
    disallowed_rounding,
    unknown_names,
)
