"""Times of calls on a GPU, for benchmarks/gpu_experts.py and gpu_embedding.py."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

SECONDS_PER_TURN = 0.03
MAX_CALLS = 50
Sides = Mapping[str, Callable[[], object]]


def time_sides(sides: Sides, num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a call of each side, by round: the mean of a turn of several calls, which are queued without
    waiting. All sides take turns, in an order that rotates; the first round does not count."""
    num_calls = {name: _num_calls(call) for name, call in sides.items()}
    milliseconds: dict[str, list[float]] = {name: [] for name in sides}
    names = [*sides]
    for number in range(num_rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            milliseconds[name].append(_turn(sides[name], num_calls[name]))
    return {name: values[1:] for name, values in milliseconds.items()}


def _num_calls(call: Callable[[], object]) -> int:
    call()
    return max(1, min(MAX_CALLS, round(1000 * SECONDS_PER_TURN / max(_turn(call, 2), 1e-3))))


def _turn(call: Callable[[], object], num_calls: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / num_calls


def copy_terabytes_per_second(num_bytes: int = 1 << 30) -> float:
    """Bytes read and written by a copy inside the GPU's memory."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    values = time_sides({"copy": lambda: target.copy_(source)}, 5)["copy"]
    return 2 * num_bytes / 1e9 / median(values)


def stats(values: list[float], digits: int = 3) -> list[float]:
    return [round(f(values), digits) for f in (median, min, max)]


def describe_machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    about = {"device": torch.cuda.get_device_name(), "processor": processor, "cores": os.cpu_count()}
    return about | {"torch": torch.__version__, "copy_tb_per_s": round(copy_terabytes_per_second(), 2)}
