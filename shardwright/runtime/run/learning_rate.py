"""Learning-rate schedule, a function of the step only, so that a resumed run needs no saved state of it."""

import math
from collections.abc import Mapping

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
