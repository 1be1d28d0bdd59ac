"""Rows of which other ranks have copies (row_copies.py): what their owner keeps.

Shape legend: E rows, D columns, A rows to validate, V rows with updates, U distinct rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.embeddings.copies.row_copies import NO_VERSION, Lease
from shardwright.embeddings.copies.updates import RowUpdates, apply_updates, sum_by_row
from shardwright.errors import UserError
from shardwright.spec.optimizer import SparseOptimizer

MAX_VERSION = torch.iinfo(torch.int32).max
HISTOGRAM_BINS = 33  # number of updates that a copy misses: 0, 1, 2 to 3, 4 to 7, ...


class RowClocks:
    """Counts of each row its updates, one for each batch of a rank, and the uses that they come from."""

    def __init__(self, weight_ED: Tensor, state: Mapping[str, Tensor], lease: Lease) -> None:
        self.weight_ED, self.state, self._lease = weight_ED, state, lease
        self.version_E = torch.zeros(len(weight_ED), dtype=torch.int64)
        self.uses_E = torch.zeros(len(weight_ED), dtype=torch.int64)
        # By power of two, how many copies missed so many updates when they were validated.
        self.missed = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64)

    def renew(self, rows_A: Tensor, versions_A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which rows must be sent for this batch; the leases and versions of all."""
        now_A = self.version_E[rows_A]
        is_copied_A = versions_A != NO_VERSION
        missed_A = now_A - versions_A
        self.count_missed(now_A, versions_A)
        uses_A = uses_per_update(self.uses_E[rows_A], now_A)
        left_A = self._lease.num_batches(missed_A, uses_A)
        is_new_A = ~is_copied_A | (left_A < 0)
        leases_A = torch.where(is_new_A, self._lease.num_batches(torch.zeros_like(missed_A), uses_A), left_A)
        return is_new_A, leases_A, now_A

    def forget(self) -> None:
        """Count from 0, when there are no copies: a run goes on from a checkpoint as one that has loaded it."""
        self.version_E.zero_()
        self.uses_E.zero_()

    def count_missed(self, now_A: Tensor, versions_A: Tensor) -> None:
        missed_A = (now_A - versions_A)[versions_A != NO_VERSION]
        self.missed += torch.bincount(_bin(missed_A), minlength=HISTOGRAM_BINS)

    def apply(self, optimizer: SparseOptimizer, updates: Sequence[RowUpdates], step: int) -> Tensor:
        """One optimizer step from the updates of all ranks, added in the order of ranks; returns the rows."""
        summed, num_senders_U = sum_by_row(RowUpdates.concat(updates))
        # Updates of several ranks in one batch are one step, as in one process; those that a rank has kept are several.
        if len(summed.rows_V) and int((self.version_E[summed.rows_V] + summed.counts_V).max()) > MAX_VERSION:
            raise UserError(
                "a row has more than 2^31 updates since the last checkpoint or evaluation: save one earlier"
            )
        merged = replace(summed, counts_V=1 + summed.counts_V - num_senders_U)
        apply_updates(optimizer, self.weight_ED, self.state, merged, step)
        self.version_E[summed.rows_V] += summed.counts_V
        self.uses_E[summed.rows_V] += summed.uses_V
        return summed.rows_V


def uses_per_update(uses: Tensor, updates: Tensor) -> Tensor:
    """1 for a row without updates."""
    return (uses.double() / updates.clamp(min=1)).clamp(min=1)


def _bin(missed: Tensor) -> Tensor:
    """The bin of a number of missed updates."""
    return torch.where(missed > 0, missed.clamp(min=1).log2().floor().long() + 1, 0)
