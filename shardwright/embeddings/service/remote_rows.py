"""Rows on a table server as a store (`StoredRows`), and the rectangles of tables on servers.

State is read and written between steps, after a flush. Each rank reads and writes its share of the rows of each server.

Shape legend: R rows, C columns.
"""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from shardwright.comm.transport.arrays import Message
from shardwright.comm.transport.servers import Connector
from shardwright.embeddings.layout import Layout
from shardwright.embeddings.row_order import RowOrder, rows_in_order
from shardwright.embeddings.service import calls
from shardwright.embeddings.service.owned_rows import WEIGHT, Place
from shardwright.embeddings.service.served_tables import ServedTables
from shardwright.kernels.finite import first_nonfinite_row
from shardwright.layers.embedding import EmbeddingTables
from shardwright.layers.table_weights import torch_state_dtype
from shardwright.rectangle import CHUNK_BYTES, IndexRange, Rectangle
from shardwright.spec.optimizer import state_shapes


@dataclass(frozen=True, slots=True)
class RemotePart:
    """Some rows of a part (weights, or an optimizer state) of a group on a server, numbered by the server."""

    server: int
    place: Place
    rows: IndexRange
    width: int
    dtype: torch.dtype


class RemoteRows:
    """A `StoredRows` on a server."""

    def __init__(self, servers: Connector, part: RemotePart, holder: str = "") -> None:
        """`holder`: of the part's snapshot."""
        self._servers, self._part, self._holder = servers, part, holder
        self.dtype = part.dtype
        self._step = max(1, CHUNK_BYTES // (part.width * part.dtype.itemsize))  # rows of a message

    def read(self, first: int, num: int) -> Tensor:
        return self.select(torch.arange(first, first + num))

    def select(self, indices: Tensor) -> Tensor:
        parts = [torch.empty(0, self._part.width, dtype=self.dtype)]
        for rows_R in indices.split(self._step):
            reply = self._request(calls.get_call(self._part.place, rows_R + self._part.rows[0]))
            parts.append(calls.tensor(reply.arrays[0]))
        return torch.cat(parts)

    def write(self, indices: Tensor, columns: IndexRange, values_RC: Tensor) -> None:
        for rows_R, values in zip(indices.split(self._step), values_RC.split(self._step), strict=True):
            rows = rows_R + self._part.rows[0]
            self._request(calls.put_call(self._part.place, rows, columns, values.to(self.dtype)))

    def draw(self, ids: Tensor, seed: int, bound: float) -> None:
        """Give all rows the initial values of their ids."""
        first, end = self._part.rows
        for rows_R, ids_R in zip(torch.arange(first, end).split(self._step), ids.long().split(self._step), strict=True):
            self._request(calls.draw_call(self._part.place.group, rows_R, ids_R, seed, bound))

    def nonfinite_row(self) -> int | None:
        num = self._part.rows[1] - self._part.rows[0]
        for first in range(0, num, self._step):
            index = first_nonfinite_row(self.read(first, min(self._step, num - first)))
            if index is not None:
                return first + index
        return None

    def snapshot(self) -> "RemoteRows":
        holder = secrets.token_hex(8)
        reply = self._request(Message({"call": "snapshot", "holder": holder}))
        place = replace(self._part.place, snapshot=reply.header["snapshot"])
        return RemoteRows(self._servers, replace(self._part, place=place), holder)

    def close(self) -> None:
        """Release a snapshot."""
        if self._holder:
            call = {"call": "release", "holder": self._holder, "snapshot": self._part.place.snapshot}
            self._request(Message(call))

    def _request(self, message: Message) -> Message:
        return self._servers.request(self._part.server, message)


def table_rectangles(
    served: ServedTables, layout: Layout, orders: Sequence[RowOrder], share: tuple[int, int]
) -> Iterator[Rectangle]:
    """The rows of tables on servers that this rank reads and writes, by the names of `full_tables.meta_state`.
    `share`: rank and number of ranks, or (0, 1) for all rows."""
    rank, num_ranks = share
    for server, groups in enumerate(layout.served):
        by_key = {group.bounded: group for group in groups}
        for number, group in enumerate(served.groups):
            first = 0
            for shard in by_key[group.key].shards if group.key in by_key else ():
                table, num = served.bags.tables[shard.table], shard.rows[1] - shard.rows[0]
                low, high = num * rank // num_ranks, num * (rank + 1) // num_ranks
                rows = (shard.rows[0] + low, shard.rows[0] + high)
                ids = rows_in_order(orders[shard.table], rows)
                shapes = {WEIGHT: (high - low, table.dim)}
                shapes |= state_shapes(served.optimizer, high - low, table.dim)
                for part, shape in shapes.items() if high > low else ():
                    dtype = getattr(torch, table.dtype) if part == WEIGHT else torch_state_dtype(table)
                    place = RemotePart(server, Place(number, part), (first + low, first + high), prod(shape[1:]), dtype)
                    stored = RemoteRows(served.servers, place)
                    values = torch.empty(shape, dtype=dtype, device="meta")
                    yield Rectangle(
                        f"{table.name}.{part}",
                        (table.rows, *shape[1:]),
                        values,
                        ids,
                        stored=stored,
                    )
                first += num


@torch.no_grad()
def send_initial_rows(rectangles: Iterable[Rectangle], bags: EmbeddingTables) -> None:
    """Write the values that tables have before they are moved to servers; servers draw those of new tables."""
    for rect in rectangles:
        table, _, part = rect.name.rpartition(".")
        module, stored = bags.holder(table), rect.stored
        ids = torch.arange(*rect.rows) if isinstance(rect.rows, tuple) else rect.rows.long()
        if part == WEIGHT and module.weight.is_meta:
            assert isinstance(stored, RemoteRows)
            stored.draw(ids, *module.initial_numbers())
        elif part == WEIGHT or bags.steps[table]:  # servers begin with the initial optimizer state
            assert stored is not None
            values = module.weight if part == WEIGHT else bags.state(table)[part]
            step = max(1, CHUNK_BYTES // max(1, rect.values[:1].nbytes))
            for indices in torch.arange(rect.num_rows).split(step):
                values_RC = values[ids[indices]].view(len(indices), -1)
                stored.write(indices, (0, values_RC.shape[1]), values_RC)
