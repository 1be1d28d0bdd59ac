"""What really happened, as a Timeline: the measured twin of the simulator's prediction."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shardwright.comm.pending import Pending
from shardwright.spec.plan import Stage
from shardwright.spec.timeline import Event, Timeline

MAIN = "main"  # the lane of the thread
WAIT = "wait"  # the kind of an event in which the thread does nothing but wait for what `name` issued
ISSUE = "issue"  # of one in which it prepares and issues what then runs on another lane
FLIGHT = "flight"  # of one that is under way beside the thread
RECENT_TICKS = 8  # ticks in which work may still be under way


@dataclass(slots=True)
class _Noted:
    """An event, or one whose end is known when its work has been waited for."""

    number: int
    name: str
    kind: str
    lane: str
    step: int
    start: float
    end: float
    pending: Pending | None = None
    after: tuple[int, ...] = field(default=())


class Tracer:
    """Records every stage of the last `keep` steps. On a GPU a stage ends when its work has ended; copies of batches,
    on a stream of their own, go on.

    What a stage only issues ends when its work does; the time that the thread then waits for it is an event of its own.
    """

    def __init__(self, *, rank: int = 0, device: torch.device | None = None, keep: int = 50) -> None:
        self.rank = rank
        self._cuda = device is not None and device.type == "cuda"
        self._ticks: deque[list[_Noted]] = deque([[]], maxlen=keep)
        self._origin = time.perf_counter()
        self._number = 0
        self._step = 0
        self._wrote: dict[tuple[str, int], int] = {}

    def begin_tick(self, tick: int) -> None:
        """From now on things happen in this tick."""
        self.release_finished()
        self._step = tick
        self._ticks.append([])
        self._wrote = {key: number for key, number in self._wrote.items() if key[1] >= tick - 1}

    def release_finished(self) -> None:
        """Let go of work that has ended: what it gave is not for us to keep."""
        for one in (one for tick in list(self._ticks)[-RECENT_TICKS:] for one in tick):
            if one.pending is not None and (end := one.pending.end) is not None:
                one.end, one.pending = end, None

    @contextmanager
    def trace_stage(self, stage: Stage, ahead: int = 0) -> Iterator[list[tuple[str, str, Pending]]]:
        """Around a stage for the batch that is so far ahead; takes (name, lane, work) of what it issued."""
        start = time.perf_counter()
        issued: list[tuple[str, str, Pending]] = []
        yield issued
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        step, own = self._step + ahead, [work for name, _, work in issued if name == stage.name]
        noted = _Noted(self._take(), stage.name, "stage", stage.lane, step, start, time.perf_counter())
        noted.after = tuple(sorted({self._wrote.get((slot, step), -1) for slot in stage.reads} - {-1}))
        if own:
            noted.kind, noted.lane = ISSUE, MAIN
        self._ticks[-1].append(noted)
        for name, lane, work in issued:
            flight = _Noted(self._take(), name, FLIGHT, lane, step, work.start, work.start, work, (noted.number,))
            self._ticks[-1].append(flight)
            noted = flight if work in own else noted
        self._wrote.update(dict.fromkeys(((slot, step) for slot in stage.writes), noted.number))

    @contextmanager
    def trace_wait(self, name: str) -> Iterator[None]:
        """Around a wait for what `name` issued."""
        start = time.perf_counter()
        yield
        self._ticks[-1].append(_Noted(self._take(), name, WAIT, MAIN, self._step, start, time.perf_counter()))

    def timeline(self) -> Timeline:
        """What has ended."""
        found = [one for tick in self._ticks for one in tick]
        ends = {one.number: one.end if one.pending is None else one.pending.end for one in found}
        return Timeline(
            source="measured",
            events=tuple(
                Event(
                    id=one.number,
                    name=one.name,
                    kind=one.kind,
                    rank=self.rank,
                    lane=one.lane,
                    step=one.step,
                    start=one.start - self._origin,
                    end=max(end, one.start) - self._origin,
                    after=tuple(number for number in one.after if ends.get(number) is not None),
                )
                for one in found
                if (end := ends[one.number]) is not None
            ),
        )

    def _take(self) -> int:
        self._number += 1
        return self._number - 1
