"""Faults between ranks and table servers: what ranks run meanwhile, and links that fail."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from test_served_ranks import EXACT, served_plan
from test_steps import batch, make_model, single_plan, take

from shardwright.comm.transport.servers import TableServers
from shardwright.runtime.build import build
from shardwright.runtime.dense_layout import mesh_for
from shardwright.spec.optimizer import AdaGrad
from shardwright.spec.plan import Bounded

STEPS, SAMPLES, OPTIMIZER = 60, 24, AdaGrad(0.1)
BOUNDED = Bounded(6, 2, 320)
GREETING_BYTES = 64  # at the start of a zmq connection
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
NO_FRAME = b"\xff" * 20  # an impossible length
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Training:
    """A run of `train`. `pause`: seconds after each step. `progress`: a file that gets the number of steps of rank 0.
    `checkpoints`: where to save after half of the steps."""

    addresses: tuple[str, ...]
    sync: Bounded = EXACT
    world: int = 2
    pause: float = 0.0
    progress: str = ""
    checkpoints: str = ""
    timeout_seconds: float = 60.0


def train(training: Training):
    """Run on a rank: logits, and state."""
    model, world = make_model(OPTIMIZER), training.world
    plan = served_plan(single_plan(model), world, training.sync, ("t0", "t2"), len(training.addresses))
    servers = TableServers(training.addresses, timeout_seconds=training.timeout_seconds)
    mesh, outputs = mesh_for(plan, training.timeout_seconds, servers), []
    write_progress(training, mesh.rank, 0)
    try:
        job = build(model, plan, mesh, optimizer=lambda p: torch.optim.Adam(p, 0.01))
        begin, end = (SAMPLES * rank // world for rank in (mesh.rank, mesh.rank + 1))
        for out in job.run(take(batch(step), begin, end) for step in range(STEPS)):
            outputs.append(out.logits)
            if training.checkpoints and job.step == STEPS // 2:
                job.save(training.checkpoints)
            write_progress(training, mesh.rank, job.step)
            time.sleep(training.pause)
        state = job.state()
    finally:
        mesh.close()
    return outputs, {name: value for name, value in state.tensors.items() if not value.is_meta}


def write_progress(training: Training, rank: int, step: int) -> None:
    if training.progress and rank == 0:
        write_number(Path(training.progress), step)


def write_number(path: Path, number: int) -> None:
    """Write a file that others read at the same time."""
    draft = path.with_suffix(".draft")
    draft.write_text(str(number))
    draft.replace(path)


def read_progress(path: Path) -> int:
    """Steps of a run; -1 before it."""
    return int(path.read_text()) if path.exists() else -1


def wait_for_progress(path: Path, step: int, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while read_progress(path) < step:
        assert time.monotonic() < deadline, f"step {read_progress(path)} of {step}"
        time.sleep(0.002)


Filter = Callable[[bytes], bytes]


def pass_all(to_server: bool) -> Filter:
    return bytes


class Link:
    """Forwards connections to a server. `make_filter`: of the bytes of a connection in one direction."""

    def __init__(self, address: str, make_filter: Callable[[bool], Filter] = pass_all) -> None:
        self._port, self._make_filter = int(address.rpartition(":")[2]), make_filter
        self.num_waiting = self.num_cut = self.num_refused = 0  # bytes; connections
        self._writers = set[asyncio.StreamWriter]()
        self._is_cut = False
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.address = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> str:
        self._flows.set()
        self._listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            self.num_refused += 1
            writer.transport.abort()
            return
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        except ConnectionError:  # the server was killed
            writer.transport.abort()
            return
        self._writers |= {writer, to_server}
        both = (
            self._forward(reader, to_server, self._make_filter(True)),
            self._forward(from_server, writer, self._make_filter(False)),
        )
        await asyncio.gather(*both)
        self._writers -= {writer, to_server}

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Filter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                if not self._flows.is_set():
                    self.num_waiting += len(data)
                    await self._flows.wait()
                writer.write(change(data))
                await writer.drain()
        writer.close()

    def hold(self, seconds: float) -> None:
        """Forward nothing for some seconds; connections stay."""
        self._loop.call_soon_threadsafe(self._flows.clear)
        time.sleep(seconds)
        self._loop.call_soon_threadsafe(self._flows.set)

    def cut(self, seconds: float) -> None:
        """Close all connections, and refuse others for some seconds."""
        self._is_cut = True
        self._loop.call_soon_threadsafe(self._abort_all)
        time.sleep(seconds)
        self._is_cut = False

    def _abort_all(self) -> None:
        self.num_cut += len(self._writers)
        for writer in self._writers:
            writer.transport.abort()

    async def _stop(self) -> None:
        self._listener.close()
        self._abort_all()
        own = asyncio.current_task()
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not own), return_exceptions=True)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@contextmanager
def failing_link(address: str, make_filter: Callable[[bool], Filter] = pass_all) -> Iterator[Link]:
    link = Link(address, make_filter)
    try:
        yield link
    finally:
        link.close()


class ChangedMessages:
    """Loses, doubles, delays and damages some of the zmq messages that it forwards, or sends bytes that are no frame,
    after which the receiver closes the connection. `shares`: of each fault; `num_first`: first messages without."""

    def __init__(self, chance: random.Random, fired: Counter, shares: dict[str, float], num_first: int = 0) -> None:
        self._chance, self._fired, self._num_first = chance, fired, num_first
        self._faults, self._weights = ["", *shares], [1 - sum(shares.values()), *shares.values()]
        self._buffer, self._num_greeting = bytearray(), GREETING_BYTES
        self._frames: list[tuple[bytes, bytes]] = []  # head and content, of a message that is not complete
        self._delayed: list[tuple[int, bytes]] = []  # for so many further messages

    def __call__(self, data: bytes) -> bytes:
        greeting, data = data[: self._num_greeting], data[self._num_greeting :]
        self._num_greeting -= len(greeting)
        self._buffer += data
        parts = [greeting]
        while (head := self._next_head()) is not None:
            content = self._pop(int.from_bytes(self._pop(len(head))[1:], "big"))
            if head[0] & COMMAND:
                parts.append(head + content)
                continue
            self._frames.append((head, content))
            if not head[0] & MORE:
                parts += self._change(self._frames)
                self._frames = []
        return b"".join(parts)

    def _next_head(self) -> bytes | None:
        """Flags and length of the next frame, if it is complete."""
        size = 9 if self._buffer and self._buffer[0] & LONG else 2
        head = bytes(self._buffer[:size])
        is_complete = len(head) == size and len(self._buffer) >= size + int.from_bytes(head[1:], "big")
        return head if is_complete else None

    def _pop(self, size: int) -> bytes:
        part = bytes(self._buffer[:size])
        del self._buffer[:size]
        return part

    def _change(self, frames: list[tuple[bytes, bytes]]) -> list[bytes]:
        due = [message for wait, message in self._delayed if not wait]
        self._delayed = [(wait - 1, message) for wait, message in self._delayed if wait]
        self._num_first -= 1
        (fault,) = self._chance.choices(self._faults, self._weights) if self._num_first < 0 else ("",)
        self._fired[fault] += 1
        message, wait = b"".join(head + content for head, content in frames), self._chance.randrange(3)
        match fault:
            case "lost":
                return due
            case "doubled":
                return [message, message, *due]
            case "delayed":
                self._delayed.append((wait, message))
                return due
            case "no frame":
                return [NO_FRAME, message, *due]
            case "damaged":
                return [self._damage(frames), *due]
        return [message, *due]

    def _damage(self, frames: list[tuple[bytes, bytes]]) -> bytes:
        """The message with a changed byte in the content of a frame."""
        chosen = self._chance.choice([number for number, (_, content) in enumerate(frames) if content])
        contents = [bytearray(content) for _, content in frames]
        contents[chosen][self._chance.randrange(len(contents[chosen]))] ^= self._chance.randrange(1, 256)
        return b"".join(head + content for (head, _), content in zip(frames, contents, strict=True))
