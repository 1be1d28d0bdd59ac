"""Files of arrays in the safetensors format, written and read in blocks of rows with a digest each.

The format is eight bytes of header length, a JSON header, and the values. The safetensors library is not used to write
because it copies all tensors first; any safetensors reader opens the files.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from threading import Lock
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from shardwright.checkpoint.manifest import BLOCK_BYTES, StoredArray
from shardwright.errors import UserError, check_regular_file
from shardwright.rectangle import StoredRows, dtype_name

ALIGNMENT = 64  # bytes; of the first array in the file
SAFETENSORS_DTYPES = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint8": "U8",
        "bool": "BOOL",
    }
)


def write(path: Path, arrays: Mapping[str, Tensor], stored_rows: Mapping[str, StoredRows]) -> dict[str, StoredArray]:
    """Write contiguous (rows, columns) arrays to a file and fsync it; returns where each is stored.

    `stored_rows`: the values of arrays that are meta tensors, which are read block by block.
    """
    starts, header, _ = _layout({name: (dtype_name(array.dtype), array.shape) for name, array in arrays.items()})
    stored = {}
    with path.open("wb") as file:
        file.write(header)
        for name, offset in starts.items():
            array = arrays[name]
            rows = _num_block_rows(array.shape[1] * array.element_size())
            digests = []
            for start in range(0, len(array), rows):
                part = array[start : start + rows]
                if name in stored_rows:
                    part = stored_rows[name].read(start, len(part))
                block = _byte_view(part)
                file.write(block)
                digests.append(hashlib.sha256(block).hexdigest())
            shape = (array.shape[0], array.shape[1])
            stored[name] = StoredArray(path.name, offset, dtype_name(array.dtype), shape, rows, tuple(digests))
        file.flush()
        os.fsync(file.fileno())
    return stored


def allocate_file(path: Path, specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Create a file of arrays with `specs` (dtype, shape), without values; returns tensors mapped to it."""
    starts, header, end = _layout(specs)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, end)  # a full disk raises here instead of a SIGBUS later
        file.write(header)
    tensors = {}
    for name, start in starts.items():
        dtype, shape = getattr(torch, specs[name][0]), specs[name][1]
        flat = torch.empty(0, dtype=dtype)
        if size := prod(shape) * dtype.itemsize:
            flat = torch.from_numpy(np.memmap(path, np.uint8, "r+", start, (size,))).view(dtype)
        tensors[name] = flat.view(shape)
    return tensors


def describe_file(
    path: Path, specs: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Mapping[str, Tensor]
) -> dict[str, StoredArray]:
    """Where each 2-D tensor of an `allocate_file` file is stored, with digests; for filled tensors."""
    starts, _, _ = _layout(specs)
    stored = {}
    for name, array in tensors.items():
        rows = _num_block_rows(array.shape[1] * array.element_size())
        blocks = [_byte_view(array[start : start + rows]) for start in range(0, len(array), rows)]
        digests = tuple(hashlib.sha256(block).hexdigest() for block in blocks)
        shape = (array.shape[0], array.shape[1])
        stored[name] = StoredArray(path.name, starts[name], dtype_name(array.dtype), shape, rows, digests)
    return stored


def memory_map(path: Path, stored: StoredArray) -> Tensor:
    """Map an array of a file copy-on-write: pages are read when touched; writes never reach the file."""
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if not stored.shape[0] * stored.shape[1]:
        return torch.empty(stored.shape, dtype=dtype)
    bytes_ = stored.shape[0] * stored.shape[1] * dtype.itemsize
    check_regular_file(path)
    try:
        memory = np.memmap(path, np.uint8, "c", stored.offset, (bytes_,))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be mapped into memory ({error}); export the model again") from None
    return torch.from_numpy(memory).view(dtype).view(stored.shape)


def _layout(specs: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[dict[str, int], bytes, int]:
    """The file offset of each array, the bytes before the first array, and the size of the file."""
    names = sorted(specs, key=lambda name: -getattr(torch, specs[name][0]).itemsize)  # largest first: each is aligned
    meta, offset = {}, 0
    for name in names:
        dtype, shape = specs[name]
        if dtype not in SAFETENSORS_DTYPES:
            raise UserError(f'"{name}" has dtype {dtype}; allowed: {", ".join(SAFETENSORS_DTYPES)}')
        size = prod(shape) * getattr(torch, dtype).itemsize
        meta[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(meta, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    first = 8 + len(text)
    starts = {name: first + meta[name]["data_offsets"][0] for name in names}
    return starts, len(text).to_bytes(8, "little") + text, first + offset


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Read the dtype, shape and file offset of each array.

    Raises an error unless the header is byte for byte what `write` would write for its arrays.
    """
    check_regular_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = file.read(8)
            text = file.read(min(int.from_bytes(length, "little"), size))
        dtypes = {code: dtype for dtype, code in SAFETENSORS_DTYPES.items()}
        specs = {name: (dtypes[array["dtype"]], tuple(array["shape"])) for name, array in json.loads(text).items()}
        starts, header, end = _layout(specs)
        if header != length + text or end != size:
            raise ValueError
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); use an earlier checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged_header_error(path) from None
    return {name: (*specs[name], start) for name, start in starts.items()}


def damaged_header_error(path: Path) -> UserError:
    return UserError(
        f"{path}: its header differs from what was written; the file is damaged, use an earlier checkpoint"
    )


class ArrayReader:
    """Reads arrays from the files of a directory; verifies each block against its digest. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handles: dict[str, int] = {}
        self._open_lock = Lock()

    def block_ranges(self, stored: StoredArray) -> Iterator[tuple[int, int]]:
        """First row and end (excluded) of each block."""
        for start in range(0, stored.shape[0], stored.block):
            yield start, min(start + stored.block, stored.shape[0])

    def read_block(self, stored: StoredArray, start: int, out: Tensor | None = None) -> Tensor:
        """Read and verify the block that begins at row `start`, into `out` if given (same dtype and size)."""
        dtype: torch.dtype = getattr(torch, stored.dtype)
        rows = min(stored.block, stored.shape[0] - start)
        row_bytes = stored.shape[1] * dtype.itemsize
        block = torch.empty(rows, stored.shape[1], dtype=dtype) if out is None else out
        memory = _byte_view(block)
        self._read_bytes(stored, memory, stored.offset + start * row_bytes)
        if hashlib.sha256(memory).hexdigest() != stored.digests[start // stored.block]:
            raise UserError(
                f"{self._folder / stored.file}: its digest differs from the manifest's; the checkpoint is damaged, "
                "use an earlier one"
            )
        return block

    def read_array(self, stored: StoredArray) -> Tensor:
        blocks = [self.read_block(stored, start) for start, _ in self.block_ranges(stored)]
        return torch.cat(blocks) if blocks else torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def _read_bytes(self, stored: StoredArray, memory: memoryview, offset: int) -> None:
        path = self._folder / stored.file
        try:
            with self._open_lock:
                if stored.file not in self._handles:
                    check_regular_file(path)
                    self._handles[stored.file] = os.open(path, os.O_RDONLY)
            done = 0
            while done < len(memory):
                num_read = os.preadv(self._handles[stored.file], [memory[done:]], offset + done)
                if not num_read:
                    raise UserError(f"{path}: truncated; the checkpoint is damaged, use an earlier one")
                done += num_read
        except FileNotFoundError:
            raise UserError(f"{path}: missing; the checkpoint is damaged, use an earlier one") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); use an earlier checkpoint") from None


def _num_block_rows(row_bytes: int) -> int:
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def _byte_view(array: Tensor) -> memoryview:
    return array.reshape(-1).view(torch.uint8).numpy().data
