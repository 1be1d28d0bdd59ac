"""Calls that torch.compile leaves as they are."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def disable_compile(function: Callable[P, T]) -> Callable[P, T]:
    """The same call; only where something is compiled is torch's compiler asked (importing it takes seconds)."""
    left = torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage]

    @wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> T:
        return left(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return either
