"""Exclude functions from torch.compile."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def disable_compile(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to run eagerly under torch.compile.

    Outside of compilation, calls do not import torch's compiler, which takes seconds.
    """
    excluded = torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage]

    @wraps(function)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> T:
        return excluded(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return dispatch
