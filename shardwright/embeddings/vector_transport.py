"""Send vectors and gradients between ranks, and copy their columns to and from the messages.

Shape legend: B samples, D columns of all vectors, X columns of one response.
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
    """A run of adjacent columns: where it is in a response, and where in the vectors of this rank."""

    source: int
    target: int
    width: int
    accumulate: bool  # add to the columns of an earlier response instead of overwriting them


def plan_column_copies(targets: Iterable[Span], written: set[int]) -> tuple[ColumnCopy, ...]:
    """Plan the copies of a response whose columns belong, in their order, to `targets`.
    `written`: the target columns of earlier responses; the columns of this response are added to it."""
    copies: list[ColumnCopy] = []
    source = 0
    for low, high in targets:
        for target, accumulate in [(column, column in written) for column in range(low, high)]:
            last = copies[-1] if copies else None
            if last and last.target + last.width == target and last.accumulate == accumulate:
                copies[-1] = replace(last, width=last.width + 1)
            else:
                copies.append(ColumnCopy(source, target, 1, accumulate))
            source += 1
        written.update(range(low, high))
    return tuple(copies)


def scatter_columns(target_BD: Tensor, source_BX: Tensor, copies: Sequence[ColumnCopy]) -> None:
    """Copy or add a response's columns to where they belong in the vectors."""
    for run in copies:
        target = target_BD[:, run.target : run.target + run.width]
        source = source_BX[:, run.source : run.source + run.width]
        target.add_(source) if run.accumulate else target.copy_(source)


def gather_columns(target_BX: Tensor, source_BD: Tensor, copies: Sequence[ColumnCopy]) -> Tensor:
    """Transpose of `scatter_columns`: the gradients of all columns to which a response contributed."""
    for run in copies:
        target = target_BX[:, run.source : run.source + run.width]
        target.copy_(source_BD[:, run.target : run.target + run.width])
    return target_BX


@dataclass(frozen=True, slots=True)
class VectorTransport:
    """All-to-all of floating-point values over one group, compressed by a codec."""

    group: Group
    codec: Codec
    dtype: torch.dtype

    def all_to_all(self, messages: Sequence[Sequence[Tensor]], received_sizes: Sequence[int]) -> Pending[Tensor]:
        """Send each rank its message, concatenated; `received_sizes` are values to receive, by rank."""
        sizes = [sum(map(Tensor.numel, message)) for message in messages]
        tensors = [tensor for message in messages for tensor in message]
        flat = _concat(tensors) if tensors else torch.empty(0, dtype=self.dtype, device=self.group.device)
        return collective.all_to_all(flat, sizes, received_sizes, self.group, self.codec)


def exchange_id_weights(weights: Sequence[Tensor], group: Group) -> Pending[tuple[Tensor, ...]]:
    """Exchange id weights in the order of their ids: an all-to-all of sizes, then one of weights."""
    sizes = [len(weights_to_rank) for weights_to_rank in weights]
    received_sizes = collective.all_to_all_rows(torch.tensor(sizes).unsqueeze(1), group).wait().flatten().tolist()
    pending = collective.all_to_all(torch.cat(list(weights)), sizes, received_sizes, group)
    return pending.then(lambda flat: flat.split(received_sizes))


def split_ends(flats: Sequence[Tensor], sizes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """What comes before the last values of each, and these."""
    pairs = [flat.tensor_split([len(flat) - size]) for flat, size in zip(flats, sizes, strict=True)]
    return [first for first, _ in pairs], [last for _, last in pairs]


def _concat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate flattened tensors; a view without copying if they are adjacent in one storage."""
    end = tensors[0].data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() != end:
            return torch.cat([tensor.flatten() for tensor in tensors])
        end += tensor.numel() * tensor.element_size()
    same = all(tensor.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr() for tensor in tensors)
    total = sum(map(Tensor.numel, tensors))
    return tensors[0].as_strided((total,), (1,)) if same else torch.cat([tensor.flatten() for tensor in tensors])
