"""What bounded staleness adds to a step: finding copies of rows, validating and updating them."""

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from shardwright.planner.price import overheads
from shardwright.planner.price.row_prices import RowPrices
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.step import traffic
from shardwright.planner.step.rank_calls import Task
from shardwright.planner.tables.sharding import TableLoad

WORD_BYTES = 4  # of a row, version, lease, or number of updates or uses in a message
COUNT_BYTES = 16  # of a group, for each rank
# Small torch calls per step, and per other rank; estimated from the code, not measured.
CALLS = MappingProxyType(
    {"copies": (90, 0), "counts": (10, 0), "validate": (60, 12), "renew": (30, 4), "update": (80, 4)}
)


def copied_loads(problem: Problem, placed: PlacedTables) -> list[TableLoad]:
    """The loads of the tables whose rows are read from copies of rows of ranks."""
    loads = problem.placed_loads(placed)
    return [load for load in loads if load.copied is not None and not load.copied.is_served]


def copy_tasks(problem: Problem, loads: Sequence[TableLoad]) -> dict[str, Task]:
    """The tasks of the stages of bounded staleness, by name; with "update", what it adds to this stage."""
    device, others = problem.cluster.device, problem.cluster.num_ranks - 1
    prices, updating = RowPrices(device), 0.0
    rows, bytes_ = sum(_rows_of_others(problem, load) for load in loads), copy_bytes(problem, loads)
    for load in loads:
        num = _rows_of_others(problem, load)
        updating += prices.sum_seconds(num, load.table.dim, row_bytes=round(load.table.dim * load.weight_bytes))
        # Copies are read, and gradients added to what is not sent.
        updating += 2 * overheads.columns_seconds(device, num, num * load.table.dim)
    call = overheads.op_overhead_seconds(device)
    seconds = {name: call * (fixed + ranks * others) for name, (fixed, ranks) in CALLS.items()}
    seconds["copies"] += float(overheads.ids_seconds(device, np.array([rows]), "place")[0])
    seconds["update"] += updating
    tasks = {
        "copies": Task(),
        **{name: traffic.even_all_to_all_task(problem, size) for name, size in bytes_.items()},
        "update": Task(),
    }
    return {name: task.lengthen(seconds[name]) for name, task in tasks.items()}


def copy_bytes(problem: Problem, loads: Sequence[TableLoad]) -> dict[str, float]:
    """Bytes that a rank sends in these stages."""
    validated, pushed = (
        sum(_rows_of_others(problem, load) * getattr(load.copied, name) for load in loads)
        for name in ("validated", "pushed")
    )
    return {
        "counts": COUNT_BYTES * problem.cluster.num_ranks,
        "validate": WORD_BYTES * (2 * validated + 3 * pushed),
        "renew": 2 * WORD_BYTES * validated,
    }


def _rows_of_others(problem: Problem, load: TableLoad) -> float:
    """Distinct rows of other ranks in a rank's batch."""
    assert load.copied is not None
    num = problem.cluster.num_ranks
    return problem.local_batch_size * (num - 1) / num * load.copied.rows_per_sample
