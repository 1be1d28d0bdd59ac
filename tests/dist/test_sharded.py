"""Tables cut in every way over one to four ranks against the same tables whole, in one process."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from drawn import HALVES, OPTIMIZERS, SCHEMES, Case, Held, alone, at_one_rank, cases, examples, of_piece, train, uneven
from drawn import column_row, rectangles, row, table_row
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from intervals import between
from torch import Tensor

from shardwright.embeddings.layout import build_layout
from shardwright.jagged import Jagged
from shardwright.kernels.reference import bag_of_id
from shardwright.spec.plan import Placement, Rect, Share, TablePlan
from shardwright.spec.workload import Feature, Table

LARGE = ((200_000, 6), (50, 16), (3, 4))


def each(check, ranks, drawn: st.SearchStrategy[Case], num: int, first: int = 0) -> None:
    @seed(first)
    @settings(database=None, max_examples=num)
    @given(drawn)
    def one(case: Case) -> None:
        check(ranks, case)

    one()


class Found:
    """What the ranks have found of a case, beside what it should be."""

    def __init__(self, ranks, case: Case) -> None:
        answers = ranks.run(case.world, train, case)
        self.case, self.whole, self.orders = case, alone(case), case.orders
        self.held = [held for _, each, _ in answers for held in each]
        assert all(steps == self.whole.steps for _, _, steps in answers)
        rects = [rect for plan in case.plans for rect in plan.rects]
        sizes = [(one.rows[1] - one.rows[0]) * (one.cols[1] - one.cols[0]) * len(one.ranks) for one in rects]
        assert sum(held.tensors["weight"].size for held in self.held) == sum(sizes)
        self._steps = [[vectors[step] for vectors, _, _ in answers] for step in range(len(self.whole.vectors))]

    def vectors(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """(step, feature, found, wanted) of the global batch."""
        for step, by_rank in enumerate(self._steps):
            like = self.whole.vectors[step]
            pooled_BD, *sequences = (
                torch.cat([torch.from_numpy(x) for x in one]) for one in zip(*by_rank, strict=True)
            )
            found = replace(like, pooled_BD=pooled_BD, sequences=dict(zip(like.sequences, sequences, strict=True)))
            for number, feature in enumerate(self.case.features):
                yield step, number, found[feature.name], like[feature.name]

    def pieces(self) -> Iterator[tuple[Held, str, Tensor, Tensor]]:
        """(piece, "weight" or state, found, wanted) of every replica at the end."""
        for held in self.held:
            for name, found in held.tensors.items():
                wanted = of_piece(held.piece, self.orders, self.whole.tensors[held.piece.table][name])
                yield held, name, torch.from_numpy(found), wanted


def check_float64(ranks, case: Case) -> None:
    found = Found(ranks, case)
    for step, feature, mine, wanted in found.vectors():
        assert _far(mine, wanted) <= 1e-10, (step, case.features[feature])
    for held, name, mine, wanted in found.pieces():
        assert _far(mine, wanted) <= 1e-10, (held.piece, name)


def _far(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1)) if found.numel() else 0.0


def check_bits(ranks, case: Case) -> None:
    """The tables that add up in the order of one process, and of their vectors those that are made in one place."""
    found = Found(ranks, case)
    exact = [in_order(case, number) for number in range(len(case.tables))]
    masks = [together(case, ids) for ids in found.whole.batches]
    for step, feature, mine, wanted in found.vectors():
        if exact[case.table_of[feature]]:
            same = masks[step][feature] if case.features[feature].pooling != "none" else slice(None)
            assert torch.equal(mine[same], wanted[same]), (step, case.features[feature])
    for held, name, mine, wanted in found.pieces():
        if exact[held.piece.table]:
            assert torch.equal(mine, wanted), (held.piece, name)


def in_order(case: Case, number: int) -> bool:
    """Whether a table's gradients are summed in one process's order, and the optimizer's step is the same arithmetic.

    Gradients come to a row in the order of features and of samples of the global batch, wherever it lies. Replicas and
    rows that travel are summed by rank first: the same only where each row is read by one rank, or sums are exact. An
    optimizer's step takes each number alone; of whole rows it adds up columns, by piece first where they are cut.
    """
    layout = case.layout
    banks = [bank for each in layout.table_groups for bank in each if any(one.table == number for one in bank.shards)]
    by_rank_first = number in layout.row_exchange_tables or any(len(bank.replicas) > 1 for bank in banks)
    alike = case.few_bits or case.at_home or case.world == 1
    return (alike or not by_rank_first) and not any(bank.needs_column_reduce for bank in banks)


def together(case: Case, ids: Jagged) -> Tensor:
    """Of each feature the samples whose bags are pooled in one place: in one band of rows, or where rows travel; all
    of them where sums are exact.
    """
    layout, masks = case.layout, []
    values = ids.values.split(ids.lengths.sum(1).tolist())
    for feature, table in enumerate(case.table_of):
        bands = torch.tensor(layout.row_boundaries[table][1:])
        band_N = torch.searchsorted(bands, case.orders[table].positions(values[feature]), right=True)
        bag_N = bag_of_id(ids.lengths[feature], len(band_N))
        least = torch.full((ids.batch_size,), len(bands)).scatter_reduce(0, bag_N, band_N, "amin")
        most = torch.zeros(ids.batch_size, dtype=torch.int64).scatter_reduce(0, bag_N, band_N, "amax")
        exact = case.few_bits and case.optimizer == HALVES
        masks.append((least >= most) | (table in layout.row_exchange_tables) | exact)
    return torch.stack(masks)


def check_float32(ranks, case: Case) -> None:
    found = Found(ranks, case)
    vectors, tensors = between(case, found.whole)
    known = []
    for step, number, mine, _ in found.vectors():
        feature = case.features[number]
        assert vectors[step][feature.name].has(mine), (step, feature)
        known.append(vectors[step][feature.name].narrow(1e-3).flatten())
    for held, name, mine, _ in found.pieces():
        wanted = of_piece(held.piece, found.orders, tensors[held.piece.table][name])
        assert wanted.has(mine), (held.piece, name)
        known.append(wanted.narrow(1e-3).flatten())
    known = torch.cat(known).double()
    assert len(known) == 0 or float(known.mean()) > 0.9, float(known.mean())


by_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda one: one.__name__)


@examples(5)
@by_scheme
def test_every_scheme_equals_one_process(ranks, scheme, examples):
    each(check_float64, ranks, cases((scheme,)), examples, SCHEMES.index(scheme))


# Bags of 1, 2 and 4, as g / 3 and g * (1 / 3) differ: a mean's gradient is divided at home where rows are cut.
@examples(4)
@by_scheme
def test_the_same_gradients_give_the_same_bits(ranks, scheme, examples):
    more = {"lengths": st.just((4, 0, 1, 2)), "few_bits": st.booleans(), "at_home": st.booleans()}
    each(check_bits, ranks, cases((scheme,), "float32", **more), examples, SCHEMES.index(scheme))


@examples(2)
@by_scheme
def test_float32_differs_by_its_roundings_alone(ranks, scheme, examples):
    each(check_float32, ranks, cases((scheme,), "float32"), examples, SCHEMES.index(scheme) + 100)


@examples(5)
@by_scheme
def test_features_unused_in_a_step_leave_their_rows(ranks, scheme, examples):
    each(check_float64, ranks, cases((scheme,), unused=st.just(True)), examples, SCHEMES.index(scheme) + 200)


@examples(10)
def test_schemes_side_by_side_and_all_samples_at_one_rank(ranks, examples):
    each(check_float64, ranks, cases(samples=at_one_rank), examples)


@examples(4)
def test_one_table_much_larger_than_the_others(ranks, examples):
    each(check_float64, ranks, cases(shapes=LARGE, samples=partial(uneven, most=60)), examples)


@examples(3)
def test_one_rank_alone(ranks, examples):
    each(check_bits, ranks, cases(dtype="float32", worlds=(1,), lengths=st.just((0, 1, 2, 4))), examples)


@examples(4)
@pytest.mark.parametrize("scheme", (row, table_row, column_row, rectangles), ids=lambda one: one.__name__)
def test_parts_that_meet_inside_hosts_equal_one_process(ranks, scheme, examples):
    each(check_float64, ranks, cases((scheme,), worlds=(4,), meet=st.just(True)), examples)


def test_replicas_on_some_ranks_while_all_compare_what_they_do(ranks):
    rects = Rect("a", (0, 40), (0, 4), (0, 2)), Rect("b", (0, 20), (0, 3), (1,))
    plans = tuple(TablePlan(one.table, "id", (one,), Placement((Share("dram"),))) for one in rects)
    tables = Table("a", 40, 4, dtype="float64"), Table("b", 20, 3, dtype="float64")
    features = Feature("f", "a"), Feature("g", "b")
    check_float64(ranks, Case(3, tables, features, plans, OPTIMIZERS[2], ((3, 2, 4),), check=True))


def test_what_meets_crosses_once():
    """Rows over all of 2 hosts x 2 ranks: each rank gets one sum from the other host instead of two parts."""
    table = Table("t", 40, 16)
    rects = tuple(Rect("t", (10 * rank, 10 * rank + 10), (0, 16), (rank,)) for rank in range(4))
    plans = {"t": TablePlan("t", "id", rects, Placement((Share("dram"),)))}
    direct, met = (build_layout([table], [Feature("f", "t")], plans, 4, ranks_per_host=host) for host in (0, 2))
    for client in range(4):
        assert sum(one.width for rank, _, one in direct.response_sources(client) if rank // 2 != client // 2) == 2 * 16
        assert sum(one.width for rank, _, one in met.response_sources(client) if rank // 2 != client // 2) == 16
        assert [rank for rank, _, _ in met.response_sources(client)] == [client % 2, 2 + client % 2]


def test_parts_meet_beside_replicas_of_other_rows_in_the_same_columns(ranks):
    rows = ((0, 10), (0,)), ((10, 20), (1,)), ((20, 30), (0, 2)), ((30, 40), (2,)), ((40, 50), (3,))
    rects = tuple(Rect("t", span, (0, 4), at) for span, at in rows)
    plan = TablePlan("t", "id", rects, Placement((Share("dram"),)))
    table, feature = Table("t", 50, 4, dtype="float64"), Feature("f", "t")
    check_float64(ranks, Case(4, (table,), (feature,), (plan,), OPTIMIZERS[3], ((3, 0, 4, 2),), meet=True))
