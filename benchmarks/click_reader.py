"""Text to a Parquet cache on one core: our reader against plain pyarrow, which only parses and writes columns.

    python -m benchmarks.click_reader [--megabytes N] [--rounds N] [--write NAME]

pyarrow's side does less: strings and integers without codes, no check of labels or hashes, no line numbers. Rounds are
interleaved; a JSON line per round, then medians and ranges.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from benchmarks import criteo_like, results_file
from shardwright.data.logs.convert import convert
from shardwright.data.logs.schema import SCHEMAS
from shardwright.data.logs.text import TextFile

CRITEO = SCHEMAS["criteo"]


def convert_ours(path: Path, out: Path) -> None:
    convert(path, TextFile(path, CRITEO), CRITEO, out, strict=True, progress=lambda done, total: None)


def convert_pyarrow(path: Path, out: Path) -> None:
    types = {name: pa.string() if name in CRITEO.categories else pa.int64() for name in CRITEO.columns}
    read = pc.ReadOptions(column_names=list(CRITEO.columns), use_threads=False, block_size=8 << 20)
    parse = pc.ParseOptions(delimiter="\t", quote_char=False)
    with pc.open_csv(path, read, parse, pc.ConvertOptions(column_types=types)) as reader:
        options = {"compression": "NONE", "use_dictionary": False, "write_statistics": False}
        with pq.ParquetWriter(out / "rows.parquet", reader.schema, **options) as writer:
            for batch in reader:
                writer.write_batch(batch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    megabytes, rounds = (1, 1) if args.smoke else (args.megabytes, args.rounds)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    speeds: dict[str, list[float]] = {"shardwright": [], "pyarrow": []}
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "log.tsv")
        criteo_like.write(path, megabytes << 20)
        for number in range(rounds):
            for name, convert_file in (("shardwright", convert_ours), ("pyarrow", convert_pyarrow)):
                out = Path(directory, "out")
                out.mkdir()
                start = time.perf_counter()
                convert_file(path, out)
                speeds[name].append(path.stat().st_size / 1e6 / (time.perf_counter() - start))
                shutil.rmtree(out)
                lines.append({"round": number, "reader": name, "megabytes_per_second": speeds[name][-1]})
                print(json.dumps(lines[-1]), flush=True)
    ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
    speeds_by_reader = {name: [median(values), min(values), max(values)] for name, values in speeds.items()}
    summary = {"benchmark": "click_reader", "megabytes": megabytes, "one_core": True} | speeds_by_reader
    summary["ratio"] = [median(ratios), min(ratios), max(ratios)]
    print(json.dumps(summary))
    if args.write:
        results_file.write(args.write, "click_reader", [*lines, summary])
    return 0


if __name__ == "__main__":
    sys.exit(main())
