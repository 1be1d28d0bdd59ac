"""Native helpers: lengths to offsets as a torch operator, sums of squares, huge pages, retained memory."""

from functools import cache

import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.library import native_library


@cache
def _operators() -> torch.library.Library:
    operators = torch.library.Library("shardwright", "DEF")
    operators.define("lengths_to_offsets(Tensor lengths) -> Tensor")
    operators.impl("lengths_to_offsets", _lengths_to_offsets_cpu, "CPU")
    operators.impl("lengths_to_offsets", _lengths_to_offsets_torch, "CUDA")
    operators._register_fake("lengths_to_offsets", _lengths_to_offsets_fake)
    return operators


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """(n,) lengths -> (n + 1,) int64 offsets; a negative length is an error that names its position."""
    _operators()
    return torch.ops.shardwright.lengths_to_offsets(lengths)


def _lengths_to_offsets_cpu(lengths: Tensor) -> Tensor:
    native = native_library()
    if native is None or lengths.dtype not in (torch.int32, torch.int64):
        return _lengths_to_offsets_torch(lengths)
    flat = lengths.reshape(-1).contiguous()
    offsets = torch.empty(flat.numel() + 1, dtype=torch.int64)
    width = "i32" if flat.dtype == torch.int32 else "i64"
    scan = getattr(native, f"shardwright_lengths_to_offsets_{width}")
    position = scan(flat.data_ptr(), flat.numel(), offsets.data_ptr())
    if position >= 0:
        raise _negative_length_error(int(position), int(flat[position]))
    return offsets


def _lengths_to_offsets_torch(lengths: Tensor) -> Tensor:
    flat = lengths.reshape(-1)
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        raise UserError(f"lengths are {flat.dtype}; wanted whole numbers, int32 or int64")
    negative = (flat < 0).nonzero()
    if negative.numel():
        position = int(negative[0])
        raise _negative_length_error(position, int(flat[position]))
    offsets = flat.new_zeros(flat.numel() + 1, dtype=torch.int64)
    torch.cumsum(flat, 0, out=offsets[1:])
    return offsets


def _lengths_to_offsets_fake(lengths: Tensor) -> Tensor:
    return lengths.new_empty(lengths.numel() + 1, dtype=torch.int64)


def _negative_length_error(position: int, length: int) -> UserError:
    return UserError(f"lengths[{position}] is {length}; a length is 0 or more")


def sum_of_squares(values: Tensor) -> Tensor | float:
    """The sum of squares in float64; torch would copy float32 numbers to float64 first."""
    native = native_library() if values.device.type == "cpu" and values.dtype == torch.float32 else None
    if native is None or not values.is_contiguous():
        return torch.linalg.vector_norm(values, dtype=torch.float64) ** 2
    return native.shardwright_sum_of_squares(values.data_ptr(), values.numel())


def use_threads(num: int) -> None:
    """Let native code that this thread calls run on so many threads at most."""
    native = native_library()
    if native is not None:
        native.shardwright_use_threads(min(num, torch.get_num_threads()))


def use_huge_pages(tensor: Tensor, *, collapse: bool = False) -> bool:
    """Put a large CPU tensor on 2 MiB pages where the system has them: fewer TLB misses on random rows.

    A hint is enough for a fresh tensor; `collapse` moves a tensor that was already written.
    """
    native = native_library()
    if native is None or tensor.device.type != "cpu":
        return False
    return bool(native.shardwright_huge_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size(), collapse))


def retain_freed_memory() -> bool:
    """Make the allocator of this process keep freed memory for reuse.

    A step frees its vectors and activations and the next step allocates as much again: fresh pages each time would
    cost a quarter of its processor time.
    """
    native = native_library()
    return native is not None and bool(native.shardwright_keep_memory())


def trim_freed_memory() -> bool:
    """Return freed memory to the system if the process keeps more of it than it uses; returns whether it did."""
    native = native_library()
    return native is not None and bool(native.shardwright_trim_memory())
