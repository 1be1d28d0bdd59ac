"""Matrix products of experts, against one dense product of as many operations and a loop over the experts.

    python -m benchmarks.grouped_products [--rounds N] [--experts N ...] [--threads N] [--write NAME]

The three products of a linear layer (forward, gradient of its input, gradient of its weight) for 5,800 rows of 384
channels and 1,536 hidden channels, in float32. Rows per expert: "even", or "zipf", proportional to 1, 1/2, 1/3, ...
Sides: "ours", kernels/grouped_products.py; "loop", a torch product for each expert, in the library that a job would
use (kernels/matmul.py); "dense", one product with all rows and one weight in that library; "dense, again", the same,
the noise of the comparison. All sides run in every round, in an order that rotates.

A JSON line per case and product: GFLOP/s of each side (median, least, most over rounds) and its ratio to "dense" in the
same round. `weight_bytes`: of all experts' weights, which the grouped sides read or write, and a dense product does
not.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import results_file
from shardwright.kernels import grouped_products
from shardwright.kernels.matmul import library_in_use, preferred_library, use_library
from shardwright.kernels.native import retain_freed_memory

ROWS, CHANNELS, HIDDEN = 5800, 384, 1536
FLOPS = 2 * ROWS * CHANNELS * HIDDEN
Sides = dict[str, Callable[[], object]]


def draw_sizes(kind: str, num_experts: int) -> Tensor:
    """The number of rows of each expert."""
    weights = np.ones(num_experts) if kind == "even" else 1 / np.arange(1, num_experts + 1)
    return torch.from_numpy(np.random.default_rng(0).multinomial(ROWS, weights / weights.sum()))


def product_sides(num_experts: int, kind: str) -> dict[str, Sides]:
    """By product, the function of each side."""
    generator, sizes = torch.Generator().manual_seed(0), draw_sizes(kind, num_experts)
    rows, gradient = (torch.randn(ROWS, width, generator=generator) for width in (CHANNELS, HIDDEN))
    weight, split = torch.randn(num_experts, HIDDEN, CHANNELS, generator=generator), sizes.tolist()
    one, operators = weight[0].contiguous(), torch.ops.shardwright
    assert grouped_products.OPERATORS is not None

    def loop(multiply: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Any) -> list[Tensor]:
        return [multiply(part, other) for part, other in zip(first.split(split), second, strict=True)]

    return {
        "forward": {
            "dense": lambda: rows @ one.t(),
            "ours": lambda: operators.grouped_linear(rows, weight, sizes),
            "loop": lambda: torch.cat(loop(lambda part, own: part @ own.t(), rows, weight)),
        },
        "input gradient": {
            "dense": lambda: gradient @ one,
            "ours": lambda: operators.grouped_linear_input_gradient(gradient, weight, sizes),
            "loop": lambda: torch.cat(loop(torch.mm, gradient, weight)),
        },
        "weight gradient": {
            "dense": lambda: gradient.t() @ rows,
            "ours": lambda: operators.grouped_linear_weight_gradient(gradient, rows, sizes),
            "loop": lambda: torch.stack(loop(lambda part, other: part.t() @ other, gradient, rows.split(split))),
        },
    }


def time_sides(sides: Sides, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of a call of each side, by round; the first round does not count."""
    sides = sides | {"dense, again": sides["dense"]}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = [*sides]
    for number in range(num_rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def measure(num_experts: int, kind: str, num_rounds: int) -> Iterator[dict[str, Any]]:
    for product, sides in product_sides(num_experts, kind).items():
        seconds = time_sides(sides, num_rounds)
        line: dict[str, Any] = {"benchmark": "grouped_products", "product": product, "experts": num_experts}
        line |= {"sizes": kind, "weight_bytes": 4 * num_experts * CHANNELS * HIDDEN}
        line |= {"library": library_in_use(), "threads": torch.get_num_threads(), "level": kernel_level()}
        for side, values in seconds.items():
            rates = [FLOPS / value / 1e9 for value in values]
            ratios = [dense / own for dense, own in zip(seconds["dense"], values, strict=True)]
            line[side] = {
                "gflops": [round(f(rates), 1) for f in (median, min, max)],
                "over_dense": [round(f(ratios), 3) for f in (median, min, max)],
            }
        yield line


def kernel_level() -> str:
    from shardwright.library import native_library

    native = native_library()
    assert native is not None
    return native.shardwright_level().decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--experts", nargs="*", type=int, default=[8, 64], metavar="N")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.rounds, args.experts = 2, [4]
    torch.set_num_threads(args.threads)
    use_library(preferred_library())
    retain_freed_memory()  # as a job does
    lines: list[dict[str, Any]] = []
    for num_experts in args.experts:
        for kind in ("even", "zipf"):
            for line in measure(num_experts, kind, args.rounds):
                lines.append(line)
                print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "grouped_products", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
