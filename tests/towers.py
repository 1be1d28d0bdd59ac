"""A model of two towers whose tables are members of an EmbeddingBagsDict, and batches for it.

Both towers have a table `site`; that of `user` has a feature without pooling, that of `item` pools by id weights.

Shape legend: B samples, D columns of a tower.
"""

from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.jagged import Batch, Jagged
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.workload import Feature, Table

ROWS = {"site": 40, "tag": 300, "past": 17, "small": 5}  # by ids of the batch


def make_user(optimizer: SparseOptimizer | None, dtype: str, weighted: bool | None = False) -> sw.EmbeddingBags:
    tables = [Table("site", 40, 8, dtype), Table("tag", 300, 4, dtype), Table("past", 17, 6, dtype)]
    features = [
        Feature("tag", "tag", "mean"),
        Feature("past", "past", "none"),
        Feature("site", "site"),
        Feature("again", "tag", ids="tag"),
    ]
    return sw.EmbeddingBags(tables, features, optimizer, weighted=weighted)


def make_item(optimizer: SparseOptimizer | None, dtype: str, weighted: bool | None = True) -> sw.EmbeddingBags:
    tables = [Table("small", 5, 4, dtype), Table("site", 40, 8, dtype)]
    return sw.EmbeddingBags(
        tables, [Feature("site", "site"), Feature("small", "small", "mean")], optimizer, weighted=weighted
    )


class TowersDense(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.user = nn.Linear(4 + 8 + 4 + 6, 5, dtype=dtype)
        self.item = nn.Linear(8 + 4, 5, dtype=dtype)

    def forward(self, batch: Batch, vectors: dict[str, Any]) -> Tensor:
        past, user_BD = vectors["user"]["past"], vectors["user"].pooled_BD
        lengths_B = batch.features.lengths[batch.features.features.index("past")]
        samples = torch.arange(user_BD.shape[0], device=past.device)
        sample_of_id = samples.repeat_interleave(lengths_B, output_size=past.shape[0])
        past_BD = past.new_zeros(user_BD.shape[0], past.shape[1]).index_add(0, sample_of_id, past.tanh())
        return (self.user(torch.cat([user_BD, past_BD], 1)) * self.item(vectors["item"].pooled_BD).tanh()).sum(1)


class Towers(nn.Module):
    sparse: Any

    def __init__(self, sparse: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.sparse = sparse
        self.dense = TowersDense(dtype)
        self.loss = sw.BinaryLoss("click")

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


def make_towers(optimizer: SparseOptimizer | None, dtype: str = "float64", weighted: bool = True) -> Towers:
    torch.manual_seed(3)
    members = {"user": make_user(optimizer, dtype), "item": make_item(optimizer, dtype, weighted)}
    return Towers(sw.EmbeddingBagsDict(members), getattr(torch, dtype))


def batch(step: int, size: int = 24, dtype: torch.dtype = torch.float64, weighted: bool = True) -> Batch:
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(ROWS), size), generator=draw)
    counts = lengths.sum(1).tolist()
    values = [torch.randint(0, rows, (num,), generator=draw) for rows, num in zip(ROWS.values(), counts, strict=True)]
    weights = torch.rand(sum(counts), generator=draw, dtype=dtype) + 0.5 if weighted else None
    labels = {"click": (torch.rand(size, generator=draw) < 0.4).to(dtype)}
    sample_weights = torch.rand(size, generator=draw, dtype=dtype) + 0.1 if step % 3 == 0 else None
    return Batch(Jagged(tuple(ROWS), torch.cat(values), lengths, weights), None, labels, sample_weights)
