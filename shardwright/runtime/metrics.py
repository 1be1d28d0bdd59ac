"""What a click model is judged by, over a window of outputs.

Normalized entropy (NE) is the log loss over that of always predicting the window's base rate: 1 is knowing nothing.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.runtime.step import Output


def log_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    losses = functional.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none")
    return _mean(losses, weights)


def entropy(rate: float) -> float:
    """Log loss of always predicting `rate` where that is the share of positives."""
    return -sum(share * math.log(share) for share in (rate, 1 - rate) if share > 0)


def auc(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float | None:
    """Exact area under the ROC curve, ties counted half; None when only one class is present."""
    distinct, place = torch.unique(scores, return_inverse=True)
    weights = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights.double()
    positive, negative = (
        torch.zeros(distinct.numel(), dtype=torch.float64, device=scores.device).index_add_(0, place, share)
        for share in (weights * (labels > 0), weights * (labels <= 0))
    )
    pairs = float(positive.sum() * negative.sum())
    below = negative.cumsum(0) - negative / 2
    return float((positive * below).sum()) / pairs if pairs else None


class Window:
    """Outputs gathered until `result` is asked for. Without a label of 0 and 1 only the model's loss is kept."""

    def __init__(self, label: str | None) -> None:
        self.label = label
        self._losses: list[tuple[Tensor, int]] = []
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._weights: list[Tensor] = []

    def add(self, output: Output) -> None:
        self._losses.append((output.loss, output.batch.batch_size))
        if self.label is not None:
            self._logits.append(output.logits)
            self._labels.append(output.batch.labels[self.label])
            if output.batch.weights is not None:
                self._weights.append(output.batch.weights)

    def result(self) -> dict[str, float]:
        """Metrics of the window by name; those the window cannot tell are left out."""
        samples = sum(size for _, size in self._losses)
        if not samples:
            return {}
        own = {"loss": sum(float(loss) * size for loss, size in self._losses) / samples}
        if self.label is None:
            return own
        logits, labels = torch.cat(self._logits), torch.cat(self._labels)
        weights = torch.cat(self._weights) if self._weights else None
        entropy_of_model = log_loss(logits, labels, weights)
        rate = _mean(labels.double(), weights)
        found = {
            "log_loss": entropy_of_model,
            "ne": entropy_of_model / entropy(rate) if 0 < rate < 1 else None,
            "auc": auc(logits, labels, weights),
            "calibration": _mean(logits.double().sigmoid(), weights) / rate if rate > 0 else None,
        }
        return own | {name: value for name, value in found.items() if value is not None}


def _mean(values: Tensor, weights: Tensor | None) -> float:
    if weights is None:
        return float(values.mean())
    return float((values * weights.double()).sum() / weights.double().sum())
