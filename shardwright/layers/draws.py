"""Random numbers of layers that do not depend on the number of ranks: a function of seed, step, and part of the batch.

A job sets a `DrawKey` around each forward and backward pass, where blocks may run again. Without a job, they come from
torch's default generator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.spec.calls import Call


class DrawKey(NamedTuple):
    """`batch`: of those that a step accumulates; `part`: of that batch, over all ranks and a pipeline's micro-batches,
    in the order of its samples."""

    seed: int
    step: int
    batch: int
    part: int


_current: list[DrawKey] = []  # no ContextVar: autograd's threads for GPUs, which recompute blocks, would not see it


@dataclass(frozen=True, slots=True)
class StepDraws:
    """`part`: of a batch, that this rank has; `num_parts`: in which a pipeline runs it one after the other."""

    seed: int
    part: int
    num_parts: int = 1

    @contextmanager
    def of_call(self, call: Call) -> Iterator[None]:
        """Within this context, numbers are those of the call's micro-batch."""
        batch, part = divmod(call.micro, self.num_parts)
        _current.append(DrawKey(self.seed, call.step, batch, self.part * self.num_parts + part))
        try:
            yield
        finally:
            _current.pop()


def draw_uniform(num: int, name: str, group: int = 0, num_groups: int = 1) -> Tensor:
    """Numbers in [0, 1), on the CPU, for a layer of this name.

    `group`: of `num_groups` consecutive parts of the samples, for which one process draws what as many ranks draw."""
    if not _current:
        return torch.rand(num, dtype=torch.float64)
    key = _current[-1]
    text = repr((name, key.seed, key.step, key.batch, key.part * num_groups + group))
    seed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    return torch.rand(num, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
