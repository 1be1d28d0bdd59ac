"""The rows and columns that this rank holds of one bank: looked up in one call, updated in one call.

Shape legend: E rows of a piece, D its columns, U distinct rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.embeddings.order import Order
from shardwright.embeddings.shard import Bank, Piece
from shardwright.kernels import embedding, ids
from shardwright.kernels.buffers import Buffers
from shardwright.kernels.calls import Ids, TableState
from shardwright.kernels.initial import CHUNK
from shardwright.kernels.native import huge_pages
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.table import TableWeights
from shardwright.spec.optimizer import SGD, SparseOptimizer, state_shapes

SUM = SGD(lr=-1.0)  # an update of zeros by it leaves the sums of gradients


@dataclass(frozen=True, slots=True)
class Sums:
    """The summed gradients of the rows that a batch touched, piece by piece: `counts` rows of each, ascending."""

    rows_U: Tensor
    counts: list[int]
    sums: list[Tensor]  # (U, D) of each piece


class Holding:
    """One bank's tensors."""

    def __init__(self, bank: Bank, bags: EmbeddingBags, orders: Sequence[Order], device: torch.device) -> None:
        self.bank = bank
        self.tables = [bags.tables[piece.table] for piece in bank.pieces]
        self.trained = [bags.holder(table.name).trained for table in self.tables]
        self._memory = Buffers()
        self.weights: list[Tensor] = []
        self.state: list[dict[str, Tensor]] = []
        self._keys: list[int] = []
        for piece, table in zip(bank.pieces, self.tables, strict=True):
            whole = bags.holder(table.name)
            self.weights.append(_taken(whole, piece, orders[piece.table], device))
            rows = piece.rows[1] - piece.rows[0]
            shapes = state_shapes(bags.optimizer, rows, piece.dim) if bags.optimizer else {}
            dtype = embedding.vector_dtype(whole.weight.dtype)
            self.state.append({name: _full(shape, whole.initial, dtype, device) for name, shape in shapes.items()})
            self._keys.append(whole.key)

    def lookup(self, wanted: Ids) -> list[Tensor]:
        return embedding.lookup_into(self._memory, self.weights, wanted) if self.weights else []

    def update(
        self, wanted: Ids, gradients: Sequence[Tensor], optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> None:
        """One optimizer step; `steps` has the number of each table's, from 1."""
        embedding.update(self.states(steps), wanted, gradients, optimizer)

    def states(self, steps: Mapping[str, int]) -> list[TableState]:
        return [
            TableState(weight, tuple(state.values()), steps[table.name], key, trained)
            for weight, state, table, key, trained in zip(
                self.weights, self.state, self.tables, self._keys, self.trained, strict=True
            )
        ]

    def summed(self, wanted: Ids, gradients: Sequence[Tensor]) -> Sums:
        """Each touched row once, with the sum of its gradients in the order of the batch."""
        rows_U, counts, inverse = ids.distinct(wanted, [len(weight) for weight in self.weights])
        places = relative(replace(wanted, values=inverse), counts)
        return Sums(rows_U, counts, sum_places(places, gradients, counts, [piece.dim for piece in self.bank.pieces]))

    def apply(self, sums: Sums, optimizer: SparseOptimizer, steps: Mapping[str, int]) -> None:
        """One optimizer step from the sums of each touched row."""
        alone = len(self.weights)
        each = sums.rows_U.new_tensor(sums.counts)
        wanted = Ids(
            sums.rows_U,
            torch.cat([each.new_zeros(1), each.cumsum(0)]),
            None,
            range(alone),
            [embedding.POOLINGS.index("none")] * alone,
        )
        pooled = sums.rows_U.new_empty(1, 0, dtype=sums.sums[0].dtype)
        embedding.update(self.states(steps), wanted, [pooled, *sums.sums], optimizer)


def sum_places(wanted: Ids, gradients: Sequence[Tensor], counts: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    """The summed gradients of distinct rows, where ids are places among those of each table."""
    zeros = [torch.zeros(count, dim, dtype=gradients[0].dtype) for count, dim in zip(counts, dims, strict=True)]
    add_places(wanted, gradients, zeros)
    return zeros


def add_places(wanted: Ids, gradients: Sequence[Tensor], zeros: Sequence[Tensor]) -> None:
    """The summed gradients of rows into tables of zeros."""
    embedding.update([TableState(zero, (), 1, 0) for zero in zeros], wanted, gradients, SUM)


def relative(wanted: Ids, counts: Sequence[int]) -> Ids:
    """Places among all distinct rows as places among those of each feature's table."""
    return replace(wanted, values=wanted.values - _begins(wanted, counts))


def absolute(wanted: Ids, counts: Sequence[int]) -> Ids:
    """The other way round."""
    return replace(wanted, values=wanted.values + _begins(wanted, counts))


def _begins(wanted: Ids, counts: Sequence[int]) -> Tensor:
    """For each id, where its table begins among all."""
    begins = torch.tensor([0, *counts]).cumsum(0)[:-1]
    sizes = torch.tensor([end - start for start, end in wanted.spans()])
    shift = begins[torch.tensor(list(wanted.tables), dtype=torch.int64)].repeat_interleave(sizes)
    return shift.to(wanted.values.device)


def _full(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    found = torch.empty(shape, dtype=dtype, device=device)
    huge_pages(found)
    return found.fill_(value)


@torch.no_grad()
def _taken(whole: TableWeights, piece: Piece, order: Order, device: torch.device) -> Tensor:
    """The piece's rows as the model has them, or as it would begin with."""
    start, end = piece.rows
    found_ED = torch.empty(end - start, piece.dim, dtype=whole.weight.dtype, device=device)
    huge_pages(found_ED)
    step = max(1, CHUNK // whole.table.dim)
    for low in range(start, end, step):
        rows = order.ids(torch.arange(low, min(low + step, end)))
        values = whole.initial_rows(rows) if whole.weight.is_meta else whole.weight[rows]
        found_ED[low - start : low - start + len(rows)] = torch.cat([values[:, a:b] for a, b in piece.cols], 1)
    return found_ED
