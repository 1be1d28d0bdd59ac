"""Report of a run as an HTML page: key metrics, curves, step times, tables, blocks, plan reasons.

Values that were not measured are omitted or marked as missing. Times of a step and of its parts are means over the
traced steps: means of parts add up to the mean of the step, medians do not. Layout and script are in frame.html.j2,
figures in plots.py; run_record.py reads the run directory.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from shardwright.checkpoint.manifest import Manifest
from shardwright.report import html_template, plots, step_times
from shardwright.report.bubble import bubble_ratio
from shardwright.report.caches_page import describe_caches
from shardwright.report.communication import describe_communication
from shardwright.report.copies_page import describe_copies
from shardwright.report.experts_page import describe_experts
from shardwright.report.growth_page import describe_growth
from shardwright.report.html_template import Grid
from shardwright.report.model_flops import flops_grid
from shardwright.report.popularity import describe_popularity
from shardwright.report.run_record import MachineWindow, Metrics, MetricsLine, RunRecord, read_record
from shardwright.report.traffic_page import describe_traffic
from shardwright.report.units import bytes_text, count_text, decimal_text, duration_text, time_text
from shardwright.report.workload_grids import ABSENT, block_grid, table_grid
from shardwright.spec import files
from shardwright.spec.plan import Plan, Stage
from shardwright.spec.timeline import Timeline

OUTCOME_NOTES = MappingProxyType(
    {
        "test": "test at step {step}",
        "eval": "evaluation at step {step}",
        "progressive": "all samples up to step {step}, each scored before training on it",
    }
)
MIN_REPORTED_OVERLAP = 1e-3  # overlap above this share of the parts' time is reported
UNEVEN_STEP_RATIO = 1.2  # steps with a larger ratio of mean to median are reported as uneven
UNTESTED_ON_GPU = (
    "This run computed on a GPU. Runs on GPUs have been tested on an emulated device only: this version of "
    "`shardwright train` has not run on a GPU."
)
PREPARE_STAGE = "prepare"  # a predicted stage that runs in a loader worker
MIN_REPORTED_UNTRACED = 5e-3  # time outside all events above this share of the exposed time has a row


@dataclass(frozen=True, slots=True)
class Tile:
    """A key number at the top of the page."""

    label: str
    value: str
    note: str = ""


def render(run: Path, *, output: Path | None = None) -> Path:
    """Write the report of a run directory atomically; by default to report.html inside it."""
    target = output or run / "report.html"
    files.write_text(run_html(read_record(run)), target)
    return target


def run_html(run: RunRecord) -> str:
    metrics = run.metrics
    curves = plots.curves(metrics, run.machine_windows)
    experts, caches, growth = describe_experts(run), describe_caches(run), describe_growth(run)
    copies, popularity = describe_copies(run), describe_popularity(run.workload)
    times = (plots.stage_figure(run.timeline), plots.gantt(run.timeline)) if run.timeline else ()
    return html_template.render_template(
        "page.html.j2",
        title=run.name,
        run=run,
        facts=facts(run),
        notes=tuple(notes(run)),
        tiles=tiles(metrics),
        curves=curves,
        gaps=tuple(missing_measurements(metrics)),
        times=times,
        step_time=describe_step_time(run.timeline) if run.timeline else "",
        predicted=describe_prediction(run.predicted_timeline, run.timeline, run.plan)
        if run.predicted_timeline and run.timeline
        else "",
        parts=part_grid(run.timeline, run.predicted_timeline, run.plan.stages if run.plan else ())
        if run.timeline
        else None,
        tables=table_grid(run.workload) if run.workload and run.workload.tables else None,
        flops=flops_grid(run.model_flops, metrics) if run.model_flops else None,
        text=run.generated_text,
        experts=experts,
        caches=caches,
        growth=growth,
        copies=copies,
        popularity=popularity,
        communication=describe_communication(run),
        traffic=describe_traffic(run),
        blocks=block_grid(run.workload) if run.workload and run.workload.blocks else None,
        checkpoints=checkpoint_grid(run.checkpoints) if run.checkpoints else None,
        publications=checkpoint_grid(run.publications, "publication") if run.publications else None,
        why=Grid(("subject", "reason"), run.plan.why, num_text_columns=2) if run.plan and run.plan.why else None,
        config=settings_grid(run.config),
        environment=settings_grid(run.environment),
        figures=(
            *curves,
            *times,
            *(experts.figures if experts else ()),
            *(section.figure for section in (caches, growth, popularity) if section),
            *(copies.figures if copies else ()),
        ),
    )


def checkpoint_grid(manifests: Sequence[tuple[str, Manifest | None]], what: str = "checkpoint") -> Grid:
    """Checkpoints or publications in the run directory, with the time that training waited for each."""
    rows: list[tuple[str, ...]] = []
    for name, manifest in manifests:
        if manifest is None:
            rows.append((name, "damaged", "", "", ""))
            continue
        pause, writing_time = time_text(manifest.pause_seconds), time_text(manifest.seconds)
        rows.append((name, manifest.base or "none: full", f"{manifest.bytes_ / 1e6:,.1f}", pause, writing_time))
    columns = (what, "increment of", "MB", "training waited", "writing took")
    return Grid(columns, tuple(rows), num_text_columns=2)


def facts(run: RunRecord) -> tuple[str, ...]:
    """Facts under the title: recipe, date and machine, if known."""
    environment = run.environment
    cores, device = environment.get("cores"), environment.get("device")
    machine = (
        environment.get("processor"),
        f"{cores} cores" if cores else None,
        device if device != "cpu" else None,
    )
    values = (run.config.get("recipe"), environment.get("started"), *machine)
    return tuple(str(fact) for fact in values if fact)


def notes(run: RunRecord) -> Iterator[str]:
    """Warnings at the top of the page."""
    metrics, last_line = run.metrics, run.metrics.last_line
    if last_line is None:
        yield "This run has written no metrics yet."
    elif metrics.end is None:
        yield f"This run has not ended, or was killed: its last record is of step {last_line.step:,}."
    if run.environment.get("device_type") == "cuda":
        yield UNTESTED_ON_GPU
    if metrics.is_truncated:
        yield "The last line of metrics.jsonl is incomplete, as after a kill, and is ignored."
    if disturbance := describe_disturbance(run.machine_windows):
        yield f"{disturbance}. The throughput curve marks them."
    if any(line.mfu is not None and line.mfu > 1 for line in metrics.train):
        yield (
            "An MFU above 100 % means that other processes used the machine while its peak was measured: train again "
            "on the quiet machine; several ranks can take the peak from plan.cluster."
        )
    if (num_micro_batches := run.config.get("train", {}).get("accumulate", 1)) > 1:
        yield (
            f"A step accumulates the gradients of {num_micro_batches} micro-batches; predicted and measured times of "
            "stages are sums over them."
        )


def describe_disturbance(windows: Sequence[MachineWindow]) -> str:
    """Describe in how many windows processor time was taken away, and the last cause; empty if in none."""
    disturbances = [window.disturbance for window in windows if window.disturbance]
    if not disturbances:
        return ""
    return (
        f"In {len(disturbances)} of {len(windows)} training windows the processor was taken away from this run "
        f"(last: {disturbances[-1]}): do not compare speeds and times in them"
    )


def missing_measurements(metrics: Metrics) -> Iterator[str]:
    """Sentences about metrics that were not measured."""
    lines = (*metrics.train, *metrics.evals)
    names = {"ne": "normalized entropy", "auc": "AUC", "calibration": "calibration"}
    if plots.has_tokens(metrics):
        names = {"mfu": "MFU"}
    elif plots.has_classes(metrics) or plots.is_retrieval(metrics) or metrics.tasks:
        names = {}
    missing_names = [label for name, label in names.items() if not plots.metric_series(lines, name)[0]]
    if lines and missing_names:
        yield f"Not measured in this run: {', '.join(missing_names)}."
    if metrics.train and not metrics.evals:
        yield "No evaluation has run: the curves are windows of training."


def describe_step_time(timeline: Timeline) -> str:
    seconds = step_times.step_seconds(timeline)
    mean = step_times.mean_step_seconds(timeline)
    serial, exposed = step_times.serial_and_exposed_seconds(timeline)
    sentence = f"Without overlap its parts would take {time_text(serial)}"
    hidden_seconds = serial - exposed
    sentence += (
        f"; overlap hides {time_text(hidden_seconds)} of it."
        if hidden_seconds > MIN_REPORTED_OVERLAP * serial
        else "; nothing overlaps."
    )
    if len(seconds) == 1:
        return f"The only {timeline.source} step took {time_text(mean)}. {sentence}"
    median_seconds = median(seconds)
    uneven_note = (
        f" (their median is {time_text(median_seconds)}: a few steps were much longer)"
        if mean > UNEVEN_STEP_RATIO * median_seconds
        else ""
    )
    num_steps = len(step_times.complete_steps(timeline))
    return f"A step took {time_text(mean)}, the mean of {num_steps:,} {timeline.source} steps{uneven_note}. {sentence}"


def describe_prediction(predicted: Timeline, measured: Timeline, plan: Plan | None) -> str:
    """The predicted step and, of a pipeline, its bubble; measured timelines are of the first rank."""
    expected, actual = (step_times.mean_step_seconds(predicted), step_times.mean_step_seconds(measured))
    text = f"The plan predicted {time_text(expected)} per step, {expected / actual:.0%} of the measured time."
    if plan is None or plan.pipeline is None:
        return text
    expected, actual = bubble_ratio(predicted), bubble_ratio(measured)
    if math.isnan(actual):
        return text
    return (
        f"{text} Between the passes of a step the first rank waits for {actual:.1%} of their time (the pipeline's "
        f"bubble); the plan predicted {expected:.1%}."
    )


def part_grid(timeline: Timeline, predicted: Timeline | None, stages: Sequence[Stage] = ()) -> Grid:
    """Measured and exposed seconds of each part of a step, and its predicted seconds.

    The prediction of a stage includes its body. Time of the step outside all traced parts has a separate row.
    """
    parts = step_times.parts_by_name(timeline)
    forecast = {name: part.seconds for name, part in step_times.parts_by_name(predicted).items()} if predicted else {}
    forecast.pop(PREPARE_STAGE, None)  # runs in a loader worker, which is not traced
    for stage in stages:
        body = [forecast.pop(part.name) for part in stage.body if part.lane == stage.lane and part.name in forecast]
        forecast |= {stage.name: sum(body)} if body else {}
    names = sorted(parts, key=lambda name: -parts[name].exposed_seconds)
    rows = [(name, time_text(parts[name].seconds), time_text(parts[name].exposed_seconds)) for name in names]
    serial, exposed = step_times.serial_and_exposed_seconds(timeline)
    untraced = step_times.mean_step_seconds(timeline) - exposed
    if untraced > MIN_REPORTED_UNTRACED * exposed:
        rows.append(("not traced", "", time_text(untraced)))
    total = ("the step", time_text(serial), time_text(exposed + max(untraced, 0.0)))
    columns = ("part of the step", "time", "exposed")
    if predicted is None:
        return Grid(columns, tuple(rows), total=total)
    expected = [time_text(forecast[row[0]]) if row[0] in forecast else "" for row in rows]
    return Grid(
        (*columns, "predicted time"),
        tuple((*row, cell) for row, cell in zip(rows, expected, strict=True)),
        total=(*total, time_text(sum(forecast.values()))),
    )


def task_tiles(metrics: Metrics) -> Iterator[Tile]:
    for name in metrics.tasks:
        own = metrics.of_task(name)
        value, note = outcome(own, final := own.final, "ne")
        if final and final.bound_ne is not None:
            note = f"best reachable (true probabilities): {decimal_text(final.bound_ne)}"
        yield Tile(f"{name}: normalized entropy", value, note)
        yield Tile(f"{name}: AUC", *outcome(own, final, "auc"))


def tiles(metrics: Metrics) -> tuple[Tile, ...]:
    final = metrics.final
    has_clicks = any(line.ne is not None for line in (*metrics.train, *metrics.evals))
    loss_name = "log_loss" if final and final.kind == "progressive" else "loss"
    loss = Tile("Log loss" if has_clicks else "Loss", *outcome(metrics, final, loss_name))
    if plots.has_tokens(metrics):
        if final and final.bound_loss is not None:
            loss = replace(loss, note=f"best reachable (true probabilities): {decimal_text(final.bound_loss)}")
        perplexity = Tile("Perplexity", *outcome(metrics, final, "perplexity"))
        return (perplexity, loss, *speed_tiles(metrics))
    if metrics.tasks:
        return (*task_tiles(metrics), loss, *speed_tiles(metrics))
    if not has_clicks:
        return (*accuracy_tiles(metrics, final), *retrieval_tiles(metrics, final), loss, *speed_tiles(metrics))
    value, note = outcome(metrics, final, "ne")
    if final and final.ne is not None and final.bound_ne is not None:
        note = f"best reachable (true probabilities): {decimal_text(final.bound_ne)}"
    auc = Tile("AUC", *outcome(metrics, final, "auc"))
    return (Tile("Normalized entropy", value, note), auc, loss, *speed_tiles(metrics))


def accuracy_tiles(metrics: Metrics, final: MetricsLine | None) -> Iterator[Tile]:
    if not plots.has_classes(metrics):
        return
    if final is None or final.accuracy_all_neighbors is None:
        yield Tile("Accuracy", *outcome(metrics, final, "accuracy"))
        return
    yield Tile("Accuracy, drawn neighbors", *outcome(metrics, final, "accuracy"))
    yield Tile("Accuracy, all neighbors", *outcome(metrics, final, "accuracy_all_neighbors"))


def retrieval_tiles(metrics: Metrics, final: MetricsLine | None) -> Iterator[Tile]:
    if plots.is_retrieval(metrics):
        yield Tile("Recall@100", *outcome(metrics, final, "recall_at_100"))
        yield Tile("NDCG@100", *outcome(metrics, final, "ndcg_at_100"))


def outcome(metrics: Metrics, final: MetricsLine | None, name: str) -> tuple[str, str]:
    """Value and note of the final evaluation; without a value, the note has the last training window."""
    metric_value = getattr(final, name) if final else None
    if final and metric_value is not None:
        return decimal_text(metric_value), OUTCOME_NOTES[final.kind].format(step=f"{final.step:,}")
    windows = [line for line in metrics.train if getattr(line, name) is not None]
    return ABSENT, f"last training window: {decimal_text(getattr(windows[-1], name))}" if windows else ""


def speed_tiles(metrics: Metrics) -> Iterator[Tile]:
    end = metrics.end
    name = "tokens_per_second" if plots.has_tokens(metrics) else "samples_per_second"
    label = name.replace("_", " ").capitalize()
    windows = [speed for line in metrics.train if (speed := getattr(line, name)) is not None]
    if end and getattr(end, name) is not None:
        yield Tile(label, count_text(getattr(end, name)), "over the whole run")
    elif windows:
        yield Tile(label, count_text(median(windows)), f"median of {len(windows)} training windows")
    else:
        yield Tile(label, ABSENT)
    if end and end.mfu is not None and end.mfu_full is not None:
        yield Tile("MFU", f"{end.mfu:.1%}", f"with the full attention matrix {end.mfu_full:.1%}")
    seconds, peak = (end.seconds, end.peak_rss_bytes) if end else (None, None)
    steps = f"{end.step:,} steps" if end else "written at the end of a run"
    yield Tile("Wall time", ABSENT if seconds is None else duration_text(seconds), steps)
    yield Tile("Peak memory", ABSENT if peak is None else bytes_text(peak), "resident, on the host")


def settings_grid(values: Mapping[str, Any]) -> Grid:
    return Grid(("key", "value"), tuple(flatten_settings(values)), num_text_columns=2)


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, str) else json.dumps(value, default=str)
