"""Format numbers with units chosen by their size, in text and on axes: never 3.39e-05 ms."""

from collections.abc import Iterable

BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def time_text(seconds: float) -> str:
    """Format seconds with three digits and a unit."""
    unit, length = _time_unit(seconds)
    value = seconds / length
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def axis_time_unit(seconds: Iterable[float]) -> tuple[str, float]:
    """Unit of an axis, chosen by its longest time, and the unit's length in seconds."""
    return _time_unit(max(seconds, default=0.0))


def axis_byte_unit(bytes_: Iterable[float]) -> tuple[str, float]:
    """Unit of an axis, chosen by its largest size, and the unit's number of bytes."""
    largest = max(bytes_, default=0.0)
    return next(((unit, size) for unit, size in BYTE_UNITS if largest >= size), BYTE_UNITS[-1])


def decimal_text(value: float) -> str:
    return f"{value:.4f}"


def count_text(value: float) -> str:
    return f"{value:,.0f}"


def bytes_text(bytes_: float) -> str:
    return scaled_text(bytes_, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def si_text(value: float) -> str:
    return scaled_text(value, 1000, ("", "k", "M", "G", "T", "P", "E")).strip()


def scaled_text(value: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:,.0f} {units[power]}" if power == 0 or value >= 100 else f"{value:.3g} {units[power]}"


def duration_text(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _time_unit(seconds: float) -> tuple[str, float]:
    if not seconds:
        return "ms", 1e-3
    return next(
        ((unit, length) for unit, length in TIME_UNITS if round(abs(seconds) / length, 12) >= 1), TIME_UNITS[-1]
    )
