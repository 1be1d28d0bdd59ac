"""Files of arrays in the safetensors form, written and read in blocks of rows, each with a digest of its own.

The form is eight bytes of length, a header in JSON, and the numbers. It is written here and not by its library because
that copies all tensors first; readers of any library open the files.
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
from shardwright.rectangle import dtype_name

ALIGNMENT = 64  # bytes, to which the first array is put
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


def write(path: Path, arrays: Mapping[str, Tensor]) -> dict[str, StoredArray]:
    """A file of arrays, forced to disk; each is (rows, columns) and contiguous."""
    starts, header, _ = _laid_out({name: (dtype_name(array.dtype), array.shape) for name, array in arrays.items()})
    found = {}
    with path.open("wb") as file:
        file.write(header)
        for name, offset in starts.items():
            array = arrays[name]
            rows = _rows_of_block(array.shape[1] * array.element_size())
            digests = []
            for start in range(0, len(array), rows):
                block = _bytes(array[start : start + rows])
                file.write(block)
                digests.append(hashlib.sha256(block).hexdigest())
            shape = (array.shape[0], array.shape[1])
            found[name] = StoredArray(path.name, offset, dtype_name(array.dtype), shape, rows, tuple(digests))
        file.flush()
        os.fsync(file.fileno())
    return found


def allocate_file(path: Path, specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """A file of arrays of these dtypes and shapes, without values: what is put into the tensors is written to it."""
    starts, header, end = _laid_out(specs)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, end)  # a full disk is then an error here, and not a fault later
        file.write(header)
    found = {}
    for name, start in starts.items():
        dtype, shape = getattr(torch, specs[name][0]), specs[name][1]
        flat = torch.empty(0, dtype=dtype)
        if size := prod(shape) * dtype.itemsize:
            flat = torch.from_numpy(np.memmap(path, np.uint8, "r+", start, (size,))).view(dtype)
        found[name] = flat.view(shape)
    return found


def describe_file(
    path: Path, specs: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Mapping[str, Tensor]
) -> dict[str, StoredArray]:
    """What lies where in a file that `blank` made, once its tensors, of rows, have their values."""
    starts, _, _ = _laid_out(specs)
    found = {}
    for name, array in tensors.items():
        rows = _rows_of_block(array.shape[1] * array.element_size())
        blocks = [_bytes(array[start : start + rows]) for start in range(0, len(array), rows)]
        digests = tuple(hashlib.sha256(block).hexdigest() for block in blocks)
        shape = (array.shape[0], array.shape[1])
        found[name] = StoredArray(path.name, starts[name], dtype_name(array.dtype), shape, rows, digests)
    return found


def memory_map(path: Path, stored: StoredArray) -> Tensor:
    """An array of a file as memory: its pages are read when they are touched, what is written to them stays here."""
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if not stored.shape[0] * stored.shape[1]:
        return torch.empty(stored.shape, dtype=dtype)
    bytes_ = stored.shape[0] * stored.shape[1] * dtype.itemsize
    check_regular_file(path)
    try:
        memory = np.memmap(path, np.uint8, "c", stored.offset, (bytes_,))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be mapped into memory ({error}); export the model anew") from None
    return torch.from_numpy(memory).view(dtype).view(stored.shape)


def _laid_out(kinds: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[dict[str, int], bytes, int]:
    """Where each array begins, what stands before the first, and where the last ends."""
    names = sorted(kinds, key=lambda name: -getattr(torch, kinds[name][0]).itemsize)  # so that each is aligned
    told, at = {}, 0
    for name in names:
        dtype, shape = kinds[name]
        if dtype not in SAFETENSORS_DTYPES:
            raise UserError(f'"{name}" is {dtype}, which no file of arrays has')
        size = prod(shape) * getattr(torch, dtype).itemsize
        told[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    first = 8 + len(text)
    starts = {name: first + told[name]["data_offsets"][0] for name in names}
    return starts, len(text).to_bytes(8, "little") + text, first + at


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """The dtype, shape and file offset of each array; the header must equal what `write` makes, byte for byte."""
    check_regular_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = file.read(8)
            text = file.read(min(int.from_bytes(length, "little"), size))
        dtypes = {form: dtype for dtype, form in SAFETENSORS_DTYPES.items()}
        kinds = {name: (dtypes[array["dtype"]], tuple(array["shape"])) for name, array in json.loads(text).items()}
        starts, header, end = _laid_out(kinds)
        if header != length + text or end != size:
            raise ValueError
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); use an earlier checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged_header_error(path) from None
    return {name: (*kinds[name], start) for name, start in starts.items()}


def damaged_header_error(path: Path) -> UserError:
    return UserError(
        f"{path}: its header differs from what was written; the file is damaged, use an earlier checkpoint"
    )


class ArrayReader:
    """The arrays of one directory's files; blocks that are read are verified."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handles: dict[str, int] = {}
        self._opening = Lock()

    def block_ranges(self, stored: StoredArray) -> Iterator[tuple[int, int]]:
        """First row and end of each."""
        for start in range(0, stored.shape[0], stored.block):
            yield start, min(start + stored.block, stored.shape[0])

    def read_block(self, stored: StoredArray, start: int, out: Tensor | None = None) -> Tensor:
        """The block that begins with this row; `into` takes its very bytes, where it is as long."""
        dtype: torch.dtype = getattr(torch, stored.dtype)
        rows = min(stored.block, stored.shape[0] - start)
        row_bytes = stored.shape[1] * dtype.itemsize
        found = torch.empty(rows, stored.shape[1], dtype=dtype) if out is None else out
        memory = _bytes(found)
        self._read(stored, memory, stored.offset + start * row_bytes)
        if hashlib.sha256(memory).hexdigest() != stored.digests[start // stored.block]:
            raise UserError(
                f"{self._folder / stored.file}: its digest differs from the manifest's; the checkpoint is damaged, "
                "use an earlier one"
            )
        return found

    def read_array(self, stored: StoredArray) -> Tensor:
        blocks = [self.read_block(stored, start) for start, _ in self.block_ranges(stored)]
        return torch.cat(blocks) if blocks else torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def _read(self, stored: StoredArray, memory: memoryview, offset: int) -> None:
        path = self._folder / stored.file
        try:
            with self._opening:
                if stored.file not in self._handles:
                    check_regular_file(path)
                    self._handles[stored.file] = os.open(path, os.O_RDONLY)
            done = 0
            while done < len(memory):
                got = os.preadv(self._handles[stored.file], [memory[done:]], offset + done)
                if not got:
                    raise UserError(f"{path}: cut off; the checkpoint is damaged, use an earlier one")
                done += got
        except FileNotFoundError:
            raise UserError(f"{path}: missing; the checkpoint is damaged, use an earlier one") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); use an earlier checkpoint") from None


def _rows_of_block(row_bytes: int) -> int:
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def _bytes(array: Tensor) -> memoryview:
    return array.reshape(-1).view(torch.uint8).numpy().data
