"""Kernels for GPUs, which need triton."""

import importlib
import importlib.util
import warnings
from functools import cache
from typing import Any

from torch import Tensor


def triton_module(name: str, x: Tensor) -> Any | None:
    """The module of kernels of this name, if `x` is on a GPU and triton is installed."""
    return _load(name) if x.is_cuda and _has_triton() else None


@cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        warnings.warn("triton is not installed: kernels on the GPU use slower PyTorch operations", stacklevel=3)
    return found


@cache
def _load(name: str) -> Any:
    return importlib.import_module(f"shardwright.kernels.{name}")
