"""Check that all ranks start with the same seed, tensors, plan and table values.

The ranks all-gather a few kilobytes, compare them, and raise the same error or none. Tables are compared
by digest, because each rank keeps its shards of the tables that it created itself. So does the dense model in a
pipeline, where each rank keeps its chunks; elsewhere its values are not compared: rank 0 broadcasts them later.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.kernels.matmul import BLAS, library_in_use
from shardwright.layers.embedding import EmbeddingTables
from shardwright.measure.describe import sparse_of
from shardwright.runtime.rank_group import RankGroup
from shardwright.spec.plan import Plan


def check_agreement(
    model: nn.Module, plan: Plan, hottest: Mapping[str, Tensor], accumulate: int, rank_group: RankGroup
) -> str:
    """Raise the same error on every rank if the ranks would train different models, plans or steps.

    Returns the library for matrix products; if the ranks' choices differ, the library that every rank has.
    """
    local = {
        "seed": torch.initial_seed(),
        "tensors": dict(_tensors(model, sparse_of(model), digest_dense=plan.pipeline is not None)),
        "plan": plan.digest(),
        "hottest": {name: _digest(hottest[name]) for name in sorted(hottest)},
        "accumulate": accumulate,
        "products": library_in_use(),
    }
    ranks = rank_group.all_gather_json(local)
    seeds, accumulates = ([values[key] for values in ranks] for key in ("seed", "accumulate"))
    if len(set(seeds)) > 1:
        raise UserError(
            f"the ranks have different seeds {seeds}, and would begin with different models: "
            "call torch.manual_seed with the same number on every rank before creating the model"
        )
    for rank, other in enumerate(ranks):
        _check_tensors(ranks[0]["tensors"], other["tensors"], rank)
    if any((values["plan"], values["hottest"]) != (local["plan"], local["hottest"]) for values in ranks):
        raise UserError(
            "the ranks have different plans, or different hottest ids: plan on every rank from the same global batch, "
            "cluster and statistics"
        )
    if len(set(accumulates)) > 1:
        raise UserError(f"the ranks have accumulate={accumulates}: pass the same accumulate to build on every rank")
    libraries = {values["products"] for values in ranks}
    return BLAS if len(libraries) > 1 else libraries.pop()


def _tensors(
    model: nn.Module, sparse: EmbeddingTables | None, *, digest_dense: bool
) -> Iterator[tuple[str, list[str]]]:
    """Pairs (name, [description, digest of the values]) of each tensor.

    The digest of tensors of the dense model is empty unless `digest_dense`.
    """
    table_tensors = {id(tensor) for tensor in (*sparse.parameters(), *sparse.buffers())} if sparse is not None else ()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in table_tensors:
            description = f"{tensor.dtype} {tuple(tensor.shape)}{', trained' * tensor.requires_grad}"
            yield f'"{name}"', [description.removeprefix("torch."), _digest(tensor) if digest_dense else ""]
    if sparse is None:
        return
    modules = {table.name: sparse.holder(table.name) for table in sparse.tables}
    states = {name: sparse.state(name).values() if sparse.steps[name] else () for name in modules}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = pool.map(lambda name: "".join(map(_digest, (modules[name].weight, *states[name]))), modules)
        for (name, module), digest in zip(modules.items(), digests, strict=True):
            table, suffix = module.table, ", trained" * module.is_trained
            description = f"{table.dtype} ({table.rows}, {table.dim}){suffix}, step {sparse.steps[name]}"
            yield f'table "{name}"', [description, digest]


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
    name, more = names[0], f" (and {len(names) - 1} more tensors differ)" if len(names) > 1 else ""
    (expected, _), (actual, _) = (tensors.get(name, ["no such tensor", ""]) for tensors in (first, other))
    difference = f"is {actual}, on rank 0 {expected}" if expected != actual else "has other values than on rank 0"
    raise UserError(
        f"{name} on rank {rank} {difference}{more}: create the same model and load the same weights on every rank "
        "before build, or load a checkpoint into the job after build"
    )
