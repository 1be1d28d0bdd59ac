"""Tables that grow: to 20 million rows while a predictor follows, within a bound, and their quality.

    python -m benchmarks.growing [--rows N] [--criteo FILE] [--seeds N] [--write NAME]

"grow": a DLRM whose only table has ids of 64 bits and room for N rows of 16 columns (row-wise AdaGrad) trains on a
stream: batches of 4,096 samples with 24 ids each, 20 never seen before and 4 drawn from those seen, the newest most
often. It publishes every so often, and a `Predictor` in this process, which began from an export of the first steps,
applies each publication. After each its scores of a batch are compared with the trainer's, to the bit, and the ids of
its table with the trainer's. "bounded": the same stream with room for a quarter of the rows: those with the fewest uses
end. A JSON line per publication: rows, seconds of a step since the last line, megabytes of the process, how many
of them are allocated, seconds until the predictor had the publication, milliseconds for which its requests waited.

"quality": normalized entropy over the rows of FILE (Criteo's format) in order, each batch scored before training on it;
a table of 16 columns for each of 26 columns of ids. Sides: "exact", a row for every value of a column, known before;
"grows", no vocabulary, with room for a part of the values; "grows, admitted", the same, rows from the second occurrence
on; "hashed", ids hashed to as many rows as take the bytes of "grows" with its map; "tensor train", a tensor train of
rank 32 in place of each "exact" table of more than 5,000 rows; "hashed, as small", those tables hashed to as many rows
as take the bytes of the trains. Dense optimizer: Adagrad. A line per side and seed, then the mean difference to "exact"
and its standard error.
"""

import argparse
import ctypes
import json
import resource
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from benchmarks import results_file
from shardwright.jagged import Batch, Jagged, Vectors
from shardwright.kernels.rounding import splitmix64
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.tensor_train import TensorTrainBag
from shardwright.models.dlrm import DLRM, DLRMDense
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_for
from shardwright.serving.export import export
from shardwright.serving.predictor import Predictor
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Feature, Growth, Table

DIM, DENSE = 16, 13
SAMPLES, NEW_IDS, OLD_IDS = 4096, 20, 4
PUBLICATIONS = 10
COLUMNS, QUALITY_BATCH = 26, 512
MAP_BYTES, ROW_BYTES = 64 + 8, 4 * DIM + 4  # of a row: in the map of ids, at half its load; weight and state
LR, BOTTOM, TOP = 0.02, (32, DIM), (32,)
TRAIN_ROWS, TRAIN_RANK = 5_000, 32
ROOM = 0.5  # of the values of a column, of "grows"
Line = dict[str, Any]


class GrowingStream:
    """Batches of ids by number; the k-th id of the stream is a hash of k."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.num_seen = 0

    def batch(self, *, new: bool = True) -> Batch:
        num_new = SAMPLES * NEW_IDS if new else 0
        numbers = torch.arange(self.num_seen, self.num_seen + num_new)
        self.num_seen += num_new
        num_old = SAMPLES * (NEW_IDS + OLD_IDS) - num_new
        age = (self.num_seen * torch.rand(num_old, generator=self._generator) ** 4).long()
        numbers = torch.cat([numbers, self.num_seen - 1 - age.clamp(max=self.num_seen - 1)])
        values = splitmix64(numbers[torch.randperm(len(numbers), generator=self._generator)])
        lengths = torch.full((1, SAMPLES), NEW_IDS + OLD_IDS)
        dense = torch.randn(SAMPLES, DENSE, generator=self._generator)
        click = (torch.rand(SAMPLES, generator=self._generator) < 0.25).float()
        return Batch(Jagged(("item",), values, lengths), dense, {"click": click})


class TensorTrainDLRM(nn.Module):
    """A DLRM with tensor trains in place of the tables with more than `TRAIN_ROWS` rows; one id for each feature."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        small = [table for table in tables if table.rows <= TRAIN_ROWS]
        self.sparse = EmbeddingBags(small, [Feature(t.name, t.name) for t in small], RowWiseAdaGrad(lr=LR))
        self.dense = TensorTrainDense(tables)
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.dense(batch, self.sparse(batch))


def rows_of_train(rows: int) -> int:
    """The rows of a table that takes as many bytes, with optimizer state, as a tensor train for so many."""
    with torch.device("meta"):
        return round(2 * 4 * TensorTrainBag(rows, DIM, TRAIN_RANK).num_values / ROW_BYTES)


class TensorTrainDense(DLRMDense):
    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__(len(tables), DENSE, BOTTOM, TOP)
        large = {i: table for i, table in enumerate(tables) if table.rows > TRAIN_ROWS}
        self.numbers = list(large)
        self.trains = nn.ModuleList(TensorTrainBag(t.rows, t.dim, TRAIN_RANK, std=0.006) for t in large.values())

    def forward(self, batch: Batch, vectors: Vectors) -> torch.Tensor:
        ids = batch.features.values.view(COLUMNS, -1)
        starts = torch.arange(ids.shape[1] + 1, device=ids.device)
        large = [train(ids[i], starts) for i, train in zip(self.numbers, self.trains, strict=True)]
        assert self.bottom is not None
        dense_BD = self.bottom(batch.numbers)
        x_BFD = torch.cat([torch.stack([dense_BD, *large], 1), vectors.stacked()], 1)
        return self.top(torch.cat([dense_BD, self.interaction(x_BFD)], 1)).squeeze(1)


def make_job(model: nn.Module, example: Batch) -> Job:
    plan = plan_for(model, example)
    return build(model, plan, optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=LR))


def make_dlrm(tables: Sequence[Table]) -> DLRM:
    features = [Feature(table.name, table.name) for table in tables]
    with torch.device("meta"):
        return DLRM(EmbeddingBags(tables, features, RowWiseAdaGrad(lr=LR)), DENSE, bottom=BOTTOM, top=TOP)


def resident_megabytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 10**6


def allocated_megabytes() -> int:
    """Memory that this process has allocated now; what is freed and kept for later is resident, but not in this."""

    class Numbers(ctypes.Structure):
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Numbers
    numbers = library.mallinfo2()
    return (numbers.uordblks + numbers.hblkhd) // 10**6


def grow(name: str, rows: int, num_batches: int) -> Iterator[Line]:
    stream, probe = GrowingStream(0), GrowingStream(1)
    torch.manual_seed(0)
    job = make_job(make_dlrm([Table("item", rows, DIM, growth=Growth(half_life=50))]), stream.batch())
    every = max(1, num_batches // PUBLICATIONS)
    with tempfile.TemporaryDirectory() as folder:
        published, predictor = Path(folder) / "published", None
        published.mkdir()
        start = perf_counter()
        batches = (stream.batch() for _ in range(num_batches))
        for number, _ in enumerate(job.run(batches), 1):
            if number % every:
                continue
            seconds = (perf_counter() - start) / every
            if predictor is None:
                job.save(Path(folder) / "saved")
                export(
                    job.model,
                    Path(folder) / "saved" / f"step-{number:08d}",
                    Path(folder) / "served",
                    example=probe.batch(),
                )
                predictor = Predictor(Path(folder) / "served", follow=published)
            job.publish(published)
            begin = perf_counter()
            while predictor.step < job.step:
                predictor.update()
            line = {"benchmark": "growing", "case": name, "room": rows, "batches": number, "ids": stream.num_seen}
            line |= compare(job, predictor, stream.batch(new=False))
            line |= {
                "milliseconds_per_step": round(1e3 * seconds, 1),
                "megabytes": resident_megabytes(),
                "allocated_megabytes": allocated_megabytes(),
                "follow_seconds": round(perf_counter() - begin, 2),
                "pause_milliseconds": round(1e3 * predictor.followed.pause_seconds, 1),
            }
            yield line
            start = perf_counter()
        assert predictor is not None
        predictor.close()


def grow_all(name: str, rows: int, num_batches: int) -> list[Line]:
    lines = list[Line]()
    for line in grow(name, rows, num_batches):
        print(f"{name}: {line['rows']:,} rows", file=sys.stderr, flush=True)
        lines.append(line)
    return lines


def compare(job: Job, predictor: Predictor, batch: Batch) -> Line:
    """Rows of the trainer and of the predictor, and whether their ids and scores are equal."""
    (local,) = job.model.sparse.exchange.local_shards
    (rows,) = local.growing.values()
    known, (output,) = rows.rows().ids_E, job.evaluate([batch])
    scores = predictor.scores(batch)
    return {
        "rows": len(known),
        "evicted": rows.ids.numbers.evicted,
        "equal_ids": torch.equal(known, predictor.tables.growing["item"].known_ids()),
        "equal_scores": torch.equal(output.logits.sigmoid().flatten(), scores.flatten()),
    }


def read_criteo(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels (N,), numbers (N, 13) as log(1 + x), and ids (26, N), numbered from 0 in each column."""
    compression = "zstd" if path.endswith(".zst") else "gzip" if path.endswith(".gz") else None
    with pa.input_stream(path, compression=compression) as stream:
        rows = [line.split(b"\t") for line in stream.read().splitlines()]
    labels = np.array([row[0] == b"1" for row in rows], np.float32)
    numbers = np.array([[float(x or 0) for x in row[1 : 1 + DENSE]] for row in rows], np.float32)
    ids = [
        np.unique(np.array(column), return_inverse=True)[1]
        for column in zip(*(r[-COLUMNS:] for r in rows), strict=True)
    ]
    return labels, np.log1p(np.maximum(numbers, 0)), np.stack(ids)


def quality(path: str, num_seeds: int) -> Iterator[Line]:
    labels, numbers, ids = read_criteo(path)
    sizes, names = ids.max(1) + 1, [f"c{i}" for i in range(COLUMNS)]
    room = [min(int(size), max(3 * QUALITY_BATCH, round(ROOM * size))) for size in sizes]
    hashed = [
        min(int(size), round(num * (ROW_BYTES + MAP_BYTES) / ROW_BYTES)) for num, size in zip(room, sizes, strict=True)
    ]
    tables = {
        "exact": [Table(name, int(size), DIM, init=0.01) for name, size in zip(names, sizes, strict=True)],
        "grows": [Table(n, r, DIM, init=0.01, growth=Growth(half_life=50)) for n, r in zip(names, room, strict=True)],
        "grows, admitted": [
            Table(n, r, DIM, init=0.01, growth=Growth(2, half_life=50)) for n, r in zip(names, room, strict=True)
        ],
        "hashed": [Table(name, rows, DIM, init=0.01) for name, rows in zip(names, hashed, strict=True)],
        "tensor train": [Table(name, int(size), DIM, init=0.01) for name, size in zip(names, sizes, strict=True)],
        "hashed, as small": [
            Table(name, rows_of_train(int(size)) if size > TRAIN_ROWS else int(size), DIM, init=0.01)
            for name, size in zip(names, sizes, strict=True)
        ],
    }
    entropy: dict[str, list[float]] = {name: [] for name in tables}
    megabytes: dict[str, float] = {}
    for seed in range(num_seeds):
        for side, own in tables.items():
            rows = [table.rows if "hashed" in side else 0 for table in own]

            def batch_of(number: int, rows: list[int] = rows) -> Batch:
                span = slice(number * QUALITY_BATCH, (number + 1) * QUALITY_BATCH)
                values = [_hash(column[span], num) for column, num in zip(ids, rows, strict=True)]
                size = len(values[0])
                lengths = torch.ones(COLUMNS, size, dtype=torch.int64)
                features = Jagged(tuple(names), torch.cat(values), lengths)
                click = torch.from_numpy(labels[span])
                return Batch(features, torch.from_numpy(numbers[span]), {"click": click})

            torch.manual_seed(seed)
            model = TensorTrainDLRM(own) if side == "tensor train" else make_dlrm(own)
            job = make_job(model, batch_of(0))
            total = 0.0
            num_batches = len(labels) // QUALITY_BATCH
            steps = job.run(batch_of(number) for number in range(num_batches))
            for number in range(num_batches):
                batch = batch_of(number)
                (output,) = job.evaluate([batch])
                losses = torch.nn.functional.binary_cross_entropy_with_logits(
                    output.logits.flatten().double(), batch.labels["click"].double()
                )
                total += float(losses)
                next(steps)
            rate = labels[: num_batches * QUALITY_BATCH].mean()
            base = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
            entropy[side].append(total / num_batches / float(base))
            room_bytes = sum(t.rows * (ROW_BYTES + MAP_BYTES * (t.growth is not None)) for t in model.sparse.tables)
            if isinstance(model, TensorTrainDLRM):
                room_bytes += sum(2 * parameter.nbytes for parameter in model.dense.trains.parameters())  # with state
            line = {"benchmark": "growing", "case": "quality", "side": side, "seed": seed}
            megabytes[side] = round(room_bytes / 1e6, 1)
            yield line | {"ne": round(entropy[side][-1], 5), "megabytes": megabytes[side]}
    for side, values in entropy.items():
        differences = [100 * (a / b - 1) for a, b in zip(values, entropy["exact"], strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        line = {"benchmark": "growing", "case": "quality", "side": side, "seeds": num_seeds}
        yield line | {
            "megabytes": megabytes[side],
            "ne": round(statistics.mean(values), 5),
            "over_exact_percent": [round(statistics.mean(differences), 3), round(error, 3)],
        }


def _hash(column: np.ndarray, rows: int) -> torch.Tensor:
    """Ids as they are, or hashed to so many rows."""
    ids = torch.from_numpy(column.astype(np.int64))
    return (splitmix64(ids) & (2**63 - 1)) % rows if rows else ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--criteo", default="", metavar="FILE", help="rows in Criteo's format; empty: without quality")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args()
    rows = 1_200_000 if args.smoke else args.rows
    num_batches, lines = rows // (SAMPLES * NEW_IDS), list[Line]()

    def show(found: Iterable[Line]) -> None:
        for line in found:
            lines.append(line)
            print(json.dumps(line), flush=True)

    for case, room in (("grow", rows), ("bounded", rows // 4)):  # each in a process of its own, for its memory
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            show(process.submit(grow_all, case, room, num_batches).result())
    if args.criteo:
        show(quality(args.criteo, args.seeds))
    if args.write:
        results_file.write(args.write, "growing", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
