"""Format times as text and on axes, in a unit that fits their size: never 3.39e-05 ms."""

from collections.abc import Iterable

BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def time_text(seconds: float) -> str:
    """Three digits and a unit."""
    unit, length = _unit(seconds)
    value = seconds / length
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def axis_unit(seconds: Iterable[float]) -> tuple[str, float]:
    """The unit of an axis, chosen by its longest time, and the unit's length in seconds."""
    return _unit(max(seconds, default=0.0))


def axis_bytes(bytes_: Iterable[float]) -> tuple[str, float]:
    """The unit of an axis of bytes, and its number of bytes."""
    longest = max(bytes_, default=0.0)
    return next(((unit, size) for unit, size in BYTES if longest >= size), BYTES[-1])


def _unit(seconds: float) -> tuple[str, float]:
    if not seconds:
        return "ms", 1e-3
    return next(((unit, length) for unit, length in UNITS if round(abs(seconds) / length, 12) >= 1), UNITS[-1])
