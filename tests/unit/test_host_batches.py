"""Batches for a GPU are checked on the CPU, in a thread, whose errors name what is wrong before anything is copied."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from clicks import batch

from shardwright.errors import UserError
from shardwright.layers.loss import BinaryLoss, NextTokenLoss
from shardwright.runtime.host_batches import HostBatches


def batches_for(loss) -> HostBatches:
    return HostBatches(SimpleNamespace(loss=loss), allow_zero_weights=False)


@pytest.fixture(autouse=True)
def memory_without_a_gpu(monkeypatch):
    """Only a machine with a GPU has page-locked memory."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)


def test_batches_are_equal_and_their_ids_have_bounds():
    own = batch(seed=1)
    for loss in (BinaryLoss(), NextTokenLoss()):  # the second has no check of its own
        prepared = batches_for(loss).prepare(own).wait()
        assert torch.equal(prepared.features.values, own.features.values) and torch.equal(prepared.dense, own.dense)
        ids = own.features.values.split(own.features.lengths.sum(1).tolist())
        assert prepared.features.id_bounds == tuple(int(part.max()) + 1 if len(part) else 0 for part in ids)


def test_a_reader_may_reuse_its_memory_for_the_next_batch(monkeypatch):
    batches, own = batches_for(BinaryLoss()), batch(seed=1)
    expected, copy = own.features.values.clone(), torch.Tensor.pin_memory
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: time.sleep(0.05) or copy(x))
    batches.end_last()  # there is none yet
    pending = batches.prepare(own)
    batches.end_last()
    own.features.values.fill_(-1)
    assert torch.equal(pending.wait().features.values, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda own: replace(own, dense=own.dense * torch.nan), "numeric features: sample 0"),
        (lambda own: replace(own, weights=torch.zeros(own.batch_size)), "sample weights: all are 0"),
    ),
)
def test_errors_are_those_of_the_cpu(change, message):
    batches = batches_for(BinaryLoss())
    pending = batches.prepare(change(batch(seed=1)))
    with pytest.raises(UserError, match=message):
        pending.wait()
    assert batches.prepare(batch(seed=2)).wait() is not None


def test_losses_with_a_wrong_label_check_again_on_the_gpu():
    """So the error comes from where the label is used, also of a loss with parts that are not for this batch."""
    parts = torch.nn.ModuleList([BinaryLoss(), BinaryLoss("buy")])
    batches, own = batches_for(parts), batch(seed=1)
    with_both = replace(own, labels=own.labels | {"buy": own.labels["click"]})
    batches.prepare(with_both).wait()
    assert batches.checked_losses == set(parts)
    batches.prepare(replace(with_both, labels=with_both.labels | {"buy": own.labels["click"] + 1})).wait()
    assert batches.checked_losses == {parts[0]}
    assert batches_for(lambda logits, batch: logits.sum()).checked_losses == frozenset()
