"""Messages between trainers and readers: JSON headers, and the raw bytes of a batch's arrays.

A trainer sends one frame: the digest of its sample order (`of`), its shard, a message number, and the requested
positions (`ask`), perhaps none. A reader sends a header; after the header of an answer follows one frame of bytes per
array. Nothing is pickled, and malformed messages decode to None, since any host may connect to the port.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from shardwright.comm.transport.arrays import view_array
from shardwright.data.sources.source import NumpyBatch, Position

VERSION = 1  # of the message format
MAX_INTEGER = 2**40  # upper bound of a valid epoch, batch, rank or message number


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Message of a trainer: a request for batches, or without positions a ping."""

    order_digest: str
    shard: tuple[int, int]
    number: int
    positions: tuple[Position, ...]

    def encode(self) -> bytes:
        fields = {
            "version": VERSION,
            "of": self.order_digest,
            "shard": self.shard,
            "number": self.number,
            "ask": self.positions,
        }
        return json.dumps(fields).encode()


def order_digest(identity: Mapping[str, Any]) -> str:
    """Digest of a sample order (see `order_identity`) and the message format version."""
    return hashlib.sha256(json.dumps([VERSION, identity], sort_keys=True).encode()).hexdigest()


def decode_request(frames: Sequence[bytes]) -> BatchRequest | None:
    """Decode a trainer's message; None if it is malformed."""
    try:
        (frame,) = frames
        fields = json.loads(frame)
        positions = tuple(map(_parse_pair, fields["ask"]))
        request = BatchRequest(
            str(fields["of"]), _parse_pair(fields["shard"]), _parse_integer(fields["number"]), positions
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return request if request.shard[0] < request.shard[1] else None


def _parse_pair(value: Any) -> tuple[int, int]:
    first, second = value
    return _parse_integer(first), _parse_integer(second)


def _parse_integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_INTEGER:
        raise ValueError(value)
    return value


def encode_batch(position: Position, batch: NumpyBatch) -> list[Any]:
    """Encode an answer as frames, without copies of the arrays."""
    arrays = batch.arrays()
    array_specs = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    header = {"answer": position, "features": batch.features, "arrays": array_specs}
    return [json.dumps(header).encode(), *(array.reshape(-1).view(np.uint8).data for array in arrays.values())]


def encode_message(**fields: Any) -> bytes:
    """Encode a reader's message without a batch."""
    return json.dumps(fields).encode()


def decode_header(frames: Sequence[zmq.Frame]) -> dict[str, Any] | None:
    """Decode the first frame of a reader's message; None if it is malformed."""
    try:
        header = json.loads(frames[0].bytes)
    except ValueError:
        return None
    return header if isinstance(header, dict) else None


def decode_batch(header: Mapping[str, Any], frames: Sequence[zmq.Frame]) -> NumpyBatch | None:
    """Decode an answer into a batch that uses the frames' memory; None if it is malformed."""
    try:
        arrays = {
            name: view_array(dtype, shape, frame.buffer)
            for (name, dtype, shape), frame in zip(header["arrays"], frames, strict=True)
        }
        return NumpyBatch.from_arrays(header["features"], arrays)
    except (ValueError, TypeError, KeyError):
        return None
