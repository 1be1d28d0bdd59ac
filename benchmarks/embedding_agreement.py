"""Agreement with FBGEMM in training the same tables: row-wise AdaGrad, float32, sum pooling, several steps.

    python -m benchmarks.embedding_agreement --peer PYTHON [--write NAME]

PYTHON is .rivals/bin/python, made by `make rivals`: torch 2.13, fbgemm-gpu-cpu 1.8.0. Both start from the same tables
and get the same ids (popularity rank**-1.05, bags of any length) and upstream gradients. One JSON line: the largest
difference in lookups over all steps, and in weights and optimizer state at the end, absolute and relative to the
largest number of its row (or bag), the latter also in float32's eps. Both add the same numbers in different orders:
a difference above MAX_EPS eps is a failure with exit status 1.
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
MAX_EPS = 64


def initial_weights() -> list[np.ndarray]:
    generator = np.random.Generator(np.random.Philox(key=1))
    return [generator.uniform(-0.1, 0.1, shape).astype(np.float32) for shape in TABLES]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids of all tables, offsets of all their bags, and the gradient of their concatenated vectors."""
    generator, lookups = np.random.Generator(np.random.Philox(key=[2, step])), BATCH * LENGTH
    ids = np.concatenate([ids_of(table, rows, lookups, step) for table, (rows, _) in enumerate(TABLES)])
    starts = [np.sort(generator.integers(0, lookups + 1, BATCH)) * (np.arange(BATCH) > 0) for _ in TABLES]
    offsets = np.concatenate([part + table * lookups for table, part in enumerate(starts)] + [[len(ids)]])
    gradient = generator.normal(size=(BATCH, sum(dim for _, dim in TABLES))).astype(np.float32)
    return torch.from_numpy(ids), torch.from_numpy(offsets), torch.from_numpy(gradient)


def train_ours() -> dict[str, np.ndarray]:
    from shardwright.jagged import Jagged
    from shardwright.layers.embedding import EmbeddingBags
    from shardwright.spec.optimizer import RowWiseAdaGrad
    from shardwright.spec.workload import Feature, Table

    tables = [Table(f"t{i}", rows, dim) for i, (rows, dim) in enumerate(TABLES)]
    features = [Feature(f"f{i}", table.name) for i, table in enumerate(tables)]
    bags = EmbeddingBags(tables, features, RowWiseAdaGrad(LR, eps=EPS))
    for table, values in zip(tables, initial_weights(), strict=True):
        bags.weight(table.name).data.copy_(torch.from_numpy(values))
    arrays = {}
    for step in range(STEPS):
        ids, offsets, gradient = batch_of(step)
        names = tuple(feature.name for feature in features)
        vectors = bags(Jagged(names, ids, offsets.diff().view(len(tables), BATCH))).pooled_BD
        arrays[f"lookup{step}"] = vectors.detach().numpy().copy()
        vectors.backward(gradient)
    for table in tables:
        arrays[f"weight_{table.name}"] = bags.weight(table.name).detach().numpy()
        arrays[f"state_{table.name}"] = bags.state(table.name)["sum"].numpy()
    return arrays


def train_fbgemm() -> dict[str, np.ndarray]:
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
    for weight, values in zip(bags.split_embedding_weights(), initial_weights(), strict=True):
        weight.copy_(torch.from_numpy(values))
    arrays = {}
    for step in range(STEPS):
        ids, offsets, gradient = batch_of(step)
        vectors = bags(ids, offsets)
        arrays[f"lookup{step}"] = vectors.detach().numpy().copy()
        vectors.backward(gradient)
    for i, weight in enumerate(bags.split_embedding_weights()):
        arrays[f"weight_t{i}"] = weight.detach().numpy()
        arrays[f"state_t{i}"] = bags.split_optimizer_states()[i][0].numpy()
    return arrays


def differences(our_arrays: dict[str, np.ndarray], their_arrays: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    by_kind = {}
    for kind in ("lookup", "weight", "state"):
        absolute = relative = 0.0
        for name in (name for name in our_arrays if name.startswith(kind)):
            ours, theirs = (
                side[name].reshape(len(side[name]), -1).astype(np.float64) for side in (our_arrays, their_arrays)
            )
            parts = np.cumsum([dim for _, dim in TABLES])[:-1] if kind == "lookup" else []
            for a, b in zip(np.split(ours, parts, axis=1), np.split(theirs, parts, axis=1), strict=True):
                difference, size = (np.abs(a - b), np.maximum(np.abs(a), np.abs(b)).max(1, keepdims=True))
                absolute = max(absolute, difference.max())
                relative = max(relative, (difference / np.maximum(size, 1e-30)).max())
        in_eps = relative / np.finfo(np.float32).eps
        by_kind[kind] = {"absolute": float(absolute), "relative": float(relative), "in_eps": round(float(in_eps), 2)}
    return by_kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python with FBGEMM")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    parser.add_argument("--fbgemm", help=argparse.SUPPRESS)  # in the peer's process: where to write its arrays
    args = parser.parse_args()
    if args.fbgemm:
        np.savez(args.fbgemm, allow_pickle=False, **train_fbgemm())
        return 0
    if args.smoke:  # without FBGEMM: compares ours with itself
        print(json.dumps({"benchmark": "embedding_agreement"} | differences(train_ours(), train_ours())))
        return 0
    if not args.peer:
        parser.error("give --peer .rivals/bin/python (`make rivals`), or --smoke")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "fbgemm.npz")
        command = [args.peer, "-m", "benchmarks.embedding_agreement", "--fbgemm", path]
        subprocess.run(command, cwd=Path(__file__).parent.parent, check=True)
        with np.load(path) as saved:
            by_kind = differences(train_ours(), dict(saved))
    agrees = all(kind["in_eps"] <= MAX_EPS for kind in by_kind.values())
    about = {"benchmark": "embedding_agreement", "optimizer": "rowwise_adagrad", "dtype": "fp32", "steps": STEPS}
    line = about | by_kind | {"bound_in_eps": MAX_EPS, "agrees": agrees}
    print(json.dumps(line))
    if args.write:
        results_file.write(args.write, "embedding_agreement", [line])
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
