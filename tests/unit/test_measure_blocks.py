"""Measured passes of a model of embed, blocks and head; and a pipeline's bubble, from its timeline."""

import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.jagged import Batch, Jagged
from shardwright.layers.decoder import LLAMA
from shardwright.models.gpt import GPT
from shardwright.report.bubble import bubble_ratio
from shardwright.runtime.run import measure_blocks
from shardwright.spec.timeline import Event, Timeline

TOKENS, VOCABULARY = 8, 32


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds  # other threads' time does not shorten it
    while time.thread_time() < end:
        pass


class Busy(nn.Module):
    """Wraps a block, and computes for a while before it."""

    def __init__(self, block: nn.Module, seconds: float, calls: list[str]) -> None:
        super().__init__()
        self.block, self.seconds, self.calls = block, seconds, calls

    def __deepcopy__(self, memo):
        self.calls.append("copy")
        return Busy(self.block, self.seconds, self.calls)

    def extra_repr(self) -> str:
        return str(self.seconds)

    def forward(self, x):
        self.calls.append("call")
        spin(self.seconds)
        return self.block(x)


def make_batch(seed: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    lengths = torch.full((1, 2), TOKENS)
    return Batch(Jagged(("tokens",), ids[:, :-1].flatten(), lengths), None, {"next": ids[:, 1:].clone()})


def make_model(seconds: tuple[float, ...]) -> tuple[GPT, list[str]]:
    calls: list[str] = []
    shape = {"vocabulary": VOCABULARY, "context": TOKENS, "channels": 16, "num_heads": 2}
    model = GPT(**shape, num_blocks=len(seconds), form=LLAMA)
    for number, duration in enumerate(seconds):
        model.blocks[number] = Busy(model.blocks[number], duration, calls)
    return model, calls


def test_equal_blocks_are_timed_once(monkeypatch):
    monkeypatch.setattr(measure_blocks, "SECONDS", 0.2)
    batches = [make_batch(0), make_batch(1)]
    quick, calls = make_model((0.0, 0.0, 0.0, 0.0))
    state = torch.get_rng_state()
    forward, backward = measure_blocks.block_seconds(quick, batches, 2, "float32")
    assert calls.count("copy") == 2, "as many copies as a rank has blocks"
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in quick.embed.parameters())
    slow, calls = make_model((0.02, 0.02, 0.0, 0.03))
    slow_forward, slow_backward = measure_blocks.block_seconds(slow, batches, 1, "float32")
    assert calls.count("copy") == 3, "a copy of each kind"
    assert 0.06 < slow_forward - forward < 0.3, "of one pass, however many are timed"
    assert slow_forward > slow_backward
    assert forward > 0 and backward > 0


@pytest.mark.parametrize("policy", ["nothing", "products"])
def test_backward_includes_what_activation_checkpointing_repeats(monkeypatch, policy):
    monkeypatch.setattr(measure_blocks, "SECONDS", 0.05)
    batches = [make_batch(0), make_batch(1)]
    model, calls = make_model((0.02, 0.02))
    recompute = {f"blocks.{number}": policy for number in range(2)}
    forward, backward = measure_blocks.block_seconds(model, batches, 2, "float32", recompute=recompute)
    assert forward + backward > 0.08, "both passes compute two blocks"
    assert forward > 0.02 and backward > 0.02, "in the ratio of processor times, in which other threads have a part"
    assert all(type(block) is Busy for block in model.blocks), "the model itself is not wrapped"
    plain_backward = measure_blocks.block_seconds(model, batches, 2, "float32")[1]
    assert backward > plain_backward + 0.02


def test_frozen_parts_have_no_backward_pass(monkeypatch):
    monkeypatch.setattr(measure_blocks, "SECONDS", 0.05)
    model, _ = make_model((0.0,))
    model.embed.requires_grad_(False)
    forward, backward = measure_blocks.block_seconds(
        model, [make_batch(0), make_batch(1)], 1, "float32", num_in_flight=2
    )
    assert forward > 0 and backward > 0


def test_a_model_without_blocks_is_not_timed():
    assert measure_blocks.has_parts(make_model((0.0,))[0])
    assert not measure_blocks.has_parts(nn.Linear(2, 2))


def event(number: int, name: str, start: float, end: float, step: int, kind: str = "stage") -> Event:
    return Event(id=number, name=name, kind=kind, rank=0, lane="main", step=step, start=start, end=end)


def test_waits_inside_passes_belong_to_the_bubble():
    events: list[Event] = []
    for step, begin in enumerate((0.0, 20.0)):
        events += [
            event(10 * step, "forward", begin, begin + 4, step),  # 1 s of it waits for the batch
            event(10 * step + 1, "weigh", begin, begin + 1, step, "wait"),
            event(10 * step + 2, "backward", begin + 5, begin + 9, step),  # 2 s of it wait for gradients
            event(10 * step + 3, "receive.backward", begin + 5, begin + 7, step, "wait"),
            event(10 * step + 4, "step", begin + 9, begin + 12, step),
        ]
    # From 1 to 9 s there are 3 + 2 s of passes.
    assert bubble_ratio(Timeline("measured", tuple(events))) == pytest.approx(8 / 5 - 1)


def test_steps_without_passes_have_no_bubble():
    """A run of one step has read the next batches."""
    read = [replace(event(step, "read", step, step + 1, step), lane="read") for step in (1, 2)]
    assert math.isnan(bubble_ratio(Timeline("measured", tuple(read))))
    passes = (event(3, "forward", 0, 1, 0), event(4, "backward", 1, 3, 0))
    assert bubble_ratio(Timeline("measured", (*passes, *read))) == pytest.approx(0)
