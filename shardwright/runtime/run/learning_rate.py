"""How the learning rates move over a run: a function of the step alone, so that a resumed run needs no memory of it."""

import math
from collections.abc import Mapping
from typing import Any

from shardwright.config import TrainSettings


def factor(step: int, train: TrainSettings) -> float:
    """What every learning rate is multiplied by at this step, the first being 1."""
    return batch_size_factor(train) * _moved(step, train)


def batch_size_factor(train: TrainSettings) -> float:
    """What it is multiplied by for the samples of a step."""
    if train.scale_rates == "none":
        return 1.0
    times = train.samples_per_step / train.base_batch
    return times if train.scale_rates == "linear" else math.sqrt(times)


def describe_scaling(train: TrainSettings, rates: Mapping[str, float]) -> str:
    """Scaled rates in a line; `rates` are those of the recipe."""
    scaled = ", ".join(f"{name} {rate * batch_size_factor(train):.4g}" for name, rate in rates.items())
    return (
        f"learning rates x {batch_size_factor(train):.4g} ({train.scale_rates}, {train.samples_per_step:,} "
        "samples a step for "
        f"{train.base_batch:,}): {scaled}"
    )


def _moved(step: int, train: TrainSettings) -> float:
    if step <= train.warmup:
        return step / (train.warmup + 1)
    progress = (step - train.warmup - 1) / max(1, train.steps - train.warmup - 1)
    match train.decay:
        case "none":
            return 1.0
        case "linear":
            return 1 - (1 - train.final_rate) * progress
        case "cosine":
            return train.final_rate + (1 - train.final_rate) * (1 + math.cos(math.pi * progress)) / 2


class EarlyStopping:
    """Watches evaluations: which was best, and whether `patience` of them in a row have not been better."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best = math.inf
        self.best_step = 0
        self.wait_count = 0

    def update(self, figure: float, step: int) -> bool:
        """Whether this evaluation (lower is better) is the best so far."""
        if figure < self.best:
            self.best, self.best_step, self.wait_count = figure, step, 0
            return True
        self.wait_count += 1
        return False

    @property
    def should_stop(self) -> bool:
        return bool(self.patience) and self.wait_count >= self.patience

    def state_dict(self) -> dict[str, float | None]:
        return {
            "best": None if math.isinf(self.best) else self.best,
            "best_step": self.best_step,
            "waited": self.wait_count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = math.inf if state["best"] is None else state["best"]
        self.best_step, self.wait_count = state["best_step"], state["waited"]
