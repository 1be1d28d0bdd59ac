"""The rows and columns that this rank holds of one bank: looked up in one call, updated in one call.

Shape legend: E rows of a piece, D its columns, U distinct rows.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardwright.embeddings.layout import TableGroup, TableShard
from shardwright.embeddings.row_order import RowOrder
from shardwright.kernels import embedding
from shardwright.kernels.arguments import Ids, TableState
from shardwright.kernels.buffers import BufferPool
from shardwright.kernels.gradient_sums import GradientSums, sum_gradients
from shardwright.kernels.initial import CHUNK_ELEMENTS
from shardwright.kernels.native import use_huge_pages
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.table_weights import TableWeights
from shardwright.spec.optimizer import SparseOptimizer, state_shapes


class LocalShards:
    """One bank's tensors."""

    def __init__(self, bank: TableGroup, bags: EmbeddingBags, orders: Sequence[RowOrder], device: torch.device) -> None:
        self.table_group = bank
        self.tables = [bags.tables[piece.table] for piece in bank.shards]
        self.is_trained = [bags.holder(table.name).is_trained for table in self.tables]
        self._memory = BufferPool()
        self.weights: list[Tensor] = []
        self.optimizer_states: list[dict[str, Tensor]] = []
        self.changed_rows: list[Tensor | None] = [None] * len(
            bank.shards
        )  # rows that differ from the last checkpoint's
        self._modules = [bags.holder(table.name) for table in self.tables]
        for piece, table in zip(bank.shards, self.tables, strict=True):
            whole = bags.holder(table.name)
            self.weights.append(_taken(whole, piece, orders[piece.table], device))
            rows = piece.rows[1] - piece.rows[0]
            shapes = state_shapes(bags.optimizer, rows, piece.dim) if bags.optimizer else {}
            dtype = embedding.vector_dtype(whole.weight.dtype)
            state = {name: _full(shape, whole.initial_state, dtype, device) for name, shape in shapes.items()}
            if bags.steps[table.name]:  # the table was loaded, or trained here, before sharding
                for name, values in state.items():
                    _copy_rows(values, bags.state(table.name)[name], piece, orders[piece.table])
            self.optimizer_states.append(state)

    def lookup(self, ids: Ids) -> list[Tensor]:
        return embedding.lookup_into(self._memory, self.weights, ids) if self.weights else []

    def update(
        self, ids: Ids, gradients: Sequence[Tensor], optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> None:
        """One optimizer step; `steps` has the number of each table's, from 1."""
        embedding.update(self.table_states(steps), ids, gradients, optimizer)

    def table_states(self, steps: Mapping[str, int]) -> list[TableState]:
        return [
            TableState(weight, tuple(state.values()), steps[module.table.name], module.rounding_key, trained, changed)
            for weight, state, module, trained, changed in zip(
                self.weights, self.optimizer_states, self._modules, self.is_trained, self.changed_rows, strict=True
            )
        ]

    def sum_gradients(self, ids: Ids, gradients: Sequence[Tensor]) -> GradientSums:
        return sum_gradients(self.weights, ids, gradients)

    def update_from_sums(self, sums: GradientSums, optimizer: SparseOptimizer, steps: Mapping[str, int]) -> None:
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
        embedding.update(self.table_states(steps), wanted, [pooled, *sums.sums], optimizer)


def _full(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    found = torch.empty(shape, dtype=dtype, device=device)
    use_huge_pages(found)
    return found.fill_(value)


@torch.no_grad()
def _taken(whole: TableWeights, piece: TableShard, order: RowOrder, device: torch.device) -> Tensor:
    """The piece's rows as the model has them, or as it would begin with."""
    found_ED = torch.empty(piece.rows[1] - piece.rows[0], piece.dim, dtype=whole.weight.dtype, device=device)
    use_huge_pages(found_ED)
    _copy_rows(found_ED, whole.initial_rows if whole.weight.is_meta else whole.weight, piece, order)
    return found_ED


@torch.no_grad()
def _copy_rows(into: Tensor, whole: Tensor | Callable[[Tensor], Tensor], piece: TableShard, order: RowOrder) -> None:
    """Copy a piece's rows of a table's weight or state into `into`; `whole` may also be a function that makes rows.
    Works in chunks, to need little extra memory."""
    start, end = piece.rows
    step = max(1, CHUNK_ELEMENTS // piece.dim)
    for low in range(start, end, step):
        rows = order.ids(torch.arange(low, min(low + step, end)))
        values = whole[rows] if isinstance(whole, Tensor) else whole(rows)
        if values.dim() == 2:
            values = torch.cat([values[:, a:b] for a, b in piece.cols], 1)
        into[low - start : low - start + len(rows)] = values
