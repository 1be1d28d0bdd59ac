"""Experts on one GPU: products of groups, and a layer's forward and backward pass, against torch and transformers.

    python -m benchmarks.gpu_experts [--rounds N] [--write NAME]

Products in bf16: forward, gradient of the input, gradient of the weight, for models with the sizes in `PRODUCTS`; rows
of an expert are proportional to 1, 1/2, 1/3, ... Sides: "ours", kernels/grouped_products.py; "grouped_mm", torch's;
"loop", a torch product for each expert; "dense", one product with all rows and one weight; "dense, again", the A/A
floor.
A JSON line per product: TFLOP/s of each side (median, least, most over rounds) and ratio to "dense" in the same round.

Layer: 8,192 tokens, 64 SwiGLU experts with 2,048 channels and 1,408 hidden, six experts a token, in bf16; the choice
of experts is imposed, "even" or "zipf". Sides: "ours"; "grouped_mm", the same with torch's operations, as torchtitan
composes them (sort, index_select, grouped_mm, silu, index_add); "transformers", `MixtralExperts` with its fastest
implementation, grouped_mm. Before timing, outputs and gradients of all sides are compared with "ours" (`differs`,
relative to the largest number). A JSON line per routing: milliseconds, TFLOP/s, and ours over each side.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import results_file
from benchmarks.gpu_timing import describe_machine, stats, time_sides
from shardwright.kernels import grouped_products
from shardwright.layers.gates import Routing, TopKGate
from shardwright.layers.moe import LocalExperts, SwiGluExperts

PRODUCTS = {  # experts, channels, hidden channels, rows
    "DeepSeekMoE-16B": (64, 2048, 1408, 49152),
    "Qwen3-30B-A3B": (128, 2048, 768, 65536),
    "Mixtral-8x7B": (8, 4096, 14336, 16384),
}
SMALLEST = {"small": (4, 64, 128, 512)}
LAYER = (64, 2048, 1408, 8192, 6)  # experts, channels, hidden channels, tokens, experts per token
SMALL_LAYER = (4, 64, 128, 256, 2)
BOUND = 3e-2  # of `differs`
Line = dict[str, Any]


def grouped_mm(first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    public = getattr(functional, "grouped_mm", None)
    return (public or vars(torch)["_grouped_mm"])(first, second, offs=ends)


def product_sides(num: int, channels: int, hidden: int, num_rows: int) -> dict[str, dict[str, Callable[[], object]]]:
    weights = 1 / np.arange(1, num + 1)
    sizes = torch.from_numpy(np.random.default_rng(0).multinomial(num_rows, weights / weights.sum()))
    split, on_gpu, ends = sizes.tolist(), sizes.cuda(), sizes.cumsum(0).int().cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    options: Any = {"device": "cuda", "generator": generator, "dtype": torch.bfloat16}
    rows, gradient = (torch.randn(num_rows, width, **options) for width in (channels, hidden))
    weight, operators = torch.randn(num, hidden, channels, **options), torch.ops.shardwright
    assert grouped_products.OPERATORS is not None

    def loop(multiply: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Any) -> list[Tensor]:
        return [multiply(part, other) for part, other in zip(first.split(split), second, strict=True)]

    return {
        "forward": {
            "dense": lambda: rows @ weight[0].t(),
            "ours": lambda: operators.grouped_linear(rows, weight, on_gpu),
            "grouped_mm": lambda: grouped_mm(rows, weight.mT, ends),
            "loop": lambda: torch.cat(loop(lambda part, own: part @ own.t(), rows, weight)),
        },
        "input gradient": {
            "dense": lambda: gradient @ weight[0],
            "ours": lambda: operators.grouped_linear_input_gradient(gradient, weight, on_gpu),
            "grouped_mm": lambda: grouped_mm(gradient, weight, ends),
            "loop": lambda: torch.cat(loop(torch.mm, gradient, weight)),
        },
        "weight gradient": {
            "dense": lambda: gradient.t() @ rows,
            "ours": lambda: operators.grouped_linear_weight_gradient(gradient, rows, on_gpu),
            "grouped_mm": lambda: grouped_mm(gradient.t(), rows, ends),
            "loop": lambda: torch.stack(loop(lambda part, other: part.t() @ other, gradient, rows.split(split))),
        },
    }


def measure_products(sizes: dict[str, tuple[int, int, int, int]], num_rounds: int) -> Iterator[Line]:
    for model, (num, channels, hidden, num_rows) in sizes.items():
        flops = 2 * num_rows * channels * hidden
        for product, sides in product_sides(num, channels, hidden, num_rows).items():
            times = time_sides(sides | {"dense, again": sides["dense"]}, num_rounds)
            line: Line = {"benchmark": "gpu_experts", "model": model, "experts": num, "product": product}
            for side, values in times.items():
                ratios = [dense / own for dense, own in zip(times["dense"], values, strict=True)]
                line[side] = {"tflops": stats([flops / ms / 1e9 for ms in values], 0), "over_dense": stats(ratios)}
            yield line


class Layer:
    """A mixture's experts with imposed routing; each side has the same weights, tokens and routing."""

    def __init__(self, kind: str, sizes: tuple[int, int, int, int, int]) -> None:
        self.num, channels, hidden, num_tokens, chosen = sizes
        generator = torch.Generator("cuda").manual_seed(0)
        options: Any = {"device": "cuda", "generator": generator}
        popularity = torch.arange(1, self.num + 1, device="cuda").float().reciprocal().log() * (kind == "zipf")
        gumbel = -torch.rand(num_tokens, self.num, **options).log().neg().log()
        self.experts_NK = (popularity + gumbel).topk(chosen, dim=1).indices
        self.weights_NK = torch.rand(num_tokens, chosen, **options).softmax(1).requires_grad_()
        self.tokens = torch.randn(num_tokens, channels, **options).bfloat16().requires_grad_()
        self.gradient = torch.randn(num_tokens, channels, **options).bfloat16()
        self.experts = SwiGluExperts(self.num, channels, hidden).cuda().bfloat16()
        self.exchange = LocalExperts(TopKGate(channels, self.num, chosen))
        named = {name: getattr(self.experts, name).weight.detach() for name in ("gate", "up", "down")}
        self.copies = [weight.clone().requires_grad_() for weight in named.values()]
        self.theirs = self._transformers(torch.cat([named["gate"], named["up"]], 1), named["down"], hidden)
        self.flops = 3 * 2 * 3 * num_tokens * chosen * channels * hidden

    def _transformers(self, both: Tensor, down: Tensor, hidden: int) -> Any:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = MixtralConfig(hidden_size=down.shape[1], intermediate_size=hidden, num_local_experts=self.num)
        config._experts_implementation = "grouped_mm"
        experts: Any = MixtralExperts(config).cuda().bfloat16()
        experts.gate_up_proj.data.copy_(both)
        experts.down_proj.data.copy_(down)
        return experts

    def ours(self) -> Tensor:
        routing = Routing(self.experts_NK, self.weights_NK, self.weights_NK.new_zeros(1))
        return self.exchange.forward(self.experts, self.tokens, routing, self.num)

    def torch(self) -> Tensor:
        gate, up, down = self.copies
        flat = self.experts_NK.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.num, device="cuda").index_add(0, flat, torch.ones(len(flat), device="cuda"))
        ends, token = counts.cumsum(0).int(), order // self.experts_NK.shape[1]
        rows = self.tokens.index_select(0, token)
        hidden = functional.silu(grouped_mm(rows, gate.mT, ends)) * grouped_mm(rows, up.mT, ends)
        out = grouped_mm(hidden, down.mT, ends)
        weighted = out * self.weights_NK.flatten()[order].unsqueeze(1).to(out.dtype)
        return torch.zeros_like(self.tokens).index_add(0, token, weighted)

    def transformers(self) -> Tensor:
        return self.theirs(self.tokens, self.experts_NK, self.weights_NK)

    def step(self, forward: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Forward and backward; the output, and gradients of tokens, weights of choices and the down projection."""
        out = forward()
        out.backward(self.gradient)
        down = {"ours": self.experts.down.weight, "torch": self.copies[2], "transformers": self.theirs.down_proj}
        found = {"out": out.detach(), "tokens": self.tokens.grad, "weights": self.weights_NK.grad}
        found["down"] = down[forward.__name__].grad
        for x in (self.tokens, self.weights_NK, *self.experts.parameters(), *self.copies, *self.theirs.parameters()):
            x.grad = None
        return found  # pyright: ignore[reportReturnType]

    def differs(self, forward: Callable[[], Tensor]) -> float:
        ours, theirs = self.step(self.ours), self.step(forward)
        return max(float((theirs[name] - ours[name]).abs().max() / ours[name].abs().max()) for name in ours)


def measure_layer(sizes: tuple[int, int, int, int, int], num_rounds: int) -> Iterator[Line]:
    for kind in ("even", "zipf"):
        layer = Layer(kind, sizes)
        forwards = {"ours": layer.ours, "grouped_mm": layer.torch, "transformers": layer.transformers}
        differs = {side: layer.differs(forward) for side, forward in forwards.items()}
        if max(differs.values()) > BOUND:
            raise SystemExit(f"results differ by {differs}, more than {BOUND}")
        sides: dict[str, Callable[[], object]] = {
            side: partial(layer.step, forward) for side, forward in forwards.items()
        }
        times = time_sides(sides | {"ours, again": sides["ours"]}, num_rounds)
        line: Line = {"benchmark": "gpu_experts", "layer": kind, "sizes": sizes}
        for side, values in times.items():
            ratios = [value / own for value, own in zip(values, times["ours"], strict=True)]
            rates = stats([layer.flops / ms / 1e9 for ms in values], 0)
            line[side] = {"milliseconds": stats(values), "tflops": rates, "ours_over_it": stats(ratios)}
        yield line | {"differs": {side: round(value, 5) for side, value in differs.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"benchmark": "gpu_experts", "skipped": "needs a GPU"}))
        return 0
    num_rounds = 1 if args.smoke else args.rounds
    lines: list[Line] = []
    for line in (
        {"benchmark": "gpu_experts", "machine": describe_machine()},
        *measure_products(SMALLEST if args.smoke else PRODUCTS, num_rounds),
        *measure_layer(SMALL_LAYER if args.smoke else LAYER, num_rounds),
    ):
        lines.append(line)
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "gpu_experts", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
