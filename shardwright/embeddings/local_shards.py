"""The shards of one table group on this rank: one call looks them up, one call updates them.

A shard with a cache has lines in place of rows (cached_rows.py), and so has one of a table that grows
(growing_rows.py): `place` finds the lines of a batch, and the same kernels run on them.

Shape legend: E rows of a shard, D its columns, U distinct rows, N ids, S spare lines, L lines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardwright.embeddings.cached_rows import CachedRows, copy_moves
from shardwright.embeddings.cached_shard import Caches, make_cached_rows
from shardwright.embeddings.growing_rows import GrowingRows
from shardwright.embeddings.layout import TableGroup, TableShard
from shardwright.embeddings.row_order import RowOrder
from shardwright.kernels import embedding
from shardwright.kernels.arguments import Ids, TableState, ids_on
from shardwright.kernels.buffers import BufferPool
from shardwright.kernels.cache_index import BatchRows, announce_many, place_rows, release_many
from shardwright.kernels.dedup import unique_rows
from shardwright.kernels.gradient_sums import GradientSums, sum_gradients
from shardwright.kernels.initial import CHUNK_ELEMENTS
from shardwright.kernels.native import use_huge_pages
from shardwright.layers.embedding import EmbeddingTables
from shardwright.layers.table_weights import TableWeights
from shardwright.spec.optimizer import SparseOptimizer, state_shapes


@dataclass(frozen=True, slots=True, eq=False)
class PlacedIds:
    """Ids of a batch to look up and to update, with lines in place of rows where a shard has lines. By such a shard:
    the lines of its distinct rows if it has a cache, the spare lines if it grows."""

    ids: Ids
    update_ids: Ids
    lines: Mapping[int, Tensor]


class FlatShards:
    """The rows of all shards of a group with bounded staleness one after another: those of the shards are views."""

    def __init__(self, group: TableGroup, bags: EmbeddingTables) -> None:
        self.first_rows = [0, *accumulate(shard.rows[1] - shard.rows[0] for shard in group.shards)]
        module = bags.holder(bags.tables[group.shards[0].table].name)
        num, dim = self.first_rows[-1], group.shards[0].dim
        self.weight = torch.empty(num, dim, dtype=module.weight.dtype)
        shapes = state_shapes(bags.optimizer, num, dim) if bags.optimizer else {}
        dtype = embedding.vector_dtype(module.weight.dtype)
        self.state = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}

    def part(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The weight and the optimizer state of a shard."""
        rows = slice(*self.first_rows[index : index + 2])
        return self.weight[rows], {name: part[rows] for name, part in self.state.items()}


class LocalShards:
    """Weights and optimizer states of the shards of one table group, or of the lines of their caches.

    Ids are on the CPU, where batches are routed; on a GPU, each kernel gets a copy.
    """

    def __init__(
        self,
        group: TableGroup,
        bags: EmbeddingTables,
        orders: Sequence[RowOrder],
        device: torch.device,
        caches: Caches | None = None,
        in_flight: int = 1,
    ) -> None:
        """`in_flight`: batches between a lookup in a table that grows and the end of its update."""
        self.table_group = group
        self.tables = [bags.tables[shard.table] for shard in group.shards]
        self.is_trained = [bags.holder(table.name).is_trained for table in self.tables]
        self._memory, self._device = BufferPool(), device
        self.weights: list[Tensor] = []
        self.optimizer_states: list[dict[str, Tensor]] = []
        # By shard: (E,) flags of the rows that differ from the last checkpoint, or None if changes are not tracked.
        self.changed_rows: list[Tensor | None] = [None] * len(group.shards)
        self._modules = [bags.holder(table.name) for table in self.tables]
        self.caches: dict[int, CachedRows] = {}  # by shard
        self.growing: dict[int, GrowingRows] = {}  # by shard: all or none
        self.flat = FlatShards(group, bags) if group.bounded else None
        for index, (shard, table) in enumerate(zip(group.shards, self.tables, strict=True)):
            module = bags.holder(table.name)
            if caches is not None and shard.table in caches.lines:
                cached = self.caches[index] = make_cached_rows(bags, shard, orders[shard.table], caches)
                self.weights.append(cached.parts_L[0])
                names = state_shapes(bags.optimizer, 1, shard.dim) if bags.optimizer else {}
                self.optimizer_states.append(dict(zip(names, cached.parts_L[1:], strict=True)))
                continue
            if table.growth is not None:
                rows = self.growing[index] = GrowingRows(bags, shard, in_flight)
                self.weights.append(rows.parts_L["weight"])
                self.optimizer_states.append({name: part for name, part in rows.parts_L.items() if name != "weight"})
                continue
            rows = shard.rows[1] - shard.rows[0]
            weight_ED = torch.empty(rows, shard.dim, dtype=module.weight.dtype, device=device)
            shapes = state_shapes(bags.optimizer, rows, shard.dim) if bags.optimizer else {}
            dtype = embedding.vector_dtype(module.weight.dtype)
            state = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
            if self.flat is not None:
                weight_ED, state = self.flat.part(index)
            self.weights.append(_fill_weight(weight_ED, module, shard, orders[shard.table]))
            for values in state.values():
                _fill(values, module.initial_state)
            if bags.steps[table.name]:  # the table was loaded, or trained here, before sharding
                for name, values in state.items():
                    _copy_rows(values, bags.state(table.name)[name], shard, orders[shard.table])
            self.optimizer_states.append(state)

    def lookup(self, ids: Ids) -> list[Tensor]:
        """The pooled vectors of all samples, then the rows of each unpooled stream."""
        if not self.table_group.streams:
            return []
        return embedding.lookup_into(self._memory, self.weights, ids_on(ids, self._device))

    def num_rows(self, index: int) -> int:
        """Of a shard: its lines, if its table grows."""
        if index in self.growing:
            return self.growing[index].ids.num_lines
        start, end = self.table_group.shards[index].rows
        return end - start

    def distinct_rows(self, ids: Ids) -> BatchRows:
        return BatchRows(*unique_rows(ids, [self.num_rows(index) for index in range(len(self.weights))]))

    def announce(self, rows: BatchRows) -> None:
        """Tell the caches which rows a batch will use."""
        parts = [(self.caches[i].index, rows_U) for i, rows_U in enumerate(rows.by_table()) if i in self.caches]
        indices, rows_of_indices = zip(*parts, strict=True)
        announce_many(indices, torch.cat(rows_of_indices), [len(rows_U) for rows_U in rows_of_indices])

    def place(self, ids: Ids, rows: BatchRows, *, announced: bool) -> tuple[PlacedIds, Callable[[], None] | None]:
        """Place the rows of a batch on lines of caches, until `release`; the function copies those that are missing."""
        indices = [self.caches[i].index if i in self.caches else None for i in range(len(self.weights))]
        placed = place_rows(indices, rows, announced=announced)
        lines = placed.lines_U.split(list(rows.counts))
        on_lines = replace(ids, values=placed.lines_N)
        own = {index: lines[index] for index in sorted(self.caches)}
        copy = partial(copy_moves, self.caches, placed.moves) if len(placed.moves) else None
        return PlacedIds(on_lines, on_lines, own), copy

    def place_growing(self, ids: Ids, *, training: bool) -> PlacedIds:
        """Place the ids of tables that grow; `training`: as `IdMap.place`."""
        lines_N, update_lines_N = ids.values.long().clone(), ids.values.long().clone()
        spares: dict[int, Tensor] = {}
        for index, rows in self.growing.items():
            ranges = [span for span, shard in zip(ids.feature_ranges(), ids.tables, strict=True) if shard == index]
            placed = rows.place(torch.cat([ids.values[a:b] for a, b in ranges] or [lines_N[:0]]), training=training)
            sizes = [b - a for a, b in ranges]
            for target, lines_of_ids in ((lines_N, placed.lines_N), (update_lines_N, placed.update_lines_N)):
                for (a, b), part in zip(ranges, lines_of_ids.split(sizes), strict=True):
                    target[a:b] = part
            spares[index] = placed.spares_S
            if (changed_rows := self.changed_rows[index]) is not None:
                changed_rows[placed.lines_N if training else placed.fresh_F] = True  # their uses change too
        return PlacedIds(replace(ids, values=lines_N), replace(ids, values=update_lines_N), spares)

    def release_spares(self, placed: PlacedIds) -> None:
        """End a batch's use of lines in tables that grow."""
        for index, spares_S in placed.lines.items():
            self.growing[index].release(spares_S)

    def mark_flat_rows(self, rows_U: Tensor) -> None:
        """Note that an update has changed these rows of `flat`."""
        assert self.flat is not None
        for mask, (start, end) in zip(self.changed_rows, pairwise(self.flat.first_rows), strict=True):
            if mask is not None:
                mask[rows_U[(rows_U >= start) & (rows_U < end)] - start] = True

    def mark_changed(self, placed: PlacedIds) -> None:
        """Note that an update has changed the rows on these lines."""
        for index, lines_U in placed.lines.items():
            if self.is_trained[index] and (changed_rows := self.changed_rows[index]) is not None:
                changed_rows[self.caches[index].rows_on(lines_U)] = True

    def release(self, placed: PlacedIds, *, written: bool) -> None:
        """End a batch's use of lines of caches; `written`: an update has changed them."""
        if not self.caches or not placed.lines:
            return
        lines, indices = [*placed.lines.values()], [self.caches[index].index for index in placed.lines]
        is_written = [written and self.is_trained[index] for index in placed.lines]
        release_many(indices, torch.cat(lines), [len(lines_U) for lines_U in lines], is_written)

    def update(
        self, ids: Ids, gradients: Sequence[Tensor], optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> None:
        """One optimizer step; `steps` is the number of each table's step, from 1."""
        embedding.update(self.table_states(steps), ids_on(ids, self._device), gradients, optimizer)

    def table_states(self, steps: Mapping[str, int]) -> list[TableState]:
        """The kernels' view of each shard: weight, optimizer state, step. `release` marks changed rows on lines."""
        masks = [None if index in self.caches else mask for index, mask in enumerate(self.changed_rows)]
        numbers = [self._row_numbers(index) for index in range(len(self.weights))]
        return [
            TableState(
                weight, tuple(state.values()), steps[module.table.name], module.rounding_key, is_trained, mask, rows_L
            )
            for weight, state, module, is_trained, mask, rows_L in zip(
                self.weights, self.optimizer_states, self._modules, self.is_trained, masks, numbers, strict=True
            )
        ]

    def _row_numbers(self, index: int) -> Tensor | None:
        """The row, or the id, of each line of a shard; None if rows are not on lines."""
        if index in self.growing:
            return self.growing[index].ids.key_of_L
        return self.caches[index].row_of_L if index in self.caches else None

    def sum_gradients(self, ids: Ids, gradients: Sequence[Tensor]) -> GradientSums:
        """Sum the gradients of each row."""
        return sum_gradients(self.weights, ids_on(ids, self._device), gradients)

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


def _fill(tensor: Tensor, value: float) -> None:
    """Fill a new tensor, on huge pages."""
    use_huge_pages(tensor)
    tensor.fill_(value)


@torch.no_grad()
def _fill_weight(weight_ED: Tensor, module: TableWeights, shard: TableShard, order: RowOrder) -> Tensor:
    """Copy a shard's part of the table's weight, or its initial rows if the weight is on the meta device."""
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
