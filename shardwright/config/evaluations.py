"""Metrics of evaluations that may say which state is the best, and checks of the keys about evaluations."""

import re
from types import MappingProxyType
from typing import Any

from shardwright.errors import UserError, did_you_mean

LOWER, HIGHER = "lower", "higher"
# For each metric, which value is better.
MONITORED = MappingProxyType(
    {
        "loss": LOWER,
        "log_loss": LOWER,
        "ne": LOWER,
        "auc": HIGHER,
        "grouped_auc": HIGHER,
        "accuracy": HIGHER,
        "perplexity": LOWER,
        "recall@10": HIGHER,
        "recall@100": HIGHER,
        "ndcg@10": HIGHER,
        "ndcg@100": HIGHER,
    }
)


def monitor_terms(monitor: str) -> list[tuple[int, str]]:
    """Sign and metric of each term of `train.monitor`: one metric, or a sum such as auc-log_loss."""
    return [(-1 if sign == "-" else 1, name) for sign, name in re.findall(r"([+-]?)([^+-]+)", monitor)]


def is_higher_better(monitor: str) -> bool:
    """Whether a higher value of a metric, or of a sum of metrics, is better; that of a task is TASK.METRIC."""
    return any((sign > 0) == (_direction(name) == HIGHER) for sign, name in monitor_terms(monitor))


def _direction(metric: str) -> str | None:
    return MONITORED.get(metric.rpartition(".")[2])


def check_evaluations(train: Any, where: str) -> None:
    """Raise a UserError for keys of section [train] about evaluations that contradict each other."""
    key = f"train.monitor={train.monitor}" if train.monitor else f"train.patience={train.patience}"
    if not re.fullmatch(r"(([+-]?[^+-]+)([+-][^+-]+)*)?", train.monitor):
        raise UserError(f"{where}: {key} is not a metric or a sum of metrics, such as auc-log_loss")
    terms = [(sign, name.rpartition(".")[2]) for sign, name in monitor_terms(train.monitor)]
    for _, metric in terms:
        if metric not in MONITORED:
            raise UserError(f"{where}: {key} is not a metric of evaluations{did_you_mean(metric, MONITORED)}")
        if metric == "grouped_auc" and not train.group:
            raise UserError(f"{where}: {key} needs groups; set train.group to the feature that names them")
    if len({(sign > 0) == (MONITORED[metric] == HIGHER) for sign, metric in terms}) > 1:
        raise UserError(f"{where}: {key} adds metrics whose better values are higher and lower; change a sign")
    if train.keeps_best and train.publish_every:
        raise UserError(
            f"{where}: {key} restores the best state at the end, which would not be published to predictors; drop it "
            "or train.publish_every"
        )
    if train.keeps_best and not train.eval_samples:
        raise UserError(f"{where}: {key} needs evaluations; set train.eval_samples")
    if train.eval_epochs and train.eval_every:
        raise UserError(
            f"{where}: train.eval_epochs={train.eval_epochs} and train.eval_every={train.eval_every}; to evaluate in "
            "epochs, set train.eval_every=0"
        )
