"""Announce each local batch to all ranks: its size, weight and stop signal, and the sizes of the messages that follow.

Phases: every rank sends each rank a header, in one all-to-all on the ids lane; or, at the end of its data, a header
        that says so. All ranks must have a batch, or none.

Shape legend: R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.errors import UserError
from shardwright.spec.wire import REQUEST_HEADER_NUMBERS

NO_BATCH = -1.0  # in place of the number of samples


@dataclass(frozen=True, slots=True)
class Announcement:
    """Headers of a batch: row r is for rank r; after their exchange, from rank r."""

    headers_R: Tensor  # (R, REQUEST_HEADER_NUMBERS)
    rank: int

    @property
    def stop_signal(self) -> int:
        return int(self.headers_R[:, 6].max())

    @property
    def total_weight(self) -> float:
        return float(self.headers_R[:, 2].sum())

    @property
    def share(self) -> float:
        total = self.total_weight
        return float(self.headers_R[self.rank, 2] / total) if total > 0 else 0.0


A = TypeVar("A", bound=Announcement)


class BatchAnnouncer:
    """Announces the batches of a model without tables; see `Announcer`."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def request(self, ids: None, weight: float, stop: int = 0, micro_batches: int = 1) -> Announcement:
        """`micro_batches`: how many it announces at once, equal on all ranks."""
        header = (micro_batches, 0, weight, 0, 0, 0, stop)
        return Announcement(make_headers([header] * self._group.size), self._group.index)

    def announce(self, request: Announcement) -> Pending[Announcement]:
        return exchange_headers(request, self._group).then(_check_micro_batches)

    def announce_end(self) -> Pending[Tensor]:
        return exchange_end_headers(self._group)


def make_headers(numbers: Sequence[tuple[float, ...]]) -> Tensor:
    """Headers with these numbers for each rank, which spec/wire.py lists."""
    return torch.tensor(numbers, dtype=torch.float64)


def exchange_headers(announcement: A, group: Group) -> Pending[A]:
    """Exchange the headers of a batch; fails on all ranks if only some of them have one."""
    headers = collective.all_to_all_rows(announcement.headers_R, group)
    return headers.then(lambda headers_R: replace(announcement, headers_R=_check_headers(headers_R)))


def exchange_end_headers(group: Group) -> Pending[Tensor]:
    """Exchange headers of a rank whose data has ended; fails on all ranks if some of them have a batch."""
    headers_R = torch.full((group.size, REQUEST_HEADER_NUMBERS), NO_BATCH, dtype=torch.float64)
    return collective.all_to_all_rows(headers_R, group).then(_check_headers)


def _check_micro_batches(announcement: Announcement) -> Announcement:
    """Return the announcement; fail unless all ranks have announced the same number of micro-batches."""
    numbers = announcement.headers_R[:, 0].int().tolist()
    if len(set(numbers)) > 1:
        raise UserError(
            f"micro-batches of a step by rank: {numbers}; give every rank the same number of batches: a batch without "
            "samples counts as one"
        )
    return announcement


def _check_headers(headers_R: Tensor) -> Tensor:
    """Return the headers; fail unless all ranks have a batch or none has."""
    has_ended = headers_R[:, 0] == NO_BATCH
    if has_ended.any() and not has_ended.all():
        lists = [", ".join(map(str, mask.nonzero().flatten().tolist())) for mask in (has_ended, ~has_ended)]
        raise UserError(
            f"the batches of ranks [{lists[0]}] have ended, and those of ranks [{lists[1]}] have not: "
            "give every rank the same number of batches; a batch without samples counts as one"
        )
    return headers_R
