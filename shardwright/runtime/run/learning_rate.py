"""Learning-rate schedule, a function of the step only, and early stopping.

A resumed run needs no saved state of the schedule.
"""

import math
from collections.abc import Mapping
from typing import Any

from shardwright.config import TrainSettings


def factor(step: int, train: TrainSettings) -> float:
    """Factor of every learning rate at a step; steps are counted from 1."""
    return batch_size_factor(train) * _schedule_factor(step, train)


def batch_size_factor(train: TrainSettings) -> float:
    """Factor from the samples per step: their ratio to `train.base_batch`, or its square root."""
    if train.scale_rates == "none":
        return 1.0
    ratio = train.samples_per_step / train.base_batch
    return ratio if train.scale_rates == "linear" else math.sqrt(ratio)


def describe_scaling(train: TrainSettings, rates: Mapping[str, float]) -> str:
    """One line with the scaled learning rates; `rates` are those of the recipe, by name."""
    rates_text = ", ".join(f"{name} {rate * batch_size_factor(train):.4g}" for name, rate in rates.items())
    return (
        f"learning rates x {batch_size_factor(train):.4g} ({train.scale_rates}, {train.samples_per_step:,} "
        f"samples per step, chosen for {train.base_batch:,}): {rates_text}"
    )


def _schedule_factor(step: int, train: TrainSettings) -> float:
    """Factor from warmup and decay: 1 right after the warmup, `final_rate` at the last step of a decay."""
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
    """Tracks the best evaluation and whether `patience` evaluations in a row have not been better."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best = math.inf
        self.best_step = 0
        self.wait_count = 0

    def update(self, metric: float, step: int) -> bool:
        """Record an evaluation's metric (lower is better); return whether it is the best so far."""
        if metric < self.best:
            self.best, self.best_step, self.wait_count = metric, step, 0
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
