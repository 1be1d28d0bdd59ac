"""GPT of 10 M parameters in one process against a plain PyTorch loop: losses of 500 steps, and tokens/s.

    python -m benchmarks.gpt --data PATH [--steps N] [--batch-size N] [--threads N] [--products] [--write NAME]

PATH is a text, a folder of texts or a token file; bytes are the tokens. All sides have the same module, initial
weights, batches in the same order, AdamW (fused), warm-up and clipping. Each is a process; they take turns of ten
steps, in an order rotated each turn:

- "plain": forward, loss, zero_grad, backward, clip_grad_norm_, optimizer.step.
- "plain, perturbed": the same, but before each step, outside its time, every weight moves one unit in the last place up
  or down, by a random bit. It measures what rounding does to the losses, and the A/A floor of the times.
- "ours": plan_for, build, job.run. Its matrix products use the library that is faster on this processor
  (kernels/matmul.py).
- "ours, BLAS", with --products: the same with torch's own products, so that only the mechanism differs from "plain".

Batches are made before the first turn, on all sides; the first turn is not timed. A JSON line for each side: tokens/s
(median, minimum, maximum over turns), the same as a ratio to "plain" in the same turn, and the largest difference of
its losses from those of "plain". At each step the bound of that difference is BOUND times the largest difference of the
perturbed side so far, which is taken to be at least a unit in the last place of the first loss; `multiple` is the
largest that was needed instead of BOUND. `last_hundred` is the mean loss of the last 100 steps. `fast_enough` is
whether the median ratio is at least 1 - max(3 %, floor).
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw
from benchmarks import results_file
from benchmarks.dependencies import ROOT
from benchmarks.dlrm_step import ask
from shardwright.data.tokens.sequences import open_tokens
from shardwright.jagged import Batch
from shardwright.kernels.matmul import BLAS, library_in_use, use_library
from shardwright.models.gpt import GPT, gpt

PLAIN, PERTURBED, OURS, OURS_BLAS = ("plain", "plain, perturbed", "ours", "ours, BLAS")
SIDES = (PLAIN, PERTURBED, OURS)
CHANNELS, HEADS, HIDDEN, LENGTH = 256, 4, 736, 128
RATE, BETAS, DECAY, CLIP, WARMUP = 1e-3, (0.9, 0.95), 0.1, 1.0, 50
STEPS_OF_A_TURN, SEED = 10, 1
TOLERANCE, BOUND = 0.03, 10.0
SHOWN_STEPS = (1, 10, 50, 100, 200, 300, 400, 500)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a side's process is given; without `data`, the text is the generated grammar."""

    data: str
    cache: str
    num_blocks: int
    batch_size: int
    steps: int
    threads: int
    side: str = PLAIN


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, RATE, betas=BETAS, weight_decay=DECAY, fused=True)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))


def plain_losses(model: GPT, batches: Sequence[Batch]) -> Iterator[float]:
    """Train as a PyTorch user does; yields the loss of each step after its update."""
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer)
    for batch in batches:
        loss = model.loss(model(batch), batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        yield loss.item()


def our_losses(model: GPT, batches: Sequence[Batch]) -> Iterator[float]:
    job = sw.build(model, sw.plan_for(model, batches[0]), optimizer=make_optimizer, clip=CLIP)
    assert job.optimizer is not None
    schedule = make_schedule(job.optimizer)
    for output in job.run(batches):
        schedule.step()
        yield output.loss.item()


@torch.no_grad()
def perturb(weights: Iterable[Tensor], generator: torch.Generator) -> None:
    """Move each number to the next higher or lower one, by a random bit."""
    for weight in weights:
        towards = torch.randint(0, 2, weight.shape, generator=generator).mul(2).sub(1) * torch.inf
        weight.copy_(torch.nextafter(weight, towards))


def serve(settings: Settings) -> None:
    """Train as many steps as each line of standard input says; answer with their seconds and losses."""
    torch.set_num_threads(settings.threads)
    source = open_tokens(settings.data, seed=SEED, length=LENGTH, cache=settings.cache)
    loader = sw.Loader(source, batch_size=settings.batch_size, seed=SEED)
    batches = [batch for batch, _ in zip(loader, range(settings.steps), strict=False)]
    torch.manual_seed(SEED)
    model = gpt(source, channels=CHANNELS, num_blocks=settings.num_blocks, num_heads=HEADS, hidden=HIDDEN)
    if settings.side == OURS_BLAS:
        use_library(BLAS)
    losses = plain_losses(model, batches) if settings.side in (PLAIN, PERTURBED) else our_losses(model, batches)
    generator = torch.Generator().manual_seed(SEED)
    for line in sys.stdin:
        seconds, of_turn = 0.0, list[float]()
        for _ in range(int(line)):
            if settings.side == PERTURBED:
                perturb(model.parameters(), generator)
            start = perf_counter()
            of_turn.append(next(losses))
            seconds += perf_counter() - start
        answer: dict[str, Any] = {"seconds": seconds, "losses": of_turn}
        answer["parameters"] = sum(weight.numel() for weight in model.parameters())
        answer["products"] = library_in_use() or BLAS
        print("answer " + json.dumps(answer), flush=True)


def train_in_turns(settings: Settings, sides: Sequence[str], steps_of_a_turn: int) -> dict[str, list[dict[str, Any]]]:
    """The answers of each side; all processes live at once, one works at a time."""
    open_tokens(settings.data, seed=SEED, length=LENGTH, cache=settings.cache)  # tokenizes once for all sides
    processes: dict[str, subprocess.Popen[str]] = {}
    for side in sides:
        command = [sys.executable, "-m", "benchmarks.gpt", "serve", json.dumps(asdict(replace(settings, side=side)))]
        pipe = subprocess.PIPE
        processes[side] = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    answers: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(settings.steps // steps_of_a_turn):
        first = turn % len(sides)
        for side in (*sides[first:], *sides[:first]):
            answers[side].append(ask(processes[side], steps_of_a_turn))
        print(f"turn {turn + 1}: { ({s: round(a[-1]['losses'][-1], 4) for s, a in answers.items()}) }", file=sys.stderr)
    for process in processes.values():
        process.communicate()
    return answers


def side_lines(settings: Settings, answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    losses = {side: [loss for answer in answers[side] for loss in answer["losses"]] for side in answers}
    seconds = {side: [answer["seconds"] for answer in answers[side]][1:] for side in answers}
    tokens = settings.batch_size * LENGTH * len(answers[PLAIN][0]["losses"])
    off = {side: [abs(a - b) for a, b in zip(losses[side], losses[PLAIN], strict=True)] for side in answers}
    ratios = {side: [b / a for a, b in zip(seconds[side], seconds[PLAIN], strict=True)] for side in answers}
    floor = abs(median(ratios[PERTURBED]) - 1)
    unit = torch.finfo(torch.float32).eps * losses[PLAIN][0]  # of the first loss, in the last place
    rounding = [max(unit, largest) for largest in accumulate(off[PERTURBED], max)]
    for side in answers:
        line: dict[str, Any] = {"benchmark": "gpt", "side": side, "parameters": answers[side][0]["parameters"]}
        line |= {"batch": [settings.batch_size, LENGTH], "threads": settings.threads, "steps": len(losses[side])}
        line |= {"products": answers[side][0]["products"], "tokens_s": spread([tokens / s for s in seconds[side]], 0)}
        line["loss"] = {step: round(losses[side][step - 1], 5) for step in SHOWN_STEPS if step <= settings.steps}
        line["last_hundred"] = round(mean(losses[side][-100:]), 5)
        if side != PLAIN:
            relative = [difference / loss for difference, loss in zip(off[side], losses[PLAIN], strict=True)]
            line |= {"over_plain": spread(ratios[side], 3), "floor": round(floor, 4)}
            line |= {"largest_difference": significant(max(off[side])), "relative": significant(max(relative))}
            line["first_different_step"] = next((i for i, d in enumerate(off[side], start=1) if d), None)
        if side in (OURS, OURS_BLAS):
            multiple = max(d / size for d, size in zip(off[side], rounding, strict=True))
            line |= {"bound": BOUND, "multiple": round(multiple, 2), "within_bound": multiple <= BOUND}
            line["fast_enough"] = median(ratios[side]) >= 1 - max(TOLERANCE, floor)
        yield line


def spread(values: Sequence[float], digits: int) -> list[float]:
    return [round(value, digits) for value in (median(values), min(values), max(values))]


def significant(value: float) -> float:
    return float(f"{value:.2g}")


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        serve(Settings(**json.loads(sys.argv[2])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", metavar="PATH", help="a text, a folder of texts or a token file")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=4, help=f"sequences of {LENGTH} tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--products", action="store_true", help=f'also a side "{OURS_BLAS}"')
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="one block, four steps of the generated grammar")
    args = parser.parse_args()
    if not args.smoke and not args.data:
        parser.error("give --data PATH, or --smoke")
    with TemporaryDirectory() as cache:
        settings = Settings(args.data, cache, 12, args.batch_size, args.steps, args.threads)
        sides, turn = (*SIDES, OURS_BLAS) if args.products else SIDES, STEPS_OF_A_TURN
        if args.smoke:
            settings, turn = replace(settings, num_blocks=1, batch_size=2, steps=4, threads=1), 2
        lines = list(side_lines(settings, train_in_turns(settings, sides, turn)))
    for line in lines:
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "gpt", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
