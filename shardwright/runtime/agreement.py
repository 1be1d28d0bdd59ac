"""What must be the same on all ranks before a job begins: seed, tensors, plan, and the values of tables.

The ranks all-gather a few kilobytes over the lane `ids`, compare them, and raise the same error or none. Tables are
compared by digest, because each rank keeps its own part of its own copy. Dense values are broadcast by rank 0 instead.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.errors import UserError
from shardwright.kernels.matmul import BLAS, library_in_use
from shardwright.layers.embedding import EmbeddingBags
from shardwright.spec.plan import Plan


def check_agreement(
    model: nn.Module, sparse: EmbeddingBags, plan: Plan, hottest: Mapping[str, Tensor], accumulate: int, group: Group
) -> str:
    """Raise the same error on every rank if the ranks are about to train different things.

    Returns the library for matrix products: if the ranks' choices differ, the one that every rank has.
    """
    mine = {
        "seed": torch.initial_seed(),
        "tensors": dict(_tensors(model, sparse)),
        "plan": plan.digest(),
        "hottest": {name: _digest(hottest[name]) for name in sorted(hottest)},
        "accumulate": accumulate,
        "products": library_in_use(),
    }
    ranks = _gather(mine, group)
    seeds, accumulates = ([one[what] for one in ranks] for what in ("seed", "accumulate"))
    if len(set(seeds)) > 1:
        raise UserError(
            f"the ranks have different seeds {seeds}, and would begin with different models: "
            "call torch.manual_seed with the same number on every rank before the model is made"
        )
    for rank, other in enumerate(ranks):
        _check_tensors(ranks[0]["tensors"], other["tensors"], rank)
    if any((one["plan"], one["hottest"]) != (mine["plan"], mine["hottest"]) for one in ranks):
        raise UserError(
            "the ranks have different plans, or different hottest ids: plan on every rank from the same global batch, "
            "cluster and statistics"
        )
    if len(set(accumulates)) > 1:
        raise UserError(f"the ranks make steps of {accumulates} batches: pass build the same accumulate on all of them")
    libraries = {one["products"] for one in ranks}
    return BLAS if len(libraries) > 1 else libraries.pop()


def _gather(mine: Mapping[str, Any], group: Group) -> list[Any]:
    """All-gather a value from each rank as JSON: nothing from another rank is unpickled."""
    text = torch.tensor(list(json.dumps(mine).encode()), dtype=torch.uint8)
    sizes = collective.all_gather(torch.tensor([len(text)]), [1] * group.size, group).wait().tolist()
    texts = collective.all_gather(text, sizes, group).wait().split(sizes)
    return [json.loads(bytes(one.tolist())) for one in texts]


def _tensors(model: nn.Module, sparse: EmbeddingBags) -> Iterator[tuple[str, list[str]]]:
    """Pairs (name, [form, digest of the values]) for each table; for all other tensors the digest is empty."""
    inside = {id(tensor) for tensor in (*sparse.parameters(), *sparse.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in inside:
            form = f"{tensor.dtype} {tuple(tensor.shape)}{', trained' * tensor.requires_grad}"
            yield f'"{name}"', [form.removeprefix("torch."), ""]
    held = {table.name: sparse.holder(table.name) for table in sparse.tables}
    states = {name: sparse.state(name).values() if sparse.steps[name] else () for name in held}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = pool.map(lambda name: "".join(map(_digest, (held[name].weight, *states[name]))), held)
        for (name, module), digest in zip(held.items(), digests, strict=True):
            table, trained = module.table, ", trained" * module.is_trained
            form = f"{table.dtype} ({table.rows}, {table.dim}){trained}, step {sparse.steps[name]}"
            yield f'table "{name}"', [form, digest]


def _digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's values; hashing releases the GIL."""
    if tensor.is_meta:
        return "meta"
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return sha256(values.numpy().data).hexdigest()


def _check_tensors(first: Mapping[str, list[str]], other: Mapping[str, list[str]], rank: int) -> None:
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    if not names:
        return
    one, more = names[0], f" (and {len(names) - 1} more tensors differ)" if len(names) > 1 else ""
    (form, _), (form_here, _) = (side.get(one, ["no such tensor", ""]) for side in (first, other))
    how = f"is {form_here}, on rank 0 {form}" if form != form_here else "has other values than on rank 0"
    raise UserError(
        f"{one} on rank {rank} {how}{more}: make the same model and load the same weights on every rank before build, "
        "or load a checkpoint into the job after it"
    )
