"""The journal of a table server: what it has acknowledged since the last copy of its rows, in one file.

A record is a message; the first one opens the run, or has the rows as they were. A server that was killed reads it
again and has lost nothing that it had acknowledged. A record that was cut off is the last one, and was not
acknowledged. Records reach the system's page cache before they are acknowledged, not the disk: a kill loses nothing,
a power failure may lose the last seconds.
"""

import fcntl
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import zmq

from shardwright.comm.transport.arrays import Message, decode_message
from shardwright.errors import UserError

FILE = "rows.journal"
NUMBER_BYTES = 8
CHECK_BYTES = 4
MIN_COMPACTED_BYTES = 64 << 20  # a journal with less is not replaced by a copy of the rows


class JournalError(Exception):
    """The journal cannot be written: the server ends before it acknowledges anything, and is started again."""


class CallJournal:
    """Appends records to the file in `directory`, which holds one server's journal."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{directory}: another table server has its journal there; choose another folder") from None
        except OSError as error:
            raise UserError(f"{directory}: {error.strerror}; choose a directory with write permission") from None
        self.path = directory / FILE
        self.bytes_ = 0  # since the last copy of the rows
        self._file = -1

    def read(self) -> Iterator[Message]:
        """The complete records; what follows them was cut off, and is removed."""
        complete = 0
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            while (message := self._read_message(file)) is not None:
                yield message
                self.bytes_ += file.tell() - complete
                complete = file.tell()
        if self.path.exists():
            os.truncate(self.path, complete)
            self._open(self.path)

    def _read_message(self, file: BinaryIO) -> Message | None:
        """The next record; None at the end."""
        try:
            frames = _read_record(file)
            message = None if frames is None else decode_message([zmq.Frame(frame) for frame in frames])
            if frames is not None and message is None:
                raise ValueError(frames)
        except ValueError:
            raise UserError(
                f"{self.path}: a record differs from what was written; remove the file, and resume the run from a "
                "checkpoint"
            ) from None
        return message

    def append(self, message: Message) -> None:
        try:
            self.bytes_ += self._write(self._file, message.encode())
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> JournalError:
        return JournalError(f"{self.path}: {error.strerror}; make room, and start the table server again")

    def begin(self, message: Message) -> None:
        """Replace all records by this one."""
        draft = self.path.with_suffix(".draft")
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                self._write(file, message.encode())
                os.fsync(file)
            finally:
                os.close(file)
            draft.replace(self.path)
            self._open(self.path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise self._error(error) from None
        self.bytes_ = 0

    def _open(self, path: Path) -> None:
        self.close()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def _write(self, file: int, frames: Sequence[memoryview | bytes]) -> int:
        lengths = b"".join(len(frame).to_bytes(NUMBER_BYTES, "little") for frame in frames)
        head = _with_check(len(frames).to_bytes(NUMBER_BYTES, "little")) + _with_check(lengths)
        parts = [memoryview(head), *map(memoryview, frames)]
        total = sum(map(len, parts))
        for part in parts:
            written = 0
            while written < len(part):
                written += os.write(file, part[written:])
        return total

    def remove(self) -> None:
        """The run has ended: forget it."""
        self.close()
        self.path.unlink(missing_ok=True)
        self.bytes_ = 0

    def unlock(self) -> None:
        self.close()
        os.close(self._lock)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


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
