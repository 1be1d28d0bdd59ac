"""What tables that servers own add to a step: finding copies of rows, and the calls to the servers.

Shape legend: R ranks.
"""

from collections.abc import Sequence

import numpy as np

from shardwright.planner.price import overheads
from shardwright.planner.price.row_prices import RowPrices
from shardwright.planner.problem import Problem
from shardwright.planner.step import copy_tasks, server_calls
from shardwright.planner.step.copy_tasks import WORD_BYTES
from shardwright.planner.step.rank_calls import Task
from shardwright.planner.tables.sharding import TableLoad
from shardwright.spec.optimizer import num_squares


def served_tasks(problem: Problem, loads: Sequence[TableLoad]) -> dict[str, Task]:
    """The tasks of stages "copies" and "fetch"; with "update", what is added to this stage.

    A fetch is answered when the servers have applied the updates that all ranks have pushed in the step before. So it
    contains the time of these pushes; none of it is assumed to overlap with other work.
    """
    assert problem.servers is not None and problem.workload.optimizer is not None
    num, samples, prices = problem.cluster.num_ranks, problem.local_batch_size, RowPrices(problem.cluster.device)
    rows = updating = applying = 0.0
    for load in loads:
        assert load.copied is not None
        dim, own = load.table.dim, samples * load.copied.rows_per_sample
        update = prices.sum_seconds(1.0, dim, row_bytes=round(dim * load.weight_bytes))
        rows += own
        updating += own * update + 2 * overheads.columns_seconds(problem.cluster.device, own, own * dim)
        applying += num * own * load.copied.pushed * update
    bytes_ = served_bytes(problem, loads)
    asked_R, sent_R, pushed_R, none_R = (np.full(num, each) for each in (*bytes_, 0.0))
    latency = server_calls.latency_seconds(problem)  # nobody waits for the reply to a push
    fetch = float(server_calls.call_seconds(problem, asked_R, sent_R).max())
    push = float(server_calls.call_seconds(problem, pushed_R, none_R, applying).max()) - latency
    on_links = sum(float(server_calls.link_seconds(problem, bytes_R).max()) for bytes_R in (asked_R, sent_R, pushed_R))
    call = overheads.op_overhead_seconds(problem.cluster.device)
    finding = float(overheads.ids_seconds(problem.cluster.device, np.array([rows]), "place")[0])
    levels = problem.cluster.levels[-1:]
    return {
        "copies": Task(seconds=finding + call * copy_tasks.CALLS["copies"][0]),
        "fetch": Task(
            seconds=max(0.0, fetch + push),
            is_collective=True,
            levels=tuple(level.name for level in levels),
            bytes_=round(bytes_[1] + bytes_[2]),
            link_seconds=on_links + latency,
            latency_seconds=latency,
        ),
        "update": Task(seconds=updating + call * copy_tasks.CALLS["update"][0]),
    }


def served_bytes(problem: Problem, loads: Sequence[TableLoad]) -> tuple[float, float, float]:
    """Bytes of a rank's messages to all servers in a step: rows with versions to validate, answers, and pushes."""
    assert problem.workload.optimizer is not None
    validated = sent_bytes = pushed_bytes = 0.0
    for load in loads:
        assert load.copied is not None
        dim, own = load.table.dim, problem.local_batch_size * load.copied.rows_per_sample
        validated += own * load.copied.validated
        sent_bytes += own * load.copied.sent * load.row_bytes(dim)
        update_bytes = load.weight_bytes * (dim + num_squares(problem.workload.optimizer, dim))
        pushed_bytes += own * load.copied.pushed * (update_bytes + 3 * WORD_BYTES)
    asked = 2 * WORD_BYTES * validated
    return asked, asked + sent_bytes, pushed_bytes
