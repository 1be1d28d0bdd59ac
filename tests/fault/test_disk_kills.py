"""A process with rows on disk is killed at any moment: from its last checkpoint it continues to the bit."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from disk_worker import train

HERE = Path(__file__).parent
PATHS = [HERE, HERE.parent, HERE.parent / "unit", HERE.parent / "dist", HERE.parent.parent]


@pytest.mark.fault
@pytest.mark.parametrize("num_kills", (2, pytest.param(20, marks=pytest.mark.slow)))
def test_a_killed_process_continues_to_the_bit(num_kills, tmp_path):
    temporary, folder = tmp_path / "temporary", tmp_path / "checkpoints"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    generator, killed = random.Random(0), 0
    while not (folder / "final.pt").exists():
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "disk_worker", str(folder)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if killed < num_kills:
            for _ in range(generator.randint(1, 4)):
                process.stdout.readline()
            time.sleep(generator.random() * 0.05)
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.communicate()
    assert killed == num_kills
    final, wanted = torch.load(folder / "final.pt"), train(tmp_path / "memory", disk=False).state().tensors
    assert final.keys() == wanted.keys() and all(torch.equal(final[name], wanted[name]) for name in wanted)
    assert [*temporary.glob("shardwright-rows-*")] == []
    assert tempfile.gettempdir() != str(temporary)
