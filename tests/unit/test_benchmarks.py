"""The benchmarks' shared code: results files that record their commit, jobs whose death is noticed at once."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sources import PACKAGE

from benchmarks import recipes, results_file, sharding
from benchmarks.dependencies import ROOT, dependencies
from benchmarks.scripts import SCRIPTS
from benchmarks.turns import Asker, JobFailed
from shardwright.runtime.planning import read_plan_request


def test_a_results_file_names_its_commit_and_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(results_file, "FOLDER", tmp_path)
    path = results_file.write("neo-here", "neo", [{"benchmark": "neo", "ms": 1.5}])
    assert results_file.read(path) == [{"benchmark": "neo", "ms": 1.5}]
    taken = results_file.read_taken(path)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert taken["benchmark"] == "neo" and taken["commit"] == head.strip() and taken["processor"] and taken["cores"]


def in_full_repository() -> bool:
    words = ["git", "rev-parse", "--is-shallow-repository"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() == "false"


@pytest.mark.skipif(not in_full_repository(), reason="the history is not here")
@pytest.mark.parametrize("path", sorted(results_file.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_results_file_says_which_code_it_measured(path):
    taken = results_file.read_taken(path)
    assert taken["benchmark"] in SCRIPTS
    known = subprocess.run(["git", "cat-file", "-e", taken["commit"]], cwd=ROOT, capture_output=True, check=False)
    assert known.returncode == 0, f"{taken['commit']} is no commit of this repository"


def test_a_changed_dependency_makes_a_result_stale(tmp_path, monkeypatch):
    """In a separate repository: code that the benchmark imports counts; docstrings, its `main` and others do not."""
    for name, text in {
        "benchmarks/speed.py": f"from {PACKAGE} import used\n\n\ndef main():\n    print(used.f())\n",
        "shardwright/__init__.py": "",
        "shardwright/used.py": "def f():\n    return 1\n",
        "shardwright/other.py": "x = 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("benchmarks.dependencies.ROOT", tmp_path)
    monkeypatch.setattr(results_file, "ROOT", tmp_path)
    monkeypatch.setattr(results_file, "FOLDER", tmp_path / "results")
    (tmp_path / "results").mkdir()

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    results_file.write("speed-here", "speed", [])
    dependencies.cache_clear()
    assert results_file.stale() == {}
    (tmp_path / "shardwright/other.py").write_text("x = 2\n")
    (tmp_path / "shardwright/used.py").write_text('"""Prose."""\n\n\ndef f():\n    return 1  # one\n')
    (tmp_path / "benchmarks/speed.py").write_text(f"from {PACKAGE} import used\n\n\ndef main():\n    used.f()\n")
    assert results_file.stale() == {}
    (tmp_path / "shardwright/used.py").write_text("def f():\n    return 2\n")
    assert results_file.stale() == {"speed-here.json": ["shardwright/used.py"]}
    git("commit", "-qam", "two")
    assert results_file.stale() == {"speed-here.json": ["shardwright/used.py"]}
    path = tmp_path / "results/speed-here.json"
    path.write_text(path.read_text().replace(results_file.read_taken(path)["commit"], 40 * "1"))
    assert results_file.stale() == {"speed-here.json": ["(commit 1111111111 is not in this repository)"]}
    dependencies.cache_clear()


def test_a_benchmarks_dependencies_are_what_it_imports_anywhere():
    names = {path.relative_to(ROOT).as_posix() for path in dependencies("benchmarks.sharding")}
    assert {"benchmarks/turns.py", "shardwright/planner/reprice.py", "csrc/lookup.cpp"} <= names
    assert "benchmarks/neo.py" not in names


@pytest.mark.parametrize("before_ready", [True, False])
def test_a_job_that_dies_ends_its_benchmark_at_once(tmp_path, before_ready):
    """Its ranks ended in the lab: a wait for an answer fails at once, not after ten minutes."""

    def run(command: Any, say: Any) -> Any:
        if not before_ready:
            Asker(tmp_path, "ours")._told.put({})
            time.sleep(0.5)
        return SimpleNamespace(rank=1, status=3)

    lab: Any = SimpleNamespace(run=run)
    begun = time.monotonic()
    refused = pytest.raises(JobFailed, match='job "ours": rank 1 ended with status 3')
    with refused, sharding.job(lab, str(tmp_path), "ours", []) as asker:
        asker.turn("overlapped", 1, 1)
    assert time.monotonic() - begun < 20


def test_a_measurement_that_fails_ends_its_benchmark(tmp_path):
    lab: Any = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(rank=0, status=1))
    with pytest.raises(JobFailed, match="measure"):
        sharding.measure(lab, tmp_path / "cluster.toml")


def test_stale_is_listed_by_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--stale"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    num = len(list(results_file.FOLDER.glob("*.json")))
    assert done.returncode in (0, 1) and f"of {num} results files are out of date" in done.stdout, done.stderr


def test_labs_are_drawn_within_what_the_machine_can_hold():
    drawn = recipes.draw_labs(3, 50, cores=2)
    assert drawn == recipes.draw_labs(3, 50, cores=2) != recipes.draw_labs(4, 50, cores=2)
    assert {lab.hosts for lab in drawn} == {2, 3, 4}
    for lab in drawn:
        lab.shape.verify()
        assert lab.shape.num_ranks <= 4 and lab.cpu * lab.shape.num_ranks <= 1.8 and lab.cpu <= 0.6
        assert 100 <= int(lab.uplink.removesuffix("mbit")) <= 500


@pytest.mark.parametrize("recipe", ["wide-deep", "logistic"])
def test_a_rivals_plan_is_what_its_name_says(recipe):
    name = f"synthetic-{recipe}"
    sides = recipes.pins(name, 1024, Path("two-cores"), 2)
    rows, robin = (
        read_plan_request(name, ["train.batch_size=1024", *sides[side]], "two-cores").make_plan().plan.tables
        for side in ("all row-wise", "round robin")
    )
    assert all(sorted(rect.ranks for rect in table.rects) == [(0,), (1,)] for table in rows)
    assert [table.rects[0].ranks for table in robin] == [(at % 2,) for at in range(len(robin))]


def test_a_runs_prediction_is_compared_part_by_part(tmp_path):
    """A run of the product over two ranks: its step and parts, predicted and measured, under the same names."""
    words = ["train.steps=20", f"train.log_every={recipes.EVERY}", "train.eval_samples=0", "train.eval_every=0"]
    words += [
        "train.checkpoint_every=0",
        "ranks=2",
        "train.batch_size=512",
        f"run.directory={tmp_path}",
        "run.name=one",
    ]
    command = [sys.executable, "-m", "shardwright.cli", "train", "synthetic-logistic", "plan.cluster=two-cores", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = recipes.judge(tmp_path / "one")
    assert found["measured_ms"] > 0 and found["predicted_ms"] > 0 and len(found["halves_ms"]) == 2
    both = {name for name, (predicted, measured) in found["parts_ms"].items() if predicted and measured}
    assert {"forward", "backward", "lookup", "vectors", "gradients", "update"} <= both
    assert {"read", "metrics"} <= both, "what the training loop adds is predicted, too"
    assert "prepare" in (tmp_path / "one" / "predicted.json").read_text(), "the loader worker's"
    line = {"side": "planner", **found}
    judged = recipes.summary([line, {"rivals_over_planner": {"all row-wise": 1.2}, "floor": 0.01}, {"failed": "x"}], 1)
    assert judged["bias"] == found["off"] and judged["failed"] == 1 and judged["planner_is_fastest"] == "1 of 1"
