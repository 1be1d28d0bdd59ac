"""The loss of a model with several tasks: one binary label each, which may be unknown for some samples.

Shape legend: B samples, T tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import UserError, did_you_mean
from shardwright.jagged import Batch
from shardwright.layers.loss import is_checked


@dataclass(frozen=True, slots=True)
class LabelTask:
    """A task: a label to predict, and the weight of its loss."""

    name: str
    label: str
    weight: float = 1.0


class TaskLosses(nn.Module):
    """Sum over tasks of weight * binary cross entropy, averaged over all samples by sample weight; logits (B, T).

    A sample whose label is missing (NaN) adds 0 to its task, and still counts in the mean: each known label has the
    same influence in every batch, so that ranks and micro-batches add up to the global batch exactly.
    In training, label smoothing s (`smoothing`) replaces the labels 0 and 1 by s/2 and 1 - s/2.
    """

    def __init__(self, tasks: Sequence[LabelTask], *, smoothing: float = 0.0) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        self.smoothing = smoothing
        if not self.tasks:
            raise UserError("model.tasks is empty; give at least one task, such as click = {}")
        for task in self.tasks:
            if not 0 < task.weight < float("inf"):
                raise UserError(f"model.tasks.{task.name}: weight is {task.weight}; wanted a number above 0")

    def check(self, batch: Batch) -> Tensor:
        """Return the labels (B, T), NaN where missing; raise an error if a known label is not 0 or 1."""
        labels = []
        for task in self.tasks:
            label_B = batch.labels.get(task.label)
            if label_B is None:
                hint = did_you_mean(task.label, batch.labels)
                raise UserError(f'task "{task.name}": the data have no label "{task.label}"{hint}')
            if label_B.shape != (batch.batch_size,):
                raise UserError(
                    f'label "{task.label}" has shape {tuple(label_B.shape)}; wanted one number per sample, '
                    f"({batch.batch_size},)"
                )
            if not is_checked(self, label_B):
                _check_values(task.label, label_B)
            labels.append(label_B)
        return torch.stack(labels, dim=1)

    def forward(self, logits_BT: Tensor, batch: Batch) -> Tensor:
        labels_BT = self.check(batch)
        if logits_BT.shape != labels_BT.shape:
            raise UserError(
                f"the logits have shape {tuple(logits_BT.shape)}; wanted one per sample and task, {(*labels_BT.shape,)}"
            )
        unknown_BT = labels_BT.isnan()
        target_BT = labels_BT.to(logits_BT.dtype).masked_fill(unknown_BT, 0)
        if self.training and self.smoothing:
            target_BT = target_BT * (1 - self.smoothing) + self.smoothing / 2
        losses_BT = functional.binary_cross_entropy_with_logits(logits_BT, target_BT, reduction="none")
        losses_BT = losses_BT.masked_fill(unknown_BT, 0)
        loss_B = (losses_BT * losses_BT.new_tensor([task.weight for task in self.tasks])).sum(1)
        if batch.weights is None:
            return loss_B.mean()
        return torch.dot(loss_B, batch.weights.to(loss_B.dtype)) / batch.weights.sum()


def _check_values(label: str, label_B: Tensor) -> None:
    invalid = ((label_B != 0) & (label_B != 1) & ~label_B.isnan()).nonzero()
    if invalid.numel():
        sample = int(invalid[0])
        value = label_B[sample].item()
        raise UserError(f'label "{label}": sample {sample} is {value:g}; a label is 0, 1, or NaN where it is not known')
