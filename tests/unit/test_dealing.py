"""Samples of a global batch dealt to ranks by the length of their histories."""

import numpy as np
import pytest
from histories import Visits
from hypothesis import given
from hypothesis import strategies as st

from shardwright import config
from shardwright.data.loading.loader import Loader
from shardwright.data.sources.dealing import deal_by_cost, sample_costs
from shardwright.data.sources.source import make_order, order_identity, with_deal
from shardwright.data.sources.synthetic import ClickStream
from shardwright.errors import UserError
from shardwright.jagged import to_lists

COST = (8.0, 1.0, 0.005)


@given(costs=st.lists(st.floats(0, 1e6), max_size=60), num_ranks=st.integers(1, 7))
def test_every_sample_is_dealt_once_and_numbers_are_those_of_dealing_by_count(costs, num_ranks):
    dealt = deal_by_cost(np.array(costs), num_ranks)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(costs)))
    num = len(costs)
    assert [len(part) for part in dealt] == [
        num * (rank + 1) // num_ranks - num * rank // num_ranks for rank in range(num_ranks)
    ]
    assert all((np.diff(part) > 0).all() for part in dealt)


def test_work_is_nearly_equal_for_long_tailed_histories():
    lengths = (np.random.default_rng(0).pareto(1.1, 2048) * 10).astype(np.int64).clip(0, 1000)
    costs = sample_costs(lengths, COST)
    by_length = [costs[part].sum() for part in deal_by_cost(costs, 4)]
    by_count = [part.sum() for part in np.split(costs, 4)]
    assert max(by_length) / np.mean(by_length) < 1.001 < 1.05 < max(by_count) / np.mean(by_count)


def test_the_cost_of_a_sample():
    assert sample_costs(np.array([0, 10, 100]), (2.0, 0.5, 0.01)).tolist() == [2.0, 8.0, 152.0]


def samples(loader: Loader) -> list[list[tuple]]:
    """Batches of samples, each as its ids."""
    batches = [to_lists(batch.features) for batch in loader]
    return [list(zip(*(map(tuple, batch[name]) for name in batch), strict=True)) for batch in batches]


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_together_have_the_global_batch(workers):
    source, options = Visits(samples=100), {"batch_size": 32, "seed": 4}
    whole, parts = samples(Loader(source, **options)), []
    for rank in range(3):
        with Loader(source, **options, shard=(rank, 3), workers=workers) as loader:
            loader.deal_by_length(COST)
            parts.append(samples(loader))
    for number, batch in enumerate(whole):
        assert sorted(sum((part[number] for part in parts), [])) == sorted(batch)
        for part in parts:  # in the order of the batch
            places = [batch.index(sample) for sample in part[number]]
            assert places == sorted(places)


def test_a_run_may_change_how_it_deals():
    first, second = (Loader(Visits(), batch_size=8, shard=(0, 2)) for _ in range(2))
    first.deal_by_length(COST)
    next(iter(first))
    second.load_state_dict(first.state_dict())
    first.load_state_dict(second.state_dict())
    order = make_order(Visits(), 8, 0, True)
    assert order_identity(Visits(), with_deal(Visits(), order, COST))["deal"] == list(COST)
    assert "deal" not in order_identity(Visits(), order)


def test_errors_of_options():
    with pytest.raises(UserError, match="data.deal=length, and samples of ClickStream have no histories"):
        Loader(ClickStream(), batch_size=8).deal_by_length(COST)
    with pytest.raises(UserError, match="data.deal_cost.*wanted 0 or more, and one of them above 0"):
        config.load("synthetic-dlrm", ["data.deal_cost=[0, 0, 0]"])
    with pytest.raises(UserError, match="data.deal"):
        config.load("synthetic-dlrm", ["data.deal=weight"])
