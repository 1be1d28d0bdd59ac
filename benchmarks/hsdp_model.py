"""The model of benchmarks of the dense model: DHEN of any depth over small tables, also under torch's fully_shard."""

from typing import Any

SEED, NUMBERS, FEATURES, ROWS, DIM = 11, 16, 15, 1000, 64
LOCAL_BATCH_SIZE, BATCHES = 256, 4  # samples of a rank in a step; batches that are repeated
HIDDEN, TOP = (512,), (64,)
DENSE_LR, TABLE_LR = 1e-3, 0.05


def model(depth: int) -> Any:
    """Build DHEN on the meta device, the same on every rank."""
    from functools import partial

    import torch

    from shardwright.layers.embedding import EmbeddingBags
    from shardwright.layers.ensemble import EnsembleSpec
    from shardwright.layers.mixing import INTERACTIONS, dlrm
    from shardwright.models.dhen import DHEN
    from shardwright.spec.optimizer import RowWiseAdaGrad
    from shardwright.spec.workload import Feature, Table

    advanced_dlrm = partial(dlrm, hidden=list(HIDDEN))
    layer = EnsembleSpec((advanced_dlrm, INTERACTIONS["linear"]), FEATURES + 1, "sum")
    tables = [Table(f"t{at:02}", ROWS, DIM) for at in range(FEATURES)]
    features = [Feature(table.name, table.name) for table in tables]
    torch.manual_seed(SEED)
    with torch.device("meta"):
        sparse = EmbeddingBags(tables, features, RowWiseAdaGrad(lr=TABLE_LR))
        return DHEN(sparse, NUMBERS, bottom=[64, DIM], top=TOP, layers=[layer] * depth)


def batch(number: int, ranks: int) -> Any:
    """The global batch of `ranks` ranks."""
    import torch

    from shardwright.jagged import Batch, Jagged

    generator, size = torch.Generator().manual_seed(SEED + number), LOCAL_BATCH_SIZE * ranks
    names = tuple(f"t{at:02}" for at in range(FEATURES))
    ids = torch.randint(0, ROWS, (FEATURES * size,), generator=generator)
    jagged = Jagged(names, ids, torch.ones(FEATURES, size, dtype=torch.int64))
    clicks = (torch.rand(size, generator=generator) < 0.3).float()
    return Batch(jagged, torch.randn(size, NUMBERS, generator=generator), {"click": clicks})


def local_batch(global_batch: Any, rank: int) -> Any:
    """A rank's local batch of a global batch."""
    from shardwright.jagged import Batch, narrow

    start, stop = LOCAL_BATCH_SIZE * rank, LOCAL_BATCH_SIZE * (rank + 1)
    labels = {name: label[start:stop] for name, label in global_batch.labels.items()}
    return Batch(narrow(global_batch.features, start, stop), global_batch.dense[start:stop], labels)


class FullyShardModel:
    """The dense model under torch's fully_shard, block by block, with its defaults and prefetch of the next block.

    Every rank has all tables: their vectors are not exchanged and rows not updated, unlike in ours."""

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
        self._optimizer = torch.optim.Adam(self.model.dense.parameters(), DENSE_LR)

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
