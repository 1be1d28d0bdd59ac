"""Tables with a replica in every host: pinned, placed by hand and chosen; their cost and what hosts exchange."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_planner import make_cluster, make_workload
from test_row_exchange_choice import LOCAL_BATCH, TABLES, batch, describe_batch, measure_bytes

from shardwright.errors import UserError
from shardwright.jagged import narrow
from shardwright.planner import reprice
from shardwright.planner.memory import row_tiers
from shardwright.planner.plan import make_plan
from shardwright.planner.price import primitives
from shardwright.planner.step import tasks, traffic
from shardwright.report import torchrec_export
from shardwright.spec.plan import Rect

SHAPES = (1000, 128, 5.0), (2000, 64, 2.0), (3000, 64, 1.0)
PINS = {"t0": "copy-column:4", "t1": "copy-table", "t2": "copy-row"}


@pytest.mark.parametrize("levels", ((2, 2), (3, 2), (2, 3), (2, 2, 2)))
def test_pinned_replicas_have_the_same_local_rank_in_every_host(levels):
    workload, cluster = make_workload(*SHAPES, hot=True), make_cluster(*levels)
    result = make_plan(workload, cluster, pins=PINS)
    result.plan.verify(workload)
    per_host, num_ranks = levels[0], cluster.num_ranks
    replica_groups = {tuple(range(rank, num_ranks, per_host)) for rank in range(per_host)}
    columns, unsplit, rows = (table.rects for table in result.plan.tables)
    assert [rect.cols for rect in columns] == [(32 * i, 32 * i + 32) for i in range(4)]
    assert [(rect.rows, rect.cols) for rect in unsplit] == [((0, 2000), (0, 64))]
    assert len(rows) == per_host and {rect.ranks for rect in rows} == replica_groups
    assert {rect.ranks for rect in (*columns, *unsplit)} <= replica_groups
    reason = dict(result.plan.why)["table t1"]
    assert reason.startswith(f"as pinned; {num_ranks // per_host} replicas exchange gradients of touched rows: ")
    repriced = reprice.reprice_plan(result.candidate.problem, result.plan)
    planned = result.candidate
    assert repriced.seconds == pytest.approx(planned.seconds) and repriced.ids_after == planned.ids_after
    assert repriced.loads.update_R == pytest.approx(planned.loads.update_R)


def test_each_replica_serves_only_its_host():
    """Each of two replicas has half of the lookups, reads and buffers, and all bytes of the table."""
    workload, cluster = make_workload((1000, 128, 5.0)), make_cluster(2, 2)
    single, replicated = (make_plan(workload, cluster, pins={"t0": pin}).candidate for pin in ("table@0", "copy-table"))
    (one_copy,), (replica,) = single.placed.units, replicated.placed.units
    for name in ("lookups", "read_bytes", "buffer_bytes"):
        assert getattr(replica, name) == getattr(one_copy, name) / 2
    assert replica.bytes_ == one_copy.bytes_ and replica.sent_bytes == 4 * 256 * 128 / 2
    holders = list(replicated.placed.ranks[0])
    bytes_R = replicated.loads.bytes_R
    assert bytes_R[holders].tolist() == [one_copy.bytes_] * 2 and bytes_R.sum() == 2 * one_copy.bytes_
    assert not row_tiers.fits_memory(
        replace(replicated.problem, cluster=make_cluster(2, 2, memory_bytes=1e6)), replicated.placed, [[1000]]
    )
    row_wise = make_plan(workload, cluster, pins={"t0": "copy-row"}).candidate
    assert row_wise.loads.bytes_R == pytest.approx([one_copy.bytes_ / 2] * 4) and not row_wise.loads.reduces_in_host
    reduced_RR, vectors_RR = traffic.vector_hops(row_wise.problem, row_wise.placed, "float32", backward=False)
    assert not reduced_RR.any() and vectors_RR[0].tolist() == [128 * 128 * 4, 128 * 128 * 4, 0, 0]


def test_replicas_exchange_only_rows_with_gradients_between_hosts():
    """512 samples of 4 ids in 300 rows: without replicas half of the vectors and gradients cross hosts."""
    workload, cluster = make_workload((300, 64, 4.0)), make_cluster(2, 2)
    workload = replace(workload, statistics=(replace(workload.statistics[0], distinct=((256, 0.2), (512, 0.12))),))
    single, replicated = (make_plan(workload, cluster, pins={"t0": pin}).candidate for pin in ("table@0", "copy-table"))
    forward = [traffic.step_traffic(c.problem, c.placed)[:2, 2:].sum() for c in (single, replicated)]
    backward = [traffic.step_traffic(c.problem, c.placed)[2:, :2].sum() for c in (single, replicated)]
    request_bytes = 256 * 4 * (4 + 1)  # ids, and lengths of bags
    touched_rows = 0.2 * 256 * 4  # of the rows, by each host
    assert forward[0] - forward[1] == pytest.approx(256 * 64 * 4 - touched_rows * (8 + 4 * 64))
    assert backward[0] - backward[1] == pytest.approx(256 * 64 * 4 + request_bytes - touched_rows * (8 + 4 * 64))
    row_ids_RR, row_sums_RR = traffic.replica_traffic(replicated.problem, replicated.placed)
    first, second = replicated.placed.ranks[0]
    assert row_ids_RR[first, second] == pytest.approx(8 * touched_rows)
    assert row_sums_RR[second, first] == pytest.approx(256 * touched_rows)
    for bytes_RR in (row_ids_RR, row_sums_RR):
        np.fill_diagonal(bytes_RR, 0)
        assert np.count_nonzero(bytes_RR) == 2


def test_the_update_waits_for_the_exchange_of_replicas():
    """Work: local sums, the rows of both replicas deduplicated and added, each row updated once; three exchanges."""
    result = make_plan(make_workload((2000, 32, 4.0)), make_cluster(2, 2), pins={"t0": "copy-table"}).candidate
    load, problem = result.problem.table_loads[0], result.problem
    host_rows, all_rows = load.distinct_rows_per_group(2), load.distinct_rows_per_group(1)
    row_seconds = 3e-8 + 4e-11 * 128
    dedup_seconds = 2 * host_rows * 24 * 8 / 1e11  # passes over memory
    rank = result.placed.ranks[0][0]
    rows_seconds = (256 * 4 + 2 * host_rows + all_rows) * row_seconds
    assert result.loads.update_R[rank] == pytest.approx(1e-5 + rows_seconds + dedup_seconds)
    row_ids_RR, row_sums_RR = np.zeros((2, 4, 4))
    row_ids_RR[result.placed.ranks[0], result.placed.ranks[0][::-1]] = 8 * host_rows
    row_sums_RR[result.placed.ranks[0], result.placed.ranks[0][::-1]] = 128 * host_rows
    costs = [
        primitives.all_to_all_v_cost(problem.cluster, problem.level_names, bytes_RR)
        for bytes_RR in (row_ids_RR / host_rows, row_ids_RR, row_sums_RR)
    ]
    seconds = sum(cost.seconds for cost in costs)
    assert traffic.replica_exchange_task(problem, result.placed).seconds_on(0) == pytest.approx(seconds)
    update = tasks.stage_tasks(problem, result.placed, result.loads)["update"]
    single = make_plan(make_workload((2000, 32, 4.0)), make_cluster(2, 2), pins={"t0": "table@0"}).candidate
    assert (
        update.seconds_on(3 - rank)
        > seconds
        > tasks.stage_tasks(single.problem, single.placed, single.loads)["update"].seconds_on(1)
    )


@pytest.mark.parametrize("pin", ("copy-table", "copy-row"))
@pytest.mark.parametrize("exchange", ("vectors", "rows"))
def test_predicted_bytes_equal_the_bytes_of_the_messages(pin, exchange):
    ids = batch()
    bags, workload = describe_batch(ids)
    result = make_plan(workload, make_cluster(2, 2), pins={table.name: pin for table in TABLES})
    plan = replace(result.plan, tables=tuple(replace(table, travel=exchange) for table in result.plan.tables))
    repriced = reprice.reprice_plan(result.candidate.problem, plan)
    ids_RR, vectors_RR = (
        traffic.id_traffic(repriced.problem, repriced.placed),
        measure_bytes(bags, plan, ids)[1],
    )
    vector_bytes_R = sum(traffic._vector_bytes_by_levels(repriced.problem, repriced.placed, "float32").values())
    sent_ids_RR = measure_bytes(bags, plan, ids)[0]
    for bytes_RR in (ids_RR, sent_ids_RR, vectors_RR):
        assert not bytes_RR[:2, 2:].any() and not bytes_RR[2:, :2].any()
    assert vectors_RR.sum() == pytest.approx(vector_bytes_R.sum(), rel=0.005)
    assert sent_ids_RR.sum() == pytest.approx(ids_RR.sum(), rel=0.005)
    row_ids_RR, _ = traffic.replica_traffic(repriced.problem, repriced.placed)
    by_host = [narrow(ids, first, first + 2 * LOCAL_BATCH) for first in (0, 2 * LOCAL_BATCH)]
    id_lists = [part.values.split(part.lengths.sum(1).tolist()) for part in by_host]
    rows = [sum(len(values.unique()) for values in (*lists[:3], torch.cat(lists[3:]))) for lists in id_lists]
    assert row_ids_RR[:2, 2:].sum() == pytest.approx(8 * np.mean(rows), rel=0.01)


def test_replicas_placed_by_hand_are_priced_on_any_ranks_and_uneven_ones_refused():
    workload, cluster = make_workload((1000, 128, 5.0)), make_cluster(2, 2)
    result = make_plan(workload, cluster, pins={"t0": "copy-column:2"})
    problem, (table,) = result.candidate.problem, result.plan.tables

    def reprice_rects(*rects):
        cuts = tuple(Rect("t0", *rect) for rect in rects)
        return reprice.reprice_plan(problem, replace(result.plan, tables=(replace(table, rects=cuts),)))

    left, right, all_rows = (0, 64), (64, 128), (0, 1000)
    crossed = reprice_rects((all_rows, left, (0, 3)), (all_rows, right, (1, 2)))
    assert crossed.placed.ranks == ((0, 3), (1, 2)) and crossed.seconds == pytest.approx(result.candidate.seconds)
    grid = reprice_rects(
        *(((start, start + 500), cols, (i, 2 + i)) for cols in (left, right) for i, start in enumerate((0, 500)))
    )
    assert [unit.sharding.row_levels for unit in grid.placed.units] == [1, 1] and grid.placed.num_row_shards(0) == 2
    for rects in (
        [(all_rows, left, (0, 1)), (all_rows, right, (2, 3))],
        [(all_rows, left, (0, 2)), (all_rows, right, (1,))],
        [(all_rows, left, (0, 1, 2, 3)), (all_rows, right, (0, 1, 2, 3))],
        [(all_rows, left, (0, 1, 2)), (all_rows, right, (0, 1, 2))],
    ):
        with pytest.raises(UserError, match=r'table "t0" has replicas on ranks \(0|one copy of all its rows'):
            reprice_rects(*rects)
    with pytest.raises(UserError, match="which are not a group of a level"):
        reprice_rects(((0, 500), (0, 128), (0, 2)), ((500, 1000), (0, 128), (0, 2)))
    three_levels = make_plan(workload, make_cluster(2, 2, 2), pins={"t0": "table@0"})
    host_replicas = replace(three_levels.plan.tables[0], rects=(Rect("t0", all_rows, (0, 128), (1, 6)),))
    repriced = reprice.reprice_plan(three_levels.candidate.problem, replace(three_levels.plan, tables=(host_replicas,)))
    assert repriced.placed.units[0].sharding.num_replicas == 2 and repriced.placed.units[0].lookups == 512 * 5 / 2


def test_replicas_are_chosen_where_links_between_hosts_are_slow():
    _, workload = describe_batch(batch())
    slow = make_plan(workload, make_cluster(4, 2, rate=1e8))
    chosen = [table.table for table in slow.plan.tables if table.rects[0].ranks == (0, 4)]
    assert chosen and "a replica in every host" in dict(slow.plan.why)[f"table {chosen[0]}"]
    assert slow.candidate.proposal.replicas_below
    single = make_plan(workload, make_cluster(4, 2, rate=1e8), pins=dict.fromkeys(chosen, "table"))
    assert single.candidate.seconds > slow.candidate.seconds
    fast = make_plan(workload, make_cluster(4, 2, rate=1e11))
    assert not any(len(rect.ranks) == 2 for table in fast.plan.tables for rect in table.rects)


def test_replicas_of_an_unfit_cluster_or_export_are_refused():
    workload = make_workload((1000, 64, 5.0))
    for cluster, pin, message in (
        (make_cluster(4), "copy-table", "cannot be sharded as pinned: copy-table"),
        (make_cluster(2, 2), "copy-table@1", 'shards of "copy-table" are in every group; remove @'),
    ):
        with pytest.raises(UserError, match=message):
            make_plan(workload, cluster, pins={"t0": pin})
    with pytest.raises(UserError, match='"t0" has a layout that TorchRec does not have'):
        torchrec_export.plan_source(make_plan(workload, make_cluster(2, 2), pins={"t0": "copy-table"}))
