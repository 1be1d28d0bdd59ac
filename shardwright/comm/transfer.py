"""Copies to and from the GPU, overlapped with computation.

`CopyStream` is a stream for copies of table rows. Batches: the copy of a batch, which is in pinned memory, is issued on
a separate stream; `wait()` makes the consumer's stream wait for the copy and does not block the thread.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from shardwright.comm.pending import Pending
from shardwright.jagged import Batch


class CopyStream:
    """A stream for copies beside computation; on a CPU, which does everything in order, none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def event(self) -> torch.Event | None:
        """An event after all that is issued on the current stream."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def after(self, event: torch.Event | None) -> Iterator[None]:
        """A context in which this thread issues on this stream, after an event."""
        if self._stream is None:
            yield
            return
        if event is not None:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def wait(self, event: torch.Event | None, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Make the current stream wait for an event of this one; `tensors`: allocated on this
        stream, and read on the current one."""
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            for tensor in tensors:
                _record_stream(tensor, current)

    def synchronize(self) -> None:
        """Wait in this thread for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


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
