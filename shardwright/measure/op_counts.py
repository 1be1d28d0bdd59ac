"""What operations of a traced model do, keep and hold: seen as they are dispatched, on tensors that have no data."""

import re
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from shardwright.errors import UserError
from shardwright.jagged import Vectors
from shardwright.spec.plan import SAVED_PRODUCT_OPS
from shardwright.spec.workload import Product

MATMUL_OPS = MappingProxyType({"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1})  # and where their factors are
REWRITE_ADVICE = (  # for operations whose result depends on values: a pattern of torch's message, and the advice
    (r"nonzero", "the size of x[mask] depends on values: write torch.where(mask, x, 0) or x * mask"),
    (r"repeat_interleave", "write repeat_interleave(..., output_size=...), or index with precomputed positions"),
    (r"item\(\)|no data|numpy", "in place of .item(), .tolist() and `if tensor` write torch.where(condition, a, b)"),
    (r"no fake impl", "the size of the result depends on values, as in unique(): compute it in the data source"),
    (r"device cpu", "make constants with device=x.device, or with register_buffer"),
)
ALLOCATION_OPS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True, slots=True)
class StorageOwners:
    """Tensors by where they lie; whoever comes first has one that several want."""

    owners: dict[int, str] = field(default_factory=dict[int, str])
    alive: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # so that nothing else lies there later

    def add(self, owner: str, tensor: Tensor) -> None:
        at = tensor.untyped_storage()._cdata
        self.owners.setdefault(at, owner)
        self.alive.setdefault(at, tensor)

    def bytes_of(self, owner: str, exclude: Iterable[int] = ()) -> int:
        mine = (at for at, found in self.owners.items() if found == owner)
        return sum(self.alive[at].untyped_storage().nbytes() for at in set(mine).difference(exclude))


class SavedTensorsMode(TorchDispatchMode):
    """What blocks are called with, and what of their work must stay until the backward pass: for autograd, and where
    they are recomputed. Each tensor counts once: for the block that keeps it first, or gets it first."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.block_inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._model, self._names, self._open = model, names, list[str]()
        self._held = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
        self._saved, self._inputs, self._products = StorageOwners(), StorageOwners(), StorageOwners()
        self._stack = ExitStack()

    def __enter__(self) -> "SavedTensorsMode":
        for name in self._names:
            block = self._model.get_submodule(name)
            for hook in (
                block.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True),
                block.register_forward_hook(self._end, always_call=True),
            ):
                self._stack.callback(hook.remove)
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._stack.close()

    def bytes_of(self, name: str) -> dict[str, int]:
        """Fields of a Block. What is both a product and what another block is called with counts there."""
        return {
            "activation_bytes": self._saved.bytes_of(name),
            "input_bytes": self._inputs.bytes_of(name, self._held),
            "product_bytes": self._products.bytes_of(name, self._inputs.owners),
        }

    def _begin(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open.append(name)
        self.block_inputs[name] = (args, kwargs)
        for tensor in tensors_of((args, kwargs)):
            self._inputs.add(name, tensor)

    def _end(self, *_: Any) -> None:
        self._open.pop()

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in self._held:
            self._saved.add(self._open[-1] if self._open else "rest", tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._open and func.overloadpacket.__name__ in SAVED_PRODUCT_OPS:
            for tensor in tensors_of(found):
                self._products.add(self._open[-1], tensor)
        return found


class OpCounterMode(TorchDispatchMode):
    """What operations do: the shapes of products, and the bytes that all others but views read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_ = self.num_calls = 0
        self._shapes: Counter[tuple[int, int, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.num_calls += 1
        if name in MATMUL_OPS:
            left, right = args[MATMUL_OPS[name] : MATMUL_OPS[name] + 2]
            num = left.shape[0] if left.dim() == 3 else 1
            self._shapes[*left.shape[-2:], right.shape[-1], num] += 1
        elif func.overloadpacket not in flop_registry and name not in ALLOCATION_OPS and not _view(func):
            self.bytes_ += sum(one.numel() * one.element_size() for one in tensors_of((args, kwargs, found)))
        return found

    def products(self, batch_size: int) -> tuple[Product, ...]:
        """Of several sizes that may grow with the batch, the largest is taken to."""
        found = []
        for (m, k, n, num), times in self._shapes.items():
            sizes = {"m": m, "k": k, "n": n, "num": num}
            grows = max(sizes, key=lambda name: (sizes[name] % max(batch_size, 1) == 0, sizes[name]))
            found.append(Product(m, k, n, num * times, grows))  # pyright: ignore[reportArgumentType]
        return tuple(found)


def _view(func: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


class PeakMemoryMode(TorchDispatchMode):
    """The most bytes that operations gave and somebody still holds, but gradients of these parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = parameters
        self._held = {p.untyped_storage()._cdata for p in parameters}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {at for p in (args, kwargs) for at in (one.untyped_storage()._cdata for one in tensors_of(p))}
        for tensor in tensors_of(found):
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self._held:  # else it was there before
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {at: one for at, one in self._alive.items() if not one[0].expired()}
        gradients = {p.grad.untyped_storage()._cdata for p in self._parameters if p.grad is not None}
        now = sum(size for at, (_, size) in self._alive.items() if at not in gradients)
        self.peak_bytes = max(self.peak_bytes, now)
        return found


def untraceable_error(model: nn.Module, error: Exception) -> UserError:
    """The error for an operation that depends on the values of tensors: where it is, and what to write instead."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(map(Path(frame.filename).is_relative_to, (Path(torch.__file__).parent, Path(__file__).parent)))
    ]
    where = f", at {own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`" if own else ""
    reason = str(error).split("\n")[0].split(". ")[0].rstrip(".!")
    known = (words for pattern, words in REWRITE_ADVICE if re.search(pattern, reason))
    advice = next(known, "change that line")
    return UserError(
        f"{type(model).__name__} cannot be traced on the meta device, where tensors have no values ({reason}){where}; "
        f"{advice}, or give the model a method describe(batch, statistics) -> Workload"
    )


def tensors_of(value: Any) -> list[Tensor]:
    """Wherever they are in it."""
    leaves, _ = tree_flatten(value)
    found = (leaf.tensors() if isinstance(leaf, Vectors) else (leaf,) for leaf in leaves)
    return [leaf for leaf in chain.from_iterable(found) if isinstance(leaf, Tensor)]
