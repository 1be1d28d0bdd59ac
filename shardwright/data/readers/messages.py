"""What trainers and readers say to each other: JSON, and the arrays of a batch as they lie in memory.

A trainer's message is one frame: how its order is known (`of`), its share, a number, the positions it asks for, perhaps
none. A reader's is a header, and behind that of an answer the bytes of each array. Nothing here is pickled, and
whatever does not read as such a message is None: a port is open to anybody.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from shardwright.data.sources.source import NumpyBatch, Position

VERSION = 1  # of these messages
NUMERIC_KINDS = "iufb"  # kinds of numpy's that are plain numbers
ALIGNMENT = 8  # bytes; a small frame lies anywhere in what the network gave
MAX_INTEGER = 2**40  # epochs, batches and ranks that are still taken for such


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a trainer says; without positions it only wants to hear whether the reader is there."""

    order_digest: str
    shard: tuple[int, int]
    number: int
    positions: tuple[Position, ...]

    def encode(self) -> bytes:
        said = {
            "version": VERSION,
            "of": self.order_digest,
            "shard": self.shard,
            "number": self.number,
            "ask": self.positions,
        }
        return json.dumps(said).encode()


def order_digest(identity: Mapping[str, Any]) -> str:
    """An order, and the version of these messages, in few bytes."""
    return hashlib.sha256(json.dumps([VERSION, identity], sort_keys=True).encode()).hexdigest()


def decode_request(frames: Sequence[bytes]) -> BatchRequest | None:
    try:
        (frame,) = frames
        said = json.loads(frame)
        positions = tuple(map(_pair, said["ask"]))
        found = BatchRequest(str(said["of"]), _pair(said["shard"]), _whole(said["number"]), positions)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if found.shard[0] < found.shard[1] else None


def _pair(value: Any) -> tuple[int, int]:
    first, second = value
    return _whole(first), _whole(second)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_INTEGER:
        raise ValueError(value)
    return value


def encode_batch(position: Position, batch: NumpyBatch) -> list[Any]:
    """The frames of a batch: no array is copied."""
    arrays = batch.arrays()
    told = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    head = {"answer": position, "features": batch.features, "arrays": told}
    return [json.dumps(head).encode(), *(array.reshape(-1).view(np.uint8).data for array in arrays.values())]


def encode_message(**said: Any) -> bytes:
    """A reader's message without a batch."""
    return json.dumps(said).encode()


def decode_header(frames: Sequence[zmq.Frame]) -> dict[str, Any] | None:
    """The first frame of a reader's message."""
    try:
        found = json.loads(frames[0].bytes)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def decode_batch(header: Mapping[str, Any], frames: Sequence[zmq.Frame]) -> NumpyBatch | None:
    """The batch in the memory in which it came."""
    try:
        arrays = {
            name: _array(dtype, shape, frame.buffer)
            for (name, dtype, shape), frame in zip(header["arrays"], frames, strict=True)
        }
        return NumpyBatch.from_arrays(header["features"], arrays)
    except (ValueError, TypeError, KeyError):
        return None


def _array(dtype: str, shape: Sequence[int], memory: memoryview) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind not in NUMERIC_KINDS:
        raise ValueError(dtype)
    array = np.ndarray(tuple(shape), kind, memory if memory.nbytes else None)
    if array.nbytes != memory.nbytes:
        raise ValueError(f"{array.nbytes} bytes of {memory.nbytes}")
    return array if array.ctypes.data % ALIGNMENT == 0 else array.copy()
