"""Random numbers of layers that do not depend on the number of ranks: a function of seed, step, and part of the batch.

`job.run` keys them around each forward and backward pass, where blocks may run again. Elsewhere they come from torch's
default generator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.spec.calls import Call


class _Key(NamedTuple):
    """`batch`: of those that a step accumulates; `part`: of that batch, over all ranks and a pipeline's micro-batches,
    in the order of its samples."""

    seed: int
    step: int
    batch: int
    part: int


class StepDraws:
    """The key of a job's numbers; the seed is that of torch's default generator, which checkpoints restore.

    `part`: this rank's, of a batch; `num_parts`: in which a pipeline runs it.
    """

    def __init__(self, part: int, num_parts: int = 1) -> None:
        self._part, self._num_parts = part, num_parts
        self.key: _Key | None = None

    @contextmanager
    def keyed(self, call: Call) -> Iterator[None]:
        """Within this context, numbers are those of the call's micro-batch; a second call of a layer repeats them."""
        batch, part = divmod(call.micro, self._num_parts)
        self.key = _Key(torch.initial_seed(), call.step, batch, self._part * self._num_parts + part)
        try:
            yield
        finally:
            self.key = None


@dataclass(frozen=True, slots=True)
class LayerDraws:
    """The numbers of a layer at a path of the model."""

    step: StepDraws | None = None
    path: str = ""

    def uniform(self, num: int, group: int = 0, num_groups: int = 1) -> Tensor:
        """Numbers in [0, 1), on the CPU.

        `group`: one of `num_groups` consecutive parts of the samples; in one process it has the same numbers as one of
        that many ranks.
        """
        key = self.step.key if self.step is not None else None
        if key is None:
            return torch.rand(num, dtype=torch.float64)
        text = repr((self.path, *key[:-1], key.part * num_groups + group))
        seed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        return torch.rand(num, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
