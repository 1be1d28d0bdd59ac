"""The training step as a list of stages, and what each stage does.

A stage is data (spec/plan); here its name is bound to a function over the slots of one batch. The order below is the
order of the step; who runs ahead is said by leads alone.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.checkpoint.manifest import MODEL_PREFIX
from shardwright.comm.heartbeat import Heartbeat
from shardwright.comm.transfer import Transfer
from shardwright.dense.sharded import ShardedModel
from shardwright.errors import UserError
from shardwright.jagged import Batch, check_batch
from shardwright.kernels.finite import first_nonfinite_row
from shardwright.measure.describe import sparse_of
from shardwright.planner.step import stages as planned
from shardwright.runtime.accumulation import GradientAccumulation
from shardwright.runtime.sharded_bindings import ShardedBindings
from shardwright.runtime.state import local_rectangles
from shardwright.spec.plan import Contract, Stage
from shardwright.step.slots import Binding, EndOfData, InFlight, Slots

SINGLE_PROCESS_LANES = ("read", "main", "host")


@dataclass(frozen=True, slots=True)
class Output:
    """What one batch gave: handed to whoever drives the job."""

    step: int  # training steps done
    loss: Tensor
    logits: Any  # whatever the model gives to its loss
    batch: Batch


def single_process_stages(
    model: nn.Module, *, training: bool = True, copy_to_device: bool = False
) -> tuple[Stage, ...]:
    """The step of this model: with tables, their lookup and update stand around the dense part. Where batches are
    `copied` to a device, the next is under way beside each."""
    sparse = sparse_of(model)
    updated = training and sparse is not None and sparse.trained
    vectors = ("vectors",) if sparse is not None else ()
    found = [
        Stage("read", "read", (), ("host_batch",), 2 * copy_to_device),
        Stage("to_device", "host", ("host_batch",), ("batch",), int(copy_to_device)),
    ]
    if sparse is not None:
        found.append(Stage("ids", "main", ("batch",), ("ids",)))
        found.append(Stage("lookup", "main", ("ids", "state.tables"), vectors))
    found.append(Stage("forward", "main", ("batch", *vectors, "state.dense"), ("logits", "loss")))
    if training:
        tables = ("gradients.tables",) if updated else ()
        found.append(Stage("backward", "main", ("loss", *vectors), ("gradients.dense", *tables)))
    if updated:
        found.append(Stage("update", "main", ("ids", "gradients.tables"), ("state.tables",)))
    if training:
        found.append(Stage("step", "main", ("gradients.dense",), ("state.dense",)))
    found.append(Stage("emit", "main", ("batch", "logits", "loss"), ()))
    return tuple(found)


def sharded_stages(given: Sequence[Stage], *, training: bool = True) -> tuple[Stage, ...]:
    """The step over several ranks, as the planner lists it; ids of the next batch wait for what they do in `given`."""
    turn = next((stage.name for stage in given if "state.wire" in stage.writes), "")
    behind = next((what for what, stage in planned.IDS_AFTER.items() if stage == turn), "read")
    found = planned.recommendation_stages(prefetch=False, ids_after=behind, host_reduce=planned.has_host_reduce(given))
    if training:
        return found
    evaluated = ("read", "to_device", "request", "lengths", "ids", "lookup", "meet", "vectors", "forward", "emit")
    return tuple(stage for stage in found if stage.name in evaluated)


def trainable_names(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that a step changes: fixed by `build`, since stages and optimizers depend on them."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


class StepBindings:
    """The functions behind the stages of one model: what a step computes, nothing of when."""

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        *,
        autocast_dtype: torch.dtype = torch.float32,
        training: bool = True,
        sharded: tuple[ShardedBindings, Sequence[Stage]] | None = None,
        accumulation: GradientAccumulation | None = None,
        sharded_model: ShardedModel | None = None,
    ) -> None:
        """`ranks`: what knows of other ranks, and the stages that a plan gives; `parts`: of which batches a step is;
        `shards`: what brings the dense part's weights together, where they are cut or lie in a slower tier."""
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.transfer = Transfer(device) if device.type == "cuda" else None
        self.autocast_dtype = autocast_dtype
        self.training = training
        self.batches: Iterator[Batch] = iter(())
        self.outputs: deque[Output] = deque()
        self.num_steps = 0
        self.watch: Heartbeat | None = None  # is told where this rank is
        self.trainable_names = trainable_names(model)
        of_ranks, given = sharded or (None, ())
        self.accumulation = accumulation or GradientAccumulation()
        self.sharded_model = sharded_model
        self._shares = (
            of_ranks is not None or self.accumulation.num_micro_batches > 1
        )  # a batch is then a share of what a step sees
        self._has_ranks = of_ranks is not None
        self.stages = (
            sharded_stages(given, training=training) if of_ranks else single_process_stages(model, training=training)
        )
        self.bindings = {
            stage.name: Binding(
                Contract(stage.reads, stage.writes),
                partial(self._told, stage.name, getattr(of_ranks, stage.name, None) or getattr(self, stage.name)),
                getattr(of_ranks, f"end_{stage.name}", lambda: None),
            )
            for stage in self.stages
        }

    def _told(
        self, stage: str, run: Callable[[Slots], Sequence[InFlight] | None], slots: Slots
    ) -> Sequence[InFlight] | None:
        if self.watch is not None:
            self.watch.stage, self.watch.step = stage, self.num_steps + 1
        return run(slots)

    def read(self, slots: Slots) -> None:
        if not self._has_ranks:  # several ranks exchange it in the headers of a batch
            self.accumulation.agreed_stop_signal = self.accumulation.agreed_stop_signal or self.accumulation.poll_stop()
        batch = self.accumulation.next_batch(self.batches)
        if batch is None:
            raise EndOfData
        check_batch(batch, allow_zero_weights=self._shares)
        slots["host_batch"] = batch.map(Tensor.pin_memory) if self.transfer else batch

    def to_device(self, slots: Slots) -> None:
        batch = slots["host_batch"]
        slots["batch"] = InFlight("to_device", "host", self.transfer.copy(batch)) if self.transfer else batch

    def ids(self, slots: Slots) -> None:
        sparse = self.model.sparse
        slots["ids"] = sparse.read(slots["batch"].features)

    def lookup(self, slots: Slots) -> None:
        with torch.no_grad():
            vectors = self.model.sparse.lookup(slots["ids"])
        for tensor in vectors.tensors():
            tensor.requires_grad_(self.training)
        slots["vectors"] = vectors

    def forward(self, slots: Slots) -> Sequence[InFlight]:
        batch = slots["batch"]
        if self.accumulation.begin_micro_batch() and self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        rounded = torch.autocast(
            self.device.type,
            self.autocast_dtype,
            enabled=self.autocast_dtype == torch.bfloat16,
            cache_enabled=self.sharded_model is None,
        )
        with torch.set_grad_enabled(self.training):
            with rounded:
                whole = sparse_of(self.model) is None
                logits = self.model(batch) if whole else self.model.dense(batch, slots.get_lazy("vectors"))
            if self.autocast_dtype == torch.bfloat16:  # losses and metrics are never rounded
                logits = tree_map_only(Tensor, lambda x: x.float() if x.dtype == torch.bfloat16 else x, logits)
            slots["logits"], slots["loss"] = logits, self._loss(logits, batch)
        return [InFlight(*one) for one in self.sharded_model.pop_issued()] if self.sharded_model is not None else ()

    def _loss(self, logits: Any, batch: Batch) -> Tensor:
        """A share may be no samples, or samples of weight 0: then its loss counts nothing, and is a number."""
        if self._shares and batch.weights is not None and not bool(batch.weights.any()):
            batch = replace(batch, weights=None)
        loss = self.model.loss(logits, batch)
        if not batch.batch_size:
            return loss.nan_to_num(0.0)
        # On a GPU this would synchronize every step; there a run checks its lines of metrics instead.
        if self.training and loss.device.type == "cpu" and not math.isfinite(number := float(loss.detach())):
            raise self._diverged(number)
        return loss

    def _diverged(self, loss: float) -> UserError:
        """The error for a non-finite loss, raised before the update: it names the first non-finite tensor here."""
        held = local_rectangles(self.model, None, 0)
        names = (one.name.removeprefix(MODEL_PREFIX) for one in held if first_nonfinite_row(one.values) is not None)
        name = next(names, "")
        where = f'"{name}" is not finite' if name else "all weights of this process are finite: inspect its batch"
        return UserError(
            f"step {self.num_steps + 1}: the loss is {loss}; {where}; lower tables.lr or dense.lr, or set clip"
        )

    def backward(self, slots: Slots) -> None:
        of_tables = "gradients.tables" in slots
        if of_tables:
            slots["vectors"].receive()
        if self.sharded_model is not None:
            self.sharded_model.begin_backward(overlap=False, is_last_micro_batch=self.accumulation.is_last)
        (slots["loss"] * self.accumulation.loss_factor(self.accumulation.weight)).backward()
        if self.sharded_model is not None:
            self.sharded_model.end_backward().wait()
        slots["gradients.dense"] = True  # they lie in each parameter's .grad
        if of_tables:
            slots["gradients.tables"] = slots["vectors"].gradients()

    def update(self, slots: Slots) -> None:
        self.accumulation.update_tables(self.model.sparse, slots["ids"], slots["gradients.tables"])

    def step(self, slots: Slots) -> None:
        for slot in slots.reads:
            _ = slots[slot]  # the gradients in each parameter's .grad are then those of all ranks
        if self.optimizer is not None and self.accumulation.is_last:
            self.optimizer.step()

    def emit(self, slots: Slots) -> None:
        self.num_steps += self.accumulation.is_last
        logits = tree_map_only(Tensor, Tensor.detach, slots["logits"])
        self.outputs.append(Output(self.num_steps, slots["loss"].detach(), logits, slots["batch"]))
