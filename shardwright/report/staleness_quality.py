"""The change of AUC under bounded staleness that `benchmarks/het_quality.py` has measured, on one model."""

from dataclasses import dataclass
from pathlib import Path

from shardwright.spec import files
from shardwright.spec.plan import Bounded

FILE = Path(__file__).with_name("staleness_quality.json")


@dataclass(frozen=True, slots=True)
class QualityChange:
    """`bound`: of `pull` and of `push`. `points`: hundredths of AUC, over synchronous training."""

    bound: int
    points: float


@dataclass(frozen=True, slots=True)
class MeasuredQuality:
    """`source`: the results file, written at `commit`. `auc`: of synchronous training after `steps`."""

    source: str
    commit: str
    model: str
    data: str
    workers: int
    steps: int
    auc: float
    changes: tuple[QualityChange, ...]

    def change(self, sync: Bounded) -> str:
        """The change with this bound as text; empty if it was not measured."""
        points = {change.bound: change.points for change in self.changes}
        if sync.pull != sync.push or sync.push not in points:
            return ""
        return f"{points[sync.push]:+.2f}" if abs(points[sync.push]) >= 0.005 else "0.00"

    @property
    def origin(self) -> str:
        return (
            f"Changes of AUC are measured on another model, not a prediction for yours: {self.model} on {self.data}, "
            f"{self.workers} workers simulated in one process, {self.steps:,} steps, AUC {self.auc} in synchronous "
            f"training (het_quality, commit {self.commit})"
        )


def read_quality() -> MeasuredQuality:
    return files.read(MeasuredQuality, FILE)
