"""The journal of a table server: what it has acknowledged since the last copy of its rows, in a folder.

Files have records, which are messages. NUMBER.copy opens a run, or has all its rows as they were; NUMBER.calls has the
calls since then, and those with higher numbers the later ones. A server that was killed reads the last copy and all
calls since, and has lost nothing that it had acknowledged. A record that was cut off is the last one, and was not
acknowledged. Records reach the system's page cache before they are acknowledged, not the disk: a kill loses nothing,
a power failure may lose the last seconds.

A child process writes the copy of a server's rows: the server goes on, and its memory is copied where it changes.
"""

import fcntl
import os
import signal
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

import zmq

from shardwright.comm.transport.arrays import Message, decode_message
from shardwright.errors import UserError

COPY, CALLS = ".copy", ".calls"  # of file names, after their number
STDERR, MAX_FILES = 2, 1 << 20
NUMBER_BYTES = 8
CHECK_BYTES = 4
MIN_COPIED_BYTES = 64 << 20  # of calls; with fewer no copy is written


class JournalError(Exception):
    """The journal cannot be written: the server ends before it acknowledges anything, and is started again."""


class CallJournal:
    """Appends records to files in `directory`, which holds one server's journal."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{directory}: another table server has its journal there; choose another folder") from None
        except OSError as error:
            raise UserError(f"{directory}: {error.strerror}; choose a directory with write permission") from None
        self.directory = directory
        self.bytes_ = 0  # of calls since the last copy
        self._number = 0  # of the file that calls are written to
        self._file = -1
        self._writer, self._bytes_before = 0, 0  # the process that writes a copy, and the bytes of calls before it

    def read(self) -> Iterator[Message]:
        """The records of the last copy, then the calls since; a call that was cut off at the end is removed."""
        base = max(self._numbers(COPY), default=0)
        self._remove_below(base)
        if base:
            yield from (message for message, _ in _read_records(self._path(base, COPY), is_whole=True))
        for number in self._numbers(CALLS):
            path, complete = self._path(number, CALLS), 0
            for message, end in _read_records(path):
                yield message
                self.bytes_, complete = self.bytes_ + end - complete, end
            os.truncate(path, complete)
        if base:
            self._open(max([base, *self._numbers(CALLS)]))

    def append(self, message: Message) -> None:
        try:
            self.bytes_ += _write(self._file, message)
        except OSError as error:
            raise self._error(error) from None

    def begin(self, message: Message) -> None:
        """Replace all records by this one."""
        self._end_writer()
        try:
            self._write_copy(self._number + 1, [message])
            self._open(self._number + 1)
        except OSError as error:
            raise self._error(error) from None
        self._remove_below(self._number)
        self.bytes_ = 0

    def start_copy(self, records: Iterable[Message]) -> None:
        """Begin to write a copy in another process; from now on, calls are written to a file that follows it."""
        parent = os.getpid()
        try:
            self._open(self._number + 1)
            with warnings.catch_warnings():  # Python 3.12 warns, since other threads of this process may hold locks
                warnings.simplefilter("ignore", DeprecationWarning)
                self._writer = os.fork()
        except OSError as error:
            raise self._error(error) from None
        if not self._writer:
            self._write_copy_and_exit(records, parent)
        self._bytes_before = self.bytes_

    @property
    def is_copying(self) -> bool:
        return self._writer > 0

    def end_copy(self) -> bool | None:
        """Remove what a copy replaces, if it has been written: True. None: not yet; False: it could not be written,
        and what it would have replaced stays."""
        ended, status = os.waitpid(self._writer, os.WNOHANG)
        if not ended:
            return None
        self._writer = 0
        if status:
            self._path(self._number, ".draft").unlink(missing_ok=True)
            return False
        self._remove_below(self._number)
        self.bytes_ -= self._bytes_before
        return True

    def _write_copy(self, number: int, records: Iterable[Message]) -> None:
        draft = self._path(number, ".draft")
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                for record in records:
                    _write(file, record)
                os.fsync(file)
            finally:
                os.close(file)
            draft.replace(self._path(number, COPY))
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _write_copy_and_exit(self, records: Iterable[Message], parent: int) -> NoReturn:
        """In the child process, of which other threads are gone: no torch, no locks."""
        code = 1

        def check_parent() -> None:
            if os.getppid() != parent:
                raise OSError(0, "the server has ended")

        def while_needed() -> Iterator[Message]:
            for record in records:
                check_parent()
                yield record
            check_parent()

        try:
            os.closerange(STDERR + 1, MAX_FILES)  # the lock, sockets
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            self._write_copy(self._number, while_needed())
            code = 0
        except OSError as error:
            line = f"{self.directory}: no copy of the rows was written: {error.strerror}; calls are kept\n"
            os.write(STDERR, line.encode())
        finally:
            os._exit(code)

    def _end_writer(self) -> None:
        if self._writer:
            os.kill(self._writer, signal.SIGKILL)
            os.waitpid(self._writer, 0)
            self._path(self._number, ".draft").unlink(missing_ok=True)
        self._writer = 0

    def _error(self, error: OSError) -> JournalError:
        return JournalError(f"{self.directory}: {error.strerror}; make room, and start the table server again")

    def _open(self, number: int) -> None:
        """Write calls to this file from now on."""
        file = os.open(self._path(number, CALLS), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.close()
        self._file, self._number = file, number

    def _path(self, number: int, ending: str) -> Path:
        return self.directory / f"{number}{ending}"

    def _numbers(self, ending: str) -> list[int]:
        return sorted(int(path.stem) for path in self.directory.glob(f"*{ending}"))

    def _remove_below(self, number: int) -> None:
        for ending in (CALLS, COPY, ".draft"):  # calls could not be read without what is before them
            for each in reversed(self._numbers(ending)):
                if each < number:
                    self._path(each, ending).unlink()

    def remove(self) -> None:
        """The run has ended: forget it."""
        self._end_writer()
        self.close()
        self._remove_below(self._number + 1)
        self.bytes_ = 0

    def unlock(self) -> None:
        self._end_writer()
        self.close()
        os.close(self._lock)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _write(file: int, message: Message) -> int:
    """Append a record; the number of bytes."""
    frames: Sequence[memoryview | bytes] = message.encode()
    lengths = b"".join(len(frame).to_bytes(NUMBER_BYTES, "little") for frame in frames)
    head = _with_check(len(frames).to_bytes(NUMBER_BYTES, "little")) + _with_check(lengths)
    parts = [memoryview(head), *map(memoryview, frames)]
    for part in parts:
        written = 0
        while written < len(part):
            written += os.write(file, part[written:])
    return sum(map(len, parts))


def _read_records(path: Path, *, is_whole: bool = False) -> Iterator[tuple[Message, int]]:
    """The complete records of a file, and where each ends; `is_whole`: nothing may follow them."""
    end = 0
    with path.open("rb") as file:
        while True:
            try:
                if (frames := _read_record(file)) is None:
                    if is_whole and end < path.stat().st_size:
                        raise ValueError(end)
                    return
                if (message := decode_message([zmq.Frame(frame) for frame in frames])) is None:
                    raise ValueError(frames)
            except ValueError:
                raise UserError(
                    f"{path}: a record differs from what was written; remove the folder, and resume the run from a "
                    "checkpoint"
                ) from None
            end = file.tell()
            yield message, end


def _read_record(file: BinaryIO) -> list[bytes] | None:
    """The frames of the next record; None if it is not complete. Raises ValueError if its head is damaged."""
    number = _read_checked(file, NUMBER_BYTES)
    lengths = None if number is None else _read_checked(file, NUMBER_BYTES * int.from_bytes(number, "little"))
    if lengths is None:
        return None
    sizes = [int.from_bytes(lengths[i : i + NUMBER_BYTES], "little") for i in range(0, len(lengths), NUMBER_BYTES)]
    frames = [file.read(size) for size in sizes]
    return frames if all(len(frame) == size for frame, size in zip(frames, sizes, strict=True)) else None


def _with_check(part: bytes) -> bytes:
    return part + zlib.crc32(part).to_bytes(CHECK_BYTES, "little")


def _read_checked(file: BinaryIO, size: int) -> bytes | None:
    """So many bytes, which their check follows; None at the end of the file."""
    part, check = file.read(size), file.read(CHECK_BYTES)
    if len(check) < CHECK_BYTES:
        return None
    if part + check != _with_check(part):
        raise ValueError(check)
    return part
