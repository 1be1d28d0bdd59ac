"""Batches for a GPU are checked on the CPU, in a thread, whose errors name what is wrong before anything is copied."""

from dataclasses import replace

import pytest
import torch
from clicks import batch

from shardwright.errors import UserError
from shardwright.layers.loss import BinaryLoss, NextTokenLoss
from shardwright.runtime.host_batches import HostBatches


@pytest.fixture(autouse=True)
def memory_without_a_gpu(monkeypatch):
    """Only a machine with a GPU has page-locked memory."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)


def test_batches_are_equal_and_their_ids_have_bounds():
    own = batch(seed=1)
    for loss in (BinaryLoss(), NextTokenLoss()):  # the second has no check of its own
        prepared = HostBatches(loss, allow_zero_weights=False).prepare(own).wait()
        assert torch.equal(prepared.features.values, own.features.values) and torch.equal(prepared.dense, own.dense)
        ids = own.features.values.split(own.features.lengths.sum(1).tolist())
        assert prepared.features.id_bounds == tuple(int(part.max()) + 1 if len(part) else 0 for part in ids)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda own: replace(own, labels={"click": own.labels["click"] + 1}), "a label is 0 or 1"),
        (lambda own: replace(own, dense=own.dense * torch.nan), "numeric features: sample 0"),
        (lambda own: replace(own, weights=torch.zeros(own.batch_size)), "sample weights: all are 0"),
    ),
)
def test_errors_are_those_of_the_cpu(change, message):
    batches = HostBatches(BinaryLoss(), allow_zero_weights=False)
    pending = batches.prepare(change(batch(seed=1)))
    with pytest.raises(UserError, match=message):
        pending.wait()
    assert batches.prepare(batch(seed=2)).wait() is not None
