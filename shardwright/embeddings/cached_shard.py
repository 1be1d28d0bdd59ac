"""Make the cache and the store of a table shard whose rows are on disk, or on table servers.

Shape legend: E rows of a shard, D its columns, U distinct rows, L lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shardwright.embeddings.cached_rows import CachedRows
from shardwright.embeddings.layout import TableShard
from shardwright.embeddings.row_order import RowOrder
from shardwright.embeddings.row_threads import RowThreads
from shardwright.embeddings.rows_folder import RowsFolder
from shardwright.embeddings.store import DiskStore, FillRows, PageReaders, RowStore
from shardwright.kernels import embedding
from shardwright.kernels.initial import CHUNK_ELEMENTS
from shardwright.kernels.native import use_huge_pages
from shardwright.layers.embedding import EmbeddingTables
from shardwright.spec.optimizer import state_shapes


class Stores(Protocol):
    """Makes the stores of a rank's shards."""

    def make_store(self, shard: TableShard, parts: Sequence[Tensor], fill: FillRows, rounding_key: int) -> RowStore:
        """An empty store for the rows of a shard; arguments as those of `DiskStore`."""
        ...


class DiskStores:
    """Stores below the folder for temporary files (TMPDIR), which share a queue of reads."""

    def __init__(self) -> None:
        self._folder, self._readers = RowsFolder(), PageReaders()

    def make_store(self, shard: TableShard, parts: Sequence[Tensor], fill: FillRows, rounding_key: int) -> RowStore:
        num_rows, folder = shard.rows[1] - shard.rows[0], self._folder.make_subfolder()
        return DiskStore(folder, num_rows, parts, fill, self._readers, rounding_key=rounding_key)


@dataclass(frozen=True, slots=True)
class Caches:
    """The lines of each shard of a table, by the table's index; other tables are in memory as a whole.

    `stores` have the rows without a line. Threads of this rank place batches and copy rows. `in_float32`: weights of 16
    bits are float32 on lines, and rounded when they are written to the store.
    """

    lines: Mapping[int, int]
    in_float32: bool = False
    stores: Stores = field(default_factory=DiskStores)
    threads: RowThreads = field(default_factory=RowThreads)


@torch.no_grad()
def make_cached_rows(bags: EmbeddingTables, shard: TableShard, order: RowOrder, caches: Caches) -> CachedRows:
    """Lines for some rows of a shard, and a store for all; rows have the table's values."""
    table = bags.tables[shard.table]
    module, num_lines = bags.holder(table.name), caches.lines[shard.table]
    shapes = state_shapes(bags.optimizer, num_lines, shard.dim) if bags.optimizer else {}
    dtype = embedding.vector_dtype(module.weight.dtype)
    is_rounded = caches.in_float32 and dtype != module.weight.dtype
    parts_L = [torch.empty(num_lines, shard.dim, dtype=dtype if is_rounded else module.weight.dtype)]
    parts_L += [torch.empty(shape, dtype=dtype) for shape in shapes.values()]
    for part in parts_L:
        use_huge_pages(part)
    (start, end), initial_rows = shard.rows, module.row_initializer()

    def fill(rows_U: Tensor, parts_U: Sequence[Tensor]) -> None:
        weight_UD = initial_rows(order.ids(start + rows_U))
        parts_U[0].copy_(torch.cat([weight_UD[:, a:b] for a, b in shard.cols], 1))
        for part_U in parts_U[1:]:
            part_U.fill_(module.initial_state)

    stored = [parts_L[0][:0].to(module.weight.dtype), *parts_L[1:]]
    store = caches.stores.make_store(shard, stored, fill, module.rounding_key)
    if not module.weight.is_meta:
        states = bags.state(table.name) if bags.steps[table.name] else {}
        step = max(1, CHUNK_ELEMENTS // shard.dim)
        for low in range(0, end - start, step):
            rows_U = torch.arange(low, min(low + step, end - start))
            ids_U = order.ids(start + rows_U)
            parts_U = store.empty_parts(len(rows_U))
            for name, part_U in zip(("weight", *shapes), parts_U, strict=True):
                if name != "weight" and not states:
                    part_U.fill_(module.initial_state)
                    continue
                values = (module.weight if name == "weight" else states[name])[ids_U]
                part_U.copy_(torch.cat([values[:, a:b] for a, b in shard.cols], 1) if values.dim() == 2 else values)
            store.write(rows_U, torch.arange(len(rows_U)), parts_U)
    return CachedRows(parts_L, store, caches.threads, table.name)
