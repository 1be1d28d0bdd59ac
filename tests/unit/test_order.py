"""Orders are bijections, spread what is hot, and go up to tables of any size; layouts say who serves whom."""

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


def test_long_products_do_not_overflow():
    rows = 2**40 + 15
    order = HashOrder(3, rows)
    ids = torch.tensor([0, 1, 12345, 2**39 + 1, rows - 1])
    wanted = [(order.step * int(one) + order.start) % rows for one in ids]
    assert order.positions(ids).tolist() == wanted
    assert torch.equal(order.ids(torch.tensor(wanted)), ids)


def test_what_an_order_cannot_know_is_told():
    with pytest.raises(UserError, match="the hottest ids are unknown"):
        make_row_order("load", 10)
    for hottest in ([1, 1], [10], [-1]):
        with pytest.raises(UserError, match="must be distinct rows of it"):
            LoadOrder(torch.tensor(hottest), 10)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_rows_begin_alike_whoever_makes_them(dtype):
    whole = uniform_rows(11, torch.arange(5000), 7, 0.25, dtype)
    some = torch.tensor([4999, 3, 3, 17])
    assert torch.equal(uniform_rows(11, some, 7, 0.25, dtype), whole[some])
    assert not torch.equal(uniform_rows(12, some, 7, 0.25, dtype), whole[some])
    assert float(whole.abs().max()) <= 0.25
    assert abs(float(whole.double().mean())) < 0.005 and abs(float(whole.double().var()) - 0.25**2 / 3) < 0.001
    assert len(whole[:, 0].double().unique()) > (4000 if dtype != torch.bfloat16 else 50)


def laid(rects, num, **more):
    table = Table("t", 10, 8)
    plan = TablePlan("t", "id", tuple(Rect("t", *rect) for rect in rects), Placement((Share("dram"),)))
    return build_layout([table], [Feature("f", "t", "mean")], {"t": plan}, num, **more)


def test_rows_that_are_cut_differently_are_cut_alike():
    layout = laid([((0, 10), (0, 4), (0,)), ((0, 6), (4, 8), (1,)), ((6, 10), (4, 8), (2,))], 3)
    assert layout.row_boundaries == ((0, 6, 10),)
    assert [[piece.rows for piece in bank.shards] for bank in layout.table_groups[0]] == [[(0, 6), (6, 10)]]
    assert {stream.pooling for banks in layout.table_groups for bank in banks for stream in bank.streams} == {"sum"}


def test_groups_with_a_copy_each_ask_among_themselves():
    layout = laid([((0, 5), (0, 8), (0, 2)), ((5, 10), (0, 8), (1, 3))], 4)
    assert [[bank.clients for bank in banks] for banks in layout.table_groups] == [
        [(0, 1)],
        [(0, 1)],
        [(2, 3)],
        [(2, 3)],
    ]
    everywhere = laid([((0, 10), (0, 8), (0, 1, 2, 3))], 4)
    assert [[bank.clients for bank in banks] for banks in everywhere.table_groups] == [[(0,)], [(1,)], [(2,)], [(3,)]]


def test_column_pieces_meet_only_for_what_looks_at_whole_rows():
    halves = [((0, 10), (0, 4), (0,)), ((0, 10), (4, 8), (1,))]
    assert not any(bank.needs_column_reduce for banks in laid(halves, 2).table_groups for bank in banks)
    assert all(
        bank.needs_column_reduce for banks in laid(halves, 2, needs_full_rows=True).table_groups for bank in banks
    )
