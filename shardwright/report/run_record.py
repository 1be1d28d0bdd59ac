"""Read a run directory into a frozen RunRecord, so that pages never open files.

Only config.toml is required. Other missing files (a killed run, another kind of model) become None or empty; a
damaged file raises UserError with file and line. Nothing is repaired.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.step_directories import list_checkpoints, read_manifest
from shardwright.errors import UserError, check_regular_file
from shardwright.spec import files, table_checks
from shardwright.spec.cache_record import (
    CACHES_FILE,
    COPIES_FILE,
    GROWTH_FILE,
    CacheWindow,
    CopyWindow,
    GrowthWindow,
    read_windows,
)
from shardwright.spec.checks import raise_if_any
from shardwright.spec.generated_text import GeneratedText
from shardwright.spec.model_flops import ModelFlops
from shardwright.spec.plan import Plan
from shardwright.spec.routing import ROUTING_FILE, RoutedRows, read_routing
from shardwright.spec.timeline import Timeline
from shardwright.spec.traffic import PREDICTED_FILE, TRAFFIC_FILE, PredictedStep, PredictedSteps, TrafficWindow
from shardwright.spec.workload import Workload

T = TypeVar("T")

SHOWN_PUBLICATIONS = 12
# A training window is marked as disturbed above these shares of its time, or above this ratio of load to expected load
# (the load of the run itself, or the number of cores if that is larger).
MIN_MARKED_STOLEN_SHARE, MIN_MARKED_THROTTLED_SHARE = 0.05, 0.05
MIN_MARKED_LOAD_RATIO = 1.5
LINE_KINDS = ("train", "progressive", "eval", "test", "end")
METRIC_NAMES = (
    "loss",
    "log_loss",
    "ne",
    "bound_ne",
    "auc",
    "grouped_auc",
    "calibration",
    "samples_per_second",
    "seconds",
    "peak_rss_bytes",
    "perplexity",
    "bound_loss",
    "tokens_per_second",
    "mfu",
    "mfu_full",
    "accuracy",
    "accuracy_all_neighbors",
    "recall_at_10",
    "recall_at_100",
    "ndcg_at_10",
    "ndcg_at_100",
)


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """A line of metrics.jsonl; None: not measured."""

    kind: str
    step: int
    samples: int
    loss: float | None = None
    log_loss: float | None = None
    ne: float | None = None
    bound_ne: float | None = None
    auc: float | None = None
    grouped_auc: float | None = None
    calibration: float | None = None
    samples_per_second: float | None = None
    seconds: float | None = None
    peak_rss_bytes: float | None = None
    perplexity: float | None = None
    bound_loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    mfu_full: float | None = None
    accuracy: float | None = None
    accuracy_all_neighbors: float | None = None
    recall_at_10: float | None = None
    recall_at_100: float | None = None
    ndcg_at_10: float | None = None
    ndcg_at_100: float | None = None
    tasks: tuple[tuple[str, "MetricsLine"], ...] = ()  # by name, the metrics of each task of a model with several


@dataclass(frozen=True, slots=True)
class Metrics:
    """The lines of metrics.jsonl by kind."""

    train: tuple[MetricsLine, ...] = ()
    evals: tuple[MetricsLine, ...] = ()
    progressive: tuple[MetricsLine, ...] = ()  # over all samples so far, each scored before training on it
    test: MetricsLine | None = None  # over the test split
    end: MetricsLine | None = None
    is_truncated: bool = False  # the last line was cut off, as by kill -9

    @property
    def last_line(self) -> MetricsLine | None:
        lines = [*self.train, *self.evals, *([self.end] if self.end else [])]
        return max(lines, key=lambda line: line.step, default=None)

    @property
    def final(self) -> MetricsLine | None:
        """The last scores: of the test split, else of an evaluation, else progressive.

        A run that ended with its best state has an earlier last step than its last evaluation.
        """
        evals = [line for line in self.evals if self.end is None or line.step <= self.end.step]
        return self.test or next(reversed((*self.progressive[-1:], *evals[-1:])), None)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks of a model with several."""
        return tuple(dict.fromkeys(name for line in (*self.train, *self.evals) for name, _ in line.tasks))

    def of_task(self, name: str) -> "Metrics":
        """The training windows and evaluations of one task."""
        train, evals, progressive, test = (
            tuple(dict(line.tasks)[name] for line in lines if name in dict(line.tasks))
            for lines in (self.train, self.evals, self.progressive, (self.test,) if self.test else ())
        )
        return Metrics(train, evals, progressive, next(iter(test), None))


@dataclass(frozen=True, slots=True)
class MachineWindow:
    """A line of machine.jsonl: the processor time taken away from the run in a training window."""

    before: int  # samples trained at the window's start
    samples: int  # samples trained at its end
    stolen_share: float
    throttled_share: float
    load: float
    expected_load: float

    @property
    def disturbance(self) -> str:
        """Describe what took processor time away from the run; empty if nothing did."""
        parts: list[str] = []
        if self.stolen_share > MIN_MARKED_STOLEN_SHARE:
            parts.append(f"{self.stolen_share:.0%} stolen by other virtual machines")
        if self.throttled_share > MIN_MARKED_THROTTLED_SHARE:
            parts.append(f"throttled by its cgroup for {self.throttled_share:.0%} of the time")
        if self.load > MIN_MARKED_LOAD_RATIO * self.expected_load:
            parts.append(f"load average {self.load:.1f} where {self.expected_load:.0f} are expected")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of a run directory."""

    name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    workload: Workload | None
    plan: Plan | None
    timeline: Timeline | None
    predicted_timeline: Timeline | None
    metrics: Metrics
    checkpoints: tuple[tuple[str, Manifest | None], ...] = ()  # by name, oldest first; None: damaged
    publications: tuple[tuple[str, Manifest | None], ...] = ()  # the latest SHOWN_PUBLICATIONS
    machine_windows: tuple[MachineWindow, ...] = ()
    model_flops: ModelFlops | None = None
    generated_text: GeneratedText | None = None
    routing: tuple[RoutedRows, ...] = ()
    caches: tuple[CacheWindow, ...] = ()
    growth: tuple[GrowthWindow, ...] = ()
    copies: tuple[CopyWindow, ...] = ()
    traffic: tuple[TrafficWindow, ...] = ()
    predicted_steps: tuple[PredictedStep, ...] = ()


def read_record(path: Path) -> RunRecord:
    """Read everything in a run directory that the report shows."""
    if not (path / "config.toml").is_file():
        raise UserError(
            f"{path}: not a run directory (it has no config.toml); give a directory that `shardwright train` wrote"
        )
    workload, plan = read_if_exists(Workload, path / "workload.json"), read_if_exists(Plan, path / "plan.json")
    if plan is not None:
        _check_tables(plan, workload, path / "plan.json")
    return RunRecord(
        name=path.resolve().name,
        config=read_config(path / "config.toml"),
        environment=read_environment(path / "environment.json"),
        workload=workload,
        plan=plan,
        timeline=read_timeline(path / "trace.json"),
        predicted_timeline=read_timeline(path / "predicted.json"),
        metrics=read_metrics(path / "metrics.jsonl"),
        checkpoints=tuple((folder.name, try_read_manifest(folder)) for folder in list_checkpoints(path / "checkpoint")),
        publications=tuple(
            (folder.name, try_read_manifest(folder))
            for folder in list_checkpoints(path / "published")[-SHOWN_PUBLICATIONS:]
        ),
        machine_windows=tuple(read_machine_windows(path / "machine.jsonl")),
        model_flops=read_if_exists(ModelFlops, path / "model_flops.json"),
        generated_text=read_if_exists(GeneratedText, path / "generated.json"),
        routing=tuple(read_routing(path / ROUTING_FILE)) if (path / ROUTING_FILE).exists() else (),
        caches=tuple(read_windows(path / CACHES_FILE, CacheWindow)),
        growth=tuple(read_windows(path / GROWTH_FILE, GrowthWindow)),
        copies=tuple(read_windows(path / COPIES_FILE, CopyWindow)),
        traffic=tuple(read_windows(path / TRAFFIC_FILE, TrafficWindow)),
        predicted_steps=(read_if_exists(PredictedSteps, path / PREDICTED_FILE) or PredictedSteps(())).steps,
    )


def _check_tables(plan: Plan, workload: Workload | None, path: Path) -> None:
    """Raise an error for a plan that does not cover every table of the workload exactly once.

    The workload digest is not compared: an older version may have computed it differently.
    """
    try:
        raise_if_any(
            message
            for check in table_checks.CHECKS
            if check is not table_checks.workload_mismatch
            for message in check(plan, workload, None)
        )
    except UserError as error:
        raise UserError(f"{path}: {error}; restore the plan of this run, or remove the file") from None


def try_read_manifest(checkpoint: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if it is damaged."""
    try:
        return read_manifest(checkpoint)
    except UserError:
        return None


def read_if_exists(cls: type[T], path: Path) -> T | None:
    return files.read(cls, path) if path.exists() else None


def read_config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular_file(path).decode())
    except ValueError as error:
        raise UserError(f"{path}: bad TOML: {error}") from None


def read_environment(path: Path) -> dict[str, Any]:
    return parse_json_object(read_regular_file(path), str(path)) if path.exists() else {}


def read_timeline(path: Path) -> Timeline | None:
    """Read a trace; None if it is missing or has no events."""
    if not path.exists():
        return None
    timeline = Timeline.from_chrome(read_regular_file(path).decode(errors="replace"), origin=str(path))
    return timeline if timeline.events else None


def read_metrics(path: Path) -> Metrics:
    if not path.exists():
        return Metrics()
    *texts, tail = read_regular_file(path).split(b"\n")
    is_truncated = bool(tail) and not is_json(tail)
    if tail and not is_truncated:
        texts.append(tail)
    lines = [parse_metrics_line(text, f"{path}, line {number}") for number, text in enumerate(texts, start=1)]
    return Metrics(
        train=tuple(line for line in lines if line.kind == "train"),
        evals=tuple(line for line in lines if line.kind == "eval"),
        progressive=tuple(line for line in lines if line.kind == "progressive"),
        test=next((line for line in reversed(lines) if line.kind == "test"), None),
        end=next((line for line in lines if line.kind == "end"), None),
        is_truncated=is_truncated,
    )


def parse_metrics_line(text: bytes, where: str) -> MetricsLine:
    value = parse_json_object(text, where)
    kind = value.get("kind")
    if kind not in LINE_KINDS:
        raise UserError(f"{where}: kind is {kind!r}; allowed: {', '.join(LINE_KINDS)}")
    for name in ("step", "samples"):
        if type(value.get(name)) is not int:
            raise UserError(f"{where}: {name} is {value.get(name)!r}; wanted a whole number")
    keys = {name: name.replace("_at_", "@") for name in METRIC_NAMES}
    for key in keys.values():
        if type(value.get(key)) not in (int, float, type(None)):
            raise UserError(f"{where}: {key} is {value[key]!r}; wanted a number")
    return MetricsLine(
        kind,
        value["step"],
        value["samples"],
        **{name: value.get(key) for name, key in keys.items()},
        tasks=tuple(_task_lines(value, where)),
    )


def _task_lines(value: Mapping[str, Any], where: str) -> Iterator[tuple[str, MetricsLine]]:
    """The metrics of each task, whose names in a line are "buy.auc"."""
    values_of: dict[str, dict[str, Any]] = {}
    for key, number in value.items():
        task, dot, name = key.partition(".")
        if not dot or name not in METRIC_NAMES:
            continue
        if type(number) not in (int, float):
            raise UserError(f"{where}: {key} is {number!r}; wanted a number")
        values_of.setdefault(task, {})[name] = number
    for task, values in values_of.items():
        yield task, MetricsLine(value["kind"], value["step"], value["samples"], **values)


def read_machine_windows(path: Path) -> Iterator[MachineWindow]:
    """Yield the windows of machine.jsonl, if it exists. A truncated last line is skipped."""
    names = [field.name for field in fields(MachineWindow)]
    for number, text in enumerate(read_regular_file(path).split(b"\n")[:-1] if path.exists() else (), start=1):
        value = parse_json_object(text, f"{path}, line {number}")
        for name in names:
            if type(value.get(name)) not in (int, float):
                raise UserError(f"{path}, line {number}: {name} is {value.get(name)!r}; wanted a number")
        yield MachineWindow(**{name: value[name] for name in names})


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: bad JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: got a {type(value).__name__}; wanted a JSON object")
    return value


def is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def read_regular_file(path: Path) -> bytes:
    check_regular_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
