"""When a GPU reaches points of its stream, by the clock of the thread, which does not wait for it."""

import time
from dataclasses import dataclass

import torch

MARKS_OF_REFERENCE = 1000  # whose times are counted from one reference


@dataclass(slots=True)
class GPUMark:
    """A point of a GPU's stream, and an earlier one that was reached at a known time of the thread's clock."""

    event: torch.cuda.Event
    reference: torch.cuda.Event
    reference_time: float

    def time(self) -> float:
        """When the stream reached it; waits until then."""
        self.event.synchronize()
        return self.reference_time + self.reference.elapsed_time(self.event) / 1000


class GPUClock:
    """Marks on a GPU's current stream. Their reference is renewed often: elapsed times are numbers of 32 bits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reference: tuple[torch.cuda.Event, float] | None = None
        self._num_marks = 0

    def mark(self) -> GPUMark:
        if self._reference is None or self._num_marks % MARKS_OF_REFERENCE == 0:
            torch.cuda.current_stream(self._device).synchronize()
            begin = time.perf_counter()
            self._reference = self._record_event(), begin
        self._num_marks += 1
        return GPUMark(self._record_event(), *self._reference)

    def _record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
