"""A source of ratings for tests of retrieval: users like items of their own kind; and a small model of two towers."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shardwright.data.sources.source import NumpyBatch
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.in_batch_softmax import SoftmaxSpec
from shardwright.layers.mlp import PLAIN, MLPForm
from shardwright.models.two_tower import TwoTower, make_two_tower
from shardwright.spec.optimizer import AdaGrad, SparseOptimizer
from shardwright.spec.workload import Feature, Table

USERS, ITEMS, KINDS = 30, 40, 4


@dataclass(frozen=True)
class RatedItems:
    """Ids of users and items are from 2 on; ids 0 and 1 are shared by unknown ones."""

    size: int = 2000
    seed: int = 0
    positives: float = 0.9  # share of positive ratings of items of the user's kind; of others a tenth
    weighted: bool = False

    features = (("user", USERS + 2, False), ("item", ITEMS + 2, False), ("kinds", KINDS + 2, True))
    num_dense = 2
    unknown_ids = (0, 1)

    def _columns(self) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(self.seed)
        users, items = draw.integers(0, USERS, self.size), draw.integers(0, ITEMS, self.size)
        rate = np.where(users % KINDS == items % KINDS, self.positives, self.positives / 10)
        labels = (draw.random(self.size) < rate).astype(np.float32)
        is_unknown = draw.random((2, self.size)) < 0.02
        return {
            "users": np.where(is_unknown[0], 1, users + 2),
            "items": np.where(is_unknown[1], 1, items + 2),
            "kinds": np.where(is_unknown[1], 1, items % KINDS + 2),
            "labels": labels,
            "dense": draw.standard_normal((self.size, 2)).astype(np.float32),
            "weights": draw.integers(0, 3, self.size).astype(np.float32),
        }

    def take(self, indices: np.ndarray) -> NumpyBatch:
        columns = {name: values[indices] for name, values in self._columns().items()}
        ids = [columns["users"], columns["items"], columns["kinds"].repeat(2)]
        lengths = np.repeat([[1], [1], [2]], len(indices), axis=1)
        weights = columns["weights"] if self.weighted else None
        features = tuple(name for name, _, _ in self.features)
        return NumpyBatch(
            features, np.concatenate(ids), lengths, columns["dense"], {"click": columns["labels"]}, weights
        )

    def evaluation(self) -> "RatedItems":
        return replace(self, size=500, seed=self.seed + 1)


def make_model(
    optimizer: SparseOptimizer | None = None,
    dtype: str = "float64",
    source: RatedItems | None = None,
    form: MLPForm = PLAIN,
    **softmax: Any,
) -> TwoTower:
    source = source or RatedItems()
    tables = [Table(name, rows, 4, dtype) for name, rows, _ in source.features]  # pyright: ignore[reportArgumentType]
    features = [Feature(name, name, "mean" if multi_hot else "sum") for name, _, multi_hot in source.features]
    torch.manual_seed(3)
    sparse = EmbeddingBags(tables, features, optimizer or AdaGrad(0.1))
    model = make_two_tower(
        source, sparse, ["user", "number_1"], ["item", "kinds", "number_0"], [8, 4], SoftmaxSpec(**softmax), form
    )
    return model.to(getattr(torch, dtype))
