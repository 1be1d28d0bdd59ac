"""The rows and columns that this rank holds of one bank: looked up in one call, updated in one call.

Shape legend: E rows of a piece, D its columns, U distinct rows.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardwright.embeddings.layout import Bank, Piece
from shardwright.embeddings.row_order import Order
from shardwright.kernels import embedding
from shardwright.kernels.arguments import Ids, TableState
from shardwright.kernels.buffers import Buffers
from shardwright.kernels.gradient_sums import Sums, summed
from shardwright.kernels.initial import CHUNK
from shardwright.kernels.native import huge_pages
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.table_weights import TableWeights
from shardwright.spec.optimizer import SparseOptimizer, state_shapes


class Holding:
    """One bank's tensors."""

    def __init__(self, bank: Bank, bags: EmbeddingBags, orders: Sequence[Order], device: torch.device) -> None:
        self.bank = bank
        self.tables = [bags.tables[piece.table] for piece in bank.pieces]
        self.trained = [bags.holder(table.name).trained for table in self.tables]
        self._memory = Buffers()
        self.weights: list[Tensor] = []
        self.state: list[dict[str, Tensor]] = []
        self.changes: list[Tensor | None] = [None] * len(bank.pieces)  # rows that differ from the last checkpoint's
        self._modules = [bags.holder(table.name) for table in self.tables]
        for piece, table in zip(bank.pieces, self.tables, strict=True):
            whole = bags.holder(table.name)
            self.weights.append(_taken(whole, piece, orders[piece.table], device))
            rows = piece.rows[1] - piece.rows[0]
            shapes = state_shapes(bags.optimizer, rows, piece.dim) if bags.optimizer else {}
            dtype = embedding.vector_dtype(whole.weight.dtype)
            state = {name: _full(shape, whole.initial, dtype, device) for name, shape in shapes.items()}
            if bags.steps[table.name]:  # the table was loaded, or trained here, before sharding
                for name, values in state.items():
                    _copy_rows(values, bags.state(table.name)[name], piece, orders[piece.table])
            self.state.append(state)

    def lookup(self, wanted: Ids) -> list[Tensor]:
        return embedding.lookup_into(self._memory, self.weights, wanted) if self.weights else []

    def update(
        self, wanted: Ids, gradients: Sequence[Tensor], optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> None:
        """One optimizer step; `steps` has the number of each table's, from 1."""
        embedding.update(self.states(steps), wanted, gradients, optimizer)

    def states(self, steps: Mapping[str, int]) -> list[TableState]:
        return [
            TableState(weight, tuple(state.values()), steps[module.table.name], module.key, trained, changed)
            for weight, state, module, trained, changed in zip(
                self.weights, self.state, self._modules, self.trained, self.changes, strict=True
            )
        ]

    def summed(self, wanted: Ids, gradients: Sequence[Tensor]) -> Sums:
        return summed(self.weights, wanted, gradients)

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


def _full(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    found = torch.empty(shape, dtype=dtype, device=device)
    huge_pages(found)
    return found.fill_(value)


@torch.no_grad()
def _taken(whole: TableWeights, piece: Piece, order: Order, device: torch.device) -> Tensor:
    """The piece's rows as the model has them, or as it would begin with."""
    found_ED = torch.empty(piece.rows[1] - piece.rows[0], piece.dim, dtype=whole.weight.dtype, device=device)
    huge_pages(found_ED)
    _copy_rows(found_ED, whole.initial_rows if whole.weight.is_meta else whole.weight, piece, order)
    return found_ED


@torch.no_grad()
def _copy_rows(into: Tensor, whole: Tensor | Callable[[Tensor], Tensor], piece: Piece, order: Order) -> None:
    """Copy a piece's rows of a table's weight or state into `into`; `whole` may also be a function that makes rows.
    Works in chunks, to need little extra memory."""
    start, end = piece.rows
    step = max(1, CHUNK // piece.dim)
    for low in range(start, end, step):
        rows = order.ids(torch.arange(low, min(low + step, end)))
        values = whole[rows] if isinstance(whole, Tensor) else whole(rows)
        if values.dim() == 2:
            values = torch.cat([values[:, a:b] for a, b in piece.cols], 1)
        into[low - start : low - start + len(rows)] = values
