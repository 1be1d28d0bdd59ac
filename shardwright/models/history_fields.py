"""The features that models of histories read: keys of a history, and those of the target that they are like.

Shape legend: B samples, N ids of a history in a batch, D columns of a key.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.jagged import Batch, Vectors
from shardwright.models.click_inputs import ClickSource


@dataclass(frozen=True, slots=True)
class HistoryFields:
    """A history and its side features, with the target's feature that has the same ids; "": the target has none."""

    keys: tuple[str, ...]  # the history, then its sides
    targets: tuple[str, ...]

    def lengths(self, batch: Batch) -> Tensor:
        return batch.features.lengths[batch.features.features.index(self.keys[0])]

    def join_keys(self, vectors: Vectors) -> Tensor:
        """(N, D): the vectors of each position's id and sides."""
        return torch.cat([vectors[key] for key in self.keys], dim=1)

    def join_targets(self, vectors: Vectors) -> Tensor:
        """(B, D): the target's vectors in the same columns, zeros where it has none."""
        like_BD = vectors[self.targets[0]]
        return torch.cat([vectors[name] if name else torch.zeros_like(like_BD) for name in self.targets], dim=1)


def find_histories(source: ClickSource, kind: str) -> tuple[HistoryFields, ...]:
    """The histories of a source, in the order of its features; raises UserError if it has none."""
    targets: Mapping[str, str] = getattr(source, "histories", {})
    sides: Mapping[str, str] = getattr(source, "sides", {})
    names = [name for name, _, _ in source.features]
    histories = [name for name in names if name in targets and name not in sides]
    if not histories:
        raise UserError(
            f"model.kind={kind} reads histories, and the data has none; set data.history=50 for MovieLens, or declare "
            "list columns as histories in the schema"
        )
    keys = [(name, *(side for side in names if sides.get(side) == name)) for name in histories]
    return tuple(HistoryFields(features, tuple(targets.get(key, "") for key in features)) for features in keys)


def aligned_features(histories: tuple[HistoryFields, ...]) -> dict[str, str]:
    """By side feature, the history that has as many ids in each sample."""
    return {side: fields.keys[0] for fields in histories for side in fields.keys[1:]}
