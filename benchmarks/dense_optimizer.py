"""A step of Adam on the CPU: torch's three, and ours with moments in bf16 and in float32.

    python -m benchmarks.dense_optimizer [--rounds N] [--write NAME]

4 M parameters in 60 tensors, one thread, all sides in turns, the order turned by one each round. A JSON line per side:
milliseconds of a step (median, least, most over rounds), how many times as fast as torch's own default in the same
round, bytes of moments, and how far the weights are after 200 steps of one noisy problem from those of torch's default
in float64, as a share of how far these have come: what rounding moments does, and what float32 does.
"""

import argparse
import json
import sys
from collections.abc import Callable
from math import prod
from statistics import median
from time import perf_counter

import torch
from torch import nn

from benchmarks import results_file
from shardwright.dense.adam_bf16 import AdamBf16

SHAPES = ((365, 365), (365,)) * 30
STEPS, WARM = 10, 2
FOLLOWED, SMALL = 200, ((64, 64), (64,)) * 4
RATE = 0.002
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SIDES: tuple[tuple[str, Make], ...] = (
    ("torch", lambda p: torch.optim.Adam(p, RATE)),
    ("torch, foreach", lambda p: torch.optim.Adam(p, RATE, foreach=True)),
    ("torch, fused", lambda p: torch.optim.Adam(p, RATE, fused=True)),
    ("ours, float32", lambda p: AdamBf16(torch.optim.Adam(p, RATE), torch.float32)),
    ("ours, bf16", lambda p: AdamBf16(torch.optim.Adam(p, RATE), torch.bfloat16)),
)


def parameters(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)) for shape in shapes]


def ready(make: Make) -> torch.optim.Optimizer:
    mine = parameters(SHAPES)
    draw = torch.Generator().manual_seed(2)
    for one in mine:
        one.grad = torch.randn(one.shape, generator=draw)
    return make(mine)


def seconds(optimizer: torch.optim.Optimizer) -> float:
    for _ in range(WARM):
        optimizer.step()
    start = perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    return (perf_counter() - start) / STEPS


def followed(make: Make, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weights after steps towards zero, each gradient with noise of its own."""
    mine, draw = parameters(SMALL, dtype), torch.Generator().manual_seed(3)
    optimizer = make(mine)
    for _ in range(FOLLOWED):
        for one in mine:
            noise = torch.randn(one.shape, generator=draw, dtype=torch.float64)
            one.grad = (one.detach().double() + noise).to(dtype)
        optimizer.step()
    return torch.cat([one.detach().double().flatten() for one in mine])


def moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(one.nbytes for kept in optimizer.state.values() for name, one in kept.items() if name != "step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    if asked.smoke:
        asked.rounds = 1
    torch.set_num_threads(1)
    running = [(name, ready(make)) for name, make in SIDES]
    times: dict[str, list[float]] = {name: [] for name, _ in SIDES}
    for turn in range(asked.rounds):
        at = turn % len(running)
        for name, optimizer in running[at:] + running[:at]:
            times[name].append(1e3 * seconds(optimizer))
    exact = followed(SIDES[0][1], torch.float64)
    come = float((exact - torch.cat([one.detach().double().flatten() for one in parameters(SMALL)])).norm())
    lines = []
    for (name, make), (_, optimizer) in zip(SIDES, running, strict=True):
        ratios = [torchs / one for torchs, one in zip(times["torch"], times[name], strict=True)]
        line = {"benchmark": "dense_optimizer", "side": name, "parameters": sum(map(prod, SHAPES))}
        for what, values, digits in (("ms", times[name], 2), ("over_torch", ratios, 2)):
            line[what] = [round(one, digits) for one in (median(values), min(values), max(values))]
        line |= {
            "moment_bytes": moment_bytes(optimizer),
            "off": float(f"{float((followed(make) - exact).norm()) / come:.2g}"),
        }
        lines.append(line)
        print(json.dumps(line), flush=True)
    if asked.write:
        results_file.write(asked.write, "dense_optimizer", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
