"""Count what a traced model's operations on meta tensors compute, save and allocate."""

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
from shardwright.measure import fused_attention
from shardwright.spec.plan import SAVED_PRODUCT_OPS
from shardwright.spec.workload import Product

MATMUL_OPS = MappingProxyType({"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1})  # by name: position of the left factor
GROUPED_OPS = frozenset(  # products of experts; rows are taken to be evenly split over them
    ("grouped_linear", "grouped_linear_input_gradient", "grouped_linear_weight_gradient")
)
REWRITE_ADVICE = (  # for operations whose result depends on values: (pattern of torch's message, advice)
    (r"nonzero", "the size of x[mask] depends on values: write torch.where(mask, x, 0) or x * mask"),
    (r"repeat_interleave", "write repeat_interleave(..., output_size=...), or index with precomputed positions"),
    (r"item\(\)|no data|numpy", "in place of .item(), .tolist() and `if tensor` write torch.where(condition, a, b)"),
    (r"no fake impl", "the size of the result depends on values, as in unique(): compute it in the data source"),
    (r"device cpu", "make constants with device=x.device, or with register_buffer"),
)
ALLOCATION_OPS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True, slots=True)
class StorageOwners:
    """Storages of tensors by address; each belongs to the first owner that is added for it."""

    owners: dict[int, str] = field(default_factory=dict[int, str])
    alive: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # so that no address is reused

    def add(self, owner: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()._cdata
        self.owners.setdefault(storage, owner)
        self.alive.setdefault(storage, tensor)

    def bytes_of(self, owner: str, exclude: Iterable[int] = ()) -> int:
        storages = (storage for storage, first_owner in self.owners.items() if first_owner == owner)
        return sum(self.alive[storage].untyped_storage().nbytes() for storage in set(storages).difference(exclude))


class SavedTensorsMode(TorchDispatchMode):
    """Record inputs of blocks, tensors saved for backward, and products kept under checkpointing.

    Each storage counts once: for the block that saves it first, or receives it first.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.block_inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._model, self._names, self._open_blocks = model, names, list[str]()
        self._parameter_storages = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
        self._saved, self._inputs, self._products = StorageOwners(), StorageOwners(), StorageOwners()
        self._stack = ExitStack()

    def __enter__(self) -> "SavedTensorsMode":
        for name in self._names:
            block = self._model.get_submodule(name)
            for hook in (
                block.register_forward_pre_hook(partial(self._enter_block, name), with_kwargs=True),
                block.register_forward_hook(self._exit_block, always_call=True),
            ):
                self._stack.callback(hook.remove)
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._record_saved, lambda tensor: tensor))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._stack.close()

    def bytes_of(self, name: str) -> dict[str, int]:
        """Fields of a Block. A product that is also the input of another block counts as input there."""
        return {
            "activation_bytes": self._saved.bytes_of(name),
            "input_bytes": self._inputs.bytes_of(name, self._parameter_storages),
            "product_bytes": self._products.bytes_of(name, self._inputs.owners),
        }

    def _enter_block(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open_blocks.append(name)
        self.block_inputs[name] = (args, kwargs)
        for tensor in tensors_of((args, kwargs)):
            self._inputs.add(name, tensor)

    def _exit_block(self, *_: Any) -> None:
        self._open_blocks.pop()

    def _record_saved(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in self._parameter_storages:
            self._saved.add(self._open_blocks[-1] if self._open_blocks else "rest", tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._open_blocks and func.overloadpacket.__name__ in SAVED_PRODUCT_OPS:
            for tensor in tensors_of(result):
                self._products.add(self._open_blocks[-1], tensor)
        return result


class OpCounterMode(TorchDispatchMode):
    """Count the shapes of matrix products, and bytes that other operations except views read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_ = self.num_calls = 0
        self._shapes: Counter[tuple[int, int, int, int]] = Counter()
        self._grouped: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.num_calls += 1
        if name in MATMUL_OPS:
            left, right = args[MATMUL_OPS[name] : MATMUL_OPS[name] + 2]
            num = left.shape[0] if left.dim() == 3 else 1
            self._shapes[*left.shape[-2:], right.shape[-1], num] += 1
        elif name in (fused_attention.FORWARD, fused_attention.BACKWARD):
            self._shapes.update(fused_attention.products_of(name, args))
        elif name in GROUPED_OPS:
            self._grouped.append(_grouped_product(name, *args))
        elif func.overloadpacket not in flop_registry and name not in ALLOCATION_OPS and not _is_view(func):
            self.bytes_ += sum(tensor.numel() * tensor.element_size() for tensor in tensors_of((args, kwargs, result)))
        return result

    def products(self, batch_size: int) -> tuple[Product, ...]:
        """Products by shape; of several sizes that may grow with the batch, the largest is taken to grow."""
        products = []
        for (m, k, n, num), count in self._shapes.items():
            sizes = {"m": m, "k": k, "n": n, "num": num}
            grows = max(sizes, key=lambda name: (sizes[name] % max(batch_size, 1) == 0, sizes[name]))
            products.append(Product(m, k, n, num * count, grows))  # pyright: ignore[reportArgumentType]
        return (*products, *self._grouped)


def _grouped_product(name: str, rows: Tensor, other: Tensor, sizes: Tensor) -> Product:
    """The product of each group; its rows grow with the batch."""
    num, width = len(sizes), rows.shape[1]
    rows_of_group = -(-len(rows) // num)
    if name == "grouped_linear_weight_gradient":
        return Product(width, rows_of_group, other.shape[1], num, "k")
    return Product(rows_of_group, width, other.shape[1 if name == "grouped_linear" else 2], num, "m")


def _is_view(func: Any) -> bool:
    """Whether the operation returns a view of an argument."""
    return any(output.alias_info is not None and not output.alias_info.is_write for output in func._schema.returns)


class PeakMemoryMode(TorchDispatchMode):
    """Peak bytes of live results of operations, without the gradients of `parameters`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = parameters
        self._parameter_storages = {p.untyped_storage()._cdata for p in parameters}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, kwargs))}
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs | self._parameter_storages:  # else it is not new memory
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        gradients = {p.grad.untyped_storage()._cdata for p in self._parameters if p.grad is not None}
        live_bytes = sum(size for key, (_, size) in self._alive.items() if key not in gradients)
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        return result


def untraceable_error(model: nn.Module, error: Exception) -> UserError:
    """The error for an operation that depends on values of tensors: where, and what to write instead."""
    user_frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(map(Path(frame.filename).is_relative_to, (Path(torch.__file__).parent, Path(__file__).parent)))
    ]
    where = f", at {user_frames[-1].filename}:{user_frames[-1].lineno}, `{user_frames[-1].line}`" if user_frames else ""
    reason = str(error).split("\n")[0].split(". ")[0].rstrip(".!")
    matches = (text for pattern, text in REWRITE_ADVICE if re.search(pattern, reason))
    advice = next(matches, "change that line")
    return UserError(
        f"{type(model).__name__} cannot be traced on the meta device, where tensors have no values ({reason}){where}; "
        f"{advice}, or give the model a method describe(batch, statistics) -> Workload"
    )


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a nested structure; the tensors of Vectors included."""
    leaves, _ = tree_flatten(value)
    groups = (leaf.tensors() if isinstance(leaf, Vectors) else (leaf,) for leaf in leaves)
    return [leaf for leaf in chain.from_iterable(groups) if isinstance(leaf, Tensor)]
