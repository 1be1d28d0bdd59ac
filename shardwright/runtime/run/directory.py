"""A run's directory: one writer at a time, every line and file complete or absent."""

import fcntl
import itertools
import json
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint.step_directories import checkpoint_path, drop, list_checkpoints
from shardwright.config import Settings, dump, get_default
from shardwright.data.features.transforms import Transforms
from shardwright.errors import UserError
from shardwright.kernels.matmul import library_in_use
from shardwright.measure.device import device_name
from shardwright.runtime.launch import launcher
from shardwright.runtime.run.machine import Threads
from shardwright.runtime.run.tensorboard import EventFileWriter
from shardwright.spec import files
from shardwright.spec.plan import Plan
from shardwright.spec.timeline import Timeline
from shardwright.spec.workload import Workload

PRIVATE_MODE = 0o700  # the mode of a run directory that only its owner may read

# Who trains, and how what it takes is prepared: a run may be continued with others.
CHANGEABLE_KEYS = (
    *("run.resume", "run.directory", "run.private", "ranks", "restarts", "plan.cluster", "train.overlap"),
    *("data.workers", "data.prefetch", "data.readers", "data.reader_keys"),
    *("train.publish_every", "train.keep_publications"),
)


class RunDirectory:
    """Made by `create` or found by `resume`; holds the lock until closed."""

    def __init__(self, path: Path, *, is_writer: bool = True) -> None:
        """Where several ranks train, one `writes`; the others only read."""
        self.path = path
        self.is_writer = is_writer
        self._events: EventFileWriter | None = None
        if not is_writer:
            return
        try:
            self._lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose another run.directory") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(
                f"{path}: another job is writing to this run; wait for it or choose another run.name"
            ) from None

    @classmethod
    def create(cls, settings: Settings) -> "RunDirectory":
        root = Path(settings.run.directory)
        try:
            root.mkdir(parents=True, exist_ok=True)
            return cls(_made(root, settings))
        except FileExistsError:
            raise UserError(
                f"{root / settings.run.name}: this run exists; continue it with run.resume=true "
                "or choose another run.name"
            ) from None
        except OSError as error:
            raise UserError(f"run.directory={root}: {error.strerror}; choose a directory you may write to") from None

    @classmethod
    def resume(cls, settings: Settings) -> "RunDirectory":
        if not settings.run.name:
            raise UserError("run.resume=true needs run.name=NAME, the run to continue")
        path = Path(settings.run.directory) / settings.run.name
        if not path.is_dir():
            raise UserError(f"{path}: no such run to resume; start it without run.resume")
        if settings.run.private:
            path.chmod(PRIVATE_MODE)
        return cls(path)

    @staticmethod
    def should_resume(settings: Settings) -> bool:
        """Whether the named run is there, or was asked for."""
        named = settings.run.name != ""
        return settings.run.resume or named and (Path(settings.run.directory) / settings.run.name).is_dir()

    @staticmethod
    def saved_launch_id(settings: Settings) -> str:
        """The launch that made the named run."""
        path = Path(settings.run.directory) / (settings.run.name or ".") / "environment.json"
        return json.loads(path.read_text()).get("launch", "") if path.is_file() else ""

    @staticmethod
    def saved_matmul_library(settings: Settings) -> str:
        """The library for matrix products of the named run; empty if there is none."""
        path = Path(settings.run.directory) / settings.run.name / "config.toml"
        if not settings.run.name or not path.is_file():
            return ""
        saved = tomllib.loads(path.read_text()).get("train", {}).get("products", "auto")
        return "" if saved == "auto" else saved

    def close(self) -> None:
        if self.is_writer:
            os.close(self._lock)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    @property
    def best(self) -> Path:
        """Where a run that may stop early keeps its best evaluated state."""
        return self.path / "best"

    @property
    def published(self) -> Path:
        """What predictors follow."""
        return self.path / "published"

    def save_transforms(self, transforms: Transforms | None) -> None:
        """How the values of a log became rows of tables: what is asked of the model later must become the same."""
        draft, final = self.path / ".transforms", self.path / "transforms"
        if not self.is_writer or transforms is None or final.exists():
            return
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        transforms.write(draft)
        draft.rename(final)

    def write_description(
        self,
        settings: Settings,
        workload: Workload,
        plan: Plan,
        predicted: Timeline | None = None,
        threads: Threads | None = None,
    ) -> None:
        """What the run is, written before its first step; a resumed run must be the same."""
        if not self.is_writer:
            return
        if (self.path / "config.toml").exists():
            _refuse_other_settings(self.path / "config.toml", settings)
        files.write_text(dump(settings), self.path / "config.toml")
        files.write_text(json.dumps(describe_environment(threads), indent=1), self.path / "environment.json")
        files.write(workload, self.path / "workload.json")
        files.write(plan, self.path / "plan.json")
        (self.path / "predicted.json").unlink(missing_ok=True)
        if predicted is not None:
            files.write_text(predicted.to_chrome(), self.path / "predicted.json")

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line of metrics in a single write."""
        if not self.is_writer:
            return
        with _writing(path := self.path / "metrics.jsonl"):
            _append(path, line)
            self._events = self._events or EventFileWriter(self.path / "tensorboard")
            self._events.add_scalars(line["step"], _figures(line))

    def log_machine(self, line: Mapping[str, Any]) -> None:
        """Append the processor time taken away in a window; not to metrics.jsonl, which a rerun reproduces."""
        if self.is_writer:
            with _writing(path := self.path / "machine.jsonl"):
                _append(path, line)

    def read_environment(self) -> dict[str, Any]:
        """The environment of the last process that trained this run; empty before the first."""
        path = self.path / "environment.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def read_lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """Every complete line of a file; a torn last line, as kill -9 leaves it, is not one."""
        path = self.path / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def rewind(self, step: int) -> None:
        """Forget what was said after a step, since it is about to be made again."""
        if not self.is_writer:
            return
        for path in list_checkpoints(self.published):
            if path > checkpoint_path(self.published, step):
                drop(path)
        kept = [line for line in self.read_lines() if line["step"] <= step and line["kind"] not in ("test", "end")]
        files.write_text("".join(json.dumps(line) + "\n" for line in kept), self.path / "metrics.jsonl")
        windows = [json.dumps(line) + "\n" for line in self.read_lines("machine.jsonl") if line["step"] <= step]
        files.write_text("".join(windows), self.path / "machine.jsonl")

    def last_checkpoint(self) -> Path | None:
        found = list_checkpoints(self.checkpoints)
        return found[-1] if found else None


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); continue with run.resume=true") from error


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def next_run_name(settings: Settings) -> str:
    """The next name that no run has, by the recipe's."""
    names = (f"{settings.recipe}-{number:03d}" for number in itertools.count(1))
    return next(name for name in names if not (Path(settings.run.directory) / name).exists())


def resume_hint(path: Path) -> str:
    """The command that resumes a run, for the end of a message."""
    return f"to continue:  shardwright train {path / 'config.toml'} run.resume=true"


def _figures(line: Mapping[str, Any]) -> dict[str, float]:
    """A line's numbers by kind/name, as TensorBoard groups them."""
    kind = line["kind"]
    return {f"{kind}/{name}": value for name, value in line.items() if name not in ("kind", "step")}


def describe_environment(threads: Threads | None = None) -> dict[str, Any]:
    """What the run ran on."""
    chosen = {"usable_cores": threads.usable_cores, "threads_why": threads.why} if threads else {}
    return {
        "shardwright": version("shardwright"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "products": library_in_use(),
        **chosen,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "command": " ".join(sys.argv),
        "launch": launcher.launch_id(),
    }


def _refuse_other_settings(saved: Path, settings: Settings) -> None:
    """What decides the numbers must be as it was; how long and how prepared may change."""
    decays = settings.train.decay != "none"  # the rate at a step depends on which step is the last
    free = (*CHANGEABLE_KEYS, *(() if decays else ("train.steps",)))
    before, now = _flat(tomllib.loads(saved.read_text())), _flat(tomllib.loads(dump(settings)))
    if before.get("train.products", "auto") == "auto":  # written by a version that chose by a measurement
        free = (*free, "train.products")
    for key in sorted((set(before) | set(now)) - set(free)):
        was = before.get(key, get_default(key))  # a version without the key behaved as its default now does
        if was != now.get(key):
            raise UserError(
                f"{saved}: this run has {key}={was!r}, the new settings have {now.get(key)!r}; "
                "resume with the same settings or start another run"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _made(root: Path, settings: Settings) -> Path:
    """A new directory for the run; without a name the next free number, which another run may take meanwhile."""
    mode = PRIVATE_MODE if settings.run.private else 0o777  # less the umask
    if settings.run.name:
        (root / settings.run.name).mkdir(mode)
        return root / settings.run.name
    for number in itertools.count(1):
        path = root / f"{settings.recipe}-{number:03d}"
        with suppress(FileExistsError):
            path.mkdir(mode)
            return path
    raise AssertionError
