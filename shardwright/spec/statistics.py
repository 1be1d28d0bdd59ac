"""What a log says of its ids, in a file of bounded size: measured once, read by whoever plans for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwright.spec import files
from shardwright.spec.checks import check_positive, check_unique, raise_if_any
from shardwright.spec.workload import FeatureStatistics, statistics_faults


@dataclass(frozen=True, slots=True)
class LogStatistics:
    version: Literal[1]
    origin: str
    rows: int
    base_rate: float
    batch_size: int  # that every distinct_share is told for
    features: tuple[FeatureStatistics, ...]

    def digest(self) -> str:
        return files.digest(self)

    def verify(self) -> None:
        raise_if_any(_faults(self))


def _faults(found: LogStatistics) -> Iterator[str]:
    yield from check_positive("statistics", rows=found.rows, batch_size=found.batch_size)
    if not 0 <= found.base_rate <= 1:
        yield f"statistics: base_rate is {found.base_rate}; wanted 0 to 1"
    yield from check_unique("statistics of feature", (entry.feature for entry in found.features))
    for entry in found.features:
        yield from statistics_faults(entry)
