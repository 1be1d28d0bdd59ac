"""Model and batches of the sharding benchmarks, equal on every side.

26 tables of skewed sizes and bag lengths, popular ids, a bottom and a top MLP. Needs numpy and, when called, torch and
Shardwright's Python code only: TorchRec's environment may lack the compiled kernels.
"""

from typing import Any

SEED, NUM_TABLES, NUM_NUMBERS = 7, 26, 64
LOCAL_BATCH_SIZE, NUM_BATCHES = 4096, 4  # samples of a rank in a step; distinct batches, used in a cycle
BOTTOM, TOP = (1024, 256), (64,)  # in the lab of 2 x 2 ranks a step computes for as long as it sends
SPARSE_LR, DENSE_LR = 0.05, 0.01


def make_tables() -> list[Any]:
    import numpy as np

    from shardwright.spec.workload import Table

    rng = np.random.default_rng(SEED)
    rows = np.clip(10 ** rng.normal(4.3, 0.8, NUM_TABLES), 100, 5e5).astype(int)
    dims = rng.choice([16, 32, 64, 128], NUM_TABLES, p=[0.3, 0.4, 0.2, 0.1])
    return [Table(f"t{i:02}", int(r), int(d)) for i, (r, d) in enumerate(zip(rows, dims, strict=True))]


def make_model() -> Any:
    """The model on the meta device, equal on every rank."""
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
            self.bottom = MLP(NUM_NUMBERS, BOTTOM)
            self.top = MLP(BOTTOM[-1] + width, (*TOP, 1), activate_last=False)

        def forward(self, batch: Any, vectors: Any) -> torch.Tensor:
            bottom = self.bottom(batch.numbers)
            return self.top(torch.cat([bottom, vectors.pooled_BD], 1)).squeeze(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = make_tables()
            features = [Feature(table.name, table.name) for table in tables]
            self.sparse = EmbeddingBags(tables, features, RowWiseAdaGrad(lr=SPARSE_LR))
            self.dense = Dense(sum(table.dim for table in tables))
            self.loss = BinaryLoss()

        def forward(self, batch: Any) -> torch.Tensor:
            return self.dense(batch, self.sparse(batch))

    torch.manual_seed(SEED)
    with torch.device("meta"):
        return Net()


def make_batch(number: int, num_ranks: int) -> Any:
    """Global batch `number`: mean bag lengths are log-normal, ids follow a power law."""
    import numpy as np
    import torch

    from shardwright.jagged import Batch, Jagged

    tables = make_tables()
    means = np.clip(np.random.default_rng(SEED + 1).lognormal(0.7, 1.0, len(tables)), 1, 24)
    rng = np.random.default_rng(SEED + 100 + number)
    size = LOCAL_BATCH_SIZE * num_ranks
    lengths = np.stack([np.minimum(rng.poisson(mean, size), 60) for mean in means])
    values = [
        (table.rows ** rng.random(int(count)) - 1).astype(np.int64)  # log-uniform: frequency about 1 / popularity rank
        for table, count in zip(tables, lengths.sum(1), strict=True)
    ]
    clicks = torch.from_numpy((rng.random(size) < 0.3).astype(np.float32))
    dense = torch.from_numpy(rng.normal(size=(size, NUM_NUMBERS)).astype(np.float32))
    names = tuple(table.name for table in tables)
    jagged = Jagged(names, torch.from_numpy(np.concatenate(values)), torch.from_numpy(lengths.astype(np.int64)))
    return Batch(jagged, dense, {"click": clicks})


def local_batch(global_batch: Any, rank: int) -> Any:
    """A rank's samples of a global batch."""
    from shardwright.jagged import Batch, narrow

    start, end = LOCAL_BATCH_SIZE * rank, LOCAL_BATCH_SIZE * (rank + 1)
    labels = {name: label[start:end] for name, label in global_batch.labels.items()}
    return Batch(narrow(global_batch.features, start, end), global_batch.dense[start:end], labels)
