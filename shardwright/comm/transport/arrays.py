"""Arrays in messages: a JSON header with the type and shape of each, and their raw bytes. Must not import torch."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import zmq

NUMERIC_DTYPE = r"[<>|][iufb][1248]"  # numpy dtypes of plain numbers
ALIGNMENT = 8  # bytes; a small frame may start at any address of the receive buffer
CHECK_BYTES = 4  # before a header
WORD = 8  # bytes, of which a checksum is the sum


@dataclass(frozen=True, slots=True)
class Message:
    """A header of JSON values, and arrays."""

    header: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = field(default_factory=tuple)

    def encode(self) -> list[Any]:
        """Frames, without copies of the arrays."""
        frames = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in self.arrays]
        specs = [
            (array.dtype.str, array.shape, checksum(frame)) for array, frame in zip(self.arrays, frames, strict=True)
        ]
        header = json.dumps({**self.header, "arrays": specs}).encode()
        return [_check_of(header) + header, *(frame.data for frame in frames)]


def decode_message(frames: Sequence[zmq.Frame]) -> Message | None:
    """A message whose arrays use the frames' memory; None if it is malformed, or differs from what was sent."""
    try:
        check, text = frames[0].bytes[:CHECK_BYTES], frames[0].bytes[CHECK_BYTES:]
        if check != _check_of(text):
            return None
        header = json.loads(text)
        specs = header.pop("arrays")
        arrays = []
        for (dtype, shape, expected), frame in zip(specs, frames[1:], strict=True):
            array = view_array(dtype, shape, frame.buffer)
            if not array.dtype.isnative or checksum(array.reshape(-1).view(np.uint8)) != expected:
                return None
            arrays.append(array)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError, MemoryError):
        return None
    return Message(header, arrays)


def view_array(dtype: str, shape: Sequence[int], memory: memoryview) -> np.ndarray:
    """The array in some bytes; raises ValueError if they do not match."""
    if not re.fullmatch(NUMERIC_DTYPE, dtype):
        raise ValueError(dtype)
    parsed_dtype = np.dtype(dtype)
    num_bytes = prod(shape) * parsed_dtype.itemsize
    if num_bytes != memory.nbytes or min(shape, default=0) < 0:
        raise ValueError(f"{num_bytes} bytes of {memory.nbytes}")
    array = np.ndarray(tuple(shape), parsed_dtype, memory if memory.nbytes else None)
    return array if array.ctypes.data % ALIGNMENT == 0 else array.copy()


def checksum(flat: np.ndarray) -> int:
    """Of bytes: it differs if one of their words does."""
    end = len(flat) // WORD * WORD
    words = int(np.add.reduce(flat[:end].view(np.uint64), dtype=np.uint64)) if end else 0
    rest = int.from_bytes(flat[end:].tobytes(), "little")
    return (words + rest + len(flat)) % (1 << 64)


def _check_of(header: bytes) -> bytes:
    return zlib.crc32(header).to_bytes(CHECK_BYTES, "little")
