"""What a click model is judged by: exactly over a window of outputs, in bounded memory over a whole run.

Normalized entropy (NE) is the log loss over that of always predicting the base rate of the same samples: 1 is knowing
nothing. Everything here can be merged, so that ranks measure apart and one tells.
"""

import math
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shardwright.errors import UserError
from shardwright.jagged import select
from shardwright.runtime.bindings import Output

NUM_BINS = 1 << 14
MAX_LOGIT = 16.0  # logits beyond it share the outermost bins


def log_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    losses = functional.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none")
    return _mean(losses, weights)


def entropy(rate: float) -> float:
    """Log loss of always predicting `rate` where that is the share of positives."""
    return -sum(share * math.log(share) for share in (rate, 1 - rate) if share > 0)


def auc(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float | None:
    """Exact area under the ROC curve, ties counted half; None when only one class is present."""
    return grouped_auc(scores, labels, torch.zeros_like(labels, dtype=torch.int64), weights)


def grouped_auc(scores: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None) -> float | None:
    """The mean of the groups' own AUC, by their weight; groups of one class do not count. None without any."""
    weights = torch.ones(len(labels), dtype=torch.float64) if weights is None else weights.double()
    _, group_of = torch.unique(groups, return_inverse=True)
    _, score_of = torch.unique(scores, return_inverse=True)
    distinct, place = torch.unique(group_of * len(scores) + score_of, return_inverse=True)
    positive, negative = (
        torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, place, share)
        for share in (weights * (labels > 0), weights * (labels <= 0))
    )
    group = distinct // max(1, len(scores))
    num_groups = int(group[-1]) + 1 if len(group) else 0

    def by_group(values: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, values)

    positives, negatives = by_group(positive), by_group(negative)
    before = torch.cat([negatives.new_zeros(1), negatives.cumsum(0)])[:-1]  # negatives of earlier groups
    below = negative.cumsum(0) - negative / 2 - before[group]
    counts = (positives * negatives) > 0
    if not counts.any():
        return None
    areas = by_group(positive * below)[counts] / (positives * negatives)[counts]
    return float((areas * (positives + negatives)[counts]).sum() / (positives + negatives)[counts].sum())


class WindowMetrics:
    """Outputs gathered until `result` is asked for. Without a label of 0 and 1 only the model's loss is kept.

    `group` names a feature of one id per sample, for the grouped AUC; ids that several groups share are `strangers`.
    """

    def __init__(self, label: str | None, group: str | None = None, shared_ids: Sequence[int] = ()) -> None:
        self.label = label
        self.group = group
        self.shared_ids = torch.tensor(shared_ids, dtype=torch.int64)
        self._losses: list[tuple[Tensor, int]] = []
        self._columns: dict[str, list[Tensor]] = {"logits": [], "labels": [], "weights": [], "groups": []}

    def update(self, output: Output) -> None:
        self._losses.append((output.loss, output.batch.batch_size))
        if self.label is not None:
            self._columns["logits"].append(output.logits)
            self._columns["labels"].append(output.batch.labels[self.label])
            if output.batch.weights is not None:
                self._columns["weights"].append(output.batch.weights)
            if self.group is not None:
                self._columns["groups"].append(_single_ids(output, self.group))

    def merge(self, other: "WindowMetrics") -> None:
        """Add what another window holds, another rank's for one."""
        self._losses += other._losses
        for name, parts in other._columns.items():
            self._columns[name] += parts

    def columns(self) -> dict[str, Tensor | None]:
        """All of it as numbers by sample, and of the losses by batch; what there is none of is None."""
        losses = torch.tensor([(float(loss), size) for loss, size in self._losses], dtype=torch.float64)
        joined = {name: torch.cat(parts).cpu() if parts else None for name, parts in self._columns.items()}
        return {"losses": losses.view(-1, 2), **joined}

    def from_columns(self, columns: Mapping[str, Tensor]) -> "WindowMetrics":
        """A window like this one with what `columns` gave, of several."""
        found = WindowMetrics(self.label, self.group, self.shared_ids.tolist())
        found._losses = [(loss, int(size)) for loss, size in columns["losses"]]
        found._columns = {name: [columns[name]] if name in columns else [] for name in self._columns}
        return found

    def compute(self) -> dict[str, float]:
        """Metrics of the window by name; those the window cannot tell are left out."""
        samples = sum(size for _, size in self._losses)
        if not samples:
            return {}
        own = {"loss": sum(float(loss) * size for loss, size in self._losses) / samples}
        if self.label is None:
            return own
        _, logits, labels, weights, groups = self.columns().values()
        assert logits is not None and labels is not None
        model_loss, rate = log_loss(logits, labels, weights), _mean(labels.double(), weights)
        found = _judged(model_loss, rate, _mean(logits.double().sigmoid(), weights))
        found["auc"] = auc(logits, labels, weights)
        if groups is not None:
            known = ~torch.isin(groups, self.shared_ids)
            mine = None if weights is None else weights[known]
            found["grouped_auc"] = grouped_auc(logits[known], labels[known], groups[known], mine)
        return own | {name: value for name, value in found.items() if value is not None}


class LifetimeMetrics:
    """The same over any number of outputs, in the memory of a histogram.

    AUC is that of logits rounded to bins; `auc_error` bounds what the rounding can change.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(4)  # weight, log loss, label, prediction
        self._histogram = np.zeros((2, NUM_BINS))  # weight of negatives and positives

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        scores, truth = logits.detach().double().cpu(), labels.double().cpu()
        weight = torch.ones_like(truth) if weights is None else weights.double().cpu()
        losses = functional.binary_cross_entropy_with_logits(scores, truth, reduction="none")
        self._sums += [
            float((weight * part).sum()) for part in (torch.ones_like(truth), losses, truth, scores.sigmoid())
        ]
        bins = ((scores / (2 * MAX_LOGIT) + 0.5) * NUM_BINS).long().clamp(0, NUM_BINS - 1).numpy()
        for kind, row in enumerate(self._histogram):
            row += np.bincount(bins, (weight * (truth == kind)).numpy(), NUM_BINS)

    def merge(self, other: "LifetimeMetrics") -> None:
        self._sums += other._sums
        self._histogram += other._histogram

    def compute(self) -> dict[str, float]:
        total, losses, positive, predicted = self._sums
        if not total:
            return {}
        found = _judged(losses / total, positive / total, predicted / total)
        negatives, positives = self._histogram
        if pairs := negatives.sum() * positives.sum():
            found["auc"] = float((positives * (negatives.cumsum() - negatives / 2)).sum() / pairs)
            found["auc_error"] = float((positives * negatives).sum() / 2 / pairs)
        return {name: value for name, value in found.items() if value is not None}

    def to_vector(self) -> Tensor:
        """All of it in a row, which rows of others may be added to."""
        return torch.from_numpy(np.concatenate([self._sums, self._histogram.ravel()]))

    def from_vector(self, vector: Tensor) -> "LifetimeMetrics":
        found = LifetimeMetrics()
        found._sums, found._histogram = vector[:4].numpy().copy(), vector[4:].numpy().reshape(2, NUM_BINS).copy()
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON values; of the histogram only what is filled."""
        filled = np.flatnonzero(self._histogram.any(0))
        return {"sums": self._sums.tolist(), "bins": filled.tolist(), "weights": self._histogram[:, filled].tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = np.array(state["sums"], dtype=np.float64)
        self._histogram[:] = 0
        self._histogram[:, state["bins"]] = state["weights"]


def _judged(model_loss: float, rate: float, predicted: float) -> dict[str, float | None]:
    return {
        "log_loss": float(model_loss),
        "ne": float(model_loss / entropy(rate)) if 0 < rate < 1 else None,
        "calibration": float(predicted / rate) if rate > 0 else None,
    }


def _single_ids(output: Output, feature: str) -> Tensor:
    ids = select(output.batch.features, [feature])
    if not bool((ids.lengths == 1).all()):
        raise UserError(f'train.group="{feature}" has samples with none or several ids; name a feature of one id each')
    return ids.values


def _mean(values: Tensor, weights: Tensor | None) -> float:
    if weights is None:
        return float(values.mean())
    return float((values * weights.double()).sum() / weights.double().sum())


def peak_rss_bytes() -> int:
    """The most memory that this process had. Without /proc it is at least that of whoever started it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
