"""Tables whose rows are owned by table servers: what a rank does in a step. Their `Exchange`, beside the collectives.

Rows that a rank has read stay in copies (copies/row_copies.py), each valid for as many batches as its bound allows;
with bounds of 0 every copy is validated in every batch, and its row sent if another rank has changed it: training is
exact. Phases:
    copies      find lines for the distinct rows of a batch
    fetch       one call to each server: rows and versions of copies to validate; the reply has leases, and the rows
                that must be sent. It waits at the server until the updates of all ranks of the step before are there
    update      updates are pushed to each server, which nobody waits for; then copies, from own gradients
    flush       before state is read: all updates are pushed, and copies are dropped

Shape legend: U distinct rows of a batch, R those of other owners, V rows with updates, D columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.comm.pending import Pending
from shardwright.comm.transport.arrays import Message
from shardwright.comm.transport.servers import Connector, NoServers
from shardwright.embeddings.copies.bounded_group import BoundedGroup, CopiedBatch, CopyCounts
from shardwright.embeddings.copies.bounded_tables import find_copies_of
from shardwright.embeddings.copies.updates import RowUpdates
from shardwright.embeddings.layout import Layout
from shardwright.embeddings.outgoing import DistinctRows
from shardwright.embeddings.service import calls
from shardwright.embeddings.service.owned_rows import GroupRead, GroupSpec, OwnedSpec, Push
from shardwright.layers.embedding import EmbeddingTables
from shardwright.spec.optimizer import SparseOptimizer


class ServedTables:
    """The groups of tables on servers; there may be none."""

    def __init__(self, bags: EmbeddingTables, layout: Layout, servers: Connector | None) -> None:
        self.bags, self._num_ranks = bags, len(layout.table_groups)
        self.servers: Connector = servers or NoServers()
        self.connections = [self.servers.connect(server) for server, _ in enumerate(layout.served)]
        keys = {group.bounded for groups in layout.served for group in groups}
        self.groups = [BoundedGroup(bags, layout, key) for key in sorted(keys)]
        self.table_names = frozenset(table.name for group in self.groups for table in group.tables)
        exchanged = sorted(layout.row_exchange_tables)
        # By group, its tables among those whose rows are exchanged.
        self._positions = [[exchanged.index(table) for table in group.numbers.first_row] for group in self.groups]
        self._round = 0
        self._unconfirmed: list[Pending[Message]] = []  # pushes

    def open(self) -> None:
        """Open the run on each server."""
        pending = [
            connection.call(calls.open_call(self._owned_spec(server)))
            for server, connection in enumerate(self.connections)
        ]
        for reply in pending:
            reply.wait()

    def _owned_spec(self, server: int) -> OwnedSpec:
        groups = tuple(
            GroupSpec(
                group.names,
                group.numbers.num_rows_of(server),
                group.dim,
                group.tables[0].dtype,
                group.pull,
                self.bags.holder(group.tables[0].name).initial_state,
            )
            for group in self.groups
        )
        return OwnedSpec(server, self._num_ranks, self.optimizer, groups)

    def find_copies(self, distinct: DistinctRows, *, training: bool) -> list[CopiedBatch]:
        """Without training, all rows are requested; all updates must be pushed."""
        for group in self.groups if training else ():
            group.check_steps(self.bags.steps)  # equal on all ranks
        return find_copies_of(self.groups, self._positions, distinct, training=training)

    def find_rows(self, distinct: DistinctRows) -> list[CopiedBatch]:
        """All phases before the lookup, without training."""
        batches = self.find_copies(distinct, training=False)
        self.fetch(batches).wait()
        return batches

    def fetch(self, batches: Sequence[CopiedBatch]) -> Pending[None]:
        """One call to each server; the copies of the batch are renewed when its replies are waited for."""
        requests = [[*group.validation_requests(batch)] for group, batch in zip(self.groups, batches, strict=True)]
        replies = []
        for server, connection in enumerate(self.connections if batches else ()):
            reads = []
            for group, by_server in zip(self.groups, requests, strict=True):
                rows, versions, *_ = by_server[server]
                reads.append(GroupRead(group.numbers.local_rows(rows), versions))
            replies.append(connection.call(calls.read_call(self._round, reads)))

        def receive() -> None:
            by_server = [calls.parse_answer(reply.wait()) for reply in replies]
            self._confirm()
            for group, batch, of_group in zip(self.groups, batches, zip(*by_server, strict=True), strict=True):
                renewals, values = zip(*of_group, strict=True)
                group.receive_renewals(batch, torch.cat(renewals))
                batch.values_FX = torch.cat(values)

        return Pending(receive if batches else lambda: None)

    def _confirm(self) -> None:
        """Take the confirmations of earlier pushes; a read that was answered after them says that they are here."""
        for pending in self._unconfirmed:
            pending.wait()
        self._unconfirmed = []

    def read(self, batches: Sequence[CopiedBatch]) -> dict[int, Tensor]:
        """The rows of a batch by table, among those whose rows are exchanged."""
        rows_by_table: dict[int, Tensor] = {}
        for group, positions, batch in zip(self.groups, self._positions, batches, strict=True):
            assert batch.values_FX is not None
            rows_UD = group.read(batch, batch.values_FX, self.optimizer)
            rows_by_table |= zip(positions, rows_UD.split(group.numbers.counts(batch.rows_U)), strict=True)
        return rows_by_table

    def keep_gradients(self, batches: Sequence[CopiedBatch], sums: Sequence[Tensor]) -> None:
        """`sums`: of the gradients of rows, by table whose rows are exchanged."""
        for positions, batch in zip(self._positions, batches, strict=True):
            batch.grad_UD = torch.cat([sums[position] for position in positions])

    def update(
        self,
        batches: Sequence[CopiedBatch],
        optimizer: SparseOptimizer,
        steps: Mapping[str, int],
        used_rows: Sequence[Tensor] = (),
    ) -> None:
        """Push updates to the servers, and update copies from own gradients. `used_rows`: by table whose rows are
        exchanged, whether a feature with a gradient on some rank has read each row; empty: all."""
        if not batches:
            return
        for group, positions, batch in zip(self.groups, self._positions, batches, strict=True):
            if used_rows:
                group.update_only(batch, torch.cat([used_rows[position] for position in positions]).bool())
        by_group = []
        for group, batch in zip(self.groups, batches, strict=True):
            assert batch.grad_UD is not None and batch.copies is not None
            counts = [(rows, counts, uses) for _, _, rows, counts, uses in group.validation_requests(batch)]
            values = group.updates_to_push(batch, batch.grad_UD, optimizer)
            by_group.append(
                [RowUpdates(*part, *group.split_values(sums)) for part, sums in zip(counts, values, strict=True)]
            )
        self._push(by_group, optimizer, steps)
        for group, batch in zip(self.groups, batches, strict=True):
            assert batch.grad_UD is not None and batch.copies is not None
            grad_RD = batch.grad_UD.index_select(0, batch.other_R)
            group.copies.update(batch.copies, grad_RD, optimizer, group.max_step(steps))

    def _push(
        self,
        by_group: Sequence[Sequence[RowUpdates]],
        optimizer: SparseOptimizer,
        steps: Mapping[str, int],
        *,
        is_last: bool = False,
    ) -> None:
        """`by_group`: by server."""
        numbers, messages = tuple(group.max_step(steps) for group in self.groups), []
        for server, connection in enumerate(self.connections):
            updates = []
            for group, by_server in zip(self.groups, by_group, strict=True):
                pushed = by_server[server]
                updates.append(replace(pushed, rows_V=group.numbers.local_rows(pushed.rows_V)))
            push = Push(optimizer, numbers, tuple(updates), is_last)
            messages += [(connection, message) for message in calls.push_calls(self._round, push)]
        self._round += 1  # first: after an interrupt the updates of another batch must not be taken for parts of these
        self._unconfirmed += [connection.call(message) for connection, message in messages]

    def cancel(self) -> None:
        """End a batch whose step has failed."""
        for group in self.groups:
            group.copies.cancel()

    def flush(self) -> None:
        """Push all updates and drop all copies, between steps; wait until those of all ranks have been applied, and
        until what other ranks have written is there. All ranks call it."""
        if not self.groups:
            return
        by_group = []
        for group in self.groups:
            unpushed = group.copies.drop()
            owners = group.numbers.owners(unpushed.rows_V)
            sizes = torch.bincount(owners, minlength=len(self.connections)).tolist()
            by_group.append([unpushed.select(part) for part in owners.argsort(stable=True).split(sizes)])
        self._push(by_group, self.optimizer, self.bags.steps, is_last=True)
        self._confirm()
        none = torch.empty(0, dtype=torch.int64)
        call = calls.read_call(self._round, [GroupRead(none, none)] * len(self.groups))
        for pending in [connection.call(call) for connection in self.connections]:
            pending.wait()

    def counts(self) -> dict[str, CopyCounts]:
        """By group, named after its tables."""
        return {group.names: group.counts for group in self.groups}

    @property
    def optimizer(self) -> SparseOptimizer:
        assert self.bags.optimizer is not None
        return self.bags.optimizer
