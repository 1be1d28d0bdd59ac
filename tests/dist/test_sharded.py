"""Tables sharded by every scheme over one to four ranks, compared with unsharded tables in one process."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from drawn import (
    EXACT_SGD,
    OPTIMIZERS,
    SCHEMES,
    Case,
    HeldShard,
    cases,
    column_row,
    examples,
    rectangles,
    row,
    select_shard,
    sizes_at_one_rank,
    table_row,
    train_reference,
    train_sharded,
    uneven_sizes,
)
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from intervals import run_bounds
from torch import Tensor

from shardwright.embeddings.layout import build_layout
from shardwright.jagged import Jagged
from shardwright.kernels.reference import bag_of_id
from shardwright.spec.plan import Placement, Rect, Share, TablePlan
from shardwright.spec.workload import Feature, Table

LARGE = ((200_000, 6), (50, 16), (3, 4))


def check_examples(check, ranks, strategy: st.SearchStrategy[Case], num: int, first_seed: int = 0) -> None:
    @seed(first_seed)
    @settings(database=None, max_examples=num)
    @given(strategy)
    def check_case(case: Case) -> None:
        check(ranks, case)

    check_case()


class ShardedRun:
    """What the ranks computed for a case, next to the reference run in one process."""

    def __init__(self, ranks, case: Case) -> None:
        answers = ranks.run(case.world, train_sharded, case)
        self.case, self.reference, self.orders = case, train_reference(case), case.orders
        self.held_shards = [local for _, shards, _ in answers for local in shards]
        assert all(steps == self.reference.steps for _, _, steps in answers)
        rects = [rect for plan in case.plans for rect in plan.rects]
        sizes = [(rect.rows[1] - rect.rows[0]) * (rect.cols[1] - rect.cols[0]) * len(rect.ranks) for rect in rects]
        assert sum(local.tensors["weight"].size for local in self.held_shards) == sum(sizes)
        self._steps = [[vectors[step] for vectors, _, _ in answers] for step in range(len(self.reference.vectors))]

    def vectors(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """(step, feature number, vectors, expected vectors) of the global batch."""
        for step, by_rank in enumerate(self._steps):
            like = self.reference.vectors[step]
            pooled_BD, *sequences = (
                torch.cat([torch.from_numpy(x) for x in arrays]) for arrays in zip(*by_rank, strict=True)
            )
            vectors = replace(like, pooled_BD=pooled_BD, sequences=dict(zip(like.sequences, sequences, strict=True)))
            for number, feature in enumerate(self.case.features):
                yield step, number, vectors[feature.name], like[feature.name]

    def tensors(self) -> Iterator[tuple[HeldShard, str, Tensor, Tensor]]:
        """(shard, "weight" or name of its state, value, expected value) of every final shard and replica."""
        for local in self.held_shards:
            for name, value in local.tensors.items():
                expected = select_shard(local.shard, self.orders, self.reference.tensors[local.shard.table][name])
                yield local, name, torch.from_numpy(value), expected


def check_float64(ranks, case: Case) -> None:
    run = ShardedRun(ranks, case)
    for step, feature, value, expected in run.vectors():
        assert _error(value, expected) <= 1e-10, (step, case.features[feature])
    for local, name, value, expected in run.tensors():
        assert _error(value, expected) <= 1e-10, (local.shard, name)


def _error(value: Tensor, expected: Tensor) -> float:
    assert value.shape == expected.shape and value.dtype == expected.dtype
    return float((value - expected).abs().max() / expected.abs().max().clamp(min=1)) if value.numel() else 0.0


def check_bits(ranks, case: Case) -> None:
    """Compare the bits of tables whose sums have the order of one process, and of vectors that one rank pools."""
    run = ShardedRun(ranks, case)
    exact = [sums_in_same_order(case, number) for number in range(len(case.tables))]
    masks = [pooled_by_one_rank(case, ids) for ids in run.reference.batches]
    for step, feature, value, expected in run.vectors():
        if exact[case.table_of[feature]]:
            mask = masks[step][feature] if case.features[feature].pooling != "none" else slice(None)
            assert torch.equal(value[mask], expected[mask]), (step, case.features[feature])
    for local, name, value, expected in run.tensors():
        if exact[local.shard.table]:
            assert torch.equal(value, expected), (local.shard, name)


def sums_in_same_order(case: Case, number: int) -> bool:
    """Whether a table's gradients are summed in the order of one process and its optimizer step does the same sums.

    A row receives gradients in the order of features, then of samples of the global batch, on any rank. Replicas and
    exchanged rows are summed by rank first: equal only if each row is looked up by one rank, or sums are exact. The
    optimizer step is elementwise, except for sums over a row, which are summed by column shard first.
    """
    layout = case.layout
    groups = [group for by_rank in layout.table_groups for group in by_rank]
    groups = [group for group in groups if any(shard.table == number for shard in group.shards)]
    by_rank_first = number in layout.row_exchange_tables or any(len(group.replicas) > 1 for group in groups)
    order_is_irrelevant = case.few_bits or case.one_reader or case.world == 1
    return (order_is_irrelevant or not by_rank_first) and not any(group.needs_column_reduce for group in groups)


def pooled_by_one_rank(case: Case, ids: Jagged) -> Tensor:
    """Mask by feature and sample of bags pooled by one rank: all ids in one row range, or rows are exchanged; also
    of all bags if sums are exact.
    """
    layout, masks = case.layout, []
    values = ids.values.split(ids.lengths.sum(1).tolist())
    for feature, table in enumerate(case.table_of):
        ends = torch.tensor(layout.row_boundaries[table][1:])
        range_N = torch.searchsorted(ends, case.orders[table].positions(values[feature]), right=True)
        bag_N = bag_of_id(ids.lengths[feature], len(range_N))
        first_B = torch.full((ids.batch_size,), len(ends)).scatter_reduce(0, bag_N, range_N, "amin")
        last_B = torch.zeros(ids.batch_size, dtype=torch.int64).scatter_reduce(0, bag_N, range_N, "amax")
        exact = case.few_bits and case.optimizer == EXACT_SGD
        masks.append((first_B >= last_B) | (table in layout.row_exchange_tables) | exact)
    return torch.stack(masks)


def check_float32(ranks, case: Case) -> None:
    run = ShardedRun(ranks, case)
    vectors, tensors = run_bounds(case, run.reference)
    narrow = []
    for step, number, value, _ in run.vectors():
        feature = case.features[number]
        assert vectors[step][feature.name].contains(value), (step, feature)
        narrow.append(vectors[step][feature.name].is_narrow(1e-3).flatten())
    for local, name, value, _ in run.tensors():
        bounds = select_shard(local.shard, run.orders, tensors[local.shard.table][name])
        assert bounds.contains(value), (local.shard, name)
        narrow.append(bounds.is_narrow(1e-3).flatten())
    narrow = torch.cat(narrow).double()
    assert len(narrow) == 0 or float(narrow.mean()) > 0.9, float(narrow.mean())


by_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.__name__)


@examples(5)
@by_scheme
def test_every_scheme_equals_one_process(ranks, scheme, examples):
    check_examples(check_float64, ranks, cases((scheme,)), examples, SCHEMES.index(scheme))


# Bags of 1, 2 and 4: with row shards, the sample's rank divides a mean's gradient, and g / 3 differs from g * (1 / 3).
@examples(4)
@by_scheme
def test_same_gradients_in_the_same_order_give_the_same_bits(ranks, scheme, examples):
    fields = {"lengths": st.just((4, 0, 1, 2)), "few_bits": st.booleans(), "one_reader": st.booleans()}
    check_examples(check_bits, ranks, cases((scheme,), "float32", **fields), examples, SCHEMES.index(scheme))


@examples(2)
@by_scheme
def test_float32_differs_only_by_rounding_errors(ranks, scheme, examples):
    check_examples(check_float32, ranks, cases((scheme,), "float32"), examples, SCHEMES.index(scheme) + 100)


@examples(5)
@by_scheme
def test_rows_of_features_unused_in_a_step_stay_unchanged(ranks, scheme, examples):
    check_examples(check_float64, ranks, cases((scheme,), unused=st.just(True)), examples, SCHEMES.index(scheme) + 200)


@examples(10)
def test_mixed_schemes_with_all_samples_on_one_rank(ranks, examples):
    check_examples(check_float64, ranks, cases(sizes=sizes_at_one_rank), examples)


@examples(4)
def test_one_table_much_larger_than_the_others(ranks, examples):
    check_examples(check_float64, ranks, cases(shapes=LARGE, sizes=partial(uneven_sizes, max_samples=60)), examples)


@examples(3)
def test_a_single_rank(ranks, examples):
    check_examples(check_bits, ranks, cases(dtype="float32", worlds=(1,), lengths=st.just((0, 1, 2, 4))), examples)


@examples(4)
@pytest.mark.parametrize("scheme", (row, table_row, column_row, rectangles), ids=lambda scheme: scheme.__name__)
def test_host_reduce_equals_one_process(ranks, scheme, examples):
    check_examples(check_float64, ranks, cases((scheme,), worlds=(4,), host_reduce=st.just(True)), examples)


def test_replicas_on_some_ranks_while_ranks_compare_their_collectives(ranks):
    rects = Rect("a", (0, 40), (0, 4), (0, 2)), Rect("b", (0, 20), (0, 3), (1,))
    plans = tuple(TablePlan(rect.table, "id", (rect,), Placement((Share("dram"),))) for rect in rects)
    tables = Table("a", 40, 4, dtype="float64"), Table("b", 20, 3, dtype="float64")
    features = Feature("f", "a"), Feature("g", "b")
    check_float64(ranks, Case(3, tables, features, plans, OPTIMIZERS[2], ((3, 2, 4),), check=True))


def test_with_host_reduce_each_sum_crosses_hosts_once():
    """Rows over all of 2 hosts x 2 ranks: each rank gets one sum from the other host instead of two partial sums."""
    table = Table("t", 40, 16)
    rects = tuple(Rect("t", (10 * rank, 10 * rank + 10), (0, 16), (rank,)) for rank in range(4))
    plans = {"t": TablePlan("t", "id", rects, Placement((Share("dram"),)))}
    features = [Feature("f", "t")]
    direct, reduced = (build_layout([table], features, plans, 4, ranks_per_host=size) for size in (0, 2))
    for client in range(4):
        sources, sums = list(direct.response_sources(client)), list(reduced.response_sources(client))
        assert sum(source.width for rank, _, source in sources if rank // 2 != client // 2) == 2 * 16
        assert sum(source.width for rank, _, source in sums if rank // 2 != client // 2) == 16
        assert [rank for rank, _, _ in sums] == [client % 2, 2 + client % 2]


def test_host_reduce_next_to_replicas_of_other_rows_in_the_same_columns(ranks):
    rows = ((0, 10), (0,)), ((10, 20), (1,)), ((20, 30), (0, 2)), ((30, 40), (2,)), ((40, 50), (3,))
    rects = tuple(Rect("t", span, (0, 4), holders) for span, holders in rows)
    plan = TablePlan("t", "id", rects, Placement((Share("dram"),)))
    table, feature = Table("t", 50, 4, dtype="float64"), Feature("f", "t")
    check_float64(ranks, Case(4, (table,), (feature,), (plan,), OPTIMIZERS[3], ((3, 0, 4, 2),), host_reduce=True))
