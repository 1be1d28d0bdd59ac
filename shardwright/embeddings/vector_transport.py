"""Columns of vectors: from rank to rank, from where they were computed to where they belong, and back.

Shape legend: B samples, D columns of all vectors, X those of one answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.codec import Codec
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.embeddings.layout import Span


@dataclass(frozen=True, slots=True)
class Run:
    """Columns that stay side by side: where they are in an answer, and where they belong."""

    source: int
    target: int
    width: int
    added: bool  # to what an earlier answer brought


def runs(targets: Iterable[Span], written: set[int]) -> tuple[Run, ...]:
    """An answer's columns, in their order, belong to `targets`; `written` says which have been brought, and learns."""
    found: list[Run] = []
    source = 0
    for low, high in targets:
        for target, added in [(column, column in written) for column in range(low, high)]:
            before = found[-1] if found else None
            if before and before.target + before.width == target and before.added == added:
                found[-1] = replace(before, width=before.width + 1)
            else:
                found.append(Run(source, target, 1, added))
            source += 1
        written.update(range(low, high))
    return tuple(found)


def put(target_BD: Tensor, source_BX: Tensor, moved: Sequence[Run]) -> None:
    for run in moved:
        there = target_BD[:, run.target : run.target + run.width]
        here = source_BX[:, run.source : run.source + run.width]
        there.add_(here) if run.added else there.copy_(here)


def take(target_BX: Tensor, source_BD: Tensor, moved: Sequence[Run]) -> Tensor:
    """The way back: every answer gets the gradients of all columns it had a part in."""
    for run in moved:
        there = target_BX[:, run.source : run.source + run.width]
        there.copy_(source_BD[:, run.target : run.target + run.width])
    return target_BX


@dataclass(frozen=True, slots=True)
class Way:
    """How numbers travel among the ranks of a group."""

    group: Group
    codec: Codec
    dtype: torch.dtype

    def sent(self, parts: Sequence[Sequence[Tensor]], received: Sequence[int]) -> Pending[Tensor]:
        """To each rank its parts; and how many numbers are to come from each."""
        sizes = [sum(map(Tensor.numel, one)) for one in parts]
        found = [part for one in parts for part in one]
        flat = _joined(found) if found else torch.empty(0, dtype=self.dtype)
        return collective.all_to_all(flat, sizes, received, self.group, self.codec)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """One after the other; where they lie so already nothing is copied."""
    end = parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end:
            return torch.cat([part.flatten() for part in parts])
        end += part.numel() * part.element_size()
    same = all(part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr() for part in parts)
    total = sum(map(Tensor.numel, parts))
    return parts[0].as_strided((total,), (1,)) if same else torch.cat([part.flatten() for part in parts])
