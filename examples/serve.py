"""Train, export, load the export in a predictor, and compare its scores with those of the trained model.

    python examples/serve.py

`shardwright serve served` answers the same over HTTP.
"""

import shutil
from contextlib import closing
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp

import torch

import shardwright as sw
from shardwright.models.deepfm import DeepFM

torch.manual_seed(1)
folder = Path(mkdtemp(prefix="shardwright-serve-"))
stream = sw.ClickStream()
# DeepFM reads two vectors of every id: one of 8 columns for products and the MLP, one column as a linear weight.
widths = {"": 8, "_linear": 1}
tables = [sw.Table(name + suffix, rows, dim) for suffix, dim in widths.items() for name, rows, _ in stream.features]
features = [sw.Feature(table.name, table.name, "mean", ids=table.name.removesuffix("_linear")) for table in tables]
model = DeepFM(sw.EmbeddingBags(tables, features, sw.RowWiseAdaGrad(lr=0.1)), stream.num_dense, hidden=[32])

with closing(sw.Loader(stream, batch_size=1024)) as loader:
    example = loader.peek()
    plan = sw.plan_for(model, example)
    with closing(sw.mesh_for(plan)) as mesh:
        job = sw.build(model, plan, mesh, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3))
        *_, output = job.run(islice(loader, 50))
        print(f"trained {output.step} steps  loss {output.loss:.4f}")

        # An export has the tables and the dense model as a torch.export program: it needs none of your code.
        sw.export(model, job.save(folder / "checkpoints"), folder / "served", example=example)
        with closing(sw.Predictor(folder / "served")) as predictor:
            trained = [output.logits.sigmoid() for output in job.evaluate([example])][0]
            served = predictor.scores(example)
            print(f"{len(served)} scores; equal to the bit: {torch.equal(served, trained)}")
            sample = {"ids": {"user": 7, "history": [1, 2]}, "numbers": [0.5] * stream.num_dense}
            step, scores = predictor.answer([sample])  # as an HTTP request has it
            print(f"score of a sample: {scores[0]:.4f}, with the weights of step {step}")

shutil.rmtree(folder)
