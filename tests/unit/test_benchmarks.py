"""The benchmarks' own machinery: results files that know their commit, jobs whose death is heard at once."""

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sources import PACKAGE

from benchmarks import results_file, sharding
from benchmarks.dependencies import ROOT, dependencies
from benchmarks.scripts import SCRIPTS
from benchmarks.turns import Asker, JobFailed


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
    """In a repository of its own: code that the benchmark imports counts; prose, its command line and others do not."""
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
    dependencies.cache_clear()


def test_a_benchmarks_dependencies_are_what_it_imports_anywhere():
    names = {path.relative_to(ROOT).as_posix() for path in dependencies("benchmarks.sharding")}
    assert {"benchmarks/turns.py", "shardwright/planner/written.py", "csrc/lookup.cpp"} <= names
    assert "benchmarks/neo.py" not in names


@pytest.mark.parametrize("before_ready", [True, False])
def test_a_job_that_dies_ends_its_benchmark_at_once(tmp_path, before_ready):
    """Its ranks ended in the lab: whoever waits for an answer hears of it, not after ten minutes."""

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
