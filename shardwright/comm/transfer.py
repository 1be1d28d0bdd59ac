"""Copy batches to the GPU, overlapped with computation.

Phases: the loader reads a batch into pinned memory; its copy is issued on a separate stream, one batch ahead of the one
in computation; `wait()` makes the consumer's stream wait for the copy and does not block the thread.
"""

import torch

from shardwright.comm.pending import Pending
from shardwright.jagged import Batch


class Transfer:
    """Copies batches to one GPU on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, pinned: Batch) -> Pending[Batch]:
        """Issue the copy of a batch; `wait()` returns the copy and makes the current stream wait for it."""
        with torch.cuda.stream(self._stream):
            batch = pinned.to(self._device, non_blocking=True)
            copy_end = self._stream.record_event()

        def wait_for_copy() -> Batch:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copy_end)
            return batch.map(lambda tensor: _record_stream(tensor, current))

        return Pending(wait_for_copy)


def _record_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Keep the allocator from reusing the memory for the next copy while `stream` may still read it."""
    tensor.record_stream(stream)
    return tensor
