"""A model in training, driven step by step or handed to a user's own loop."""

import gc
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.checkpoint.manifest import MODEL_PREFIX
from shardwright.checkpoint.reading import Checkpoint
from shardwright.checkpoint.step_directories import checkpoint_path as step_folder
from shardwright.comm.heartbeat import PeerLost
from shardwright.comm.mesh import Mesh
from shardwright.errors import UserError
from shardwright.jagged import Batch, check_batch
from shardwright.kernels.finite import NONFINITE_REMEDY, first_nonfinite_row, num_saturated
from shardwright.kernels.matmul import library_in_use, use_library
from shardwright.measure.describe import sparse_of
from shardwright.runtime.bindings import Output, StepBindings, trainable_names
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.saving import ChangedRows, CheckpointState, Saver
from shardwright.runtime.sharded_bindings import ShardedBindings
from shardwright.runtime.state import (
    SavedState,
    State,
    capture,
    collect_numbers,
    local_weights,
    restore,
    restore_residuals,
)
from shardwright.runtime.user_loop import UserLoop, single_process_batches
from shardwright.spec.plan import Plan
from shardwright.step.overlapped import run_overlapped
from shardwright.step.serial import run_serial
from shardwright.step.tracer import Tracer


class Job:
    """A model in training. `run` drives whole steps; `loader` leaves the loop to its user."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        step: StepBindings,
        *,
        overlap: bool = True,
        own: UserLoop | None = None,
        kept: Sequence[Tensor] = (),
    ) -> None:
        """`kept`: what rounding on the wire is still to add."""
        self.plan = plan
        self._execute = run_overlapped if overlap else run_serial
        self.mesh = mesh
        self.model: Any = step.model
        self.optimizer = step.optimizer
        self.tracer = Tracer(rank=mesh.rank, device=mesh.device)
        if step.sharded_model is not None:
            step.sharded_model.trace_wait = self.tracer.trace_wait
        self._step = step
        self._own = own
        self._kept = kept
        self.changes = ChangedRows()
        self._publishers: dict[Path, Saver] = {}
        self._rates = [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []
        self._table_optimizer = sparse.optimizer if (sparse := sparse_of(self.model)) else None

    @property
    def step(self) -> int:
        """Training steps done."""
        return self._step.num_steps

    @property
    def between_steps(self) -> bool:
        """Whether the next batch that is read is the first of a step."""
        return self._step.accumulation.between_steps

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates it was built with: of the tables, and of each group of the dense optimizer."""
        found = {"tables": self._table_optimizer.lr} if self._table_optimizer is not None else {}
        groups = ["dense"] if len(self._rates) == 1 else [f"dense group {at}" for at, _ in enumerate(self._rates)]
        return found | dict(zip(groups, self._rates, strict=True))

    @property
    def stop_signal(self) -> int:
        """The number by which `stop` on some rank ended the last `run` early; 0: none did."""
        return self._step.accumulation.agreed_stop_signal

    def run(self, loader: Iterable[Batch], *, stop: Callable[[], int] = lambda: 0) -> Generator[Output, None, None]:
        """Train on every batch, yielding its output once its updates are in the model: iterate to make it train.

        Where several batches make a step, that is with the last of them; a step that you stop inside is lost.
        A model in evaluation mode is put into training mode; parts that you have set to eval() alone stay so. Where
        stages run ahead, as many batches more are taken from the loader; they are lost when you stop before its end.
        `stop` is called for every batch: once it returns a nonzero number on any rank, such as a signal's, all ranks
        stop after the same step, up to five steps later where stages run ahead.
        """
        self._check_trained()
        if self._own is not None:
            self._own.stop()
        if not self.model.training:
            self.model.train()
        return self._run(loader, stop)

    def _check_trained(self) -> None:
        for name in sorted(self._step.trainable_names ^ trainable_names(self.model)):
            change = "was frozen" if name in self._step.trainable_names else "became trainable"
            raise UserError(f'parameter "{name}" {change} after build(); build a new job for it')

    def _run(self, loader: Iterable[Batch], stop: Callable[[], int]) -> Generator[Output, None, None]:
        step = self._step
        step.accumulation.poll_stop, step.accumulation.agreed_stop_signal = stop, 0
        step.watch = self.mesh.heartbeat
        batches = step.batches = chain(loader)
        step.accumulation.clear()
        frozen = gc.get_freeze_count() > 0  # by another run, or the user
        unfreeze = gc.unfreeze  # a run that outlives the interpreter finds no module
        if not frozen:
            gc.freeze()  # to search all there is for garbage takes as long as a step, and every rank waits for it
        try:
            for _ in self._execute(
                self.plan.stages,
                step.bindings,
                self.tracer,
                num_done=step.num_steps * step.accumulation.num_micro_batches,
            ):
                self.tracer.release_finished()
                yield step.outputs.popleft()
        except Exception as error:
            if self.mesh.heartbeat is not None and not isinstance(error, PeerLost):
                self.mesh.heartbeat.report_failure(error)
            raise
        finally:
            if not frozen:
                unfreeze()
            if step.batches is batches:
                step.accumulation.clear()

    def evaluate(self, loader: Iterable[Batch]) -> Iterator[Output]:
        """Outputs without any update; between them every module is in the mode it was in."""
        products = getattr(torch, self.plan.dense.dtype)
        sparse = sparse_of(self.model)
        cut = sparse is not None and sparse.exchange is not None
        step = StepBindings(
            self.model,
            None,
            self.mesh.device,
            autocast_dtype=products,
            training=False,
            sharded=(ShardedBindings(self.model, training=False), self.plan.stages) if cut else None,
            sharded_model=self._step.sharded_model,
        )
        step.batches = iter(loader)
        steps = run_serial(step.stages, step.bindings)
        while True:
            with _evaluating(self.model):
                if next(steps, None) is None:
                    return
            yield step.outputs.popleft()

    def scale_rates(self, factor: float) -> None:
        """Set every learning rate, of tables too, to so many times what it was when the job was built."""
        for group, rate in zip(self.optimizer.param_groups if self.optimizer else [], self._rates, strict=True):
            group["lr"] = rate * factor
        if self._table_optimizer is not None:
            self.model.sparse.optimizer = replace(self._table_optimizer, lr=self._table_optimizer.lr * factor)

    def loader(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Checked batches on the device for a user's own loop; there tables update inside loss.backward().

        Over several ranks each gives its own part of a batch. Then `loss`, the mean over that, has gradients of the
        mean over all ranks' samples in every parameter's .grad when backward returns, once for each batch. The loss of
        a part without samples is no number, and counts nothing. To multiply in bf16 is up to the loop (torch.autocast).
        """
        self._check_trained()
        if self._step.accumulation.num_micro_batches > 1:
            raise UserError("accumulate is for job.run: in a loop of your own tables update in every backward pass")
        if self._own is not None:
            yield from self._own.batches(loader)
            return
        if self._step.sharded_model is not None:
            yield from single_process_batches(self._step.sharded_model, loader, self.mesh.device)
            return
        for batch in loader:
            check_batch(batch)
            yield batch.to(self.mesh.device)

    def state(self) -> State:
        """All that a continuation needs, by logical name.

        The tensors are the job's own, not copies: write or clone them before the next step. Over several ranks all
        must ask; the first has whole tables, and needs the memory for them. What rounding on the wire is still to add,
        and the random numbers of other ranks, are not in it: `save` has them.
        """
        self._between_steps()
        return capture(self.model, self.optimizer, self.step)

    def load_state(self, state: SavedState) -> list[str]:
        """Continue from a state of the same model; a missing or unexpected name is an error.

        Returns the names of tensors that have another dtype here, to which they were rounded.
        """
        self._between_steps()
        rounded = restore(state, self.model, self.optimizer, self.mesh.rank)
        if library := state.numbers.get("products"):  # another order of sums would change the last bits
            use_library(library)
        restore_residuals(state, self._kept, self.mesh.rank, self.mesh.size)
        self._step.num_steps = state.numbers["step"]
        self.changes.begin_lineage()
        return rounded

    def save(self, root: str | Path) -> Path:
        """Write a checkpoint under `root`, complete when this returns: all ranks write, to files that all ranks see."""
        saver = Saver(RankGroup(self.mesh), Path(root), keep=sys.maxsize)
        self.save_with(saver, {})
        saver.wait()
        return step_folder(Path(root), self.step)

    def save_with(self, saver: Saver, numbers: Mapping[str, Any]) -> None:
        """Begin a checkpoint beside the steps that follow; `numbers` (JSON) come back with it."""
        self._between_steps()
        mine = collect_numbers(self.model, self.optimizer, self.step)
        saver.begin(self.model, self.optimizer, self._kept, {"job": mine, **numbers})

    def load(self, path: str | Path) -> list[str]:
        """Continue from a checkpoint, whatever the ranks and the plan that wrote it; every rank reads its own part.

        Returns the names of tensors that have another dtype here. One that is damaged is told when it is read: the job
        is then neither what it was nor what the checkpoint is.
        """
        with closing(Checkpoint(path)) as found:
            return self.load_state(CheckpointState(found))

    def start_from(self, path: str | Path) -> list[str]:
        """Begin, at step 0, with the weights and the optimizers' memory of a checkpoint of another run.

        How the dense optimizer is set, and random generators, stay as they are here. Returns what `load` does.
        """
        kept = [{**group} for group in self.optimizer.param_groups] if self.optimizer else []
        drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()
        library = library_in_use()
        rounded = self.load(path)
        use_library(library)
        for group, before in zip(self.optimizer.param_groups if self.optimizer else [], kept, strict=True):
            group.update({name: value for name, value in before.items() if name != "params"})
        torch.set_rng_state(drawn[0])
        random.setstate(drawn[1])
        np.random.set_state(drawn[2])
        self._step.num_steps = 0
        return rounded

    def check_weights(self) -> int:
        """Raise the same error on every rank if a weight is NaN or infinite: tables, dense parameters and buffers.

        All ranks call it between steps; each reads its own weights once, then they all-gather the results. Returns the
        number of weights of float16 tables that are clamped to the largest float16.
        """
        self._between_steps()
        clamped, fault = 0, ""
        for one in local_weights(self.model, self.mesh.rank):
            at = first_nonfinite_row(one.values)
            if at is not None and not fault:
                row = one.rows[0] + at if isinstance(one.rows, tuple) else int(one.rows[at])
                fault = (
                    f'step {self.step}: "{one.name.removeprefix(MODEL_PREFIX)}" is not finite in row {row}; '
                    f"{NONFINITE_REMEDY}"
                )
            clamped += num_saturated(one.values)
        team = RankGroup(self.mesh)
        if faults := [one for one in team.all_gather_text(fault) if one]:
            raise UserError(faults[0])
        return int(team.all_gather(torch.tensor([clamped])).sum())

    def publish(self, root: str | Path, *, keep: int = 100) -> Path:
        """Tell predictors that follow `root` the rows that changed since it was told last; whole at first.

        All ranks call it; complete when it returns. The last `keep` stay.
        """
        root = Path(root)
        if root not in self._publishers:
            self._publishers[root] = Saver(
                RankGroup(self.mesh),
                root,
                keep=keep,
                increments=sys.maxsize,
                changes=self.changes,
                is_publication=True,
            )
        self.publish_with(self._publishers[root], {})
        self._publishers[root].wait()
        return step_folder(root, self.step)

    def publish_with(self, saver: Saver, numbers: Mapping[str, Any]) -> None:
        """Begin a publication for predictors, which is written while training continues.

        A NaN or infinite weight is an error, and nothing is published.
        """
        self.check_weights()
        saver.begin(self.model, None, (), {"job": {"step": self.step}, **numbers})

    def _between_steps(self) -> None:
        if not self._step.accumulation.is_last:
            raise UserError(
                f"a job has a state between steps only, and this one is inside step {self.step + 1}: "
                "go on with job.run until job.step has grown"
            )
        if self._step.sharded_model is not None:
            self._step.sharded_model.reshard()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
