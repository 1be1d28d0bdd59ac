"""Random numbers of layers that do not depend on the number of ranks: a function of seed, step, layer and sample.

`job.run` keys them around each forward and backward pass, where blocks may run again. Elsewhere they come from torch's
default generator. Where a sample's place in the global batch is not known, its number is keyed by the part of the batch
that it is in, so that it depends on the number of ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwright.jagged import Batch
from shardwright.spec.calls import Call

DRAWS_PER_COUNT = 8  # numbers of 32 bits that one count of the generator gives


class _Key(NamedTuple):
    """`batch`: of those that a step accumulates; `part`: of that batch, over all ranks and a pipeline's micro-batches,
    in the order of its samples. `start`: the place of its first sample in the global batch; None: not known."""

    seed: int
    step: int
    batch: int
    part: int
    start: int | None


class StepDraws:
    """The key of a job's numbers; the seed is that of torch's default generator, which checkpoints restore.

    `part`: this rank's, of a batch; `num_parts`: in which a pipeline runs it.
    """

    def __init__(self, part: int, num_parts: int = 1) -> None:
        self._part, self._num_parts = part, num_parts
        self._starts: dict[tuple[int, int], int | None] = {}  # by step and micro-batch, of steps not yet ended
        self.key: _Key | None = None

    @contextmanager
    def keyed(self, call: Call, samples: Batch | None = None) -> Iterator[None]:
        """Within this context, numbers are those of the call's micro-batch; a second call of a layer repeats them.

        `samples`: in the forward pass, the micro-batch; the backward pass has the same numbers.
        """
        if samples is not None:
            self._starts = {key: start for key, start in self._starts.items() if key[0] >= call.step - 1}
            self._starts[call.step, call.micro] = samples.start
        batch, part = divmod(call.micro, self._num_parts)
        start = self._starts.get((call.step, call.micro))
        self.key = _Key(torch.initial_seed(), call.step, batch, self._part * self._num_parts + part, start)
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
        seed = _hash(self.path, key.seed, key.step, key.batch, key.part * num_groups + group)
        return torch.rand(num, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def uniform_by_sample(self, num: int, columns: int) -> Tensor:
        """(num, columns) float32 numbers in [0, 1), on the CPU: a row for each of the samples, by its place."""
        key = self.step.key if self.step is not None else None
        if key is None:
            return torch.rand(num, columns)
        part = key.part if key.start is None else -1
        seed = _hash(self.path, key.seed, key.step, key.batch, part)
        counts = -(-columns // DRAWS_PER_COUNT)
        generator = np.random.Philox(key=seed % 2**64).advance((key.start or 0) * counts)
        numbers = np.random.Generator(generator).random((num, counts * DRAWS_PER_COUNT), dtype=np.float32)
        return torch.from_numpy(numbers)[:, :columns]


def _hash(*words: str | int) -> int:
    """A signed number of 64 bits."""
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest(), "little", signed=True)
