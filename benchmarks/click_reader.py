"""Text to a Parquet cache on one core: our reader against plain pyarrow, which reads columns as they are and writes.

    python -m benchmarks.click_reader [MEGABYTES] [ROUNDS]

pyarrow's side does less: strings and integers with no codes, no check of labels or hashes, no line numbers. Rounds are
interleaved; a JSON line per round, then medians and ranges.
"""

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

from benchmarks import criteo_like
from shardwright.data.convert import convert
from shardwright.data.schema import SCHEMAS
from shardwright.data.text import TextFile

CRITEO = SCHEMAS["criteo"]


def ours(path: Path, out: Path) -> None:
    convert(path, TextFile(path, CRITEO), CRITEO, out, strict=True, progress=lambda done, total: None)


def plain(path: Path, out: Path) -> None:
    types = {name: pa.string() if name in CRITEO.categories else pa.int64() for name in CRITEO.columns}
    read = pc.ReadOptions(column_names=list(CRITEO.columns), use_threads=False, block_size=8 << 20)
    parse = pc.ParseOptions(delimiter="\t", quote_char=False)
    with pc.open_csv(path, read, parse, pc.ConvertOptions(column_types=types)) as reader:
        options = {"compression": "NONE", "use_dictionary": False, "write_statistics": False}
        with pq.ParquetWriter(out / "rows.parquet", reader.schema, **options) as writer:
            for batch in reader:
                writer.write_batch(batch)


def main() -> int:
    megabytes, rounds = (int(word) for word in (*sys.argv[1:], *("500", "5")[len(sys.argv) - 1 :]))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    speeds: dict[str, list[float]] = {"shardwright": [], "pyarrow": []}
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "log.tsv")
        criteo_like.write(path, megabytes << 20)
        for number in range(rounds):
            for name, read in (("shardwright", ours), ("pyarrow", plain)):
                out = Path(directory, "out")
                out.mkdir()
                start = time.perf_counter()
                read(path, out)
                speeds[name].append(path.stat().st_size / 1e6 / (time.perf_counter() - start))
                shutil.rmtree(out)
                lines.append({"round": number, "reader": name, "megabytes_per_second": speeds[name][-1]})
                print(json.dumps(lines[-1]), flush=True)
    ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
    found = {name: [median(values), min(values), max(values)] for name, values in speeds.items()}
    summary = {"benchmark": "click_reader", "megabytes": megabytes, "one_core": True} | found
    summary["ratio"] = [median(ratios), min(ratios), max(ratios)]
    print(json.dumps(summary))
    results = Path(__file__).parent / "results" / "click_reader-2cores.json"
    results.write_text("".join(json.dumps(line) + "\n" for line in [*lines, summary]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
