"""Bytes that ranks send are counted: collectives against closed forms, and runs against the plan's prediction."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_collectives import make_mesh
from test_hosts import TwoHosts

from shardwright.comm import collective
from shardwright.spec.lanes import MAIN
from shardwright.spec.traffic import BETWEEN_HOSTS, IN_HOST

RUN = (
    *("synthetic-wide-deep", "ranks=2", "train.batch_size=256", "train.steps=30", "train.log_every=10"),
    *("train.eval_every=10", "train.eval_samples=1000", "model.dim=32", "tables.kind=sgd", "tables.lr=0.1"),
)


def count_collectives(world: int) -> dict[str, int]:
    mesh = make_mesh(world)
    group, sent = mesh.group(), {}
    x = torch.zeros(12, 4, dtype=torch.float64)
    share = len(x) // world
    calls = {
        "all_to_all": lambda: collective.all_to_all(x, [share] * world, [share] * world, group),
        "all_gather": lambda: collective.all_gather(x, [12] * world, group),
        "all_reduce": lambda: collective.all_reduce(x, group),
    }
    for name, call in calls.items():
        before = sum(mesh.sent.totals().values())
        mesh.sent.stage = name
        call().wait()
        sent[name] = sum(mesh.sent.totals().values()) - before
    assert {link for _, _, link in mesh.sent.totals()} == {IN_HOST}
    mesh.close()
    return sent


@pytest.mark.parametrize("world", (2, 3))
def test_collectives_inside_a_host(ranks, world):
    bytes_ = 12 * 4 * 8
    expected = {"all_to_all": bytes_ * (world - 1) // world, "all_gather": bytes_ * (world - 1)}
    expected["all_reduce"] = bytes_ * (world - 1)  # a small sum: every rank sends its own to each other
    assert ranks.run(world, count_collectives, world) == [expected] * world


def count_by_link() -> dict[str, int]:
    with TwoHosts() as mesh:
        collective.all_to_all(torch.zeros(4, 8), [1] * 4, [1] * 4, mesh.group()).wait()
        totals = mesh.sent.totals()
    return {link: bytes_ for (lane, stage, link), bytes_ in totals.items() if lane == MAIN and not stage}


def test_links_of_two_hosts(ranks):
    assert ranks.run(4, count_by_link) == [{IN_HOST: 32, BETWEEN_HOSTS: 64}] * 4


def mean_bytes(folder: Path, name: str) -> dict[str, float]:
    """Measured bytes of a step in the windows after the first, which has the batches that are read ahead."""
    lines = map(json.loads, (folder / "runs" / name / "traffic.jsonl").read_text().splitlines())
    totals: dict[str, float] = {}
    for line in lines:
        if line["step"] > 10:
            totals[line["kind"]] = totals.get(line["kind"], 0.0) + line["bytes_"] / 20
    return totals


def test_bytes_of_a_run_are_those_that_its_plan_predicts(tmp_path):
    """Without staleness; evaluations between the steps are not counted."""
    arguments = [sys.executable, "-m", "shardwright.cli", "train", *RUN, "run.name=exact"]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (step,) = json.loads((tmp_path / "runs" / "exact" / "predicted_steps.json").read_text())["steps"]
    predicted = {part["kind"]: part["bytes_"] for part in step["traffic"]}
    measured = mean_bytes(tmp_path, "exact")
    assert measured.keys() == predicted.keys()
    for kind, bytes_ in measured.items():
        assert bytes_ == pytest.approx(predicted[kind], rel=0.25), kind
    page = (tmp_path / "runs" / "exact" / "report.html").read_text()
    assert "Messages of a step" in page and "gradients and updates, backward" in page
