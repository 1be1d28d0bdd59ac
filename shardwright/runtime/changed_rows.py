"""Which table rows differ from a checkpoint: recorded by updates, for increments and publications."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from shardwright.embeddings import full_tables
from shardwright.embeddings.exchange import ShardedTables
from shardwright.embeddings.growing_rows import GrowingRows
from shardwright.layers.embedding import find_tables

MIN_REMOVALS = 1 << 16  # ids of ended rows that are kept for each saver and shard, or as many as the shard has rows
NO_REMOVALS = (torch.empty(0, dtype=torch.int64),)


class ChangedRows:
    """The changed table rows of a job, for several savers: each writes the rows changed since its last checkpoint."""

    def __init__(self) -> None:
        self.lineage = ""  # id of consecutive states of this job; a new one after a load
        # By saver, while it exists: changes not yet written that other savers have cleared.
        self._missed_rows = WeakKeyDictionary[object, list[Tensor]]()
        self._missed_removals = WeakKeyDictionary[object, list[Tensor]]()  # by growing shard, ids whose rows have ended
        self._lacking = WeakSet[object]()  # savers for which too many rows have ended: they need a full checkpoint
        self.begin_lineage()

    def begin_lineage(self) -> None:
        """Start a new lineage: the next checkpoint does not continue the last one, and must be full."""
        self.lineage = secrets.token_hex(8)

    def has_all_removals(self, saver: object, model: nn.Module) -> bool:
        """Whether this rank knows all rows of tables that grow which have ended since this saver's last checkpoint."""
        self._take_removals(model)
        return saver not in self._lacking

    def _take_removals(self, model: nn.Module) -> None:
        """Add the ids whose rows have ended since the last call to those of each saver; of too many, none."""
        shards = list(growing_shards(model))
        removed = [rows.ids.take_removed() for rows in shards]
        have_lost = [rows.ids.has_lost_removed() for rows in shards]  # all: a call clears its flag
        most = [max(rows.ids.rows, MIN_REMOVALS) for rows in shards]
        for saver, own in self._missed_removals.items():
            own[:] = [torch.cat(pair).unique() for pair in zip(own, removed, strict=True)]
            if any(have_lost) or any(len(ids) > limit for ids, limit in zip(own, most, strict=True)):
                own[:] = [ids[:0] for ids in own]
                self._lacking.add(saver)

    @contextmanager
    def select_rows_for(self, saver: object, model: nn.Module) -> Iterator[None]:
        """A context in which the model's masks are the rows changed since this saver's last checkpoint.

        At exit the masks are cleared; other savers keep the changes that they have not written.
        """
        masks = list(changed_row_masks(model))
        for other_masks in (missed for other, missed in self._missed_rows.items() if other is not saver):
            for other_mask, mask in zip(other_masks, masks, strict=True):
                other_mask |= mask
        for mask, missed in zip(masks, self._missed_rows.get(saver, ()), strict=False):
            mask |= missed
        self._take_removals(model)
        shards = list(growing_shards(model))
        for rows, own in zip(shards, self._missed_removals.get(saver, NO_REMOVALS * len(shards)), strict=True):
            rows.removed = own
        yield
        track_changes(model)
        self._missed_rows[saver] = [torch.zeros_like(mask) for mask in changed_row_masks(model)]
        self._missed_removals[saver] = [rows.removed[:0] for rows in shards]
        self._lacking.discard(saver)


def track_changes(model: nn.Module) -> None:
    """Record which table rows are updated from now on; clears earlier records."""
    for _, bags in find_tables(model):
        if bags.optimizer is None:  # only the fused update records rows
            continue
        if isinstance(bags.exchange, ShardedTables):
            full_tables.track_changes(bags.exchange)
            continue
        for table in bags.tables:
            module = bags.holder(table.name)
            module.changed_rows = torch.zeros(table.rows, dtype=torch.bool, device=module.weight.device)


def growing_shards(model: nn.Module) -> Iterator[GrowingRows]:
    """The shards of tables that grow on this rank."""
    for _, bags in find_tables(model):
        if isinstance(bags.exchange, ShardedTables):
            yield from (rows for local in bags.exchange.local_shards for rows in local.growing.values())


def changed_row_masks(model: nn.Module) -> Iterator[Tensor]:
    """The masks of changed rows of all tables and table shards on this rank; writable."""
    for _, bags in find_tables(model):
        table_masks = [bags.holder(table.name).changed_rows for table in bags.tables]
        shard_masks = (
            [mask for shards in bags.exchange.local_shards for mask in shards.changed_rows]
            if isinstance(bags.exchange, ShardedTables)
            else []
        )
        yield from (mask for mask in (*table_masks, *shard_masks) if mask is not None)
