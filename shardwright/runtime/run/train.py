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

from shardwright.checkpoint.step_directories import drop, place, read_manifest, steps
from shardwright.comm.mesh import hosts, own_rank
from shardwright.config import Settings
from shardwright.data.features.transforms import Transforms
from shardwright.data.loading.loader import Loader
from shardwright.data.sources.clicks import ClickLog
from shardwright.data.sources.source import Source, Window
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
from shardwright.runtime.planning import hottest, prove, with_steps
from shardwright.runtime.rank_group import Team
from shardwright.runtime.run import learning_rate, metrics, recipe
from shardwright.runtime.run.directory import RunDirectory, how_to_resume
from shardwright.runtime.run.machine import MachineMeter
from shardwright.runtime.run.setup import make_loader, make_mesh, open_directory, set_threads, start_from
from shardwright.runtime.run.watcher import Finished, Silent, Watcher
from shardwright.runtime.saving import Saver
from shardwright.spec import files
from shardwright.spec.plan import Stage
from shardwright.spec.table_checks import INCREMENTS

METRICS = Stage("metrics", "main")  # what the loop does between two steps of the job, in the same trace


def train(settings: Settings, watcher: Watcher | None = None) -> Finished:
    """Train a run to its last step, or until a stop signal (runtime/launch/signals.py). Nothing is written before the
    settings and the first batch have been checked, and nothing large is allocated before it is known to fit."""
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    np.random.seed(settings.seed % 2**32)
    chosen = RunDirectory.products_of(settings) if settings.train.products == "auto" else settings.train.products
    use_library(chosen or preferred_library())
    source = recipe.make_source(settings)
    settings = with_steps(settings, source)
    model = recipe.make_model(settings, source)
    optimizer = recipe.make_dense_optimizer(settings)
    workload, plan, predicted = prove(settings, source, model)
    overlap = settings.train.overlap and not settings.train.progressive  # which scores a batch where it is read
    memory_check.check_fits(workload, plan, model, own_rank(), settings.train)
    with ExitStack() as stack:
        stack.enter_context(memory_check.explained(workload))
        threads = set_threads(settings, stack)
        mesh = stack.enter_context(closing(make_mesh(plan)))
        hot = hottest(settings, source, model, plan)
        more: dict[str, Any] = {"hottest": hot, "overlap": overlap, "accumulate": settings.train.accumulate}
        job = build(model, plan, mesh, optimizer=optimizer, clip=settings.dense.clip, **more)
        loader = stack.enter_context(closing(make_loader(settings, source, (mesh.rank, mesh.size))))
        start_from(settings, job, Team(mesh))
        directory = stack.enter_context(closing(open_directory(settings, Team(mesh))))
        run = settings.run.model_copy(update={"name": directory.path.name})
        how = settings.train.model_copy(update={"products": library_in_use()})
        settings = settings.model_copy(update={"run": run, "train": how})
        before = directory.environment().get("threads", torch.get_num_threads())
        directory.describe(settings, workload, plan, predicted, threads)
        watcher = watcher or Silent()
        watcher.begin(directory.path)
        watcher.note(str(threads))
        if before != torch.get_num_threads():
            watcher.note(f"this run had {before} threads before: sums may differ in their last bits from this step on")
        if isinstance(source, ClickLog) and source.training_statistics.warning:
            watcher.note(f"{settings.data.arguments.get('path', 'data')}: {source.training_statistics.warning}")
        if torch.cuda.is_available():
            watcher.note("shardwright train runs on the CPU only; on a GPU, call build() from Python")
        if settings.train.base_batch:
            watcher.note(learning_rate.told(settings.train, job.rates))
        return Run(settings, source, job, loader, directory, watcher).finish()


class Run:
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
        self.told = "" if self.transforms is None else self.transforms.digest
        self.job = job
        self.team = Team(job.mesh)
        self.read: deque[tuple[dict[str, Any], int]] = (
            deque()
        )  # of batches under way: the loader behind it, its samples
        self.behind = loader.state_dict()  # where the loader was behind the last batch that was trained on
        self.loader = loader
        self.directory = directory
        self.watcher = watcher
        self.label = job.model.loss.label if isinstance(job.model.loss, BinaryLoss) else None
        self.samples = 0  # trained on since the start of the run
        self.seconds = 0.0  # spent training since the start of the run
        self.evaluation: dict[str, Any] = {}
        self.progressive: dict[str, Any] = {}  # what stands for it where nothing is held out
        self.patience = learning_rate.Patience(settings.train.patience)
        keep = settings.train.keep_checkpoints
        rounded = next((dtype for what, dtype in INCREMENTS.items() if what in settings.allow), "")
        more: dict[str, Any] = {"rounded": rounded, "changes": job.changes}
        self.saver = Saver(self.team, directory.checkpoints, keep=keep, increments=settings.train.increments, **more)
        self.best = Saver(self.team, directory.best, keep=sys.maxsize)
        more |= {"keep": settings.train.keep_publications, "increments": sys.maxsize}
        self.publisher = Saver(self.team, directory.published, published=True, **more)
        self.best_steps: deque[int] = deque(maxlen=keep + 1)  # as the last checkpoints name them
        self.lifetime = metrics.Lifetime()  # of every batch, scored before the run trained on it
        self.checkpointed = 0  # the step of the last checkpoint
        self.stop = StopRequest(self._say_late)
        of_this_run = hosts()[1] * (torch.get_num_threads() + (0 if settings.data.readers else settings.data.workers))
        self.machine = MachineMeter(float(max(of_this_run, os.cpu_count() or 1)))

    def finish(self) -> Finished:
        self._restore()
        self.checkpointed = self.job.step
        self.directory.keep(self.transforms)
        first, began = self.samples, self.seconds
        self.saver.ready(self.job.model, self.job.optimizer)
        if self.settings.train.publish_every:
            self.publisher.ready(self.job.model, None)
        with closing(self.saver), closing(self.best), closing(self.publisher), self.stop:
            stopped = self._train()
            self.stop.saving()
            self.saver.end()
            self.publisher.end()
        if stopped:
            return Finished(self.directory.path, self.evaluation, 0.0, signal=stopped, step=self.job.step)
        if self.patience.best_step:
            self.job.load(place(self.directory.best, self.patience.best_step))
        if clamped := self.job.check_weights():
            self.watcher.note(
                f"{clamped:,} weights of float16 tables are clamped to the largest float16, 65504: "
                "lower tables.lr, set clip, or keep these tables in bfloat16"
            )
        self._evaluate("test", recipe.test(self.source))
        spent = self.seconds - began
        speed = (self.samples - first) / spent if spent else 0.0
        line = {"kind": "end", "step": self.job.step, "samples": self.samples, "seconds": self.seconds}
        line |= {"clamped_weights": clamped}
        self.directory.log(line | {"samples_per_second": speed, "peak_rss_bytes": metrics.peak_bytes()})
        found, pauses = self.evaluation or self.progressive, tuple(self.saver.pauses)
        return Finished(self.directory.path, found, speed, pauses, step=self.job.step)

    def _train(self) -> int:
        """Train to the last step, until early stopping, or until a stop signal; returns its number, else 0."""
        train = self.settings.train
        left = max(0, train.steps - self.job.step) * train.accumulate if train.steps else None
        # No batch beyond the last is read ahead: it may wait for data that come later, or never.
        batches = itertools.islice(self._scored_first(self._epochs()), left)
        with closing(self.job.run(batches, stop=lambda: self.stop.signal)) as outputs:
            return self._train_on(outputs)

    def _train_on(self, outputs: Iterator[Output]) -> int:
        train = self.settings.train
        window, since, before = self._window(), self.seconds, self.samples
        while (self.job.step < train.steps or not train.steps) and not self.patience.over:
            rate = learning_rate.factor(self.job.step + 1, train)
            self.job.scale_rates(rate)
            start = time.perf_counter()
            taken = self._run_step(outputs)
            if not taken:
                self._save_stopped(window, since, before)
                return self.job.stop_signal or self.stop.signal
            self.stop.step_ended()
            last = self.job.step == train.steps
            saves = bool(train.checkpoint_every) and self.job.step % train.checkpoint_every == 0
            due = self.job.step % train.log_every == 0 or saves or last  # a resumed run begins with a new window
            with self.job.tracer.stage(METRICS):
                for output in taken:
                    window.add(output)
                figures = self.team.window(window).result() if due else {}
            self.seconds += time.perf_counter() - start
            self.watcher.step(self.job.step, self.samples)
            if due:
                speed = (self.samples - before) / (self.seconds - since)
                self._log("train", figures | {"samples_per_second": speed, "seconds": self.seconds, "rate": rate})
                now = {"step": self.job.step, "samples": self.samples, "before": before}
                self.directory.log_machine(now | self.machine.window())
                if train.progressive:
                    self.progressive = self._log("progressive", self.team.lifetime(self.lifetime).result())
                window, since, before = self._window(), self.seconds, self.samples
            if last or train.eval_every and self.job.step % train.eval_every == 0:
                self._evaluate("eval", recipe.evaluation(self.settings, self.source, self.samples))
                self._watch()
            end = last or self.patience.over
            if end or saves:
                self._checkpoint()
            if train.publish_every and (end or self.job.step % train.publish_every == 0):
                with self.stop.writing():
                    self.job.publish_with(self.publisher, {"samples": self.samples, "transforms": self.told})
        return 0

    def _run_step(self, outputs: Iterator[Output]) -> list[Output]:
        """Run a step and return the outputs of its micro-batches; empty if all ranks have stopped before it."""
        before, taken = self.job.step, []
        behind, samples = self.behind, 0
        try:
            while self.job.step == before:
                if (output := next(outputs, None)) is None:
                    if not self.job.stop_signal:
                        raise RuntimeError(f"the batches have ended with step {self.job.step}, before the last step")
                    return []
                taken.append(output)
                behind, more = self.read.popleft()
                samples += more
        except StopRequested:
            return []
        self.behind = behind
        self.samples += samples
        return taken

    def _save_stopped(self, window: metrics.Window, since: float, before: int) -> None:
        """After a stop signal: log the steps since the last line, and save. All ranks are at the same step."""
        if self.job.step == self.checkpointed:
            return
        self.stop.saving()
        if self.samples > before:
            speed = (self.samples - before) / (self.seconds - since)
            figures = self.team.window(window).result()
            self._log("train", figures | {"samples_per_second": speed, "seconds": self.seconds})
        self._checkpoint()

    def _say_late(self, name: str) -> None:
        """Report that no step has ended in time after a signal, and that the process ends without saving."""
        print(
            f"shardwright: {name} was received, but step {self.job.step + 1} has not ended on rank {self.team.rank} "
            f"within {SECONDS_TO_END_STEP:g} s; it ends without saving, the last checkpoint is of step "
            f"{self.checkpointed}; {how_to_resume(self.directory.path)}",
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
            if self.team.size == 1:
                batches = self.stop.interruptible(self.loader, lambda: self.job.between_steps)
            for batch in batches:
                self.read.append((self.loader.state_dict(), samples))
                samples = self.loader.coming
                yield batch

    def _scored_first(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """With progressive validation every batch is evaluated before it is handed out for training."""
        for batch in batches:
            if self.settings.train.progressive and self.label is not None:
                for output in self.job.evaluate([batch]):
                    self.lifetime.add(output.logits, batch.labels[self.label], batch.weights)
            yield batch

    def _window(self) -> metrics.Window:
        strangers = getattr(self.source, "strangers", ())
        return metrics.Window(self.label, self.settings.train.group or None, strangers)

    def _watch(self) -> None:
        """Keep the state of the best evaluation, where a run may stop early."""
        if self.settings.train.patience and self.evaluation:
            figure = self.evaluation.get("ne", self.evaluation["loss"])
            if self.patience.better(figure, self.job.step):
                self.job.check_weights()
                with self.stop.writing():
                    self.job.save_with(self.best, {})
                    self.best.end()

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
        shard = (self.team.rank, self.team.size)
        with closing(Loader(held_out, batch_size=batch_size, shuffle=False, shard=shard)) as loader:
            for output in self.job.evaluate(loader):
                window.add(output)
                self.stop.step_ended()
        figures = self.team.window(window).result()
        if isinstance(held_out, Window) and isinstance(held_out.source, ClickStream) and "ne" in figures:
            figures["bound_ne"] = held_out.source.bound(held_out.lo, held_out.hi).ne
        self.evaluation = self._log(kind, figures)

    def _checkpoint(self) -> None:
        numbers = {
            "loader": self.behind,
            "samples": self.samples,
            "seconds": self.seconds,
            "evaluation": self.evaluation,
            "patience": self.patience.state(),
            "lifetime": self.team.lifetime(self.lifetime).state(),
        }
        with self.stop.writing():
            self.job.save_with(self.saver, numbers)
        self.checkpointed = self.job.step
        self.best_steps.append(self.patience.best_step)
        if self.team.first:
            for path in steps(self.directory.best):
                if path < place(self.directory.best, min(self.best_steps)):
                    drop(path)
        if self.team.first:
            files.write_text(self.job.tracer.timeline().to_chrome(), self.directory.path / "trace.json")

    def _restore(self) -> None:
        checkpoint = self.team.told(str(self.directory.last_checkpoint() or ""))
        if not checkpoint:
            self.directory.rewind(0)
            return
        numbers = read_manifest(Path(checkpoint)).numbers
        self.job.load(checkpoint)
        self.loader.load_state_dict(numbers["loader"])
        self.behind = numbers["loader"]
        self.samples = numbers["samples"]
        self.seconds = numbers["seconds"]
        self.evaluation = numbers["evaluation"]
        self.patience.load(numbers["patience"])
        self.best_steps.append(self.patience.best_step)
        if self.team.first:
            for path in steps(self.directory.best):
                if path > place(self.directory.best, self.job.step):
                    drop(path)  # it is about to be made again, or not to be the best
        if self.team.first:
            self.lifetime.load(numbers["lifetime"])
        self.directory.rewind(self.job.step)
