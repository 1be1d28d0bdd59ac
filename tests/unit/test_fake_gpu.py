"""Jobs of one process on a fake GPU (tests/fake_gpu.py) equal those on the CPU; nothing here needs a GPU."""

import pytest
import torch
from clicks import batch, dlrm
from fake_gpu import fake_gpu

from shardwright.comm.mesh import Mesh
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for


def losses_on(device: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = dlrm(dtype="float64")
    plan = plan_for(model, batch(dtype=torch.float64))
    job = build(model, plan, Mesh(device=device), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    batches = [batch(seed=step, dtype=torch.float64) for step in range(5)]
    return torch.stack([output.loss.cpu() for output in job.run(batches)])


def test_tensors_of_the_fake_gpu_refuse_others():
    with fake_gpu():
        x = torch.ones(3, device="cuda")
        assert x.is_cuda and x.device.type == "cuda" and (x + 1).tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="same device"):
            torch.add(x, torch.ones(3))
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(3)[torch.zeros(1, dtype=torch.int64, device="cuda")]


def test_steps_on_a_gpu_equal_steps_on_the_cpu():
    expected = losses_on("cpu")
    with fake_gpu():
        actual = losses_on("cuda")
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)
