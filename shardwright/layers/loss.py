"""Losses as modules: wrappers such as FSDP see only module calls, so the runtime calls only modules.

Shape legend: B samples, T positions.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import UserError
from shardwright.jagged import Batch

IGNORED = -100  # label of a token that has no loss, as in torch's cross entropy


_CHECKED: ContextVar[Collection[nn.Module]] = ContextVar("checked", default=())


@contextmanager
def checked_labels(losses: Collection[nn.Module]) -> Iterator[None]:
    """A context in which these losses have checked the labels on the CPU: on a GPU they need not wait for it."""
    token = _CHECKED.set(losses)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def is_checked(loss: nn.Module, labels: Tensor) -> bool:
    """Whether these labels need no check: on the meta device, or on a GPU and checked on the CPU before."""
    return labels.is_meta or labels.is_cuda and loss in _CHECKED.get()


class BinaryLoss(nn.Module):
    """Mean binary cross entropy of one logit per sample, weighted by the batch's sample weights.

    In training, label smoothing s (`smoothing`) replaces the labels 0 and 1 by s/2 and 1 - s/2; and with a pair of
    logits and penalties of samples, such as those of gates, the mean penalty is added, with the same weights.
    """

    def __init__(self, label: str = "click", *, smoothing: float = 0.0) -> None:
        super().__init__()
        self.label = label
        self.smoothing = smoothing

    def check(self, batch: Batch) -> Tensor:
        """Return the batch's labels; raise an error if a label is not 0 or 1."""
        labels = batch.labels.get(self.label)
        if labels is None:
            raise UserError(f'the batch has no label "{self.label}"; it has {sorted(batch.labels)}')
        if labels.shape != (batch.batch_size,):
            raise UserError(
                f'label "{self.label}" has shape {tuple(labels.shape)}; wanted one number per sample, '
                f"({batch.batch_size},)"
            )
        if not is_checked(self, labels):
            invalid = ((labels != 0) & (labels != 1)).nonzero()
            if invalid.numel():
                sample = int(invalid[0])
                value = labels[sample].item()
                raise UserError(f'label "{self.label}": sample {sample} is {value:g}; a label is 0 or 1')
        return labels

    def forward(self, logits: Tensor | tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        logits, penalty_B = logits if isinstance(logits, tuple) else (logits, None)
        labels = self.check(batch)
        if logits.shape != labels.shape:
            raise UserError(f"the logits have shape {tuple(logits.shape)}; wanted one per sample, {(*labels.shape,)}")
        target = labels.to(logits.dtype)
        if self.training and self.smoothing:
            target = target * (1 - self.smoothing) + self.smoothing / 2
        losses = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
        if batch.weights is None:
            loss = losses.mean()
        else:
            loss = torch.dot(losses, batch.weights.to(losses.dtype)) / batch.weights.sum()
        if penalty_B is None or not self.training:
            return loss
        return loss + self.mean_penalty(penalty_B, batch).to(loss.dtype)

    def mean_penalty(self, penalty_B: Tensor, batch: Batch) -> Tensor:
        """The mean of the samples' penalties, by sample weight."""
        return _weighted_mean(penalty_B, torch.ones_like(penalty_B) if batch.weights is None else batch.weights)


class ClassLoss(nn.Module):
    """Mean cross entropy of (B, C) logits, weighted by the batch's sample weights; a label is a class from 0."""

    def __init__(self, label: str = "class") -> None:
        super().__init__()
        self.label = label

    def check(self, batch: Batch) -> Tensor:
        """Return the batch's labels; raise an error if a label is not a whole number from 0."""
        labels = batch.labels.get(self.label)
        if labels is None:
            raise UserError(f'the batch has no label "{self.label}"; it has {sorted(batch.labels)}')
        if labels.shape != (batch.batch_size,) or labels.dtype != torch.int64:
            raise UserError(
                f'label "{self.label}" is {labels.dtype} {tuple(labels.shape)}; wanted a class of each sample, int64 '
                f"({batch.batch_size},)"
            )
        if not labels.is_meta and labels.numel() and int(labels.min()) < 0:
            raise UserError(
                f'label "{self.label}": sample {int(labels.argmin())} is {int(labels.min())}; classes are from 0'
            )
        return labels

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        losses = functional.cross_entropy(logits, batch.labels[self.label], reduction="none")
        if batch.weights is None:
            return losses.mean()
        return torch.dot(losses, batch.weights.to(losses.dtype)) / batch.weights.sum()

    def is_correct(self, logits: Tensor, batch: Batch) -> Tensor:
        """(B,) whether the class of the highest logit is the label."""
        return logits.argmax(1) == batch.labels[self.label]


class NextTokenLoss(nn.Module):
    """Mean cross entropy of (B, T, V) logits against the label "next" of (B, T) token ids.

    The mean is over tokens, each with the weight of its sample; tokens whose label is IGNORED do not count. With a pair
    of logits and penalties of samples, such as those of gates, training adds the mean penalty, with the same weights.
    """

    def weight(self, batch: Batch) -> Tensor:
        """The total weight of the tokens that count."""
        return self._token_weights(batch).sum()

    def forward(self, logits: Tensor | tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        logits, penalty_B = logits if isinstance(logits, tuple) else (logits, None)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        labels, weights = batch.labels["next"].flatten(), self._token_weights(batch).flatten().to(logits.dtype)
        losses = functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="none")
        total = weights.sum()
        loss = (losses * weights).sum() / torch.where(total > 0, total, 1.0)
        if penalty_B is None or not self.training:
            return loss
        return loss + self.mean_penalty(penalty_B, batch).to(loss.dtype)

    def mean_penalty(self, penalty_B: Tensor, batch: Batch) -> Tensor:
        """The mean of the samples' penalties, each with the weight of its tokens that count."""
        return _weighted_mean(penalty_B, self._token_weights(batch).sum(1))

    def _token_weights(self, batch: Batch) -> Tensor:
        labels_BT = batch.labels["next"]
        weights_BT = (labels_BT != IGNORED).to(
            torch.get_default_dtype() if batch.weights is None else batch.weights.dtype
        )
        return weights_BT if batch.weights is None else weights_BT * batch.weights.unsqueeze(1)


def _weighted_mean(values_B: Tensor, weights_B: Tensor) -> Tensor:
    """The mean by weight; 0 without samples, or if all weights are 0."""
    weights_B = weights_B.to(values_B.dtype)
    total = weights_B.sum()
    return (values_B * weights_B).sum() / torch.where(total > 0, total, 1.0)
