"""Cost of a checkpoint to the steps that overlap with it, size of increments, and speed of reading a state back.

    python -m benchmarks.checkpoint [--ranks N] [--gigabytes G] [--rounds R] [--seconds S] [--folder DIR] [--write NAME]

A job with 8 tables of 64 columns under row-wise AdaGrad, G gigabytes with their state, ids by a power law (Zipf,
exponent 1.2), 2,048 samples of 80 ids a step. Each round runs all sides for S seconds of steps: without a checkpoint;
after starting a full one; after starting an increment with the changes since the last; in one process also with
torch's distributed checkpoint (async_save of the same tensors). A JSON line per side: milliseconds that steps waited
(median, minimum, maximum), seconds of writing overlapped with steps, seconds of steps lost compared with the side
without a checkpoint, its share of a minute, megabytes, and for increments the share of a full checkpoint, also after
given numbers of steps. Then the state is read back by the job and by torch's distributed checkpoint, and the same bytes
are only read (16 MiB a call, four threads): gigabytes a second, with the files evicted from the page cache before each.
CPU and disk of one machine, which the ranks share.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import local
from typing import Any

from benchmarks import results_file

TABLES, COLUMNS, BAG, SAMPLES = 8, 64, 10, 2048
EXPONENT = 1.2
READ_BYTES, READERS = 16 << 20, 4
READS = 5
INTERVALS = (10, 30, 100, 300, 1000)  # steps between an increment and the checkpoint before it
MINUTE = 60.0


def batches(rows: int, rank: int, samples: int) -> Iterator[Any]:
    import torch

    from shardwright.jagged import Batch, Jagged

    generator = torch.Generator().manual_seed(rank)
    names = tuple(f"f{at}" for at in range(TABLES))
    lengths = torch.full((TABLES, samples), BAG)
    while True:
        uniform = torch.rand(TABLES * samples * BAG, generator=generator, dtype=torch.float64)
        position = ((rows ** (1 - EXPONENT) - 1) * uniform + 1) ** (1 / (1 - EXPONENT)) - 1
        ids = (position.long().clamp(0, rows - 1) * 1_000_003) % rows  # frequent rows are not adjacent
        dense = torch.randn(samples, 13, generator=generator)
        yield Batch(Jagged(names, ids, lengths), dense, {"click": (dense[:, 0] > 0).float()})


def build_job(rows: int, samples: int) -> Any:
    import torch

    from shardwright.comm.mesh import world_size
    from shardwright.layers.embedding import EmbeddingBags
    from shardwright.models.dlrm import DLRM
    from shardwright.runtime.build import build
    from shardwright.runtime.planning import plan_for
    from shardwright.spec.optimizer import RowWiseAdaGrad
    from shardwright.spec.workload import Feature, Table

    torch.manual_seed(1)
    tables = [Table(f"t{at}", rows, COLUMNS) for at in range(TABLES)]
    features = [Feature(f"f{at}", f"t{at}") for at in range(TABLES)]
    model = DLRM(EmbeddingBags(tables, features, RowWiseAdaGrad(0.05)), 13, bottom=[128, COLUMNS], top=[256, 64])
    plan = plan_for(model, next(batches(rows, 0, samples * world_size())))
    return build(model, plan, optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3))


class Sides:
    """The compared sides: each method starts its checkpoint, if any, and returns the seconds that steps waited."""

    def __init__(self, job: Any, folder: Path) -> None:
        from shardwright.runtime.rank_group import RankGroup
        from shardwright.runtime.saving import Saver

        self.job, self.folder = job, folder
        self.saver = Saver(RankGroup(job.mesh), folder / "ours", keep=2, increments=10**6, changes=job.changes)
        self.saver.preallocate(job.local_state)
        self.pending: Any = None

    def skip(self) -> None:
        return

    def save_increment(self) -> float:
        """An increment with the changed rows; the first checkpoint is full."""
        self.job.save_with(self.saver, {})
        return self.saver.pause_seconds[-1]

    def save_full(self) -> float:
        self.saver.force_full()
        return self.save_increment()

    def save_with_torch(self) -> float:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        start = time.perf_counter()
        if self.pending is not None:
            self.pending.result()
        shutil.rmtree(self.folder / "torch", ignore_errors=True)
        self.pending = async_save(dict(self.job.state().tensors), checkpoint_id=self.folder / "torch")
        return time.perf_counter() - start

    def wait(self) -> None:
        self.saver.wait()
        if self.pending is not None:
            self.pending.result()
            self.pending = None


def steps_per_second(outputs: Iterator[Any], seconds: float, mesh: Any) -> float:
    """Run for about `seconds`, the same number of steps on all ranks (one all-gather per ten steps)."""
    import torch

    from shardwright.runtime.rank_group import RankGroup

    group, num, start = RankGroup(mesh), 0, time.perf_counter()
    while True:
        for _ in range(10):
            next(outputs)
        num += 10
        is_over = torch.tensor([float(time.perf_counter() - start > seconds)])
        if bool(group.all_gather(is_over)[0]):
            return num / (time.perf_counter() - start)


def evict_files(folder: Path) -> list[Path]:
    """Evict the files of a folder from the page cache; returns them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return files


def read_files(folder: Path) -> None:
    memory = local()

    def block(position: tuple[Path, int]) -> None:
        if not hasattr(memory, "block"):
            memory.block = bytearray(READ_BYTES)
        with position[0].open("rb", buffering=0) as file:
            file.seek(position[1])
            file.readinto(memory.block)

    blocks = [
        (path, start) for path in folder.rglob("*.safetensors") for start in range(0, path.stat().st_size, READ_BYTES)
    ]
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(block, blocks))


def read_back(job: Any, sides: Sides, single: bool) -> dict[str, list[float]]:
    """Gigabytes a second of each way to read, in alternating rounds."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from shardwright.runtime.rank_group import RankGroup

    path = job.save(sides.folder / "whole")
    tensors = dict(job.state().tensors) if single else {}
    if single:
        save(tensors, checkpoint_id=sides.folder / "torch whole")
    readers: dict[str, tuple[Path, Callable[[], object]]] = {
        "ours": (path, lambda: job.load(path)),
        "only read": (path, lambda: read_files(path) if job.mesh.rank == 0 else None),
    }
    if single:
        torch_path = sides.folder / "torch whole"
        readers["torch"] = (torch_path, lambda: load(tensors, checkpoint_id=torch_path))
    speeds: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(READS):
        for name, (folder, read) in readers.items():
            bytes_ = sum(file.stat().st_size for file in evict_files(folder))
            RankGroup(job.mesh).barrier()
            start = time.perf_counter()
            read()
            RankGroup(job.mesh).barrier()
            speeds[name].append(bytes_ / 1e9 / (time.perf_counter() - start))
    return speeds


def run_sides(
    args: argparse.Namespace, job: Any, outputs: Iterator[Any], sides: Sides, starts: Mapping[str, Any]
) -> Any:
    """Steps a second, seconds that steps waited, and manifests, by side; `starts`: the method of each side."""
    from shardwright.checkpoint import step_directories

    rates: dict[str, list[float]] = {name: [] for name in starts}
    pauses: dict[str, list[float]] = {name: [] for name in starts}
    manifests: dict[str, list[Any]] = {name: [] for name in starts}
    for round_ in range(args.rounds):
        for name, start in starts.items():
            pause = start()
            rates[name].append(steps_per_second(outputs, args.seconds, job.mesh))
            sides.wait()
            if name in ("whole", "increment"):
                manifests[name].append(
                    step_directories.read_manifest(step_directories.list_checkpoints(sides.saver.root)[-1])
                )
            if pause is not None:
                pauses[name].append(pause)
        if job.mesh.rank == 0:
            print(f"round {round_ + 1} of {args.rounds}", file=sys.stderr, flush=True)
    return rates, pauses, manifests


def measure_increments(
    job: Any, outputs: Iterator[Any], sides: Sides, intervals: Sequence[int]
) -> dict[int, tuple[int, float]]:
    """Bytes of an increment, and seconds that steps waited for it, by the number of steps since the previous one."""
    from shardwright.checkpoint import step_directories

    increments = {}
    for num in intervals:
        sides.save_increment()
        sides.wait()
        for _ in range(num):
            next(outputs)
        pause = sides.save_increment()
        sides.wait()
        increments[num] = (
            step_directories.read_manifest(step_directories.list_checkpoints(sides.saver.root)[-1]).bytes_,
            pause,
        )
    return increments


def worker(args: argparse.Namespace) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    rows = int(args.gigabytes * 1e9 / TABLES / (4 * COLUMNS + 4))
    single = args.ranks == 1
    if single:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    samples = SAMPLES // args.ranks
    job = build_job(rows, samples)
    outputs = job.run(batches(rows, job.mesh.rank, samples))
    sides = Sides(job, Path(args.folder))
    steps_per_second(outputs, 2.0, job.mesh)
    starts: dict[str, Callable[[], float | None]] = {"none": sides.skip, "whole": sides.save_full}
    starts["increment"] = sides.save_increment
    if single:
        starts["torch async_save"] = sides.save_with_torch
    measurements = run_sides(args, job, outputs, sides, starts)
    sizes = measure_increments(job, outputs, sides, INTERVALS[:1] if args.smoke else INTERVALS)
    speeds = read_back(job, sides, single)
    if job.mesh.rank == 0:
        rates, pauses, manifests = measurements
        for line in result_lines(args, rates, pauses, manifests, sizes, speeds):
            print(json.dumps(line), flush=True)
    job.mesh.close()
    if single:
        dist.destroy_process_group()


def result_lines(
    args: argparse.Namespace, rates: Any, pauses: Any, manifests: Any, sizes: Any, speeds: Any
) -> Iterator[dict[str, Any]]:
    case = {"benchmark": "checkpoint", "ranks": args.ranks, "gigabytes": args.gigabytes}
    size = median(item.bytes_ for item in manifests["whole"])
    for name, values in rates.items():
        line = {**case, "side": name, "steps_s": _stats(values, 2)}
        if pauses[name]:
            pause = [1e3 * item for item in pauses[name]]
            lost = [(1 - item / none) * args.seconds for item, none in zip(values, rates["none"], strict=True)]
            line |= {"waited_ms": _stats(pause, 1), "waited_of_a_minute": round(median(pause) / 1e3 / MINUTE, 4)}
            line |= {"lost_s": _stats(lost, 2), "lost_of_a_minute": round(median(lost) / MINUTE, 4)}
        if manifests[name]:
            line["took_s"] = round(median(item.seconds for item in manifests[name]), 2)
            line["mb"] = round(median(item.bytes_ for item in manifests[name]) / 1e6, 1)
            line["of_whole"] = round(median(item.bytes_ for item in manifests[name]) / size, 3)
        yield line
    for num, (bytes_, pause) in sizes.items():
        line = {**case, "side": f"increment after {num} steps", "samples": num * SAMPLES, "mb": round(bytes_ / 1e6, 1)}
        yield line | {"of_whole": round(bytes_ / size, 3), "waited_ms": round(1e3 * pause, 1)}
    for name, values in speeds.items():
        ratio = [item / read for item, read in zip(values, speeds["only read"], strict=True)]
        yield {**case, "side": f"read back, {name}", "gb_s": _stats(values, 2), "of_only_read": _stats(ratio, 2)}


def _stats(values: list[float], digits: int) -> list[float]:
    """Median, minimum and maximum."""
    return [round(value, digits) for value in (median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--folder", default="runs/checkpoint-benchmark")
    parser.add_argument("--write", default="")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.gigabytes, args.rounds, args.seconds = 0.01, 1, 0.5
    if args.worker:
        worker(args)
        return
    options = [f"--ranks={args.ranks}", f"--gigabytes={args.gigabytes}", f"--rounds={args.rounds}"]
    options += [f"--seconds={args.seconds}", f"--folder={args.folder}", "--worker", *["--smoke"] * args.smoke]
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}", "--standalone"]
    command = [sys.executable, *(torchrun if args.ranks > 1 else ()), "-m", "benchmarks.checkpoint", *options]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    shutil.rmtree(args.folder, ignore_errors=True)
    if child.returncode:
        sys.exit(child.returncode)
    if args.write:
        results_file.write(args.write, "checkpoint", map(json.loads, lines))


if __name__ == "__main__":
    main()
