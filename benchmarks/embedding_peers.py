"""Embedding layers for benchmarks/embedding.py with one interface: ours, torch's, FBGEMM's, each in its own process.

Reads commands as JSON lines and answers each with a line: {"do": "build", ...}, {"do": "round", "steps": n}. Imports
Shardwright only for our layer and the roofline, so that it runs in the peer's environment.
"""

# pyright: reportMissingImports=false
# (torchrec and fbgemm_gpu are in the rivals' environment only: `make rivals`)

import json
import sys
import time
from itertools import cycle
from typing import Any

import numpy as np
import torch

BATCHES = 8


def ids_of(table: int, rows: int, lookups: int, batch: int) -> np.ndarray:
    """Ids whose popularity falls as rank**-1.05; frequent rows are scattered over the table."""
    generator = np.random.Generator(np.random.Philox(key=[table, batch]))
    power = -0.05
    ranks = ((rows**power - 1) * generator.random(lookups) + 1) ** (1 / power)
    stride = next(p for p in (2654435761, 2246822519, 3266489917) if rows % p)
    return (np.minimum(ranks.astype(np.int64), rows) - 1) * stride % rows


def batches(case: dict) -> list[list[np.ndarray]]:
    lookups = case["batch"] * case["length"]
    return [[ids_of(t, rows, lookups, b) for t, (rows, _) in enumerate(case["tables"])] for b in range(BATCHES)]


class Ours:
    def __init__(self, case: dict, ids: list[list[np.ndarray]]) -> None:
        from shardwright.jagged import Jagged
        from shardwright.layers.embedding import EmbeddingBags
        from shardwright.spec.optimizer import sparse_optimizer
        from shardwright.spec.workload import Dtype, Feature, Table

        dtypes: dict[str, Dtype] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
        dtype = dtypes[case["dtype"]]
        tables = [Table(f"t{i}", rows, dim, dtype) for i, (rows, dim) in enumerate(case["tables"])]
        features = [Feature(f"f{i}", table.name) for i, table in enumerate(tables)]
        self.bags = EmbeddingBags(tables, features, sparse_optimizer(case["optimizer"], lr=0.01))
        lengths = torch.full((len(tables), case["batch"]), case["length"], dtype=torch.int64)
        names = tuple(feature.name for feature in features)
        self.batches = [Jagged(names, torch.from_numpy(np.concatenate(part)), lengths) for part in ids]

    def forward(self, batch: int) -> torch.Tensor:
        return self.bags(self.batches[batch]).pooled_BD

    def backward(self, out: torch.Tensor, gradient: torch.Tensor) -> None:
        out.backward(gradient)


class Torch:
    def __init__(self, case: dict, ids: list[list[np.ndarray]]) -> None:
        dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[case["dtype"]]
        self.bags = [
            torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, dtype=dtype) for rows, dim in case["tables"]
        ]
        kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
        self.optimizer = kind[case["optimizer"]]([bag.weight for bag in self.bags], lr=0.01)
        self.offsets = torch.arange(case["batch"]) * case["length"]
        self.batches = [[torch.from_numpy(values) for values in part] for part in ids]

    def forward(self, batch: int) -> torch.Tensor:
        parts = zip(self.bags, self.batches[batch], strict=True)
        return torch.cat([bag(values, self.offsets) for bag, values in parts], dim=1)

    def backward(self, out: torch.Tensor, gradient: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        out.backward(gradient)
        self.optimizer.step()


class Fbgemm:
    def __init__(self, case: dict, ids: list[list[np.ndarray]]) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kinds = {
            "sgd": EmbOptimType.EXACT_SGD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
        self.bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in case["tables"]],
            optimizer=kinds[case["optimizer"]],
            weights_precision=SparseType.FP16 if case["dtype"] == "fp16" else SparseType.FP32,
            learning_rate=0.01,
        )
        for weight in self.bags.split_embedding_weights():
            weight.uniform_(-0.01, 0.01)
        lookups = case["batch"] * case["length"] * len(case["tables"])
        self.offsets = torch.arange(0, lookups + 1, case["length"])
        self.batches = [torch.from_numpy(np.concatenate(part)) for part in ids]

    def forward(self, batch: int) -> torch.Tensor:
        return self.bags(self.batches[batch], self.offsets)

    def backward(self, out: torch.Tensor, gradient: torch.Tensor) -> None:
        out.backward(gradient)


class Roofline:
    """Only reads the same rows in the same order, and rewrites the batch's distinct rows and their state."""

    def __init__(self, case: dict, ids: list[list[np.ndarray]]) -> None:
        from shardwright.kernels.native import use_huge_pages
        from shardwright.library import native_library

        native = native_library()
        assert native is not None
        self.native = native
        width = 4 if case["dtype"] == "fp32" else 2
        columns = {"sgd": 0, "rowwise_adagrad": 0, "adagrad": 1, "adam": 2}[case["optimizer"]]
        self.tables, self.states = [], []
        for rows, dim in case["tables"]:
            sizes = [rows * dim * width, *[rows * dim * 4] * columns]
            tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            for tensor in tensors:
                use_huge_pages(tensor)
                tensor.fill_(1)
            self.tables.append((tensors[0], dim * width))
            self.states.append([(tensor, dim * 4) for tensor in tensors[1:]])
        self.batches = [[torch.from_numpy(values) for values in part] for part in ids]
        self.distinct = [[torch.from_numpy(np.unique(values)) for values in part] for part in ids]
        generator = torch.Generator().manual_seed(0)
        self.uniform = [
            torch.randint(0, rows, (len(v),), generator=generator)
            for (rows, _), v in zip(case["tables"], ids[0], strict=True)
        ]
        self.batch = 0

    def forward(self, batch: int) -> torch.Tensor:
        self.batch = batch
        self.read(self.batches[batch])
        return torch.zeros(1)

    def read(self, ids: list[torch.Tensor]) -> None:
        for (table, width), rows in zip(self.tables, ids, strict=True):
            self.native.shardwright_read_rows(table.data_ptr(), width, rows.data_ptr(), rows.numel())

    def backward(self, out: torch.Tensor, gradient: torch.Tensor) -> None:
        for table, state, rows in zip(self.tables, self.states, self.distinct[self.batch], strict=True):
            for tensor, width in (table, *state):
                self.native.shardwright_rewrite_rows(tensor.data_ptr(), width, rows.data_ptr(), rows.numel())

    def uniform_gigabytes_per_second(self) -> float:
        """Bandwidth of reading rows drawn uniformly from all tables: random access at these row sizes."""
        start = time.perf_counter()
        self.read(self.uniform)
        bytes_ = sum(rows.numel() * width for (_, width), rows in zip(self.tables, self.uniform, strict=True))
        return bytes_ / 1e9 / (time.perf_counter() - start)


CONTENDERS = {"ours": Ours, "torch": Torch, "fbgemm": Fbgemm, "roofline": Roofline}


def serve(name: str) -> None:
    layer: Any = None
    gradient, batch = torch.zeros(1), cycle(range(BATCHES))
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "build":
            layer = CONTENDERS[name](command, batches(command))
            width = sum(dim for _, dim in command["tables"])
            torch.manual_seed(0)
            gradient = torch.randn(command["batch"], width) * 0.01
            if name == "torch" and command["dtype"] != "fp32":
                gradient = gradient.to(layer.bags[0].weight.dtype)
            answer = {}
        else:
            torch.set_num_threads(command["threads"])
            forward, backward = [], []
            for _ in range(command["steps"]):
                start = time.perf_counter()
                out = layer.forward(next(batch))
                middle = time.perf_counter()
                layer.backward(out, gradient)
                end = time.perf_counter()
                forward.append(middle - start)
                backward.append(end - middle)
            answer = {"forward": forward, "backward": backward}
            if name == "roofline":
                answer["uniform"] = layer.uniform_gigabytes_per_second()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
