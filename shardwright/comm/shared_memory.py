"""Messages between two ranks of a host: payloads in shared memory, their positions through a socket.

A sender has a ring for each peer and group: anonymous memory whose file descriptor goes through the socket, so that it
needs no name and disappears with the processes. A message is one copy into the ring, a header on the socket, and one
copy out of the ring when the receiver waits for it. Small messages go through the socket entirely. A sender never waits
for space: if the ring is full it creates a larger one, and without memory for that the socket carries the payload.
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

INLINE_BYTES = 1 << 13  # largest message whose payload goes through the socket
INITIAL_RING_BYTES = 1 << 20
MAX_RING_BYTES = 1 << 30
HostMembers = tuple[tuple[int, ...], ...]  # for each host, the indices of its ranks in a group
HEADER = struct.Struct(
    "<qqq"
)  # bytes of the payload, offset in the ring (0: the payload follows on the socket), bytes of a new ring


class ReceiveWork:
    """A posted receive into a tensor."""

    def __init__(self, channel: "Channel", number: int) -> None:
        self._channel, self._number = channel, number

    def wait(self) -> None:
        self._channel.wait_until_received(self._number)


class SendWork:
    """A message in flight: sent already unless the socket was full."""

    def __init__(self, channel: "Channel", number: int) -> None:
        self._channel, self._number = channel, number

    def wait(self) -> None:
        self._channel.wait_until_sent(self._number)


class Channel:
    """One end of the connection of two ranks for one group; messages arrive in the order of `send`.

    Any thread that waits, the step's or the lane's waiter, reads messages in order until its own has arrived. If the
    socket is full a thread sends the rest: otherwise two ranks that send to each other would deadlock.
    """

    def __init__(self, connection: socket.socket, timeout_seconds: float) -> None:
        seconds = int(timeout_seconds)
        limit = struct.pack("@ll", seconds, int((timeout_seconds - seconds) * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, limit)
        self._connection = connection
        self._send_ring: Ring | None = None
        self._receive_ring: Ring | None = None
        self._send_condition, self._receive_condition = Condition(), Condition()
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._num_queued = self._num_sent = 0
        self._sender: Thread | None = None
        self._send_error: RuntimeError | None = None
        self._receive_queue: deque[Tensor] = deque()
        self._num_posted = self._num_received = 0
        self._is_receiving = False
        self._receive_error: BaseException | None = None

    def send(self, x: Tensor) -> SendWork:
        flat = _as_bytes(x)
        with self._send_condition:
            if len(flat) <= INLINE_BYTES:
                self._enqueue(HEADER.pack(len(flat), 0, 0) + flat.numpy().tobytes())
            else:
                self._write_payload(flat)
            if self._send_error is not None:
                raise RuntimeError(str(self._send_error)) from self._send_error
            if self._sender is None:
                while self._unsent and self._send_some(socket.MSG_DONTWAIT):
                    pass
                if self._unsent:
                    self._sender = Thread(target=self._send_rest, name="sender", daemon=True)
                    self._sender.start()
            return SendWork(self, self._num_queued)

    def receive(self, into: Tensor) -> ReceiveWork:
        self._receive_queue.append(_as_bytes(into))
        self._num_posted += 1
        return ReceiveWork(self, self._num_posted)

    def wait_until_sent(self, number: int) -> None:
        """Wait until the socket has taken the first `number` queued buffers."""
        if self._num_sent < number:
            with self._send_condition:
                while self._num_sent < number:
                    if self._send_error is not None:
                        raise RuntimeError(str(self._send_error)) from self._send_error
                    self._send_condition.wait()

    def wait_until_received(self, number: int) -> None:
        """Wait until the first `number` posted messages have arrived."""
        with self._receive_condition:
            while self._num_received < number:
                if self._receive_error is not None:
                    raise RuntimeError(str(self._receive_error)) from self._receive_error
                if self._is_receiving:
                    self._receive_condition.wait()
                else:
                    self._receive_next()

    def close(self) -> None:
        """Close the connection; messages that threads still wait for fail."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if (sender := self._sender) is not None:
            sender.join()
        self._connection.close()
        for _, files in self._unsent:
            for file in files:
                os.close(file)
        self._unsent.clear()

    def _enqueue(self, data: bytes | memoryview, *files: int) -> None:
        self._unsent.append((memoryview(data), files))
        self._num_queued += 1

    def _write_payload(self, flat: Tensor) -> None:
        """Copy the message into the ring, or a new, larger one; without memory, queue it for the socket."""
        size, ring, new_bytes, files = len(flat), self._send_ring, 0, list[int]()
        offset = ring.reserve(size) if ring else None
        min_bytes = max(INITIAL_RING_BYTES, LINE_BYTES + size, 2 * ring.bytes_ if ring else 0)
        if offset is None and (new_ring := _create_ring(min_bytes)):
            ring, file = new_ring
            self._send_ring, offset, new_bytes = ring, ring.reserve(size), ring.bytes_
            files.append(file)
        if offset is None or ring is None:
            self._enqueue(HEADER.pack(size, 0, 0))
            self._enqueue(flat.numpy().data)
            return
        ring.memory[offset : offset + size].copy_(flat)
        self._enqueue(HEADER.pack(size, offset, new_bytes))
        if files:
            self._enqueue(b"\0", *files)

    def _send_some(self, flags: int) -> bool:
        """Send a part of the first queued buffer; returns whether the socket took any of it."""
        data, files = self._unsent[0]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(files)}i", *files))] if files else []
        try:
            num = self._connection.sendmsg([data], rights, flags)
        except BlockingIOError:
            if flags:
                return False
            raise RuntimeError("timed out while sending to a peer of this host") from None
        except OSError as error:
            raise RuntimeError(f"connection to a peer of this host: {error}") from error
        self._unsent[0] = data[num:], ()
        for file in files:
            os.close(file)
        if num == len(data):
            self._unsent.popleft()
            self._num_sent += 1
        return True

    def _send_rest(self) -> None:
        while True:
            try:
                self._send_some(0)
            except RuntimeError as error:
                self._send_error = error
            with self._send_condition:
                self._send_condition.notify_all()
                if self._send_error is not None or not self._unsent:
                    self._sender = None
                    return

    def _receive_next(self) -> None:
        """Read the next posted message, with the lock released so that other threads can wait."""
        self._is_receiving = True
        self._receive_condition.release()
        try:
            self._read_message(self._receive_queue.popleft())
        except BaseException as error:
            self._receive_error = error
            raise
        finally:
            self._receive_condition.acquire()
            self._is_receiving = False
            self._num_received += self._receive_error is None
            self._receive_condition.notify_all()

    def _read_message(self, into: Tensor) -> None:
        header, body = bytearray(HEADER.size), into.numpy().data
        early = body[: INLINE_BYTES if len(body) <= INLINE_BYTES else 0]
        num_early = self._receive_bytes([memoryview(header), early], HEADER.size) - HEADER.size
        size, offset, new_ring_bytes = HEADER.unpack(header)
        if size != len(body):
            raise RuntimeError(f"received a message of {size} bytes where {len(body)} were expected")
        if not offset:
            self._receive_bytes([body[num_early:]], size - num_early)
            return
        if new_ring_bytes:
            _, files, _, _ = socket.recv_fds(self._connection, 1, 1)
            self._receive_ring = _map_ring(files[0], new_ring_bytes)
        assert self._receive_ring is not None
        into.copy_(self._receive_ring.memory[offset : offset + size])
        self._receive_ring.mark_consumed()

    def _receive_bytes(self, buffers: list[memoryview], min_bytes: int) -> int:
        """Read into the buffers until at least `min_bytes` have arrived; returns the number of bytes."""
        total = 0
        while total < min_bytes:
            try:
                num = self._connection.recvmsg_into(buffers)[0]
            except BlockingIOError:
                raise RuntimeError("timed out waiting for a peer of this host") from None
            except OSError as error:
                raise RuntimeError(f"connection to a peer of this host: {error}") from error
            if not num:
                raise RuntimeError("connection closed by a peer of this host")
            total += num
            while buffers and num >= len(buffers[0]):
                num -= len(buffers.pop(0))
            if buffers:
                buffers[0] = buffers[0][num:]
        return total


def connect_channels(
    rank: int,
    host: int,
    groups: Sequence[Sequence[int]],
    all_gather: Callable[[Any], list[Any]],
    timeout_seconds: float,
    *,
    enabled: bool = True,
) -> list[tuple[dict[int, Channel], HostMembers]]:
    """Connect this rank to those of its host: for each group, channels by rank, and members by host.

    Blocking; two all-gathers over all ranks, by `all_gather`. Of two ranks the lower connects to the socket of the
    higher, a file in the host's temporary directory: if they are in fact on different hosts that fails, and both learn
    it in the second all-gather. The groups that two ranks share have the same order on both. Unless `enabled` there are
    no channels, and `host` alone determines which ranks share a host.
    """
    if not enabled:
        hosts = all_gather(host)
        all_pairs = [range(len(hosts))] * len(hosts)
        return [({}, _members_by_host(group, hosts, all_pairs)) for group in groups]
    with _listen(rank, max(map(len, groups), default=0), timeout_seconds) as (listener, path):
        hosts, paths = zip(*all_gather((host, path)), strict=True)
        local_peers = [peer for peer, peer_host in enumerate(hosts) if peer_host == host and peer != rank]
        shared_groups = {peer: [index for index, group in enumerate(groups) if peer in group] for peer in local_peers}
        sockets: dict[int, Iterable[socket.socket]] = {}
        for peer in local_peers:
            if peer > rank and shared_groups[peer]:
                with suppress(OSError):
                    sockets[peer] = _connect(rank, paths[peer], len(shared_groups[peer]), timeout_seconds)
        connections = all_gather(tuple(sockets))
        for _ in range(sum(rank in peers for peers in connections)):
            peer, peer_sockets = _accept(listener)
            sockets[peer] = peer_sockets
    channels: list[dict[int, Channel]] = [{} for _ in groups]
    for peer, peer_sockets in sockets.items():
        for index, connection in zip(shared_groups[peer], peer_sockets, strict=True):
            channels[index][peer] = Channel(connection, timeout_seconds)
    return list(zip(channels, [_members_by_host(group, hosts, connections) for group in groups], strict=True))


def _members_by_host(group: Sequence[int], hosts: Sequence[int], connections: Sequence[Sequence[int]]) -> HostMembers:
    """The group's members by host; each by itself if two ranks of the host could not connect.

    `hosts`: of each rank; `connections`: the higher ranks that each rank connected to.
    """
    members: list[tuple[int, ...]] = []
    for host in dict.fromkeys(hosts[rank] for rank in group):
        ranks = [rank for rank in group if hosts[rank] == host]
        all_connected = all(high in connections[low] for low, high in combinations(sorted(ranks), 2))
        members += [tuple(ranks)] if all_connected else [(rank,) for rank in ranks]
    return tuple(tuple(map(group.index, ranks)) for ranks in members)


@contextmanager
def _listen(rank: int, num: int, seconds: float) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket and its path; "" if there is no writable directory or the path is too long."""
    with ExitStack() as stack:
        listener, path = stack.enter_context(socket.socket(socket.AF_UNIX)), ""
        with suppress(OSError):
            folder = stack.enter_context(TemporaryDirectory(prefix="shardwright-"))
            listener.bind(f"{folder}/{rank}")
            listener.listen(num)
            listener.settimeout(seconds)
            path = f"{folder}/{rank}"
        yield listener, path


def _connect(rank: int, path: str, num: int, seconds: float) -> list[socket.socket]:
    """Connect to the peer at `path`: send it one end of a socket pair for each of `num` groups."""
    pairs = [socket.socketpair() for _ in range(num)]
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(path)
            socket.send_fds(connection, [struct.pack("<ii", rank, num)], [peer_end.fileno() for _, peer_end in pairs])
    except OSError:
        for own_end, _ in pairs:
            own_end.close()
        raise
    finally:
        for _, peer_end in pairs:
            peer_end.close()
    return [own_end for own_end, _ in pairs]


def _accept(listener: socket.socket) -> tuple[int, list[socket.socket]]:
    """Accept a peer's connection; returns its rank and this rank's ends of the socket pairs."""
    connection, _ = listener.accept()
    with connection:
        data, files, _, _ = socket.recv_fds(connection, 8, 253)
    return struct.unpack("<ii", data)[0], [socket.socket(fileno=file) for file in files]


def _create_ring(bytes_: int) -> tuple[Ring, int] | None:
    """A new ring and its file; None if it is too large, or memory or ordered accesses are missing."""
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


def _map_ring(file: int, bytes_: int) -> Ring:
    try:
        return Ring(file, bytes_)
    finally:
        os.close(file)


def _as_bytes(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.uint8)
