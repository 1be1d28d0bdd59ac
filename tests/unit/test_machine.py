"""The number of threads for the usable cores, and stolen or throttled processor time during a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.runtime.run import machine
from shardwright.runtime.run.machine import MachineMeter, MachineUsage, choose_threads, quota_cores


def cgroup(tmp_path: Path, files: dict[str, str], own: str) -> dict[str, Path]:
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    return {"root": tmp_path / "fs", "own": tmp_path / "own"}


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"a/b/cpu.max": "150000 100000\n", "a/cpu.max": "max 100000\n"}, "0::/a/b\n", 1.5),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, "0::/a/b\n", 0.5),
        ({"cpu/job/cpu.cfs_quota_us": "400000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, "3:cpu,cpuacct:/job\n", 4),
        ({"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, "3:cpu:/job\n", None),
        ({"cpu.max": "200000 100000\n"}, "0::/\n", 2),
        ({}, "0::/gone\n", None),
    ],
)
def test_quotas_of_all_parent_cgroups_count(tmp_path, files, own, cores):
    assert quota_cores(**cgroup(tmp_path, files, own)) == cores


def test_a_lab_sets_its_quota_in_the_environment(tmp_path, monkeypatch):
    """A lab sets an environment variable, since its network namespaces hide the cgroup's files."""
    monkeypatch.setenv("SHARDWRIGHT_LAB_CPU", "0.45")
    assert quota_cores(**cgroup(tmp_path, {}, "0::/shardwright/lab/r0\n")) == 0.45
    assert quota_cores(**cgroup(tmp_path, {"a/cpu.max": "25000 100000\n"}, "0::/a\n")) == 0.25


@pytest.mark.parametrize(
    ("affinity", "quota", "ranks", "workers", "threads"),
    [(16, None, 1, 1, 15), (16, 4.0, 1, 1, 3), (16, None, 4, 1, 3), (2, None, 2, 1, 1), (8, 0.4, 1, 0, 1)],
)
def test_threads_and_loader_workers_share_the_cores(monkeypatch, affinity, quota, ranks, workers, threads):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(affinity)))
    monkeypatch.setattr(machine, "quota_cores", lambda: quota)
    chosen = choose_threads(workers, ranks, omp_num_threads="")
    assert chosen.count == threads
    assert f"{threads} for computing" in str(chosen) and f"{affinity} cores" in str(chosen)
    assert ("quota" in str(chosen)) == (quota is not None)
    assert ("too few" in str(chosen)) == (ranks * (threads + workers) > min(affinity, quota or affinity))


def test_omp_num_threads_of_the_user_is_kept(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(16)))
    chosen = choose_threads(1, 1, omp_num_threads="5")
    assert chosen.count == 5 and chosen.is_set and "OMP_NUM_THREADS" in str(chosen)
    assert choose_threads(1, 1, omp_num_threads="4,2").count == 4
    unset = choose_threads(1, 1, omp_num_threads="many")
    assert unset.count == 15 and not unset.is_set and "OMP_NUM_THREADS" not in str(unset)


def test_windows_measure_stolen_and_throttled_time(monkeypatch):
    readings = [
        MachineUsage(10.0, stolen=1.0, throttled=0.0, load=1.0),
        MachineUsage(12.0, stolen=1.5, throttled=0.2, load=7.5),
        MachineUsage(14.0, stolen=1.5, throttled=0.2, load=2.5),
    ]
    monkeypatch.setattr(machine, "read_usage", lambda: readings.pop(0))
    meter = MachineMeter(expected_load=2.0)
    first, second = meter.measure_window(), meter.measure_window()
    assert first == pytest.approx({"stolen_share": 0.25, "throttled_share": 0.1, "load": 7.5, "expected_load": 2.0})
    assert second == pytest.approx({"stolen_share": 0.0, "throttled_share": 0.0, "load": 2.5, "expected_load": 2.0})


def test_usage_of_this_machine_is_read():
    usage = machine.read_usage()
    assert usage.stolen >= 0 and usage.throttled >= 0 and usage.load >= 0


SMALL = ("train.steps=4", "train.batch_size=64", "train.log_every=2", "train.eval_samples=0", "run.name=mine")


@pytest.mark.parametrize("num_threads", ["", "1"])
def test_a_run_prints_and_records_its_threads(tmp_path, num_threads):
    program = "import os, sys; os.environ.pop('OMP_NUM_THREADS', None); os.environ |= {NAME: VALUE}; "
    program += (
        "from shardwright.cli import main; sys.argv = ['shardwright', 'train', 'synthetic-dlrm', *sys.argv[1:]]; main()"
    )
    program = program.replace("{NAME: VALUE}", repr({"OMP_NUM_THREADS": num_threads} if num_threads else {}))
    command = [sys.executable, "-c", program, *SMALL]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    environment = json.loads((tmp_path / "runs/mine/environment.json").read_text())
    cores = environment["usable_cores"]
    assert environment["threads"] == (1 if num_threads else max(1, int(cores) - 1))
    assert environment["threads_why"] in result.stdout and ("OMP_NUM_THREADS" in result.stdout) == bool(num_threads)
    windows = [json.loads(line) for line in (tmp_path / "runs/mine/machine.jsonl").read_text().splitlines()]
    assert [(window["step"], window["samples"]) for window in windows] == [(2, 128), (4, 256)]
    assert set(windows[0]) > {"stolen_share", "throttled_share", "load", "expected_load"}
