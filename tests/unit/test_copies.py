"""Tables with a copy in every host: pinned, by hand and chosen; what they cost, and what hosts exchange."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_planner import cluster, workload
from test_travel import OWN, TABLES, batch, described, measured

from shardwright.errors import UserError
from shardwright.jagged import narrow
from shardwright.planner import reprice
from shardwright.planner.memory import budget
from shardwright.planner.plan import make_plan
from shardwright.planner.price import primitives
from shardwright.planner.step import tasks, traffic
from shardwright.report import torchrec_export
from shardwright.spec.plan import Rect

SHAPES = (1000, 128, 5.0), (2000, 64, 2.0), (3000, 64, 1.0)
PINS = {"t0": "copy-column:4", "t1": "copy-table", "t2": "copy-row"}


@pytest.mark.parametrize("nums", ((2, 2), (3, 2), (2, 3), (2, 2, 2)))
def test_pinned_copies_lie_at_the_same_place_in_every_host(nums):
    work, where = workload(*SHAPES, hot=True), cluster(*nums)
    made = make_plan(work, where, pins=PINS)
    made.plan.verify(work)
    local, num = nums[0], where.num_ranks
    like = {tuple(range(place, num, local)) for place in range(local)}
    columns, whole, rows = (table.rects for table in made.plan.tables)
    assert [rect.cols for rect in columns] == [(32 * at, 32 * at + 32) for at in range(4)]
    assert [(rect.rows, rect.cols) for rect in whole] == [((0, 2000), (0, 64))]
    assert len(rows) == local and {rect.ranks for rect in rows} == like
    assert {rect.ranks for rect in (*columns, *whole)} <= like
    said = dict(made.plan.why)["table t1"]
    assert said.startswith(f"as pinned; {num // local} replicas exchange gradients of touched rows: ")
    again = reprice.reprice_plan(made.candidate.problem, made.plan)
    assert again.seconds == pytest.approx(made.candidate.seconds) and again.ids_after == made.candidate.ids_after
    assert again.loads.update_R == pytest.approx(made.candidate.loads.update_R)


def test_each_copy_is_asked_by_its_host_alone():
    """Of everything half a batch at the ranks with a copy, and all the bytes of the table at each."""
    work, where = workload((1000, 128, 5.0)), cluster(2, 2)
    once, copied = (make_plan(work, where, pins={"t0": pin}).candidate for pin in ("table@0", "copy-table"))
    (one,), (two,) = once.placed.units, copied.placed.units
    for name in ("lookups", "read_bytes", "buffer_bytes"):
        assert getattr(two, name) == getattr(one, name) / 2
    assert two.bytes_ == one.bytes_ and two.sent_bytes == 4 * 256 * 128 / 2
    at = list(copied.placed.ranks[0])
    assert copied.loads.bytes_R[at].tolist() == [one.bytes_] * 2 and copied.loads.bytes_R.sum() == 2 * one.bytes_
    assert not budget.fits_memory(
        replace(copied.problem, cluster=cluster(2, 2, memory_bytes=1e6)), copied.placed, [1000]
    )
    rows = make_plan(work, where, pins={"t0": "copy-row"}).candidate
    assert rows.loads.bytes_R == pytest.approx([one.bytes_ / 2] * 4) and not rows.loads.reduces_in_host
    met_RR, parts_RR = traffic._vector_hops(rows.problem, rows.placed, "float32", back=False)
    assert not met_RR.any() and parts_RR[0].tolist() == [128 * 128 * 4, 128 * 128 * 4, 0, 0]


def test_between_hosts_go_rows_with_gradients_and_nothing_else():
    """512 samples of 4 ids in 300 rows: of a table that lies once half of vectors and gradients cross."""
    work, where = workload((300, 64, 4.0)), cluster(2, 2)
    work = replace(work, statistics=(replace(work.statistics[0], distinct=((256, 0.2), (512, 0.12))),))
    once, copied = (make_plan(work, where, pins={"t0": pin}).candidate for pin in ("table@0", "copy-table"))
    across = [traffic.step_traffic(found.problem, found.placed)[:2, 2:].sum() for found in (once, copied)]
    back = [traffic.step_traffic(found.problem, found.placed)[2:, :2].sum() for found in (once, copied)]
    asked = 256 * 4 * (4 + 1)  # ids, and lengths of bags
    touched = 0.2 * 256 * 4  # of the rows, by each host
    assert across[0] - across[1] == pytest.approx(256 * 64 * 4 - touched * (8 + 4 * 64))
    assert back[0] - back[1] == pytest.approx(256 * 64 * 4 + asked - touched * (8 + 4 * 64))
    numbers_RR, sums_RR = traffic._replica_traffic(copied.problem, copied.placed)
    first, second = copied.placed.ranks[0]
    assert numbers_RR[first, second] == pytest.approx(8 * touched)
    assert sums_RR[second, first] == pytest.approx(256 * touched)
    for one_RR in (numbers_RR, sums_RR):
        np.fill_diagonal(one_RR, 0)
        assert np.count_nonzero(one_RR) == 2


def test_the_update_waits_for_what_copies_tell_each_other():
    """Its own sums, the rows of both copies told apart and added up, each row once; and three exchanges."""
    made = make_plan(workload((2000, 32, 4.0)), cluster(2, 2), pins={"t0": "copy-table"}).candidate
    demand, problem = made.problem.table_loads[0], made.problem
    half, whole = demand.distinct_rows_per_group(2), demand.distinct_rows_per_group(1)
    each = 3e-8 + 4e-11 * 128
    apart = 2 * half * 24 * 8 / 1e11  # passes over memory
    rank = made.placed.ranks[0][0]
    assert made.loads.update_R[rank] == pytest.approx(1e-5 + (256 * 4 + 2 * half + whole) * each + apart)
    numbers_RR, sums_RR = np.zeros((2, 4, 4))
    numbers_RR[made.placed.ranks[0], made.placed.ranks[0][::-1]] = 8 * half
    sums_RR[made.placed.ranks[0], made.placed.ranks[0][::-1]] = 128 * half
    told = [
        primitives.all_to_all_v_cost(problem.cluster, problem.level_names, one)
        for one in (numbers_RR / half, numbers_RR, sums_RR)
    ]
    seconds = sum(one.seconds for one in told)
    assert traffic.replica_exchange_task(problem, made.placed).seconds_on(0) == pytest.approx(seconds)
    known = tasks.stage_tasks(problem, made.placed, made.loads)["update"]
    once = make_plan(workload((2000, 32, 4.0)), cluster(2, 2), pins={"t0": "table@0"}).candidate
    assert (
        known.seconds_on(3 - rank)
        > seconds
        > tasks.stage_tasks(once.problem, once.placed, once.loads)["update"].seconds_on(1)
    )


@pytest.mark.parametrize("pin", ("copy-table", "copy-row"))
@pytest.mark.parametrize("travel", ("vectors", "rows"))
def test_predicted_bytes_are_those_of_the_messages(pin, travel):
    ids = batch()
    bags, work = described(ids)
    made = make_plan(work, cluster(2, 2), pins={one.name: pin for one in TABLES})
    plan = replace(made.plan, tables=tuple(replace(one, travel=travel) for one in made.plan.tables))
    found = reprice.reprice_plan(made.candidate.problem, plan)
    asked_RR, there_RR = (traffic.id_traffic(found.problem, found.placed), measured(bags, plan, ids)[1])
    predicted_R = sum(traffic._vector_bytes_by_levels(found.problem, found.placed, "float32").values())
    sent_RR = measured(bags, plan, ids)[0]
    for one_RR in (asked_RR, sent_RR, there_RR):
        assert not one_RR[:2, 2:].any() and not one_RR[2:, :2].any()
    assert there_RR.sum() == pytest.approx(predicted_R.sum(), rel=0.005)
    assert sent_RR.sum() == pytest.approx(asked_RR.sum(), rel=0.005)
    numbers_RR, _ = traffic._replica_traffic(found.problem, found.placed)
    hosts = [narrow(ids, first, first + 2 * OWN) for first in (0, 2 * OWN)]
    each = [part.values.split(part.lengths.sum(1).tolist()) for part in hosts]
    rows = [sum(len(values.unique()) for values in (*one[:3], torch.cat(one[3:]))) for one in each]
    assert numbers_RR[:2, 2:].sum() == pytest.approx(8 * np.mean(rows), rel=0.01)


def test_copies_by_hand_are_priced_at_any_place_and_uneven_ones_refused():
    work, where = workload((1000, 128, 5.0)), cluster(2, 2)
    made = make_plan(work, where, pins={"t0": "copy-column:2"})
    problem, (table,) = made.candidate.problem, made.plan.tables

    def priced(*rects):
        cut = tuple(Rect("t0", *rect) for rect in rects)
        return reprice.reprice_plan(problem, replace(made.plan, tables=(replace(table, rects=cut),)))

    left, right, every = (0, 64), (64, 128), (0, 1000)
    crossed = priced((every, left, (0, 3)), (every, right, (1, 2)))
    assert crossed.placed.ranks == ((0, 3), (1, 2)) and crossed.seconds == pytest.approx(made.candidate.seconds)
    both = priced(
        *(((low, low + 500), cols, (at, 2 + at)) for cols in (left, right) for at, low in enumerate((0, 500)))
    )
    assert [unit.sharding.row_levels for unit in both.placed.units] == [1, 1] and both.placed.num_row_shards(0) == 2
    for rects in (
        [(every, left, (0, 1)), (every, right, (2, 3))],
        [(every, left, (0, 2)), (every, right, (1,))],
        [(every, left, (0, 1, 2, 3)), (every, right, (0, 1, 2, 3))],
        [(every, left, (0, 1, 2)), (every, right, (0, 1, 2))],
    ):
        with pytest.raises(UserError, match=r'table "t0" has replicas on ranks \(0|one copy of all its rows'):
            priced(*rects)
    with pytest.raises(UserError, match="which is no whole group of a level"):
        priced(((0, 500), (0, 128), (0, 2)), ((500, 1000), (0, 128), (0, 2)))
    outer = make_plan(work, cluster(2, 2, 2), pins={"t0": "table@0"})
    half = replace(outer.plan.tables[0], rects=(Rect("t0", every, (0, 128), (1, 6)),))
    found = reprice.reprice_plan(outer.candidate.problem, replace(outer.plan, tables=(half,)))
    assert found.placed.units[0].sharding.num_replicas == 2 and found.placed.units[0].lookups == 512 * 5 / 2


def test_copies_are_chosen_where_links_between_hosts_are_slow():
    _, work = described(batch())
    slow = make_plan(work, cluster(4, 2, rate=1e8))
    chosen = [table.table for table in slow.plan.tables if table.rects[0].ranks == (0, 4)]
    assert chosen and "a replica in every host" in dict(slow.plan.why)[f"table {chosen[0]}"]
    assert slow.candidate.proposal.replicas_below
    once = make_plan(work, cluster(4, 2, rate=1e8), pins=dict.fromkeys(chosen, "table"))
    assert once.candidate.seconds > slow.candidate.seconds
    fast = make_plan(work, cluster(4, 2, rate=1e11))
    assert not any(len(rect.ranks) == 2 for table in fast.plan.tables for rect in table.rects)


def test_copies_where_there_are_none():
    work = workload((1000, 64, 5.0))
    for where, pin, said in (
        (cluster(4), "copy-table", "cannot be cut as its pin says: copy-table"),
        (cluster(2, 2), "copy-table@1", '"copy-table" lies in every group; drop @'),
    ):
        with pytest.raises(UserError, match=said):
            make_plan(work, where, pins={"t0": pin})
    with pytest.raises(UserError, match='"t0" has a layout that TorchRec does not have'):
        torchrec_export.plan_source(make_plan(work, cluster(2, 2), pins={"t0": "copy-table"}))
