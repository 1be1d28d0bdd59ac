"""Tables in host memory whose rows in use are on lines of a cache in GPU memory: the `Exchange` of one process.

The modules of the tables keep all rows and their optimizer states, in page-locked memory; a line is a row and its
optimizer state. For each batch a thread finds lines for the distinct rows (kernels/cache_index.py, on the CPU) and
issues kernels, on a stream of their own, that copy evicted lines to host memory and missing rows to lines. Copies for
the next batch run beside the step of this one: they use lines that were released before it began, and start after the
update that released them; the lookup starts after the copies.

Shape legend: N ids, U distinct rows, M moved rows, E rows of a table, L lines.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.pending import Pending, ready
from shardwright.comm.transfer import CopyStream
from shardwright.embeddings.not_copied import NotCopied
from shardwright.embeddings.row_threads import RowThreads
from shardwright.errors import UserError
from shardwright.jagged import Jagged, Vectors, with_id_bounds
from shardwright.kernels import embedding
from shardwright.kernels.arguments import IdOutOfRange, Ids, TableState
from shardwright.kernels.buffers import BufferPool
from shardwright.kernels.cache_index import (
    BatchLines,
    BatchRows,
    CacheCounts,
    CacheIndex,
    announce_many,
    place_rows,
    release_many,
)
from shardwright.kernels.cuda_copies import to_device
from shardwright.kernels.dedup import unique_rows
from shardwright.kernels.native import lengths_to_offsets
from shardwright.kernels.row_swaps import RowSwaps, SwappedTable
from shardwright.layers.embedding import EmbeddingTables
from shardwright.layers.local_exchange import LocalBatch, LocalExchange, table_state, update_used
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.row_cache import HALF_LIFE_BATCHES

NUM_THREADS = 8  # of the kernels that find lines: the step itself needs few


@dataclass(slots=True, eq=False)
class BatchOnLines:
    """A batch, from `exchange_ids` to `release`: ids in host memory; once placed, the same ids on the GPU, with lines
    in place of rows where a table has a cache."""

    ids: Jagged
    rows: BatchRows | None = None  # once they are announced to the caches
    on_lines: Jagged | None = None
    placed: BatchLines | None = None
    micro_batches: tuple["BatchOnLines", ...] = ()


class HostTables(NotCopied):
    """`lines`: by index of a table, its number of lines; other tables are on the device."""

    def __init__(self, bags: EmbeddingTables, lines: Mapping[int, int], device: torch.device) -> None:
        self._bags, self._local = bags, LocalExchange(bags)
        self._device, self._buffers = device, BufferPool()
        cached = sorted(lines)
        for index, table in enumerate(bags.tables):
            module = bags.holder(table.name)
            if index not in lines and module.weight.is_meta:
                module.to_empty(device=device)
                module.reset()
        self._tables = [bags.tables[index] for index in cached]
        self._indices = [
            CacheIndex(lines[index], HALF_LIFE_BATCHES, bags.tables[index].name, adapts=True) for index in cached
        ]
        self._swapped = [self._swapped_table(bags.tables[index].name, lines[index]) for index in cached]
        self._by_name = dict(zip((table.name for table in self._tables), self._swapped, strict=True))
        self._swaps = RowSwaps(self._swapped)
        self._stream = CopyStream(device)
        self._threads = RowThreads(NUM_THREADS)
        self._ready = self._stream.event()  # after it, copies may use all lines that no batch in flight uses
        for each in (bags, *(child for child in bags.children() if isinstance(child, EmbeddingTables))):
            if each is not bags and isinstance(each.exchange, LocalExchange):  # a member of an EmbeddingBagsDict
                each.exchange.owner = self
            each.register_state_dict_pre_hook(_write_back)
            each.register_load_state_dict_pre_hook(_write_back)
            each.register_load_state_dict_post_hook(_reload)

    @torch.no_grad()
    def _swapped_table(self, table: str, num_lines: int) -> SwappedTable:
        module = self._bags.holder(table)
        module.keep_on_cpu()
        parts_E = [module.weight.data, *module.buffers()]
        parts_L = [part.new_empty(num_lines, *part.shape[1:], device=self._device) for part in parts_E]
        return SwappedTable(parts_E, parts_L, torch.full((num_lines,), -1, device=self._device))

    def cache_counts(self) -> dict[str, CacheCounts]:
        self._threads.wait()
        return {table.name: index.counts for table, index in zip(self._tables, self._indices, strict=True)}

    def forward(self, features: Jagged) -> Vectors:
        if self._bags.optimizer is not None and torch.is_grad_enabled():
            raise UserError(
                "tables in host memory train only in job.run; to look up without training, use torch.no_grad()"
            )
        return self.lookup(BatchOnLines(self._bags.read(features).to("cpu")))

    def request(self, ids: Jagged, weight: float, stop: int = 0) -> LocalBatch:
        return self._local.request(ids, weight, stop)

    def announce(self, request: LocalBatch) -> Pending[LocalBatch]:
        return self._local.announce(request)

    def announce_end(self) -> Pending[None]:
        return self._local.announce_end()

    def exchange_ids(self, announced: LocalBatch) -> Pending[BatchOnLines]:
        return ready(BatchOnLines(announced.ids))

    def expect(self, batch: BatchOnLines) -> None:
        """Announce the rows of a batch to the caches."""

        distinct_rows = self._threads.before(lambda: self._distinct_rows(batch.ids))

        def announce() -> None:
            rows = distinct_rows()
            announce_many(self._indices, rows.rows_U, rows.counts)
            batch.rows = rows

        self._threads.submit(announce)

    def forget(self) -> None:
        """Forget announced batches that will not be prefetched."""
        for index in self._indices:
            self._threads.defer(index.forget)

    def prefetch(self, batch: BatchOnLines) -> Pending[BatchOnLines]:
        """Find lines for the rows of a batch, and copy those that are missing."""
        copied = self._threads.submit(lambda: self._place(batch))

        def wait() -> BatchOnLines:
            with self._bags.naming_errors():
                end = copied.wait()
            on_lines = batch.on_lines
            assert on_lines is not None
            self._stream.wait(end, [x for x in (on_lines.values, on_lines.lengths, on_lines.weights) if x is not None])
            return batch

        return Pending(wait)

    @torch.no_grad()
    def _place(self, batch: BatchOnLines) -> Any:
        """Place the rows on lines, and issue copies; returns an event after them."""
        announced = batch.rows is not None
        rows = self._distinct_rows(batch.ids) if batch.rows is None else batch.rows
        batch.placed = placed = place_rows(self._indices, rows, announced=announced)
        own = self._cached_ids(batch.ids)[2]
        with self._stream.after(self._ready):
            values = placed.lines_N.int()
            if own is not None:
                values = batch.ids.values.index_put((own,), values.to(batch.ids.values.dtype))
            on_lines = replace(batch.ids, values=values).map(lambda x: to_device(x, self._device))
            batch.on_lines = self._with_line_bounds(on_lines, batch.ids.id_bounds)
            for moves in (placed.moves[: placed.num_first], placed.moves[placed.num_first :]):
                self._swaps.run(moves)
            return self._stream.event()

    def _with_line_bounds(self, on_lines: Jagged, bounds_of_rows: tuple[int, ...] | None) -> Jagged:
        """All lines are below the number of lines; ids of tables without a cache are as they were."""
        if bounds_of_rows is None:
            return on_lines
        tables = [self._by_name.get(feature.table) for feature in self._bags.features]
        return with_id_bounds(
            on_lines,
            tuple(
                bound if table is None else len(table.row_of_L)
                for bound, table in zip(bounds_of_rows, tables, strict=True)
            ),
        )

    def _distinct_rows(self, ids: Jagged) -> BatchRows:
        cached, chosen, _ = self._cached_ids(ids)
        try:
            return BatchRows(*unique_rows(cached, [table.rows for table in self._tables]))
        except IdOutOfRange as error:
            raise IdOutOfRange(chosen[error.feature], error.id) from None

    def _cached_ids(self, ids: Jagged) -> tuple[Ids, list[int], Tensor | None]:
        """The ids of tables with a cache; their features; where they are among all ids, None if there are no others."""
        bags, numbers = self._bags, {table.name: number for number, table in enumerate(self._tables)}
        chosen = [i for i, feature in enumerate(bags.features) if feature.table in numbers]
        values, lengths, own_N = ids.values, ids.lengths, None
        if len(chosen) < len(bags.features):
            of_feature_N = torch.arange(len(bags.features)).repeat_interleave(lengths.sum(1))
            own_N = torch.isin(of_feature_N, torch.tensor(chosen))
            values, lengths = values[own_N], lengths[chosen].contiguous()
        tables = [numbers[bags.features[i].table] for i in chosen]
        return Ids(values, lengths_to_offsets(lengths), None, tables, [0] * len(tables)), chosen, own_N

    def lookup(self, batch: BatchOnLines, *, training: bool = False) -> Vectors:
        is_placed = batch.on_lines is not None
        if not is_placed:
            self.prefetch(batch).wait()
        assert batch.on_lines is not None
        weights = [self._weight(table.name) for table in self._bags.tables]
        try:
            with self._bags.naming_errors():
                ids = self._bags.kernel_ids(batch.on_lines)
                pooled, *sequences = embedding.lookup_into(self._buffers, weights, ids)
        finally:
            if not is_placed and not training:
                self.release(batch, written=False)
        return self._bags.vectors(pooled, sequences)

    def _weight(self, table: str) -> Tensor:
        return self._by_name[table].parts_L[0] if table in self._by_name else self._bags.holder(table).weight

    def _table_state(self, table: str, step: int) -> TableState:
        if table not in self._by_name:
            return table_state(self._bags, table, step)
        module, (weight, *others) = self._bags.holder(table), self._by_name[table].parts_L
        row_of_L = self._by_name[table].row_of_L
        return TableState(weight, others, step, module.rounding_key, module.is_trained, row_numbers=row_of_L)

    def reduce_in_host(self, looked_up: Vectors) -> Pending[Vectors]:
        return ready(looked_up)

    def exchange_vectors(self, looked_up: Vectors) -> Pending[Vectors]:
        return ready(looked_up)

    def exchange_gradients(
        self, ids: BatchOnLines, gradients: Vectors, *, sum_replicas: bool = True
    ) -> Pending[Vectors]:
        return ready(gradients)

    def broadcast_in_host(self, ids: BatchOnLines, gradients: Vectors) -> Pending[Vectors]:
        return ready(gradients)

    def update(
        self, ids: BatchOnLines, gradients: Vectors, optimizer: SparseOptimizer, steps: Mapping[str, int]
    ) -> Collection[str]:
        assert ids.on_lines is not None
        tables = [self._table_state(table.name, steps[table.name]) for table in self._bags.tables]
        used = update_used(self._bags, ids.on_lines, gradients, optimizer, tables)
        used_tables = {feature.table for feature in self._bags.features if feature.name in used}
        self._end(ids, used_tables)
        return used

    def release(self, ids: BatchOnLines, *, written: bool) -> None:
        """End a batch's use of its lines, before the next batch is placed; `written`: an update has changed them."""
        self._end(ids, {table.name for table in self._tables} if written else set())

    def _end(self, ids: BatchOnLines, changed_tables: Collection[str]) -> None:
        event = self._stream.event()
        modules = [self._bags.holder(table.name) for table in self._tables]
        changes = [module.is_trained and module.table.name in changed_tables for module in modules]
        for batch in ids.micro_batches or (ids,):
            parts = () if batch.placed is None else batch.placed.rows.by_table()
            for module, rows_U, is_changed in zip(modules, parts, changes, strict=bool(parts)):
                if is_changed and module.changed_rows is not None:
                    module.changed_rows[rows_U] = True
            self._threads.defer(partial(self._release, batch, changes, event))

    def _release(self, batch: BatchOnLines, changes: Sequence[bool], event: torch.Event | None) -> None:
        """End a batch's use of its lines; by table, whether it has changed them; an event after that. The batch may
        not be placed yet when it is deferred: copies for it may still be running when a run ends early."""
        if (placed := batch.placed) is not None:
            release_many(self._indices, placed.lines_U, placed.rows.counts, changes)
        batch.on_lines = batch.placed = None
        self._ready = event

    def concat_micro_batches(
        self, micro_batches: Sequence[tuple[BatchOnLines, Vectors]], decay: float
    ) -> tuple[BatchOnLines, Vectors]:
        batches = tuple(batch for batch, _ in micro_batches)
        on_lines = [(batch.on_lines, gradients) for batch, gradients in micro_batches if batch.on_lines is not None]
        joined, gradients = self._local.concat_micro_batches(on_lines, decay)
        return BatchOnLines(batches[-1].ids, on_lines=joined, micro_batches=batches), gradients

    def write_back(self) -> None:
        """Copy all lines that were written to host memory."""
        self._run_alone(self._write_back)

    def reload(self) -> None:
        """Copy all rows that are on lines from host memory; tensors that were replaced are copied to those before."""
        for table, swapped in zip(self._tables, self._swapped, strict=True):
            module = self._bags.holder(table.name)
            for tensor, part_E in zip((module.weight, *module.states), swapped.parts_E, strict=True):
                if tensor.data_ptr() != part_E.data_ptr():
                    part_E.copy_(tensor.data)
                    tensor.data = part_E
        self._run_alone(self._reload)

    def _write_back(self) -> None:
        for number, index in enumerate(self._indices):
            lines, rows = index.written_lines(clear=True)
            numbers, none = torch.full_like(lines, number), torch.full_like(rows, -1)
            self._swaps.run(torch.stack([numbers, lines, none, rows], 1))

    def _reload(self) -> None:
        for number, index in enumerate(self._indices):
            index.written_lines(clear=True)
            lines, rows = index.full_lines()
            numbers, none = torch.full_like(lines, number), torch.full_like(rows, -1)
            self._swaps.run(torch.stack([numbers, lines, rows, none], 1))

    def _run_alone(self, run: Callable[[], None]) -> None:
        """Run copies after all others and after all updates so far, and wait for them."""
        end = self._stream.event()

        def run_on_stream() -> None:
            with self._stream.after(end):
                run()
            self._stream.synchronize()

        self._threads.run_alone(run_on_stream)


def _write_back(bags: Any, *_: Any) -> None:
    bags.exchange.write_back()


def _reload(bags: nn.Module, *_: Any) -> None:
    bags.exchange.reload()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
