"""A side of benchmarks/tiers.py: a process that trains in turns. Its only argument is a Setup as JSON.

For each line on its input, a number of steps, it runs a turn, a step that warms up and then so many that are timed, and
prints a JSON line.
"""

import ctypes
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.dlrm_step import BATCH, BOTTOM, DENSE, DIM, ROWS, TABLES, TOP, make_batch
from shardwright.data.sources.source import NumpyBatch
from shardwright.embeddings.exchange import ShardedTables
from shardwright.jagged import Batch, Jagged, check_batch
from shardwright.kernels.cache_index import CacheCounts
from shardwright.kernels.initial import CHUNK_ELEMENTS
from shardwright.kernels.native import retain_freed_memory
from shardwright.layers.embedding import EmbeddingBags
from shardwright.measure.describe import describe
from shardwright.models.dlrm import DLRM
from shardwright.planner.plan import exact_precision
from shardwright.planner.reprice import reprice_plan
from shardwright.planner.search import define_problem
from shardwright.planner.step import prediction
from shardwright.planner.step.loop_cost import LoopCost
from shardwright.planner.tables import cache_hits
from shardwright.planner.tables.sharding import make_table_loads
from shardwright.runtime.build import build
from shardwright.runtime.placements import keep_on_disk
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run import measure_loop
from shardwright.runtime.supported import cached_rows
from shardwright.spec import presets
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.plan import Plan
from shardwright.spec.row_cache import WAYS
from shardwright.spec.workload import CacheHits, Feature, FeatureStatistics, Table, Workload

STEPS = 5  # timed, of a turn
CYCLE = 12  # batches that the stream "cycle" repeats
COPIES = 16  # of the rows of "criteo", with other ids each
CHUNK = 1 << 16  # rows that are written to disk at a time
MADV_RANDOM = 1
NAMES = tuple(f"f{i}" for i in range(TABLES))


@dataclass(frozen=True)
class Setup:
    """`kind`: "memory", "disk", "mmap", or "none": tables of a few rows. `share`: lines for so many of the rows.
    `stream`: "zipf", "cycle", or "criteo", ids of which are in a file of `folder`. `cluster`: a measured cluster, to
    predict the step; empty: it is not predicted."""

    kind: str
    stream: str
    share: float
    folder: str
    cluster: str = ""
    recorded: Sequence[tuple[str, int, float]] = ()  # recorded hits: table, lines, share of distinct rows found


def num_lines(stream: str, rows: Sequence[int], share: float) -> list[int]:
    """Lines of each table for this share of all rows; of "criteo", as many for each, but at most its rows."""
    if stream != "criteo":
        return [round(share * num) for num in rows]
    low, high = 0, max(rows)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(num, middle) for num in rows) <= share * sum(rows) else (low, middle - 1)
    return [num if num <= low else low // WAYS * WAYS for num in rows]


class Stream:
    """Batches by number: one id of each table."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._columns = np.load(folder / "criteo.npy") if name == "criteo" else None
        self._sizes = np.full(TABLES, ROWS) if self._columns is None else self._columns.max(1) + 1
        self.rows = (self._sizes * (1 if self._columns is None else COPIES)).tolist()
        draw = torch.Generator().manual_seed(0)
        self._ids = [] if self._columns is None else [torch.randperm(rows, generator=draw) for rows in self.rows]

    @property
    def pass_batches(self) -> int:
        """Batches after which rows of the file repeat, with other ids; 0: never."""
        return 0 if self._columns is None else self._columns.shape[1] // BATCH

    def batch(self, number: int) -> Batch:
        ids, numbers, labels = make_batch(number % CYCLE if self._name == "cycle" else number)
        if self._columns is not None:
            copy, position = divmod(number, self.pass_batches)
            values = self._columns[:, position * BATCH : (position + 1) * BATCH]
            positions = torch.from_numpy(values + copy % COPIES * self._sizes[:, None])
            ids = torch.cat([order[own] for order, own in zip(self._ids, positions, strict=True)])
        lengths = torch.ones(TABLES, BATCH, dtype=torch.int64)
        return Batch(Jagged(NAMES, ids, lengths), numbers, {"click": labels})

    def statistics(self) -> list[FeatureStatistics]:
        """Of each table: its ids are taken as drawn independently."""
        found: list[FeatureStatistics] = []
        for number, rows in enumerate(self.rows):
            points = np.unique(np.geomspace(1, rows - 1, 64).astype(np.int64))
            if self._columns is None:
                shares = ((points + 1.0) ** -0.05 - 1) / ((rows + 0.0) ** -0.05 - 1)
            else:
                counts = np.sort(np.tile(np.bincount(self._columns[number]), COPIES))[::-1]
                shares = counts.cumsum()[points - 1] / counts.sum()
            ids = self.batch(0).features.values.view(TABLES, BATCH)[number]
            distinct = len(torch.unique(ids)) / BATCH
            popularity = tuple(zip(points.tolist(), np.minimum(shares, 1.0).tolist(), strict=True))
            found.append(FeatureStatistics(NAMES[number], 1.0, distinct, popularity, ((BATCH, distinct),)))
        return found


class Side:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.setup, self.stream = setup, Stream(setup.stream, Path(setup.folder))
        rows = [32] * TABLES if setup.kind == "none" else self.stream.rows
        with torch.device("meta"):
            tables = [Table(name, num, DIM) for name, num in zip(NAMES, rows, strict=True)]
            bags = EmbeddingBags(tables, [Feature(name, name) for name in NAMES], RowWiseAdaGrad(lr=0.01))
            model = DLRM(bags, DENSE, bottom=BOTTOM, top=TOP)
        plan = plan_for(model, self._batch(0))
        if setup.kind == "disk":
            lines = num_lines(setup.stream, rows, setup.share)
            in_memory = zip(NAMES, rows, lines, strict=True)
            plan = keep_on_disk(
                plan, {name: num for name, all_rows, num in in_memory if num < all_rows or setup.share == 1}
            )
        self.predicted = self._predict(plan, model) if setup.kind == "disk" else {}
        if setup.kind == "mmap":
            self._map_tables(bags, tables)
        self.job = build(model, plan, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        self.number = 0
        self._write_all_rows()

        def batches() -> Any:
            while True:
                yield self._batch(self.number)
                self.number += 1

        self.steps = self.job.run(batches())

    def _batch(self, number: int) -> Batch:
        batch = self.stream.batch(number)
        if self.setup.kind == "none":
            batch.features.values.remainder_(32)
        return batch

    def _write_all_rows(self) -> None:
        """As if the tables were trained before: rows that were never written need no read."""
        exchange = self.job.model.sparse.exchange
        for local in exchange.local_shards if isinstance(exchange, ShardedTables) else ():
            for cached in local.caches.values():
                for rows in torch.arange(cached.store.num_rows).split(CHUNK):
                    parts, lines = cached.store.empty_parts(len(rows)), torch.arange(len(rows))
                    cached.store.read(rows, lines, parts)
                    cached.store.write(rows, lines, parts)

    def turn(self, steps: int) -> dict[str, Any]:
        """A step that warms up, then those that are timed."""
        losses, before = [], self._counters()
        start = waited = 0.0
        for number in range(1 + steps):
            if number == 1:
                start, waited = perf_counter(), self._waited()
            losses.append(float(next(self.steps).loss))
        seconds = (perf_counter() - start) / steps
        after = self._counters()
        return {
            "losses": losses,
            "seconds": seconds,
            "waited": (self._waited() - waited) / steps,
            "counters": {key: after[key] - before[key] for key in after},
            "peak_bytes": _status_bytes("VmHWM"),
        } | self.predicted

    def _counters(self) -> dict[str, int]:
        counts = {}
        if isinstance(self.job.model.sparse.exchange, ShardedTables):
            counts = asdict(sum(self.job.cache_counts().values(), CacheCounts()))
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return counts | {name: int(io[name]) for name in ("read_bytes", "write_bytes")}

    def _waited(self) -> float:
        exchange = self.job.model.sparse.exchange
        return exchange.placer.waited_seconds if isinstance(exchange, ShardedTables) else 0.0

    def _map_tables(self, bags: EmbeddingBags, tables: list[Table]) -> None:
        """Tables in files that are mapped to memory, read in pages without the next ones; their state is in memory."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for table in tables:
            path = Path(self.setup.folder) / f"mapped-{table.name}"
            with path.open("wb") as file:
                file.truncate(4 * table.rows * table.dim)
            weight = torch.from_file(str(path), shared=True, size=table.rows * table.dim).view(table.rows, table.dim)
            initial_rows = bags.holder(table.name).row_initializer()
            for rows_U in torch.arange(table.rows).split(max(1, CHUNK_ELEMENTS // table.dim)):
                weight[rows_U[0] : rows_U[-1] + 1] = initial_rows(rows_U)
            assert not madvise(weight.data_ptr(), weight.nbytes, MADV_RANDOM)
            _move_to_cpu(bags, table.name, weight)

    def _predict(self, plan: Plan, model: DLRM) -> dict[str, Any]:
        """The hits that the planner expects. With a measured cluster also seconds of a step: by the cluster's prices
        ("planned"), and with measured times of the dense model and of reading ("predicted"), as `train` predicts it."""
        workload: Workload = describe(model, self._batch(0), self.stream.statistics())
        hits = tuple(CacheHits(name, ((lines, share),)) for name, lines, share in self.setup.recorded)
        workload = replace(workload, cache_hits=hits)
        lines = {table.table: cached_rows(table) for table in plan.tables}
        shares, distinct = [], []
        for load in make_table_loads(workload):
            if (own := lines[load.table.name]) is not None:  # measured hits are of these tables
                shares.append(cache_hits.found_share(load, own, BATCH))
                distinct.append(load.distinct_share)
        found = {"predicted_hits": round(float(np.average(shares, weights=distinct)), 4)}
        if self.setup.cluster:
            cluster = presets.load_cluster(self.setup.cluster)
            problem = define_problem(workload, cluster, BATCH, exact_precision(workload))
            step = reprice_plan(problem, plan)
            found["planned_seconds"] = step.seconds
            timeline = prediction.predict_timeline(
                step.problem, step.placed, step.loads, step.ids_after, self._measure_loop(model)
            )
            found["predicted_seconds"] = prediction.counted_step_seconds(timeline)
        return found

    def _measure_loop(self, model: DLRM) -> LoopCost:
        retain_freed_memory()  # as the job does
        numbers = count()
        bottom, top = measure_loop.dense_seconds(model, lambda: self._numpy_batch(next(numbers)), "float32", cores=1.0)
        read_seconds = measure_loop.measure_seconds(
            lambda: check_batch(self._batch(next(numbers)), allow_zero_weights=True), cores=1.0
        )
        return LoopCost(read_seconds, bottom_seconds=bottom, top_seconds=top)

    def _numpy_batch(self, number: int) -> NumpyBatch:
        batch = self._batch(number)
        labels = {name: label.numpy() for name, label in batch.labels.items()}
        ids, lengths = batch.features.values.numpy(), batch.features.lengths.numpy()
        return NumpyBatch(NAMES, ids, lengths, None if batch.dense is None else batch.dense.numpy(), labels)


def _move_to_cpu(bags: EmbeddingBags, name: str, weight: Tensor) -> None:
    """Use `weight`, with a fresh optimizer state in memory, in place of a meta tensor."""
    module = bags.holder(name)
    module.weight = nn.Parameter(weight)
    for key, state in module.named_buffers():
        setattr(module, key, torch.full(state.shape, module.initial_state, dtype=state.dtype))


def _status_bytes(key: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[key].split()[0])


def main() -> int:
    side = Side(Setup(**json.loads(sys.argv[1])))
    print("ready", flush=True)
    for steps in sys.stdin:
        print(json.dumps(side.turn(int(steps))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
