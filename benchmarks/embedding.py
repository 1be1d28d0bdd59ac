"""Lookup, and backward with the fused update, against torch's and FBGEMM's layers and the memory's roofline.

    python -m benchmarks.embedding [--peer PYTHON] [--case NAME ...] [--optimizer NAME ...] [--dtype NAME ...]
                                   [--threads N ...] [--rounds N] [--write NAME]

PYTHON is .rivals/bin/python (`make rivals`); without it FBGEMM is left out. Every contender
is a process of its own, trains its own tables from the same ids (popularity rank**-1.05) and the same upstream
gradient, in interleaved rounds of which only one runs at a time. A JSON line per case: median milliseconds, and the
median and range over rounds of the ratios. Rivals are stock, on the pages that torch's allocator gives them.
`forward_of_roofline`: time of reading the same rows in the same order and nothing else, over ours. `backward_...`: of
reading and rewriting the distinct rows and their state, in the best order, over ours. `..._of_gather`: bytes that
must move (see `moved`) over our time, against the bandwidth of reading uniformly drawn rows of these sizes.
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
    """Who can run this, and with which Python: FBGEMM has no Adam and no bf16 here, torch no row-wise AdaGrad."""
    found = {"ours": sys.executable, "roofline": sys.executable}
    if dtype == "fp32" and optimizer != "rowwise_adagrad":
        found["torch"] = sys.executable
    if peer and optimizer != "adam" and dtype != "bf16":
        found["fbgemm"] = peer
    return found


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
            raise SystemExit(f"a contender died on {self.case}")
        return json.loads(line)

    def round(self, steps: int, threads: int) -> dict:
        return self.ask({"do": "round", "steps": steps, "threads": threads})

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def spread(values: list[float]) -> list[float]:
    return [round(f, 3) for f in (median(values), min(values), max(values))]


def moved(case: dict) -> tuple[float, float]:
    """Gigabytes of the rows read and the vectors written forward; backward, of the gradients read, one per lookup, and
    the distinct rows and their state read and written."""
    width, state = 4 if case["dtype"] == "fp32" else 2, {"sgd": 0, "adagrad": 1, "adam": 2}.get(case["optimizer"], 0)
    lookups, forward, backward = case["batch"] * case["length"], 0.0, 0.0
    for table, (rows, dim) in enumerate(case["tables"]):
        distinct = sum(len(set(ids_of(table, rows, lookups, b))) for b in range(BATCHES)) / BATCHES
        forward += lookups * dim * width + case["batch"] * dim * 4
        backward += lookups * dim * 4 + distinct * 2 * (dim * width + state * dim * 4)
        backward += distinct * 8 if case["optimizer"] == "rowwise_adagrad" else 0
    return forward / 1e9, backward / 1e9


def measure(name: str, case: dict, peer: str | None, rounds: int, threads: list[int]) -> list[dict]:
    """A line for each number of threads, all over the same tables."""
    running = {
        who: Contender(who, python, case) for who, python in contenders(case["optimizer"], case["dtype"], peer).items()
    }
    for who, contender in running.items():
        contender.round(8 if who != "torch" else 2, threads[0])
    lines = []
    for number in threads:
        times: dict[str, list[tuple[float, float]]] = {who: [] for who in running}
        uniform = []
        for _ in range(rounds):
            for who, contender in running.items():
                answer = contender.round(8, number)
                times[who].append((median(answer["forward"]), median(answer["backward"])))
                uniform += [answer["uniform"]] if "uniform" in answer else []
        about = {"benchmark": "embedding", "case": name, "optimizer": case["optimizer"], "dtype": case["dtype"]}
        lines.append(about | {"threads": number} | summary(case, times, uniform))
    for contender in running.values():
        contender.close()
    return lines


def summary(case: dict, times: dict[str, list[tuple[float, float]]], uniform: list[float]) -> dict:
    line: dict = {}
    for who, pairs in times.items():
        line[f"{who}_ms"] = [round(1e3 * median(values), 3) for values in zip(*pairs, strict=True)]
    for rival in ("torch", "fbgemm"):
        if rival in times:
            line[f"over_{rival}"] = spread([sum(b) / sum(a) for a, b in zip(times["ours"], times[rival], strict=True)])
    gigabytes = moved(case)
    for at, side in enumerate(("forward", "backward")):
        line[f"{side}_of_roofline"] = spread(
            [b[at] / a[at] for a, b in zip(times["ours"], times["roofline"], strict=True)]
        )
        line[f"{side}_of_gather"] = spread(
            [gigabytes[at] / a[at] / u for a, u in zip(times["ours"], uniform, strict=True)]
        )
    line["uniform_gb_per_s"] = spread(uniform)
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
    asked = parser.parse_args()
    if asked.smoke:
        asked.case, asked.optimizer, asked.dtype = asked.case[-1:], asked.optimizer[:1], asked.dtype[:1]
        asked.threads, asked.rounds = [1], 1
    lines = []
    for name in asked.case:
        for dtype in asked.dtype:
            for optimizer in asked.optimizer:
                case = CASES[name] | {"dtype": dtype, "optimizer": optimizer}
                for line in measure(name, case, asked.peer, asked.rounds, asked.threads):
                    lines.append(line)
                    print(json.dumps(line), flush=True)
    if asked.write:
        results_file.write(asked.write, "embedding", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
