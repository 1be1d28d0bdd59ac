"""Online training on a directory that grows: killed, resumed, over ranks, the figures of an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_kill import complaints, curve, last_step, verified

FILES, ROWS, STEPS = 8, 320, 38
RECIPE = """
[data]
kind = "stream"
path = "in"
schema = "schema.toml"
shuffle = false

[data.encoding]
rows = 50

[model]
kind = "logistic"

[tables]
kind = "adagrad"
lr = 0.1

[train]
batch_size = 64
log_every = 2
checkpoint_every = 6
eval_every = 0
eval_samples = 0
progressive = true
"""


def put(where: Path, *numbers: int) -> None:
    """Files of the stream, the same in every directory."""
    for number in numbers:
        draw = random.Random(number)
        lines = ["click,site,age"]
        for _ in range(ROWS):
            site = draw.randrange(40)
            lines.append(f"{int(draw.random() < 0.1 + site / 60)},s{site},{draw.randrange(9)}")
        draft = where / f"in/{number}.csv.tmp"
        draft.write_text("\n".join(lines) + "\n")
        draft.rename(where / f"in/{number}.csv")


def directory(where: Path) -> Path:
    (where / "in").mkdir()
    (where / "schema.toml").write_text('label = "click"\ncategories = ["site"]\nnumbers = ["age"]\n')
    (where / "online.toml").write_text(RECIPE)
    return where


def start(where: Path, *words: str) -> subprocess.Popen:
    command = ["-m", "shardwright.cli", "train", "online.toml", f"train.steps={STEPS}", "run.name=one", *words]
    with open(where / "complaints", "w") as complaints:
        return subprocess.Popen([sys.executable, *command], cwd=where, stdout=subprocess.DEVNULL, stderr=complaints)


def reached(job: subprocess.Popen, where: Path, step: int) -> None:
    while last_step(where / "runs/one") < step:
        assert job.poll() is None, complaints(where)
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    where = directory(tmp_path_factory.mktemp("undisturbed"))
    put(where, *range(FILES))
    job = start(where)
    assert job.wait(60) == 0, complaints(where)
    return curve(where / "runs/one")


def test_killed_and_resumed(tmp_path, undisturbed):
    """Killed beside files that come, interrupted while it waits for them; what was consumed is deleted."""
    where = directory(tmp_path)
    put(where, 0, 1, 2)
    job = start(where)
    reached(job, where, 8)
    os.kill(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    (where / "in/0.csv").unlink()
    put(where, 3)
    job = start(where, "run.resume=true", "data.workers=2")
    reached(job, where, 20)  # all that is there
    time.sleep(0.3)
    assert job.poll() is None and last_step(where / "runs/one") == 20
    job.send_signal(signal.SIGINT)
    assert job.wait(10) != 0 and "Traceback" not in complaints(where)
    verified(where / "runs/one")
    for number in (1, 2):
        (where / f"in/{number}.csv").unlink()
    put(where, *range(4, FILES))
    job = start(where, "run.resume=true", "data.workers=0")
    assert job.wait(60) == 0, complaints(where)
    assert curve(where / "runs/one") == undisturbed
    assert [line["samples"] for line in undisturbed if line["kind"] == "progressive"][-1] == 64 * STEPS


@pytest.mark.parametrize("progressive", [pytest.param("true", marks=pytest.mark.slow), "false"])
def test_two_ranks(tmp_path, undisturbed, progressive):
    """Without progressive scores stages run ahead: not beyond the last step, whose rows are the last."""
    where = directory(tmp_path)
    put(where, 0, 1)
    job = start(where, "ranks=2", f"train.progressive={progressive}", f"train.steps={FILES * ROWS // 64}")
    try:
        reached(job, where, 4)
        put(where, *range(2, FILES))
        assert job.wait(60) == 0, complaints(where)
    finally:
        job.terminate()
        job.wait()
    kinds = ("train", "progressive") if progressive == "true" else ("train",)
    expected = {(line["kind"], line["step"]): line for line in undisturbed if line["kind"] in kinds}
    found = {(line["kind"], line["step"]): line for line in curve(where / "runs/one")}
    for key, line in expected.items():
        for figure in ("loss", "ne", "samples"):
            if figure in line:
                assert found[key][figure] == pytest.approx(line[figure], abs=1e-4)
