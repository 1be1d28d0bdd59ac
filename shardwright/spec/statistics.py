"""Id statistics of a click log, in a file of bounded size: measured once, read by the planner."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwright.spec import files
from shardwright.spec.checks import check_positive, check_unique, raise_if_any
from shardwright.spec.workload import FeatureStatistics, statistics_faults


@dataclass(frozen=True, slots=True)
class LogStatistics:
    """Rows, base rate and id statistics of a click log."""

    version: Literal[1]
    origin: str
    rows: int
    base_rate: float
    batch_size: int  # every distinct_share is for this global batch size
    features: tuple[FeatureStatistics, ...]

    def digest(self) -> str:
        return files.digest(self)

    def verify(self) -> None:
        raise_if_any(_check_statistics(self))


def _check_statistics(statistics: LogStatistics) -> Iterator[str]:
    yield from check_positive("statistics", rows=statistics.rows, batch_size=statistics.batch_size)
    if not 0 <= statistics.base_rate <= 1:
        yield f"statistics: base_rate is {statistics.base_rate}; wanted 0 to 1"
    yield from check_unique("statistics of feature", (entry.feature for entry in statistics.features))
    for entry in statistics.features:
        yield from statistics_faults(entry)
