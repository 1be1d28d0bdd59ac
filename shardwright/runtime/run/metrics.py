"""Metrics of a click model: exact over a window of outputs, in bounded memory over a whole run.

Normalized entropy (NE) is the log loss divided by the log loss of always predicting the base rate of the same samples:
1 means no better than the base rate. Each rank collects its own outputs; windows and lifetimes are merged before
computing.
"""

import math
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import UserError
from shardwright.jagged import Batch, select
from shardwright.layers.loss import BinaryLoss, ClassLoss, NextTokenLoss
from shardwright.layers.task_losses import TaskLosses
from shardwright.runtime.outputs import Output

NUM_BINS = 1 << 14
MAX_LOGIT = 16.0  # larger absolute logits share the outermost bins


def log_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Weighted mean of the binary cross-entropy, in float64."""
    losses = functional.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none")
    return _mean(losses, weights)


def entropy(rate: float) -> float:
    """Log loss of always predicting `rate` if that is the share of positives."""
    return -sum(share * math.log(share) for share in (rate, 1 - rate) if share > 0)


def auc(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float | None:
    """Exact area under the ROC curve, ties counted half; None if only one class is present."""
    return grouped_auc(scores, labels, torch.zeros_like(labels, dtype=torch.int64), weights)


def grouped_auc(scores: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None) -> float | None:
    """Mean of the AUC within each group, by group weight, over groups with both classes; None without any."""
    weights = torch.ones(len(labels), dtype=torch.float64) if weights is None else weights.double()
    _, group_of = torch.unique(groups, return_inverse=True)
    _, score_of = torch.unique(scores, return_inverse=True)
    distinct, inverse = torch.unique(group_of * len(scores) + score_of, return_inverse=True)
    positive, negative = (
        torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, inverse, class_weights)
        for class_weights in (weights * (labels > 0), weights * (labels <= 0))
    )
    group = distinct // max(1, len(scores))
    num_groups = int(group[-1]) + 1 if len(group) else 0

    def sum_by_group(values: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, values)

    positives, negatives = sum_by_group(positive), sum_by_group(negative)
    preceding = torch.cat([negatives.new_zeros(1), negatives.cumsum(0)])[:-1]  # negatives of earlier groups
    below = negative.cumsum(0) - negative / 2 - preceding[group]
    has_both = (positives * negatives) > 0
    if not has_both.any():
        return None
    areas = sum_by_group(positive * below)[has_both] / (positives * negatives)[has_both]
    return float((areas * (positives + negatives)[has_both]).sum() / (positives + negatives)[has_both].sum())


class WindowMetrics:
    """Outputs collected until `compute` is called.

    Without a binary label only the model's loss is collected, and with `classes` the accuracy. Of several labels each
    has its metrics, "click.auc", over the samples whose label is known. `group` names a feature
    with one id per sample, for the grouped AUC. `shared_ids` are its ids that several groups share, such as the id of
    unknown values; their samples are left out of the grouped AUC.
    """

    def __init__(
        self,
        labels: str | Mapping[str, str] | None,
        group: str | None = None,
        shared_ids: Sequence[int] = (),
        weigh: Callable[[Batch], float] | None = None,
        classes: ClassLoss | None = None,
    ) -> None:
        """`labels`: the binary label, or those of a model with several, by the prefix of their metrics' names.

        `weigh`: the weight of a batch's mean loss; default: its number of samples.
        """
        self.labels = _by_prefix(labels)
        self.weigh = weigh or (lambda batch: float(batch.batch_size))
        self.classes = classes
        self.group = group
        self.shared_ids = torch.tensor(shared_ids, dtype=torch.int64)
        self._losses: list[tuple[Tensor, float]] = []  # of each batch, with its weight
        scored = [f"{prefix}{name}" for prefix in self.labels or ("",) for name in ("logits", "labels")]
        self._columns: dict[str, list[Tensor]] = {name: [] for name in (*scored, "weights", "groups", "correct")}

    def update(self, output: Output, penalty: Tensor | float = 0.0) -> None:
        """Add the output of a batch; outputs without scores do not count. `penalty`: left out of its loss."""
        if not output.has_scores:
            return
        self._losses.append((output.loss - penalty, self.weigh(output.batch)))
        if self.classes is not None:
            self._columns["correct"].append(self.classes.is_correct(output.logits, output.batch))
        for prefix, logits, labels in scored_labels(self.labels, output):
            self._columns[f"{prefix}logits"].append(logits)
            self._columns[f"{prefix}labels"].append(labels)
        if (self.labels or self.classes is not None) and output.batch.weights is not None:
            self._columns["weights"].append(output.batch.weights)
        if self.labels and self.group is not None:
            self._columns["groups"].append(_single_ids(output, self.group))

    def columns(self) -> dict[str, Tensor | None]:
        """One tensor of values by sample per column, None if empty; "losses" has (loss, weight) by batch."""
        losses = torch.tensor([(float(loss), weight) for loss, weight in self._losses], dtype=torch.float64)
        columns = {name: torch.cat(tensors).cpu() if tensors else None for name, tensors in self._columns.items()}
        return {"losses": losses.view(-1, 2), **columns}

    def from_columns(self, columns: Mapping[str, Tensor]) -> "WindowMetrics":
        """A window with this window's settings and the given columns, which may come from several windows."""
        window = WindowMetrics(self.labels, self.group, self.shared_ids.tolist(), self.weigh, self.classes)
        window._losses = [(loss, float(weight)) for loss, weight in columns["losses"]]
        window._columns = {name: [columns[name]] if name in columns else [] for name in self._columns}
        return window

    def compute(self) -> dict[str, float]:
        """Metrics of the window by name; undefined ones are left out."""
        total = sum(weight for _, weight in self._losses)
        if not total:
            return {}
        model_metrics = {"loss": sum(float(loss) * weight for loss, weight in self._losses) / total}
        columns = self.columns()
        if (correct := columns["correct"]) is not None:
            model_metrics["accuracy"] = _mean(correct.double(), columns["weights"])
        for prefix in self.labels:
            if columns[f"{prefix}logits"] is not None:
                names = f"{prefix}logits", f"{prefix}labels", "weights", "groups"
                values = self._score(*_known_samples(*(columns[name] for name in names)))
                model_metrics |= {f"{prefix}{name}": value for name, value in values.items()}
        return model_metrics

    def _score(self, logits: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None) -> dict[str, float]:
        """Metrics of one label by name; undefined ones are left out."""
        if not len(labels) or weights is not None and not weights.any():
            return {}
        model_loss, rate = log_loss(logits, labels, weights), _mean(labels.double(), weights)
        values = _loss_metrics(model_loss, rate, _mean(logits.double().sigmoid(), weights))
        values["auc"] = auc(logits, labels, weights)
        if groups is not None:
            unshared = ~torch.isin(groups, self.shared_ids)  # samples whose id belongs to one group only
            unshared_weights = None if weights is None else weights[unshared]
            values["grouped_auc"] = grouped_auc(logits[unshared], labels[unshared], groups[unshared], unshared_weights)
        return {name: value for name, value in values.items() if value is not None}


def labels_of(loss: object) -> tuple[dict[str, str], ClassLoss | None]:
    """The binary labels by the prefix of their metrics' names, or the loss of classes, that metrics are computed from.

    The prefix of a model's only label is empty, and that of a task is its name with a dot.
    """
    if isinstance(loss, TaskLosses):
        return {f"{task.name}.": task.label for task in loss.tasks}, None
    if isinstance(loss, BinaryLoss):
        return {"": loss.label}, None
    return {}, loss if isinstance(loss, ClassLoss) else None


def scored_labels(labels: Mapping[str, str], output: Output) -> Iterator[tuple[str, Tensor, Tensor]]:
    """For each binary label: the prefix of its metrics' names, the logits (B,), and the labels (B,)."""
    logits = output.logits[0] if isinstance(output.logits, tuple) else output.logits  # with the penalties of samples
    for index, (prefix, label) in enumerate(labels.items()):
        yield prefix, logits if logits.dim() == 1 else logits[:, index], output.batch.labels[label]


def _by_prefix(labels: str | Mapping[str, str] | None) -> dict[str, str]:
    return {"": labels} if isinstance(labels, str) else dict(labels or {})


def _known_samples(logits: Any, labels: Any, weights: Any, groups: Any) -> tuple[Any, ...]:
    """The columns of the samples whose label is known (not NaN)."""
    is_known = ~labels.isnan()
    columns = (logits, labels, weights, groups)
    return columns if is_known.all() else tuple(None if column is None else column[is_known] for column in columns)


def mean_penalty(loss: nn.Module, output: Output) -> Tensor | float:
    """The part of a training loss that is not of samples or tokens: auxiliary losses of gates."""
    has_penalty = output.has_scores and isinstance(output.logits, tuple)
    if not has_penalty or not isinstance(loss, BinaryLoss | NextTokenLoss):
        return 0.0
    return loss.mean_penalty(output.logits[1], output.batch)


class LifetimeMetrics:
    """The same metrics over any number of outputs, in bounded memory: sums and a histogram of logits.

    The AUC is computed from logits rounded to bins; `auc_error` bounds the error from rounding.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(4)  # weight, log loss, label, prediction
        self._histogram = np.zeros((2, NUM_BINS))  # weights of negatives and of positives by bin

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        scores, truth = logits.detach().double().cpu(), labels.double().cpu()
        weight = torch.ones_like(truth) if weights is None else weights.double().cpu()
        losses = functional.binary_cross_entropy_with_logits(scores, truth, reduction="none")
        self._sums += [
            float((weight * term).sum()) for term in (torch.ones_like(truth), losses, truth, scores.sigmoid())
        ]
        bins = ((scores / (2 * MAX_LOGIT) + 0.5) * NUM_BINS).long().clamp(0, NUM_BINS - 1).numpy()
        for label, row in enumerate(self._histogram):
            row += np.bincount(bins, (weight * (truth == label)).numpy(), NUM_BINS)

    def compute(self) -> dict[str, float]:
        total, losses, positive, predicted = self._sums
        if not total:
            return {}
        values = _loss_metrics(losses / total, positive / total, predicted / total)
        negatives, positives = self._histogram
        if pairs := negatives.sum() * positives.sum():
            values["auc"] = float((positives * (negatives.cumsum() - negatives / 2)).sum() / pairs)
            values["auc_error"] = float((positives * negatives).sum() / 2 / pairs)
        return {name: value for name, value in values.items() if value is not None}

    def to_vector(self) -> Tensor:
        """The state as a 1-D float64 tensor; the sum of several is the state of the merged outputs."""
        return torch.from_numpy(np.concatenate([self._sums, self._histogram.ravel()]))

    def from_vector(self, vector: Tensor) -> "LifetimeMetrics":
        lifetime = LifetimeMetrics()
        lifetime._sums, lifetime._histogram = vector[:4].numpy().copy(), vector[4:].numpy().reshape(2, NUM_BINS).copy()
        return lifetime

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values, with the nonempty bins of the histogram."""
        nonempty = np.flatnonzero(self._histogram.any(0))
        return {
            "sums": self._sums.tolist(),
            "bins": nonempty.tolist(),
            "weights": self._histogram[:, nonempty].tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = np.array(state["sums"], dtype=np.float64)
        self._histogram[:] = 0
        self._histogram[:, state["bins"]] = state["weights"]


class TaskLifetimes:
    """Lifetime metrics of each binary label of a model, by the prefix of their metrics' names."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = dict(labels)
        self._lifetimes = {prefix: LifetimeMetrics() for prefix in labels}

    def update(self, output: Output) -> None:
        """Add the output of a batch; samples whose label is not known do not count."""
        for prefix, logits, labels in scored_labels(self.labels, output):
            logits, labels, weights, _ = _known_samples(logits, labels, output.batch.weights, None)
            self._lifetimes[prefix].update(logits, labels, weights)

    def compute(self) -> dict[str, float]:
        return {
            f"{prefix}{name}": value
            for prefix, lifetime in self._lifetimes.items()
            for name, value in lifetime.compute().items()
        }

    def to_vector(self) -> Tensor:
        """The state as a 1-D float64 tensor; the sum of several is the state of the merged outputs."""
        return torch.cat([torch.empty(0).double(), *(each.to_vector() for each in self._lifetimes.values())])

    def from_vector(self, vector: Tensor) -> "TaskLifetimes":
        merged = TaskLifetimes(self.labels)
        parts = vector.tensor_split(len(self.labels)) if self.labels else ()
        for (prefix, lifetime), part in zip(self._lifetimes.items(), parts, strict=True):
            merged._lifetimes[prefix] = lifetime.from_vector(part)
        return merged

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values: that of each label by prefix; of a model's only label, or none, its state alone."""
        if self.labels.keys() - {""}:
            return {prefix: lifetime.state_dict() for prefix, lifetime in self._lifetimes.items()}
        return self._lifetimes.get("", LifetimeMetrics()).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for prefix, lifetime in self._lifetimes.items():
            lifetime.load_state_dict(state[prefix] if prefix else state)


def _loss_metrics(model_loss: float, rate: float, predicted: float) -> dict[str, float | None]:
    """Metrics from means over samples: log loss, share of positives, prediction."""
    return {
        "log_loss": float(model_loss),
        "ne": float(model_loss / entropy(rate)) if 0 < rate < 1 else None,
        "calibration": float(predicted / rate) if rate > 0 else None,
    }


def _single_ids(output: Output, feature: str) -> Tensor:
    ids = select(output.batch.features, [feature])
    if not bool((ids.lengths == 1).all()):
        raise UserError(f'train.group="{feature}" has samples with none or several ids; use one with one id per sample')
    return ids.values


def _mean(values: Tensor, weights: Tensor | None) -> float:
    if weights is None:
        return float(values.mean())
    return float((values * weights.double()).sum() / weights.double().sum())


def peak_rss_bytes() -> int:
    """Peak resident memory of this process; without /proc it may be the higher peak of its parent."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
