"""A rank of a job that loses a peer: python lost.py MODE SECONDS. Prints seconds until the error, and the error.

MODE: "gone": rank 1 exits; "elsewhere": rank 1 stops issuing collectives; "cut", "back": the test cuts the network.
"""

import os
import sys
import time

import torch

from shardwright.comm import collective
from shardwright.comm.heartbeat import PeerLost
from shardwright.comm.mesh import Mesh

mode, seconds = sys.argv[1], float(sys.argv[2])
mesh = Mesh((("rank", int(os.environ["WORLD_SIZE"])),), timeout_seconds=seconds)
assert mesh.heartbeat is not None
group, x = mesh.group(), torch.ones(1000)
collective.all_reduce(x, group).wait()
mesh.heartbeat.stage, mesh.heartbeat.step = "sum gradients", 3
print("ready", flush=True)
if mode in ("gone", "elsewhere") and mesh.rank == 1:
    if mode == "gone":
        os._exit(9)
    mesh.heartbeat.stage = "look up"
    time.sleep(seconds + 8)
    os._exit(0)
start = time.perf_counter()
try:
    while time.perf_counter() < start + 20:
        collective.all_reduce(x, group).wait()
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
