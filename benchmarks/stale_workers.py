"""Tables that 8 workers read from stale copies: a simulation in one process, for benchmarks/het_quality.py.

Each class has the rows of all tables and does in `read` and `update` what all workers together do in a step, with SGD:
the gradient of each distinct row of each worker is multiplied by the rate and subtracted. Sums of unpushed gradients
are stored times the rate: index_add_ is several times as fast without a factor.

Shape legend: B samples, E rows of all tables, P pairs of a worker and a row, U distinct pairs of a step, A pairs that
are validated, F features or pairs whose rows are sent, V pairs whose updates are pushed, N ids of a step, D columns.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwright.embeddings.copies.row_clocks import HISTOGRAM_BINS, uses_per_update
from shardwright.embeddings.copies.row_copies import NO_VERSION, Lease
from shardwright.spec.row_cache import MAX_UNPUSHED_BATCHES

EDGES = 2 ** torch.arange(HISTOGRAM_BINS - 1)  # of the histogram: 1, 2, 4, ...


class Reads(NamedTuple):
    """Distinct rows of each worker in a step, worker after worker. A pair is worker * E + row."""

    pair_U: Tensor
    row_U: Tensor
    worker_U: Tensor
    index_BF: Tensor  # position in U of each id


@cache
def position_buffer(size: int) -> Tensor:
    """Memory for `find_reads`: in new memory, each step would have page faults."""
    return torch.empty(size, dtype=torch.int64)


def find_reads(rows_BF: Tensor, num_workers: int, num_rows: int) -> Reads:
    worker_B = torch.arange(num_workers).repeat_interleave(len(rows_BF) // num_workers)
    pair_BF = rows_BF + worker_B[:, None] * num_rows
    sorted_N = np.sort(pair_BF.numpy(), axis=None)  # several times as fast as torch
    pair_U = torch.from_numpy(sorted_N[np.diff(sorted_N, prepend=-1) > 0])
    position_P = position_buffer(num_workers * num_rows)
    position_P[pair_U] = torch.arange(len(pair_U))
    row_U = pair_U % num_rows
    return Reads(pair_U, row_U, (pair_U - row_U) // num_rows, position_P[pair_BF])


class SynchronousRows:
    """Rows that all workers read and update at once, and counts of the updates that reads miss: here none."""

    bound: int | None = 0  # of the updates that a read misses

    def __init__(self, weight_ED: Tensor, rate: float, num_workers: int) -> None:
        self.weight_ED, self.rate, self.num_workers = weight_ED, rate, num_workers
        self.num_pairs = num_workers * len(weight_ED)
        self.made_E = torch.zeros(len(weight_ED), dtype=torch.int64)  # updates of each row by all workers
        self.missed = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64)
        self.largest_missed = self.num_read = self.num_sent = self.num_pushed = 0

    def read(self, reads: Reads) -> Tensor:
        """(U, D) What each worker reads."""
        self.count_missed(torch.zeros_like(reads.row_U))
        return self.weight_ED.index_select(0, reads.row_U)

    def update(self, reads: Reads, grad_UD: Tensor) -> None:
        self.weight_ED.index_add_(0, reads.row_U, grad_UD.mul(-self.rate))
        self.count_made(reads)

    def flushed(self) -> Tensor:
        """(E, D) The rows after all updates."""
        return self.weight_ED

    def count_made(self, reads: Reads) -> None:
        self.made_E.index_add_(0, reads.row_U, torch.ones_like(reads.row_U))

    def count_missed(self, missed_U: Tensor) -> None:
        self.missed += torch.bincount(torch.bucketize(missed_U, EDGES, right=True), minlength=HISTOGRAM_BINS)
        self.largest_missed = max(self.largest_missed, int(missed_U.max()))

    def zeros_for_pairs(self, fill: int = 0) -> Tensor:
        return torch.full((self.num_pairs,), fill)

    def zero_rows_for_pairs(self) -> Tensor:
        return self.weight_ED.new_zeros(self.num_pairs, self.weight_ED.shape[1])

    def with_unpushed(self, sum_PD: Tensor) -> Tensor:
        return self.weight_ED + sum_PD.view(self.num_workers, *self.weight_ED.shape).sum(0)


class BoundedRows(SynchronousRows):
    """The rules of embeddings/copies/{row_copies,row_clocks}.py, with a copy of every row on every worker that does not
    own it. Workers read and update their own rows directly.

    `counts_uses`: pull and push count the uses of a row in batches; else batches with the row.
    """

    counts_uses = True

    def __init__(
        self,
        weight_ED: Tensor,
        rate: float,
        num_workers: int,
        bounds: tuple[int, int],
        owner_E: Tensor | None = None,
        due_pairs: Sequence[Tensor] = (),
    ) -> None:
        """`bounds`: pull and push. `due_pairs`: by batch modulo their number, the pairs whose updates are pushed."""
        super().__init__(weight_ED, rate, num_workers)
        pull, self.push = bounds
        self.bound = pull + (num_workers - 1) * self.push
        self.lease = Lease(pull, num_workers - 1)
        self.owner_E = torch.arange(len(weight_ED)) % num_workers if owner_E is None else owner_E
        self.due_pairs = due_pairs or [
            torch.arange(first, self.num_pairs, MAX_UNPUSHED_BATCHES) for first in range(MAX_UNPUSHED_BATCHES)
        ]
        self.num_batches = 0
        self.version_E, self.uses_E = torch.zeros_like(self.made_E), torch.zeros_like(self.made_E)
        self.copy_PD, self.sum_PD = self.zero_rows_for_pairs(), self.zero_rows_for_pairs()
        self.version_P, self.lease_end_P = self.zeros_for_pairs(NO_VERSION), self.zeros_for_pairs(-1)
        self.unpushed_P, self.unpushed_uses_P = self.zeros_for_pairs(), self.zeros_for_pairs()
        self.is_due_P = torch.zeros(self.num_pairs, dtype=torch.bool)

    def read(self, reads: Reads) -> Tensor:
        self.num_batches += 1
        is_own_U = self.owner_E[reads.row_U] == reads.worker_U
        expired_A = (is_own_U | (self.lease_end_P[reads.pair_U] < self.num_batches)).nonzero().flatten()
        pair_A, row_A = reads.pair_U[expired_A], reads.row_U[expired_A]
        now_A, version_A = self.version_E[row_A], self.version_P[pair_A]
        mean_A = uses_per_update(self.uses_E[row_A], now_A)
        left_A = self.lease.num_batches(now_A - version_A, mean_A)
        is_new_A = is_own_U[expired_A] | (version_A == NO_VERSION) | (left_A < 0)
        granted_A = torch.where(is_new_A, self.lease.num_batches(torch.zeros_like(left_A), mean_A), left_A)
        self.lease_end_P[pair_A] = self.num_batches + granted_A
        pair_F, row_F = pair_A[is_new_A], row_A[is_new_A]
        own_FD = self.sum_PD.index_select(0, pair_F)
        self.copy_PD.index_copy_(0, pair_F, own_FD.add_(self.weight_ED.index_select(0, row_F)))
        self.version_P[pair_F] = now_A[is_new_A]
        num_own = int(is_own_U.sum())
        self.num_read, self.num_sent = self.num_read + len(is_own_U) - num_own, self.num_sent + len(pair_F) - num_own
        seen_U = self.version_P[reads.pair_U] + self.unpushed_P[reads.pair_U]
        self.count_missed(self.made_E[reads.row_U] - seen_U)
        return self.copy_PD.index_select(0, reads.pair_U)

    def update(self, reads: Reads, grad_UD: Tensor) -> None:
        due_V = self.due_pairs[self.num_batches % len(self.due_pairs)]
        due_V = due_V[self.unpushed_P[due_V] > 0]
        self.is_due_P[due_V] = True
        is_own_U = self.owner_E[reads.row_U] == reads.worker_U
        uses_U = self.uses(reads)
        is_pushed_U = is_own_U | (self.unpushed_uses_P[reads.pair_U] + uses_U > self.push)
        pushed_V = reads.pair_U[is_pushed_U & ~self.is_due_P[reads.pair_U]]
        self.is_due_P[due_V] = False
        change_UD = grad_UD.mul(-self.rate)
        self.copy_PD.index_add_(0, reads.pair_U, change_UD)
        self.sum_PD.index_add_(0, reads.pair_U, change_UD)
        self.unpushed_P[reads.pair_U] += 1
        self.unpushed_uses_P[reads.pair_U] += uses_U
        self._push(torch.cat([due_V, pushed_V]))
        self.num_pushed -= int(is_own_U.sum())
        self.count_made(reads)

    def uses(self, reads: Reads) -> Tensor:
        """(U,) What a worker's gradient of a row counts."""
        if not self.counts_uses:
            return torch.ones_like(reads.row_U)
        return torch.bincount(reads.index_BF.flatten(), minlength=len(reads.row_U))

    def flushed(self) -> Tensor:
        return self.with_unpushed(self.sum_PD)

    def _push(self, pair_V: Tensor) -> None:
        row_V, counts_V = pair_V % len(self.weight_ED), self.unpushed_P[pair_V]
        self.weight_ED.index_add_(0, row_V, self.sum_PD.index_select(0, pair_V))
        self.version_E.index_add_(0, row_V, counts_V)
        self.uses_E.index_add_(0, row_V, self.unpushed_uses_P[pair_V])
        self.version_P[pair_V] += counts_V
        self.unpushed_P[pair_V] = self.unpushed_uses_P[pair_V] = 0
        self.sum_PD.index_fill_(0, pair_V, 0)
        self.num_pushed += len(pair_V)


class HetRows(SynchronousRows):
    """HET's Algorithms 1 to 3: the server's clock of a row is the largest one of the workers that evicted it."""

    bound = None  # what reads miss has no such bound: clocks that are merged by max do not count updates

    def __init__(self, weight_ED: Tensor, rate: float, num_workers: int, limit: int) -> None:
        super().__init__(weight_ED, rate, num_workers)
        self.limit = limit
        self.clock_E, self.applied_E = torch.zeros_like(self.made_E), torch.zeros_like(self.made_E)
        self.copy_PD, self.sum_PD = self.zero_rows_for_pairs(), self.zero_rows_for_pairs()
        self.start_P, self.clock_P = self.zeros_for_pairs(NO_VERSION), self.zeros_for_pairs()
        self.seen_P, self.unpushed_P = self.zeros_for_pairs(), self.zeros_for_pairs()  # updates

    def read(self, reads: Reads) -> Tensor:
        clock_U, start_U = self.clock_P[reads.pair_U], self.start_P[reads.pair_U]
        is_found_U = start_U != NO_VERSION
        is_valid_U = (clock_U <= start_U + self.limit) & (self.clock_E[reads.row_U] <= clock_U + self.limit)
        evicted_V = (is_found_U & ~is_valid_U).nonzero().flatten()
        self._evict(reads.pair_U[evicted_V], reads.row_U[evicted_V])
        fetched_V = (~(is_found_U & is_valid_U)).nonzero().flatten()
        self._fetch(reads.pair_U[fetched_V], reads.row_U[fetched_V])
        self.num_read, self.num_sent = self.num_read + len(clock_U), self.num_sent + len(fetched_V)
        self.count_missed(self.made_E[reads.row_U] - self.seen_P[reads.pair_U])
        return self.copy_PD.index_select(0, reads.pair_U)

    def update(self, reads: Reads, grad_UD: Tensor) -> None:
        change_UD = grad_UD.mul(-self.rate)
        self.copy_PD.index_add_(0, reads.pair_U, change_UD)
        self.sum_PD.index_add_(0, reads.pair_U, change_UD)
        for counts_P in (self.clock_P, self.seen_P, self.unpushed_P):
            counts_P[reads.pair_U] += 1
        self.count_made(reads)

    def flushed(self) -> Tensor:
        return self.with_unpushed(self.sum_PD)

    def _evict(self, pair_V: Tensor, row_V: Tensor) -> None:
        self.weight_ED.index_add_(0, row_V, self.sum_PD.index_select(0, pair_V))
        self.sum_PD.index_fill_(0, pair_V, 0)
        self.clock_E.scatter_reduce_(0, row_V, self.clock_P[pair_V], "amax")
        self.applied_E.index_add_(0, row_V, self.unpushed_P[pair_V])
        self.unpushed_P[pair_V] = 0
        self.num_pushed += len(pair_V)

    def _fetch(self, pair_V: Tensor, row_V: Tensor) -> None:
        self.copy_PD.index_copy_(0, pair_V, self.weight_ED.index_select(0, row_V))
        self.start_P[pair_V] = self.clock_P[pair_V] = self.clock_E[row_V]
        self.seen_P[pair_V] = self.applied_E[row_V]


class AsynchronousRows(SynchronousRows):
    """Workers take turns: each applies its gradients of a step and reads its rows of the next step."""

    def __init__(self, weight_ED: Tensor, rate: float, num_workers: int) -> None:
        super().__init__(weight_ED, rate, num_workers)
        self.bound = num_workers - 1
        self.applied_E = torch.zeros_like(self.made_E)  # updates
        self.last: tuple[Reads, Tensor] | None = None  # a step whose turns have not come, and its changes of rows

    def read(self, reads: Reads) -> Tensor:
        values, seen = list[Tensor](), list[Tensor]()
        changes = self._last_changes()
        for row_V in reads.row_U.split(self._sizes(reads)):
            for last_rows_V, change_VD in islice(changes, 1):
                self.weight_ED.index_add_(0, last_rows_V, change_VD)
                self.applied_E[last_rows_V] += 1
            values.append(self.weight_ED.index_select(0, row_V))
            seen.append(self.applied_E[row_V])
        self.count_missed(self.made_E[reads.row_U] - torch.cat(seen))
        return torch.cat(values)

    def update(self, reads: Reads, grad_UD: Tensor) -> None:
        self.last = reads, grad_UD.mul(-self.rate)
        self.count_made(reads)

    def flushed(self) -> Tensor:
        weight_ED = self.weight_ED.clone()
        for row_V, change_VD in self._last_changes():
            weight_ED.index_add_(0, row_V, change_VD)
        return weight_ED

    def _last_changes(self) -> Iterator[tuple[Tensor, Tensor]]:
        """By worker, rows and changes of the last step."""
        if self.last is not None:
            reads, change_UD = self.last
            sizes = self._sizes(reads)
            yield from zip(reads.row_U.split(sizes), change_UD.split(sizes), strict=True)

    def _sizes(self, reads: Reads) -> list[int]:
        return torch.bincount(reads.worker_U, minlength=self.num_workers).tolist()
