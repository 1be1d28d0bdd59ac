"""Does the dense part in bf16 harm what a model learns? DLRM on the planted click stream, five seeds, against float32.

Where the CPU multiplies bf16, the recipe's `allow = ["dense.bf16"]` does it. Elsewhere its numbers are emulated, and
each line says so: a linear layer's operands, its result and its gradients are rounded to bf16, the products summed in
float32, which is what such a CPU does. One JSON line per run, a last one with the differences; exit status 1 if bf16 is
worse by more than two standard errors of the differences.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import results_file
from shardwright import config
from shardwright.measure.device import has_fast_bf16_matmul
from shardwright.runtime.run import train

SEEDS = (1, 2, 3, 4, 5)
PLAIN_LINEAR = functional.linear


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, weight = rounded(x), rounded(weight)
        ctx.save_for_backward(x, weight)
        return rounded(PLAIN_LINEAR(x, weight, None if bias is None else rounded(bias)))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = rounded(gradient)
        return rounded(gradient @ weight), rounded(gradient.T @ x), rounded(gradient.sum(0))


def emulated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return PLAIN_LINEAR(x, weight, bias) if x.is_meta else EmulatedLinear.apply(x, weight, bias)


@contextmanager
def emulated() -> Iterator[None]:
    with mock.patch.object(functional, "linear", emulated_linear):
        yield


def run(dtype: str, seed: int, directory: str, native: bool, overrides: Sequence[str]) -> dict:
    asked = [*overrides, f"seed={seed}", f"run.directory={directory}", "train.eval_every=0", "train.checkpoint_every=0"]
    if dtype == "bf16" and native:
        asked.append('allow=["dense.bf16"]')
    settings = config.load("synthetic-dlrm", asked)
    if dtype == "bf16" and not native:
        with emulated():
            finished = train.train(settings)
    else:
        finished = train.train(settings)
    case = {"benchmark": "bf16_quality", "dense": dtype, "seed": seed}
    if dtype == "bf16":
        case["products"] = "of the CPU" if native else "emulated"
    return case | {key: finished.evaluation[key] for key in ("samples", "ne", "auc", "loss")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    asked = parser.parse_args()
    seeds = SEEDS[:2] if asked.smoke else SEEDS
    overrides = ["train.steps=3", "train.eval_samples=4096"] if asked.smoke else []
    native = has_fast_bf16_matmul()
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            for dtype in ("fp32", "bf16"):
                lines.append(run(dtype, seed, directory, native, overrides))
                print(json.dumps(lines[-1]), flush=True)
    ne = {(line["dense"], line["seed"]): line["ne"] for line in lines}
    worse = [ne["bf16", seed] - ne["fp32", seed] for seed in seeds]
    error = statistics.stdev(worse) / len(worse) ** 0.5
    summary = {
        "benchmark": "bf16_quality",
        "products": "of the CPU" if native else "emulated",
        "ne_fp32": [ne["fp32", seed] for seed in seeds],
        "ne_fp32_stdev": statistics.stdev(ne["fp32", seed] for seed in seeds),
        "ne_worse_by": [statistics.mean(worse), min(worse), max(worse)],
        "standard_error": error,
    }
    print(json.dumps(summary), flush=True)
    if asked.write:
        results_file.write(asked.write, "bf16_quality", [*lines, summary])
    return 0 if statistics.mean(worse) <= 2 * error or asked.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
