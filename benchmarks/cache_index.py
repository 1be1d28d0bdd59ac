"""The index of a cache of rows beside std::unordered_map: million rows per second, on one thread.

    python -m benchmarks.cache_index [--rounds N] [--write NAME]

A batch has about 20,000 distinct rows in ascending order, drawn uniformly from three quarters as many rows as the cache
has lines ("all fit": none is evicted), or from a tenth more than it has lines ("some missing"); before, all rows came
in a random order. Operations: "find", the lines of rows; "place", find or make a line, evict where the set is full, and
pin, then release. The map finds, and finds or inserts; it cannot evict, so it has no line for "some missing". All sides
get the same batches; a round is a turn of 50 batches of each, in an order that rotates.

A JSON line per number of lines, case and operation: of each side median, least and most over rounds, and the share of
rows that were missing.
"""

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes import c_int64, c_void_p
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks import results_file
from shardwright.kernels.cache_index import CacheIndex

SOURCE = Path(__file__).with_name("hash_map.cpp")
LINES = (1 << 16, 1 << 20, 1 << 22)
CASES = {"all fit": 0.75, "some missing": 1.1}  # rows, as a share of the lines
DRAWN, BATCHES = 20_000, 50
HALF_LIFE = 100
Line = dict[str, Any]


class HashMap:
    def __init__(self, library: ctypes.CDLL, num_rows: int) -> None:
        library.map_new.restype, library.map_new.argtypes = c_void_p, (c_int64,)
        library.map_place.argtypes = library.map_find.argtypes = (c_void_p, c_void_p, c_int64, c_void_p)
        library.map_free.argtypes = (c_void_p,)
        self.library, self.map = library, library.map_new(num_rows)

    def place(self, rows: Tensor) -> Tensor:
        lines = torch.empty_like(rows)
        self.library.map_place(self.map, rows.data_ptr(), len(rows), lines.data_ptr())
        return lines

    def find(self, rows: Tensor) -> Tensor:
        lines = torch.empty_like(rows)
        self.library.map_find(self.map, rows.data_ptr(), len(rows), lines.data_ptr())
        return lines

    def close(self) -> None:
        self.library.map_free(self.map)


def compile_map(folder: Path) -> ctypes.CDLL:
    target = folder / "hash_map.so"
    subprocess.run(["g++", "-O3", "-std=c++17", "-shared", "-fPIC", str(SOURCE), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def turn(call: Callable[[Tensor], object], batches: list[Tensor]) -> float:
    """Million rows per second."""
    start = perf_counter()
    for rows in batches:
        call(rows)
    return sum(map(len, batches)) / 1e6 / (perf_counter() - start)


def measure(library: ctypes.CDLL, num_lines: int, case: str, num_rounds: int) -> Iterator[Line]:
    num_rows, generator = int(CASES[case] * num_lines), torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randint(0, num_rows, (DRAWN,), generator=generator).unique() * 2654435761

    index = CacheIndex(num_lines, HALF_LIFE, adapts=True)
    map_ = HashMap(library, num_rows) if case == "all fit" else None

    def place(rows: Tensor) -> None:
        index.release(index.place(rows).lines_U, written=True)

    for rows in (torch.randperm(num_rows, generator=generator) * 2654435761).split(DRAWN):
        place(rows)
        if map_ is not None:
            map_.place(rows)
    before = index.counts.rows, index.counts.missing
    for operation in ("place", "find"):
        sides: dict[str, Callable[[Tensor], object]] = {"ours": place if operation == "place" else index.find}
        if map_ is not None:
            sides["map"] = getattr(map_, operation)
        line: Line = {"benchmark": "cache_index", "lines": num_lines, "case": case, "operation": operation}
        line |= time_sides(sides, draw, num_rounds)
        line["missing"] = round((index.counts.missing - before[1]) / max(1, index.counts.rows - before[0]), 3)
        yield line
    if map_ is not None:
        map_.close()


def time_sides(sides: dict[str, Callable[[Tensor], object]], draw: Callable[[], Tensor], num_rounds: int) -> Line:
    """Million rows per second of each side; the first round does not count."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    names = [*sides]
    for number in range(num_rounds + 1):
        batches, first = [draw() for _ in range(BATCHES)], number % len(names)
        for side in names[first:] + names[:first]:
            rates[side].append(turn(sides[side], batches))
    return {side: [round(f(values[1:]), 1) for f in (median, min, max)] for side, values in rates.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[Line] = []
    with TemporaryDirectory() as folder:
        library = compile_map(Path(folder))
        for num_lines in LINES[:1] if args.smoke else LINES:
            for case in CASES:
                for line in measure(library, num_lines, case, 1 if args.smoke else args.rounds):
                    lines.append(line)
                    print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "cache_index", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
