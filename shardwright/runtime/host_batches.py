"""Batches for a GPU, in host memory: a thread pins and checks one while the batch before is computed."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardwright.comm.pending import Pending
from shardwright.errors import UserError
from shardwright.jagged import Batch, check_batch, find_id_bounds
from shardwright.kernels.native import use_threads
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.task_losses import TaskLosses


class HostBatches:
    """Checks on the CPU what kernels would otherwise report, for which the CPU would have to wait for the GPU."""

    def __init__(self, model: Any, *, allow_zero_weights: bool) -> None:
        self._model, self._allow_zero_weights = model, allow_zero_weights
        self._thread = ThreadPoolExecutor(1, "batches", use_threads, (1,))
        self._last: Future[Batch] | None = None
        self._unchecked = set[nn.Module]()

    def prepare(self, batch: Batch) -> Pending[Batch]:
        """The batch in pinned memory, with bounds of its ids; errors of the check are raised by `wait()`."""
        self._last = self._thread.submit(self._prepare, batch)
        return Pending.of_future(self._last)

    def end_last(self) -> None:
        """Wait until the last batch is copied: its reader may then reuse the memory."""
        if self._last is not None:
            wait([self._last])
            self._last = None

    @property
    def checked_losses(self) -> frozenset[nn.Module]:
        """The parts of the model's loss that have found no wrong label in any batch; others check on the GPU."""
        return frozenset(loss for loss in self._losses() if loss not in self._unchecked)

    def _losses(self) -> list[BinaryLoss | TaskLosses]:
        loss = self._model.loss
        parts = loss.modules() if isinstance(loss, nn.Module) else ()
        return [part for part in parts if isinstance(part, BinaryLoss | TaskLosses)]

    def _prepare(self, batch: Batch) -> Batch:
        pinned = batch.map(Tensor.pin_memory)
        check_batch(pinned, allow_zero_weights=self._allow_zero_weights)
        for loss in self._losses():
            try:
                loss.check(pinned)
            except UserError:
                self._unchecked.add(loss)
        return replace(pinned, features=find_id_bounds(pinned.features))
