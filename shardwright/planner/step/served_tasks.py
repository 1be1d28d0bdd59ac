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
    """The tasks of stages "copies", "fetch" and "push"; with "update", what is added to this stage.

    A fetch is answered when the servers have applied the updates that all ranks have pushed in the step before, so it
    begins when "push" has ended. Nobody else waits for a push.
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
    latency, call = server_calls.latency_seconds(problem), overheads.op_overhead_seconds(problem.cluster.device)
    finding = float(overheads.ids_seconds(problem.cluster.device, np.array([rows]), "place")[0])
    return {
        "copies": Task(seconds=finding + call * copy_tasks.CALLS["copies"][0]),
        "fetch": _call_task(problem, asked_R, sent_R, latency=latency),
        "push": _call_task(problem, pushed_R, none_R, applying),
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


def _call_task(
    problem: Problem, sent_R: np.ndarray, received_R: np.ndarray, work_seconds: float = 0.0, *, latency: float = 0.0
) -> Task:
    """A call of all ranks to each server; without `latency`, the calls after it do not wait for the reply."""
    seconds = server_calls.call_seconds(problem, sent_R, received_R, work_seconds)
    assert problem.servers is not None
    # The links of servers are full, not those of ranks, unless there are as many servers as ranks.
    levels = problem.cluster.levels[-1:] if problem.servers.num >= problem.cluster.num_ranks else ()
    on_links = (server_calls.link_seconds(problem, bytes_R) for bytes_R in (sent_R, received_R))
    return Task(
        seconds=max(0.0, float(seconds.max()) - server_calls.latency_seconds(problem) + latency),
        is_collective=True,
        levels=tuple(level.name for level in levels),
        bytes_=round(float(sent_R[0] + received_R[0])),
        link_seconds=sum(float(seconds_R.max()) for seconds_R in on_links) + latency,
        latency_seconds=latency,
    )
