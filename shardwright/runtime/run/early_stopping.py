"""Which evaluations there are, which of them is the best, and when the best is old enough to stop."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright.config import TrainSettings
from shardwright.config.evaluations import is_higher_better, monitor_terms
from shardwright.errors import UserError, did_you_mean
from shardwright.layers.in_batch_softmax import InBatchSoftmax
from shardwright.layers.loss import NextTokenLoss
from shardwright.runtime.run.metrics import labels_of
from shardwright.runtime.run.retrieval import CUTOFFS


class EarlyStopping:
    """Tracks the best evaluation and whether `patience` evaluations in a row have not been better."""

    def __init__(self, patience: int, monitor: str = "") -> None:
        """`monitor`: the metric that is compared, or a sum of metrics; empty: NE, or the loss of models without it."""
        self.patience, self.monitor = patience, monitor
        self.best: float | None = None
        self.best_step = 0
        self.best_evaluation: Mapping[str, Any] = {}  # all metrics of the best step
        self.wait_count = 0

    def metric_of(self, evaluation: Mapping[str, Any]) -> tuple[str, float]:
        """Name and value of the metric of an evaluation that is compared."""
        monitor = self.monitor or ("ne" if "ne" in evaluation else "loss")
        terms = monitor_terms(monitor)
        for _, name in terms:
            if name not in evaluation:
                raise UserError(
                    f"step {evaluation['step']}: the evaluation has no {name} (train.monitor), which needs held-out "
                    "labels of both classes; hold out more samples, or set train.monitor=loss"
                )
        return monitor, sum(sign * evaluation[name] for sign, name in terms)

    def update(self, metric: float, step: int) -> bool:
        """Record an evaluation's metric; return whether it is the best so far."""
        if self.best is None or (metric > self.best if is_higher_better(self.monitor) else metric < self.best):
            self.best, self.best_step, self.wait_count = metric, step, 0
            return True
        self.wait_count += 1
        return False

    @property
    def should_stop(self) -> bool:
        return bool(self.patience) and self.wait_count >= self.patience

    def state_dict(self) -> dict[str, Any]:
        state = {"best": self.best, "best_step": self.best_step, "waited": self.wait_count}
        return state | {"evaluation": dict(self.best_evaluation)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step, self.wait_count = state["best"], state["best_step"], state["waited"]
        self.best_evaluation = state.get("evaluation", {})  # older checkpoints have none


def check_monitor(monitor: str, loss: nn.Module) -> None:
    """Raise a UserError if the evaluations of a model with this loss do not have the metric `train.monitor`."""
    names = ["loss"]
    labels, classes = labels_of(loss)
    names += [f"{prefix}{name}" for prefix in labels for name in ("log_loss", "ne", "auc", "grouped_auc")]
    names += ["accuracy"] if classes is not None else []
    names += [f"{name}@{k}" for k in CUTOFFS for name in ("recall", "ndcg")] if isinstance(loss, InBatchSoftmax) else []
    names += ["perplexity"] if isinstance(loss, NextTokenLoss) else []
    for _, name in monitor_terms(monitor):
        if name not in names:
            kind = type(loss).__name__
            raise UserError(
                f"train.monitor={monitor}: a model with {kind} has no such metric{did_you_mean(name, names)}"
            )


def is_evaluation_due(step: int, train: TrainSettings, batches_per_epoch: int | None) -> bool:
    """Whether a run evaluates after a step: every `eval_every` steps, or after the step that ends the last of
    `eval_epochs` epochs."""
    if train.eval_every:
        return step % train.eval_every == 0
    if not train.eval_epochs or batches_per_epoch is None:
        return False
    between = train.eval_epochs * batches_per_epoch
    return step * train.accumulate // between > (step - 1) * train.accumulate // between
