"""Batches for a GPU, in host memory: a thread checks and pins one while the batch before is computed."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor, nn

from shardwright.comm.pending import Pending
from shardwright.jagged import Batch, check_batch, find_id_bounds
from shardwright.kernels.native import use_threads


class HostBatches:
    """Checks on the CPU what kernels would otherwise report, for which the CPU would have to wait for the GPU."""

    def __init__(self, loss: nn.Module, *, allow_zero_weights: bool) -> None:
        self._loss, self._allow_zero_weights = loss, allow_zero_weights
        self._thread = ThreadPoolExecutor(1, "batches", use_threads, (1,))

    def prepare(self, batch: Batch) -> Pending[Batch]:
        """The batch in pinned memory, with bounds of its ids; errors of the check are raised by `wait()`."""
        return Pending(self._thread.submit(self._prepare, batch).result)

    def _prepare(self, batch: Batch) -> Batch:
        check_batch(batch, allow_zero_weights=self._allow_zero_weights)
        if callable(check := getattr(self._loss, "check", None)):
            check(batch)
        return replace(batch, features=find_id_bounds(batch.features)).map(Tensor.pin_memory)
