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
class ColumnCopy:
    """Columns that stay side by side: where they are in an answer, and where they belong."""

    source: int
    target: int
    width: int
    accumulate: bool  # to what an earlier answer brought


def plan_column_copies(targets: Iterable[Span], written: set[int]) -> tuple[ColumnCopy, ...]:
    """An answer's columns, in their order, belong to `targets`; `written` says which have been brought, and learns."""
    found: list[ColumnCopy] = []
    source = 0
    for low, high in targets:
        for target, added in [(column, column in written) for column in range(low, high)]:
            before = found[-1] if found else None
            if before and before.target + before.width == target and before.accumulate == added:
                found[-1] = replace(before, width=before.width + 1)
            else:
                found.append(ColumnCopy(source, target, 1, added))
            source += 1
        written.update(range(low, high))
    return tuple(found)


def scatter_columns(target_BD: Tensor, source_BX: Tensor, copies: Sequence[ColumnCopy]) -> None:
    for run in copies:
        there = target_BD[:, run.target : run.target + run.width]
        here = source_BX[:, run.source : run.source + run.width]
        there.add_(here) if run.accumulate else there.copy_(here)


def gather_columns(target_BX: Tensor, source_BD: Tensor, copies: Sequence[ColumnCopy]) -> Tensor:
    """The way back: every answer gets the gradients of all columns it had a part in."""
    for run in copies:
        there = target_BX[:, run.source : run.source + run.width]
        there.copy_(source_BD[:, run.target : run.target + run.width])
    return target_BX


@dataclass(frozen=True, slots=True)
class VectorTransport:
    """How numbers travel among the ranks of a group."""

    group: Group
    codec: Codec
    dtype: torch.dtype

    def all_to_all(self, messages: Sequence[Sequence[Tensor]], received_sizes: Sequence[int]) -> Pending[Tensor]:
        """To each rank its parts; and how many numbers are to come from each."""
        sizes = [sum(map(Tensor.numel, one)) for one in messages]
        found = [part for one in messages for part in one]
        flat = _joined(found) if found else torch.empty(0, dtype=self.dtype)
        return collective.all_to_all(flat, sizes, received_sizes, self.group, self.codec)


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
