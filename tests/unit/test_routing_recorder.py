"""Recorded routing: counts compared with those of the gate, in a run's file and when it resumes."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwright import config
from shardwright.dense.activation_checkpoint import CheckpointedBlock
from shardwright.errors import UserError
from shardwright.layers.gates import TopKGate
from shardwright.layers.moe import LinearExperts, MoE
from shardwright.runtime.rank_group import ONE_RANK
from shardwright.runtime.run import train as training
from shardwright.runtime.run.routing_recorder import RoutingRecorder
from shardwright.spec.routing import RoutedRows, read_routing

TOKENS = torch.tensor([[3.0, 2, 1, 0], [3.0, 1, 2, 0], [0.0, 1, 2, 3], [9.0, 5, 1, 0], [0.0, 9, 8, 1]])
# Two experts a token, those of its largest channels: 0 1, 0 2, 3 2, 0 1, 1 2.
ROWS = (3, 3, 3, 1)


class Block(nn.Module):
    """A mixture whose scores are the channels of a token."""

    def __init__(self, capacity: float = 0.0) -> None:
        super().__init__()
        self.mix = MoE(TopKGate(4, 4, 2, capacity=capacity), LinearExperts(4, 4, 4))
        with torch.no_grad():
            self.mix.gate.scores.weight.copy_(torch.eye(4))
        self.out = nn.Linear(4, 4)

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.out(self.mix(x_BC)[0]).relu()


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.block(x_BC).sum()


def test_rows_are_those_of_the_gate():
    model = Model(Block())
    recorder = RoutingRecorder(model, ONE_RANK)
    recorder.begin_step(is_recorded=True)
    model(TOKENS).backward()
    assert recorder.gather(7) == [RoutedRows(7, "block.mix", (ROWS,))]


def test_calls_of_a_step_are_summed_and_evaluations_left_out():
    model = Model(Block())
    recorder = RoutingRecorder(model, ONE_RANK)
    model(TOKENS)
    assert recorder.gather(0) == []  # before the first recorded step
    recorder.begin_step(is_recorded=True)
    model(TOKENS[:2]).backward()
    model.eval()
    model(TOKENS)
    model.train()
    model(TOKENS[2:]).backward()
    assert recorder.gather(1)[0].rows == (ROWS,)
    recorder.begin_step(is_recorded=True)
    model(TOKENS[:0])
    assert recorder.gather(2)[0].rows == ((0, 0, 0, 0),)
    recorder.begin_step(is_recorded=False)
    model(TOKENS)
    assert recorder.gather(3) == []


def test_choices_over_the_capacity_are_dropped():
    model = Model(Block(capacity=0.8))  # at most two of ten choices for each of four experts
    recorder = RoutingRecorder(model, ONE_RANK)
    recorder.begin_step(is_recorded=True)
    model(TOKENS)
    (record,) = recorder.gather(1)
    assert record.rows == (tuple(min(2, rows) for rows in ROWS),)
    assert record.dropped == 10 - sum(record.rows[0]) == 3


@pytest.mark.parametrize("policy", ["nothing", "products"])
def test_recomputed_calls_count_once(policy):
    block, calls = Block(), []
    block.mix.experts.register_forward_hook(lambda *_: calls.append(None))
    model = Model(CheckpointedBlock(block, policy))
    recorder = RoutingRecorder(model, ONE_RANK)
    recorder.begin_step(is_recorded=True)
    model(TOKENS).backward()
    assert len(calls) == 2, "the block was not recomputed"
    assert recorder.gather(1)[0].rows == (ROWS,)


def test_outputs_and_gradients_stay_the_same():
    torch.manual_seed(0)
    plain = Model(Block())
    torch.manual_seed(0)
    recorded = Model(Block())
    recorder = RoutingRecorder(recorded, ONE_RANK)
    for model in (plain, recorded):
        recorder.begin_step(is_recorded=True)
        model(TOKENS).backward()
    for parameter, other in zip(plain.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


SMALL = (
    *("data.length=16", "model.channels=16", "model.num_blocks=2", "model.num_heads=2"),
    *("train.batch_size=4", "train.log_every=3", "train.eval_every=0", "train.eval_samples=8"),
    *("train.checkpoint_every=4", "train.decay=none", "train.warmup=2"),
)


def train(name: str, *overrides: str, base: str = "moe-gpt") -> Path:
    return training.train(config.load(base, (*SMALL, f"run.name={name}", *overrides))).path


def test_a_run_records_at_its_lines_of_metrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train("mine", "train.steps=7", "train.accumulate=2")
    records = [*read_routing(run / "routing.jsonl")]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in metrics if line["kind"] == "train"]
    modules = ("blocks.0.mlp", "blocks.1.mlp")
    assert steps == [3, 4, 6, 7]
    assert [(record.step, record.module) for record in records] == [(step, name) for step in steps for name in modules]
    assert {sum(record.expert_rows) for record in records} == {
        2 * 2 * 4 * 16
    }  # of both micro-batches, two experts each
    assert all(len(record.rows) == 1 and record.computed == () for record in records)


def test_a_resumed_run_has_each_step_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = train("whole", "train.steps=9")
    cut = train("cut", "train.steps=6")
    with (cut / "routing.jsonl").open("a") as file:
        file.write('{"step":7,"module":"blocks.0.mlp","rows":[[1,2')  # as kill -9 leaves it
    assert [record.step for record in read_routing(cut / "routing.jsonl")][-1] == 6
    train("cut", "train.steps=9", "run.resume=true")
    assert (cut / "routing.jsonl").read_text() == (whole / "routing.jsonl").read_text()
    with (cut / "routing.jsonl").open("a") as file:
        file.write("{broken}\n")
    with pytest.raises(UserError, match=r"routing.jsonl, line \d+: bad JSON"):
        list(read_routing(cut / "routing.jsonl"))


def test_models_without_mixtures_have_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not (train("dense", "train.steps=3", base="gpt") / "routing.jsonl").exists()
