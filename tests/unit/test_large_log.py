"""Click logs of any size are converted and counted in bounded memory."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pathlib import Path
from benchmarks import criteo_like
from shardwright.data.logs.click_log import open_log

path = Path(sys.argv[1], "log.tsv")
rows = criteo_like.write(path, int(sys.argv[2]))
source = open_log("criteo", str(path), cache=sys.argv[1])
assert source.size + source.evaluation().size == rows
statistics = source.training_statistics
all_distinct = statistics.counts["C26"]
assert abs(all_distinct.num_distinct / statistics.rows - 1) < 0.05, all_distinct.num_distinct
assert "torch" not in sys.modules
status = Path("/proc/self/status").read_text()  # ru_maxrss would include the parent process
print(int(status.partition("VmHWM:")[2].split()[0]) // 1024)
"""


@pytest.mark.parametrize("megabytes", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_memory_is_bounded(tmp_path, megabytes):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(megabytes << 20)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 1024, f"{result.stdout} MB resident"
