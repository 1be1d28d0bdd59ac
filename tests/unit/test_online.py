"""Online runs: begun with another's state, without an end, publishing; what is refused; what a report shows of them."""

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


def settings(where: Path, *words: str) -> config.Settings:
    return config.load("synthetic-dlrm", [f"run.directory={where}", *SMALL, *words])


def trained(where: Path, *words: str) -> Path:
    return train.train(settings(where, *words)).path


def state(path: Path) -> dict[str, torch.Tensor]:
    found = Checkpoint(path)
    tensors = {name: found.read_tensor(name) for name in found.tensor_specs if not name.startswith("random")}
    found.close()
    return tensors


def test_a_run_begins_with_another_runs_state_and_its_own_settings(tmp_path):
    base = trained(tmp_path, "run.name=base", "train.steps=10", "train.checkpoint_every=0", "dense.lr=0.5")
    on = trained(tmp_path, "run.name=on", "train.steps=5", f"run.start={base}", "dense.lr=0.0", "tables.lr=1e-30")
    before, after = state(step_directories.resolve_checkpoint(base)), state(step_directories.resolve_checkpoint(on))
    assert step_directories.read_manifest(step_directories.resolve_checkpoint(on)).step == 5
    assert {name for name in before if not torch.equal(before[name], after[name])} <= {
        name for name in before if name.startswith(("optimizer.", "tables."))
    }, "weights stand still: the rates are the new run's"
    steps = {int(value) for name, value in after.items() if name.startswith("optimizer.") and name.endswith(".step")}
    assert steps == {15}, "Adam goes on counting"
    with pytest.raises(UserError, match="no checkpoint; name one like"):
        trained(tmp_path, "run.name=none", "train.steps=5", f"run.start={tmp_path / 'nothing'}")
    with pytest.raises(UserError, match="dense optimizer's kind is Adam, this job has SGD"):
        trained(tmp_path, "run.name=none", "train.steps=5", f"run.start={base}", "dense.kind=SGD", "dense.lr=0.1")
    assert not (tmp_path / "none").exists(), "and nothing is begun"


def test_publications_after_the_checkpoint_are_dropped_when_a_run_goes_on(tmp_path):
    keys = ("run.name=mine", "train.checkpoint_every=10", "train.publish_every=5", "train.keep_checkpoints=9")
    path = trained(tmp_path, *keys, "train.steps=20")
    assert [int(one.name[5:]) for one in step_directories.list_checkpoints(path / "published")] == [5, 10, 15, 20]
    step_directories.drop(step_directories.resolve_checkpoint(path))
    kept = step_directories.list_checkpoints(path / "published")[1]
    before = (kept / "manifest.json").read_text()
    trained(tmp_path, *keys, "run.resume=true", "train.steps=25")
    assert [int(one.name[5:]) for one in step_directories.list_checkpoints(path / "published")] == [5, 10, 15, 20, 25]
    assert (kept / "manifest.json").read_text() == before
    bases = [step_directories.read_manifest(one).base for one in step_directories.list_checkpoints(path / "published")]
    assert bases == ["", "step-00000005", "", "step-00000015", "step-00000020"], "whole again after the start"
    page = render(path).read_text()
    assert "Publications" in page and "step-00000025" in page


def test_a_run_without_an_end_goes_on_until_it_is_stopped(tmp_path):
    words = [sys.executable, "-m", "shardwright.cli", "train", "synthetic-dlrm", *SMALL, "train.steps=0"]
    keys = ["run.name=mine", "train.checkpoint_every=10", "train.progressive=true"]
    run = subprocess.Popen([*words, *keys], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        end = time.monotonic() + 60
        while len(step_directories.list_checkpoints(tmp_path / "runs/mine/checkpoint")) < 2:
            assert run.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 130
        assert "stopped by SIGINT after step" in run.stderr.read()
    finally:
        run.kill()
        run.stderr.close()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("train.steps=0", "train.decay=linear"), "train.steps=0 trains until stopped: drop train.decay"),
        (("train.steps=0", "train.epochs=2"), "train.steps=0 trains until stopped"),
        (
            ("train.publish_every=5", "train.patience=2", "train.eval_samples=10"),
            "restores the best state at the end",
        ),
    ],
)
def test_what_does_not_go_together_is_told(tmp_path, words, told):
    with pytest.raises(UserError, match=told):
        settings(tmp_path, *words)


def test_a_loop_of_ones_own_publishes(tmp_path):
    model = dlrm()
    job = build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    list(job.run([batch()]))
    export(model, job.save(tmp_path / "saved"), tmp_path / "out", example=batch())
    job.publish(tmp_path / "published")
    found = Predictor(tmp_path / "out", follow=tmp_path / "published")
    for step in range(2, 5):
        list(job.run([batch(seed=step)]))
        job.publish(tmp_path / "published")
        found.update()
        assert found.step == step
        assert torch.equal(found.scores(batch(seed=9)), next(iter(job.evaluate([batch(seed=9)]))).logits.sigmoid())
    found.close()
    assert [
        step_directories.read_manifest(one).base != ""
        for one in step_directories.list_checkpoints(tmp_path / "published")
    ] == [
        False,
        True,
        True,
        True,
    ]


def test_health_reports_the_age_of_what_is_served_and_fails_when_the_followed_folder_is_gone(tmp_path):
    model = dlrm()
    job = build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    list(job.run([batch()]))
    export(model, job.save(tmp_path / "saved"), tmp_path / "out", example=batch())
    job.publish(tmp_path / "published")
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "published")) as found:
        first = found.state()
        time.sleep(0.1)
        second = found.state()
        assert first["status"] == second["status"] == "ok"
        assert 0 <= first["age_seconds"] <= second["age_seconds"] - 0.1, "it grows while nothing is published"
        (tmp_path / "published").rename(tmp_path / "gone")
        reason = wait_for(lambda: str(found.state()["status"]), lambda status: status != "ok")
        assert "published: publications cannot be read (No such file or directory); answers stay at step 1" in reason
        endpoint = Endpoint(found)
        assert endpoint._health_response().code == 503
        endpoint.close()
        (tmp_path / "gone").rename(tmp_path / "published")
        assert wait_for(lambda: str(found.state()["status"]), lambda status: status == "ok")
        list(job.run([batch(seed=2)]))
        job.publish(tmp_path / "published")
        assert wait_for(lambda: found.step, lambda step: step == 2)
        assert found.state()["age_seconds"] < second["age_seconds"] + 60


def test_a_run_that_has_not_published_yet_may_be_followed_and_one_that_is_removed_is_an_error(tmp_path):
    model = dlrm()
    job = build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    list(job.run([batch()]))
    export(model, job.save(tmp_path / "saved"), tmp_path / "out", example=batch())
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "run")) as found:
        assert not found.update() and found.state()["status"] == "ok"
        (tmp_path / "run/config.toml").unlink()
        (tmp_path / "run").rmdir()
        with pytest.raises(UserError, match="publications cannot be read"):
            found.update()


def wait_for(read: Callable[[], Any], accept: Callable[[Any], bool], seconds: float = 60.0) -> Any:
    """The first value that is accepted."""
    end = time.monotonic() + seconds
    while not accept(value := read()):
        assert time.monotonic() < end, value
        time.sleep(0.05)
    return value


def test_an_online_run_is_told_by_what_it_scored_first(tmp_path):
    words = ("run.name=mine", "train.progressive=true", "train.steps=10")
    done = train.train(settings(tmp_path, *words))
    line = done.evaluation
    assert line["kind"] == "progressive" and line["step"] == 10
    assert summary(line, 5.0).startswith(f"progressive  NE {line['ne']:.4f}")
    page = render(done.path).read_text()
    assert "all samples up to step 10, each scored before training on it" in page


def test_help_tells_how(tmp_path):
    for command in ("export", "serve"):
        told = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160"}).output
        assert f"shardwright {command}" in told and "runs/mine" in told
