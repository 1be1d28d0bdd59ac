"""Train over several ranks: the tables are sharded, the result is that of one process.

    python examples/several_ranks.py                                              # one process
    torchrun --standalone --nproc-per-node 2 examples/several_ranks.py            # two ranks of this host

A recipe needs no script: `shardwright train synthetic-dlrm ranks=2`.
"""

from contextlib import closing
from itertools import islice

import torch

import shardwright as sw
from shardwright.comm.mesh import is_first_rank
from shardwright.models.dlrm import DLRM

BATCH_SIZE = 1024  # of all ranks together

torch.manual_seed(1)  # the same weights on every rank
stream = sw.ClickStream()
tables = [sw.Table(name, rows, 16) for name, rows, _ in stream.features]
features = [sw.Feature(name, name, "mean") for name, _, _ in stream.features]
model = DLRM(sw.EmbeddingBags(tables, features, sw.RowWiseAdaGrad(lr=0.1)), stream.num_dense, bottom=[32, 16], top=[32])

with closing(sw.Loader(stream, batch_size=BATCH_SIZE)) as whole:
    plan = sw.plan_for(model, whole.peek())  # of a global batch, the same on every rank
if is_first_rank():
    for subject, reason in plan.why[:5]:
        print(f"{subject}: {reason}")

with closing(sw.mesh_for(plan)) as mesh:
    job = sw.build(model, plan, mesh, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3))
    shard = plan.position(mesh.rank, plan.sample_axes)  # this rank's part of each batch
    with closing(sw.Loader(stream, batch_size=BATCH_SIZE, shard=shard)) as loader:
        for output in job.run(islice(loader, 40)):
            if output.step % 20 == 0 and is_first_rank():
                print(f"step {output.step}  loss of this rank's samples {output.loss:.4f}")
        losses = [float(output.loss) for output in job.evaluate(islice(loader, 5))]  # of samples not trained on yet
        print(f"rank {mesh.rank} of {mesh.size}  loss {sum(losses) / len(losses):.4f}", flush=True)
