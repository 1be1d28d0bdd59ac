"""The functions of the stages of a pipeline's chunks. Their slots are named after the chunk (spec/pipeline.py)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardwright.dense.pipeline import gradient_edges, input_gradients
from shardwright.errors import UserError
from shardwright.spec.lanes import PIPE, PIPE_BACKWARD
from shardwright.spec.pipeline import Chunk
from shardwright.step.slots import InFlight, Slots, accesses

ChunkFunction = Callable[[Any, Slots], Sequence[InFlight] | None]


def pipeline_functions(chunks: Sequence[Chunk]) -> Mapping[str, ChunkFunction]:
    """The functions of the stages that a rank with these chunks of a pipeline has in place of others."""
    reduced = tuple(f"reduced{chunk.suffix}" for chunk in chunks)

    @accesses(reads=reduced, writes=("state.dense",))
    def step_optimizer(step: Any, slots: Slots) -> None:
        step.step_optimizer(slots)

    functions: dict[str, ChunkFunction] = {"request": _build_request, "weigh": _weigh, "step": step_optimizer}
    if not any(chunk.is_last for chunk in chunks):
        functions["emit"] = _emit_batch
    for chunk in chunks:
        functions |= chunk_functions(chunk)
    return functions


@accesses(reads=("weight",), writes=("request",))
def _build_request(step: Any, slots: Slots) -> None:
    """The announcement of all micro-batches of a step."""
    weights: Sequence[float] = slots["weight"]
    # The ranks of a pipeline have the same samples: the last one announces their weight.
    weight = sum(weights) if step.pipeline.is_last else 0.0
    slots["request"] = step.announcer.request(None, weight, step.accumulation.poll_stop(), len(weights))


@accesses(reads=("lengths",), writes=("step_weight",))
def _weigh(step: Any, slots: Slots) -> None:
    """Wait until all ranks have announced the micro-batches of a step."""
    announced = slots["lengths"]
    step.agree_to_stop(announced)
    slots["step_weight"] = announced.total_weight
    if not announced.total_weight and step.training:
        raise UserError("sample weights: all of a step are 0, so it has no loss; drop such samples")


@accesses(reads=("batch",))
def _emit_batch(step: Any, slots: Slots) -> None:
    """The output of a rank that does not have the end of the model."""
    step.add_output(slots.call, slots["batch"], None)


def chunk_functions(chunk: Chunk) -> Mapping[str, ChunkFunction]:
    """The function of each stage of a chunk; the first argument is the rank's `StepBindings`."""
    suffix = chunk.suffix
    functions = dict[str, ChunkFunction]()
    if not chunk.is_first:
        functions |= {f"receive{suffix}": _receive(chunk), f"send.backward{suffix}": _send_gradients(chunk)}
    if not chunk.is_last:
        functions |= {f"send{suffix}": _send(chunk), f"receive.backward{suffix}": _receive_gradients(chunk)}
    functions[f"forward{suffix}"] = _last_forward(chunk) if chunk.is_last else _forward(chunk)
    functions[f"backward{suffix}"] = _last_backward(chunk) if chunk.is_last else _backward(chunk)
    return functions


def _receive(chunk: Chunk) -> ChunkFunction:
    slot = f"input{chunk.suffix}"

    @accesses(reads=("batch",), writes=(slot,))
    def receive(step: Any, slots: Slots) -> None:
        slots.issue(slot, step.pipeline.receive(chunk, slots["batch"]))

    return receive


def _forward(chunk: Chunk) -> ChunkFunction:
    source, output, edges = _source(chunk), f"output{chunk.suffix}", f"edges{chunk.suffix}"

    @accesses(reads=(*_waits(chunk), source, "state.dense"), writes=(output, edges))
    def forward(step: Any, slots: Slots) -> None:
        x = step.run_dense(slots.call, partial(step.pipeline.forward, chunk, slots[source]), chunk.index)
        slots[output], slots[edges] = x, gradient_edges(x) if step.training else None

    return forward


def _last_forward(chunk: Chunk) -> ChunkFunction:
    source = _source(chunk)

    @accesses(reads=(*_waits(chunk), "batch", source, "state.dense"), writes=("logits", "loss"))
    def forward(step: Any, slots: Slots) -> None:
        run = partial(step.pipeline.forward, chunk, slots[source])
        slots["logits"], slots["loss"] = step.run_with_loss(slots.call, run, slots["batch"], chunk.index)

    return forward


def _send(chunk: Chunk) -> ChunkFunction:
    slot = f"output{chunk.suffix}"

    @accesses(reads=(slot,))
    def send(step: Any, slots: Slots) -> Sequence[InFlight]:
        return [InFlight(slots.call.stage.name, PIPE, step.pipeline.send(slots[slot]))]

    return send


def _receive_gradients(chunk: Chunk) -> ChunkFunction:
    slot = f"output.gradient{chunk.suffix}"

    @accesses(reads=("batch",), writes=(slot,))
    def receive_gradients(step: Any, slots: Slots) -> None:
        slots.issue(slot, step.pipeline.receive_gradients(chunk, slots["batch"]))

    return receive_gradients


def _backward(chunk: Chunk) -> ChunkFunction:
    """Backward from the gradients that the next chunk has sent."""
    edges, gradients = f"edges{chunk.suffix}", f"output.gradient{chunk.suffix}"
    inputs = () if chunk.is_first else (f"input{chunk.suffix}",)

    @accesses(reads=(*inputs, edges, gradients), writes=_gradient_slots(chunk))
    def backward(step: Any, slots: Slots) -> None:
        starts = slots[edges]
        _run_backward(step, slots, chunk, lambda: torch.autograd.backward(starts, slots[gradients]))

    return backward


def _last_backward(chunk: Chunk) -> ChunkFunction:
    """Backward from the loss, multiplied by the micro-batch's share of the step's weight."""

    @accesses(reads=(_source(chunk), "weight", "step_weight", "loss"), writes=_gradient_slots(chunk))
    def backward(step: Any, slots: Slots) -> None:
        share = slots["weight"] / slots["step_weight"]
        _run_backward(step, slots, chunk, (slots["loss"] * share).backward)
        slots["loss"].detach_()  # its graph would hold what was received, and its gradient, until the end of the step

    return backward


def _run_backward(step: Any, slots: Slots, chunk: Chunk, run: Callable[[], None]) -> None:
    reduction = step.run_backward(slots.call, run, chunk.index)
    slots[f"reduced{chunk.suffix}"] = True if reduction is None else reduction
    if not chunk.is_first:
        slots[f"input.gradient{chunk.suffix}"] = input_gradients(slots[_source(chunk)])


def _send_gradients(chunk: Chunk) -> ChunkFunction:
    slot = f"input.gradient{chunk.suffix}"

    @accesses(reads=(slot,))
    def send_gradients(step: Any, slots: Slots) -> Sequence[InFlight]:
        return [InFlight(slots.call.stage.name, PIPE_BACKWARD, step.pipeline.send_gradients(slots[slot]))]

    return send_gradients


def _waits(chunk: Chunk) -> tuple[str, ...]:
    """The first pass of a step begins when all ranks have announced it."""
    return ("step_weight",) if chunk.index == 0 else ()


def _source(chunk: Chunk) -> str:
    return "batch" if chunk.is_first else f"input{chunk.suffix}"


def _gradient_slots(chunk: Chunk) -> tuple[str, ...]:
    reduced = f"reduced{chunk.suffix}"
    return (reduced,) if chunk.is_first else (f"input.gradient{chunk.suffix}", reduced)
