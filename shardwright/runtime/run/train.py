"""A whole run: train, evaluate, log, checkpoint, resume."""

import itertools
import math
import os
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright.checkpoint.step_directories import checkpoint_path, drop, list_checkpoints, read_manifest
from shardwright.comm.mesh import current_rank, host_topology
from shardwright.config import Settings
from shardwright.data.features.transforms import Transforms
from shardwright.data.loading.loader import Loader
from shardwright.data.sources.clicks import ClickLog
from shardwright.data.sources.source import Source, Subset
from shardwright.data.sources.synthetic import ClickStream
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.kernels.matmul import library_in_use, preferred_library, use_library
from shardwright.layers.loss import BinaryLoss
from shardwright.runtime import memory_check
from shardwright.runtime.bindings import Output
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.launch.signals import SECONDS_TO_END_STEP, StopRequest, StopRequested
from shardwright.runtime.planning import plan_run
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.run import learning_rate, metrics, recipe
from shardwright.runtime.run.directory import RunDirectory, resume_hint
from shardwright.runtime.run.machine import MachineMeter
from shardwright.runtime.run.setup import (
    hottest_ids,
    load_start_checkpoint,
    make_mesh,
    make_rank_loader,
    open_directory,
    set_threads,
)
from shardwright.runtime.run.watcher import RunResult, SilentWatcher, Watcher
from shardwright.runtime.saving import Saver
from shardwright.spec import files
from shardwright.spec.plan import Stage
from shardwright.spec.table_checks import INCREMENT_DTYPES

METRICS_STAGE = Stage("metrics", "main")  # what the loop does between two steps of the job, in the same trace


def train(settings: Settings, watcher: Watcher | None = None) -> RunResult:
    """Train a run to its last step, or until a stop signal (runtime/launch/signals.py). Nothing is written before the
    settings and the first batch have been checked, and nothing large is allocated before it is known to fit."""
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    np.random.seed(settings.seed % 2**32)
    chosen = (
        RunDirectory.saved_matmul_library(settings) if settings.train.products == "auto" else settings.train.products
    )
    use_library(chosen or preferred_library())
    source = recipe.make_source(settings)
    settings = recipe.epochs_to_steps(settings, source)
    model = recipe.make_model(settings, source)
    optimizer = recipe.make_dense_optimizer(settings)
    workload, plan, predicted = plan_run(settings, source, model)
    overlap = settings.train.overlap and not settings.train.progressive  # which scores a batch where it is read
    memory_check.check_fits(workload, plan, model, current_rank(), settings.train)
    with ExitStack() as stack:
        stack.enter_context(memory_check.explain_out_of_memory(workload))
        threads = set_threads(settings, stack)
        mesh = stack.enter_context(closing(make_mesh(plan)))
        hot = hottest_ids(settings, source, model, plan)
        more: dict[str, Any] = {"hottest": hot, "overlap": overlap, "accumulate": settings.train.accumulate}
        job = build(model, plan, mesh, optimizer=optimizer, clip=settings.dense.clip, **more)
        loader = stack.enter_context(closing(make_rank_loader(settings, source, (mesh.rank, mesh.size))))
        load_start_checkpoint(settings, job, RankGroup(mesh))
        directory = stack.enter_context(closing(open_directory(settings, RankGroup(mesh))))
        run = settings.run.model_copy(update={"name": directory.path.name})
        how = settings.train.model_copy(update={"products": library_in_use()})
        settings = settings.model_copy(update={"run": run, "train": how})
        before = directory.read_environment().get("threads", torch.get_num_threads())
        directory.write_description(settings, workload, plan, predicted, threads)
        watcher = watcher or SilentWatcher()
        watcher.begin(directory.path)
        watcher.note(str(threads))
        if before != torch.get_num_threads():
            watcher.note(f"this run had {before} threads before: sums may differ in their last bits from this step on")
        if isinstance(source, ClickLog) and source.training_statistics.warning:
            watcher.note(f"{settings.data.arguments.get('path', 'data')}: {source.training_statistics.warning}")
        if torch.cuda.is_available():
            watcher.note("shardwright train runs on the CPU only; on a GPU, call build() from Python")
        if settings.train.base_batch:
            watcher.note(learning_rate.describe_scaling(settings.train, job.rates))
        return Trainer(settings, source, job, loader, directory, watcher).run()


class Trainer:
    """One run on its way, from wherever its directory says it stands."""

    def __init__(
        self,
        settings: Settings,
        source: Source,
        job: Job,
        loader: Loader,
        directory: RunDirectory,
        watcher: Watcher,
    ) -> None:
        self.settings = settings
        self.source = source
        found = getattr(source, "transforms", None)
        self.transforms = found if isinstance(found, Transforms) else None  # one's own source may call anything so
        self.transforms_digest = "" if self.transforms is None else self.transforms.digest
        self.job = job
        self.rank_group = RankGroup(job.mesh)
        self.in_flight_batches: deque[tuple[dict[str, Any], int]] = (
            deque()
        )  # of batches under way: the loader behind it, its samples
        self.loader_state = loader.state_dict()  # where the loader was behind the last batch that was trained on
        self.loader = loader
        self.directory = directory
        self.watcher = watcher
        self.label = job.model.loss.label if isinstance(job.model.loss, BinaryLoss) else None
        self.samples = 0  # trained on since the start of the run
        self.seconds = 0.0  # spent training since the start of the run
        self.evaluation: dict[str, Any] = {}
        self.progressive_evaluation: dict[str, Any] = {}  # what stands for it where nothing is held out
        self.early_stopping = learning_rate.EarlyStopping(settings.train.patience)
        keep = settings.train.keep_checkpoints
        rounded = next((dtype for what, dtype in INCREMENT_DTYPES.items() if what in settings.allow), "")
        self.saver = Saver(
            self.rank_group,
            directory.checkpoints,
            keep=keep,
            increments=settings.train.increments,
            increment_dtype=rounded,
            changes=job.changes,
        )
        self.best_saver = Saver(self.rank_group, directory.best, keep=sys.maxsize)
        self.publisher = Saver(
            self.rank_group,
            directory.published,
            keep=settings.train.keep_publications,
            increments=sys.maxsize,
            increment_dtype=rounded,
            changes=job.changes,
            is_publication=True,
        )
        self.best_steps: deque[int] = deque(maxlen=keep + 1)  # as the last checkpoints name them
        self.lifetime_metrics = metrics.LifetimeMetrics()  # of every batch, scored before the run trained on it
        self.checkpoint_step = 0  # the step of the last checkpoint
        self.stop_request = StopRequest(self._say_late)
        of_this_run = host_topology()[1] * (
            torch.get_num_threads() + (0 if settings.data.readers else settings.data.workers)
        )
        self.machine_meter = MachineMeter(float(max(of_this_run, os.cpu_count() or 1)))

    def run(self) -> RunResult:
        self._restore()
        self.checkpoint_step = self.job.step
        self.directory.save_transforms(self.transforms)
        first, began = self.samples, self.seconds
        self.saver.preallocate(self.job.model, self.job.optimizer)
        if self.settings.train.publish_every:
            self.publisher.preallocate(self.job.model, None)
        with closing(self.saver), closing(self.best_saver), closing(self.publisher), self.stop_request:
            stopped = self._train()
            self.stop_request.disable_time_limit()
            self.saver.wait()
            self.publisher.wait()
        if stopped:
            return RunResult(self.directory.path, self.evaluation, 0.0, stop_signal=stopped, step=self.job.step)
        if self.early_stopping.best_step:
            self.job.load(checkpoint_path(self.directory.best, self.early_stopping.best_step))
        if clamped := self.job.check_weights():
            self.watcher.note(
                f"{clamped:,} weights of float16 tables are clamped to the largest float16, 65504: "
                "lower tables.lr, set clip, or keep these tables in bfloat16"
            )
        self._evaluate("test", recipe.test_source(self.source))
        spent = self.seconds - began
        speed = (self.samples - first) / spent if spent else 0.0
        line = {"kind": "end", "step": self.job.step, "samples": self.samples, "seconds": self.seconds}
        line |= {"clamped_weights": clamped}
        self.directory.log(line | {"samples_per_second": speed, "peak_rss_bytes": metrics.peak_rss_bytes()})
        found, pauses = self.evaluation or self.progressive_evaluation, tuple(self.saver.pause_seconds)
        return RunResult(self.directory.path, found, speed, pauses, step=self.job.step)

    def _train(self) -> int:
        """Train to the last step, until early stopping, or until a stop signal; returns its number, else 0."""
        train = self.settings.train
        left = max(0, train.steps - self.job.step) * train.accumulate if train.steps else None
        # No batch beyond the last is read ahead: it may wait for data that come later, or never.
        batches = itertools.islice(self._scored_first(self._epochs()), left)
        with closing(self.job.run(batches, stop=lambda: self.stop_request.signal)) as outputs:
            return self._train_on(outputs)

    def _train_on(self, outputs: Iterator[Output]) -> int:
        train = self.settings.train
        window, since, before = self._window(), self.seconds, self.samples
        while (self.job.step < train.steps or not train.steps) and not self.early_stopping.should_stop:
            rate = learning_rate.factor(self.job.step + 1, train)
            self.job.scale_rates(rate)
            start = time.perf_counter()
            taken = self._run_step(outputs)
            if not taken:
                self._save_stopped(window, since, before)
                return self.job.stop_signal or self.stop_request.signal
            self.stop_request.restart_time_limit()
            last = self.job.step == train.steps
            saves = bool(train.checkpoint_every) and self.job.step % train.checkpoint_every == 0
            due = self.job.step % train.log_every == 0 or saves or last  # a resumed run begins with a new window
            with self.job.tracer.trace_stage(METRICS_STAGE):
                for output in taken:
                    window.update(output)
                figures = self.rank_group.all_gather_window(window).compute() if due else {}
            self.seconds += time.perf_counter() - start
            self.watcher.step(self.job.step, self.samples)
            if due:
                speed = (self.samples - before) / (self.seconds - since)
                self._log("train", figures | {"samples_per_second": speed, "seconds": self.seconds, "rate": rate})
                now = {"step": self.job.step, "samples": self.samples, "before": before}
                self.directory.log_machine(now | self.machine_meter.measure_window())
                if train.progressive:
                    self.progressive_evaluation = self._log(
                        "progressive", self.rank_group.all_reduce_lifetime(self.lifetime_metrics).compute()
                    )
                window, since, before = self._window(), self.seconds, self.samples
            if last or train.eval_every and self.job.step % train.eval_every == 0:
                self._evaluate("eval", recipe.evaluation_source(self.settings, self.source, self.samples))
                self._watch()
            end = last or self.early_stopping.should_stop
            if end or saves:
                self._checkpoint()
            if train.publish_every and (end or self.job.step % train.publish_every == 0):
                with self.stop_request.suspend_time_limit():
                    self.job.publish_with(
                        self.publisher, {"samples": self.samples, "transforms": self.transforms_digest}
                    )
        return 0

    def _run_step(self, outputs: Iterator[Output]) -> list[Output]:
        """Run a step and return the outputs of its micro-batches; empty if all ranks have stopped before it."""
        before, taken = self.job.step, []
        behind, samples = self.loader_state, 0
        try:
            while self.job.step == before:
                if (output := next(outputs, None)) is None:
                    if not self.job.stop_signal:
                        raise RuntimeError(f"the batches have ended with step {self.job.step}, before the last step")
                    return []
                taken.append(output)
                behind, more = self.in_flight_batches.popleft()
                samples += more
        except StopRequested:
            return []
        self.loader_state = behind
        self.samples += samples
        return taken

    def _save_stopped(self, window: metrics.WindowMetrics, since: float, before: int) -> None:
        """After a stop signal: log the steps since the last line, and save. All ranks are at the same step."""
        if self.job.step == self.checkpoint_step:
            return
        self.stop_request.disable_time_limit()
        if self.samples > before:
            speed = (self.samples - before) / (self.seconds - since)
            figures = self.rank_group.all_gather_window(window).compute()
            self._log("train", figures | {"samples_per_second": speed, "seconds": self.seconds})
        self._checkpoint()

    def _say_late(self, name: str) -> None:
        """Report that no step has ended in time after a signal, and that the process ends without saving."""
        print(
            f"shardwright: {name} was received, but step {self.job.step + 1} has not ended on rank "
            f"{self.rank_group.rank} "
            f"within {SECONDS_TO_END_STEP:g} s; it ends without saving, the last checkpoint is of step "
            f"{self.checkpoint_step}; {resume_hint(self.directory.path)}",
            file=sys.stderr,
            flush=True,
        )

    def _epochs(self) -> Iterator[Batch]:
        """Every batch, noting where the loader is behind it: several may be under way."""
        epochs = self.settings.train.epochs
        while not epochs or self.loader.state_dict()["epoch"] < epochs:
            samples = self.loader.coming
            # With several ranks no batch may be dropped: other ranks may have begun its step.
            batches = self.loader
            if self.rank_group.size == 1:
                batches = self.stop_request.interruptible_batches(self.loader, lambda: self.job.between_steps)
            for batch in batches:
                self.in_flight_batches.append((self.loader.state_dict(), samples))
                samples = self.loader.coming
                yield batch

    def _scored_first(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """With progressive validation every batch is evaluated before it is handed out for training."""
        for batch in batches:
            if self.settings.train.progressive and self.label is not None:
                for output in self.job.evaluate([batch]):
                    self.lifetime_metrics.update(output.logits, batch.labels[self.label], batch.weights)
            yield batch

    def _window(self) -> metrics.WindowMetrics:
        unknown_ids = getattr(self.source, "unknown_ids", ())
        return metrics.WindowMetrics(self.label, self.settings.train.group or None, unknown_ids)

    def _watch(self) -> None:
        """Keep the state of the best evaluation, where a run may stop early."""
        if self.settings.train.patience and self.evaluation:
            figure = self.evaluation.get("ne", self.evaluation["loss"])
            if self.early_stopping.update(figure, self.job.step):
                self.job.check_weights()
                with self.stop_request.suspend_time_limit():
                    self.job.save_with(self.best_saver, {})
                    self.best_saver.wait()

    def _log(self, kind: str, figures: Mapping[str, float]) -> dict[str, Any]:
        line = {"kind": kind, "step": self.job.step, "samples": self.samples, **figures}
        if not math.isfinite(line.get("loss", 0.0)):
            raise UserError(f"step {self.job.step}: the loss is {line['loss']}; lower tables.lr or dense.lr")
        self.directory.log(line)
        self.watcher.line(line)
        return line

    def _evaluate(self, kind: str, held_out: Source | None) -> None:
        if held_out is None:
            return
        window = self._window()
        batch_size = self.settings.train.batch_size
        shard = (self.rank_group.rank, self.rank_group.size)
        with closing(Loader(held_out, batch_size=batch_size, shuffle=False, shard=shard)) as loader:
            for output in self.job.evaluate(loader):
                window.update(output)
                self.stop_request.restart_time_limit()
        figures = self.rank_group.all_gather_window(window).compute()
        if isinstance(held_out, Subset) and isinstance(held_out.source, ClickStream) and "ne" in figures:
            figures["bound_ne"] = held_out.source.bound(held_out.lo, held_out.hi).ne
        self.evaluation = self._log(kind, figures)

    def _checkpoint(self) -> None:
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
        if self.rank_group.is_first:
            files.write_text(self.job.tracer.timeline().to_chrome(), self.directory.path / "trace.json")

    def _restore(self) -> None:
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
                    drop(path)  # it is about to be made again, or not to be the best
        if self.rank_group.is_first:
            self.lifetime_metrics.load_state_dict(numbers["lifetime"])
        self.directory.rewind(self.job.step)
