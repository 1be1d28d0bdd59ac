"""A rank that dies, hangs elsewhere, or is cut off: all survivors report which rank, where and when, in time."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pool import free_port

from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape

SCRIPT = str(Path(__file__).parent / "lost.py")
WORLD = 3
pytestmark = pytest.mark.fault
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="a lab that stays up needs root and iproute2"
)


def run_ranks(mode: str, seconds: float) -> list[list[str]]:
    """Lines that each rank printed after "ready"."""
    variables = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, mode, str(seconds)],
            env=os.environ | variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        lines = [rank.communicate(timeout=90)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(by_rank[0] == "ready" for by_rank in lines), lines
    return [by_rank[1:] for by_rank in lines]


@pytest.mark.parametrize("mode", ["gone", "experts"])
def test_all_other_ranks_name_a_rank_that_dies(mode):
    for survivor in (lines := run_ranks(mode, 10))[0], lines[2]:
        seconds, _, error = survivor[0].partition(" ")
        assert error.startswith(
            "rank 1 has sent no heartbeat for 2 s, while this rank is in sum gradients of step 3"
        ), survivor
        assert float(seconds) < 30
    assert lines[1] == []


def test_all_other_ranks_name_a_rank_that_hangs_and_its_stage():
    for survivor in (lines := run_ranks("elsewhere", 4))[0], lines[2]:
        seconds, _, error = survivor[0].partition(" ")
        assert error.startswith("rank 1 is in look up of step 3, while this rank is in sum gradients of step 3"), (
            survivor
        )
        assert 3 < float(seconds) < 30


def run_in_lab(mode: str, seconds: float, rejoin_after: float | None) -> tuple[dict[int, str], bool]:
    """Run on two hosts and cut off the second; returns the last line of each rank, and whether the cut was made."""
    last_lines: dict[int, str] = {}
    ready, cut, finished = [], [], threading.Event()
    with Lab(Shape((Host(ranks=2), Host())), f"lost{os.getpid() % 100_000}") as lab:

        def on_line(rank: int, line: str) -> None:
            if line == "ready":
                ready.append(rank)
            else:
                last_lines[rank] = line

        def cut_and_rejoin() -> None:
            while len(ready) < 3:
                if finished.wait(0.05):
                    return
            time.sleep(0.5)
            lab.cut("u1")
            cut.append(True)
            if rejoin_after is not None:
                time.sleep(rejoin_after)
                lab.cut("u1", connected=True)

        thread = threading.Thread(target=cut_and_rejoin, daemon=True)
        thread.start()
        command = ["env", "TORCH_CPP_LOG_LEVEL=FATAL", sys.executable, SCRIPT, mode, str(seconds)]
        outcome = lab.run(command, on_line, timeout_seconds=90)
        finished.set()
        thread.join()
        assert outcome.rank is None, (outcome, last_lines)
    return last_lines, bool(cut)


@needs_root
def test_both_sides_report_a_host_that_is_cut_off():
    lines, cut = run_in_lab("cut", 4, None)
    assert cut
    for rank in (0, 1):
        assert "rank 2 has sent no heartbeat" in lines[rank], lines
    assert "rank 0 serves the job's store, which does not answer" in lines[2], lines
    assert all(float(line.split()[0]) < 30 and line.endswith("left") for line in lines.values()), lines


@needs_root
def test_a_job_survives_a_link_that_recovers_in_time():
    lines, cut = run_in_lab("back", 30, 5)
    assert cut and lines == {0: "whole", 1: "whole", 2: "whole"}
