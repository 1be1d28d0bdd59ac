"""Several EmbeddingBags as one: one lookup, one exchange and one update for the tables of all.

Members are registered modules, so that state dict keys are those of a model with a child for each. Tables and features
are named by their path, MEMBER.NAME: two members may have tables and features of one name.

Shape legend: B samples, D columns of all pooled vectors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.pending import LazyValue
from shardwright.errors import UserError, did_you_mean
from shardwright.jagged import Jagged, Vectors, ids_per_feature
from shardwright.layers.embedding import EmbeddingBags, EmbeddingTables
from shardwright.layers.local_exchange import LocalExchange
from shardwright.layers.table_weights import TableWeights
from shardwright.spec.checks import raise_if_any
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.workload import Feature


class EmbeddingBagsDict(EmbeddingTables):
    """EmbeddingBags by name, all with the same optimizer; returns the vectors of each by its name.

    Tables that still have their initial values are initialized again, with their path in the seed: tables of one name
    in two members then differ.
    """

    def __init__(self, members: Mapping[str, EmbeddingBags]) -> None:
        super().__init__()
        raise_if_any(_type_faults(members))
        raise_if_any(_faults(members))
        _common_optimizer(members)
        tables = [
            replace(table, name=f"{name}.{table.name}") for name, bags in members.items() for table in bags.tables
        ]
        features = [_with_path(name, feature) for name, bags in members.items() for feature in bags.features]
        weighted = {bags.weighted for bags in members.values()}
        self._declare(tables, features, True if True in weighted else None if None in weighted else False)
        # By feature: whether it ignores the id weights of a batch.
        self._is_unweighted = tuple(bags.weighted is False for bags in members.values() for _ in bags.features)
        for name in members:
            if hasattr(type(self), name) or hasattr(self, name):
                raise UserError(f'member "{name}": EmbeddingBagsDict reserves this name; choose another')
        for name, bags in members.items():
            for table in bags.tables:
                bags.holder(table.name).join(name, is_fresh=not bags.steps[table.name])
            bags.exchange = LocalExchange(bags, member=name)
            self.add_module(name, bags)

    def __getitem__(self, member: str) -> EmbeddingBags:
        bags = self._modules.get(member)
        if not isinstance(bags, EmbeddingBags):
            raise UserError(f'EmbeddingBagsDict has no member "{member}"{did_you_mean(member, self._modules)}')
        return bags

    @property
    def members(self) -> dict[str, EmbeddingBags]:
        """The members by name."""
        return {name: self[name] for name in self._modules}

    @property
    def optimizer(self) -> SparseOptimizer | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _common_optimizer(self.members)

    @optimizer.setter
    def optimizer(self, optimizer: SparseOptimizer | None) -> None:
        for bags in self.members.values():
            bags.optimizer = optimizer

    @property
    def steps(self) -> dict[str, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {f"{name}.{table}": step for name, bags in self.members.items() for table, step in bags.steps.items()}

    @steps.setter
    def steps(self, steps: Mapping[str, int]) -> None:
        for name, bags in self.members.items():
            bags.steps = {table: steps[f"{name}.{table}"] for table in bags.steps}

    def holder(self, table: str) -> TableWeights:
        """The module that holds a table's weight and optimizer state."""
        member, _, name = table.partition(".")
        return self[member].holder(name)

    def id_weights(self, ids: Jagged) -> Tensor | None:
        """The batch's id weights; 1 for the features of members without weights."""
        if ids.weights is None:
            for name, bags in self.members.items():
                if bags.weighted:
                    raise UserError(
                        f'the tables of "{name}" pool by id weights and the batch has none; pass Jagged(..., weights)'
                    )
        if ids.weights is None or all(self._is_unweighted):
            return None
        if not any(self._is_unweighted):
            return ids.weights
        by_feature = zip(ids.weights.split(ids_per_feature(ids)), self._is_unweighted, strict=True)
        return torch.cat([torch.ones_like(weights) if unweighted else weights for weights, unweighted in by_feature])

    def outputs(self, vectors: Vectors | LazyValue) -> dict[str, Any]:
        """The vectors of each member by name; those in flight are awaited at their first use."""
        if not isinstance(vectors, LazyValue):
            return self._split(vectors)
        split = cache(partial(self._split, vectors))
        return {name: LazyValue(lambda name=name: split()[name]) for name in self.members}

    def _split(self, vectors: Any) -> dict[str, Vectors]:
        pooled_dims = [
            [dim for feature, dim in zip(bags.features, bags.dims, strict=True) if feature.pooling != "none"]
            for bags in self.members.values()
        ]
        parts = vectors.pooled_BD.split([sum(dims) for dims in pooled_dims], 1)
        sequences = iter(vectors.sequences.values())
        return {
            name: bags.vectors(part_BD, [next(sequences) for feature in bags.features if feature.pooling == "none"])
            for (name, bags), part_BD in zip(self.members.items(), parts, strict=True)
        }


def _with_path(member: str, feature: Feature) -> Feature:
    ids = feature.ids or feature.name
    return replace(feature, name=f"{member}.{feature.name}", table=f"{member}.{feature.table}", ids=ids)


def _common_optimizer(members: Mapping[str, EmbeddingBags]) -> SparseOptimizer | None:
    (first, bags), *others = members.items()
    for name, other in others:
        if other.optimizer != bags.optimizer:
            raise UserError(
                f'members "{first}" and "{name}" have different optimizers, {bags.optimizer} and {other.optimizer}, '
                "and one update trains all: set `optimizer` of the EmbeddingBagsDict, or give all members the same; "
                "requires_grad_(False) freezes a member"
            )
    return bags.optimizer


def _type_faults(members: Mapping[str, EmbeddingBags]) -> Iterator[str]:
    if not members:
        yield 'EmbeddingBagsDict without a member; pass {"name": EmbeddingBags(...)}'
    for name, bags in members.items():
        if not isinstance(bags, EmbeddingBags):
            yield f'member "{name}" is a {type(bags).__name__}; wanted EmbeddingBags'
        if not name or "." in name:
            yield f'member "{name}": wanted a name without a dot, which starts the names of its tables; use "_"'


def _faults(members: Mapping[str, EmbeddingBags]) -> Iterator[str]:
    names: dict[EmbeddingBags, str] = {}
    paths: dict[int, str] = {}  # of tables, by weight
    members_by_dtype: dict[bool, str] = {}
    for name, bags in members.items():
        if names.setdefault(bags, name) != name:
            yield f'members "{names[bags]}" and "{name}" are the same EmbeddingBags; create one for each'
            return
        if not isinstance(bags.exchange, LocalExchange) or bags.exchange.member:
            yield f'member "{name}" is already in an EmbeddingBagsDict, or sharded over ranks; create another'
            return
        for table in bags.tables:
            path, weight = f"{name}.{table.name}", bags.weight(table.name)
            if paths.setdefault(id(weight), path) != path and bags.optimizer is not None:
                yield (
                    f'tables "{paths[id(weight)]}" and "{path}" share one weight, and each would update it separately: '
                    "make it one table of one member that several Features read"
                )
            members_by_dtype.setdefault(table.dtype == "float64", name)
    if len(members_by_dtype) > 1:
        yield (
            f'member "{members_by_dtype[True]}" has float64 tables, "{members_by_dtype[False]}" others, and their '
            "vectors have no common dtype: use float64 for all tables or for none"
        )
