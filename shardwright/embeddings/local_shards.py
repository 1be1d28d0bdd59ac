"""The shards of one table group on this rank: one call looks them up, one call updates them.

A shard with a cache has lines in place of rows (cached_rows.py): `place` finds the lines of a batch, and the same
kernels run on them.

Shape legend: E rows of a shard, D its columns, U distinct rows, N ids.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.comm.pending import Pending
from shardwright.embeddings.cached_rows import CachedRows
from shardwright.embeddings.cached_shard import Caches, make_cached_rows
from shardwright.embeddings.layout import TableGroup, TableShard
from shardwright.embeddings.row_order import RowOrder
from shardwright.kernels import embedding
from shardwright.kernels.arguments import Ids, TableState
from shardwright.kernels.buffers import BufferPool
from shardwright.kernels.dedup import unique_rows
from shardwright.kernels.gradient_sums import GradientSums, sum_gradients
from shardwright.kernels.initial import CHUNK_ELEMENTS
from shardwright.kernels.native import use_huge_pages
from shardwright.layers.embedding import EmbeddingTables
from shardwright.layers.table_weights import TableWeights
from shardwright.spec.optimizer import SparseOptimizer, state_shapes


@dataclass(frozen=True, slots=True, eq=False)
class PlacedIds:
    """Ids of a batch, those of shards with a cache as lines; and by such a shard, the lines of its distinct rows."""

    ids: Ids
    lines: Mapping[int, Tensor]
    copies: Sequence[Pending[None]]


class LocalShards:
    """Weights and optimizer states of the shards of one table group, or of the lines of their caches."""

    def __init__(
        self,
        group: TableGroup,
        bags: EmbeddingTables,
        orders: Sequence[RowOrder],
        device: torch.device,
        caches: Caches | None = None,
    ) -> None:
        self.table_group = group
        self.tables = [bags.tables[shard.table] for shard in group.shards]
        self.is_trained = [bags.holder(table.name).is_trained for table in self.tables]
        self._memory = BufferPool()
        self.weights: list[Tensor] = []
        self.optimizer_states: list[dict[str, Tensor]] = []
        # By shard: (E,) flags of the rows that differ from the last checkpoint, or None if changes are not tracked.
        self.changed_rows: list[Tensor | None] = [None] * len(group.shards)
        self._modules = [bags.holder(table.name) for table in self.tables]
        self.caches: dict[int, CachedRows] = {}  # by shard
        for index, (shard, table) in enumerate(zip(group.shards, self.tables, strict=True)):
            module = bags.holder(table.name)
            if caches is not None and shard.table in caches.lines:
                cached = self.caches[index] = make_cached_rows(bags, shard, orders[shard.table], caches)
                self.weights.append(cached.parts_L[0])
                names = state_shapes(bags.optimizer, 1, shard.dim) if bags.optimizer else {}
                self.optimizer_states.append(dict(zip(names, cached.parts_L[1:], strict=True)))
                continue
            self.weights.append(_shard_weight(module, shard, orders[shard.table], device))
            rows = shard.rows[1] - shard.rows[0]
            shapes = state_shapes(bags.optimizer, rows, shard.dim) if bags.optimizer else {}
            dtype = embedding.vector_dtype(module.weight.dtype)
            state = {name: _full(shape, module.initial_state, dtype, device) for name, shape in shapes.items()}
            if bags.steps[table.name]:  # the table was loaded, or trained here, before sharding
                for name, values in state.items():
                    _copy_rows(values, bags.state(table.name)[name], shard, orders[shard.table])
            self.optimizer_states.append(state)

    def lookup(self, ids: Ids) -> list[Tensor]:
        """The pooled vectors of all samples, then the rows of each unpooled stream."""
        return embedding.lookup_into(self._memory, self.weights, ids) if self.weights else []

    def num_rows(self, index: int) -> int:
        """Of a shard."""
        start, end = self.table_group.shards[index].rows
        return end - start

    def place(self, ids: Ids) -> PlacedIds:
        """Place the rows of a batch on lines, until `release`; without caches, rows are lines."""
        if not self.caches:
            return PlacedIds(ids, {}, ())
        rows_U, counts, inverse_N = unique_rows(ids, [self.num_rows(index) for index in range(len(self.weights))])
        lines_U, lines, copies = rows_U.clone(), dict[int, Tensor](), list[Pending[None]]()
        for index, (own_rows, own_lines) in enumerate(zip(rows_U.split(counts), lines_U.split(counts), strict=True)):
            if index in self.caches:
                lines[index], pending = self.caches[index].place(own_rows)
                own_lines.copy_(lines[index])
                copies.append(pending)
        return PlacedIds(replace(ids, values=lines_U[inverse_N]), lines, copies)

    def release(self, placed: PlacedIds, *, written: bool) -> None:
        """End a batch's use of its lines; `written`: an update has changed them."""
        for index, lines_U in placed.lines.items():
            cached, changed_rows = self.caches[index], self.changed_rows[index]
            if written and self.is_trained[index] and changed_rows is not None:
                changed_rows[cached.rows_on(lines_U)] = True
            cached.release(lines_U, written=written and self.is_trained[index])

    def update(
        self, ids: Ids, gradients: Sequence[Tensor], optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> None:
        """One optimizer step; `steps` is the number of each table's step, from 1."""
        embedding.update(self.table_states(steps), ids, gradients, optimizer)

    def table_states(self, steps: Mapping[str, int]) -> list[TableState]:
        """The kernels' view of each shard: weight, optimizer state, step. `release` marks changed rows on lines."""
        masks = [None if index in self.caches else mask for index, mask in enumerate(self.changed_rows)]
        return [
            TableState(weight, tuple(state.values()), steps[module.table.name], module.rounding_key, is_trained, mask)
            for weight, state, module, is_trained, mask in zip(
                self.weights, self.optimizer_states, self._modules, self.is_trained, masks, strict=True
            )
        ]

    def sum_gradients(self, ids: Ids, gradients: Sequence[Tensor]) -> GradientSums:
        """Sum the gradients of each row."""
        return sum_gradients(self.weights, ids, gradients)

    def update_from_sums(self, sums: GradientSums, optimizer: SparseOptimizer, steps: Mapping[str, int]) -> None:
        """One optimizer step from gradients that are already summed by row."""
        num_shards = len(self.weights)
        counts = sums.rows_U.new_tensor(sums.counts)
        ids = Ids(
            sums.rows_U,
            torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            None,
            range(num_shards),
            [embedding.POOLINGS.index("none")] * num_shards,
        )
        pooled = sums.rows_U.new_empty(1, 0, dtype=sums.sums[0].dtype)
        embedding.update(self.table_states(steps), ids, [pooled, *sums.sums], optimizer)


def _full(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.full` on huge pages."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    use_huge_pages(tensor)
    return tensor.fill_(value)


@torch.no_grad()
def _shard_weight(module: TableWeights, shard: TableShard, order: RowOrder, device: torch.device) -> Tensor:
    """A shard's copy of the table's weight, or its initial rows if the weight is on the meta device."""
    weight_ED = torch.empty(shard.rows[1] - shard.rows[0], shard.dim, dtype=module.weight.dtype, device=device)
    use_huge_pages(weight_ED)
    _copy_rows(weight_ED, module.initial_rows if module.weight.is_meta else module.weight, shard, order)
    return weight_ED


@torch.no_grad()
def _copy_rows(target: Tensor, full: Tensor | Callable[[Tensor], Tensor], shard: TableShard, order: RowOrder) -> None:
    """Copy a shard's part of a table's weight or state into `target`, in chunks, to save memory.
    `full` is a tensor, or a function that returns the rows of given ids."""
    start, end = shard.rows
    step = max(1, CHUNK_ELEMENTS // shard.dim)
    for low in range(start, end, step):
        rows = order.ids(torch.arange(low, min(low + step, end)))
        values = full[rows] if isinstance(full, Tensor) else full(rows)
        if values.dim() == 2:
            values = torch.cat([values[:, a:b] for a, b in shard.cols], 1)
        target[low - start : low - start + len(rows)] = values
