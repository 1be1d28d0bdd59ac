"""Lookup, and backward with fused update, against torch's and FBGEMM's layers and the memory roofline.

    python -m benchmarks.embedding [--peer PYTHON] [--case NAME ...] [--optimizer NAME ...] [--dtype NAME ...]
                                   [--threads N ...] [--rounds N] [--write NAME]

PYTHON is .rivals/bin/python (`make rivals`); without it FBGEMM is not measured. Every contender is a separate process
and trains its own tables from the same ids (popularity rank**-1.05) and the same upstream gradient, in interleaved
rounds, one process at a time. A JSON line per case: median milliseconds, and median and range of the ratios over
rounds. Rivals are used as installed, with memory from torch's allocator. `forward_of_roofline`: time of only reading
the same rows in the same order, over ours. `backward_...`: of reading and rewriting the distinct rows and their state,
in the best order, over ours. `..._of_gather`: necessary bytes (see `gigabytes_moved`) over our time, over the bandwidth
of reading rows of these sizes that are drawn uniformly.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks import results_file
from benchmarks.embedding_peers import BATCHES, ids_of

CASES = {
    "8x1M-d64-b2048-l10": {"tables": [(1_000_000, 64)] * 8, "batch": 2048, "length": 10},
    "26x200k-d64-b2048-l1": {"tables": [(200_000, 64)] * 26, "batch": 2048, "length": 1},
    "4x1M-d128-b4096-l20": {"tables": [(1_000_000, 128)] * 4, "batch": 4096, "length": 20},
    "100-mixed-b2048-l5": {
        "tables": [(int(10 ** (1 + 5 * (t * 37 % 100) / 99)), (16, 32, 64, 128)[t % 4]) for t in range(100)],
        "batch": 2048,
        "length": 5,
    },
}
OPTIMIZERS = ("rowwise_adagrad", "adagrad", "adam", "sgd")
DTYPES = ("fp32", "fp16", "bf16")


def contenders(optimizer: str, dtype: str, peer: str | None) -> dict[str, str]:
    """Contenders that support this, with their Python: FBGEMM has no Adam or bf16 here, torch no row-wise AdaGrad."""
    pythons = {"ours": sys.executable, "roofline": sys.executable}
    if dtype == "fp32" and optimizer != "rowwise_adagrad":
        pythons["torch"] = sys.executable
    if peer and optimizer != "adam" and dtype != "bf16":
        pythons["fbgemm"] = peer
    return pythons


class Contender:
    def __init__(self, name: str, python: str, case: dict) -> None:
        script = str(Path(__file__).with_name("embedding_peers.py"))
        self.process = subprocess.Popen(
            [python, script, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.case = case
        self.ask({"do": "build"} | case)

    def ask(self, command: dict) -> dict:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a benchmark process died in case {self.case}; its error is above")
        return json.loads(line)

    def round(self, steps: int, threads: int) -> dict:
        return self.ask({"do": "round", "steps": steps, "threads": threads})

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def stats(values: list[float]) -> list[float]:
    return [round(f, 3) for f in (median(values), min(values), max(values))]


def gigabytes_moved(case: dict) -> tuple[float, float]:
    """Necessary gigabytes of forward (rows read, vectors written) and of backward: gradients read, one per lookup, and
    distinct rows and their state read and written."""
    width, state = 4 if case["dtype"] == "fp32" else 2, {"sgd": 0, "adagrad": 1, "adam": 2}.get(case["optimizer"], 0)
    lookups, forward, backward = case["batch"] * case["length"], 0.0, 0.0
    for table, (rows, dim) in enumerate(case["tables"]):
        distinct = sum(len(set(ids_of(table, rows, lookups, b))) for b in range(BATCHES)) / BATCHES
        forward += lookups * dim * width + case["batch"] * dim * 4
        backward += lookups * dim * 4 + distinct * 2 * (dim * width + state * dim * 4)
        backward += distinct * 8 if case["optimizer"] == "rowwise_adagrad" else 0
    return forward / 1e9, backward / 1e9


def measure(name: str, case: dict, peer: str | None, rounds: int, threads: list[int]) -> list[dict]:
    """A line for each number of threads, with the same tables."""
    processes = {
        who: Contender(who, python, case) for who, python in contenders(case["optimizer"], case["dtype"], peer).items()
    }
    for who, contender in processes.items():
        contender.round(8 if who != "torch" else 2, threads[0])
    lines = []
    for number in threads:
        times: dict[str, list[tuple[float, float]]] = {who: [] for who in processes}
        uniform = []
        for _ in range(rounds):
            for who, contender in processes.items():
                answer = contender.round(8, number)
                times[who].append((median(answer["forward"]), median(answer["backward"])))
                uniform += [answer["uniform"]] if "uniform" in answer else []
        about = {"benchmark": "embedding", "case": name, "optimizer": case["optimizer"], "dtype": case["dtype"]}
        lines.append(about | {"threads": number} | summary(case, times, uniform))
    for contender in processes.values():
        contender.close()
    return lines


def summary(case: dict, times: dict[str, list[tuple[float, float]]], uniform: list[float]) -> dict:
    line: dict = {}
    for who, pairs in times.items():
        line[f"{who}_ms"] = [round(1e3 * median(values), 3) for values in zip(*pairs, strict=True)]
    for rival in ("torch", "fbgemm"):
        if rival in times:
            line[f"over_{rival}"] = stats([sum(b) / sum(a) for a, b in zip(times["ours"], times[rival], strict=True)])
    gigabytes = gigabytes_moved(case)
    for index, side in enumerate(("forward", "backward")):
        line[f"{side}_of_roofline"] = stats(
            [b[index] / a[index] for a, b in zip(times["ours"], times["roofline"], strict=True)]
        )
        line[f"{side}_of_gather"] = stats(
            [gigabytes[index] / a[index] / u for a, u in zip(times["ours"], uniform, strict=True)]
        )
    line["uniform_gb_per_s"] = stats(uniform)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer")
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--optimizer", nargs="*", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", help="the results file's name, without .json")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.case, args.optimizer, args.dtype = args.case[-1:], args.optimizer[:1], args.dtype[:1]
        args.threads, args.rounds = [1], 1
    lines = []
    for name in args.case:
        for dtype in args.dtype:
            for optimizer in args.optimizer:
                case = CASES[name] | {"dtype": dtype, "optimizer": optimizer}
                for line in measure(name, case, args.peer, args.rounds, args.threads):
                    lines.append(line)
                    print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "embedding", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
