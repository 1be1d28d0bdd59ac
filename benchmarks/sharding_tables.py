"""What the sharding benchmarks train, the same on every side: 26 tables of skewed sizes and bags, popular ids, a bottom
and a top MLP. Needs numpy and, once called, torch and Shardwright's Python alone: a rival's environment may lack the
compiled kernels."""

from typing import Any

SEED, TABLES, NUMBERS = 7, 26, 64
OWN, BATCHES = 4096, 4  # samples of a rank in a step; batches that come again and again
BOTTOM, TOP = (1024, 256), (64,)  # with 2 x 2 in the lab a step computes for as long as it sends
SPARSE_RATE, DENSE_RATE = 0.05, 0.01


def tables() -> list[Any]:
    import numpy as np

    from shardwright.spec.workload import Table

    draw = np.random.default_rng(SEED)
    rows = np.clip(10 ** draw.normal(4.3, 0.8, TABLES), 100, 5e5).astype(int)
    dims = draw.choice([16, 32, 64, 128], TABLES, p=[0.3, 0.4, 0.2, 0.1])
    return [Table(f"t{at:02}", int(r), int(d)) for at, (r, d) in enumerate(zip(rows, dims, strict=True))]


def model() -> Any:
    """On the meta device; the same on every rank."""
    import torch
    from torch import nn

    from shardwright.layers.embedding import EmbeddingBags
    from shardwright.layers.loss import BinaryLoss
    from shardwright.layers.mlp import MLP
    from shardwright.spec.optimizer import RowWiseAdaGrad
    from shardwright.spec.workload import Feature

    class Dense(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.bottom = MLP(NUMBERS, BOTTOM)
            self.top = MLP(BOTTOM[-1] + width, (*TOP, 1), activate_last=False)

        def forward(self, batch: Any, vectors: Any) -> torch.Tensor:
            low = self.bottom(batch.numbers)
            return self.top(torch.cat([low, vectors.pooled_BD], 1)).squeeze(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            known = tables()
            features = [Feature(table.name, table.name) for table in known]
            self.sparse = EmbeddingBags(known, features, RowWiseAdaGrad(lr=SPARSE_RATE))
            self.dense = Dense(sum(table.dim for table in known))
            self.loss = BinaryLoss()

        def forward(self, batch: Any) -> torch.Tensor:
            return self.dense(batch, self.sparse(batch))

    torch.manual_seed(SEED)
    with torch.device("meta"):
        return Net()


def batch(number: int, ranks: int) -> Any:
    """The global batch of so many ranks: bags log-normal in length, ids by a power law."""
    import numpy as np
    import torch

    from shardwright.jagged import Batch, Jagged

    known = tables()
    shape = np.random.default_rng(SEED + 1)
    mean = np.clip(shape.lognormal(0.7, 1.0, len(known)), 1, 24)
    draw = np.random.default_rng(SEED + 100 + number)
    size = OWN * ranks
    lengths = np.stack([np.minimum(draw.poisson(one, size), 60) for one in mean])
    values = [
        (table.rows ** draw.random(int(count)) - 1).astype(np.int64)  # log-uniform: about 1 / rank
        for table, count in zip(known, lengths.sum(1), strict=True)
    ]
    clicks = torch.from_numpy((draw.random(size) < 0.3).astype(np.float32))
    dense = torch.from_numpy(draw.normal(size=(size, NUMBERS)).astype(np.float32))
    names = tuple(table.name for table in known)
    jagged = Jagged(names, torch.from_numpy(np.concatenate(values)), torch.from_numpy(lengths.astype(np.int64)))
    return Batch(jagged, dense, {"click": clicks})


def part(whole: Any, rank: int) -> Any:
    """A rank's share of a global batch."""
    from shardwright.jagged import Batch, narrow

    start, stop = OWN * rank, OWN * (rank + 1)
    labels = {name: label[start:stop] for name, label in whole.labels.items()}
    return Batch(narrow(whole.features, start, stop), whole.dense[start:stop], labels)
