"""Train an nn.Module of your own with sharded, fused tables: `build` runs whole steps.

python examples/own_model.py
"""

from contextlib import closing
from itertools import islice

import torch
from torch import nn

import shardwright as sw


class Top(nn.Module):
    """The dense model: numeric features and the vectors of all id features, to one logit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: sw.Batch, vectors: sw.Vectors) -> torch.Tensor:
        return self.net(torch.cat([batch.numbers, vectors.pooled_BD], dim=1)).squeeze(1)


class Clicks(nn.Module):
    """Any module with these three children: `sparse` looks up, `dense` computes, `loss` compares with labels."""

    def __init__(self, source: sw.ClickStream, dim: int = 8) -> None:
        super().__init__()
        tables = [sw.Table(name, rows, dim) for name, rows, _ in source.features]
        features = [sw.Feature(name, name, "mean") for name, _, _ in source.features]  # name, its table, pooling
        self.sparse = sw.EmbeddingBags(tables, features, sw.RowWiseAdaGrad(lr=0.1))
        self.dense = Top(source.num_dense + dim * len(tables))
        self.loss = sw.BinaryLoss()

    def forward(self, batch: sw.Batch) -> torch.Tensor:
        return self.dense(batch, self.sparse(batch))


torch.manual_seed(1)
source = sw.ClickStream()
other_samples = sw.ClickStream(seed=7)  # of the same ground truth, to evaluate on
model = Clicks(source)
with closing(sw.Loader(source, batch_size=1024)) as loader, closing(sw.Loader(other_samples, batch_size=1024)) as test:
    plan = sw.plan_for(model, loader.peek())  # where every table and weight goes; `plan.why` has the reasons
    with closing(sw.mesh_for(plan)) as mesh:
        job = sw.build(model, plan, mesh, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3))
        for output in job.run(islice(loader, 150)):
            if output.step % 50 == 0:
                print(f"step {output.step}  loss {output.loss:.4f}")
        losses = [float(output.loss) for output in job.evaluate(islice(test, 10))]
        print(f"held out  loss {sum(losses) / len(losses):.4f}")
