"""Write a run's metrics as TensorBoard events, without TensorBoard.

An event is a few protobuf fields in a TFRecord frame. A frame is length, masked CRC of the length, data, masked CRC of
the data. The CRC is CRC-32C, rotated and offset as in TensorFlow.
"""

import socket
import struct
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

MASK_DELTA = 0xA282EAD8


class EventFileWriter:
    """Appends scalars to a new event file under `directory`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self._path = directory / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}"
        self._append(_double(1, now) + _bytes(3, b"brain.Event:2"))

    def add_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one event with the scalars of a step, by tag."""
        values = b"".join(_bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in scalars.items())
        self._append(_double(1, time.time()) + _integer(2, step) + _bytes(5, values))

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        with self._path.open("ab") as file:
            file.write(length + _masked_crc(length) + event + _masked_crc(event))


def _masked_crc(data: bytes) -> bytes:
    """The CRC of the data as TFRecord stores it."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of the data."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _crc_table() -> tuple[int, ...]:
    def make_entry(index: int) -> int:
        for _ in range(8):
            index = index >> 1 ^ 0x82F63B78 * (index & 1)
        return index

    return tuple(make_entry(index) for index in range(256))


def _integer(field: int, value: int) -> bytes:
    """A protobuf varint field."""
    return bytes((*_varint(field << 3), *_varint(value)))


def _double(field: int, value: float) -> bytes:
    """A protobuf double field."""
    return bytes(_varint(field << 3 | 1)) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    """A protobuf float field."""
    return bytes(_varint(field << 3 | 5)) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return bytes((*_varint(field << 3 | 2), *_varint(len(value)))) + value


def _varint(value: int) -> Iterator[int]:
    """The bytes of a protobuf varint."""
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value
