"""The model of benchmarks/sharding.py in TorchRec on Gloo: a job whose sides train when asked, one at a time.

    PYTHONPATH=. PEER/bin/python -m benchmarks.sharding_torchrec --cluster FILE [--rounds N]

Runs in an environment that has torchrec; of Shardwright it takes Python alone. It starts as many ranks on this machine
as FILE was measured over, on one host, and prints a JSON line per side: milliseconds of a step (median, least, most),
of cpu on each rank, the losses of the first steps, and how many tables each scheme has. Any other launcher of ranks
gives a folder of pipes (benchmarks/turns.py), the job's name there, the cluster, and the sides as JSON:

    python -m benchmarks.sharding_torchrec --turns FOLDER JOB --cluster FILE --sides '{"its planner": {}, ...}'

A side is TorchRec's planner, told the measured rates, or a plan on file as `shardwright plan --export torchrec` writes
it. Tables, first values and batches are Shardwright's; row-wise AdaGrad is fused into the tables' backward pass.
Vectors are asked for before the bottom MLP runs and waited for behind it.

Found with torchrec 1.8.0, fbgemm-gpu-cpu 1.8.0 and torch 2.13.0 on Gloo:

- Table-wise, column-wise, table-column-wise, row-wise, table-row-wise, grid and data-parallel all train; none is
  refused. On the CPU its sharder offers the planner only table-wise, column-wise, table-column-wise and data-parallel;
  a side with "every" offers all seven.
- TrainPipelineSparseDist runs on the CPU and is used: it sends the next batch's ids beside this batch, in 32 bits like
  lengths; TrainPipelineBase was no faster.
- Row-wise AdaGrad of a table in column pieces keeps a sum for each piece, not for the row: losses differ from the
  fourth digit on. Replicated tables have no fused optimizer: their gradients are dense, in DDP's buckets.
- bfloat16 is not to be had: of QCommsConfig "BF16 is not for backward_precision is not supported on GLOO - falling back
  to FP16.", of DDP "BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL". A side with
  "rounded" has vectors, their gradients and dense gradients in FP16; with "bf16" torch's autocast multiplies in bf16.
"""

# pyright: reportMissingImports=false
# (torchrec and fbgemm_gpu are in the rivals' environment only: `make rivals`)

import argparse
import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Thread
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.nn import functional
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.streamable import Pipelineable

from benchmarks import sharding_tables as shared
from benchmarks.turns import Asked, Asker
from shardwright.layers.mlp import MLP
from shardwright.runtime.materialize import materialize
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster

CPU = torch.device("cpu")
EPS = 1e-8  # Shardwright's
WARM, STEPS = 3, 4
PORTS_ON = 1  # from the launcher's: a job of Shardwright's may have that one
PATIENCE = timedelta(hours=6)  # of ranks that wait for a turn


@dataclass
class Batch(Pipelineable):
    ids: KeyedJaggedTensor
    numbers: torch.Tensor
    clicks: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return self

    def record_stream(self, stream: Any) -> None:
        pass

    def pin_memory(self) -> "Batch":
        return self


def batches(rank: int, num: int) -> list[Batch]:
    found = []
    for number in range(shared.BATCHES):
        mine = shared.part(shared.batch(number, num), rank)
        ids = mine.features
        keyed = KeyedJaggedTensor(list(ids.features), ids.values.int(), lengths=ids.lengths.reshape(-1).int())
        found.append(Batch(keyed, mine.numbers, mine.labels["click"]))
    return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = shared.tables()
        configs = [
            EmbeddingBagConfig(name=one.name, num_embeddings=one.rows, embedding_dim=one.dim, feature_names=[one.name])
            for one in tables
        ]
        self.sparse = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
        self.bottom = MLP(shared.NUMBERS, shared.BOTTOM)
        self.top = MLP(shared.BOTTOM[-1] + sum(one.dim for one in tables), (*shared.TOP, 1), activate_last=False)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self.sparse(batch.ids)
        low = self.bottom(batch.numbers)
        logits = self.top(torch.cat([low, vectors.values()], 1)).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(logits, batch.clicks)
        return loss, loss.detach()


class Sharder(EmbeddingBagCollectionSharder):
    """TorchRec's, with row-wise AdaGrad; with `every` it offers what runs on the CPU but is not offered there."""

    def __init__(self, rounded: bool, every: bool) -> None:
        precision = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
        kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD
        super().__init__(
            fused_params={"optimizer": kind, "learning_rate": shared.SPARSE_RATE, "eps": EPS},
            qcomm_codecs_registry=get_qcomm_codecs_registry(precision, device=CPU) if rounded else None,
        )
        self.every = every

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind.value for kind in ShardingType] if self.every else super().sharding_types(compute_device_type)


def planned(net: Net, sharder: Sharder, cluster: Cluster, batch: Batch) -> ShardingPlan:
    """By TorchRec's planner, from the measured rates and mean bags."""
    inner, outer, memory = cluster.levels[0], cluster.levels[-1], cluster.device.tiers[0]
    topology = Topology(
        world_size=cluster.num_ranks,
        local_world_size=inner.num,
        compute_device="cpu",
        ddr_cap=memory.bytes_,
        ddr_mem_bw=memory.read_bytes_per_second / 1000,  # bytes in a millisecond
        intra_host_bw=inner.bytes_per_second / 1000,
        inter_host_bw=outer.bytes_per_second / 1000,
    )
    means = batch.ids.lengths().view(shared.TABLES, -1).double().mean(1).tolist()
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=shared.OWN,
        constraints={
            name: ParameterConstraints(pooling_factors=[mean])
            for name, mean in zip(batch.ids.keys(), means, strict=True)
        },
        debug=False,
    )
    return planner.collective_plan(net, [sharder], dist.group.WORLD)


class Side:
    def __init__(
        self,
        cluster: Cluster,
        mine: list[Batch],
        plan: str = "",
        rounded: bool = False,
        every: bool = False,
        bf16: bool = False,
    ) -> None:
        net, sharder = Net(), Sharder(rounded, every)
        self.bf16 = bf16
        made = runpy.run_path(plan)["sharding_plan"]("sparse") if plan else planned(net, sharder, cluster, mine[0])
        self.schemes = {name: one.sharding_type for name, one in made.plan["sparse"].items()}
        self.model = DistributedModelParallel(
            net,
            device=CPU,
            plan=made,
            sharders=[sharder],
            data_parallel_wrapper=DefaultDataParallelWrapper(allreduce_comm_precision="fp16" if rounded else None),
        )
        begin(self.model.module, mine[0])
        self.pipeline = TrainPipelineSparseDist(self.model, self.optimizer(), CPU)
        self.batches = cycle(mine)

    def optimizer(self) -> CombinedOptimizer:
        dense, replicated = {}, {}
        for name, weight in self.model.named_parameters():
            if not name.startswith("sparse."):
                dense[name] = weight
            elif self.schemes[name.split(".")[2]] == "data_parallel":
                replicated[name] = weight
        made = [self.model.fused_optimizer]
        made += [KeyedOptimizerWrapper(dense, lambda p: torch.optim.SGD(p, shared.DENSE_RATE))]
        if replicated:
            made += [KeyedOptimizerWrapper(replicated, lambda p: RowWiseAdagrad(p, shared.SPARSE_RATE, eps=EPS))]
        return CombinedOptimizer(made)

    def step(self) -> torch.Tensor:
        """The loss of this rank's samples."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return self.pipeline.progress(self.batches)


@torch.no_grad()
def begin(net: Any, batch: Batch) -> None:
    """Give a sharded model the values that Shardwright's begins with."""
    ours = shared.model()
    materialize(ours, CPU)
    for name, weight in net.sparse.state_dict().items():
        whole = ours.sparse.weight(name.split(".")[1])
        if not isinstance(weight, ShardedTensor):
            weight.copy_(whole)
            continue
        for shard in weight.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(whole[row : row + rows, column : column + columns])
    net.bottom.load_state_dict(ours.dense.bottom.state_dict())
    net.top.load_state_dict(ours.dense.top.state_dict())
    # Vectors come grouped by scheme: the columns of the first matrix above them follow.
    names, first = batch.ids.keys(), net.top.steps[0].weight
    order = net.sparse(batch.ids).keys()
    low, *above = first.clone().split([shared.BOTTOM[-1], *(table.dim for table in shared.tables())], 1)
    by_name = dict(zip(names, above, strict=True))
    first.copy_(torch.cat([low, *(by_name[name] for name in order)], 1))


def share(line: bytes) -> bytes:
    """The first rank's, on all; the others sleep in the broadcast until it is there."""
    size = torch.tensor([len(line)])
    dist.broadcast(size, 0)
    text = torch.tensor(list(line) or [0] * int(size), dtype=torch.uint8)
    dist.broadcast(text, 0)
    return bytes(text.tolist())


def together() -> float:
    dist.all_reduce(torch.zeros(1))
    return perf_counter()


def worker(folder: str, job: str, cluster: str, asked: dict[str, dict[str, Any]]) -> None:
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + PORTS_ON)
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank, num = dist.get_rank(), dist.get_world_size()
    measured, mine = presets.load_cluster(cluster), batches(rank, num)
    sides = {name: Side(measured, mine, **options) for name, options in asked.items()}
    turns = Asked(folder, job, rank, share)
    turns.tell({name: dict(Counter(side.schemes.values())) for name, side in sides.items()})
    slept = process_time()
    for name, warm, steps in turns.turns():
        asleep = process_time() - slept
        losses = [sides[name].step() for _ in range(warm)]
        start, cpu_start = together(), process_time()
        losses += [sides[name].step() for _ in range(steps)]
        seconds = together() - start
        told = torch.zeros(num, 2, dtype=torch.float64)
        told[rank] = torch.tensor([process_time() - cpu_start, asleep], dtype=torch.float64)
        means = torch.stack(losses).double() / num
        dist.all_reduce(told)
        dist.all_reduce(means)
        cpu, asleep = told.T.tolist()
        turns.tell({"seconds": seconds, "losses": means.tolist(), "cpu_seconds": cpu, "cpu_seconds_asleep": asleep})
        slept = process_time()
    dist.destroy_process_group()


def exported(cluster: Cluster, target: Path) -> str:
    """Our planner's plan of the same tables, in TorchRec's form."""
    from shardwright.measure.describe import describe
    from shardwright.planner.plan import make_plan
    from shardwright.report import plan as page

    work = describe(shared.model(), shared.batch(0, cluster.num_ranks))
    return str(page.write_torchrec_plan(make_plan(work, cluster, torchrec=True), target))


def here(cluster: str, rounds: int) -> None:
    """Ranks on this machine, its links unshaped."""
    measured = presets.load_cluster(cluster)
    with TemporaryDirectory() as folder:
        ours = exported(measured, Path(folder) / "plan.torchrec.py")
        sides = {
            "its planner": {},
            "its planner, every scheme": {"every": True},
            "our plan": {"plan": ours},
            "our plan, rounded": {"plan": ours, "rounded": True},
            "our plan, bf16": {"plan": ours, "rounded": True, "bf16": True},
        }
        asker = Asker(folder, "torchrec")
        words = ["--turns", folder, "torchrec", "--cluster", cluster, "--sides", json.dumps(sides)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.sharding_torchrec", *words],
                env=os.environ | variables(rank, measured),
            )
            for rank in range(measured.num_ranks)
        ]
        for rank, process in enumerate(ranks):
            Thread(target=watch, args=(rank, process, asker), daemon=True).start()
        try:
            ready = asker.ready()
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
            for _ in range(rounds):
                for name in sides:
                    found[name].append(asker.turn(name, WARM, STEPS))
            asker.end()
            for name, turns in found.items():
                print(json.dumps(told(name, turns, ready[name], measured.num_ranks)), flush=True)
        finally:
            for process in ranks:
                process.terminate()


def watch(rank: int, process: subprocess.Popen, asker: Asker) -> None:
    """Make a wait for this job's answer fail at once when a rank ends."""
    asker.fail(f"rank {rank} ended with status {process.wait()}")


def variables(rank: int, cluster: Cluster) -> dict[str, str]:
    local = cluster.levels[0].num
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(cluster.num_ranks),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29510",
    }


def told(name: str, turns: list[dict[str, Any]], schemes: dict[str, int], ranks: int) -> dict[str, Any]:
    times = [1e3 * turn["seconds"] / STEPS for turn in turns]
    return {
        "side": name,
        "ranks": ranks,
        "ms": [round(one, 1) for one in (median(times), min(times), max(times))],
        "cpu_ms": [
            round(1e3 * one / STEPS, 1) for one in map(median, zip(*(t["cpu_seconds"] for t in turns), strict=True))
        ],
        "losses": [round(loss, 6) for loss in turns[0]["losses"]],
        "schemes": schemes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", nargs=2, default=(), metavar=("FOLDER", "JOB"))
    parser.add_argument("--sides", type=json.loads, default={"its planner": {}})
    asked = parser.parse_args()
    if asked.turns:
        folder, job = asked.turns
        worker(folder, job, asked.cluster, asked.sides)
    else:
        here(asked.cluster, asked.rounds)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
