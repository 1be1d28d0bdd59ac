"""The model of benchmarks/sharding.py in TorchRec on Gloo: a job whose sides train in turns.

    PYTHONPATH=. PEER/bin/python -m benchmarks.sharding_torchrec --cluster FILE [--rounds N]

Runs in an environment that has torchrec, and uses only Shardwright's Python code. It starts on this machine as many
ranks as FILE was measured over, as one host, and prints a JSON line per side: milliseconds of a step (median, least,
most), CPU milliseconds of each rank, the losses of the first steps, and the number of tables per sharding scheme.
Another launcher of ranks passes a folder of pipes (benchmarks/turns.py), the job's name in it, the cluster, and the
sides as JSON:

    python -m benchmarks.sharding_torchrec --turns FOLDER JOB --cluster FILE --sides '{"its planner": {}, ...}'

A side uses TorchRec's planner with the measured rates, or a plan file that `shardwright plan --export torchrec` wrote.
Tables, initial values and batches are Shardwright's; row-wise AdaGrad is fused into the tables' backward pass. The
lookup is issued before the bottom MLP runs and awaited after it.

Findings with torchrec 1.8.0, fbgemm-gpu-cpu 1.8.0 and torch 2.13.0 on Gloo:

- Table-wise, column-wise, table-column-wise, row-wise, table-row-wise, grid and data-parallel all train. On the CPU,
  TorchRec's sharder offers its planner only table-wise, column-wise, table-column-wise and data-parallel; a side with
  "every" offers all seven.
- TrainPipelineSparseDist runs on the CPU and is used: it sends the next batch's ids overlapped with this batch, ids and
  lengths in 32 bits; TrainPipelineBase was no faster.
- Row-wise AdaGrad of a column-wise table keeps a sum per column shard, not per row: losses differ from the fourth digit
  on. Data-parallel tables have no fused optimizer: their gradients are dense, in DDP's buckets.
- bfloat16 is unavailable: QCommsConfig says "BF16 is not for backward_precision is not supported on GLOO - falling back
  to FP16.", DDP says "BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL". A side with
  "rounded" has vectors, their gradients and dense gradients in FP16; with "bf16", torch's autocast multiplies in bf16.
"""

# pyright: reportMissingImports=false
# (torchrec and fbgemm_gpu are only in the environment that `make rivals` creates)

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

from benchmarks.sharding_tables import (
    BOTTOM,
    DENSE_LR,
    LOCAL_BATCH_SIZE,
    NUM_BATCHES,
    NUM_NUMBERS,
    NUM_TABLES,
    SPARSE_LR,
    TOP,
    local_batch,
    make_batch,
    make_model,
    make_tables,
)
from benchmarks.turns import TurnClient, TurnServer
from shardwright.layers.mlp import MLP
from shardwright.runtime.materialize import materialize
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster

CPU = torch.device("cpu")
EPS = 1e-8  # as Shardwright's optimizer
WARMUP_STEPS, STEPS = 3, 4
PORT_OFFSET = 1  # from the launcher's port, which a Shardwright job may use
TIMEOUT = timedelta(hours=6)  # of a collective: ranks wait for their turn in one


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


def make_batches(rank: int, num: int) -> list[Batch]:
    keyed_batches = []
    for number in range(NUM_BATCHES):
        samples = local_batch(make_batch(number, num), rank)
        ids = samples.features
        keyed = KeyedJaggedTensor(list(ids.features), ids.values.int(), lengths=ids.lengths.reshape(-1).int())
        keyed_batches.append(Batch(keyed, samples.numbers, samples.labels["click"]))
    return keyed_batches


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = make_tables()
        configs = [
            EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
            for t in tables
        ]
        self.sparse = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
        self.bottom = MLP(NUM_NUMBERS, BOTTOM)
        self.top = MLP(
            BOTTOM[-1] + sum(table.dim for table in tables),
            (*TOP, 1),
            activate_last=False,
        )

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self.sparse(batch.ids)
        bottom = self.bottom(batch.numbers)
        logits = self.top(torch.cat([bottom, vectors.values()], 1)).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(logits, batch.clicks)
        return loss, loss.detach()


class Sharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder with row-wise AdaGrad; with `every`, it offers all schemes on the CPU."""

    def __init__(self, rounded: bool, every: bool) -> None:
        precision = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
        kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD
        super().__init__(
            fused_params={"optimizer": kind, "learning_rate": SPARSE_LR, "eps": EPS},
            qcomm_codecs_registry=get_qcomm_codecs_registry(precision, device=CPU) if rounded else None,
        )
        self.every = every

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind.value for kind in ShardingType] if self.every else super().sharding_types(compute_device_type)


def plan_with_torchrec(net: Net, sharder: Sharder, cluster: Cluster, batch: Batch) -> ShardingPlan:
    """Plan with TorchRec's planner, from the measured rates and mean bag lengths."""
    inner, outer, memory = cluster.levels[0], cluster.levels[-1], cluster.device.tiers[0]
    topology = Topology(
        world_size=cluster.num_ranks,
        local_world_size=inner.num,
        compute_device="cpu",
        ddr_cap=memory.bytes_,
        ddr_mem_bw=memory.read_bytes_per_second / 1000,  # bytes per millisecond
        intra_host_bw=inner.bytes_per_second / 1000,
        inter_host_bw=outer.bytes_per_second / 1000,
    )
    means = batch.ids.lengths().view(NUM_TABLES, -1).double().mean(1).tolist()
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=LOCAL_BATCH_SIZE,
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
        batches: list[Batch],
        plan: str = "",
        rounded: bool = False,
        every: bool = False,
        bf16: bool = False,
    ) -> None:
        net, sharder = Net(), Sharder(rounded, every)
        self.bf16 = bf16
        sharding_plan = (
            runpy.run_path(plan)["sharding_plan"]("sparse")
            if plan
            else plan_with_torchrec(net, sharder, cluster, batches[0])
        )
        self.schemes = {name: table.sharding_type for name, table in sharding_plan.plan["sparse"].items()}
        self.model = DistributedModelParallel(
            net,
            device=CPU,
            plan=sharding_plan,
            sharders=[sharder],
            data_parallel_wrapper=DefaultDataParallelWrapper(allreduce_comm_precision="fp16" if rounded else None),
        )
        load_initial_values(self.model.module, batches[0])
        self.pipeline = TrainPipelineSparseDist(self.model, self.optimizer(), CPU)
        self.batches = cycle(batches)

    def optimizer(self) -> CombinedOptimizer:
        dense, replicated = {}, {}
        for name, weight in self.model.named_parameters():
            if not name.startswith("sparse."):
                dense[name] = weight
            elif self.schemes[name.split(".")[2]] == "data_parallel":
                replicated[name] = weight
        optimizers = [self.model.fused_optimizer]
        optimizers += [KeyedOptimizerWrapper(dense, lambda p: torch.optim.SGD(p, DENSE_LR))]
        if replicated:
            optimizers += [KeyedOptimizerWrapper(replicated, lambda p: RowWiseAdagrad(p, SPARSE_LR, eps=EPS))]
        return CombinedOptimizer(optimizers)

    def step(self) -> torch.Tensor:
        """Train a step; returns the loss of this rank's samples."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return self.pipeline.progress(self.batches)


@torch.no_grad()
def load_initial_values(net: Any, batch: Batch) -> None:
    """Load the initial values of Shardwright's model into a sharded model."""
    model = make_model()
    materialize(model, CPU)
    for name, weight in net.sparse.state_dict().items():
        full_weight = model.sparse.weight(name.split(".")[1])
        if not isinstance(weight, ShardedTensor):
            weight.copy_(full_weight)
            continue
        for shard in weight.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(full_weight[row : row + rows, column : column + columns])
    net.bottom.load_state_dict(model.dense.bottom.state_dict())
    net.top.load_state_dict(model.dense.top.state_dict())
    # Vectors are grouped by scheme: permute the columns of the top MLP's first matrix accordingly.
    names, first = batch.ids.keys(), net.top.steps[0].weight
    order = net.sparse(batch.ids).keys()
    bottom_columns, *table_columns = first.clone().split([BOTTOM[-1], *(table.dim for table in make_tables())], 1)
    by_name = dict(zip(names, table_columns, strict=True))
    first.copy_(torch.cat([bottom_columns, *(by_name[name] for name in order)], 1))


def broadcast_line(line: bytes) -> bytes:
    """Broadcast the first rank's line; the other ranks sleep in the broadcast until it has one."""
    size = torch.tensor([len(line)])
    dist.broadcast(size, 0)
    text = torch.tensor(list(line) or [0] * int(size), dtype=torch.uint8)
    dist.broadcast(text, 0)
    return bytes(text.tolist())


def barrier_time() -> float:
    dist.all_reduce(torch.zeros(1))
    return perf_counter()


def worker(folder: str, job: str, cluster: str, options_by_side: dict[str, dict[str, Any]]) -> None:
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + PORT_OFFSET)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, num = dist.get_rank(), dist.get_world_size()
    measured, batches = presets.load_cluster(cluster), make_batches(rank, num)
    sides = {name: Side(measured, batches, **options) for name, options in options_by_side.items()}
    server = TurnServer(folder, job, rank, broadcast_line)
    server.reply({name: dict(Counter(side.schemes.values())) for name, side in sides.items()})
    sleep_start = process_time()
    for name, warm, steps in server.turns():
        asleep_seconds = process_time() - sleep_start
        losses = [sides[name].step() for _ in range(warm)]
        start, cpu_start = barrier_time(), process_time()
        losses += [sides[name].step() for _ in range(steps)]
        seconds = barrier_time() - start
        times = torch.zeros(num, 2, dtype=torch.float64)
        times[rank] = torch.tensor([process_time() - cpu_start, asleep_seconds], dtype=torch.float64)
        means = torch.stack(losses).double() / num
        dist.all_reduce(times)
        dist.all_reduce(means)
        cpu, asleep = times.T.tolist()
        server.reply({"seconds": seconds, "losses": means.tolist(), "cpu_seconds": cpu, "cpu_seconds_asleep": asleep})
        sleep_start = process_time()
    dist.destroy_process_group()


def export_plan(cluster: Cluster, target: Path) -> str:
    """Write our planner's plan of the same tables as TorchRec reads it; returns its path."""
    from shardwright.measure.describe import describe
    from shardwright.planner.plan import make_plan
    from shardwright.report import plan as plan_report

    work = describe(make_model(), make_batch(0, cluster.num_ranks))
    return str(plan_report.write_torchrec_plan(make_plan(work, cluster, torchrec=True), target))


def run_locally(cluster: str, rounds: int) -> None:
    """Run all sides over ranks on this machine, without limits on its links."""
    measured = presets.load_cluster(cluster)
    with TemporaryDirectory() as folder:
        ours = export_plan(measured, Path(folder) / "plan.torchrec.py")
        sides = {
            "its planner": {},
            "its planner, every scheme": {"every": True},
            "our plan": {"plan": ours},
            "our plan, rounded": {"plan": ours, "rounded": True},
            "our plan, bf16": {"plan": ours, "rounded": True, "bf16": True},
        }
        client = TurnClient(folder, "torchrec")
        arguments = ["--turns", folder, "torchrec", "--cluster", cluster, "--sides", json.dumps(sides)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.sharding_torchrec", *arguments],
                env=os.environ | rank_environment(rank, measured),
            )
            for rank in range(measured.num_ranks)
        ]
        for rank, process in enumerate(ranks):
            Thread(target=watch, args=(rank, process, client), daemon=True).start()
        try:
            ready = client.wait_ready()
            replies: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
            for _ in range(rounds):
                for name in sides:
                    replies[name].append(client.run_turn(name, WARMUP_STEPS, STEPS))
            client.end()
            for name, turns in replies.items():
                print(json.dumps(result_line(name, turns, ready[name], measured.num_ranks)), flush=True)
        finally:
            for process in ranks:
                process.terminate()


def watch(rank: int, process: subprocess.Popen, client: TurnClient) -> None:
    """Fail any wait for a reply of this job as soon as a rank ends."""
    client.fail(f"rank {rank} ended with status {process.wait()}")


def rank_environment(rank: int, cluster: Cluster) -> dict[str, str]:
    local = cluster.levels[0].num
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(cluster.num_ranks),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29510",
    }


def result_line(name: str, turns: list[dict[str, Any]], schemes: dict[str, int], ranks: int) -> dict[str, Any]:
    times = [1e3 * turn["seconds"] / STEPS for turn in turns]
    return {
        "side": name,
        "ranks": ranks,
        "ms": [round(ms, 1) for ms in (median(times), min(times), max(times))],
        "cpu_ms": [
            round(1e3 * cpu / STEPS, 1)
            for cpu in map(median, zip(*(turn["cpu_seconds"] for turn in turns), strict=True))
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
    args = parser.parse_args()
    if args.turns:
        folder, job = args.turns
        worker(folder, job, args.cluster, args.sides)
    else:
        run_locally(args.cluster, args.rounds)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
