"""A whole DLRM training step against TorchRec's: 26 tables of 200,000 x 64, 512-256-64 / 512-256-1, batch 2,048.

    python -m benchmarks.dlrm_step --peer PYTHON [--threads N] [--rounds N]

PYTHON is .rivals/bin/python, made by `make rivals`: torch 2.13, torchrec 1.8 and fbgemm-gpu-cpu 1.8.0. TorchRec runs
one process under DistributedModelParallel on Gloo, with its fused row-wise AdaGrad; the dense model has SGD on both
sides. Ours runs in a plain loop in fp32, and with the dense model under bf16 autocast, which is faster only if the CPU
multiplies bf16 (the line says whether it does). All sides get the same ids, numbers and labels. Rounds are interleaved;
a JSON line each, then medians and the range of the ratios.
"""

# pyright: reportMissingImports=false
# (torchrec and fbgemm_gpu are in the rivals' environment only: `make rivals`)

import argparse
import json
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import results_file
from benchmarks.dependencies import ROOT

TABLES, ROWS, DIM, BATCH, DENSE = 26, 200_000, 64, 2048, 13
BOTTOM, TOP = (512, 256, DIM), (512, 256)
BATCHES = 8


def make_batch(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = np.random.Generator(np.random.Philox(number))
    positions = ((ROWS**-0.05 - 1) * generator.random(TABLES * BATCH) + 1) ** (1 / -0.05)
    ids = (np.minimum(positions.astype(np.int64), ROWS) - 1) * 2654435761 % ROWS
    numbers = generator.normal(size=(BATCH, DENSE)).astype(np.float32)
    labels = (generator.random(BATCH) < 0.25).astype(np.float32)
    return torch.from_numpy(ids), torch.from_numpy(numbers), torch.from_numpy(labels)


class Ours:
    def __init__(self, autocast: bool) -> None:
        from shardwright.jagged import Batch, Jagged
        from shardwright.layers.embedding import EmbeddingBags
        from shardwright.models.dlrm import DLRM
        from shardwright.spec.optimizer import RowWiseAdaGrad
        from shardwright.spec.workload import Feature, Table

        names = tuple(f"f{i}" for i in range(TABLES))
        tables, features = [Table(n, ROWS, DIM) for n in names], [Feature(n, n) for n in names]
        sparse = EmbeddingBags(tables, features, RowWiseAdaGrad(lr=0.01))
        self.model = DLRM(sparse, DENSE, bottom=BOTTOM, top=TOP)
        self.optimizer = torch.optim.SGD(list(self.model.dense.parameters()), lr=0.01)
        self.autocast = autocast
        lengths = torch.ones(TABLES, BATCH, dtype=torch.int64)
        self.batches = cycle(
            Batch(Jagged(names, ids, lengths), numbers, {"click": labels})
            for ids, numbers, labels in map(make_batch, range(BATCHES))
        )

    def step(self) -> float:
        batch = next(self.batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.model(batch)
        loss = self.model.loss(logits.float(), batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class TorchRec:
    def __init__(self) -> None:
        import torch.distributed as dist
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        from torchrec.distributed import DistributedModelParallel
        from torchrec.models.dlrm import DLRM, DLRMTrain
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29517", rank=0, world_size=1)
        names = [f"f{i}" for i in range(TABLES)]
        collection = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=n, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[n]) for n in names
            ],
            device=torch.device("meta"),
        )
        apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
        model = DLRMTrain(DLRM(collection, DENSE, list(BOTTOM), [*TOP, 1], dense_device=torch.device("cpu")))
        self.model: Any = DistributedModelParallel(model, device=torch.device("cpu"))
        dense = [p for name, p in self.model.named_parameters() if "embedding_bags" not in name]
        self.optimizer = torch.optim.SGD(dense, lr=0.01)
        lengths = torch.ones(TABLES * BATCH, dtype=torch.int64)

        class Batch:
            def __init__(self, ids: torch.Tensor, numbers: torch.Tensor, labels: torch.Tensor) -> None:
                self.dense_features, self.labels = numbers, labels
                self.sparse_features = KeyedJaggedTensor(names, ids, lengths=lengths)

        self.batches = cycle(Batch(*make_batch(number)) for number in range(BATCHES))

    def step(self) -> float:
        batch = next(self.batches)
        loss, _ = self.model(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


CONTENDERS = {"ours": lambda: Ours(False), "ours_bf16": lambda: Ours(True), "torchrec": TorchRec}


def serve(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    contender = CONTENDERS[name]()
    for line in sys.stdin:
        seconds, losses = [], []
        for _ in range(int(line)):
            start = time.perf_counter()
            losses.append(contender.step())
            seconds.append(time.perf_counter() - start)
        print("answer " + json.dumps({"milliseconds": 1e3 * median(seconds), "loss": losses[-1]}), flush=True)


def ask(process: subprocess.Popen, steps: int) -> dict:
    assert process.stdin and process.stdout
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("answer "):
            return json.loads(line.removeprefix("answer "))
    raise SystemExit("a benchmark process died; its error is above")


def start_contenders(peer: str, threads: int) -> dict[str, subprocess.Popen]:
    """Start a process for each contender; TorchRec's only if its environment is given."""
    processes = {}
    for name in (name for name in CONTENDERS if name != "torchrec" or peer):
        command = [peer if name == "torchrec" else sys.executable, "-m", "benchmarks.dlrm_step", "serve", name]
        command += [str(threads)]
        pipe = subprocess.PIPE
        processes[name] = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    return processes


def summary(threads: int, fast: bool, times: dict[str, list[float]]) -> dict[str, Any]:
    line: dict[str, Any] = {"benchmark": "dlrm_step", "threads": threads, "cpu_multiplies_bf16": fast}
    line |= {f"{name}_ms": [median(t), min(t), max(t)] for name, t in times.items()}
    for name in ("ours", "ours_bf16") if "torchrec" in times else ():
        ratios = [b / a for a, b in zip(times[name], times["torchrec"], strict=True)]
        line[f"{name}_over_torchrec"] = [median(ratios), min(ratios), max(ratios)]
    return line


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="", help="the Python of the rivals' environment")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.rounds, args.threads = 1, 1
    elif not args.peer:
        parser.error("give --peer .rivals/bin/python (`make rivals`), or --smoke")
    processes = start_contenders(args.peer, args.threads)
    flags = Path("/proc/cpuinfo").read_text()
    fast = "avx512_bf16" in flags or "amx_bf16" in flags
    slow_sides = {"ours_bf16"} if not fast else set()  # emulated products take seconds
    steps = {name: 1 if args.smoke or name in slow_sides else 10 for name in processes}
    lines, times = [], {name: [] for name in processes}
    for name, process in processes.items():
        ask(process, min(5, steps[name]))
    for number in range(args.rounds):
        for name, process in processes.items():
            answer = ask(process, steps[name])
            times[name].append(answer["milliseconds"])
            lines.append({"round": number, "side": name} | answer)
            print(json.dumps(lines[-1]), flush=True)
    for process in processes.values():
        assert process.stdin
        process.stdin.close()
        process.wait()
    lines.append(summary(args.threads, fast, times))
    print(json.dumps(lines[-1]))
    if args.write:
        results_file.write(args.write, "dlrm_step", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
