"""`run.device`: the choice of device and backend, and whole runs on a fake GPU (tests/fake_gpu.py)."""

import json
import math

import pytest
import torch
from clicks import batch, dlrm
from fake_gpu import fake_gpu

from shardwright import config
from shardwright.comm.backend import GLOO, NCCL, RankDevice, choose_backend, choose_device
from shardwright.comm.mesh import Mesh
from shardwright.comm.staging import Staging, staging_for
from shardwright.errors import UserError
from shardwright.planner.step.stages import ONE_RANK_GPU, requests_from_host, step_stages, with_gpu
from shardwright.runtime.build import build
from shardwright.runtime.placements import keep_on_disk
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run import train as loop
from shardwright.runtime.run.device import device_notes, run_device
from shardwright.runtime.run.evaluate import evaluate

SMALL = (
    *("data.workers=0", "train.batch_size=64", "train.log_every=2", "train.eval_samples=256", "train.eval_every=4"),
    *("train.steps=4", "train.checkpoint_every=2", "train.increments=1", "run.loggers=[]"),
)


@pytest.mark.parametrize(
    "setting, num_gpus, local_rank, expected",
    (
        ("auto", 0, 0, "cpu"),
        ("auto", 0, 3, "cpu"),
        ("auto", 1, 0, "cuda:0"),
        ("auto", 4, 3, "cuda:3"),
        ("auto", 2, 3, "cuda:1"),
        ("cpu", 0, 0, "cpu"),
        ("cpu", 8, 5, "cpu"),
        ("cuda", 1, 0, "cuda:0"),
        ("cuda", 1, 1, "cuda:0"),
        ("cuda", 8, 7, "cuda:7"),
    ),
)
def test_the_device_of_a_rank(setting, num_gpus, local_rank, expected):
    assert choose_device(setting, num_gpus, local_rank) == torch.device(expected)


def test_cuda_without_a_gpu_names_the_remedy():
    with pytest.raises(UserError, match="^run.device=cuda, but torch sees no GPU; install torch with CUDA .*") as error:
        choose_device("cuda", 0, 0)
    assert "set run.device=cpu" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "gpus, has_nccl, expected",
    (
        (("", ""), True, GLOO),
        (("a", "b"), True, NCCL),
        (("a", "b", "c", "d"), True, NCCL),
        (("a", "b"), False, GLOO),
        (("a", "a"), True, GLOO),
        (("a", "b", "a"), True, GLOO),
    ),
)
def test_the_backend_of_ranks(gpus, has_nccl, expected):
    devices = [RankDevice("cuda" if gpu else "cpu", gpu) for gpu in gpus]
    assert choose_backend(devices, has_nccl=has_nccl) == expected


def test_ranks_on_different_devices_are_refused():
    devices = [RankDevice("cuda", "a"), RankDevice("cpu"), RankDevice("cpu")]
    with pytest.raises(UserError, match=r"ranks \[1, 2\] on cpu, ranks \[0\] on cuda.*; set run.device=cpu"):
        choose_backend(devices, has_nccl=True)


def test_only_tensors_of_a_gpu_over_gloo_are_staged():
    x, cuda, cpu = torch.ones(3), torch.device("cuda"), torch.device("cpu")
    for staging in (Staging(), staging_for(cpu, over_gloo=True), staging_for(cuda, over_gloo=False)):
        assert staging.copy_to_host(x) is x and staging.allocate(x) is x and staging.receive("work", [(x, x)]) == "work"
    with fake_gpu():
        staging, on_gpu = staging_for(cuda, over_gloo=True), torch.arange(3.0, device="cuda")
        assert staging.copy_to_host(x) is x and staging.applies_to(on_gpu)
        host = staging.copy_to_host(on_gpu)
        assert host.device.type == "cpu" and host.tolist() == [0, 1, 2]


def test_an_unknown_device_is_refused():
    with pytest.raises(UserError, match='key "run.device" is .*tpu'):
        config.load("synthetic-dlrm", ["run.device=tpu"])


def test_a_run_on_cuda_without_a_gpu_is_refused_before_anything_is_written(tmp_path):
    settings = config.load("synthetic-dlrm", [*SMALL, f"run.directory={tmp_path}", "run.device=cuda"])
    with pytest.raises(UserError, match="torch sees no GPU"):
        loop.train(settings)
    assert not list(tmp_path.iterdir())


def test_requests_of_several_ranks_are_built_from_host_memory():
    assert requests_from_host(with_gpu(step_stages(), num_ranks=2))
    assert not requests_from_host(with_gpu(step_stages(leads=ONE_RANK_GPU)))
    assert not requests_from_host(with_gpu(step_stages(has_tables=False), num_ranks=2))


def test_plans_that_need_a_cpu():
    """With auto they run on the CPU, with a note; else the error names the remedy."""
    model = dlrm()
    plan = plan_for(model, batch())
    on_disk = keep_on_disk(plan, {"site": 32})
    with fake_gpu():
        assert run_device("auto", plan, model).type == run_device("cuda", on_disk, model).type == "cuda"
        assert run_device("auto", on_disk, model).type == run_device("cpu", plan, model).type == "cpu"
        (note,) = device_notes("auto", on_disk, model, Mesh())
        assert 'table "site" has rows on disk, which this version computes on CPUs only' in note
        with pytest.raises(UserError, match='table "site" has rows on disk.*set run.device=cpu'):
            build(model, on_disk, Mesh(device="cuda"), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    assert not list(device_notes("auto", on_disk, model, Mesh()))


def test_a_run_on_a_gpu_equals_one_on_the_cpu(tmp_path, monkeypatch):
    """Training with incremental checkpoints, evaluation, and resuming on the CPU."""
    monkeypatch.setattr("shardwright.runtime.run.evaluate.SYNTHETIC_SAMPLES", 256)
    results = {}
    for device in ("cpu", "cuda"):
        settings = config.load("synthetic-dlrm", [*SMALL, f"run.directory={tmp_path}", f"run.name={device}"])
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"device": device})})
        if device == "cuda":
            with fake_gpu():
                loop.train(settings)
                results[device] = evaluate(tmp_path / device)[0].metrics
        else:
            loop.train(settings)
            results[device] = evaluate(tmp_path / device)[0].metrics
    environment = json.loads((tmp_path / "cuda" / "environment.json").read_text())
    assert (environment["device"], environment["device_type"]) == ("fake GPU", "cuda")
    assert results["cpu"].keys() == results["cuda"].keys()
    for name, value in results["cpu"].items():
        assert math.isclose(value, results["cuda"][name], rel_tol=1e-4), name
    on_cpu = evaluate(tmp_path / "cuda", ["run.device=cpu"])[0].metrics
    assert math.isclose(on_cpu["ne"], results["cuda"]["ne"], rel_tol=1e-4)
    overrides = ["run.resume=true", "run.device=cpu", "train.steps=6"]
    result = loop.train(config.load(str(tmp_path / "cuda" / "config.toml"), overrides))
    assert result.step == 6
