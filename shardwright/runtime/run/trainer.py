"""The loop of a run: train, evaluate, log, checkpoint, resume."""

import itertools
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint.step_directories import checkpoint_path, drop, list_checkpoints, read_manifest
from shardwright.comm.mesh import host_topology
from shardwright.config import Settings
from shardwright.data.features.transforms import Transforms
from shardwright.data.loading.loader import Loader
from shardwright.data.sources.source import Source
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.planner.step.loop_cost import METRICS
from shardwright.runtime.accumulation import loss_weight
from shardwright.runtime.job import Job
from shardwright.runtime.launch.signals import SECONDS_TO_END_STEP, StopRequest, StopRequested
from shardwright.runtime.outputs import Output
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.run import full_graph, learning_rate, metrics, recipe
from shardwright.runtime.run.callback import CallbackList, RunResult
from shardwright.runtime.run.directory import CHECKPOINTS_FILE, RunDirectory, resume_hint
from shardwright.runtime.run.early_stopping import EarlyStopping, is_evaluation_due
from shardwright.runtime.run.generate_text import generate_text
from shardwright.runtime.run.machine import MachineMeter
from shardwright.runtime.run.retrieval import RetrievalMeter
from shardwright.runtime.run.routing_recorder import RoutingRecorder
from shardwright.runtime.run.setup import make_savers
from shardwright.runtime.run.table_recorder import TableRecorder
from shardwright.runtime.run.token_meter import TokenMeter
from shardwright.runtime.run.traffic_recorder import TrafficRecorder
from shardwright.spec import files
from shardwright.spec.lanes import MAIN
from shardwright.spec.plan import Stage

METRICS_STAGE = Stage(METRICS, MAIN)  # the loop's work between two steps, traced with the job's stages


class Trainer:
    """Trains one run, from the last checkpoint in its directory if there is one."""

    def __init__(
        self,
        settings: Settings,
        source: Source,
        job: Job,
        loader: Loader,
        directory: RunDirectory,
        callbacks: CallbackList,
        token_meter: TokenMeter,
    ) -> None:
        self.settings = settings
        self.source = source
        transforms = getattr(source, "transforms", None)
        self.transforms = transforms if isinstance(transforms, Transforms) else None  # a user's source may differ
        self.transforms_digest = "" if self.transforms is None else self.transforms.digest
        self.job = job
        self.rank_group = RankGroup(job.mesh)
        # for each batch in flight: the loader's state after it, and its number of samples
        self.in_flight_batches: deque[tuple[dict[str, Any], int]] = deque()
        self.loader_state = loader.state_dict()  # after the last batch that was trained on
        self.loader = loader
        self.directory = directory
        self.callbacks = callbacks
        self.token_meter = token_meter
        self.retrieval = RetrievalMeter(job, source, settings.train.batch_size)
        self.routing = RoutingRecorder(job.model, self.rank_group)
        self.labels, self.classes = metrics.labels_of(job.model.loss)
        self.samples = 0  # trained on since the start of the run
        self.seconds = 0.0  # spent training since the start of the run
        self.evaluation: dict[str, Any] = {}
        self.progressive_evaluation: dict[str, Any] = {}  # the result if no samples are held out
        self.early_stopping = EarlyStopping(settings.train.patience, settings.train.monitor)
        self.saver, self.best_saver, self.publisher = make_savers(settings, directory, self.rank_group, job.changes)
        # best steps that the last checkpoints refer to
        self.best_steps: deque[int] = deque(maxlen=settings.train.keep_checkpoints + 1)
        self.lifetime_metrics = metrics.TaskLifetimes(self.labels)  # of every batch, scored before training on it
        self.checkpoint_step = 0  # the step of the last checkpoint
        self.stop_request = StopRequest(self._report_timeout)
        run_threads = host_topology()[1] * (
            torch.get_num_threads() + (0 if settings.data.readers else settings.data.workers)
        )
        self.machine_meter = MachineMeter(float(max(run_threads, os.cpu_count() or 1)))

    def run(self) -> RunResult:
        """Train, then evaluate on the test samples. All ranks call it."""
        self._restore()
        self.checkpoint_step = self.job.step
        self.directory.save_transforms(self.transforms)
        recorders = TableRecorder(self.job, self.rank_group), TrafficRecorder(self.job, self.rank_group)
        self.recorders = self.routing, *recorders
        start_samples, start_seconds = self.samples, self.seconds
        self.saver.preallocate(self.job.local_state)
        if self.settings.train.publish_every:
            self.publisher.preallocate(self.job.local_state)
        with closing(self.saver), closing(self.best_saver), closing(self.publisher), self.stop_request:
            stop_signal = self._train()
            self.stop_request.disable_time_limit()
            self.saver.wait()
            self.publisher.wait()
        self._name_checkpoints()
        if stop_signal:
            return RunResult(self.directory.path, self.evaluation, 0.0, stop_signal=stop_signal, step=self.job.step)
        if self.early_stopping.best_step:
            self.job.load(checkpoint_path(self.directory.best, self.early_stopping.best_step))
            self.evaluation = dict(self.early_stopping.best_evaluation) or self.evaluation
        if clamped := self.job.check_weights():
            self.callbacks.note(
                f"{clamped:,} weights of float16 tables are clamped to the largest float16, 65504: "
                "lower tables.lr, set clip, or keep these tables in bfloat16"
            )
        self._evaluate("test", recipe.test_source(self.source))
        if (text := generate_text(self.job, self.source, self.settings.seed)) is not None:
            self.directory.write("generated.json", text)
        speed = (self.samples - start_samples) / seconds if (seconds := self.seconds - start_seconds) else 0.0
        line = {"kind": "end", "step": self.job.step, "samples": self.samples, "seconds": self.seconds}
        line |= {"clamped_weights": clamped, "samples_per_second": speed, "peak_rss_bytes": metrics.peak_rss_bytes()}
        rates = self.token_meter.derive({"samples_per_second": speed})
        self.directory.log(line := line | rates)
        self.callbacks.line(line)
        evaluation, pauses = self.evaluation or self.progressive_evaluation, tuple(self.saver.pause_seconds)
        return RunResult(self.directory.path, evaluation, speed, pauses, step=self.job.step, rates=rates)

    def _train(self) -> int:
        """Train to the last step, early stopping or a stop signal; return the signal's number, else 0."""
        train = self.settings.train
        num_batches = max(0, train.steps - self.job.step) * train.accumulate if train.steps else None
        # Prefetch no batch beyond the last: reading it may wait for data that come later, or never.
        batches = itertools.islice(self._score_first(self._iterate_epochs()), num_batches)
        with closing(self.job.run(batches, stop=lambda: self.stop_request.signal)) as outputs:
            return self._run_steps(outputs)

    def _run_steps(self, outputs: Iterator[Output]) -> int:
        """Run step after step with their logging, evaluations and checkpoints; return the stop signal, else 0."""
        train = self.settings.train
        window, start_seconds, start_samples = self._make_window(), self.seconds, self.samples
        while (self.job.step < train.steps or not train.steps) and not self.early_stopping.should_stop:
            step = self.job.step + 1
            is_last = step == train.steps
            saves = bool(train.checkpoint_every) and step % train.checkpoint_every == 0
            due = step % train.log_every == 0 or saves or is_last  # a resumed run starts with a new window
            self.job.scale_rates(rate := learning_rate.factor(step, train))
            self.routing.begin_step(is_recorded=due)
            start = time.perf_counter()
            step_outputs = self._run_step(outputs)
            if not step_outputs:
                self._save_after_stop(window, start_seconds, start_samples)
                return self.job.stop_signal or self.stop_request.signal
            self.stop_request.restart_time_limit()
            with self.job.tracer.trace_stage(METRICS_STAGE):
                for output in step_outputs:
                    window.update(output, metrics.mean_penalty(self.job.model.loss, output))
                values = self.rank_group.all_gather_window(window).compute() if due else {}
                records = [record for each in self.recorders for record in each.gather(step)] if due else []
            self.seconds += time.perf_counter() - start
            self.callbacks.step(step, self.samples)
            if due:
                speed = (self.samples - start_samples) / (self.seconds - start_seconds)
                self._log("train", values | {"samples_per_second": speed, "seconds": self.seconds, "rate": rate})
                self.directory.log_records(records)
                line = {"step": step, "samples": self.samples, "before": start_samples}
                self.directory.log_machine(line | self.machine_meter.measure_window())
                if train.progressive:
                    self.progressive_evaluation = self._log(
                        "progressive", self.rank_group.all_reduce_lifetime(self.lifetime_metrics).compute()
                    )
                window, start_seconds, start_samples = self._make_window(), self.seconds, self.samples
            if is_last or is_evaluation_due(step, train, self.loader.num_batches):
                self._evaluate("eval", recipe.evaluation_source(self.settings, self.source, self.samples))
                self._update_early_stopping()
            ends = is_last or self.early_stopping.should_stop
            if ends or saves:
                self._checkpoint()
            if train.publish_every and (ends or step % train.publish_every == 0):
                numbers = {"samples": self.samples, "transforms": self.transforms_digest}
                with self.stop_request.suspend_time_limit():
                    self.job.publish_with(self.publisher, numbers)
        return 0

    def _run_step(self, outputs: Iterator[Output]) -> list[Output]:
        """Run a step and return the outputs of its micro-batches; empty if all ranks have stopped before it."""
        step_before, step_outputs = self.job.step, []
        loader_state, samples = self.loader_state, 0
        try:
            while self.job.step == step_before:
                if (output := next(outputs, None)) is None:
                    if not self.job.stop_signal:
                        raise RuntimeError(f"the batches ended after step {self.job.step}, before the last step")
                    return []
                step_outputs.append(output)
                loader_state, batch_samples = self.in_flight_batches.popleft()
                samples += batch_samples
        except StopRequested:
            return []
        self.loader_state = loader_state
        self.samples += samples
        return step_outputs

    def _save_after_stop(self, window: metrics.WindowMetrics, start_seconds: float, start_samples: int) -> None:
        """Log the steps since the last line and save, after a stop signal. All ranks are at the same step."""
        if self.job.step == self.checkpoint_step:
            return
        self.stop_request.disable_time_limit()
        if self.samples > start_samples:
            speed = (self.samples - start_samples) / (self.seconds - start_seconds)
            values = self.rank_group.all_gather_window(window).compute()
            self._log("train", values | {"samples_per_second": speed, "seconds": self.seconds})
        self._checkpoint()

    def _report_timeout(self, name: str) -> None:
        """Print that no step ended in time after signal `name` and that the rank exits without saving."""
        print(
            f"shardwright: {name} was received, but step {self.job.step + 1} has not ended on rank "
            f"{self.rank_group.rank} within {SECONDS_TO_END_STEP:g} s; the rank exits without saving, the last "
            f"checkpoint is of step {self.checkpoint_step}; {resume_hint(self.directory.path)}",
            file=sys.stderr,
            flush=True,
        )

    def _iterate_epochs(self) -> Iterator[Batch]:
        """Yield the batches of all epochs; record the loader's state after each, for batches in flight."""
        epochs = self.settings.train.epochs
        while not epochs or self.loader.state_dict()["epoch"] < epochs:
            samples = self.loader.coming
            # With several ranks no batch may be dropped: other ranks may have started its step.
            batches = self.loader
            if self.rank_group.size == 1:
                batches = self.stop_request.interruptible_batches(self.loader, lambda: self.job.between_steps)
            for batch in batches:
                self.in_flight_batches.append((self.loader.state_dict(), samples))
                samples = self.loader.coming
                yield batch

    def _score_first(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches; with progressive validation, evaluate each one before training on it."""
        for batch in batches:
            if self.settings.train.progressive and self.labels:
                for output in self.job.evaluate([batch]):
                    if output.has_scores:
                        self.lifetime_metrics.update(output)
            yield batch

    def _make_window(self) -> metrics.WindowMetrics:
        unknown_ids = getattr(self.source, "unknown_ids", ())
        weigh = partial(loss_weight, self.job.model.loss) if not self.labels else None
        return metrics.WindowMetrics(self.labels, self.settings.train.group or None, unknown_ids, weigh, self.classes)

    def _update_early_stopping(self) -> None:
        """If the best state is kept: save the state if the last evaluation is the best so far."""
        if self.settings.train.keeps_best and self.evaluation:
            _, metric = self.early_stopping.metric_of(self.evaluation)
            if self.early_stopping.update(metric, self.job.step):
                self.early_stopping.best_evaluation = self.evaluation
                self.job.check_weights()
                with self.stop_request.suspend_time_limit():
                    self.job.save_with(self.best_saver, {})
                    self.best_saver.wait()

    def _name_checkpoints(self) -> None:
        """Write which checkpoints have the best and the last state; with a best state, also show it."""
        last, stopping = self.directory.last_checkpoint(), self.early_stopping
        if last is None or not self.rank_group.is_first:
            return
        named: dict[str, Any] = {"last": {"path": str(last.relative_to(self.directory.path))}}
        if stopping.best_step:
            best = checkpoint_path(self.directory.best, stopping.best_step)
            metric, _ = stopping.metric_of(self.evaluation)
            named["best"] = {"path": str(best.relative_to(self.directory.path)), metric: stopping.best}
            self.callbacks.note(f"best    {best}  {metric} {stopping.best:.4f}")
            self.callbacks.note(f"last    {last}")
        files.write_text(json.dumps(named, indent=1), self.directory.path / CHECKPOINTS_FILE)

    def _log(self, kind: str, values: Mapping[str, float]) -> dict[str, Any]:
        """Append a line to metrics.jsonl and show it; a loss that is not finite is an error."""
        line = {"kind": kind, "step": self.job.step, "samples": self.samples, **values}
        line |= self.token_meter.derive(values)
        if not math.isfinite(line.get("loss", 0.0)):
            raise UserError(f"step {self.job.step}: the loss is {line['loss']}; lower tables.lr or dense.lr")
        self.directory.log(line)
        self.callbacks.line(line)
        return line

    def _evaluate(self, kind: str, held_out: Source | None) -> None:
        """Evaluate on a source, split among the ranks, and log the metrics of all of them."""
        if held_out is None:
            return
        window = self._make_window()
        batch_size = self.settings.train.batch_size
        shard = self.job.plan.position(self.rank_group.rank, self.job.plan.sample_axes)
        with closing(Loader(held_out, batch_size=batch_size, shuffle=False, shard=shard)) as loader:
            for output in self.job.evaluate(loader):
                window.update(output)
                self.stop_request.restart_time_limit()
        values = self.rank_group.all_gather_window(window).compute()
        values |= recipe.best_scores(held_out, values, self.labels) | full_graph.scores(self.job, held_out)
        with self.stop_request.suspend_time_limit():
            values |= self.retrieval.scores(held_out)
        self.evaluation = self._log(kind, values)

    def _checkpoint(self) -> None:
        """Begin a checkpoint, delete best states that no kept checkpoint refers to, and write the trace."""
        numbers = {
            "loader": self.loader_state,
            "samples": self.samples,
            "seconds": self.seconds,
            "evaluation": self.evaluation,
            "patience": self.early_stopping.state_dict(),
            "lifetime": self.rank_group.all_reduce_lifetime(self.lifetime_metrics).state_dict(),
        }
        with self.stop_request.suspend_time_limit():
            self.job.save_with(self.saver, numbers)
        self.checkpoint_step = self.job.step
        self.best_steps.append(self.early_stopping.best_step)
        if self.rank_group.is_first:
            for path in list_checkpoints(self.directory.best):
                if path < checkpoint_path(self.directory.best, min(self.best_steps)):
                    drop(path)
            files.write_text(self.job.tracer.timeline().to_chrome(), self.directory.path / "trace.json")

    def _restore(self) -> None:
        """Load the last checkpoint, if there is one, and delete everything the run wrote after it."""
        checkpoint = self.rank_group.broadcast_text(str(self.directory.last_checkpoint() or ""))
        if not checkpoint:
            self.directory.rewind(0)
            return
        numbers = read_manifest(Path(checkpoint)).numbers
        self.job.load(checkpoint)
        self.loader.load_state_dict(numbers["loader"])
        self.loader_state = numbers["loader"]
        self.samples = numbers["samples"]
        self.seconds = numbers["seconds"]
        self.evaluation = numbers["evaluation"]
        self.early_stopping.load_state_dict(numbers["patience"])
        self.best_steps.append(self.early_stopping.best_step)
        if self.rank_group.is_first:
            for path in list_checkpoints(self.directory.best):
                if path > checkpoint_path(self.directory.best, self.job.step):
                    drop(path)  # the run repeats these steps and decides again which is the best
            self.lifetime_metrics.load_state_dict(numbers["lifetime"])
        self.directory.rewind(self.job.step)
