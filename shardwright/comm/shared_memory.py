"""Messages between two ranks of one host: bytes lie in memory that both map, a socket says where.

A sender has a ring of its own for each peer and group: anonymous memory, handed over through the socket, so that
nothing of it has a name and all of it goes with the processes. A message is one copy into the ring, a few words on the
socket, and one copy out of it when the receiver waits for it. What is small goes through the socket whole. A sender
never waits for a place: where none is free it takes a larger ring, and where there is no memory for one, the socket
carries all.
"""

import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import combinations
from tempfile import TemporaryDirectory
from threading import Condition, Thread
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.ring import LINE_BYTES, Ring, orders_memory

INLINE_BYTES = 1 << 13  # up to which the socket carries the bytes themselves
INITIAL_RING_BYTES = 1 << 20  # of a ring
MAX_RING_BYTES = 1 << 30
HostMembers = tuple[tuple[int, ...], ...]  # places in a group of the ranks of each
HEADER = struct.Struct("<qqq")  # bytes of the message, where in the ring (0: behind this), bytes of a ring that is new


class ReceiveWork:
    """A message on its way into its tensor."""

    def __init__(self, channel: "Channel", number: int) -> None:
        self._channel, self._number = channel, number

    def wait(self) -> None:
        self._channel.wait_until_received(self._number)


class SendWork:
    """A message on its way out: gone already, unless the socket was full."""

    def __init__(self, channel: "Channel", number: int) -> None:
        self._channel, self._number = channel, number

    def wait(self) -> None:
        self._channel.wait_until_sent(self._number)


class Channel:
    """One end of what two ranks have for one group. Messages come in the order in which they were sent.

    Whoever waits, the thread of the step or the lane's waiter, takes what comes first, until his own message is there.
    Where the socket is full, a thread pushes the rest: two that send to each other would else wait for one another.
    """

    def __init__(self, connection: socket.socket, timeout_seconds: float) -> None:
        whole = int(timeout_seconds)
        limit = struct.pack("@ll", whole, int((timeout_seconds - whole) * 1e6))
        for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, way, limit)
        self._connection = connection
        self._mine: Ring | None = None
        self._theirs: Ring | None = None
        self._sending, self._turn = Condition(), Condition()
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._queued = self._pushed = 0
        self._pusher: Thread | None = None
        self._stuck: RuntimeError | None = None
        self._awaited: deque[Tensor] = deque()
        self._posted = self._taken = 0
        self._reading = False
        self._error: BaseException | None = None

    def send(self, x: Tensor) -> SendWork:
        flat = _bytes(x)
        with self._sending:
            if len(flat) <= INLINE_BYTES:
                self._queue(HEADER.pack(len(flat), 0, 0) + flat.numpy().tobytes())
            else:
                self._lay(flat)
            if self._stuck is not None:
                raise RuntimeError(str(self._stuck)) from self._stuck
            if self._pusher is None:
                while self._unsent and self._push(socket.MSG_DONTWAIT):
                    pass
                if self._unsent:
                    self._pusher = Thread(target=self._push_rest, name="pusher", daemon=True)
                    self._pusher.start()
            return SendWork(self, self._queued)

    def receive(self, into: Tensor) -> ReceiveWork:
        self._awaited.append(_bytes(into))
        self._posted += 1
        return ReceiveWork(self, self._posted)

    def wait_until_sent(self, number: int) -> None:
        """Wait until so many pieces of messages are on their way."""
        if self._pushed < number:
            with self._sending:
                while self._pushed < number:
                    if self._stuck is not None:
                        raise RuntimeError(str(self._stuck)) from self._stuck
                    self._sending.wait()

    def wait_until_received(self, number: int) -> None:
        """Wait until so many messages have arrived."""
        with self._turn:
            while self._taken < number:
                if self._error is not None:
                    raise RuntimeError(str(self._error)) from self._error
                if self._reading:
                    self._turn.wait()
                else:
                    self._take()

    def close(self) -> None:
        """What others still wait for fails."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if (pusher := self._pusher) is not None:
            pusher.join()
        self._connection.close()
        for _, files in self._unsent:
            for file in files:
                os.close(file)
        self._unsent.clear()

    def _queue(self, words: bytes | memoryview, *files: int) -> None:
        self._unsent.append((memoryview(words), files))
        self._queued += 1

    def _lay(self, flat: Tensor) -> None:
        """Into the ring, a larger one if need be; without memory for it, behind its header."""
        size, ring, new, files = len(flat), self._mine, 0, list[int]()
        at = ring.reserve(size) if ring else None
        if at is None and (made := _made(max(INITIAL_RING_BYTES, LINE_BYTES + size, 2 * ring.bytes_ if ring else 0))):
            ring, file = made
            self._mine, at, new = ring, ring.reserve(size), ring.bytes_
            files.append(file)
        if at is None or ring is None:
            self._queue(HEADER.pack(size, 0, 0))
            self._queue(flat.numpy().data)
            return
        ring.memory[at : at + size].copy_(flat)
        self._queue(HEADER.pack(size, at, new))
        if files:
            self._queue(b"\0", *files)

    def _push(self, flags: int) -> bool:
        """Some of the first piece that is left; whether the socket took any."""
        words, files = self._unsent[0]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(files)}i", *files))] if files else []
        try:
            num = self._connection.sendmsg([words], rights, flags)
        except BlockingIOError:
            if flags:
                return False
            raise RuntimeError("timed out while sending to a peer of this host") from None
        except OSError as error:
            raise RuntimeError(f"connection to a peer of this host: {error}") from error
        self._unsent[0] = words[num:], ()
        for file in files:
            os.close(file)
        if num == len(words):
            self._unsent.popleft()
            self._pushed += 1
        return True

    def _push_rest(self) -> None:
        while True:
            try:
                self._push(0)
            except RuntimeError as error:
                self._stuck = error
            with self._sending:
                self._sending.notify_all()
                if self._stuck is not None or not self._unsent:
                    self._pusher = None
                    return

    def _take(self) -> None:
        """The next message, while others are free to wait for it."""
        self._reading = True
        self._turn.release()
        try:
            self._read(self._awaited.popleft())
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._turn.acquire()
            self._reading = False
            self._taken += self._error is None
            self._turn.notify_all()

    def _read(self, into: Tensor) -> None:
        header, body = bytearray(HEADER.size), into.numpy().data
        early = body[: INLINE_BYTES if len(body) <= INLINE_BYTES else 0]
        got = self._filled([memoryview(header), early], HEADER.size) - HEADER.size
        size, at, new = HEADER.unpack(header)
        if size != len(body):
            raise RuntimeError(f"a message of {size} bytes where {len(body)} were awaited")
        if not at:
            self._filled([body[got:]], size - got)
            return
        if new:
            _, files, _, _ = socket.recv_fds(self._connection, 1, 1)
            self._theirs = _mapped(files[0], new)
        assert self._theirs is not None
        into.copy_(self._theirs.memory[at : at + size])
        self._theirs.mark_consumed()

    def _filled(self, parts: list[memoryview], enough: int) -> int:
        """The bytes that came into these parts, at least so many."""
        got = 0
        while got < enough:
            try:
                num = self._connection.recvmsg_into(parts)[0]
            except BlockingIOError:
                raise RuntimeError("timed out waiting for a peer of this host") from None
            except OSError as error:
                raise RuntimeError(f"connection to a peer of this host: {error}") from error
            if not num:
                raise RuntimeError("connection closed by a peer of this host")
            got += num
            while parts and num >= len(parts[0]):
                num -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][num:]
        return got


def connect_channels(
    rank: int,
    host: int,
    groups: Sequence[Sequence[int]],
    all_gather: Callable[[Any], list[Any]],
    timeout_seconds: float,
    *,
    enabled: bool = True,
) -> list[tuple[dict[int, Channel], HostMembers]]:
    """For each of the groups of this rank its channels to those members that are near, and which share a host.

    `tell` says something to all ranks and gives what each said. Of two, the lower rank calls; it does so by a name in
    this host's folder of temporary files, so that a rank that is only said to be on this host cannot be called, and
    both know. Groups of two ranks come in one order on both. Without `used` all of a host are said to share it, and
    nobody is called.
    """
    if not enabled:
        where = all_gather(host)
        everyone = [range(len(where))] * len(where)
        return [({}, _hosts(group, where, everyone)) for group in groups]
    with _listening(rank, max(map(len, groups), default=0), timeout_seconds) as (listener, name):
        said = all_gather((host, name))
        near = [peer for peer, (where, _) in enumerate(said) if where == host and peer != rank]
        common = {peer: [at for at, group in enumerate(groups) if peer in group] for peer in near}
        ends: dict[int, Iterable[socket.socket]] = {}
        for peer in near:
            if peer > rank and common[peer]:
                with suppress(OSError):
                    ends[peer] = _called(rank, said[peer][1], len(common[peer]), timeout_seconds)
        reached = all_gather(tuple(ends))
        for _ in range(sum(rank in theirs for theirs in reached)):
            peer, theirs = _answered(listener)
            ends[peer] = theirs
    found: list[dict[int, Channel]] = [{} for _ in groups]
    for peer, sockets in ends.items():
        for at, one in zip(common[peer], sockets, strict=True):
            found[at][peer] = Channel(one, timeout_seconds)
    return list(zip(found, [_hosts(group, [where for where, _ in said], reached) for group in groups], strict=True))


def _hosts(group: Sequence[int], where: Sequence[int], reached: Sequence[Sequence[int]]) -> HostMembers:
    """The group's members by host; alone those of a host on which one could not call another."""
    found: list[tuple[int, ...]] = []
    for host in dict.fromkeys(where[rank] for rank in group):
        ranks = [rank for rank in group if where[rank] == host]
        joined = all(two in reached[one] for one, two in combinations(sorted(ranks), 2))
        found += [tuple(ranks)] if joined else [(rank,) for rank in ranks]
    return tuple(tuple(map(group.index, ranks)) for ranks in found)


@contextmanager
def _listening(rank: int, num: int, seconds: float) -> Iterator[tuple[socket.socket, str]]:
    """A socket and the name it is called by; none where there is no folder to write to, or its path is too long."""
    with ExitStack() as kept:
        listener, name = kept.enter_context(socket.socket(socket.AF_UNIX)), ""
        with suppress(OSError):
            folder = kept.enter_context(TemporaryDirectory(prefix="shardwright-"))
            listener.bind(f"{folder}/{rank}")
            listener.listen(num)
            listener.settimeout(seconds)
            name = f"{folder}/{rank}"
        yield listener, name


def _called(rank: int, name: str, num: int, seconds: float) -> list[socket.socket]:
    """A pair of ends for each group; the peer gets the other half."""
    pairs = [socket.socketpair() for _ in range(num)]
    try:
        with socket.socket(socket.AF_UNIX) as call:
            call.settimeout(seconds)
            call.connect(name)
            socket.send_fds(call, [struct.pack("<ii", rank, num)], [theirs.fileno() for _, theirs in pairs])
    except OSError:
        for mine, _ in pairs:
            mine.close()
        raise
    finally:
        for _, theirs in pairs:
            theirs.close()
    return [mine for mine, _ in pairs]


def _answered(listener: socket.socket) -> tuple[int, list[socket.socket]]:
    call, _ = listener.accept()
    with call:
        words, files, _, _ = socket.recv_fds(call, 8, 253)
    return struct.unpack("<ii", words)[0], [socket.socket(fileno=file) for file in files]


def _made(bytes_: int) -> tuple[Ring, int] | None:
    """A ring and its file; None where it would be too large, there is no memory, or nothing orders its accesses."""
    if bytes_ > MAX_RING_BYTES or not orders_memory():
        return None
    try:
        file = os.memfd_create("shardwright")
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, bytes_)
        return Ring(file, bytes_), file
    except (OSError, RuntimeError):
        os.close(file)
        return None


def _mapped(file: int, bytes_: int) -> Ring:
    try:
        return Ring(file, bytes_)
    finally:
        os.close(file)


def _bytes(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.uint8)
