"""Runs on a GPU equal those on the CPU; skipped without a GPU. Not run on one yet: unit/test_run_device.py fakes it."""

import math

import pytest
import torch
from test_run_device import SMALL

from shardwright import config
from shardwright.runtime.run import train as loop
from shardwright.runtime.run.evaluate import evaluate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_training_and_evaluation_equal_those_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwright.runtime.run.evaluate.SYNTHETIC_SAMPLES", 256)
    results = {}
    for device in ("cpu", "cuda"):
        keys = (f"run.directory={tmp_path}", f"run.name={device}", f"run.device={device}")
        loop.train(config.load("synthetic-dlrm", [*SMALL, *keys]))
        results[device] = evaluate(tmp_path / device)[0].metrics
    for name, value in results["cpu"].items():
        assert math.isclose(value, results["cuda"][name], rel_tol=1e-3), name
    moved = evaluate(tmp_path / "cuda", ["run.device=cpu"])[0].metrics
    assert math.isclose(moved["ne"], results["cuda"]["ne"], rel_tol=1e-3)
