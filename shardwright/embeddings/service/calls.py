"""What ranks ask of a table server, as messages.

A call is a header and arrays. Every header has `call`, `run` (an id that the ranks of a run share), `rank` and
`number`; the reply has the same number, and either arrays or `error`.

    open      the rows that the server will own for this run
    read      by group, rows and versions to validate, for `round`: leases, versions, and the rows that must be sent
    push      by group, rows with updates, their numbers, uses, and sums, for `round`, or one of several parts of them;
              and whether the rank has dropped its copies, so that the numbers of updates begin at 0
    draw      give rows the initial values of ids, from a seed and their largest value
    put, get  some rows of a part (weights, or optimizer state), as they are or as a snapshot has them
    snapshot, release
    swap      by store, rows to write with their values, and rows to read: the reply has their values
    keep, read_kept, drop  a store's rows as they are now, under a name
    ping      numbers of calls without a reply: the reply names those that the server does not have, and says how many
              calls it has had
    close     the run has ended

Shape legend: A rows to validate, F rows that are sent, R some rows, C columns, X values of a row and its state.
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
from shardwright.embeddings.service.shard_stores import Swap
from shardwright.errors import UserError
from shardwright.rectangle import IndexRange
from shardwright.spec import files

MAX_NUMBER = 1e30  # such as a learning rate
VERSION = 4  # of the messages
PUSHED_BYTES = 4 << 20  # of updates, at most in one message: a slow link can tell that they make progress
MAX_PARTS = 1 << 20
MAX_INTEGER = (1 << 63) - 1
MAX_RANKS, MAX_DIM = 1 << 20, 1 << 16
MAX_WIDTH = 4 * MAX_DIM  # with optimizer state
MAX_WORD = torch.iinfo(torch.int32).max
TYPES = "float32", "float64"  # of rows


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
    if any(group.dtype not in TYPES for group in spec.groups):
        raise MalformedCall("a group with an impossible type")
    if any(store.rows < 0 or not 0 < store.width <= MAX_WIDTH for store in spec.stores):
        raise MalformedCall("a store with impossible rows or columns")
    if any(store.dtype not in TYPES for store in spec.stores):
        raise MalformedCall("a store with an impossible type")
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


def push_calls(round_: int, push: Push) -> Iterator[Message]:
    """The updates of a rank in a round, in parts if they are many."""
    num_parts = max(1, -(-sum(updates.bytes_ for updates in push.updates) // PUSHED_BYTES))
    for number in range(num_parts):
        updates = tuple(of_group.part(number, num_parts) for of_group in push.updates)
        yield push_call(round_, replace(push, updates=updates, part=number, num_parts=num_parts))


def push_call(round_: int, push: Push) -> Message:
    arrays = []
    for updates in push.updates:
        values = torch.cat([updates.sums_VD, updates.squares_VS], 1)
        arrays += [words(updates.rows_V), words(updates.counts_V), words(updates.uses_V), values.numpy()]
    header = {"call": "push", "round": round_, "steps": push.steps, "lr": push.optimizer.lr, "is_last": push.is_last}
    return Message({**header, "part": push.part, "num_parts": push.num_parts}, arrays)


def parse_push(message: Message, spec: OwnedSpec) -> Push:
    header, updates = message.header, []
    groups = list(_by_group(message, 4, num_whole=3))
    if len(groups) != len(spec.groups):
        raise MalformedCall(f"{len(groups)} groups of {len(spec.groups)}")
    for group, (rows, counts, uses, values) in zip(spec.groups, groups, strict=True):
        if values.dim() != 2 or values.dtype != getattr(torch, group.dtype) or values.shape[1] < group.dim:
            raise MalformedCall(f"values of type {values.dtype} and shape {tuple(values.shape)}")
        sums, squares = values.split([group.dim, values.shape[1] - group.dim], 1)
        if any(len(each) and not 1 <= int(each.min()) <= int(each.max()) <= MAX_WORD for each in (counts, uses)):
            raise MalformedCall("impossible numbers of updates")
        updates.append(RowUpdates(rows.long(), counts.long(), uses.long(), sums, squares))
    steps = tuple(parse_integers(header, "steps"))
    if any(not 1 <= step <= MAX_WORD for step in steps):
        raise MalformedCall(f"steps are {steps}")
    is_last = header.get("is_last")
    if not isinstance(is_last, bool):
        raise MalformedCall(f"is_last is {is_last!r}")
    part, num_parts = parse_integer(header, "part"), parse_integer(header, "num_parts")
    if not 0 <= part < num_parts <= MAX_PARTS:
        raise MalformedCall(f"part {part} of {num_parts}")
    optimizer = replace(spec.optimizer, lr=parse_number(header, "lr"))
    return Push(optimizer, steps, tuple(updates), is_last, part, num_parts)


def draw_call(group: int, rows_R: Tensor, ids_R: Tensor, seed: int, bound: float) -> Message:
    header = {"call": "draw", "group": group, "seed": seed, "bound": bound}
    return Message(header, [words(rows_R), words(ids_R)])


def parse_draw(message: Message) -> tuple[int, Tensor, Tensor, int, float]:
    header, groups = message.header, list(_by_group(message, 2, num_whole=2))
    if len(groups) != 1:
        raise MalformedCall(f"{len(groups)} groups")
    rows, ids = (column.long() for column in groups[0])
    return parse_integer(header, "group"), rows, ids, parse_integer(header, "seed"), parse_number(header, "bound")


def swap_call(swaps: Sequence[Swap]) -> Message:
    arrays = [
        array
        for swap in swaps
        for array in (words(swap.written_W), swap.values_WX.contiguous().numpy(), words(swap.read_R))
    ]
    return Message({"call": "swap", "stores": [swap.store for swap in swaps]}, arrays)


def parse_swap(message: Message) -> list[Swap]:
    stores, groups = parse_integers(message.header, "stores"), [*_by_group(message, 3)]
    if len(stores) != len(groups) or len(set(stores)) < len(stores):
        raise MalformedCall(f"{len(groups)} groups for stores {stores}")
    swaps = []
    for store, (written, values, read) in zip(stores, groups, strict=True):
        _check_rows(written, read)
        swaps.append(Swap(store, written.long(), values, read.long()))
    return swaps


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
    if type(value) is not int or abs(value) > MAX_INTEGER:
        raise MalformedCall(f"{name} is {value!r}")
    return value


def parse_integers(header: Any, name: str) -> list[int]:
    values = header.get(name)
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise MalformedCall(f"{name} is {values!r}")
    return values


def parse_number(header: Any, name: str) -> float:
    value = header.get(name)
    if isinstance(value, bool) or not isinstance(value, float | int) or not abs(value) <= MAX_NUMBER:
        raise MalformedCall(f"{name} is {value!r}")
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


def _by_group(message: Message, num: int, *, num_whole: int = 0, is_answer: bool = False) -> Iterator[list[Tensor]]:
    """The arrays of a message, `num` for each group; the first ones have whole numbers."""
    arrays = [tensor(array) for array in message.arrays]
    if len(arrays) % num:
        raise MalformedCall(f"{len(arrays)} arrays")
    for first in range(0, len(arrays), num):
        group = arrays[first : first + num]
        _check_rows(*group[:num_whole], is_answer=is_answer)
        yield group


def _check_rows(*columns: Tensor, is_answer: bool = False) -> None:
    if any(column.dtype not in (torch.int32, torch.int64) for column in columns):
        raise MalformedCall("rows are not whole numbers")
    if any(column.dim() != 1 for column in columns) and not is_answer:
        raise MalformedCall("rows are not in one dimension")
