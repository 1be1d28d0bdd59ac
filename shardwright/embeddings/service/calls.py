"""What ranks ask of a table server, as messages.

A call is a header and arrays. Every header has `call`, `run` (an id that the ranks of a run share), `rank` and
`number`; the reply has the same number, and either arrays or `error`.

    open      the rows that the server will own for this run
    read      by group, rows and versions to validate, for `round`: leases, versions, and the rows that must be sent
    push      by group, rows with updates, their numbers, and their sums, for `round`
    put, get  some rows of a part (weights, or optimizer state), as they are or as a snapshot has them
    snapshot, release
    ping      numbers of calls without a reply: the reply names those that the server does not have
    close     the run has ended

Shape legend: A rows to validate, F rows that are sent, R some rows, C columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.comm.transport.arrays import Message
from shardwright.embeddings.copies.bounded_group import NEW_ROW
from shardwright.embeddings.copies.updates import RowUpdates
from shardwright.embeddings.service.owned_rows import GroupAnswer, GroupRead, OwnedSpec, Place, Push
from shardwright.errors import UserError
from shardwright.rectangle import IndexRange
from shardwright.spec import files

MAX_RATE = 1e30  # a learning rate
VERSION = 1  # of the messages
MAX_RANKS, MAX_DIM = 1 << 20, 1 << 16
MAX_WORD = torch.iinfo(torch.int32).max


class MalformedCall(Exception):
    """A message that no rank of this version sends."""


def open_call(spec: OwnedSpec) -> Message:
    return Message({"call": "open", "version": VERSION, "spec": files.to_plain(spec)})


def parse_spec(header: dict[str, Any]) -> OwnedSpec:
    if header.get("version") != VERSION:
        raise UserError("another version of Shardwright: run the same one on table servers and ranks")
    spec = files.from_plain(OwnedSpec, header.get("spec"), "open")
    if not 1 <= spec.num_ranks <= MAX_RANKS or not 0 <= spec.server <= MAX_RANKS:
        raise MalformedCall(f"{spec.num_ranks} ranks, server {spec.server}")
    if any(not 0 <= group.pull <= MAX_WORD for group in spec.groups):
        raise MalformedCall("an impossible bound")
    if any(group.rows < 0 or not 0 < group.dim <= MAX_DIM for group in spec.groups):
        raise MalformedCall("a group with impossible rows or columns")
    return spec


def read_call(round_: int, reads: Sequence[GroupRead]) -> Message:
    arrays = [words(column) for read in reads for column in (read.rows_A, read.versions_A)]
    return Message({"call": "read", "round": round_}, arrays)


def parse_read(message: Message) -> list[GroupRead]:
    return [
        GroupRead(rows.long().flatten(), versions.long().flatten())
        for rows, versions in _by_group(message, 2, num_whole=2)
    ]


def answer_arrays(answers: Sequence[GroupAnswer]) -> list[np.ndarray]:
    """A row that is sent has NEW_ROW - lease in place of its lease, so that it is negative."""
    arrays = []
    for answer in answers:
        leases = torch.where(answer.is_new_A, NEW_ROW - answer.leases_A, answer.leases_A)
        arrays += [words(torch.stack([leases, answer.versions_A], 1)), answer.values_FX.numpy()]
    return arrays


def parse_answer(message: Message) -> list[tuple[Tensor, Tensor]]:
    """By group, (A, 2) renewals and (F, X) values of rows."""
    return [(renewals.long(), values) for renewals, values in _by_group(message, 2, num_whole=1, is_answer=True)]


def push_call(round_: int, push: Push) -> Message:
    arrays = []
    for updates in push.updates:
        values = torch.cat([updates.sums_VD, updates.squares_VS], 1)
        arrays += [words(updates.rows_V), words(updates.counts_V), values.numpy()]
    header = {"call": "push", "round": round_, "steps": push.steps, "lr": push.optimizer.lr}
    return Message(header, arrays)


def parse_push(message: Message, spec: OwnedSpec) -> Push:
    header, updates = message.header, []
    groups = list(_by_group(message, 3, num_whole=2))
    if len(groups) != len(spec.groups):
        raise MalformedCall(f"{len(groups)} groups of {len(spec.groups)}")
    for group, (rows, counts, values) in zip(spec.groups, groups, strict=True):
        if values.dim() != 2 or values.dtype != getattr(torch, group.dtype) or values.shape[1] < group.dim:
            raise MalformedCall(f"values of type {values.dtype} and shape {tuple(values.shape)}")
        sums, squares = values.split([group.dim, values.shape[1] - group.dim], 1)
        if len(counts) and not 1 <= int(counts.min()) <= int(counts.max()) <= MAX_WORD:
            raise MalformedCall("impossible numbers of updates")
        updates.append(RowUpdates(rows.long().flatten(), counts.long().flatten(), sums, squares))
    steps = tuple(parse_integers(header, "steps"))
    if any(not 1 <= step <= MAX_WORD for step in steps):
        raise MalformedCall(f"steps are {steps}")
    return Push(replace(spec.optimizer, lr=parse_rate(header)), steps, tuple(updates))


def get_call(place: Place, rows_R: Tensor) -> Message:
    return Message({"call": "get", **_place_header(place)}, [words(rows_R)])


def parse_get(message: Message) -> tuple[Place, Tensor]:
    groups = list(_by_group(message, 1, num_whole=1))
    if len(groups) != 1:
        raise MalformedCall(f"{len(groups)} arrays")
    return _parse_place(message), groups[0][0].long().flatten()


def put_call(place: Place, rows_R: Tensor, columns: IndexRange, values_RC: Tensor) -> Message:
    header = {"call": "put", "columns": columns, **_place_header(place)}
    return Message(header, [words(rows_R), values_RC.contiguous().numpy()])


def parse_put(message: Message) -> tuple[Place, Tensor, IndexRange, Tensor]:
    groups, columns = list(_by_group(message, 2, num_whole=1)), parse_integers(message.header, "columns")
    if len(groups) != 1 or len(columns) != 2:
        raise MalformedCall(f"{len(groups)} arrays and {len(columns)} ends of columns")
    rows, values = groups[0]
    if "snapshot" in message.header:
        raise MalformedCall("a snapshot is not written")
    return _parse_place(message), rows.long().flatten(), (columns[0], columns[1]), values


def _place_header(place: Place) -> dict[str, Any]:
    of_snapshot = {} if place.snapshot is None else {"snapshot": place.snapshot}
    return {"group": place.group, "part": place.part, **of_snapshot}


def _parse_place(message: Message) -> Place:
    header = message.header
    snapshot = parse_integer(header, "snapshot") if "snapshot" in header else None
    return Place(parse_integer(header, "group"), parse_text(header, "part"), snapshot)


def parse_integer(header: Any, name: str) -> int:
    value = header.get(name)
    if type(value) is not int or abs(value) > 1 << 62:
        raise MalformedCall(f"{name} is {value!r}")
    return value


def parse_integers(header: Any, name: str) -> list[int]:
    values = header.get(name)
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise MalformedCall(f"{name} is {values!r}")
    return values


def parse_rate(header: Any) -> float:
    value = header.get("lr")
    if isinstance(value, bool) or not isinstance(value, float | int) or not abs(value) <= MAX_RATE:
        raise MalformedCall(f"lr is {value!r}")
    return float(value)


def parse_text(header: Any, name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str):
        raise MalformedCall(f"{name} is {value!r}")
    return value


def words(values: Tensor) -> np.ndarray:
    """Whole numbers in 32 bits, if they fit."""
    fits = not len(values) or int(values.min()) >= -MAX_WORD and int(values.max()) <= MAX_WORD
    return (values.int() if fits else values.long()).numpy()


def tensor(array: np.ndarray) -> Tensor:
    """A tensor in the memory of an array."""
    return torch.from_numpy(array)


def _by_group(message: Message, num: int, *, num_whole: int, is_answer: bool = False) -> Iterator[list[Tensor]]:
    """The arrays of a message, `num` for each group; the first ones have whole numbers."""
    arrays = [tensor(array) for array in message.arrays]
    if len(arrays) % num:
        raise MalformedCall(f"{len(arrays)} arrays")
    for first in range(0, len(arrays), num):
        group = arrays[first : first + num]
        if any(column.dtype not in (torch.int32, torch.int64) for column in group[:num_whole]):
            raise MalformedCall("rows are not whole numbers")
        if any(column.dim() != 1 for column in group[:num_whole]) and not is_answer:
            raise MalformedCall("rows are not in one dimension")
        yield group
