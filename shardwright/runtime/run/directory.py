"""The run directory: one writer at a time, every line and file complete or absent."""

import fcntl
import itertools
import json
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint.step_directories import checkpoint_path, drop, list_checkpoints
from shardwright.config import Settings, dump, get_default
from shardwright.config.servers import ServerSettings
from shardwright.data.features.transforms import Transforms
from shardwright.errors import UserError
from shardwright.kernels.matmul import library_in_use
from shardwright.measure.device import device_name
from shardwright.runtime.launch import launcher
from shardwright.runtime.run.machine import Threads
from shardwright.spec import files
from shardwright.spec.cache_record import CACHES_FILE, COPIES_FILE, GROWTH_FILE, CacheWindow, CopyWindow, GrowthWindow
from shardwright.spec.plan import Plan
from shardwright.spec.routing import ROUTING_FILE, RoutedRows
from shardwright.spec.traffic import PREDICTED_FILE, TRAFFIC_FILE, RunPrediction, TrafficWindow
from shardwright.spec.workload import Workload

Record = RoutedRows | CacheWindow | GrowthWindow | CopyWindow | TrafficWindow
RECORD_FILES = (
    (RoutedRows, ROUTING_FILE),
    (CacheWindow, CACHES_FILE),
    (GrowthWindow, GROWTH_FILE),
    (CopyWindow, COPIES_FILE),
    (TrafficWindow, TRAFFIC_FILE),
)
CHECKPOINTS_FILE = "checkpoints.json"  # names the checkpoints with the best and the last state
PRIVATE_MODE = 0o700  # mode of a run directory that only its owner may read

# Where the run trains and how its input is prepared: a resumed run may change these keys.
CHANGEABLE_KEYS = (
    *("run.resume", "run.directory", "run.device", "run.private", "run.loggers", "ranks", "restarts", "train.overlap"),
    *("plan.cluster", "plan.memory", "plan.hits", "plan.balance", "plan.dense", "plan.pipeline", "plan.micro_batches"),
    *("plan.experts", "plan.expert_groups", "plan.expert_copies", "plan.expert_exchange", "plan.routing"),
    *("data.workers", "data.prefetch", "data.readers", "data.reader_keys"),
    *("train.publish_every", "train.keep_publications"),
    *(f"servers.{name}" for name in ServerSettings.model_fields),
)


class RunDirectory:
    """A run directory, opened by `create` or `resume`; the writer holds its lock until closed."""

    def __init__(self, path: Path, *, is_writer: bool = True) -> None:
        """With several ranks only the first is the writer; the others read."""
        self.path = path
        self.is_writer = is_writer
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
        """Make the directory of a new run; an existing run of this name is an error."""
        root = Path(settings.run.directory)
        try:
            root.mkdir(parents=True, exist_ok=True)
            return cls(_make_directory(root, settings))
        except FileExistsError:
            raise UserError(
                f"{root / settings.run.name}: this run exists; continue it with run.resume=true "
                "or choose another run.name"
            ) from None
        except OSError as error:
            raise UserError(f"run.directory={root}: {error.strerror}; choose a directory you may write to") from None

    @classmethod
    def resume(cls, settings: Settings) -> "RunDirectory":
        """Open the directory of the run named `run.name`."""
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
        """Whether `run.resume` is set or the named run exists."""
        has_name = settings.run.name != ""
        return settings.run.resume or has_name and (Path(settings.run.directory) / settings.run.name).is_dir()

    @staticmethod
    def saved_launch_id(settings: Settings) -> str:
        """Id of the launch that created the named run; empty if there is none."""
        path = Path(settings.run.directory) / (settings.run.name or ".") / "environment.json"
        return json.loads(path.read_text()).get("launch", "") if path.is_file() else ""

    @staticmethod
    def saved_matmul_library(settings: Settings) -> str:
        """The matrix product library that the named run uses; empty if there is none."""
        path = Path(settings.run.directory) / settings.run.name / "config.toml"
        if not settings.run.name or not path.is_file():
            return ""
        saved = tomllib.loads(path.read_text()).get("train", {}).get("products", "auto")
        return "" if saved == "auto" else saved

    def close(self) -> None:
        if self.is_writer:
            os.close(self._lock)

    def remove_if_undescribed(self) -> None:
        """Remove the directory of a run that has failed before `write_description`."""
        if self.is_writer and not (self.path / "config.toml").exists():
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    @property
    def best(self) -> Path:
        """Checkpoints with the best evaluation, for early stopping."""
        return self.path / "best"

    @property
    def published(self) -> Path:
        """Publications, which predictors follow."""
        return self.path / "published"

    def save_transforms(self, transforms: Transforms | None) -> None:
        """Save the transforms from click log values to table rows; prediction requests need the same."""
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
        predicted: RunPrediction | None = None,
        threads: Threads | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Write settings, environment, workload and plan before the first step.

        If the run is resumed, settings that change its results are an error.
        """
        if not self.is_writer:
            return
        if (self.path / "config.toml").exists():
            _check_same_settings(self.path / "config.toml", settings)
        files.write_text(dump(settings), self.path / "config.toml")
        files.write_text(json.dumps(describe_environment(threads, device), indent=1), self.path / "environment.json")
        files.write(workload, self.path / "workload.json")
        files.write(plan, self.path / "plan.json")
        for name in ("predicted.json", PREDICTED_FILE):
            (self.path / name).unlink(missing_ok=True)
        if predicted is not None:
            files.write_text(predicted.timeline.to_chrome(), self.path / "predicted.json")
            files.write(predicted.steps, self.path / PREDICTED_FILE)

    def write(self, name: str, value: object) -> None:
        """Write a value of spec as a file of this directory."""
        if self.is_writer:
            files.write(value, self.path / name)

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line of metrics to metrics.jsonl, in a single write."""
        if self.is_writer:
            with explain_write_errors(path := self.path / "metrics.jsonl"):
                _append(path, line)

    def log_machine(self, line: Mapping[str, Any]) -> None:
        """Append the stolen and throttled processor time of a window to machine.jsonl.

        It is not in metrics.jsonl, which a rerun reproduces.
        """
        if self.is_writer:
            with explain_write_errors(path := self.path / "machine.jsonl"):
                _append(path, line)

    def log_records(self, records: Sequence[Record]) -> None:
        """Append records to the files of their kinds, each in a single write."""
        for kind, name in RECORD_FILES if self.is_writer else ():
            if own := [record for record in records if isinstance(record, kind)]:
                with explain_write_errors(path := self.path / name), path.open("a") as lines:
                    lines.write("".join(record.to_line() for record in own))

    def read_environment(self) -> dict[str, Any]:
        """The environment of the last process that trained this run; empty before the first."""
        path = self.path / "environment.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def read_lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """Read every complete line of a file; an incomplete last line, as kill -9 leaves it, is skipped."""
        return [json.loads(line) for line in _complete_lines(self.path / name)]

    def rewind(self, step: int) -> None:
        """Delete what was written after a step, since the run repeats the steps that follow."""
        if not self.is_writer:
            return
        for path in list_checkpoints(self.published):
            if path > checkpoint_path(self.published, step):
                drop(path)
        for path in (
            self.path / name for name in ("metrics.jsonl", "machine.jsonl", *(name for _, name in RECORD_FILES))
        ):
            if path.name in ("metrics.jsonl", "machine.jsonl") or path.exists():
                lines = [text for text in _complete_lines(path) if _is_kept(json.loads(text), step)]
                files.write_text("".join(lines), path)

    def last_step(self) -> int:
        """The step of the last checkpoint; 0: there is none."""
        checkpoint = self.last_checkpoint()
        return int(checkpoint.name.removeprefix("step-")) if checkpoint else 0

    def last_checkpoint(self) -> Path | None:
        checkpoints = list_checkpoints(self.checkpoints)
        return checkpoints[-1] if checkpoints else None


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into an error that names the file and how to continue."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); continue with run.resume=true") from error


def _complete_lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _is_kept(line: Mapping[str, Any], step: int) -> bool:
    """Whether a line is not written again by a run that continues after a step."""
    return line["step"] <= step and line.get("kind") not in ("test", "end")


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def next_run_name(settings: Settings) -> str:
    """The recipe's name with the first number that no run has."""
    names = (f"{settings.recipe}-{number:03d}" for number in itertools.count(1))
    return next(name for name in names if not (Path(settings.run.directory) / name).exists())


def resume_hint(path: Path) -> str:
    """The command that resumes a run, to append to a message."""
    return f"to continue:  shardwright train {path / 'config.toml'} run.resume=true"


def describe_environment(threads: Threads | None = None, device: torch.device | None = None) -> dict[str, Any]:
    """Software versions, hardware, threads and command of this process; `device`: None: the CPU."""
    device = device or torch.device("cpu")
    thread_fields = {"usable_cores": threads.usable_cores, "threads_why": threads.why} if threads else {}
    return {
        "shardwright": version("shardwright"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "products": library_in_use(),
        **thread_fields,
        "device": device_name(device) if device.type == "cuda" else "cpu",
        "device_type": device.type,
        "command": " ".join(sys.argv),
        "launch": launcher.launch_id(),
    }


def _check_same_settings(saved: Path, settings: Settings) -> None:
    """Raise a UserError if a setting that affects results differs from the saved one.

    CHANGEABLE_KEYS may differ, and the last step if the learning rates do not decay.
    """
    decays = settings.train.decay != "none"  # the rate at a step depends on which step is the last
    changeable = (*CHANGEABLE_KEYS, *(() if decays else ("train.steps",)))
    before, now = _flatten(tomllib.loads(saved.read_text())), _flatten(tomllib.loads(dump(settings)))
    if before.get("train.products", "auto") == "auto":  # written by a version that measured to choose
        changeable = (*changeable, "train.products")
    for key in sorted((set(before) | set(now)) - set(changeable)):
        saved_value = before.get(key, get_default(key))  # an older version without the key behaved like the default
        if saved_value != now.get(key):
            raise UserError(
                f"{saved}: this run has {key}={saved_value!r}, the new settings have {now.get(key)!r}; "
                "resume with the same settings or start another run"
            )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one level, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _make_directory(root: Path, settings: Settings) -> Path:
    """Make the directory of a new run; without a name, the first number that no run has."""
    mode = PRIVATE_MODE if settings.run.private else 0o777  # minus the umask
    if settings.run.name:
        (root / settings.run.name).mkdir(mode)
        return root / settings.run.name
    for number in itertools.count(1):
        path = root / f"{settings.recipe}-{number:03d}"
        with suppress(FileExistsError):
            path.mkdir(mode)
            return path
    raise AssertionError
