"""Batches from readers elsewhere, in the loader's order, whichever reader reads them and however often one dies.

A batch is a pure function of its position, so a question may be asked again, of anybody: none is lost, and of two
answers the second is dropped. What a reader has to read is what it was asked, `prefetch` batches ahead of the trainer
over all readers, each question to the one with the fewest: a slow trainer fills nobody's memory.

Phases: questions go out until the batch that is wanted and `prefetch` more are under way; what has come is taken in;
while the batch is not among it, readers are asked whether they are there and what they hold, and the questions of one
that is gone, silent, or does not hold them, go out again. No torch here.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from shardwright.data.readers import messages
from shardwright.data.readers.keys import CurveKeys, check_address, load_keys, secure_socket
from shardwright.data.readers.messages import BatchRequest
from shardwright.data.sources.source import NumpyBatch, Position, SampleOrder, Source, order_identity
from shardwright.errors import UserError

TIMEOUT_SECONDS = 60.0
PING_SECONDS = 0.25  # between two words to a reader that is waited for
REPLY_TIMEOUT_SECONDS = 5.0  # any word: a reader says at once what it holds, however long it reads
POLL_SECONDS = 0.02  # between two looks whether there is a reader to ask
CONNECT_TIMEOUT_MILLISECONDS = 3000


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads for a loader: addresses, the trainers' file of keys where one of them is not of this host, and how long
    to wait while no reader says a word."""

    addresses: tuple[str, ...]
    key_file: str = ""
    timeout_seconds: float = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        if not self.addresses or isinstance(self.addresses, str):
            raise UserError(f"readers: addresses are {self.addresses!r}; wanted some, as ('tcp://127.0.0.1:5700',)")
        if len(set(self.addresses)) < len(self.addresses):
            raise UserError(f"readers: {', '.join(self.addresses)}: one is named twice")
        keys = load_keys(self.key_file, "trainer")
        for address in self.addresses:
            check_address(address, keys, "set data.reader_keys=DIR/trainer.keys")
            if re.search(r"\*|:0+$", address):
                raise UserError(f"reader {address}: nobody can be found there; wanted a host and the port it prints")


def read_remote(
    source: Source, order: SampleOrder, position: Position, *, readers: Readers, prefetch: int
) -> Generator[NumpyBatch, None, None]:
    """Rows in order, for ever."""
    crew = _Crew(readers, order_identity(source, order), order.shard)
    asked: deque[Position] = deque()
    try:
        while True:
            while len(asked) <= prefetch:
                crew.ask(position)
                asked.append(position)
                position = order.next_position(*position)
            yield crew.answer(asked.popleft())
    finally:
        crew.close()


def wait_for_reader(source: Source, order: SampleOrder, readers: Readers) -> None:
    """Know that a reader of these batches is there, before anything rests on it."""
    crew = _Crew(readers, order_identity(source, order), order.shard)
    try:
        crew.meet()
    finally:
        crew.close()


class _Line:
    """The connection to one reader, and what it was asked and has not answered."""

    def __init__(
        self, context: zmq.Context, address: str, keys: CurveKeys | None, of: str, shard: tuple[int, int]
    ) -> None:
        self.address = address
        self.under_way: dict[Position, int] = {}  # with the number of the message that asked
        self.there = False  # heard since it was connected, and not found to be gone
        self._context, self._keys = context, keys
        self._of, self._shard = of, shard
        self.socket = self._connected()
        self._number = 0
        self._said = 0.0  # when it was last told anything
        self._owing: float | None = None  # since when it has not said a word that it should
        self._granted = REPLY_TIMEOUT_SECONDS

    def _connected(self) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.immediate = True  # what cannot be sent now is not kept for a reader that comes back
        socket.connect_timeout = CONNECT_TIMEOUT_MILLISECONDS
        socket.linger = 0
        secure_socket(socket, self._keys)
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            raise UserError(f"reader {self.address}: {zmq.strerror(error.errno or 0)}") from None
        return socket

    def say(self, *positions: Position) -> bool:
        """Ask for these, or only whether it is there; whether anybody is connected."""
        try:
            self.socket.send(BatchRequest(self._of, self._shard, self._number, positions).encode(), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.under_way |= dict.fromkeys(positions, self._number)
        self._number += 1
        self._said = time.monotonic()
        self._owing = self._owing or self._said
        return True

    def heard(self) -> None:
        self.there, self._owing = True, None

    @property
    def due(self) -> bool:
        """Whether it is time for a word."""
        return time.monotonic() - self._said > PING_SECONDS

    @property
    def silent(self) -> bool:
        return self._owing is not None and time.monotonic() - self._owing > self._granted

    def gone(self) -> list[Position]:
        """What it was asked and will not answer; it may come back."""
        lost = list(self.under_way)
        self.under_way, self.there, self._owing = {}, False, None
        return lost

    def again(self) -> zmq.Socket:
        """A new connection in the place of this one, with more time: the link may be slow; the old one."""
        self._granted *= 2
        before, self.socket = self.socket, self._connected()
        return before

    def missing(self, number: int, held: Sequence[Position]) -> list[Position]:
        """What was asked up to a message and is neither answered nor held: lost on the way."""
        lost = [asked for asked, at in self.under_way.items() if at <= number and asked not in held]
        for position in lost:
            del self.under_way[position]
        return lost


class _Crew:
    """All readers, the questions under way and the answers that have come."""

    def __init__(self, readers: Readers, mine: Mapping[str, Any], shard: tuple[int, int]) -> None:
        self._readers, self._mine = readers, mine
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        keys, of = load_keys(readers.key_file, "trainer"), messages.order_digest(mine)
        first = shard[0] % len(readers.addresses)  # trainers begin with different ones
        self._lines: list[_Line] = []
        for address in (*readers.addresses[first:], *readers.addresses[:first]):
            self._lines.append(_Line(self._context, address, keys, of, shard))
            self._poller.register(self._lines[-1].socket, zmq.POLLIN)
        self._unasked: list[Position] = []
        self._answers: dict[Position, NumpyBatch | UserError | RuntimeError] = {}

    def ask(self, position: Position) -> None:
        self._unasked.append(position)
        self._give_out()

    def answer(self, position: Position) -> NumpyBatch:
        """The rows of a position that was asked for, once they are there; raised what they cost."""
        self._hear(0.0)  # what has come in the meantime, before anybody is judged by its silence
        self._wait(lambda: position in self._answers)
        found = self._answers.pop(position)
        if isinstance(found, Exception):
            raise found
        return found

    def meet(self) -> None:
        self._wait(lambda: any(line.there for line in self._lines))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _wait(self, over: Callable[[], bool]) -> None:
        since = time.monotonic()
        while True:
            self._tend()
            if over():
                return
            asking = not self._unasked and any(line.there for line in self._lines)
            if self._hear(PING_SECONDS if asking else POLL_SECONDS):
                since = time.monotonic()
            elif time.monotonic() - since > self._readers.timeout_seconds:
                raise self._nobody()

    def _hear(self, seconds: float) -> bool:
        """Take in all that is there, or comes first within so many seconds; whether anything came."""
        ready = dict(self._poller.poll(round(1000 * seconds)))
        for line in self._lines:
            if line.socket in ready:
                self._drain(line)
        return bool(ready)

    def _drain(self, line: _Line) -> None:
        while True:
            try:
                message = line.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            line.heard()
            self._take(line, messages.decode_header(message), message[1:])

    def _take(self, line: _Line, head: dict[str, Any] | None, arrays: Sequence[zmq.Frame]) -> None:
        match head:
            case {"differs": dict(theirs)}:
                raise self._differs(line, theirs)
            case {"number": int(number), "holds": list(held)}:
                self._unasked += line.missing(number, [(epoch, batch) for epoch, batch in held])
            case {"answer": [int(epoch), int(batch)], "error": str(error), "mistake": mistake}:
                told = UserError(error) if mistake else RuntimeError(f"reader {line.address}: {error}")
                self._keep((epoch, batch), told)
            case {"answer": [int(epoch), int(batch)]} if (rows := messages.decode_batch(head, arrays)) is not None:
                self._keep((epoch, batch), rows)
            case _:
                raise UserError(
                    f"reader {line.address}: what it says is none of this version's; run the same on both sides"
                )

    def _keep(self, position: Position, told: NumpyBatch | UserError | RuntimeError) -> None:
        """An answer, if it is the first to a question that is open."""
        asked = [other for other in self._lines if other.under_way.pop(position, None) is not None]
        if asked:
            self._answers[position] = told
        elif position in self._unasked:
            self._unasked.remove(position)
            self._answers[position] = told

    def _tend(self) -> None:
        """Know who is there, and ask what nobody has been asked."""
        for line in self._lines:
            if line.silent:
                self._unasked += line.gone()
                self._poller.unregister(before := line.again())
                before.close()
                self._poller.register(line.socket, zmq.POLLIN)
            if line.due and not line.say():
                self._unasked += line.gone()
        self._give_out()

    def _give_out(self) -> None:
        """The oldest question first, each to the reader with the fewest."""
        for position in sorted(self._unasked):
            for line in sorted((line for line in self._lines if line.there), key=lambda line: len(line.under_way)):
                if line.say(position):
                    self._unasked.remove(position)
                    break
                self._unasked += line.gone()

    def _differs(self, line: _Line, theirs: Mapping[str, Any]) -> UserError:
        found = [
            f"{name} is {theirs.get(name)!r} there and {mine!r} here"
            for name, mine in self._mine.items()
            if theirs.get(name) != mine
        ] or ["another version of Shardwright"]
        remedy = "start the reader with this run's recipe and overrides"
        return UserError(f"reader {line.address} serves other batches: {'; '.join(found)}; {remedy}")

    def _nobody(self) -> UserError:
        named = ", ".join(sorted(line.address for line in self._lines))
        keys = f", with the keys made beside {self._readers.key_file}" if self._readers.key_file else ""
        remedy = f"is one running there (`shardwright reader serve`){keys}?"
        return UserError(f"no reader has said a word for {self._readers.timeout_seconds:g} s at {named}; {remedy}")
