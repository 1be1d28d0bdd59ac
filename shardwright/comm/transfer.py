"""Batches on their way to the device that computes.

Phases: a batch is put into pinned memory where it is read; its copy is issued on a stream of its own, a batch ahead of
the one that is computed on; who needs it has its stream wait for the copy, and the thread goes on.
"""

import torch

from shardwright.comm.pending import Pending
from shardwright.jagged import Batch


class Transfer:
    """To one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, pinned: Batch) -> Pending[Batch]:
        """A batch on its way."""
        with torch.cuda.stream(self._stream):
            copied = pinned.to(self._device, non_blocking=True)
            there = self._stream.record_event()

        def arrived() -> Batch:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(there)
            return copied.map(lambda tensor: _kept_for(tensor, current))

        return Pending(arrived)


def _kept_for(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Its memory, of the stream that copied, is not given to the next copy while this stream may still read it."""
    tensor.record_stream(stream)
    return tensor
