"""Record the stages that ran as a Timeline: the measured counterpart of the simulator's prediction."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from shardwright.comm.pending import Pending
from shardwright.comm.sent_bytes import SentBytes
from shardwright.spec.calls import Call
from shardwright.spec.lanes import MAIN, PIPELINE_LANES
from shardwright.spec.plan import Stage
from shardwright.spec.timeline import Event, Timeline
from shardwright.step.gpu_clock import GPUClock, GPUMark

WAIT = "wait"  # kind of an event in which the thread only waits for the work that stage `name` issued
ISSUE = "issue"  # kind of an event in which the thread prepares and issues work that runs on another lane
FLIGHT = "flight"  # kind of an event that is in flight, overlapped with the thread
RECENT_TICKS = 8  # ticks in which work may still be in flight, besides those of a step
KEPT_TICKS, KEPT_STEPS = 50, 8  # at least that many are kept


@dataclass(slots=True)
class _Record:
    """An event; with `pending`, its end is not known until that work has completed."""

    number: int
    name: str
    kind: str
    lane: str
    step: int
    micro: int
    start: float
    end: float
    pending: Pending | None = None
    after: tuple[int, ...] = field(default=())


class Tracer:
    """Records every stage of the last steps.

    On a GPU a stage begins when the kernels of the stage before it, on the current stream, have completed, and ends
    when its own have; the thread, which runs ahead of the GPU, does not wait. Copies of batches run on their own
    stream, and are not part of a stage. Work that a stage issues is an event that ends when the work completes; the
    time that the thread waits for it is another event.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        device: torch.device | None = None,
        micro_batches: int = 1,
        sent: SentBytes | None = None,
    ) -> None:
        """`micro_batches`: ticks of a step. `sent`: counts bytes by stage."""
        self.rank = rank
        self._sent = sent or SentBytes()
        self._gpu = GPUClock(device) if device is not None and device.type == "cuda" else None
        # Stages whose kernels may still run, each with a mark at its end, and the waits between them.
        self._unfinished: deque[tuple[_Record, GPUMark | None]] = deque()
        self._last_gpu_time = 0.0
        self._recent_ticks = RECENT_TICKS + micro_batches
        self._in_flight: list[tuple[int, _Record]] = []  # work that had not ended when last looked at, with its tick
        self._num_ticks = 0
        self._ticks: deque[list[_Record]] = deque([[]], maxlen=max(KEPT_TICKS, KEPT_STEPS * micro_batches))
        self._origin = time.perf_counter()
        self._next_number = 0
        self._step = 0
        self._issued: list[_Record] | None = None  # the work that the current call has issued
        self._last_wait_end = 0.0
        self._writers: dict[tuple[str, int], dict[int, int]] = {}  # (slot, step): by micro-batch, the event that wrote

    def begin_tick(self, step: int) -> None:
        """Assign the following waits to this step."""
        self.release_finished()
        self._num_ticks += 1
        self._step = step
        self._ticks.append([])
        self._writers = {key: numbers for key, numbers in self._writers.items() if key[1] >= step - 1}

    def release_finished(self) -> None:
        """Release completed work, so that the tracer does not keep its results in memory."""
        in_flight, self._in_flight = self._in_flight, []
        for tick, record in in_flight:
            if record.pending is not None and (end := record.pending.end) is not None:
                record.end, record.pending = end, None
            elif tick > self._num_ticks - self._recent_ticks:
                self._in_flight.append((tick, record))
        self._read_gpu_times()

    def _read_gpu_times(self, *, wait: bool = False) -> None:
        """Move stages whose kernels have completed to the time when they ran; of a wait, only what is after the kernels
        issued before it remains. `wait`: for all to complete."""
        while self._unfinished and (wait or (mark := self._unfinished[0][1]) is None or mark.event.query()):
            record, mark = self._unfinished.popleft()
            begin, self._last_gpu_time = self._last_gpu_time, mark.time() if mark is not None else self._last_gpu_time
            record.start, record.end = max(record.start, begin), max(record.end, self._last_gpu_time)

    @contextmanager
    def trace_call(self, call: Call) -> Iterator[None]:
        """Record a call, with the work that is issued inside it."""
        start, self._sent.stage = time.perf_counter(), call.stage.name
        issued = self._issued = list[_Record]()
        yield
        self._issued = None
        stage, own_work = call.stage, [flight for flight in issued if flight.name == call.stage.name]
        end = time.perf_counter()
        record = _Record(self._new_id(), stage.name, "stage", stage.lane, call.step, call.micro, start, end)
        record.after = tuple(sorted(self._writers_of(call)))
        if own_work:
            record.kind, record.lane = ISSUE, MAIN
        self._ticks[-1].append(record)
        if self._gpu is not None:
            self._unfinished.append((record, self._gpu.mark()))
        for flight in issued:
            flight.number, flight.step, flight.micro = self._new_id(), call.step, call.micro
            flight.after = (record.number,)
            self._ticks[-1].append(flight)
        written = own_work[-1] if own_work else record
        for slot in stage.writes:
            self._writers.setdefault((slot, call.step), {})[call.micro] = written.number
        if stage.lane in PIPELINE_LANES:  # a tick has the messages of all micro-batches
            self.release_finished()

    def add_flight(self, name: str, lane: str, pending: Pending) -> None:
        """Record work that the current call has issued; outside of calls, in the step of the current tick."""
        start, records = pending.start, self._ticks[-1] if self._issued is None else self._issued
        records.append(_Record(self._new_id(), name, FLIGHT, lane, self._step, 0, start, start, pending))
        self._in_flight.append((self._num_ticks, records[-1]))

    def trace_stage(self, stage: Stage) -> AbstractContextManager[None]:
        """Record a stage that no call runs, in the step of the current tick."""
        return self.trace_call(Call(stage, self._step))

    def _writers_of(self, call: Call) -> Iterator[int]:
        """The events that wrote the slots which the call reads."""
        for slot in call.stage.reads:
            numbers = self._writers.get((slot, call.step), {})
            if call.stage.per == "step":
                yield from numbers.values()
            elif call.micro in numbers:
                yield numbers[call.micro]

    def add_wait(self, name: str, start: float) -> None:
        """Record a wait, from `start` until now, for the work of stage `name`; without the time of waits inside it."""
        start, self._last_wait_end = max(start, self._last_wait_end), time.perf_counter()
        record = _Record(self._new_id(), name, WAIT, MAIN, self._step, 0, start, self._last_wait_end)
        self._ticks[-1].append(record)
        if self._gpu is not None:
            self._unfinished.append((record, None))

    def timeline(self) -> Timeline:
        """The events that have ended; waits for a GPU."""
        self._read_gpu_times(wait=True)
        records = [record for tick in self._ticks for record in tick]
        ends = {record.number: record.end if record.pending is None else record.pending.end for record in records}
        return Timeline(
            source="measured",
            events=tuple(
                Event(
                    id=record.number,
                    name=record.name,
                    kind=record.kind,
                    rank=self.rank,
                    lane=record.lane,
                    step=record.step,
                    micro=record.micro,
                    start=record.start - self._origin,
                    end=max(end, record.start) - self._origin,
                    after=tuple(number for number in record.after if ends.get(number) is not None),
                )
                for record in records
                if (end := ends[record.number]) is not None
            ),
        )

    def _new_id(self) -> int:
        self._next_number += 1
        return self._next_number - 1
