"""Row orders are bijections, spread hot ids, and do not overflow; initial rows; layouts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.embeddings.layout import build_layout
from shardwright.embeddings.row_order import HashOrder, LoadOrder, make_row_order
from shardwright.errors import UserError
from shardwright.kernels.initial import uniform_rows
from shardwright.spec.plan import Placement, Rect, Share, TablePlan
from shardwright.spec.workload import Feature, Table


@given(rows=st.integers(1, 500), seed=st.integers(0, 10**9), data=st.data())
def test_every_order_is_a_bijection(rows, seed, data):
    hottest = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), unique=True)), dtype=torch.int64)
    ids = torch.arange(rows)
    for order in (make_row_order("id", rows), HashOrder(seed, rows), LoadOrder(hottest, rows)):
        positions = order.positions(ids)
        assert torch.equal(positions.sort().values, ids)
        assert torch.equal(order.ids(positions), ids)
    assert torch.equal(LoadOrder(hottest, rows).positions(hottest), torch.arange(len(hottest)))


def test_a_hash_spreads_any_run_of_ids_evenly():
    rows, parts = 1_000_003, 8
    positions = HashOrder(7, rows).positions(torch.arange(1000))
    counts = torch.bincount(positions * parts // rows, minlength=parts)
    assert int(counts.max()) <= 1000 / parts + 3


def test_large_tables_do_not_overflow():
    rows = 2**40 + 15
    order = HashOrder(3, rows)
    ids = torch.tensor([0, 1, 12345, 2**39 + 1, rows - 1])
    expected = [(order.step * int(id_) + order.start) % rows for id_ in ids]
    assert order.positions(ids).tolist() == expected
    assert torch.equal(order.ids(torch.tensor(expected)), ids)


def test_missing_and_invalid_hottest_ids_are_errors():
    with pytest.raises(UserError, match="the hottest ids are unknown"):
        make_row_order("load", 10)
    for hottest in ([1, 1], [10], [-1]):
        with pytest.raises(UserError, match="must be distinct rows of it"):
            LoadOrder(torch.tensor(hottest), 10)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_initial_rows_do_not_depend_on_which_rows_are_drawn(dtype):
    all_rows = uniform_rows(11, torch.arange(5000), 7, 0.25, dtype)
    subset = torch.tensor([4999, 3, 3, 17])
    assert torch.equal(uniform_rows(11, subset, 7, 0.25, dtype), all_rows[subset])
    assert not torch.equal(uniform_rows(12, subset, 7, 0.25, dtype), all_rows[subset])
    assert float(all_rows.abs().max()) <= 0.25
    assert abs(float(all_rows.double().mean())) < 0.005 and abs(float(all_rows.double().var()) - 0.25**2 / 3) < 0.001
    assert len(all_rows[:, 0].double().unique()) > (4000 if dtype != torch.bfloat16 else 50)


def lay_out(rects, num_ranks, **options):
    table = Table("t", 10, 8)
    plan = TablePlan("t", "id", tuple(Rect("t", *rect) for rect in rects), Placement((Share("dram"),)))
    return build_layout([table], [Feature("f", "t", "mean")], {"t": plan}, num_ranks, **options)


def clients(layout):
    return [[group.clients for group in groups] for groups in layout.table_groups]


def test_row_boundaries_of_columns_are_merged():
    layout = lay_out([((0, 10), (0, 4), (0,)), ((0, 6), (4, 8), (1,)), ((6, 10), (4, 8), (2,))], 3)
    assert layout.row_boundaries == ((0, 6, 10),)
    assert [[shard.rows for shard in group.shards] for group in layout.table_groups[0]] == [[(0, 6), (6, 10)]]
    assert {stream.pooling for groups in layout.table_groups for group in groups for stream in group.streams} == {"sum"}


def test_ranks_send_requests_within_their_replica_group():
    layout = lay_out([((0, 5), (0, 8), (0, 2)), ((5, 10), (0, 8), (1, 3))], 4)
    assert clients(layout) == [[(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)]]
    everywhere = lay_out([((0, 10), (0, 8), (0, 1, 2, 3))], 4)
    assert clients(everywhere) == [[(0,)], [(1,)], [(2,)], [(3,)]]


def test_column_shards_are_reduced_only_for_optimizers_of_full_rows():
    halves = [((0, 10), (0, 4), (0,)), ((0, 10), (4, 8), (1,))]
    groups, full_row_groups = (sum(lay_out(halves, 2, needs_full_rows=full).table_groups, ()) for full in (False, True))
    assert not any(group.needs_column_reduce for group in groups)
    assert all(group.needs_column_reduce for group in full_row_groups)
