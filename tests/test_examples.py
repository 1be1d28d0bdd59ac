"""The scripts of examples/ run, learn, and are short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BASE_RATE_LOSS = 0.57  # always predicting the base rate of clicks of the synthetic stream


@pytest.fixture
def run(tmp_path):
    """run(name, *launcher) -> stdout of the example, in an empty directory."""

    def start(name: str, *launcher: str) -> str:
        command = [sys.executable, *launcher, str(ROOT / "examples" / f"{name}.py")]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return start


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60 and f"examples/{path.name}" in text and text.startswith('"""')


def test_readme_names_every_example():
    listed = re.findall(r"\(examples/(\w+)\.py\)", (ROOT / "README.md").read_text())
    assert sorted(listed) == [path.stem for path in EXAMPLES]


def test_first_run(run, tmp_path):
    out = run("first_run")
    best = re.search(r"best AUC (0\.\d+), at step (\d+); the run is in (\S+)", out)
    assert best and float(best[1]) > 0.65 and int(best[2]) in (50, 100, 150, 200)
    assert (tmp_path / best[3] / "metrics.jsonl").is_file() and re.search(r"NE 0\.\d{4}; [\d,]+ samples/s", out)


@pytest.mark.parametrize("name", ["own_model", "own_loop"])
def test_it_trains(run, name):
    losses = last_losses(run(name))
    assert len(losses) >= 3 and losses[-1] < BASE_RATE_LOSS


def test_serve(run):
    out = run("serve")
    assert "1024 scores; equal to the bit: True" in out and re.search(r"score of a sample: 0\.\d{4}, .* step 50", out)


def test_several_ranks(run):
    alone = run("several_ranks")
    both = run("several_ranks", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    (loss,), halves = (re.findall(r"rank \d of \d  loss (0\.\d{4})", out) for out in (alone, both))
    assert len(halves) == 2 and float(loss) < BASE_RATE_LOSS
    assert abs(sum(map(float, halves)) / 2 - float(loss)) < 1.5e-3, "two ranks are one process, except for rounding"
    assert "table user: table-wise" in both


def last_losses(out: str) -> list[float]:
    return [float(text) for text in re.findall(r"loss (\d\.\d{4})", out)]
