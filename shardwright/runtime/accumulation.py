"""Several batches as one step of all optimizers: the step of the batch that they are together.

Phases: every batch goes forward and backward; gradients of dense parameters add up in their .grad, those of vectors are
kept with their ids; with the last batch all ranks sum dense gradients, and each row of a table takes one step from all
it was given.

A loss is a mean over its own batch, and what all batches weigh is known with the last. Until then gradients are told in
the weight of the first, so that they are of the size they have anyway, whatever unit weights have; before the last
backward pass they are divided by the weight of all.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers.embedding import EmbeddingBags


class GradientAccumulation:
    """The batches of the step under way: `num` of them, fewer where the data ends; `dense` has the parameters that are
    no tables."""

    def __init__(self, num_micro_batches: int = 1, dense_parameters: Sequence[nn.Parameter] = ()) -> None:
        if num_micro_batches < 1:
            raise UserError(f"accumulate={num_micro_batches}; wanted the number of batches that make a step, 1 or more")
        self.num_micro_batches, self._dense = num_micro_batches, tuple(dense_parameters)
        self.poll_stop: Callable[[], int] = lambda: 0  # the stop signal of this process; 0: none
        self.agreed_stop_signal = 0  # the stop signal that all ranks have received: no further step begins
        self.clear()

    def clear(self) -> None:
        """Forget what was read, and a step that has not ended."""
        self._ahead: Batch | None = None
        self._place = 0  # in its step, of the batch that was read last
        self._coming: deque[tuple[Batch, bool]] = deque()  # read and not begun; whether each ends a step
        self.is_last = True  # whether the batch under way ends one
        self.weight = 1.0  # of its samples, on this rank; asked for only where several make a step
        self._unit = self._all = 0.0
        self._fade = 1.0
        self._kept: list[tuple[Any, Any]] = []

    @property
    def between_steps(self) -> bool:
        """Whether the next batch to be read is the first of its step."""
        return self._place == 0

    def next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch; inside a step one more is read ahead, to know whether this is the last.

        None at the end of the data, and at the start of a step once all ranks have agreed to stop.
        """
        if self.agreed_stop_signal and self._place == 0:
            return None
        batch = next(batches, None) if self._ahead is None else self._ahead
        self._ahead = None
        if batch is None:
            return None
        self._place += 1
        if self._place < self.num_micro_batches:
            self._ahead = next(batches, None)
        last = self._ahead is None
        self._place = 0 if last else self._place
        self._coming.append((batch, last))
        return batch

    def begin_micro_batch(self) -> bool:
        """The turn of the oldest that was read; whether it is the first of its step."""
        first = self.is_last
        batch, self.is_last = self._coming.popleft()
        self.weight = batch_weight(batch) if self.num_micro_batches > 1 else 1.0
        if first:
            self._unit = self._all = 0.0
        return first

    def loss_factor(self, weight: float) -> float:
        """What the mean loss of a batch of this weight is multiplied by, before its backward pass."""
        if self.num_micro_batches == 1:
            return 1.0
        self._unit = self._unit or weight
        self._all += weight
        if not self.is_last:
            return weight / self._unit if weight else 0.0
        if not self._all:
            raise UserError("sample weights: all of a step are 0, so it has no loss; drop such samples")
        self._fade = self._unit / self._all
        for parameter in self._dense:
            if parameter.grad is not None:
                parameter.grad.mul_(self._fade)
        return weight / self._all

    def update_tables(self, sparse: EmbeddingBags, ids: Any, gradients: Any) -> None:
        """The tables' step, from the gradients of all batches, when the last is there."""
        self._kept.append((ids, gradients))
        if self.is_last:
            kept, self._kept = self._kept, []
            sparse.update(*(kept[0] if len(kept) == 1 else sparse.concat_micro_batches(kept, self._fade)))


def batch_weight(batch: Batch) -> float:
    """Of all its samples."""
    return float(batch.batch_size if batch.weights is None else batch.weights.sum())
