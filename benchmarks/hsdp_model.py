"""What benchmarks of the dense part train: DHEN of any depth over small tables, and torch's own fully_shard of it."""

from typing import Any

SEED, NUMBERS, FEATURES, ROWS, DIM = 11, 16, 15, 1000, 64
OWN, BATCHES = 256, 4  # samples of a rank in a step; batches that come again and again
HIDDEN, TOP = (512,), (64,)
RATE, SPARSE_RATE = 1e-3, 0.05


def model(depth: int) -> Any:
    """On the meta device; the same on every rank."""
    from functools import partial

    import torch

    from shardwright.layers.embedding import EmbeddingBags
    from shardwright.layers.ensemble import EnsembleSpec
    from shardwright.layers.mixing import INTERACTIONS, dlrm
    from shardwright.models.dhen import DHEN
    from shardwright.spec.optimizer import RowWiseAdaGrad
    from shardwright.spec.workload import Feature, Table

    dots = partial(dlrm, hidden=list(HIDDEN))
    form = EnsembleSpec((dots, INTERACTIONS["linear"]), FEATURES + 1, "sum")
    tables = [Table(f"t{at:02}", ROWS, DIM) for at in range(FEATURES)]
    features = [Feature(table.name, table.name) for table in tables]
    torch.manual_seed(SEED)
    with torch.device("meta"):
        sparse = EmbeddingBags(tables, features, RowWiseAdaGrad(lr=SPARSE_RATE))
        return DHEN(sparse, NUMBERS, bottom=[64, DIM], top=TOP, layers=[form] * depth)


def batch(number: int, ranks: int) -> Any:
    """The global batch of so many ranks."""
    import torch

    from shardwright.jagged import Batch, Jagged

    draw, size = torch.Generator().manual_seed(SEED + number), OWN * ranks
    names = tuple(f"t{at:02}" for at in range(FEATURES))
    ids = torch.randint(0, ROWS, (FEATURES * size,), generator=draw)
    jagged = Jagged(names, ids, torch.ones(FEATURES, size, dtype=torch.int64))
    clicks = (torch.rand(size, generator=draw) < 0.3).float()
    return Batch(jagged, torch.randn(size, NUMBERS, generator=draw), {"click": clicks})


def part(whole: Any, rank: int) -> Any:
    """A rank's share of a global batch."""
    from shardwright.jagged import Batch, narrow

    start, stop = OWN * rank, OWN * (rank + 1)
    labels = {name: label[start:stop] for name, label in whole.labels.items()}
    return Batch(narrow(whole.features, start, stop), whole.dense[start:stop], labels)


class Stock:
    """The dense part under torch's fully_shard, block by block, over vectors of whole tables on each rank: nothing of
    them is exchanged or updated, which ours does. Its defaults, and the next block gathered beside each."""

    def __init__(self, depth: int, mesh: Any) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard

        from shardwright.measure.describe import block_names
        from shardwright.runtime.materialize import materialize

        self.model = model(depth)
        materialize(self.model, torch.device("cpu"))
        blocks = [self.model.get_submodule(name) for name in block_names(self.model)]
        for block in blocks:
            fully_shard(block, mesh=mesh)
        for block, ahead in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([ahead])
            ahead.set_modules_to_backward_prefetch([block])
        fully_shard(self.model.dense, mesh=mesh)
        self._optimizer = torch.optim.Adam(self.model.dense.parameters(), RATE)

    def step(self, batch: Any) -> Any:
        import torch

        self._optimizer.zero_grad()
        with torch.no_grad():
            vectors = self.model.sparse.lookup(self.model.sparse.read(batch.features))
        for tensor in vectors.tensors():
            tensor.requires_grad_()
        logits = self.model.dense(batch, vectors)
        loss = self.model.loss(logits, batch)
        loss.backward()
        self._optimizer.step()
        return loss.detach()
