"""Copies of batches to a GPU; skipped without one. Nothing here has been timed."""

from dataclasses import replace

import pytest
import torch
from clicks import batch, dlrm

from shardwright.comm.mesh import Mesh
from shardwright.comm.transfer import Transfer
from shardwright.errors import UserError
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SLEEP_CYCLES = 1 << 31  # of a kernel that does nothing: about a second


def test_a_copy_overlaps_with_computation():
    device = torch.device("cuda")
    pinned = batch(4096, seed=1).map(torch.Tensor.pin_memory)
    transfer, copy_end = Transfer(device), torch.cuda.Event()
    Transfer(device).copy(pinned).wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    pending = transfer.copy(pinned)
    transfer._stream.record_event(copy_end)
    copy_end.synchronize()
    assert not torch.cuda.current_stream().query(), "the copy waited for the computation"
    copied = pending.wait()
    assert all(torch.equal(copied.labels[name].cpu(), label) for name, label in pinned.labels.items())
    assert torch.equal(copied.features.values.cpu(), pinned.features.values)


def test_overlapped_steps_equal_serial_steps_and_steps_on_the_cpu():
    losses = {}
    for device, overlap in (("cpu", False), ("cuda", False), ("cuda", True)):
        torch.manual_seed(0)
        model = dlrm(dtype="float64")
        plan = plan_for(model, batch(dtype=torch.float64))
        job = build(model, plan, Mesh(device=device), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), overlap=overlap)
        batches = [batch(seed=step, dtype=torch.float64) for step in range(20)]
        losses[device, overlap] = torch.stack([output.loss.cpu() for output in job.run(batches)])
    assert torch.equal(losses["cuda", True], losses["cuda", False])
    assert torch.allclose(losses["cuda", True], losses["cpu", False], rtol=1e-10, atol=0)


def test_errors_name_the_label_and_the_id():
    """They are found on the CPU, before the batch is copied; not run on a GPU yet."""
    plan = plan_for(dlrm(), batch())
    own = batch(seed=1)
    low = replace(own, features=replace(own.features, values=own.features.values - 10**6))
    high = replace(own, features=replace(own.features, values=own.features.values + 10**6))
    twos = replace(own, labels={name: label + 1 for name, label in own.labels.items()})
    for wrong, message in ((low, "is outside its"), (high, "is outside its"), (twos, "a label is 0 or 1")):
        job = build(dlrm(), plan, Mesh(device="cuda"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        with pytest.raises(UserError, match=message):
            list(job.run([batch(seed=0), wrong]))
