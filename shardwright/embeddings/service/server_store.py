"""Rows on table servers of shards that this rank owns (`RowStore`): those that have no line of a cache.

Each server has an equal part of the rows of every shard. A rank draws the initial values of its rows, so that a server
holds only rows that were written. Writes wait here for the next read and travel with it: one call a batch to each
server. A read is sent when the server has confirmed all earlier writes, so that a server that was killed and started
again with its journal has what it reads.

Shape legend: U distinct rows, L lines, E rows of a shard, W rows that are written, R rows that are read, X values of a
row and its optimizer state.
"""

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.transport.arrays import Message
from shardwright.comm.transport.servers import Connector
from shardwright.embeddings.layout import Layout, TableShard
from shardwright.embeddings.service import calls
from shardwright.embeddings.service.owned_rows import OwnedSpec
from shardwright.embeddings.service.shard_stores import StoreSpec, Swap
from shardwright.embeddings.store import FillRows, fill_lines, note_nonfinite
from shardwright.layers.embedding import EmbeddingTables
from shardwright.rectangle import CHUNK_BYTES
from shardwright.spec.optimizer import SparseOptimizer, state_shapes


@dataclass(frozen=True, slots=True)
class TransferredBytes:
    """Of rows, since the store began."""

    bytes_read: int
    bytes_written: int


@dataclass(slots=True, eq=False)
class _Moves:
    """Rows of a store to write, with their values, and to read."""

    written_W: Tensor
    values_WX: Tensor
    read_R: Tensor


class ServerStores:
    """The stores of this rank, and the calls that they share."""

    def __init__(
        self, bags: EmbeddingTables, layout: Layout, tables: Collection[int], connector: Connector, rank: int
    ) -> None:
        """`tables`: indices of those whose rows are on servers; all ranks have the same."""
        self.connector, self._rank = connector, rank
        self._optimizer, self._num_ranks = bags.optimizer, len(layout.table_groups)
        self._connections = [connector.connect(server) for server, _ in enumerate(layout.served)]
        shards = [
            (rank, shard)
            for rank, groups in enumerate(layout.table_groups)
            for group in groups
            for shard in group.shards
            if shard.table in tables
        ]
        self._numbers = {each: number for number, each in enumerate(shards)}
        self._specs = [(bags.tables[shard.table], shard) for _, shard in shards]
        self._written: dict[ServerStore, tuple[Tensor, Tensor]] = {}  # rows that wait to be sent, and their values
        self._lock = RLock()

    def open(self) -> None:
        """Open the run on each server."""
        pending = [
            connection.call(calls.open_call(self._spec(server))) for server, connection in enumerate(self._connections)
        ]
        for reply in pending:
            reply.wait()

    def _spec(self, server: int) -> OwnedSpec:
        stores = []
        for table, shard in self._specs:
            start, end = row_ends(shard, len(self._connections))[server : server + 2]
            stores.append(StoreSpec(table.name, end - start, _width(self._optimizer, shard.dim), table.dtype))
        assert self._optimizer is not None
        return OwnedSpec(server, self._num_ranks, self._optimizer, (), tuple(stores))

    def make_store(
        self, shard: TableShard, parts: Sequence[Tensor], fill: FillRows, rounding_key: int
    ) -> "ServerStore":
        """The store of a shard of this rank; weights of 16 bits, which need a rounding key, are refused before."""
        number = self._numbers[self._rank, shard]
        return ServerStore(self, number, row_ends(shard, len(self._connections)), parts, fill)

    def write(self, store: "ServerStore", rows_U: Tensor, values_UX: Tensor) -> None:
        """Send rows with the next read, or now if there are many, or earlier ones of this store."""
        with self._lock:
            if store in self._written:
                self._swap({})
            self._written[store] = rows_U, values_UX
            if sum(values.nbytes for _, values in self._written.values()) > CHUNK_BYTES:
                self._swap({})

    def flush(self) -> None:
        """Send what waits; all earlier writes are confirmed then."""
        with self._lock:
            self._swap({})

    def read_many(
        self,
        stores: Sequence["ServerStore"],
        rows_U: Tensor,
        lines_U: Tensor,
        counts: Sequence[int],
        parts_L: Sequence[Sequence[Tensor]],
    ) -> None:
        """Copy rows to lines, as `read` of several stores, so many rows of each: one call to each server."""
        by_store, wanted = [*zip(rows_U.split(list(counts)), lines_U.split(list(counts)), parts_L, strict=True)], {}
        for store, (rows, lines, parts) in zip(stores, by_store, strict=True):
            is_written = store.is_written_E[rows]
            if is_written.any():
                wanted[store] = rows[is_written], lines[is_written], parts
            fill_lines(store.fill, rows[~is_written], lines[~is_written], parts)
        if not wanted:
            return
        with self._lock:
            values = self._swap({store: rows for store, (rows, _, _) in wanted.items()})
        for store, (_, lines, parts) in wanted.items():
            store.split(values[store], lines, parts)

    def _swap(self, wanted: Mapping["ServerStore", Tensor]) -> dict["ServerStore", Tensor]:
        """Send the rows that wait and read others; the values of these, by store."""
        moves = [(store, self._moves(store, wanted)) for store in dict.fromkeys([*self._written, *wanted])]
        self._written = {}
        pending, selections = [], []
        for server, connection in enumerate(self._connections):
            swaps, chosen = [], []
            for store, each in moves:
                (start, end), own = store.ends[server : server + 2], []
                for rows in (each.written_W, each.read_R):
                    own.append(((rows >= start) & (rows < end)).nonzero().flatten())
                written, read = each.written_W[own[0]] - start, each.read_R[own[1]] - start
                if len(written) or len(read):
                    swaps.append(Swap(store.number, written, each.values_WX[own[0]], read))
                    chosen.append((store, own[1]))
            if swaps:
                pending.append(connection.call(calls.swap_call(swaps)))
                selections.append(chosen)
        values = {store: store.empty_values(len(rows)) for store, rows in wanted.items()}
        for reply, chosen in zip(pending, selections, strict=True):
            for (store, own), array in zip(chosen, reply.wait().arrays, strict=True):
                if len(own):
                    values[store][own] = calls.tensor(array)
        for store, each in moves:
            store.count(each.written_W, each.read_R)
        return values

    def _moves(self, store: "ServerStore", wanted: Mapping["ServerStore", Tensor]) -> _Moves:
        none = torch.empty(0, dtype=torch.int64)
        rows, values = self._written.get(store, (none, store.empty_values(0)))
        return _Moves(rows, values, wanted.get(store, none))


class ServerStore:
    """A `RowStore` on table servers. `ends`: where the rows of each server begin, and the number of rows."""

    def __init__(
        self, stores: ServerStores, number: int, ends: tuple[int, ...], parts: Sequence[Tensor], fill: FillRows
    ) -> None:
        self.readers, self.number, self.ends, self.num_rows, self.fill = stores, number, ends, ends[-1], fill
        self._parts = [part[:0] for part in parts]
        self._widths = [prod(part.shape[1:]) for part in parts]
        self.is_written_E = torch.zeros(self.num_rows, dtype=torch.bool)
        self.nonfinite_rows: set[int] = set()
        self._num_read = self._num_written = 0

    def empty_parts(self, num: int) -> list[Tensor]:
        return [part.new_empty(num, *part.shape[1:]) for part in self._parts]

    def empty_values(self, num: int) -> Tensor:
        """(num, X)"""
        return self._parts[0].new_empty(num, sum(self._widths))

    def read(self, rows_U: Tensor, lines_U: Tensor, parts_L: Sequence[Tensor]) -> None:
        self.readers.read_many([self], rows_U, lines_U, [len(rows_U)], [parts_L])

    def write(self, rows_U: Tensor, lines_U: Tensor, parts_L: Sequence[Tensor]) -> None:
        step = max(1, CHUNK_BYTES // self.empty_values(1).nbytes)
        for rows, lines in zip(rows_U.split(step), lines_U.split(step), strict=True):
            values = [part_L[lines].view(len(rows), width) for part_L, width in zip(parts_L, self._widths, strict=True)]
            note_nonfinite(self.nonfinite_rows, rows, values[0])
            self.readers.write(self, rows, torch.cat(values, 1))
            self.is_written_E[rows] = True

    def split(self, values_UX: Tensor, lines_U: Tensor, parts_L: Sequence[Tensor]) -> None:
        """Copy values of rows to lines."""
        for part_L, values in zip(parts_L, values_UX.split(self._widths, 1), strict=True):
            part_L[lines_U] = values.reshape(len(values), *part_L.shape[1:])

    def count(self, written_W: Tensor, read_R: Tensor) -> None:
        self._num_written, self._num_read = self._num_written + len(written_W), self._num_read + len(read_R)

    @contextmanager
    def snapshot(self) -> Iterator["ServerSnapshot"]:
        self.readers.flush()
        name, is_written_E = secrets.token_hex(8), self.is_written_E.clone()
        snapshot = ServerSnapshot(self, name, is_written_E)
        servers = [server for server, (start, end) in enumerate(pairwise(self.ends)) if is_written_E[start:end].any()]
        for server in servers:
            snapshot.request("keep", server)
        try:
            yield snapshot
        finally:
            for server in servers:
                snapshot.request("drop", server)

    @property
    def numbers(self) -> TransferredBytes:
        row_bytes = self.empty_values(1).nbytes
        return TransferredBytes(self._num_read * row_bytes, self._num_written * row_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class ServerSnapshot:
    """The rows of a store as they were; servers have a copy under this name."""

    store: ServerStore
    name: str
    is_written_E: Tensor

    def read(self, first: int, parts_U: Sequence[Tensor]) -> None:
        """Rows from `first` on, as many as the tensors have."""
        store, end = self.store, first + len(parts_U[0])
        for server, (start, stop) in enumerate(pairwise(store.ends)):
            low, high = max(first, start), min(end, stop)
            if low < high and self.is_written_E[low:high].any():
                reply = self.request("read_kept", server, first=low - start, num=high - low)
                store.split(calls.tensor(reply.arrays[0]), torch.arange(low - first, high - first), parts_U)
        never = (~self.is_written_E[first:end]).nonzero().flatten()
        fill_lines(store.fill, first + never, never, parts_U)

    def request(self, call: str, server: int, **numbers: int) -> Message:
        header: dict[str, Any] = {"call": call, "store": self.store.number, "snapshot": self.name, **numbers}
        return self.store.readers.connector.request(server, Message(header))


def row_ends(shard: TableShard, num_servers: int) -> tuple[int, ...]:
    """Where the rows of each server begin, and the number of rows."""
    num = shard.rows[1] - shard.rows[0]
    return tuple(num * server // num_servers for server in range(num_servers + 1))


def _width(optimizer: SparseOptimizer | None, dim: int) -> int:
    state = state_shapes(optimizer, 1, dim) if optimizer is not None else {}
    return dim + sum(map(prod, state.values()))
