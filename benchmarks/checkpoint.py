"""What a checkpoint costs the steps beside it, how much of a table an increment is, and how fast a state is read back.

    python -m benchmarks.checkpoint [--ranks N] [--gigabytes G] [--rounds R] [--seconds S] [--folder DIR] [--write NAME]

A job with 8 tables of 64 columns under row-wise AdaGrad, G gigabytes with their state, ids by a power law (Zipf,
exponent 1.2), 2,048 samples of 80 ids a step. In turns, rounds alternated, S seconds of steps each: without a
checkpoint; with a whole one begun first; with an increment of what changed since; in one process also with torch's
distributed checkpoint (async_save of the same tensors). A JSON line per side: milliseconds that steps waited (median,
least, most), seconds it took beside them, seconds of steps lost by counting steps against the side without, its share
of a minute, megabytes, for increments their share of the whole, also after given numbers of steps. Then the state is
read back by the job, by torch's distributed checkpoint, and the same bytes are only read (16 MiB a call, four threads):
gigabytes a second, the files out of the page cache before each. CPU and disk of one machine; ranks share it.
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

    draw = torch.Generator().manual_seed(rank)
    names = tuple(f"f{at}" for at in range(TABLES))
    lengths = torch.full((TABLES, samples), BAG)
    while True:
        u = torch.rand(TABLES * samples * BAG, generator=draw, dtype=torch.float64)
        place = ((rows ** (1 - EXPONENT) - 1) * u + 1) ** (1 / (1 - EXPONENT)) - 1
        ids = (place.long().clamp(0, rows - 1) * 1_000_003) % rows  # the hottest do not lie side by side
        dense = torch.randn(samples, 13, generator=draw)
        yield Batch(Jagged(names, ids, lengths), dense, {"click": (dense[:, 0] > 0).float()})


def made(rows: int, samples: int) -> Any:
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
    """Each begins its checkpoint, if it has one, and says how long steps waited and how large it is."""

    def __init__(self, job: Any, folder: Path) -> None:
        from shardwright.runtime.rank_group import RankGroup
        from shardwright.runtime.saving import Saver

        self.job, self.folder = job, folder
        self.saver = Saver(RankGroup(job.mesh), folder / "ours", keep=2, increments=10**6, changes=job.changes)
        self.saver.preallocate(job.model, job.optimizer)
        self.under_way: Any = None

    def none(self) -> None:
        return

    def ours(self) -> float:
        """What has changed; all, where there is nothing before."""
        self.job.save_with(self.saver, {})
        return self.saver.pause_seconds[-1]

    def whole(self) -> float:
        self.saver.force_full()
        return self.ours()

    def torchs(self) -> float:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        start = time.perf_counter()
        if self.under_way is not None:
            self.under_way.result()
        shutil.rmtree(self.folder / "torch", ignore_errors=True)
        self.under_way = async_save(dict(self.job.state().tensors), checkpoint_id=self.folder / "torch")
        return time.perf_counter() - start

    def end(self) -> None:
        self.saver.wait()
        if self.under_way is not None:
            self.under_way.result()
            self.under_way = None


def steps_of(outputs: Iterator[Any], seconds: float, mesh: Any) -> float:
    """Steps a second; all ranks make as many."""
    import torch

    from shardwright.runtime.rank_group import RankGroup

    team, num, start = RankGroup(mesh), 0, time.perf_counter()
    while True:
        for _ in range(10):
            next(outputs)
        num += 10
        over = torch.tensor([float(time.perf_counter() - start > seconds)])
        if bool(team.all_gather(over)[0]):
            return num / (time.perf_counter() - start)


def out_of_memory(folder: Path) -> list[Path]:
    """The files of a folder, none of them in the page cache."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return files


def only_read(folder: Path) -> None:
    memory = local()

    def block(at: tuple[Path, int]) -> None:
        if not hasattr(memory, "block"):
            memory.block = bytearray(READ_BYTES)
        with at[0].open("rb", buffering=0) as file:
            file.seek(at[1])
            file.readinto(memory.block)

    blocks = [
        (path, start) for path in folder.rglob("*.safetensors") for start in range(0, path.stat().st_size, READ_BYTES)
    ]
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(block, blocks))


def read_back(job: Any, sides: Sides, alone: bool) -> dict[str, list[float]]:
    """Gigabytes a second of each way to read, in turns."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from shardwright.runtime.rank_group import RankGroup

    path = job.save(sides.folder / "whole")
    tensors = dict(job.state().tensors) if alone else {}
    if alone:
        save(tensors, checkpoint_id=sides.folder / "torch whole")
    ways: dict[str, tuple[Path, Callable[[], object]]] = {
        "ours": (path, lambda: job.load(path)),
        "only read": (path, lambda: only_read(path) if job.mesh.rank == 0 else None),
    }
    if alone:
        theirs = sides.folder / "torch whole"
        ways["torch"] = (theirs, lambda: load(tensors, checkpoint_id=theirs))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(READS):
        for name, (folder, read) in ways.items():
            bytes_ = sum(file.stat().st_size for file in out_of_memory(folder))
            RankGroup(job.mesh).barrier()
            start = time.perf_counter()
            read()
            RankGroup(job.mesh).barrier()
            found[name].append(bytes_ / 1e9 / (time.perf_counter() - start))
    return found


def in_turns(args: argparse.Namespace, job: Any, outputs: Iterator[Any], sides: Sides, turns: Mapping[str, Any]) -> Any:
    """Steps a second, seconds that steps waited, and manifests, by side."""
    from shardwright.checkpoint import step_directories

    rates: dict[str, list[float]] = {name: [] for name in turns}
    pauses: dict[str, list[float]] = {name: [] for name in turns}
    manifests: dict[str, list[Any]] = {name: [] for name in turns}
    for round_ in range(args.rounds):
        for name, begin in turns.items():
            pause = begin()
            rates[name].append(steps_of(outputs, args.seconds, job.mesh))
            sides.end()
            if name in ("whole", "increment"):
                manifests[name].append(
                    step_directories.read_manifest(step_directories.list_checkpoints(sides.saver.root)[-1])
                )
            if pause is not None:
                pauses[name].append(pause)
        if job.mesh.rank == 0:
            print(f"round {round_ + 1} of {args.rounds}", file=sys.stderr, flush=True)
    return rates, pauses, manifests


def by_interval(
    job: Any, outputs: Iterator[Any], sides: Sides, intervals: Sequence[int]
) -> dict[int, tuple[int, float]]:
    """Bytes of an increment, and seconds that steps waited for it, by the steps between it and the one before."""
    from shardwright.checkpoint import step_directories

    found = {}
    for num in intervals:
        sides.ours()
        sides.end()
        for _ in range(num):
            next(outputs)
        pause = sides.ours()
        sides.end()
        found[num] = (
            step_directories.read_manifest(step_directories.list_checkpoints(sides.saver.root)[-1]).bytes_,
            pause,
        )
    return found


def worker(args: argparse.Namespace) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    rows = int(args.gigabytes * 1e9 / TABLES / (4 * COLUMNS + 4))
    alone = args.ranks == 1
    if alone:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    samples = SAMPLES // args.ranks
    job = made(rows, samples)
    outputs = job.run(batches(rows, job.mesh.rank, samples))
    sides = Sides(job, Path(args.folder))
    steps_of(outputs, 2.0, job.mesh)
    turns: dict[str, Callable[[], float | None]] = {"none": sides.none, "whole": sides.whole, "increment": sides.ours}
    if alone:
        turns["torch async_save"] = sides.torchs
    figures = in_turns(args, job, outputs, sides, turns)
    sizes = by_interval(job, outputs, sides, INTERVALS[:1] if args.smoke else INTERVALS)
    speeds = read_back(job, sides, alone)
    if job.mesh.rank == 0:
        rates, pauses, manifests = figures
        for line in told(args, rates, pauses, manifests, sizes, speeds):
            print(json.dumps(line), flush=True)
    job.mesh.close()
    if alone:
        dist.destroy_process_group()


def told(
    args: argparse.Namespace, rates: Any, pauses: Any, manifests: Any, sizes: Any, speeds: Any
) -> Iterator[dict[str, Any]]:
    case = {"benchmark": "checkpoint", "ranks": args.ranks, "gigabytes": args.gigabytes}
    size = median(one.bytes_ for one in manifests["whole"])
    for name, found in rates.items():
        line = {**case, "side": name, "steps_s": _spread(found, 2)}
        if pauses[name]:
            pause = [1e3 * one for one in pauses[name]]
            lost = [(1 - one / none) * args.seconds for one, none in zip(found, rates["none"], strict=True)]
            line |= {"waited_ms": _spread(pause, 1), "waited_of_a_minute": round(median(pause) / 1e3 / MINUTE, 4)}
            line |= {"lost_s": _spread(lost, 2), "lost_of_a_minute": round(median(lost) / MINUTE, 4)}
        if manifests[name]:
            line["took_s"] = round(median(one.seconds for one in manifests[name]), 2)
            line["mb"] = round(median(one.bytes_ for one in manifests[name]) / 1e6, 1)
            line["of_whole"] = round(median(one.bytes_ for one in manifests[name]) / size, 3)
        yield line
    for num, (bytes_, pause) in sizes.items():
        line = {**case, "side": f"increment after {num} steps", "samples": num * SAMPLES, "mb": round(bytes_ / 1e6, 1)}
        yield line | {"of_whole": round(bytes_ / size, 3), "waited_ms": round(1e3 * pause, 1)}
    for name, found in speeds.items():
        ratio = [one / read for one, read in zip(found, speeds["only read"], strict=True)]
        yield {**case, "side": f"read back, {name}", "gb_s": _spread(found, 2), "of_only_read": _spread(ratio, 2)}


def _spread(found: list[float], digits: int) -> list[float]:
    """Median, least and most."""
    return [round(one, digits) for one in (median(found), min(found), max(found))]


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
    words = [f"--ranks={args.ranks}", f"--gigabytes={args.gigabytes}", f"--rounds={args.rounds}"]
    words += [f"--seconds={args.seconds}", f"--folder={args.folder}", "--worker", *["--smoke"] * args.smoke]
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}", "--standalone"]
    command = [sys.executable, *(torchrun if args.ranks > 1 else ()), "-m", "benchmarks.checkpoint", *words]
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
