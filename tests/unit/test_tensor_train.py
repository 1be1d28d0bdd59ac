"""Tensor trains: equal to nn.EmbeddingBag on the table that they stand for, in float64."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwright.errors import UserError
from shardwright.jagged import Batch, from_lists, offsets
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.tensor_train import TensorTrainBag
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.spec.optimizer import SGD
from shardwright.spec.workload import Feature, Table


@given(st.integers(1, 500), st.sampled_from((1, 3, 8, 12, 16, 7)), st.integers(1, 5), st.data())
def test_equal_to_an_embedding_bag_on_the_full_table(rows, dim, rank, data):
    torch.manual_seed(0)
    bag = TensorTrainBag(rows, dim, rank, std=1.0).double()
    assert prod(bag.digits) >= rows and prod(bag.widths) == dim
    bags = data.draw(st.lists(st.lists(st.integers(0, rows - 1), max_size=4), min_size=1, max_size=6))
    values = torch.tensor([row for own in bags for row in own], dtype=torch.int64)
    ends = torch.tensor([0, *(len(own) for own in bags)]).cumsum(0)
    weights = torch.rand(len(values), dtype=torch.float64)
    full = bag.vectors(torch.arange(rows))
    rival = nn.EmbeddingBag(rows, dim, mode="sum", include_last_offset=True, dtype=torch.float64)
    rival.weight.data.copy_(full)
    found, wanted = bag(values, ends, weights), rival(values, ends, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(found)
    found.backward(direction)
    wanted.backward(direction)
    cores = torch.autograd.grad(full, [*bag.parameters()], rival.weight.grad)  # by the chain rule
    for core, gradient in zip(bag.parameters(), cores, strict=True):
        torch.testing.assert_close(core.grad, gradient, rtol=1e-10, atol=1e-12)


def test_sizes_and_initial_values():
    torch.manual_seed(0)
    bag = TensorTrainBag(1_000_000, 64, 16, std=0.02)
    assert bag.digits == (100, 100, 100) and bag.widths == (4, 4, 4)
    assert bag.num_values == 100 * (4 * 16 + 16 * 4 * 16 + 16 * 4) and "556 times smaller" in repr(bag)
    rows = torch.randint(0, 1_000_000, (2000,))
    assert float(bag.vectors(rows).detach().std()) == pytest.approx(0.02, rel=0.1)


def test_ids_out_of_range_are_named():
    with pytest.raises(UserError, match="an id outside 0 to 9 in a tensor train of 10 rows"):
        TensorTrainBag(10, 4, 2)(torch.tensor([10]), torch.tensor([0, 1]))
    with pytest.raises(UserError, match="all must be positive"):
        TensorTrainBag(0, 4, 2)


class Model(nn.Module):
    """Scores of two features, one of which has a tensor train."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = EmbeddingBags([Table("small", 10, 4)], [Feature("small", "small")], SGD(lr=0.1))
        self.dense = Dense()
        self.loss = BinaryLoss()

    def forward(self, batch):
        return self.dense(batch, self.sparse(batch))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = TensorTrainBag(1000, 4, 4, std=0.5)

    def forward(self, batch, vectors):
        starts = offsets(batch.features)[batch.batch_size :] - batch.batch_size  # "small" has an id of each sample
        large = self.large(batch.features.values[batch.batch_size :], starts)
        return (vectors["small"] * large).sum(1)


def test_it_trains_in_the_dense_model_of_a_job():
    torch.manual_seed(0)
    model = Model()
    samples = range(32)
    features = from_lists({"small": [[i % 10] for i in samples], "large": [[i * 31, i] for i in samples]})
    batch = Batch(features, torch.zeros(32, 1), {"click": torch.tensor([float(i % 2) for i in samples])})
    job = build(model, plan_for(model, batch), optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02))
    losses = [float(output.loss) for output in job.run([batch] * 60)]
    assert losses[-1] < 0.5 * losses[0]
