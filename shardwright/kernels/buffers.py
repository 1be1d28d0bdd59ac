"""Reusable buffers: the next step writes into the pages that this step releases.

Fresh memory costs a page fault per 4 KiB; for wide vectors the faults take longer than the lookup.
"""

import weakref
from collections import defaultdict
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.kernels.native import use_huge_pages


class BufferPool:
    """Allocates tensors and reuses their memory once they are unreferenced; never shrinks.

    On a GPU torch's own allocator does so.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: None: the CPU."""
        self._device = device or torch.device("cpu")
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def allocate(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor."""
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self._device)
        bytes_ = prod(shape) * dtype.itemsize
        if bytes_ < 1 << 16:
            return torch.empty(shape, dtype=dtype)
        size = 1 << (bytes_ - 1).bit_length() if bytes_ < 1 << 22 else -(-bytes_ // (1 << 22)) << 22
        memory = self._free[size].pop() if self._free[size] else self._allocate_fresh(size)
        buffer = memory.numpy().view(np.uint8)[:bytes_]
        if torch.are_deterministic_algorithms_enabled():
            buffer.fill(255)  # NaN, as torch.empty gives then
        weakref.finalize(buffer, self._free[size].append, memory).atexit = False
        return torch.from_numpy(buffer).view(dtype).view(shape)

    def _allocate_fresh(self, size: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        use_huge_pages(memory)
        return memory

    def __deepcopy__(self, memo: dict[int, Any]) -> "BufferPool":
        return BufferPool(self._device)

    def __reduce__(self) -> tuple[type["BufferPool"], tuple[torch.device]]:
        return BufferPool, (self._device,)
