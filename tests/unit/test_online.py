"""Online runs: start from another run, no end, publications, errors, and reports."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from clicks import batch, dlrm
from typer.testing import CliRunner

from shardwright import config
from shardwright.checkpoint import step_directories
from shardwright.checkpoint.reading import Checkpoint
from shardwright.cli import app
from shardwright.errors import UserError
from shardwright.report.run_page import render
from shardwright.report.terminal import summary
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run import train
from shardwright.serving.endpoint import Endpoint
from shardwright.serving.export import export
from shardwright.serving.predictor import Predictor

SMALL = ("data.workers=0", "train.batch_size=64", "train.log_every=5", "train.eval_every=0", "train.eval_samples=0")


def settings(folder: Path, *overrides: str) -> config.Settings:
    return config.load("synthetic-dlrm", [f"run.directory={folder}", *SMALL, *overrides])


def train_run(folder: Path, *overrides: str) -> Path:
    return train.train(settings(folder, *overrides)).path


def published_steps(path: Path) -> list[int]:
    return [int(folder.name[5:]) for folder in step_directories.list_checkpoints(path / "published")]


def state(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(path)
    tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.tensor_specs if not name.startswith("random")}
    checkpoint.close()
    return tensors


def test_a_run_starts_with_another_runs_state_and_its_own_settings(tmp_path):
    base = train_run(tmp_path, "run.name=base", "train.steps=10", "train.checkpoint_every=0", "dense.lr=0.5")
    overrides = ("run.name=on", "train.steps=5", f"run.start={base}", "dense.lr=0.0", "tables.lr=1e-30")
    checkpoint = step_directories.resolve_checkpoint(train_run(tmp_path, *overrides))
    before, after = state(step_directories.resolve_checkpoint(base)), state(checkpoint)
    assert step_directories.read_manifest(checkpoint).step == 5
    names = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.startswith(("optimizer.", "tables.")) for name in names), "weights change with the new rates"
    steps = {int(value) for name, value in after.items() if name.startswith("optimizer.") and name.endswith(".step")}
    assert steps == {15}, "Adam's step count continues"
    with pytest.raises(UserError, match="no checkpoint; name one like"):
        train_run(tmp_path, "run.name=none", "train.steps=5", f"run.start={tmp_path / 'nothing'}")
    with pytest.raises(UserError, match="dense optimizer's kind is Adam, this job has SGD"):
        train_run(tmp_path, "run.name=none", "train.steps=5", f"run.start={base}", "dense.kind=SGD", "dense.lr=0.1")
    assert not (tmp_path / "none").exists(), "no run directory is created"


def test_resuming_drops_publications_after_the_checkpoint(tmp_path):
    keys = ("run.name=mine", "train.checkpoint_every=10", "train.publish_every=5", "train.keep_checkpoints=9")
    path = train_run(tmp_path, *keys, "train.steps=20")
    assert published_steps(path) == [5, 10, 15, 20]
    step_directories.drop(step_directories.resolve_checkpoint(path))
    kept_publication = step_directories.list_checkpoints(path / "published")[1]
    before = (kept_publication / "manifest.json").read_text()
    train_run(tmp_path, *keys, "run.resume=true", "train.steps=25")
    assert published_steps(path) == [5, 10, 15, 20, 25]
    assert (kept_publication / "manifest.json").read_text() == before
    publications = step_directories.list_checkpoints(path / "published")
    bases = [step_directories.read_manifest(publication).base for publication in publications]
    assert bases == ["", "step-00000005", "", "step-00000015", "step-00000020"], "full after the restart"
    page = render(path).read_text()
    assert "Publications" in page and "step-00000025" in page


def test_a_run_without_an_end_trains_until_stopped(tmp_path):
    command = [sys.executable, "-m", "shardwright.cli", "train", "synthetic-dlrm", *SMALL, "train.steps=0"]
    keys = ["run.name=mine", "train.checkpoint_every=10", "train.progressive=true"]
    run = subprocess.Popen([*command, *keys], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        deadline = time.monotonic() + 60
        while len(step_directories.list_checkpoints(tmp_path / "runs/mine/checkpoint")) < 2:
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 130
        assert "stopped by SIGINT after step" in run.stderr.read()
    finally:
        run.kill()
        run.stderr.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train.steps=0", "train.decay=linear"), "train.steps=0 trains until stopped: drop train.decay"),
        (("train.steps=0", "train.epochs=2"), "train.steps=0 trains until stopped"),
        (
            ("train.publish_every=5", "train.patience=2", "train.eval_samples=10"),
            "restores the best state at the end",
        ),
    ],
)
def test_conflicting_settings_are_errors(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        settings(tmp_path, *overrides)


def test_a_user_training_loop_publishes(tmp_path):
    model = dlrm()
    job = build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    list(job.run([batch()]))
    export(model, job.save(tmp_path / "saved"), tmp_path / "out", example=batch())
    job.publish(tmp_path / "published")
    predictor = Predictor(tmp_path / "out", follow=tmp_path / "published")
    for step in range(2, 5):
        list(job.run([batch(seed=step)]))
        job.publish(tmp_path / "published")
        predictor.update()
        assert predictor.step == step
        assert torch.equal(predictor.scores(batch(seed=9)), next(iter(job.evaluate([batch(seed=9)]))).logits.sigmoid())
    predictor.close()
    publications = step_directories.list_checkpoints(tmp_path / "published")
    has_base = [step_directories.read_manifest(publication).base != "" for publication in publications]
    assert has_base == [False, True, True, True]


def test_health_reports_the_model_age_and_fails_when_the_followed_folder_is_missing(tmp_path):
    model = dlrm()
    job = build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    list(job.run([batch()]))
    export(model, job.save(tmp_path / "saved"), tmp_path / "out", example=batch())
    job.publish(tmp_path / "published")
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "published")) as predictor:
        first = predictor.state()
        time.sleep(0.1)
        second = predictor.state()
        assert first["status"] == second["status"] == "ok"
        assert 0 <= first["age_seconds"] <= second["age_seconds"] - 0.1, "the age grows while nothing is published"
        (tmp_path / "published").rename(tmp_path / "gone")
        reason = wait_for(lambda: str(predictor.state()["status"]), lambda status: "cannot be read" in status)
        assert "published: publications cannot be read (No such file or directory); answers stay at step 1" in reason
        endpoint = Endpoint(predictor)
        assert endpoint._health_response().code == 503
        endpoint.close()
        (tmp_path / "gone").rename(tmp_path / "published")
        assert wait_for(lambda: str(predictor.state()["status"]), lambda status: status == "ok")
        list(job.run([batch(seed=2)]))
        job.publish(tmp_path / "published")
        assert wait_for(lambda: predictor.step, lambda step: step == 2)
        assert predictor.state()["age_seconds"] < second["age_seconds"] + 60


def test_a_publication_removed_while_it_is_read_is_named(tmp_path, monkeypatch):
    model = dlrm()
    job = build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    list(job.run([batch()]))
    export(model, job.save(tmp_path / "saved"), tmp_path / "out", example=batch())
    with closing(Predictor(tmp_path / "out")) as predictor:
        predictor._root = tmp_path / "published"
        removed = tmp_path / "published/step-00000002"
        monkeypatch.setattr(step_directories, "list_checkpoints", lambda root: [removed])
        (tmp_path / "published").mkdir()
        with pytest.raises(UserError, match=r"published: publications cannot be read \(No such file or directory\)"):
            predictor.update()


def test_following_a_run_before_its_first_publication_and_after_its_removal(tmp_path):
    model = dlrm()
    job = build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    list(job.run([batch()]))
    export(model, job.save(tmp_path / "saved"), tmp_path / "out", example=batch())
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "run")) as predictor:
        assert not predictor.update() and predictor.state()["status"] == "ok"
        (tmp_path / "run/config.toml").unlink()
        (tmp_path / "run").rmdir()
        with pytest.raises(UserError, match="publications cannot be read"):
            predictor.update()


def wait_for(read: Callable[[], Any], accept: Callable[[Any], bool], seconds: float = 60.0) -> Any:
    """Poll until `accept` is true; the accepted value."""
    deadline = time.monotonic() + seconds
    while not accept(value := read()):
        assert time.monotonic() < deadline, value
        time.sleep(0.05)
    return value


def test_online_runs_are_evaluated_progressively(tmp_path):
    overrides = ("run.name=mine", "train.progressive=true", "train.steps=10")
    result = train.train(settings(tmp_path, *overrides))
    line = result.evaluation
    assert line["kind"] == "progressive" and line["step"] == 10
    assert summary(line, 5.0).startswith(f"progressive  NE {line['ne']:.4f}")
    page = render(result.path).read_text()
    assert "all samples up to step 10, each scored before training on it" in page


def test_help_shows_examples(tmp_path):
    for command in ("export", "serve"):
        output = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160"}).output
        assert f"shardwright {command}" in output and "runs/mine" in output
