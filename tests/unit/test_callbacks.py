"""Callbacks and loggers of runs: what they receive, what happens when they fail, and the progress display."""

import io
import json
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

import shardwright as sw
from shardwright import config
from shardwright.report.terminal import ProgressDisplay
from shardwright.runtime.run.callback import CallbackList, RunResult, RunStart

SMALL = (
    "train.steps=8",
    "train.batch_size=64",
    "train.log_every=2",
    "train.eval_every=4",
    "train.eval_samples=128",
    "train.checkpoint_every=4",
    "data.workers=0",
)


class Recorder(sw.Callback):
    """Records every event."""

    def __init__(self, *, fails_in: str = "", at: int = 0) -> None:
        self.events: list[tuple] = []
        self.fails_in, self.at = fails_in, at

    def begin(self, run):
        self._record("begin", run)

    def note(self, text):
        self._record("note", text)

    def step(self, step, samples):
        self._record("step", step, samples)

    def line(self, line):
        self._record("line", dict(line))

    def end(self, result):
        self._record("end", result)

    def of(self, kind: str) -> list:
        return [event[1] if len(event) == 2 else event[1:] for event in self.events if event[0] == kind]

    def _record(self, kind, *values):
        self.events.append((kind, *values))
        if kind == self.fails_in and len(self.of(kind)) > self.at:
            raise RuntimeError("disk\nof the logger is full")


def settings(*overrides: str) -> config.Settings:
    return config.load("synthetic-dlrm", (*SMALL, *overrides))


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def metrics_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_callback_receives_the_run_in_order():
    recorder = Recorder()
    result = sw.train(settings(), callbacks=[recorder])
    (start,) = recorder.of("begin")
    assert (start.path, start.step, start.steps, start.samples_per_epoch) == (result.path, 0, 8, None)
    assert start.settings.run.name == "synthetic-dlrm-001"
    assert recorder.events[0][0] == "begin" and recorder.events[-1] == ("end", result)
    assert recorder.of("step") == [(step, 64 * step) for step in range(1, 9)]
    assert recorder.of("line") == metrics_lines(result.path)
    assert [line["kind"] for line in recorder.of("line")] == ["train", "train", "eval", "train", "train", "eval", "end"]
    assert any(note.startswith("threads: ") for note in recorder.of("note"))


def test_a_resumed_run_begins_at_its_checkpoint():
    sw.train(settings("run.name=mine"))
    recorder = Recorder()
    sw.train(settings("run.name=mine", "run.resume=true", "train.steps=12"), callbacks=[recorder])
    assert recorder.of("begin")[0].step == 8 and recorder.of("step")[0][0] == 9


def test_a_callback_with_one_method_is_enough():
    class Losses(sw.Callback):
        def __init__(self):
            self.losses = []

        def line(self, line):
            self.losses += [line["loss"]] if line["kind"] == "train" else []

    losses = Losses()
    sw.train(settings(), callbacks=[losses])
    assert len(losses.losses) == 4


@pytest.mark.parametrize(("method", "at", "after"), [("begin", 0, 0), ("note", 0, 0), ("step", 2, 3), ("line", 1, 4)])
def test_an_exception_of_a_callback_ends_the_run_with_one_line(method, at, after):
    before, failing = Recorder(), Recorder(fails_in=method, at=at)
    with pytest.raises(sw.UserError) as caught:
        sw.train(settings(), callbacks=[before, failing])
    message = str(caught.value)
    assert (
        f"callback Recorder: {method}() after step {after} raised RuntimeError: disk of the logger is full" in message
    )
    assert "(test_callbacks.py, line " in message and "\n" not in message
    assert "shardwright train runs/synthetic-dlrm-001/config.toml run.resume=true" in message
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert before.events[-1] == ("end", None), "the others learn that the run has failed"
    assert failing.of("end") == ([] if method == "begin" else [None]), "what has not begun is not ended"


def test_an_exception_in_end_of_a_failed_run_is_a_note_of_its_error():
    failing = Recorder(fails_in="end")
    with pytest.raises(ZeroDivisionError) as caught, CallbackList([failing]) as callbacks:
        callbacks.begin(RunStart(Path("runs/mine"), settings()))
        raise ZeroDivisionError
    assert "callback Recorder: end() after step 0 raised RuntimeError" in caught.value.__notes__[0]


def test_an_exception_in_end_of_a_finished_run_is_its_error():
    last = Recorder()
    with pytest.raises(sw.UserError, match=r"callback Recorder: end\(\) after step 8"):
        sw.train(settings(), callbacks=[Recorder(fails_in="end"), last])
    assert last.of("end") == [None]


@pytest.mark.parametrize(("callback", "what"), [(Recorder, "the class Recorder"), (print, "<built-in function print>")])
def test_what_is_no_callback_is_refused_before_anything_is_written(callback, what):
    with pytest.raises(sw.UserError, match=f"callbacks: {what} is no callback; give an instance"):
        sw.train(settings(), callbacks=[callback])
    assert not Path("runs").exists()


def test_a_callback_may_stop_the_run_with_a_signal():
    class Stop(sw.Callback):
        def step(self, step, samples):
            if step == 5:
                signal.raise_signal(signal.SIGTERM)

    result = sw.train(settings(), callbacks=[Stop()])
    assert result.stop_signal == signal.SIGTERM and 5 <= result.step < 8
    assert (result.path / f"checkpoint/step-{result.step:08d}/manifest.json").exists()


def test_loggers_are_tensorboard_unless_the_recipe_says_otherwise():
    assert list((sw.train(settings()).path / "tensorboard").glob("events.out.tfevents.*"))
    assert not (sw.train(settings("run.loggers=[]")).path / "tensorboard").exists()


def test_a_logger_of_the_user(monkeypatch):
    Path("own_logger.py").write_text(
        "import json, shardwright as sw\n"
        "class Logger(sw.Callback):\n"
        "    def begin(self, run):\n"
        "        self.path = run.path / 'own.jsonl'\n"
        "    def line(self, line):\n"
        "        with self.path.open('a') as file:\n"
        "            file.write(json.dumps(line) + '\\n')\n"
    )
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), *sys.path])
    path = sw.train(settings('run.loggers=["own_logger:Logger"]')).path
    assert (path / "own.jsonl").read_text() == (path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        ('["wandv"]', 'run.loggers="wandv" is unknown; did you mean "wandb"?'),
        ('["tensorboard","tensorboard"]', 'run.loggers has "tensorboard" twice'),
        ('["json:dumps"]', "missing 1 required positional argument"),
        ('["json:nothing"]', "module 'json' has no attribute 'nothing'"),
        ('["string:digits"]', "\"string:digits\" is '0123456789'; wanted a class or function without arguments"),
        ('["collections:Counter"]', '"collections:Counter" makes a Counter; wanted a shardwright.Callback'),
        ('"wandb"', 'key "run.loggers" is'),
    ],
)
def test_unusable_loggers_are_refused_before_anything_is_written(loggers, message):
    with pytest.raises(sw.UserError) as caught:
        sw.train(settings(f"run.loggers={loggers}"))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("runs").exists()


def test_wandb_without_its_package_is_refused_before_anything_is_written(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # its import fails
    with pytest.raises(sw.UserError) as caught:
        sw.train(settings('run.loggers=["wandb"]'))
    assert str(caught.value) == (
        "run.loggers has wandb, but the package wandb is not installed: pip install shardwright[wandb]"
    )
    assert not Path("runs").exists()


class FakeWandb(ModuleType):
    """Records the calls that the package wandb would get."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple] = []

    def init(self, **options) -> SimpleNamespace:
        self.calls.append(("init", options))
        return SimpleNamespace(
            id=options["id"] or "abc123",
            define_metric=lambda *args, **options: self.calls.append(("define_metric", *args, options)),
            log=lambda values: self.calls.append(("log", values)),
            finish=lambda exit_code: self.calls.append(("finish", exit_code)),
        )

    def of(self, kind: str) -> list:
        return [call[1] for call in self.calls if call[0] == kind]


def test_wandb_gets_settings_and_lines_and_continues_its_run(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    overrides = ("run.name=mine", 'run.loggers=["tensorboard","wandb"]')
    path = sw.train(settings(*overrides)).path
    (options,) = fake.of("init")
    assert (options["name"], options["id"], options["dir"]) == ("mine", None, str(path))
    assert options["config"]["train"]["batch_size"] == 64 and json.dumps(options["config"])
    lines = metrics_lines(path)
    assert [values["step"] for values in fake.of("log")] == [line["step"] for line in lines]
    assert fake.of("log")[0]["train/loss"] == lines[0]["loss"] and "train/kind" not in fake.of("log")[0]
    assert fake.calls[1:3] == [("define_metric", "step", {}), ("define_metric", "*", {"step_metric": "step"})]
    assert fake.of("finish") == [0] and list((path / "tensorboard").iterdir())
    sw.train(settings(*overrides, "run.resume=true", "train.steps=12"))
    assert fake.of("init")[1]["id"] == "abc123" and fake.of("init")[1]["resume"] == "allow"


def test_wandb_learns_that_a_run_has_failed(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(sw.UserError, match=r"step\(\) after step 1"):
        sw.train(settings('run.loggers=["wandb"]'), callbacks=[Recorder(fails_in="step")])
    assert fake.of("finish") == [1]


def shown(*, is_terminal: bool, overrides: tuple[str, ...], size: int | None, first: int = 0) -> str:
    """What the display prints of a run of 100 steps of a second each, up to step 50."""
    now = [100.0]
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=120, color_system=None)
    with ProgressDisplay(console, clock=lambda: now[0]) as display:
        display.begin(RunStart(Path("runs/mine"), settings("train.steps=100", *overrides), first, size))
        for step in range(first + 1, 51):
            now[0] += 1
            display.step(step, 64 * step)
            if step % 25 == 0:
                line = {"step": step, "samples": 64 * step, "loss": 0.5, "auc": 0.75, "ne": 0.9}
                display.line({"kind": "train", "samples_per_second": 1234.5, **line})
        display.step(50, 64 * 50)
        display.line({"kind": "eval", "step": 50, "samples": 64 * 50, "loss": 0.25, "auc": 0.8})
        display.line({"kind": "end", "step": 50, "samples": 64 * 50})
        display.end(RunResult(Path("runs/mine"), {}, 1234.5))
    return output.getvalue()


def test_lines_of_a_run_that_is_not_on_a_terminal():
    lines = shown(is_terminal=False, overrides=("train.epochs=3",), size=2000).splitlines()
    assert lines[:4] == [
        "run     runs/mine",
        "step     25/100  train  loss 0.5000  NE 0.9000  AUC 0.7500  1,234 samples/s  epoch 1/3  0:01:15 left",
        "step     50/100  train  loss 0.5000  NE 0.9000  AUC 0.7500  1,234 samples/s  epoch 2/3  0:00:50 left",
        "step     50/100  eval   loss 0.2500  AUC 0.8000",
    ]
    assert not any(lines[4:])


def test_lines_of_a_source_without_an_end_have_no_epoch():
    assert "epoch" not in shown(is_terminal=False, overrides=(), size=None)


def test_lines_of_a_run_without_a_last_step_have_no_time_left():
    text = shown(is_terminal=False, overrides=("train.steps=0",), size=1000)
    assert "left" not in text and "step     25  train" in text and "epoch 2  " not in text and "epoch 2" in text


def test_epochs_of_a_run_that_is_given_in_steps():
    assert "epoch 2/3" in shown(is_terminal=False, overrides=(), size=3200 - 64)  # 6400 samples are 2.04 epochs


def test_the_time_left_of_a_resumed_run_counts_its_own_steps():
    lines = shown(is_terminal=False, overrides=(), size=None, first=40).splitlines()
    assert lines[1].endswith("0:00:50 left"), "10 steps in 10 s"


def test_the_bar_of_a_terminal():
    text = shown(is_terminal=True, overrides=("train.epochs=3",), size=2000)
    bar = text.splitlines()[-2]
    for part in ("epoch 2/3", " 50/100 ", "1,234 samples/s", "loss 0.5000", "AUC 0.7500", "0:00:50 left"):
        assert part in bar, bar
    assert "step     50/100  eval   loss 0.2500  AUC 0.8000" in text and "train  loss" not in text


def test_the_bar_fits_a_narrow_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with ProgressDisplay(console, clock=lambda: 0.0) as display:
        display.begin(RunStart(Path("runs/mine"), settings("train.steps=9000"), 0, None))
        display.line({"kind": "train", "step": 1, "samples": 9, "loss": 0.5, "auc": 0.7, "samples_per_second": 56789.0})
        display.step(5000, 9)
    bar = console.file.getvalue().splitlines()[-2]
    assert "5000/9000" in bar and "56,789 samples/s  loss 0.5000  AUC 0.7000  0:00:00 left" in bar, bar
