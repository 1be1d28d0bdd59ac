"""Hooks of parameters that do not keep their owner alive.

Python does not collect a reference cycle through a hook of a tensor: a hook that holds a model would keep it, and the
process groups that it uses, for the rest of the process.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, ref

from torch import Tensor


def weak_hook(method: Callable[..., None], *objects: Any, index: int) -> Callable[[Tensor], None]:
    """A hook that calls `method(*objects, index)` while the owner of the method and the objects exist."""
    method_ref, object_refs = WeakMethod(method), [ref(value) for value in objects]

    def run(_: Tensor) -> None:
        call, values = method_ref(), [object_ref() for object_ref in object_refs]
        if call is not None and all(value is not None for value in values):
            call(*values, index)

    return run
