"""Gradient accumulation: one optimizer step from several micro-batches, equal to a step on their concatenation.

Phases: each micro-batch runs forward and backward; dense gradients add up in each parameter's .grad, gradients of
vectors are kept with their ids; with the last micro-batch all ranks reduce dense gradients, and each table row is
updated once from all its gradients.

A loss is the mean over its own micro-batch, and the total weight is known only with the last one. Until then gradients
are scaled by the weight relative to the first micro-batch, so that they have their usual magnitude whatever the unit of
the weights; before the last backward pass they are rescaled to the total weight.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers.embedding import EmbeddingTables


class GradientAccumulation:
    """The micro-batches of the current step: `num_batches`, fewer at the end of the data, each in `parts` parts."""

    def __init__(self, num_batches: int = 1, dense_parameters: Sequence[nn.Parameter] = (), parts: int = 1) -> None:
        if num_batches < 1:
            raise UserError(f"accumulate={num_batches}; allowed: 1 or more micro-batches per step")
        self.num_micro_batches, self.parts = num_batches * parts, parts
        self._dense_parameters = tuple(dense_parameters)
        self.poll_stop: Callable[[], int] = lambda: 0  # the stop signal of this process; 0: none
        self.agreed_stop_signal = 0  # the stop signal that all ranks have received: no further step begins
        self.clear()

    def clear(self) -> None:
        """Discard the micro-batches that were read and an unfinished step."""
        self._next: Batch | None = None  # read ahead
        self._num_read = 0  # micro-batches read of the step being read; 0 between steps
        self._first_weight = self._total_weight = 0.0
        self._decay = 1.0  # first weight / total weight: rescales the gradients of earlier micro-batches

    @property
    def between_steps(self) -> bool:
        """Whether the next micro-batch to be read is the first of its step."""
        return self._num_read == 0

    def next_batch(self, batches: Iterator[Batch]) -> tuple[Batch | None, bool]:
        """Read the next micro-batch; inside a step also its successor. Returns it, and whether the step ends early.

        None at the end of the data, and at the start of a step once all ranks have agreed to stop.
        """
        if self.agreed_stop_signal and self._num_read == 0:
            return None, False
        batch = next(batches, None) if self._next is None else self._next
        self._next = None
        if batch is None:
            return None, False
        self._num_read = (self._num_read + 1) % self.num_micro_batches
        if self._num_read:
            self._next = next(batches, None)
            if self._next is None:
                self._num_read = 0
                return batch, True
        return batch, False

    def loss_factor(self, weight: float, *, is_first: bool, is_last: bool) -> float:
        """The factor for the mean loss of a micro-batch of this weight, applied before its backward pass.

        `is_first`, `is_last`: of its step. With the last micro-batch, rescales the dense gradients of the earlier ones.
        """
        if self.num_micro_batches == 1:
            return 1.0
        if is_first:
            self._first_weight = self._total_weight = 0.0
        self._first_weight = self._first_weight or weight
        self._total_weight += weight
        if not is_last:
            return weight / self._first_weight if weight else 0.0
        if not self._total_weight:
            raise UserError("sample weights: all of a step are 0, so it has no loss; drop such samples")
        self._decay = self._first_weight / self._total_weight
        for parameter in self._dense_parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self._decay)
        return weight / self._total_weight

    def update_tables(self, sparse: EmbeddingTables, ids: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Update the tables from the ids and vector gradients of all micro-batches of a step."""
        pairs = list(zip(ids, gradients, strict=True))
        sparse.update(*(pairs[0] if len(pairs) == 1 else sparse.exchange.concat_micro_batches(pairs, self._decay)))


def loss_weight(loss: nn.Module, batch: Batch) -> float:
    """The weight of a batch's mean loss among other batches of a step.

    A loss that is a mean over something else than samples has a method `weight(batch)`, for example the number of valid
    tokens. By default it is the total weight of the samples: their number if they have no weights.
    """
    weight = getattr(loss, "weight", None)
    if callable(weight) and not isinstance(weight, nn.Module):
        return float(cast("Callable[[Batch], Tensor]", weight)(batch))
    return float(batch.batch_size if batch.weights is None else batch.weights.sum())
