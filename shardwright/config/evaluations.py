"""Metrics of evaluations that may say which state is the best, and checks of the keys about evaluations."""

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


def is_higher_better(monitor: str) -> bool:
    """Whether a higher value of a metric is better; that of a task is TASK.METRIC."""
    return MONITORED.get(monitor.rpartition(".")[2]) == HIGHER


def check_evaluations(train: Any, where: str) -> None:
    """Raise a UserError for keys of section [train] about evaluations that contradict each other."""
    key = f"train.monitor={train.monitor}" if train.monitor else f"train.patience={train.patience}"
    metric = train.monitor.rpartition(".")[2]
    if train.monitor and metric not in MONITORED:
        raise UserError(f"{where}: {key} is not a metric of evaluations{did_you_mean(metric, MONITORED)}")
    if metric == "grouped_auc" and not train.group:
        raise UserError(f"{where}: {key} needs groups; set train.group to the feature that names them")
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
