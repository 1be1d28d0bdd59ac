"""A table server: a process that owns rows of tables for the ranks of a run (`shardwright serve-tables`).

One thread receives calls over a zmq ROUTER socket, answers them (call_handler.py), and sends the replies. Kernels and
copies of rows run without the interpreter's lock; zmq sends and receives in a thread of its own.
"""

import errno
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from shardwright.comm.transport.arrays import Message, decode_message
from shardwright.comm.transport.contexts import KeptContext
from shardwright.comm.transport.keys import CurveKeys, bind_router, check_address, start_authenticator
from shardwright.embeddings.service.call_handler import CallHandler, Reply, Served
from shardwright.embeddings.service.journal import CallJournal, JournalError
from shardwright.embeddings.service.owned_rows import RoundFailed
from shardwright.errors import UserError
from shardwright.kernels.native import retain_freed_memory

POLL_MILLISECONDS = 200  # bounded, since a signal that arrives right before a poll does not interrupt it
LOG_INTERVAL_SECONDS = 10.0
MAX_FRAME_BYTES = 1 << 31  # of a rank's message
BUSY = Message({"busy": True})
KEYS_REMEDY = "serve with --keys DIR/server.keys"


class TableServer:
    """Serves the rows of one run at a time. The constructor binds the socket; call `run`, which ends only by an
    exception such as KeyboardInterrupt, then `close`."""

    def __init__(
        self, bind: str = "tcp://127.0.0.1:0", *, keys: CurveKeys | None = None, journal: Path | None = None
    ) -> None:
        check_address(bind, keys, KEYS_REMEDY, "table server")
        retain_freed_memory()
        self._handler = CallHandler(
            CallJournal(journal) if journal is not None else None, is_connected=self._is_connected
        )
        self._context = KeptContext()
        self._authenticator = start_authenticator(self._context.context, keys)
        try:
            self._socket = bind_router(self._context.context, bind, keys, "table server", MAX_FRAME_BYTES)
        except BaseException:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._logged_at, self._logged, self._cpu_seconds = time.monotonic(), Served(), time.process_time()

    def run(self, write_line: Callable[[str], None]) -> None:
        """Serve for ever; `write_line` receives a line about every LOG_INTERVAL_SECONDS in which ranks called.

        While the journal is read, ranks are told to wait."""
        for _ in self._handler.restore():
            self._receive_calls(lambda client, _: [(client, BUSY)])
        while True:
            if self._socket.poll(POLL_MILLISECONDS):
                try:
                    self._receive_calls(self._handler.handle)
                except (JournalError, RoundFailed) as error:
                    raise UserError(str(error)) from None
            self._log(write_line)

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.close()
        self._handler.close()

    def _receive_calls(self, answer: Callable[[bytes, Message], list[Reply]]) -> None:
        while True:
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message = decode_message(frames)
            if message is None:
                self._handler.served.malformed += 1
                continue
            for receiver, reply in answer(client.bytes, message):
                self._send(receiver, reply)

    def _send(self, client: bytes, message: Message) -> bool:
        """Send a message; False if the rank has disconnected: it repeats its calls when it is back."""
        try:
            self._socket.send_multipart([client, *message.encode()], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            pass  # its queue is full: it repeats the call
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def _is_connected(self, client: bytes) -> bool:
        return self._send(client, Message({"probe": True}))

    def _log(self, write_line: Callable[[str], None]) -> None:
        now, cpu, served = time.monotonic(), time.process_time(), self._handler.served
        if (seconds := now - self._logged_at) < LOG_INTERVAL_SECONDS:
            return
        before, share = self._logged, (cpu - self._cpu_seconds) / seconds
        self._logged_at, self._cpu_seconds = now, cpu
        self._logged = Served(served.read, served.sent, served.updated, served.malformed)
        if served.read > before.read or served.updated > before.updated:
            rates = [served.read - before.read, served.sent - before.sent, served.updated - before.updated]
            read, sent, updated = (f"{rate / seconds:,.0f}" for rate in rates)
            write_line(f"{read} rows/s read, {sent} sent, {updated} updated; {share:.0%} of a core")
        if served.malformed > before.malformed:
            write_line(f"{served.malformed - before.malformed} malformed messages were refused")
