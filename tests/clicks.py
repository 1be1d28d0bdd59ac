"""Small click batches and a small DLRM for tests: three features over two tables, multi-hot, with repeated ids."""

import torch

from shardwright.jagged import Batch, Jagged
from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.dlrm import DLRM
from shardwright.spec.optimizer import RowWiseAdaGrad, SparseOptimizer
from shardwright.spec.workload import Feature, Table

FEATURES = (Feature("site", "site"), Feature("seen", "item", "mean"), Feature("shown", "item"))
ROWS = (("site", 40), ("item", 30))


def tables(dim: int = 8, dtype: str = "float32") -> tuple[Table, ...]:
    return tuple(Table(name, rows, dim, dtype) for name, rows in ROWS)  # pyright: ignore[reportArgumentType]


def ids(batch_size: int = 16, *, seed: int = 0, weighted: bool = False) -> Jagged:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3, batch_size), generator=generator)
    sizes = lengths.sum(1).tolist()
    values = torch.cat(
        [torch.randint(0, rows, (n,), generator=generator) for n, rows in zip(sizes, (40, 30, 30), strict=True)]
    )
    weights = torch.rand(values.numel(), generator=generator) if weighted else None
    return Jagged(("site", "seen", "shown"), values, lengths, weights)


def batch(batch_size: int = 16, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed + 1000)
    dense = torch.randn(batch_size, 4, generator=generator, dtype=dtype)
    click = torch.randint(0, 2, (batch_size,), generator=generator).to(dtype)
    return Batch(ids(batch_size, seed=seed), dense, {"click": click})


def dlrm(optimizer: SparseOptimizer | None = None, dtype: str = "float32") -> DLRM:
    bags = EmbeddingBags(tables(dtype=dtype), FEATURES, optimizer or RowWiseAdaGrad(lr=0.1))
    return DLRM(bags, 4, bottom=(16, 8), top=(16,)).to(getattr(torch, dtype))
