"""A step of Adam on the CPU: torch's three implementations, and ours with moments in bf16 and in float32.

    python -m benchmarks.dense_optimizer [--rounds N] [--write NAME]

4 M parameters in 60 tensors, one thread, interleaved sides, whose order is rotated by one each round. A JSON line per
side: milliseconds of a step (median, minimum, maximum over rounds), speedup over torch's default in the same round,
bytes of moments, and the effect of rounding moments or of float32: after 200 steps of a noisy problem, the distance of
the weights from those of torch's default in float64, divided by the distance that the latter have moved.
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
STEPS, WARMUP_STEPS = 10, 2
FOLLOWED_STEPS, SMALL_SHAPES = 200, ((64, 64), (64,)) * 4
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
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def optimizer_with_gradients(make: Make) -> torch.optim.Optimizer:
    weights = parameters(SHAPES)
    generator = torch.Generator().manual_seed(2)
    for parameter in weights:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return make(weights)


def step_seconds(optimizer: torch.optim.Optimizer) -> float:
    for _ in range(WARMUP_STEPS):
        optimizer.step()
    start = perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    return (perf_counter() - start) / STEPS


def weights_after_steps(make: Make, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weights after steps towards zero with independent noise in each gradient."""
    weights, generator = parameters(SMALL_SHAPES, dtype), torch.Generator().manual_seed(3)
    optimizer = make(weights)
    for _ in range(FOLLOWED_STEPS):
        for parameter in weights:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = (parameter.detach().double() + noise).to(dtype)
        optimizer.step()
    return torch.cat([parameter.detach().double().flatten() for parameter in weights])


def moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.rounds = 1
    torch.set_num_threads(1)
    optimizers = [(name, optimizer_with_gradients(make)) for name, make in SIDES]
    times: dict[str, list[float]] = {name: [] for name, _ in SIDES}
    for round_ in range(args.rounds):
        first = round_ % len(optimizers)
        for name, optimizer in optimizers[first:] + optimizers[:first]:
            times[name].append(1e3 * step_seconds(optimizer))
    exact = weights_after_steps(SIDES[0][1], torch.float64)
    distance = float(
        (exact - torch.cat([value.detach().double().flatten() for value in parameters(SMALL_SHAPES)])).norm()
    )
    lines = []
    for (name, make), (_, optimizer) in zip(SIDES, optimizers, strict=True):
        ratios = [torch_ms / value for torch_ms, value in zip(times["torch"], times[name], strict=True)]
        line = {"benchmark": "dense_optimizer", "side": name, "parameters": sum(map(prod, SHAPES))}
        for key, values, digits in (("ms", times[name], 2), ("over_torch", ratios, 2)):
            line[key] = [round(value, digits) for value in (median(values), min(values), max(values))]
        line |= {
            "moment_bytes": moment_bytes(optimizer),
            "off": float(f"{float((weights_after_steps(make) - exact).norm()) / distance:.2g}"),
        }
        lines.append(line)
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "dense_optimizer", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
