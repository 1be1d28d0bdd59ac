"""Answers the calls of ranks, without sockets: what a table server does with a message.

One run at a time. A push is written to the journal, if there is one, before it is acknowledged; reads of a round that
is not complete wait here. Every call may come twice.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.comm.transport.arrays import Message
from shardwright.comm.transport.servers import STATE_CONNECTION
from shardwright.embeddings.service import calls
from shardwright.embeddings.service.calls import MalformedCall, parse_integer, parse_integers, parse_text
from shardwright.embeddings.service.journal import MIN_COPIED_BYTES, CallJournal, JournalError
from shardwright.embeddings.service.owned_rows import OwnedRows, OwnedSpec
from shardwright.embeddings.service.shard_stores import ShardStores
from shardwright.errors import UserError
from shardwright.spec import files

COPIED_BYTES = 64 << 20  # of rows, in a record of a copy
RECONNECT_SECONDS = 60.0  # in which the ranks of a run come back to a server that was started again
CALL_ERRORS = MalformedCall, UserError, RuntimeError, MemoryError  # the last two: of torch and numpy
Client = bytes
Reply = tuple[Client, Message]
LOST = (
    "the table server no longer has the rows of this run: it was restarted without its journal, or another run uses "
    "it; resume from a checkpoint"
)


@dataclass(slots=True)
class Served:
    """Counts since the start: rows read and sent, updates, and messages that no rank of this version sends."""

    read: int = 0
    sent: int = 0
    updated: int = 0
    malformed: int = 0


class CallHandler:
    """The rows of one run, and the calls that wait."""

    def __init__(
        self, journal: CallJournal | None = None, *, is_connected: Callable[[Client], bool] = lambda _: True
    ) -> None:
        """`is_connected`: whether a rank's process still has its connection."""
        self._journal, self._is_connected = journal, is_connected
        self._run = ""
        self._owned: OwnedRows | None = None
        self._clients: set[Client] = set()
        self._ended: set[int] = set()  # ranks
        self._waiting: dict[tuple[Client, int], Message] = {}  # reads of rounds that are not complete
        self._changed: dict[str, int] = {}  # by connection of a rank, the number of the last call that changed rows
        self._last_numbers: dict[str, int] = {}  # of calls, by connection of a rank
        self._num_calls = 0  # of the run, without pings and repeated calls
        self.served = Served()
        self._restored_at = -math.inf  # when the journal of a run was read
        self._most_bytes = MIN_COPIED_BYTES  # of calls, until a copy of the rows is written

    def restore(self) -> Iterator[None]:
        """Read the journal of a server that was killed, record by record."""
        if self._journal is None:
            return
        for message in self._journal.read():
            try:
                self._replay(message)
            except (MalformedCall, UserError) as error:
                raise UserError(f"{self._journal.directory}: {error}; remove the folder to start anew") from None
            self._restored_at = time.monotonic()
            yield

    def handle(self, client: Client, message: Message) -> list[Reply]:
        """The replies to a message, and to reads that waited for it."""
        header = message.header
        try:
            number, call = parse_integer(header, "number"), parse_text(header, "call")
            run, server = parse_text(header, "run"), parse_integer(header, "server")
        except MalformedCall:
            self.served.malformed += 1
            return []
        try:
            if call == "open":
                self._open(client, run, message)
                reply = Message({})
            elif run != self._run or self._owned is None:
                reply = Message({"error": LOST})
            elif not 0 <= parse_integer(header, "rank") < self._owned.spec.num_ranks:
                raise MalformedCall(f"rank {header['rank']} of {self._owned.spec.num_ranks}")
            elif server != self._owned.spec.server:
                raise UserError(
                    f"this is server {self._owned.spec.server} of the run, and a rank takes it for server {server}: "
                    "give the same addresses in the same order on all ranks, each server once"
                )
            else:
                self._clients.add(client)
                reply = self._answer(self._owned, client, number, message) if self._is_current(header) else None
        except CALL_ERRORS as error:
            self.served.malformed += isinstance(error, MalformedCall)
            reply = Message({"error": str(error)})
        replies = [] if reply is None else [(client, _with_number(reply, number))]
        return [*replies, *self._answer_waiting()]

    def _answer(self, owned: OwnedRows, client: Client, number: int, message: Message) -> Message | None:
        """The reply to a call of the current run; None: later."""
        header = message.header
        match header["call"]:
            case "read":
                if owned.can_read(parse_integer(header, "round")):
                    return self._read(owned, message)
                self._waiting[client, number] = message
                return None
            case "push":
                self._push(owned, message)
                return Message({})
            case "ping":
                numbers = parse_integers(header, "without_reply")
                missing = [each for each in numbers if (client, each) not in self._waiting]
                return Message({"missing": missing, "num_calls": self._num_calls})
            case "close":
                self._ended.add(parse_integer(header, "rank"))
                if len(self._ended) == owned.spec.num_ranks:
                    self._end()
                return Message({})
        return self._access(owned, message)

    def _access(self, owned: OwnedRows, message: Message) -> Message:
        """The reply to a call that reads or replaces rows, between rounds."""
        header = message.header
        match header["call"]:
            case "swap":
                return self._swap(owned, message)
            case "keep" | "read_kept" | "drop":
                return _access_kept(owned.stores, header)
            case "put" | "draw":
                if self._is_first(header):
                    _change(owned, message)
                    self._remember(header)
                    self._record(message)
                return Message({})
            case "get":
                rows = owned.get(*calls.parse_get(message))
                return Message({}, [rows.numpy()])
            case "snapshot":
                return Message({"snapshot": owned.snapshot(parse_text(header, "holder"))})
            case "release":
                owned.release(parse_text(header, "holder"), parse_integer(header, "snapshot"))
                return Message({})
            case call:
                raise MalformedCall(f"call {call!r}")

    def _open(self, client: Client, run: str, message: Message) -> None:
        spec = calls.parse_spec(dict(message.header))
        if run != self._run:
            if others := [peer for peer in self._clients if self._is_connected(peer)]:
                raise UserError(
                    f"another run uses this table server: {len(others)} of its ranks are connected; wait for its end, "
                    "or start another table server"
                )
            if (seconds := self._restored_at + RECONNECT_SECONDS - time.monotonic()) > 0 and not self._clients:
                raise UserError(
                    f"this table server was started again for another run, whose ranks may come back; try again in "
                    f"{seconds:.0f} s, or remove its journal"
                )
            owned = _make_rows(spec)  # may fail; the rows of an earlier run stay then
            self._end()
            self._run, self._owned = run, owned
            if self._journal is not None:
                self._journal.begin(message)
        elif self._owned is not None and self._owned.spec != spec:
            raise UserError(
                "the ranks of a run have different tables, bounds, optimizers or addresses of servers, or an address "
                "is listed twice"
            )
        self._clients.add(client)

    def _end(self) -> None:
        self._run, self._owned = "", None
        self._clients, self._ended, self._waiting, self._changed = set(), set(), {}, {}
        self._last_numbers = {}
        if self._journal is not None:
            self._journal.remove()

    def _read(self, owned: OwnedRows, message: Message) -> Message:
        reads = calls.parse_read(message)
        answers = owned.read(reads)
        self.served.read += sum(len(read.rows_A) for read in reads)
        self.served.sent += sum(len(answer.values_FX) for answer in answers)
        return Message({}, calls.answer_arrays(answers))

    def _push(self, owned: OwnedRows, message: Message) -> None:
        header = message.header
        push = calls.parse_push(message, owned.spec)
        if owned.push(parse_integer(header, "rank"), parse_integer(header, "round"), push):
            self._record(message)
            self.served.updated += sum(len(updates.rows_V) for updates in push.updates)

    def _swap(self, owned: OwnedRows, message: Message) -> Message:
        swaps = calls.parse_swap(message)
        written = sum(len(swap.written_W) for swap in swaps)
        if written and self._is_first(message.header):
            owned.stores.write(swaps)
            self._remember(message.header)
            self._record(message)
        values = owned.stores.read(swaps)
        num = sum(len(swap.read_R) for swap in swaps)
        self.served.read, self.served.sent = self.served.read + num, self.served.sent + num
        self.served.updated += written
        return Message({}, [each.numpy() for each in values])

    def _is_current(self, header: Mapping[str, Any]) -> bool:
        """Whether it may be answered: not a call about state, which come one at a time, that arrives after a later one,
        from a connection that the rank has lost. Counts calls that come for the first time."""
        if header["call"] == "ping":
            return True
        connection, number = _connection(header), parse_integer(header, "number")
        last = self._last_numbers.get(connection, 0)
        if number > last:
            self._last_numbers[connection], self._num_calls = number, self._num_calls + 1
        return number >= last or header["connection"] != STATE_CONNECTION

    def _is_first(self, header: Mapping[str, Any]) -> bool:
        """Whether a call that changes rows comes for the first time, and not from a connection that the rank has lost,
        whose bytes may arrive after those of the next one."""
        return parse_integer(header, "number") > self._changed.get(_connection(header), 0)

    def _remember(self, header: Mapping[str, Any]) -> None:
        """That the call has changed rows."""
        self._changed[_connection(header)] = parse_integer(header, "number")

    def _answer_waiting(self) -> list[Reply]:
        """Replies to the reads whose round has come."""
        replies: list[Reply] = []
        if self._owned is None or not self._waiting:
            return replies
        for (client, number), message in [*self._waiting.items()]:
            if self._owned.can_read(parse_integer(message.header, "round")):
                del self._waiting[client, number]
                try:
                    reply = self._read(self._owned, message)
                except CALL_ERRORS as error:
                    reply = Message({"error": str(error)})
                replies.append((client, _with_number(reply, number)))
        return replies

    def close(self) -> None:
        """Leave the journal to another server."""
        if self._journal is not None:
            self._journal.unlock()

    # The journal

    def _record(self, message: Message) -> None:
        """Write a message to the journal; begin a copy of all rows, if the calls have become larger than they are."""
        journal, owned = self._journal, self._owned
        if journal is None or owned is None:
            return
        journal.append(message)
        if journal.is_copying:
            if (is_written := journal.end_copy()) is not None:
                self._most_bytes = MIN_COPIED_BYTES if is_written else 2 * journal.bytes_
        elif journal.bytes_ > max(self._most_bytes, owned.bytes_) and not owned.has_incomplete_round:
            try:
                journal.start_copy(self._copy_records(owned))
            except JournalError:
                self._most_bytes = 2 * journal.bytes_  # no room now: calls are kept

    def _copy_records(self, owned: OwnedRows) -> Iterator[Message]:
        header = {"call": "rows", "run": self._run, "spec": files.to_plain(owned.spec), "round": owned.round}
        header |= {"version": calls.VERSION, "changed": dict(self._changed)}
        arrays = [part.numpy() for part in owned.all_parts()]

        def records() -> Iterator[Message]:
            yield Message(header)
            for number, array in enumerate(arrays):
                rows = max(1, COPIED_BYTES * len(array) // max(1, array.nbytes))
                for first in range(0, len(array), rows):
                    place = {"call": "part", "part": number, "first": first}
                    yield Message(place, [array[first : first + rows]])

        return records()

    def _replay(self, message: Message) -> None:
        header = message.header
        match header["call"]:
            case "open":
                self._run, self._owned = parse_text(header, "run"), _make_rows(calls.parse_spec(dict(header)))
            case "rows":
                self._run, self._owned = parse_text(header, "run"), _make_rows(calls.parse_spec(dict(header)))
                self._owned.round, self._changed = parse_integer(header, "round"), dict(header["changed"])
            case "part" if self._owned is not None:
                first, (rows,) = parse_integer(header, "first"), message.arrays
                part = self._owned.all_parts()[parse_integer(header, "part")]
                part[first : first + len(rows)].copy_(torch.from_numpy(rows))
            case "push" if self._owned is not None:
                push = calls.parse_push(message, self._owned.spec)
                self._owned.push(parse_integer(header, "rank"), parse_integer(header, "round"), push)
            case "swap" if self._owned is not None:
                self._remember(header)
                self._owned.stores.write(calls.parse_swap(message))
            case "put" | "draw" if self._owned is not None:
                self._remember(header)
                _change(self._owned, message)
            case call:
                raise UserError(f'the journal has a record "{call}" of another version; remove it')


def _access_kept(stores: ShardStores, header: Mapping[str, Any]) -> Message:
    """The reply to a call about rows of a store as they were."""
    store, snapshot = parse_integer(header, "store"), parse_text(header, "snapshot")
    match header["call"]:
        case "keep":
            stores.keep(store, snapshot)
        case "read_kept":
            first, num = parse_integer(header, "first"), parse_integer(header, "num")
            return Message({}, [stores.read_kept(store, snapshot, first, num).numpy()])
        case _:
            stores.drop(snapshot)
    return Message({})


def _connection(header: Mapping[str, Any]) -> str:
    return f"{parse_integer(header, 'rank')} {parse_text(header, 'connection')}"


def _change(owned: OwnedRows, message: Message) -> None:
    if message.header["call"] == "draw":
        owned.draw(*calls.parse_draw(message))
    else:
        owned.put(*calls.parse_put(message))


def _make_rows(spec: OwnedSpec) -> OwnedRows:
    try:
        return OwnedRows(spec)
    except (RuntimeError, MemoryError, ValueError, OverflowError) as error:  # of torch and numpy: no memory
        raise UserError(f"no memory for the rows of this run on the table server: {error}") from None


def _with_number(reply: Message, number: int) -> Message:
    return Message({**reply.header, "number": number}, reply.arrays)
