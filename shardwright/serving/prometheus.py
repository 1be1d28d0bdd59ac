"""What an endpoint counts, as Prometheus reads it."""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PREFIX = "shardwright_"


class Histogram:
    """How many values lie at or below each edge, and their sum."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        below = list(accumulate(self._counts))
        for edge, count in zip((*self._edges, math.inf), below, strict=True):
            yield f'{name}_bucket{{le="{_number(edge)}"}} {count}'
        yield f"{name}_sum {_number(self._sum)}"
        yield f"{name}_count {below[-1]}"


class Meters:
    """The counts of one endpoint."""

    def __init__(self) -> None:
        self._codes: Counter[int] = Counter()
        self._samples = 0
        self._seconds = Histogram(SECONDS)
        self._batches = Histogram(SAMPLES)
        self._turns = Histogram(SECONDS)

    def request(self, code: int, seconds: float | None) -> None:
        """None for what was refused before it was whole."""
        self._codes[code] += 1
        if seconds is not None:
            self._seconds.add(seconds)

    def turn(self, seconds: float) -> None:
        self._turns.add(seconds)

    def batch(self, num_samples: int) -> None:
        """One call of the scorer that was answered."""
        self._samples += num_samples
        self._batches.add(num_samples)

    def text(self, state: Mapping[str, float | int | str]) -> str:
        """All counts, and what of a scorer's state is a number."""
        return "\n".join([*self._lines(state), ""])

    def _lines(self, state: Mapping[str, float | int | str]) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Requests answered, by code.")
        for code, count in sorted(self._codes.items()):
            yield f'{PREFIX}requests_total{{code="{code}"}} {count}'
        yield from _head("samples_total", "counter", "Samples scored.")
        yield f"{PREFIX}samples_total {self._samples}"
        what = "From a whole request to its answer; before it may come a turn in which it lay unread. No refusals."
        yield from _head("request_seconds", "histogram", what)
        yield from self._seconds.lines(f"{PREFIX}request_seconds")
        what = "To score and answer what had come; nothing is read meanwhile."
        yield from _head("turn_seconds", "histogram", what)
        yield from self._turns.lines(f"{PREFIX}turn_seconds")
        yield from _head("batch_samples", "histogram", "Samples scored at once.")
        yield from self._batches.lines(f"{PREFIX}batch_samples")
        for key, value in state.items():
            if not isinstance(value, str):
                name = re.sub(r"\W", "_", key, flags=re.ASCII)
                yield from _head(name, "gauge", "Of the model.")
                yield f"{PREFIX}{name} {_number(value)}"


def _head(name: str, kind: str, help_: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {help_}"
    yield f"# TYPE {PREFIX}{name} {kind}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{float(value)!r}" if isinstance(value, float) else str(int(value))
    return "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"
