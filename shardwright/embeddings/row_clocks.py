"""Rows that other ranks have copies of (row_copies.py): what their owner keeps.

Shape legend: E rows, A rows that a rank asks for, U distinct rows.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwright.embeddings.row_copies import NO_VERSION, Bounds, SentUpdates, apply_merged
from shardwright.spec.optimizer import SparseOptimizer


class RowClocks:
    """Counts the updates of each row, in batches of ranks."""

    def __init__(self, num_rows: int) -> None:
        self.version_E = torch.zeros(num_rows, dtype=torch.int64)

    def answer(self, rows_A: Tensor, versions_A: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Which rows must be sent, and the leases of all, of a batch whose predecessor is not applied yet.

        Until a batch that is k later reads the copy, each other rank may make 1 + k updates more."""
        missed_A = self.version_E[rows_A] - versions_A
        left_A = torch.div(bounds.pull - missed_A, max(1, bounds.others), rounding_mode="floor") - 1
        is_new_A = (versions_A == NO_VERSION) | (left_A < max(1, bounds.least_lease)) if bounds.others else versions_A == NO_VERSION
        return is_new_A, torch.where(is_new_A, bounds.lease, left_A if bounds.others else bounds.lease)

    def apply(
        self,
        optimizer: SparseOptimizer,
        weight_ED: Tensor,
        state: Mapping[str, Tensor],
        updates: Sequence[SentUpdates],
        step: int,
    ) -> None:
        """One optimizer step from what all ranks have sent, added in the order of ranks."""
        every = SentUpdates.concat(list(updates))
        rows_U, inverse = every.rows_V.unique(return_inverse=True)

        def total(values: Tensor) -> Tensor:
            return values.new_zeros(len(rows_U), *values.shape[1:]).index_add_(0, inverse, values)

        summed = SentUpdates(rows_U, total(every.counts_V), total(every.sums_VD), total(every.squares_V))
        num_senders_U = total(torch.ones_like(every.counts_V))
        apply_merged(optimizer, weight_ED, state, summed, summed.counts_V > num_senders_U, step)
        self.version_E[rows_U] += summed.counts_V
