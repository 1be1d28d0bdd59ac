"""Rows per second of `shardwright predict`, beside reading alone and the forward pass alone; a kill in the middle.

    python -m benchmarks.score_file [--rows N] [--write NAME]

A generated file in Criteo's format is scored by a DLRM that was trained on a part of it. In rounds, on the first tenth
of the file: reading and transforming its rows, the forward pass of batches in memory, and both together as `predict`
runs them, twice (the A/A floor). Then the whole file by the command: once to its end, and once killed in the middle and
started again, which must give the same bytes. JSON lines; the last has medians and the share of the slower of the two
alone. Both torch and the reader use one thread each.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import criteo_like, results_file

ROUNDS = 5
TRAIN_STEPS = 100
BATCH = 4096
LINE_BYTES = criteo_like.WIDTH
SIDES = ("read", "forward", "predict", "predict again")


def train_model(data: Path, directory: Path) -> Path:
    """An exported DLRM of the recipe."""
    from shardwright import config
    from shardwright.runtime.run.train import train
    from shardwright.serving.export import export_run

    keys = (f"data={data}", f"data.cache={directory}/cache", f"run.directory={directory}/runs")
    steps = ("train.epochs=0", f"train.steps={TRAIN_STEPS}", f"train.checkpoint_every={TRAIN_STEPS}")
    result = train(config.load("criteo-dlrm", [*keys, *steps]))
    export_run(result.path, directory / "model")
    return directory / "model"


def copy_rows(source: Path, target: Path, rows: int) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        write.write(read.read(rows * LINE_BYTES))


class Sides:
    """What is timed, on one file; each method returns the number of rows."""

    def __init__(self, model: Path, data: Path, directory: Path) -> None:
        from shardwright.data.features.transforms import Transforms
        from shardwright.serving.manifest import TRANSFORMS_DIRECTORY
        from shardwright.serving.predictor import Predictor
        from shardwright.serving.scoring.predict import ScoreRequest

        self.transforms, self.predictor = Transforms.read(model / TRANSFORMS_DIRECTORY), Predictor(model)
        self.rows = data.stat().st_size // LINE_BYTES
        self.request = ScoreRequest(model, data, directory / "part.parquet")
        self.in_memory = next(self._blocks())

    def _blocks(self) -> Iterator[list[Any]]:
        from shardwright.data.features.row_batches import encode_rows
        from shardwright.data.logs.row_blocks import FeatureFile

        file = FeatureFile(self.request.data, self.transforms.schema)
        for block in file.read_blocks(self.request.block_rows, lambda _: True):
            assert block.columns is not None
            yield list(encode_rows(self.transforms, block.columns, block.num_rows, BATCH))

    def read(self) -> int:
        return sum(batch.lengths.shape[1] for block in self._blocks() for batch in block)

    def forward(self) -> int:
        from shardwright.data.loading.loader import to_batch
        from shardwright.serving.scoring.score_columns import score_columns

        num = 0
        while num < self.rows:
            for batch in self.in_memory:
                num += len(score_columns(self.predictor, to_batch(batch))[0][1])
        return num

    def predict(self) -> int:
        from shardwright.serving.scoring.predict import prepare, score_parts

        self.request.output.unlink(missing_ok=True)
        parts = prepare(self.request)
        score_parts(self.request)
        return parts.assemble()


def measure_sides(sides: Sides, rounds: int) -> list[dict[str, Any]]:
    """Rows per second of every side, in turns."""
    functions = dict(zip(SIDES, (sides.read, sides.forward, sides.predict, sides.predict), strict=True))
    lines = []
    for number in range(rounds + 1):
        for side, function in functions.items():
            start = time.perf_counter()
            num = function()
            rate = num / (time.perf_counter() - start)
            if number:  # the first round warms up
                lines.append({"benchmark": "score_file", "side": side, "round": number, "rows_per_second": rate})
                print(json.dumps(lines[-1]), flush=True)
    sides.predictor.close()
    return lines


def summarize(lines: list[dict[str, Any]]) -> dict[str, Any]:
    rates = {side: [line["rows_per_second"] for line in lines if line["side"] == side] for side in SIDES}
    slower = [min(pair) for pair in zip(rates["read"], rates["forward"], strict=True)]
    row: dict[str, Any] = {"benchmark": "score_file", "summary": "alone and together"}
    row |= {f"{side.replace(' ', '_')}_rows_per_second": median(values) for side, values in rates.items()}
    for name, own in (("share_of_slower", slower), ("a_a", rates["predict again"])):
        shares = [rate / other for rate, other in zip(rates["predict"], own, strict=True)]
        row[name] = [round(share, 3) for share in (median(shares), min(shares), max(shares))]
    return row


def command(model: Path, data: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "shardwright.cli", "predict", str(model), f"data={data}", f"out={out}"]


def kill_and_resume(model: Path, data: Path, directory: Path) -> dict[str, Any]:
    """Score the whole file, and again with a kill when half of the parts are complete."""
    whole, cut = directory / "whole.parquet", directory / "cut.parquet"
    start = time.perf_counter()
    subprocess.run(command(model, data, whole), check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    num_parts = -(-(data.stat().st_size // LINE_BYTES) // (4 * 65_536))
    process = subprocess.Popen(command(model, data, cut), stdout=subprocess.DEVNULL)
    folder = directory / f".{cut.name}.parts"
    while process.poll() is None and 2 * len(list(folder.glob("part-*.parquet"))) < num_parts:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(list(folder.glob("part-*.parquet")))
    start = time.perf_counter()
    subprocess.run(command(model, data, cut), check=True, stdout=subprocess.DEVNULL)
    rows = data.stat().st_size // LINE_BYTES
    return {
        "benchmark": "score_file",
        "summary": "whole file, by the command",
        "rows": rows,
        "seconds": seconds,
        "rows_per_second": rows / seconds,
        "parts": num_parts,
        "parts_kept_at_the_kill": kept,
        "seconds_after_the_kill": time.perf_counter() - start,
        "same_bytes": whole.read_bytes() == cut.read_bytes(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    rows, rounds = (criteo_like.ROWS, 1) if args.smoke else (args.rows, ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        data, start = directory / "log.tsv", directory / "start.tsv"
        rows = criteo_like.write(data, rows * LINE_BYTES)
        copy_rows(data, start, max(rows // 10, 8192))
        model = train_model(start, directory)
        sides = Sides(model, start, directory)
        lines = measure_sides(sides, rounds)
        lines += [summarize(lines) | {"rows": sides.rows}, kill_and_resume(model, data, directory)]
    for line in lines[-2:]:
        print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "score_file", lines)
    return 0 if lines[-1]["same_bytes"] else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
