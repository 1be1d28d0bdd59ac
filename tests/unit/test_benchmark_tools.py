"""The benchmarks' shared code: results files record their commit; a job that dies fails its benchmark at once."""

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
from benchmarks.turns import JobFailed, TurnClient
from shardwright.runtime.planning import read_plan_request


def test_a_results_file_names_its_commit_and_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(results_file, "FOLDER", tmp_path)
    path = results_file.write("neo-here", "neo", [{"benchmark": "neo", "ms": 1.5}])
    assert results_file.read(path) == [{"benchmark": "neo", "ms": 1.5}]
    record = results_file.read_header(path)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert record["benchmark"] == "neo" and record["commit"] == head.strip() and record["processor"] and record["cores"]


def in_full_repository() -> bool:
    command = ["git", "rev-parse", "--is-shallow-repository"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() == "false"


@pytest.mark.skipif(not in_full_repository(), reason="the git history is incomplete")
@pytest.mark.parametrize("path", sorted(results_file.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_results_file_names_a_commit_of_this_repository(path):
    record = results_file.read_header(path)
    assert record["benchmark"] in SCRIPTS
    cat_file = subprocess.run(["git", "cat-file", "-e", record["commit"]], cwd=ROOT, capture_output=True, check=False)
    assert cat_file.returncode == 0, f"{record['commit']} is no commit of this repository"


def test_a_changed_dependency_makes_a_result_stale(tmp_path, monkeypatch):
    """In a separate repository: code that the benchmark imports counts; docstrings, `main` and other files do not."""
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

    def git(*args: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=tmp_path, check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    results_file.write("speed-here", "speed", [])
    dependencies.cache_clear()
    assert results_file.find_stale() == {}
    (tmp_path / "shardwright/other.py").write_text("x = 2\n")
    (tmp_path / "shardwright/used.py").write_text('"""Prose."""\n\n\ndef f():\n    return 1  # one\n')
    (tmp_path / "benchmarks/speed.py").write_text(f"from {PACKAGE} import used\n\n\ndef main():\n    used.f()\n")
    assert results_file.find_stale() == {}
    (tmp_path / "shardwright/used.py").write_text("def f():\n    return 2\n")
    assert results_file.find_stale() == {"speed-here.json": ["shardwright/used.py"]}
    git("commit", "-qam", "two")
    assert results_file.find_stale() == {"speed-here.json": ["shardwright/used.py"]}
    path = tmp_path / "results/speed-here.json"
    path.write_text(path.read_text().replace(results_file.read_header(path)["commit"], 40 * "1"))
    assert results_file.find_stale() == {"speed-here.json": ["(commit 1111111111 is not in this repository)"]}
    dependencies.cache_clear()


def test_a_benchmarks_dependencies_include_indirect_imports_and_compiled_code():
    names = {path.relative_to(ROOT).as_posix() for path in dependencies("benchmarks.sharding")}
    assert {"benchmarks/turns.py", "shardwright/planner/reprice.py", "csrc/lookup.cpp"} <= names
    assert "benchmarks/neo.py" not in names


@pytest.mark.parametrize("before_ready", [True, False])
def test_a_job_that_dies_ends_its_benchmark_at_once(tmp_path, before_ready):
    """When a rank of a job in the lab dies, a wait for its answer fails at once, not after ten minutes."""

    def run(command: Any, say: Any) -> Any:
        if not before_ready:
            TurnClient(tmp_path, "ours")._replies.write({})
            time.sleep(0.5)
        return SimpleNamespace(rank=1, status=3)

    lab: Any = SimpleNamespace(run=run)
    start = time.monotonic()
    failure = pytest.raises(JobFailed, match='job "ours": rank 1 ended with status 3')
    with failure, sharding.start_job(lab, str(tmp_path), "ours", []) as client:
        client.run_turn("overlapped", 1, 1)
    assert time.monotonic() - start < 20


def test_a_measurement_that_fails_ends_its_benchmark(tmp_path):
    lab: Any = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(rank=0, status=1))
    with pytest.raises(JobFailed, match="measure"):
        sharding.measure(lab, tmp_path / "cluster.toml")


def test_the_stale_option_lists_results_that_are_out_of_date():
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--stale"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    num = len(list(results_file.FOLDER.glob("*.json")))
    assert result.returncode in (0, 1) and f"of {num} results files are out of date" in result.stdout, result.stderr


def test_random_labs_fit_the_machine():
    labs = recipes.draw_labs(3, 50, cores=2)
    assert labs == recipes.draw_labs(3, 50, cores=2) != recipes.draw_labs(4, 50, cores=2)
    assert {lab.hosts for lab in labs} == {2, 3, 4}
    for lab in labs:
        lab.shape.verify()
        assert lab.shape.num_ranks <= 4 and lab.cpu * lab.shape.num_ranks <= 1.8 and lab.cpu <= 0.6
        assert 100 <= int(lab.uplink.removesuffix("mbit")) <= 500


@pytest.mark.parametrize("recipe", ["wide-deep", "logistic"])
def test_the_plans_compared_with_the_planners_are_row_wise_and_round_robin(recipe):
    name = f"synthetic-{recipe}"
    rival_pins = recipes.pins_by_side(name, 1024, Path("two-cores"), 2)
    row_wise, round_robin = (
        read_plan_request(name, ["train.batch_size=1024", *rival_pins[rival]], "two-cores").make_plan().plan.tables
        for rival in ("all row-wise", "round robin")
    )
    assert all(sorted(rect.ranks for rect in table.rects) == [(0,), (1,)] for table in row_wise)
    assert [table.rects[0].ranks for table in round_robin] == [(i % 2,) for i in range(len(round_robin))]


def test_the_predicted_parts_of_a_step_are_compared_with_the_measured_ones(tmp_path):
    """A training run over two ranks: its step and the parts of it, predicted and measured, under the same names."""
    args = ["train.steps=20", f"train.log_every={recipes.LOG_EVERY}", "train.eval_samples=0", "train.eval_every=0"]
    args += [
        "train.checkpoint_every=0",
        "ranks=2",
        "train.batch_size=512",
        f"run.directory={tmp_path}",
        "run.name=one",
    ]
    command = [sys.executable, "-m", "shardwright.cli", "train", "synthetic-logistic", "plan.cluster=two-cores", *args]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    result = recipes.compare_run(tmp_path / "one")
    assert result["measured_ms"] > 0 and result["predicted_ms"] > 0 and len(result["halves_ms"]) == 2
    common_parts = {name for name, (predicted_ms, ms) in result["parts_ms"].items() if predicted_ms and ms}
    assert {"forward", "backward", "lookup", "vectors", "gradients", "update"} <= common_parts
    assert {"read", "metrics"} <= common_parts, "the training loop's parts are predicted, too"
    assert "prepare" in (tmp_path / "one" / "predicted.json").read_text(), "the loader worker's part is predicted"
    line = {"side": "planner", **result}
    lines = [line, {"rivals_over_planner": {"all row-wise": 1.2}, "floor": 0.01}, {"failed": "x"}]
    summary = recipes.summarize(lines, 1)
    assert summary["bias"] == result["off"] and summary["failed"] == 1 and summary["planner_is_fastest"] == "1 of 1"
