"""A rank of a job that loses a peer: python lost.py MODE SECONDS. Prints seconds until the error, and the error.

MODE: "gone": rank 1 exits; "elsewhere": rank 1 stops issuing collectives; "cut", "back": the test cuts the network;
"experts": rank 1 exits between the exchanges of experts with copies.
"""

import os
import sys
import time

import torch

from shardwright.comm import collective
from shardwright.comm.heartbeat import PeerLost
from shardwright.comm.mesh import Mesh
from shardwright.experts.exchange import ParallelExperts
from shardwright.experts.parameters import OwnedExperts
from shardwright.layers.gates import TopKGate
from shardwright.layers.moe import GeluExperts, MoE

mode, seconds = sys.argv[1], float(sys.argv[2])
mesh = Mesh((("rank", int(os.environ["WORLD_SIZE"])),), lanes=("main", "copies"), timeout_seconds=seconds)
assert mesh.heartbeat is not None
group, x = mesh.group(), torch.ones(1000)
collective.all_reduce(x, group).wait()


def reduce() -> None:
    collective.all_reduce(x, group).wait()


def run_experts() -> None:
    """Forward and backward; in the second call rank 1 exits with its weights on their way."""
    layer(torch.randn(64, 8).requires_grad_())[0].sum().backward()


work = reduce
if mode == "experts":
    work = run_experts
    layer = MoE(TopKGate(8, 6, 2), GeluExperts(6, 8, 32))
    OwnedExperts("moe", layer, group)
    layer.exchange = exchange = ParallelExperts("moe", group, 3)
    exchange.copies = mesh.group(lane="copies")
    exchange.decide = lambda order, _: order.chosen_RE  # every rank computes its own rows, with copies of all experts
    work()
mesh.heartbeat.stage, mesh.heartbeat.step = "sum gradients", 3
print("ready", flush=True)
if mode == "experts" and mesh.rank == 1:
    exchange.decide = lambda *_: os._exit(9)
    work()
if mode in ("gone", "elsewhere") and mesh.rank == 1:
    if mode == "gone":
        os._exit(9)
    mesh.heartbeat.stage = "look up"
    time.sleep(seconds + 8)
    os._exit(0)
start = time.perf_counter()
try:
    while time.perf_counter() < start + 20:
        work()
        time.sleep(0.05)
        if mode == "back" and time.perf_counter() > start + 6:
            break
except PeerLost as error:
    seconds = time.perf_counter() - start
    mesh.heartbeat.stop()
    print(f"{seconds:.1f} {error}, left", flush=True)
else:
    print("whole", flush=True)
os._exit(0)
