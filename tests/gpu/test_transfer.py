"""Batches on their way to a GPU. Without one these tests skip: nothing here was ever timed."""

import pytest
import torch
from clicks import batch, dlrm

from shardwright.comm.mesh import Mesh
from shardwright.comm.transfer import Transfer
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BUSY = 1 << 31  # cycles of a kernel that does nothing: about a second


def test_a_copy_is_under_way_beside_what_computes():
    device = torch.device("cuda")
    given = batch(4096, seed=1).map(torch.Tensor.pin_memory)
    transfer, ended = Transfer(device), torch.cuda.Event()
    Transfer(device).copy(given).wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    copied = transfer.copy(given)
    transfer._stream.record_event(ended)
    ended.synchronize()
    assert not torch.cuda.current_stream().query(), "the copy waited for what was computing"
    there = copied.wait()
    assert all(torch.equal(there.labels[name].cpu(), label) for name, label in given.labels.items())
    assert torch.equal(there.features.values.cpu(), given.features.values)


def test_overlapped_steps_equal_serial_ones_and_the_cpus():
    found = {}
    for place, overlap in (("cpu", False), ("cuda", False), ("cuda", True)):
        torch.manual_seed(0)
        model = dlrm(dtype="float64")
        plan = plan_for(model, batch(dtype=torch.float64))
        job = build(model, plan, Mesh(device=place), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), overlap=overlap)
        batches = [batch(seed=at, dtype=torch.float64) for at in range(20)]
        found[place, overlap] = torch.stack([output.loss.cpu() for output in job.run(batches)])
    assert torch.equal(found["cuda", True], found["cuda", False])
    assert torch.allclose(found["cuda", True], found["cpu", False], rtol=1e-10, atol=0)
