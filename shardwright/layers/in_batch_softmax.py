"""Softmax over the items of a batch, the loss of two towers: each positive's item against the items of the others.

What couples the samples of a batch is computed in groups of consecutive samples, as in `layers/gates.py`: with
`groups=G`, one process computes what G ranks or micro-batches compute, each from its part of the batch.

Shape legend: B samples, P samples of a group, D columns of a vector.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.jagged import Batch, select

USER, ITEM = 0, 1  # places of a sample's two vectors


@dataclass(frozen=True, slots=True)
class SoftmaxSpec:
    """How the vectors of users and items are compared.

    The score of a user and an item is the dot product of their vectors, which have length 1 with `normalize`, over
    `temperature`. `groups`: consecutive parts of the batch of a process; negatives come from the same part.
    `correction`: subtract the logarithm of an item's share of the training samples from its score in the loss.
    """

    temperature: float = 0.1
    normalize: bool = True
    groups: int = 1
    correction: bool = False


class InBatchSoftmax(nn.Module):
    """Mean cross entropy of each positive's item among the items of its group's positives, by sample weight.

    The input is (B, 2, D): the vector of the user and that of the item of each sample. Positives are the samples whose
    `label` is 1; the others have no loss, and their items are no negatives. Other samples with the positive's own item
    (accidental hits) are no negatives of it. `item` names the feature with the item's id, one per sample.

    With `correction`, `log_shares` of the item's id is subtracted from its logit, the logarithm of its share of the
    training samples: frequent items are negatives more often and would be pushed down (sampled-softmax correction).
    """

    log_shares: Tensor | None

    def __init__(
        self,
        item: str,
        *,
        label: str = "click",
        temperature: float = 1.0,
        groups: int = 1,
        correction: bool = False,
        log_shares: Tensor | None = None,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise UserError(f"an in-batch softmax with temperature={temperature:g}; wanted more than 0")
        if groups < 1:
            raise UserError(f"an in-batch softmax with groups={groups}; wanted 1 or more")
        self.item, self.label, self.temperature, self.groups = item, label, temperature, groups
        self.correction = correction
        self.register_buffer("log_shares", log_shares, persistent=False)

    def weight(self, batch: Batch) -> Tensor:
        """The total weight of the positives."""
        return positive_weights(batch, self.label).sum()

    def forward(self, vectors_B2D: Tensor, batch: Batch) -> Tensor:
        if vectors_B2D.dim() != 3 or vectors_B2D.shape[:2] != (batch.batch_size, 2):
            raise UserError(
                f"the model returned {tuple(vectors_B2D.shape)}; wanted the vectors of user and item of each sample, "
                f"({batch.batch_size}, 2, columns)"
            )
        if self.correction and self.log_shares is None:
            raise UserError(
                f'correction=true, but the shares of "{self.item}" in the training samples are unknown: the source has '
                "no id_shares(feature); set correction=false"
            )
        if vectors_B2D.dtype in (torch.bfloat16, torch.float16):
            vectors_B2D = vectors_B2D.float()
        weights_B, items_B = positive_weights(batch, self.label).to(vectors_B2D.dtype), self._items(batch)
        losses = [
            self._losses(vectors_B2D[part], items_B[part], weights_B[part] > 0) for part in self._parts(len(weights_B))
        ]
        total = weights_B.sum()
        return (torch.cat(losses) * weights_B).sum() / torch.where(total > 0, total, 1.0)

    def _losses(self, vectors_P2D: Tensor, items_P: Tensor, is_positive_P: Tensor) -> Tensor:
        """The cross entropy of each sample of a group; that of samples that are no positives is without meaning."""
        logits_PP = vectors_P2D[:, USER] @ vectors_P2D[:, ITEM].t() / self.temperature
        if self.correction and self.log_shares is not None:
            logits_PP = logits_PP - self.log_shares[items_P].to(logits_PP.dtype)
        is_own_PP = torch.eye(len(items_P), dtype=torch.bool, device=items_P.device)
        is_candidate_PP = is_positive_P & (items_P.unsqueeze(1) != items_P) | is_own_PP
        return logits_PP.where(is_candidate_PP, -torch.inf).logsumexp(1) - logits_PP.diagonal()

    def _parts(self, num_samples: int) -> Iterator[slice]:
        """The groups of a batch, whose sizes differ by at most 1."""
        ends = [num_samples * group // self.groups for group in range(self.groups + 1)]
        return (slice(start, end) for start, end in pairwise(ends))

    def _items(self, batch: Batch) -> Tensor:
        """(B,) the item of each sample."""
        if batch.features.values.is_meta:
            return batch.features.values.new_zeros(batch.batch_size)
        ids = select(batch.features, [self.item])
        if not bool((ids.lengths == 1).all()):
            raise UserError(f'feature "{self.item}" has samples with none or several ids; an item has one')
        return ids.values


def positive_weights(batch: Batch, label: str) -> Tensor:
    """(B,) the weights of the samples, 0 of those whose label is 0: they are no positives."""
    labels = batch.labels.get(label)
    if labels is None:
        raise UserError(f'the batch has no label "{label}"; it has {sorted(batch.labels)}')
    if not labels.is_meta and bool(((labels != 0) & (labels != 1)).any()):
        raise UserError(f'label "{label}" has values other than 0 and 1; positives have 1, others 0')
    return labels if batch.weights is None else labels * batch.weights
