"""What really happened, as a Timeline: the measured twin of the simulator's prediction."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from shardwright.spec.plan import Stage
from shardwright.spec.timeline import Event, Timeline


class Tracer:
    """Records every stage of the last `keep` steps. On a GPU a stage ends when its work has ended."""

    def __init__(self, *, rank: int = 0, device: torch.device | None = None, keep: int = 50) -> None:
        self.rank = rank
        self._cuda = device is not None and device.type == "cuda"
        self._steps: deque[list[Event]] = deque(maxlen=keep)
        self._origin = time.perf_counter()
        self._next_id = 0
        self._wrote: dict[str, int] = {}

    def begin(self, step: int) -> None:
        self._step = step
        self._steps.append([])

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        start = self._now()
        yield
        if self._cuda:
            torch.cuda.synchronize()
        event = Event(
            id=self._next_id,
            name=stage.name,
            kind="stage",
            rank=self.rank,
            lane=stage.lane,
            step=self._step,
            micro=0,
            start=start,
            end=self._now(),
            bytes_=0,
            flops=0,
            after=tuple(sorted({self._wrote[slot] for slot in stage.reads if slot in self._wrote})),
        )
        self._next_id += 1
        self._wrote.update(dict.fromkeys(stage.writes, event.id))
        self._steps[-1].append(event)

    def timeline(self) -> Timeline:
        events = [event for step in self._steps for event in step]
        known = {event.id for event in events}
        kept = [replace(event, after=tuple(id_ for id_ in event.after if id_ in known)) for event in events]
        return Timeline(source="measured", events=tuple(kept))

    def _now(self) -> float:
        return time.perf_counter() - self._origin
