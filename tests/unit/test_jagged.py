"""Jagged batches: conversions, selection, checks, and gradients of vectors."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright import jagged as J
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors

BAGS = st.integers(0, 5).flatmap(
    lambda size: st.dictionaries(
        st.sampled_from("abc"),
        st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=size, max_size=size),
        min_size=1,
    )
)


@given(BAGS)
def test_lists_round_trip(bags):
    assert J.to_lists(J.from_lists(bags)) == bags


@given(BAGS)
def test_offsets_are_the_exclusive_sum_of_lengths(bags):
    jagged = J.from_lists(bags)
    expected = [0]
    for length in jagged.lengths.flatten().tolist():
        expected.append(expected[-1] + length)
    assert J.offsets(jagged).tolist() == expected


@given(BAGS, st.data())
def test_narrow_then_concat_gives_the_batch(bags, data):
    jagged = J.from_lists(bags)
    cut = data.draw(st.integers(0, jagged.batch_size))
    parts = [J.narrow(jagged, 0, cut), J.narrow(jagged, cut, jagged.batch_size)]
    assert J.to_lists(J.concat(parts)) == bags


@given(BAGS, st.data())
def test_select_returns_features_in_the_given_order(bags, data):
    names = data.draw(st.lists(st.sampled_from(sorted(bags)), unique=True, min_size=1))
    chosen = J.to_lists(J.select(J.from_lists(bags), names))
    assert list(chosen.items()) == [(name, bags[name]) for name in names]


def test_id_weights_stay_with_their_ids():
    jagged = Jagged(("a", "b"), torch.arange(5), torch.tensor([[2, 1], [0, 2]]), torch.arange(5) / 10)
    half = J.narrow(jagged, 1, 2)
    assert half.values.tolist() == [2, 3, 4]
    assert torch.equal(half.weights, half.values / 10)
    assert torch.equal(J.select(jagged, ["b", "a"]).weights, torch.tensor([0.3, 0.4, 0.0, 0.1, 0.2]))
    concatenated = J.concat([half, J.narrow(jagged, 0, 1)])
    assert torch.equal(concatenated.weights, concatenated.values / 10)


class KeyedTensor:
    """The methods of torchrec's KeyedJaggedTensor that the conversion uses."""

    def __init__(self, keys, values, lengths, weights=None):
        self._all = keys, values, lengths, weights

    def keys(self):
        return self._all[0]

    def values(self):
        return self._all[1]

    def lengths(self):
        return self._all[2]

    def weights_or_none(self):
        return self._all[3]


@given(BAGS)
def test_keyed_round_trip(bags):
    keyed = J.to_keyed(J.from_lists(bags), KeyedTensor)
    assert isinstance(keyed, KeyedTensor) and keyed.lengths().dim() == 1
    if keyed.lengths().numel():
        assert J.to_lists(J.from_keyed(keyed)) == bags


class VariableBatch(KeyedTensor):
    def __init__(self, *arguments, strides, inverse=None):
        super().__init__(*arguments)
        self._strides, self._inverse = strides, inverse

    def stride_per_key(self):
        return self._strides

    def inverse_indices_or_none(self):
        return self._inverse


@given(BAGS, st.data())
def test_bounds_of_ids_are_kept_by_what_keeps_the_ids(bags, data):
    jagged = J.find_id_bounds(J.from_lists(bags))
    expected = {name: max((i for ids in samples for i in ids), default=-1) + 1 for name, samples in bags.items()}
    assert jagged.id_bounds == tuple(expected.values())
    names = data.draw(st.permutations(jagged.features))
    assert J.select(jagged, names).id_bounds == tuple(expected[name] for name in names)
    assert (
        jagged.map(torch.clone).id_bounds == jagged.id_bounds and J.concat([jagged] * 2).id_bounds == jagged.id_bounds
    )
    for other in (J.concat([jagged, J.from_lists(bags)]), replace(jagged, values=jagged.values + 10)):
        assert other.id_bounds is None  # not known


def test_negative_ids_have_no_bounds():
    assert J.find_id_bounds(J.from_lists({"a": [[3], [-1]], "b": [[], [2]]})).id_bounds is None


def test_variable_batch_sizes_per_feature_are_refused():
    """Strides [2, 4] of two features have six lengths, which also divide into two batches of 3."""
    arguments = ["a", "b"], torch.arange(6), torch.ones(6, dtype=torch.int64)
    with pytest.raises(UserError, match="variable batch per feature .a 2, b 4."):
        J.from_keyed(VariableBatch(*arguments, strides=[2, 4]))
    with pytest.raises(UserError, match="5 lengths for 2 features"):
        J.from_keyed(KeyedTensor(["a", "b"], torch.arange(5), torch.ones(5, dtype=torch.int64)))
    with pytest.raises(UserError, match="inverse indices"):
        J.from_keyed(VariableBatch(*arguments, strides=[3, 3], inverse=(["a", "b"], torch.zeros(2, 6))))
    assert J.from_keyed(VariableBatch(*arguments, strides=[3, 3])).batch_size == 3


def valid_batch() -> dict:
    ids = Jagged(("site", "user"), torch.tensor([1, 2, 3]), torch.tensor([[1, 1], [0, 1]]))
    return {"features": ids, "dense": torch.zeros(2, 3), "labels": {"click": torch.zeros(2)}}


def test_a_label_that_is_nan_is_missing():
    J.check_batch(Batch(**(valid_batch() | {"labels": {"click": torch.tensor([0.0, float("nan")])}})))


def site_user_ids(values, lengths) -> Jagged:
    return Jagged(("site", "user"), torch.tensor(values), torch.tensor(lengths))


def weighted_ids(weights) -> Jagged:
    return replace(valid_batch()["features"], weights=torch.tensor(weights))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"features": site_user_ids([1, 2], [[1, -1], [1, 1]])}, 'feature "site", sample 1: negative length -1'),
        ({"features": site_user_ids([1, 2], [[1, 1], [1, 1]])}, "lengths add up to 4, but the batch holds 2 ids"),
        ({"features": site_user_ids([1], [[1, 0]])}, "lengths have shape (1, 2); wanted (2 features, batch)"),
        ({"features": weighted_ids([1.0, float("nan"), 1.0])}, "id weights: weight 1 is nan"),
        ({"dense": torch.tensor([[0.0], [float("nan")]])}, "numeric features: sample 1, column 0 is nan"),
        ({"dense": torch.zeros(3, 1)}, "numeric features: shape (3, 1) in a batch of 2 samples"),
        ({"labels": {"click": torch.tensor([0.0, float("inf")])}}, 'label "click": sample 1 is inf'),
        ({"labels": {"click": torch.tensor(1.0)}}, 'label "click": shape () in a batch of 2 samples'),
        ({"weights": torch.zeros(3)}, "sample weights: shape (3,) in a batch of 2 samples"),
        ({"weights": torch.tensor([1.0, -1.0])}, "sample weights: sample 1 has a negative weight"),
        ({"weights": torch.zeros(2)}, "sample weights: all are 0"),
    ],
)
def test_errors_in_batches_name_the_wrong_value(change, message):
    J.check_batch(Batch(**valid_batch()))
    with pytest.raises(UserError) as error:
        J.check_batch(Batch(**(valid_batch() | change)))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_unknown_features_suggest_the_nearest_name():
    with pytest.raises(UserError, match='no feature "sites"; did you mean "site"'):
        J.select(valid_batch()["features"], ["sites"])


def test_gradients_of_vectors_are_not_copied():
    """Other uses of the vectors do not matter; unused vectors have no gradient."""
    pooled, rows, unseen = (torch.randn(4, 3, requires_grad=True) for _ in range(3))
    other, calls = torch.randn(4, 2, requires_grad=True), []
    vectors = Vectors(("a",), (3,), pooled, {"b": rows})
    loss = torch.cat([other, pooled], 1).square().sum() + (2 * pooled).sum() + rows.sum()
    vectors.receive(lambda: calls.append([tensor.grad is not None for tensor in vectors.tensors()]))
    loss.backward()
    assert calls == [[True, True]]
    assert torch.equal(vectors.gradients().pooled_BD, 2 * pooled + 2) and torch.equal(rows.grad, torch.ones(4, 3))

    wide = Vectors(("a",), (3,), leaf := torch.randn(4, 3, requires_grad=True), {"b": unseen})
    loss = torch.cat([other, leaf], 1).square().sum()
    wide.receive(lambda: calls.append([]))
    loss.backward()
    assert leaf.grad.stride() == (5, 1) and torch.equal(leaf.grad, 2 * leaf)
    assert len(calls) == 1 and torch.equal(wide.gradients().sequences["b"], torch.zeros(4, 3))
