"""A rank that dies, goes astray, or is cut off: every survivor is told who, where and when, in time."""

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


def told(mode: str, seconds: float) -> list[list[str]]:
    """What each rank printed after it was ready."""
    place = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, mode, str(seconds)],
            env=os.environ | place | {"RANK": str(rank)},
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
    assert all(one[0] == "ready" for one in lines), lines
    return [one[1:] for one in lines]


def test_a_rank_that_dies_is_named_by_all_others():
    for survivor in (lines := told("gone", 10))[0], lines[2]:
        seconds, _, what = survivor[0].partition(" ")
        assert what.startswith("rank 1 has not been heard of for 2 s, in sum gradients of step 3"), survivor
        assert float(seconds) < 30
    assert lines[1] == []


def test_a_rank_that_is_elsewhere_is_named_with_its_place():
    for survivor in (lines := told("elsewhere", 4))[0], lines[2]:
        seconds, _, what = survivor[0].partition(" ")
        assert what.startswith("rank 1 is elsewhere, in look up of step 3, in sum gradients of step 3"), survivor
        assert 3 < float(seconds) < 30


def in_the_lab(mode: str, seconds: float, rejoin_after: float | None) -> tuple[dict[int, str], bool]:
    """What each rank of two hosts said when the second host was cut off, and whether it was."""
    said: dict[int, str] = {}
    ready, cut, over = [], [], threading.Event()
    with Lab(Shape((Host(ranks=2), Host())), f"lost{os.getpid() % 100_000}") as lab:

        def say(rank: int, line: str) -> None:
            if line == "ready":
                ready.append(rank)
            else:
                said[rank] = line

        def work_on_the_link() -> None:
            while len(ready) < 3:
                if over.wait(0.05):
                    return
            time.sleep(0.5)
            lab.cut("u1")
            cut.append(True)
            if rejoin_after is not None:
                time.sleep(rejoin_after)
                lab.cut("u1", connected=True)

        worker = threading.Thread(target=work_on_the_link, daemon=True)
        worker.start()
        command = ["env", "TORCH_CPP_LOG_LEVEL=FATAL", sys.executable, SCRIPT, mode, str(seconds)]
        ended = lab.run(command, say, timeout_seconds=90)
        over.set()
        worker.join()
        assert ended.rank is None, (ended, said)
    return said, bool(cut)


@needs_root
def test_a_host_that_is_cut_off_is_named_and_told():
    said, cut = in_the_lab("cut", 4, None)
    assert cut
    for rank in (0, 1):
        assert "rank 2 has not been heard of" in said[rank], said
    assert "rank 0 keeps the job's store, which does not answer" in said[2], said
    assert all(float(line.split()[0]) < 30 and line.endswith("left") for line in said.values()), said


@needs_root
def test_a_link_that_comes_back_in_time_costs_only_time():
    said, cut = in_the_lab("back", 30, 5)
    assert cut and said == {0: "whole", 1: "whole", 2: "whole"}
