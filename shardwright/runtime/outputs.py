"""What a job yields for each batch."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shardwright.errors import UserError
from shardwright.jagged import Batch


@dataclass(frozen=True, slots=True)
class Scores:
    """The loss of a batch, and the model's output, in the form that its `loss` takes."""

    loss: Tensor
    logits: Any
    weight: float = 1.0  # of the loss, among micro-batches


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one batch, which `Job.run` and `Job.evaluate` yield.

    In a pipeline, only the ranks that have the end of the model have scores.
    """

    step: int  # number of training steps done
    batch: Batch
    scores: Scores | None

    @property
    def has_scores(self) -> bool:
        return self.scores is not None

    @property
    def loss(self) -> Tensor:
        return self._scores.loss

    @property
    def logits(self) -> Any:
        """The model's output, in the form that its `loss` takes."""
        return self._scores.logits

    @property
    def _scores(self) -> Scores:
        if self.scores is None:
            raise UserError(
                "this rank has no loss and no logits: in a pipeline they are on the ranks with the last blocks; "
                "look at output.has_scores first"
            )
        return self.scores


class BatchParts:
    """Splits each batch into `num` parts of consecutive samples, for a pipeline, and joins their scores."""

    def __init__(self, batches: Iterable[Batch], num: int = 1) -> None:
        self._batches, self.num = batches, num
        self._whole: deque[Batch] = deque()  # of which parts have been read
        self._scores: list[Scores | None] = []  # of the parts of the first of them

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            if self.num == 1:
                yield batch
                continue
            self._whole.append(batch)
            ends = [batch.batch_size * part // self.num for part in range(self.num + 1)]
            yield from (batch.narrow(start, end) for start, end in pairwise(ends))

    def join(self, batch: Batch, scores: Scores | None) -> tuple[Batch, Scores | None] | None:
        """The batch and its scores once those of all parts are here. `batch`: the part with these scores."""
        if self.num == 1:
            return batch, scores
        self._scores.append(scores)
        if len(self._scores) < self.num:
            return None
        parts, self._scores = [part for part in self._scores if part is not None], []
        return self._whole.popleft(), _join_scores(parts) if parts else None


def _join_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of a batch from those of its parts.

    The logits are joined along their first dimension, without parts that have no samples: those have no sequence
    length either. A number, such as an auxiliary loss, is averaged like the loss.
    """
    total = sum(part.weight for part in parts)

    def average(*values: Tensor) -> Tensor:
        """The mean by weight; the value of a part without weight may be NaN, and is left out."""
        weighted = [value * (part.weight / total) for value, part in zip(values, parts, strict=True) if part.weight]
        return torch.stack(weighted).sum() if weighted else torch.zeros_like(values[0])

    def join(*values: Tensor) -> Tensor:
        if not values[0].dim():
            return average(*values)
        return torch.cat([value for value in values if len(value)] or values[:1])

    logits = tree_map(join, *(part.logits for part in parts))
    return Scores(average(*(part.loss for part in parts)), logits, total or 1.0)
