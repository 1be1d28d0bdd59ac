"""Running out of memory is a one-line error: predicted from the plan, or when an allocation fails."""

import errno
import resource
import subprocess
import sys
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch
from clicks import batch, dlrm
from test_kill import stderr_of

from shardwright.config import TrainSettings
from shardwright.errors import UserError
from shardwright.measure.describe import describe
from shardwright.runtime import memory_check
from shardwright.runtime.planning import plan_for
from shardwright.spec.optimizer import Adam

pytestmark = pytest.mark.fault
HUGE = ("model.dim=2000000", "model.bottom=[8,2000000]", "model.top=[8]", "train.steps=4")


@pytest.mark.parametrize("ranks", [1, 2])
def test_tables_that_do_not_fit_are_refused_before_they_are_allocated(tmp_path, ranks):
    job = jobs.start(tmp_path, *HUGE, ranks=ranks)
    assert job.wait(jobs.SECONDS) == 2
    message = stderr_of(tmp_path)
    assert "Traceback" not in message and not (tmp_path / "runs").exists()
    assert "GB" in message or "TB" in message
    assert max(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, 0) < 8e9, "nothing large was allocated"
    if ranks == 1:
        (line,) = message.splitlines()
        assert line.startswith("shardwright: the tables need") and "are available" in line
        assert "weights" in line and "optimizer state" in line and "checkpoint" in line
        assert "hosts like this one" in line and "2000000" in line.replace(",", "")


def run_limited(folder: Path, gigabytes: int, *args: str) -> subprocess.CompletedProcess:
    """Run one process with a limited address space."""
    limit = ["prlimit", f"--as={gigabytes * 2**30}"]
    command = [*limit, sys.executable, "-m", "shardwright.cli", "train", "synthetic-dlrm", *jobs.KEYS, *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_a_batch_that_cannot_be_allocated_is_an_error_of_one_line(tmp_path):
    result = run_limited(tmp_path, 8, "train.batch_size=50000000", "train.steps=1", "data.workers=0")
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("shardwright: out of memory: ") and "requested" in line and "train.batch_size" in line


def test_a_loader_worker_out_of_memory_is_an_error_of_one_line(tmp_path):
    (tmp_path / "greedy.py").write_text(GREEDY_SOURCE)
    args = ("data.kind=greedy:Greedy", "data.last=5000", "data.shuffle=false", "train.steps=0", "data.workers=1")
    result = run_limited(tmp_path, 16, *args)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("shardwright: out of memory: 7.28 TiB requested")
    assert "tables, their optimizer state and the copy for checkpoints are" in line


GREEDY_SOURCE = """
from dataclasses import dataclass
import numpy as np
from shardwright.data.sources.synthetic import ClickStream

@dataclass(frozen=True)
class Greedy(ClickStream):
    last: int = 0

    def take(self, indices):
        if indices.max() > self.last:
            np.ones(10**12)
        return super().take(indices)
"""


def test_out_of_memory_errors_of_torch_numpy_and_the_system_are_explained():
    def allocate_in_torch() -> None:
        torch.empty(2**50)

    def allocate_in_numpy() -> None:
        np.empty(2**50)

    def raise_system_error() -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    cases = (allocate_in_torch, "4.5e+03 TB"), (allocate_in_numpy, "8.00 PiB"), (raise_system_error, "unknown")
    for allocate, requested in cases:
        with pytest.raises(UserError, match="out of memory") as error, memory_check.explain_out_of_memory():
            allocate()
        assert requested in str(error.value) and "\n" not in str(error.value)
    for other in (RuntimeError("the sizes differ"), OSError(errno.EPERM, "no"), KeyError("x")):
        with pytest.raises(type(other)) as raised, memory_check.explain_out_of_memory():
            raise other
        assert raised.value is other


def test_free_memory_of_a_container_is_at_most_its_limit(tmp_path, monkeypatch):
    group = tmp_path / "job"
    group.mkdir()
    for name, text in (("max", "1000000"), ("current", "900000"), ("stat", "anon 1\nactive_file 50000\n")):
        (group / f"memory.{name}").write_text(text)
    assert memory_check.cgroup_free_bytes(group) == 150_000
    (group / "memory.max").write_text("max\n")
    assert memory_check.cgroup_free_bytes(group) is None
    assert memory_check.cgroup_free_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("available_share", "message"),
    [
        (0.9, 'fit with allow=["tables.fp16"] or tables.kind=rowwise_adagrad or 2 hosts like this one'),
        (0.6, "fit with tables.kind=rowwise_adagrad or 2 hosts like this one"),
        (0.1, "fit with 10 hosts like this one"),
    ],
)
def test_the_error_says_which_settings_would_fit(monkeypatch, available_share, message):
    with torch.device("meta"):
        model = dlrm(Adam(lr=0.1))
    example = batch()
    workload, plan = describe(model, example), plan_for(model, example)
    need = 2 * 3 * (40 + 30) * 8 * 4  # weights and two moments, and a copy of each
    assert sum(memory_check.table_bytes_by_purpose(workload, plan, model, [0], TrainSettings()).values()) == need
    with_copies = TrainSettings(patience=2, publish_every=10)
    copies = 3 * (40 + 30) * 8 * 4 + (40 + 30) * 8 * 4  # of the best state, and of the weights without their state
    assert sum(memory_check.table_bytes_by_purpose(workload, plan, model, [0], with_copies).values()) == need + copies
    monkeypatch.setattr(memory_check, "available_bytes", lambda: int(available_share * need))
    with pytest.raises(UserError) as error:
        memory_check.check_fits(workload, plan, model, 0, TrainSettings())
    assert "the tables need 13.4 kB" in str(error.value) and message in str(error.value)
    monkeypatch.setattr(memory_check, "available_bytes", lambda: need)
    memory_check.check_fits(workload, plan, model, 0, TrainSettings())
