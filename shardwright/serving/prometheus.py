"""What an endpoint counts, as Prometheus reads it."""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate

LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
METRIC_PREFIX = "shardwright_"


class Histogram:
    """How many values lie at or below each edge, and their sum."""

    def __init__(self, upper_bounds: tuple[float, ...]) -> None:
        self._edges = upper_bounds
        self._counts = [0] * (len(upper_bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value

    def exposition_lines(self, name: str) -> Iterator[str]:
        below = list(accumulate(self._counts))
        for edge, count in zip((*self._edges, math.inf), below, strict=True):
            yield f'{name}_bucket{{le="{_number(edge)}"}} {count}'
        yield f"{name}_sum {_number(self._sum)}"
        yield f"{name}_count {below[-1]}"


class EndpointMetrics:
    """The counts of one endpoint."""

    def __init__(self) -> None:
        self._codes: Counter[int] = Counter()
        self._samples = 0
        self._seconds = Histogram(LATENCY_BUCKETS)
        self._batches = Histogram(BATCH_SIZE_BUCKETS)
        self._turns = Histogram(LATENCY_BUCKETS)

    def count_request(self, code: int, seconds: float | None) -> None:
        """None for what was refused before it was whole."""
        self._codes[code] += 1
        if seconds is not None:
            self._seconds.observe(seconds)

    def observe_turn(self, seconds: float) -> None:
        self._turns.observe(seconds)

    def observe_batch(self, num_samples: int) -> None:
        """One call of the scorer that was answered."""
        self._samples += num_samples
        self._batches.observe(num_samples)

    def exposition_text(self, state: Mapping[str, float | int | str]) -> str:
        """All counts, and what of a scorer's state is a number."""
        return "\n".join([*self._lines(state), ""])

    def _lines(self, state: Mapping[str, float | int | str]) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Requests answered, by code.")
        for code, count in sorted(self._codes.items()):
            yield f'{METRIC_PREFIX}requests_total{{code="{code}"}} {count}'
        yield from _head("samples_total", "counter", "Samples scored.")
        yield f"{METRIC_PREFIX}samples_total {self._samples}"
        what = "From a whole request to its answer; before it may come a turn in which it lay unread. No refusals."
        yield from _head("request_seconds", "histogram", what)
        yield from self._seconds.exposition_lines(f"{METRIC_PREFIX}request_seconds")
        what = "To score and answer what had come; nothing is read meanwhile."
        yield from _head("turn_seconds", "histogram", what)
        yield from self._turns.exposition_lines(f"{METRIC_PREFIX}turn_seconds")
        yield from _head("batch_samples", "histogram", "Samples scored at once.")
        yield from self._batches.exposition_lines(f"{METRIC_PREFIX}batch_samples")
        for key, value in state.items():
            if not isinstance(value, str):
                name = re.sub(r"\W", "_", key, flags=re.ASCII)
                yield from _head(name, "gauge", "Of the model.")
                yield f"{METRIC_PREFIX}{name} {_number(value)}"


def _head(name: str, kind: str, help_: str) -> Iterator[str]:
    yield f"# HELP {METRIC_PREFIX}{name} {help_}"
    yield f"# TYPE {METRIC_PREFIX}{name} {kind}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{float(value)!r}" if isinstance(value, float) else str(int(value))
    return "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"
