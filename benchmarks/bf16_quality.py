"""Quality with the dense model in bf16 against float32: DLRM on the synthetic click stream, five seeds.

If the CPU multiplies bf16, the recipe's `allow = ["dense.bf16"]` is used. Otherwise bf16 is emulated, and each line
says so: a linear layer's operands, its result and its gradients are rounded to bf16, and products are summed in
float32, as on a CPU with bf16 products. A JSON line per run, a last one with the differences; exit status 1 if bf16 is
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


def round_to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, weight = round_to_bf16(x), round_to_bf16(weight)
        ctx.save_for_backward(x, weight)
        return round_to_bf16(PLAIN_LINEAR(x, weight, None if bias is None else round_to_bf16(bias)))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = round_to_bf16(gradient)
        return round_to_bf16(gradient @ weight), round_to_bf16(gradient.T @ x), round_to_bf16(gradient.sum(0))


def emulated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return PLAIN_LINEAR(x, weight, bias) if x.is_meta else EmulatedLinear.apply(x, weight, bias)


@contextmanager
def emulate_bf16_linear() -> Iterator[None]:
    with mock.patch.object(functional, "linear", emulated_linear):
        yield


def run(dtype: str, seed: int, directory: str, native: bool, overrides: Sequence[str]) -> dict:
    options = [*overrides, f"seed={seed}", f"run.directory={directory}"]
    options += ["train.eval_every=0", "train.checkpoint_every=0"]
    if dtype == "bf16" and native:
        options.append('allow=["dense.bf16"]')
    settings = config.load("synthetic-dlrm", options)
    if dtype == "bf16" and not native:
        with emulate_bf16_linear():
            result = train.train(settings)
    else:
        result = train.train(settings)
    case = {"benchmark": "bf16_quality", "dense": dtype, "seed": seed}
    if dtype == "bf16":
        case["products"] = "of the CPU" if native else "emulated"
    return case | {key: result.evaluation[key] for key in ("samples", "ne", "auc", "loss")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    seeds = SEEDS[:2] if args.smoke else SEEDS
    overrides = ["train.steps=3", "train.eval_samples=4096"] if args.smoke else []
    native = has_fast_bf16_matmul()
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            for dtype in ("fp32", "bf16"):
                lines.append(run(dtype, seed, directory, native, overrides))
                print(json.dumps(lines[-1]), flush=True)
    ne = {(line["dense"], line["seed"]): line["ne"] for line in lines}
    differences = [ne["bf16", seed] - ne["fp32", seed] for seed in seeds]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    summary = {
        "benchmark": "bf16_quality",
        "products": "of the CPU" if native else "emulated",
        "ne_fp32": [ne["fp32", seed] for seed in seeds],
        "ne_fp32_stdev": statistics.stdev(ne["fp32", seed] for seed in seeds),
        "ne_worse_by": [statistics.mean(differences), min(differences), max(differences)],
        "standard_error": error,
    }
    print(json.dumps(summary), flush=True)
    if args.write:
        results_file.write(args.write, "bf16_quality", [*lines, summary])
    return 0 if statistics.mean(differences) <= 2 * error or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
