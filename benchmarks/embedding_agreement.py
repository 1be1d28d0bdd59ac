"""Whether we and FBGEMM train the same tables alike: row-wise AdaGrad, float32, sum pooling, several steps.

    python -m benchmarks.embedding_agreement --peer PYTHON [--write NAME]

PYTHON is .rivals/bin/python, as `make rivals` makes it: torch 2.13, fbgemm-gpu-cpu 1.8.0.
Both start from the same tables and get the same
ids (popularity rank**-1.05, bags of any length) and upstream gradients. One JSON line: of every step's lookups and of
the weights and the optimizer's state at the end, the largest difference, absolute and relative to the largest number of
its row (or bag), and the latter in float32's eps. Both add the same numbers, in orders of their own: a difference above
BOUND eps is a failure, and exits with 1.
"""

# pyright: reportMissingImports=false
# (torchrec and fbgemm_gpu are in the rivals' environment only: `make rivals`)

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks import results_file
from benchmarks.embedding_peers import ids_of

TABLES = [(1000, 16), (30, 64), (20_000, 128), (200_000, 32)]
BATCH, LENGTH, STEPS = 1024, 8, 10
LR, EPS = 0.05, 1e-8
BOUND = 64


def start() -> list[np.ndarray]:
    draw = np.random.Generator(np.random.Philox(key=1))
    return [draw.uniform(-0.1, 0.1, shape).astype(np.float32) for shape in TABLES]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids of all tables, offsets of all their bags, the gradient of their vectors side by side."""
    draw, lookups = np.random.Generator(np.random.Philox(key=[2, step])), BATCH * LENGTH
    ids = np.concatenate([ids_of(table, rows, lookups, step) for table, (rows, _) in enumerate(TABLES)])
    starts = [np.sort(draw.integers(0, lookups + 1, BATCH)) * (np.arange(BATCH) > 0) for _ in TABLES]
    offsets = np.concatenate([part + table * lookups for table, part in enumerate(starts)] + [[len(ids)]])
    gradient = draw.normal(size=(BATCH, sum(dim for _, dim in TABLES))).astype(np.float32)
    return torch.from_numpy(ids), torch.from_numpy(offsets), torch.from_numpy(gradient)


def ours() -> dict[str, np.ndarray]:
    from shardwright.jagged import Jagged
    from shardwright.layers.embedding import EmbeddingBags
    from shardwright.spec.optimizer import RowWiseAdaGrad
    from shardwright.spec.workload import Feature, Table

    tables = [Table(f"t{at}", rows, dim) for at, (rows, dim) in enumerate(TABLES)]
    features = [Feature(f"f{at}", table.name) for at, table in enumerate(tables)]
    bags = EmbeddingBags(tables, features, RowWiseAdaGrad(LR, eps=EPS))
    for table, values in zip(tables, start(), strict=True):
        bags.weight(table.name).data.copy_(torch.from_numpy(values))
    found = {}
    for step in range(STEPS):
        ids, offsets, gradient = batch_of(step)
        names = tuple(feature.name for feature in features)
        vectors = bags(Jagged(names, ids, offsets.diff().view(len(tables), BATCH))).pooled_BD
        found[f"lookup{step}"] = vectors.detach().numpy().copy()
        vectors.backward(gradient)
    for table in tables:
        found[f"weight_{table.name}"] = bags.weight(table.name).detach().numpy()
        found[f"state_{table.name}"] = bags.state(table.name)["sum"].numpy()
    return found


def fbgemm() -> dict[str, np.ndarray]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    bags = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in TABLES],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        eps=EPS,
    )
    for weight, values in zip(bags.split_embedding_weights(), start(), strict=True):
        weight.copy_(torch.from_numpy(values))
    found = {}
    for step in range(STEPS):
        ids, offsets, gradient = batch_of(step)
        vectors = bags(ids, offsets)
        found[f"lookup{step}"] = vectors.detach().numpy().copy()
        vectors.backward(gradient)
    for at, weight in enumerate(bags.split_embedding_weights()):
        found[f"weight_t{at}"] = weight.detach().numpy()
        found[f"state_t{at}"] = bags.split_optimizer_states()[at][0].numpy()
    return found


def differences(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    found = {}
    for kind in ("lookup", "weight", "state"):
        absolute = relative = 0.0
        for name in (name for name in mine if name.startswith(kind)):
            a, b = (side[name].reshape(len(side[name]), -1).astype(np.float64) for side in (mine, theirs))
            parts = np.cumsum([dim for _, dim in TABLES])[:-1] if kind == "lookup" else []
            for one, other in zip(np.split(a, parts, axis=1), np.split(b, parts, axis=1), strict=True):
                apart, size = np.abs(one - other), np.maximum(np.abs(one), np.abs(other)).max(1, keepdims=True)
                absolute = max(absolute, apart.max())
                relative = max(relative, (apart / np.maximum(size, 1e-30)).max())
        in_eps = relative / np.finfo(np.float32).eps
        found[kind] = {"absolute": float(absolute), "relative": float(relative), "in_eps": round(float(in_eps), 2)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python with FBGEMM")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    parser.add_argument("--fbgemm", help=argparse.SUPPRESS)  # in the peer's process: where to write what it found
    asked = parser.parse_args()
    if asked.fbgemm:
        np.savez(asked.fbgemm, allow_pickle=False, **fbgemm())
        return 0
    if asked.smoke:  # without the rival: whether ours agrees with itself
        print(json.dumps({"benchmark": "embedding_agreement"} | differences(ours(), ours())))
        return 0
    if not asked.peer:
        parser.error("--peer is missing")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "fbgemm.npz")
        words = [asked.peer, "-m", "benchmarks.embedding_agreement", "--fbgemm", path]
        subprocess.run(words, cwd=Path(__file__).parent.parent, check=True)
        with np.load(path) as saved:
            found = differences(ours(), dict(saved))
    agrees = all(kind["in_eps"] <= BOUND for kind in found.values())
    about = {"benchmark": "embedding_agreement", "optimizer": "rowwise_adagrad", "dtype": "fp32", "steps": STEPS}
    line = about | found | {"bound_in_eps": BOUND, "agrees": agrees}
    print(json.dumps(line))
    if asked.write:
        results_file.write(asked.write, "embedding_agreement", [line])
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
