"""The training step: its list of stages, and the functions bound to them.

A stage is data (`spec/plan.py: Stage`). `StepBindings` binds its name to a function over the slots of one batch. The
stages are listed in the order of the step; only their leads determine which run ahead.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
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
from shardwright.runtime.accumulation import GradientAccumulation
from shardwright.runtime.sharded_bindings import ShardedBindings
from shardwright.runtime.state import local_rectangles
from shardwright.spec.plan import Contract, Stage
from shardwright.step.slots import Binding, EndOfData, InFlight, Slots, StageFunction

SINGLE_PROCESS_LANES = ("read", "main", "host")


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one batch, which `Job.run` and `Job.evaluate` yield."""

    step: int  # number of training steps done
    loss: Tensor
    logits: Any  # the model's output, in the form that its `loss` takes
    batch: Batch


def single_process_stages(
    model: nn.Module, *, training: bool = True, copy_to_device: bool = False
) -> tuple[Stage, ...]:
    """The stages of this model's step in one process.

    `copy_to_device`: batches are copied to the device one step ahead, overlapped with the previous batch.
    """
    sparse = sparse_of(model)
    updates_tables = training and sparse is not None and sparse.trained
    vectors = ("vectors",) if sparse is not None else ()
    stages = [
        Stage("read", "read", (), ("host_batch",), 2 * copy_to_device),
        Stage("to_device", "host", ("host_batch",), ("batch",), int(copy_to_device)),
    ]
    if sparse is not None:
        stages.append(Stage("ids", "main", ("batch",), ("ids",)))
        stages.append(Stage("lookup", "main", ("ids", "state.tables"), vectors))
    stages.append(Stage("forward", "main", ("batch", *vectors, "state.dense"), ("logits", "loss")))
    if training:
        tables = ("gradients.tables",) if updates_tables else ()
        stages.append(Stage("backward", "main", ("loss", *vectors), ("gradients.dense", *tables)))
    if updates_tables:
        stages.append(Stage("update", "main", ("ids", "gradients.tables"), ("state.tables",)))
    if training:
        stages.append(Stage("step", "main", ("gradients.dense",), ("state.dense",)))
    stages.append(Stage("emit", "main", ("batch", "logits", "loss"), ()))
    return tuple(stages)


def trainable_names(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that a step updates: fixed by `build`, since stages and optimizers depend on them."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


class StepBindings:
    """Binds each stage of a model's step to its function.

    `step/serial.py` and `step/overlapped.py` schedule the stages.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        *,
        autocast_dtype: torch.dtype = torch.float32,
        training: bool = True,
        sharded: ShardedBindings | None = None,
        accumulation: GradientAccumulation | None = None,
        sharded_model: ShardedModel | None = None,
    ) -> None:
        """`sharded`: the bindings for several ranks; `accumulation`: micro-batches of a step;
        `sharded_model`: all-gathers the dense model's parameters if they are sharded or offloaded."""
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.transfer = Transfer(device) if device.type == "cuda" else None
        self.autocast_dtype = autocast_dtype
        self.training = training
        self.batches: Iterator[Batch] = iter(())
        self.outputs: deque[Output] = deque()
        self.num_steps = 0
        self.watch: Heartbeat | None = None  # reports this rank's stage and step to other ranks
        self.trainable_names = trainable_names(model)
        self.accumulation = accumulation or GradientAccumulation()
        self.sharded_model = sharded_model
        # Whether a step's global batch has samples beyond this batch: of other ranks, or of other micro-batches.
        self._is_partial_batch = sharded is not None or self.accumulation.num_micro_batches > 1
        self._is_sharded = sharded is not None
        self.stages = sharded.stages if sharded else single_process_stages(model, training=training)
        functions = self._functions | (sharded.functions if sharded else {})
        end_functions = sharded.end_functions if sharded else {}
        self.bindings = {
            stage.name: Binding(
                Contract(stage.reads, stage.writes),
                partial(self._run, stage.name, functions[stage.name]),
                end_functions.get(stage.name, lambda: None),
            )
            for stage in self.stages
        }

    @property
    def _functions(self) -> dict[str, StageFunction]:
        """The function of each stage in one process."""
        return {
            "read": self.read_batch,
            "to_device": self.copy_to_device,
            "ids": self.select_ids,
            "lookup": self.lookup,
            "forward": self.forward,
            "backward": self.backward,
            "update": self.update_tables,
            "step": self.step_optimizer,
            "emit": self.emit,
        }

    def _run(self, stage: str, run: StageFunction, slots: Slots) -> Sequence[InFlight] | None:
        if self.watch is not None:
            self.watch.stage, self.watch.step = stage, self.num_steps + 1
        return run(slots)

    def read_batch(self, slots: Slots) -> None:
        if not self._is_sharded:  # several ranks exchange the signal in the headers of a batch
            self.accumulation.agreed_stop_signal = self.accumulation.agreed_stop_signal or self.accumulation.poll_stop()
        batch = self.accumulation.next_batch(self.batches)
        if batch is None:
            raise EndOfData
        check_batch(batch, allow_zero_weights=self._is_partial_batch)
        slots["host_batch"] = batch.map(Tensor.pin_memory) if self.transfer else batch

    def copy_to_device(self, slots: Slots) -> None:
        batch = slots["host_batch"]
        slots["batch"] = InFlight("to_device", "host", self.transfer.copy(batch)) if self.transfer else batch

    def select_ids(self, slots: Slots) -> None:
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
        autocast = torch.autocast(
            self.device.type,
            self.autocast_dtype,
            enabled=self.autocast_dtype == torch.bfloat16,
            cache_enabled=self.sharded_model is None,
        )
        with torch.set_grad_enabled(self.training):
            with autocast:
                has_no_tables = sparse_of(self.model) is None
                logits = self.model(batch) if has_no_tables else self.model.dense(batch, slots.get_lazy("vectors"))
            if self.autocast_dtype == torch.bfloat16:  # losses and metrics are computed in float32
                logits = tree_map_only(Tensor, lambda x: x.float() if x.dtype == torch.bfloat16 else x, logits)
            slots["logits"], slots["loss"] = logits, self._loss(logits, batch)
        return [InFlight(*work) for work in self.sharded_model.pop_issued()] if self.sharded_model is not None else ()

    def _loss(self, logits: Any, batch: Batch) -> Tensor:
        """The loss of a batch; 0, not NaN, for a local batch or micro-batch without samples or with zero weights."""
        if self._is_partial_batch and batch.weights is not None and not bool(batch.weights.any()):
            batch = replace(batch, weights=None)
        loss = self.model.loss(logits, batch)
        if not batch.batch_size:
            return loss.nan_to_num(0.0)
        # On a GPU this would synchronize every step; there `runtime/run` checks the metrics it logs instead.
        if self.training and loss.device.type == "cpu" and not math.isfinite(number := float(loss.detach())):
            raise self._loss_error(number)
        return loss

    def _loss_error(self, loss: float) -> UserError:
        """The error for a non-finite loss, raised before the update: names the first non-finite tensor of this rank."""
        parts = local_rectangles(self.model, None, 0)
        names = (rect.name.removeprefix(MODEL_PREFIX) for rect in parts if first_nonfinite_row(rect.values) is not None)
        name = next(names, "")
        where = f'"{name}" is not finite' if name else "all weights of this process are finite: inspect its batch"
        return UserError(
            f"step {self.num_steps + 1}: the loss is {loss}; {where}; lower tables.lr or dense.lr, or set clip"
        )

    def backward(self, slots: Slots) -> None:
        trains_tables = "gradients.tables" in slots
        if trains_tables:
            slots["vectors"].receive()
        if self.sharded_model is not None:
            self.sharded_model.begin_backward(overlap=False, is_last_micro_batch=self.accumulation.is_last)
        (slots["loss"] * self.accumulation.loss_factor(self.accumulation.weight)).backward()
        if self.sharded_model is not None:
            self.sharded_model.end_backward().wait()
        slots["gradients.dense"] = True  # the gradients are in each parameter's .grad
        if trains_tables:
            slots["gradients.tables"] = slots["vectors"].gradients()

    def update_tables(self, slots: Slots) -> None:
        self.accumulation.update_tables(self.model.sparse, slots["ids"], slots["gradients.tables"])

    def step_optimizer(self, slots: Slots) -> None:
        for slot in slots.reads:
            _ = slots[slot]  # waits until each parameter's .grad is reduced over all ranks
        if self.optimizer is not None and self.accumulation.is_last:
            self.optimizer.step()

    def emit(self, slots: Slots) -> None:
        self.num_steps += self.accumulation.is_last
        logits = tree_map_only(Tensor, Tensor.detach, slots["logits"])
        self.outputs.append(Output(self.num_steps, slots["loss"].detach(), logits, slots["batch"]))
