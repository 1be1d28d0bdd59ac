"""A model as a Workload: what the planner needs to know, found by tracing on the meta device.

Nothing is computed and nothing of the model's size is allocated: parameters and the batch are replaced by their shapes.
The model itself is not changed. Tables cost what their rows and ids cost; dense parts are counted block by block.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors, counts
from shardwright.layers.embedding import EmbeddingBags
from shardwright.spec.workload import Block, FeatureStatistics, Product, Workload

PRODUCTS = MappingProxyType({"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1})  # and where their factors are
HALVINGS = 8  # of a batch, in whose parts distinct ids are counted
BLANK = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def describe(model: nn.Module, batch: Batch, statistics: Sequence[FeatureStatistics] | None = None) -> Workload:
    """The Workload of one training step on this batch; id statistics not given, by ids' names, come from the batch."""
    override = getattr(model, "describe", None)
    if override is not None:
        return override(batch, statistics)
    check_contract(model)
    sparse = sparse_of(model)
    return Workload(
        version=1,
        batch_size=batch.batch_size,
        tables=sparse.tables if sparse else (),
        features=sparse.features if sparse else (),
        statistics=_statistics(sparse, batch.features, statistics or ()),
        optimizer=sparse.optimizer if sparse else None,
        blocks=_blocks(model, sparse, batch),
    )


def check_contract(model: nn.Module) -> None:
    """Refuse a model without a loss of its own."""
    if not callable(getattr(model, "loss", None)):
        raise UserError(f"{type(model).__name__} has no `loss(logits, batch)`; give it one as a child module")


def sparse_of(model: nn.Module) -> EmbeddingBags | None:
    """The child `sparse` of the model contract, if the model has one."""
    sparse = getattr(model, "sparse", None)
    if sparse is None:
        return None
    if not isinstance(sparse, EmbeddingBags):
        raise UserError(
            f"{type(model).__name__}.sparse is a {type(sparse).__name__}; wanted EmbeddingBags "
            "(from_torch and from_torchrec make one from what you have)"
        )
    for child in ("dense", "loss"):
        if not hasattr(model, child):
            raise UserError(
                f"{type(model).__name__} has `sparse` but no `{child}`; the contract is children sparse(batch), "
                "dense(batch, vectors) and loss(logits, batch)"
            )
    return sparse


def block_names(model: nn.Module) -> tuple[str, ...]:
    """The parts a model is counted and cut by: embed, each of `blocks`, head; or the children of `dense`."""
    if isinstance(getattr(model, "blocks", None), nn.ModuleList):
        inside, root = model, ""
    else:
        root = "dense" if sparse_of(model) else ""
        inside = model.get_submodule(root)
    names = []
    for name, child in inside.named_children():
        if name == "blocks" and isinstance(child, nn.ModuleList):
            names += [f"{root}.{name}.{index}" if root else f"{name}.{index}" for index in range(len(child))]
        elif name != "loss":
            names.append(f"{root}.{name}" if root else name)
    return tuple(names)


def _statistics(
    sparse: EmbeddingBags | None, features: Jagged, given: Sequence[FeatureStatistics]
) -> tuple[FeatureStatistics, ...]:
    if sparse is None:
        return ()
    known = {entry.feature: entry for entry in given}
    read = sparse.read(features)
    found = []
    for at, (feature, part) in enumerate(zip(sparse.features, read.values.split(counts(read)), strict=True)):
        entry = known.get(feature.ids or feature.name)
        if entry is None:
            curve = _distinct(part, read.lengths[at])
            share = curve[-1][1] if curve else 1.0
            entry = FeatureStatistics(feature.name, part.numel() / read.batch_size, share, distinct=curve)
        found.append(replace(entry, feature=feature.name))
    return tuple(found)


def _distinct(ids: Tensor, lengths: Tensor) -> tuple[tuple[int, float], ...]:
    """(samples, distinct ids over ids) in the batch and in its parts of 1/2, 1/4 and so on of the samples, as ranks get
    them: samples that follow each other."""
    sample = torch.arange(len(lengths)).repeat_interleave(lengths.cpu())
    _, value = ids.cpu().unique(return_inverse=True)
    found: dict[int, float] = {}
    for halvings in range(HALVINGS, -1, -1):
        size = len(lengths) >> halvings
        inside = sample < (size << halvings)
        if size and inside.any():
            runs = (sample[inside] // size) * (len(ids) + 1) + value[inside]
            found[size] = len(runs.unique()) / len(runs)
    return tuple(found.items())


def _blocks(model: nn.Module, sparse: EmbeddingBags | None, batch: Batch) -> tuple[Block, ...]:
    """Trace the whole step once, then each block alone on the inputs it received; "rest" is what is left."""
    twin = _meta_twin(model)
    vectors = sparse.blank(batch.features) if sparse else None
    received: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    names, far = block_names(model), batch.to("meta")

    def remember(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received[name] = (args, kwargs)

    hooks = [
        twin.get_submodule(name).register_forward_pre_hook(partial(remember, name), with_kwargs=True) for name in names
    ]
    try:
        total = _count("rest", twin, lambda: _loss(twin, far, vectors), sparse, batch.batch_size)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{type(model).__name__} cannot be traced on the meta device ({reason}); "
            "give it a method describe(batch, statistics) -> Workload"
        ) from error
    for hook in hooks:
        hook.remove()
    blocks: list[Block] = []
    seen: set[int] = set()
    for name in names:
        block = twin.get_submodule(name)
        if name in received:
            args, kwargs = _detached(received[name])
            blocks.append(_count(name, block, partial(block, *args, **kwargs), None, batch.batch_size, seen))
    early = _without_vectors(model, batch, vectors, names) if vectors else frozenset[str]()
    blocks = [replace(block, needs_vectors=block.name not in early) for block in blocks]
    return (*blocks, *_rest(total, blocks))


def _without_vectors(model: nn.Module, batch: Batch, vectors: Vectors, names: Sequence[str]) -> frozenset[str]:
    """The blocks that no vector of a table reaches: where vectors alone have gradients, their outputs have none."""
    twin = _meta_twin(model).requires_grad_(False)
    found: set[str] = set()

    def look(name: str, _: nn.Module, __: Any, output: Any) -> None:
        if not any(tensor.requires_grad for tensor in _tensors(output)):
            found.add(name)

    for name in names:
        twin.get_submodule(name).register_forward_hook(partial(look, name))
    _loss(twin, batch.to("meta"), vectors)
    return frozenset(found)


def _count(
    name: str,
    module: nn.Module,
    run: Callable[[], Any],
    sparse: EmbeddingBags | None,
    batch_size: int,
    seen: set[int] | None = None,
) -> Block:
    """Parameters (each once, tables aside), the operations of forward and backward, and the bytes kept between."""
    tables = {id(p) for p in module.get_submodule("sparse").parameters()} if sparse else set()
    seen = set() if seen is None else seen
    mine = [p for p in module.parameters() if id(p) not in seen | tables]
    seen.update(id(p) for p in mine)
    held = {p.untyped_storage()._cdata for p in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with FlopCounterMode(display=False) as forward, _Work() as there:
            outputs = _tensors(run())
        with FlopCounterMode(display=False) as backward, _Work() as back:
            roots = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    return Block(
        name=name,
        parameters=sum(p.numel() for p in mine),
        parameter_bytes=sum(p.numel() * p.element_size() for p in mine),
        forward_flops=forward.get_total_flops(),
        backward_flops=backward.get_total_flops(),
        activation_bytes=sum(kept.values()),
        forward_bytes=there.bytes_,
        backward_bytes=back.bytes_,
        forward_products=there.products(batch_size),
        backward_products=back.products(batch_size),
    )


class _Work(TorchDispatchMode):
    """What operations do: the shapes of products, and the bytes that all others but views read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_ = 0
        self._shapes: Counter[tuple[int, int, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            left, right = args[PRODUCTS[name] : PRODUCTS[name] + 2]
            num = left.shape[0] if left.dim() == 3 else 1
            self._shapes[*left.shape[-2:], right.shape[-1], num] += 1
        elif func.overloadpacket not in flop_registry and name not in BLANK and not _view(func):
            self.bytes_ += sum(one.numel() * one.element_size() for one in _tensors((args, kwargs, found)))
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


def _rest(total: Block, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """What no named block holds: the loss, and whatever happens between blocks."""
    parts = {
        field: getattr(total, field) - sum(getattr(block, field) for block in blocks)
        for field in ("parameters", "parameter_bytes", "forward_flops", "backward_flops")
    }
    parts |= {
        field: max(0, getattr(total, field) - sum(getattr(block, field) for block in blocks))
        for field in ("forward_bytes", "backward_bytes")
    }
    parts |= {
        field: _left(getattr(total, field), chain(*(getattr(block, field) for block in blocks)))
        for field in ("forward_products", "backward_products")
    }
    # Blocks share tensors at their borders, so their sum may exceed what the whole step keeps.
    kept = max(0, total.activation_bytes - sum(block.activation_bytes for block in blocks))
    return (Block("rest", **parts, activation_bytes=kept),) if any(parts.values()) or kept else ()


def _left(total: Iterable[Product], parts: Iterable[Product]) -> tuple[Product, ...]:
    """The products that no part has."""
    nums: Counter[Product] = Counter()
    for sign, products in ((1, total), (-1, parts)):
        for one in products:
            nums[replace(one, num=1)] += sign * one.num
    return tuple(replace(one, num=num) for one, num in nums.items() if num > 0)


def _loss(model: Any, batch: Batch, vectors: Vectors | None) -> Tensor:
    if vectors is None:
        return model.loss(model(batch), batch)
    for tensor in vectors.tensors():
        tensor.requires_grad_(True)
    return model.loss(model.dense(batch, vectors), batch)


def _meta_twin(model: nn.Module) -> nn.Module:
    """A copy that shares the model's structure and ties but holds only the shapes of its tensors."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def _tensors(value: Any) -> list[Tensor]:
    leaves, _ = tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _detached(args: Any) -> Any:
    def detach(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return tree_map(detach, args)
