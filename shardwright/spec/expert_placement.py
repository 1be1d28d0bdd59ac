"""Which experts every rank holds permanently, with a file format, and the form that SGLang reads.

SGLang's `--init-expert-location FILE` wants nothing but {"physical_to_logical_map": ...}: for each layer of the model,
dense ones included, the expert in every slot, where each rank has the same number of consecutive slots.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwright.spec.checks import check_unique, raise_if_any


@dataclass(frozen=True, slots=True)
class PlacedMixture:
    """The experts of one mixture by rank. An expert on several ranks has replicas; the first of them owns it."""

    module: str
    num_experts: int
    experts: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each expert, its owner first."""
        return tuple(
            tuple(rank for rank, held in enumerate(self.experts) if expert in held)
            for expert in range(self.num_experts)
        )

    @property
    def slots(self) -> tuple[int, ...]:
        """The expert in each slot, rank by rank."""
        return tuple(expert for held in self.experts for expert in held)


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts of every mixture of a model; `cluster`: the name of the cluster it was planned for."""

    version: Literal[1]
    cluster: str
    mixtures: tuple[PlacedMixture, ...]

    def verify(self) -> None:
        raise_if_any(self._faults())

    def _faults(self) -> Iterator[str]:
        yield from check_unique("mixture", (mixture.module for mixture in self.mixtures))
        for mixture in self.mixtures:
            for expert, ranks in enumerate(mixture.ranks):
                if not ranks:
                    yield f'mixture "{mixture.module}": expert {expert} is on no rank'
            for rank, held in enumerate(mixture.experts):
                if len(set(held)) < len(held) or not set(held) <= set(range(mixture.num_experts)):
                    yield f'mixture "{mixture.module}": rank {rank} holds {list(held)}; wanted different experts'

    def to_sglang(self) -> dict[str, list[list[int]]] | str:
        """SGLang's form, or why there is none. Layers without a mixture have the experts in order, as by default."""
        slots_by_layer: dict[int, tuple[int, ...]] = {}
        for mixture in self.mixtures:
            if len({len(held) for held in mixture.experts}) > 1:
                return f"{len(mixture.slots)} experts on {len(mixture.experts)} ranks are not as many on each"
            number = re.search(r"\d+", mixture.module)
            if number is None or int(number[0]) in slots_by_layer:
                return f'mixture "{mixture.module}" has no layer number of its own'
            slots_by_layer[int(number[0])] = mixture.slots
        if len({len(slots) for slots in slots_by_layer.values()}) != 1:
            return "its mixtures have different numbers of experts"
        first = self.mixtures[0]
        default = tuple(slot % first.num_experts for slot in range(len(first.slots)))
        layers = range(max(slots_by_layer) + 1)
        return {"physical_to_logical_map": [list(slots_by_layer.get(layer, default)) for layer in layers]}
