"""Metrics of an endpoint in the Prometheus text format."""

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
    """Prometheus histogram: number of values at or below each upper bound, and their sum."""

    def __init__(self, upper_bounds: tuple[float, ...]) -> None:
        self._upper_bounds = upper_bounds
        self._counts = [0] * (len(upper_bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._upper_bounds, value)] += 1
        self._sum += value

    def exposition_lines(self, name: str) -> Iterator[str]:
        cumulative = list(accumulate(self._counts))
        for bound, count in zip((*self._upper_bounds, math.inf), cumulative, strict=True):
            yield f'{name}_bucket{{le="{_format_number(bound)}"}} {count}'
        yield f"{name}_sum {_format_number(self._sum)}"
        yield f"{name}_count {cumulative[-1]}"


class EndpointMetrics:
    """Counters and histograms of one endpoint."""

    def __init__(self) -> None:
        self._num_requests: Counter[int] = Counter()  # by status code
        self._num_samples = 0
        self._request_seconds = Histogram(LATENCY_BUCKETS)
        self._batch_sizes = Histogram(BATCH_SIZE_BUCKETS)
        self._turn_seconds = Histogram(LATENCY_BUCKETS)

    def count_request(self, code: int, seconds: float | None) -> None:
        """Count a response. `seconds`: since the request was complete; None: it was rejected before that."""
        self._num_requests[code] += 1
        if seconds is not None:
            self._request_seconds.observe(seconds)

    def observe_turn(self, seconds: float) -> None:
        """Record the time of one iteration of the event loop that answered requests."""
        self._turn_seconds.observe(seconds)

    def observe_batch(self, num_samples: int) -> None:
        """Record one successful call of the scorer."""
        self._num_samples += num_samples
        self._batch_sizes.observe(num_samples)

    def exposition_text(self, state: Mapping[str, float | int | str]) -> str:
        """All metrics, with the numbers in a scorer's state as gauges."""
        return "\n".join([*self._lines(state), ""])

    def _lines(self, state: Mapping[str, float | int | str]) -> Iterator[str]:
        yield from _header_lines("requests_total", "counter", "Requests answered, by status code.")
        for code, count in sorted(self._num_requests.items()):
            yield f'{METRIC_PREFIX}requests_total{{code="{code}"}} {count}'
        yield from _header_lines("samples_total", "counter", "Samples scored.")
        yield f"{METRIC_PREFIX}samples_total {self._num_samples}"
        text = "From a complete request to its response, without its wait in the socket, without rejected requests."
        yield from _header_lines("request_seconds", "histogram", text)
        yield from self._request_seconds.exposition_lines(f"{METRIC_PREFIX}request_seconds")
        text = "An iteration of the event loop, which answers all queued requests; nothing is read meanwhile."
        yield from _header_lines("turn_seconds", "histogram", text)
        yield from self._turn_seconds.exposition_lines(f"{METRIC_PREFIX}turn_seconds")
        yield from _header_lines("batch_samples", "histogram", "Samples per batch.")
        yield from self._batch_sizes.exposition_lines(f"{METRIC_PREFIX}batch_samples")
        for key, value in state.items():
            if not isinstance(value, str):
                name = re.sub(r"\W", "_", key, flags=re.ASCII)
                yield from _header_lines(name, "gauge", "State of the model.")
                yield f"{METRIC_PREFIX}{name} {_format_number(value)}"


def _header_lines(name: str, kind: str, description: str) -> Iterator[str]:
    yield f"# HELP {METRIC_PREFIX}{name} {description}"
    yield f"# TYPE {METRIC_PREFIX}{name} {kind}"


def _format_number(value: float) -> str:
    if math.isfinite(value):
        return f"{float(value)!r}" if isinstance(value, float) else str(int(value))
    return "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"
