"""A model in training: whole steps by `run`, or the batches of a user training loop."""

import gc
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.checkpoint.manifest import MODEL_PREFIX
from shardwright.checkpoint.reading import Checkpoint
from shardwright.checkpoint.step_directories import checkpoint_path as step_folder
from shardwright.comm.heartbeat import PeerLost
from shardwright.embeddings.copies.bounded_group import CopyCounts
from shardwright.embeddings.exchange import ShardedTables
from shardwright.embeddings.growing_tables import growth_counts
from shardwright.errors import UserError
from shardwright.jagged import Batch, check_batch
from shardwright.kernels.cache_index import CacheCounts
from shardwright.kernels.finite import NONFINITE_REMEDY, first_nonfinite_row, num_saturated
from shardwright.kernels.matmul import library_in_use, use_library
from shardwright.measure.describe import sparse_of
from shardwright.planner.step.stages import evaluation_stages
from shardwright.rectangle import loaded_chunks
from shardwright.runtime.accumulation import GradientAccumulation
from shardwright.runtime.bindings import StepBindings
from shardwright.runtime.changed_rows import ChangedRows
from shardwright.runtime.optimizer_state import trainable_names
from shardwright.runtime.outputs import Output
from shardwright.runtime.rank_group import ONE_RANK, RankGroup
from shardwright.runtime.saving import CheckpointState, Saver
from shardwright.runtime.state import LocalState, SavedState, State, restore_residuals
from shardwright.runtime.user_loop import UserLoop, single_process_batches
from shardwright.spec.pipeline import rank_schedule, rank_stages
from shardwright.spec.plan import Plan
from shardwright.step.executor import run_calls
from shardwright.step.tracer import Tracer


class Job:
    """A model in training. `run` executes whole steps; `loader` yields the batches of a user training loop."""

    def __init__(
        self,
        plan: Plan,
        step: StepBindings,
        *,
        overlap: bool = True,
        user_loop: UserLoop | None = None,
        residuals: Sequence[Tensor] = (),
    ) -> None:
        """Created by `build`. `user_loop`: user training loops over several ranks; `residuals`: of error feedback."""
        self.plan = plan
        self._overlap = overlap
        self.mesh = step.mesh
        self.model: Any = step.model
        self.optimizer = step.optimizer
        self.tracer = Tracer(
            rank=step.mesh.rank,
            device=step.mesh.device,
            micro_batches=step.accumulation.num_micro_batches,
            sent=step.mesh.sent,
        )
        self._step = step
        self._user_loop = user_loop
        self.local_state = LocalState(
            step.model,
            step.optimizer,
            residuals,
            step.mesh.rank,
            is_writer=plan.position(step.mesh.rank, plan.sample_axes)[0] == 0,
            ranks=RankGroup(step.mesh) if plan.pipeline is not None else ONE_RANK,
        )
        self.changes = ChangedRows()
        self._publishers: dict[Path, Saver] = {}
        self._rates = [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []
        self._table_optimizer = sparse.optimizer if (sparse := sparse_of(self.model)) else None

    @property
    def step(self) -> int:
        """Number of training steps done."""
        return self._step.num_steps

    @property
    def between_steps(self) -> bool:
        """Whether the next batch to be read is the first micro-batch of a step."""
        return self._step.accumulation.between_steps

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates that the job was built with: of the tables, and of each group of the dense optimizer."""
        rates = {"tables": self._table_optimizer.lr} if self._table_optimizer is not None else {}
        groups = ["dense"] if len(self._rates) == 1 else [f"dense group {i}" for i, _ in enumerate(self._rates)]
        return rates | dict(zip(groups, self._rates, strict=True))

    @property
    def stop_signal(self) -> int:
        """The nonzero number returned by `stop` on some rank, which ended the last `run` early; 0: not stopped."""
        return self._step.accumulation.agreed_stop_signal

    def run(self, loader: Iterable[Batch], *, stop: Callable[[], int] = lambda: 0) -> Generator[Output, None, None]:
        """Train on every batch and yield its output after its updates; training advances only as you iterate.

        With gradient accumulation the updates come with the last micro-batch of a step; if you stop inside a step, its
        micro-batches are lost. A model in evaluation mode is put into training mode; submodules that you set to eval()
        in a model in training mode stay so. Stages that run ahead take more batches from the loader; those are lost if
        you stop before its end. `stop` is called for every batch, in a pipeline once a step. Once it returns a nonzero
        number (such as a signal's) on any rank, all ranks stop after the same step, up to six steps later where stages
        run ahead, up to ten where tables have caches.
        """
        self._check_trained()
        if self._user_loop is not None:
            self._user_loop.stop()
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
        step.is_watched = True
        batches = step.read_from(loader)
        frozen = gc.get_freeze_count() > 0  # by another run, or the user
        unfreeze = gc.unfreeze  # bound here: at interpreter exit the module `gc` may be gone
        if not frozen:
            gc.freeze()  # a collection over all objects takes as long as a step, and every rank waits for it
        try:
            num_micro_batches = step.accumulation.num_micro_batches
            for _ in run_calls(
                step.stages,
                step.bindings,
                self.tracer,
                overlap=self._overlap,
                micro_batches=num_micro_batches,
                schedule=rank_schedule(self.plan, self.mesh.rank, num_micro_batches, overlap=self._overlap),
                num_done=step.num_steps,
            ):
                self.tracer.release_finished()
                while step.outputs:
                    yield step.outputs.popleft()
        except Exception as error:
            if self.mesh.heartbeat is not None and not isinstance(error, PeerLost):
                self.mesh.heartbeat.report_failure(error)
            raise
        finally:
            if not frozen:
                unfreeze()
            if step.batches is batches:
                step.clear()

    def evaluate(self, loader: Iterable[Batch]) -> Iterator[Output]:
        """Yield the output of each batch without updates; between outputs every module is in its previous mode."""
        self._flush_copies()
        plan, parts = replace(self.plan, stages=evaluation_stages(self.plan.stages)), self._step.accumulation.parts
        step = StepBindings(
            self.model,
            rank_stages(plan, self.mesh.rank),
            self.mesh,
            self._step.announcer,
            self._step.layout,
            GradientAccumulation(parts=parts),
            autocast_dtype=self._step.autocast_dtype,
        )
        step.host_batches = self._step.host_batches
        step.read_from(loader)
        schedule = rank_schedule(plan, self.mesh.rank, parts, overlap=False)
        steps = run_calls(step.stages, step.bindings, overlap=False, micro_batches=parts, schedule=schedule)
        try:
            while True:
                with _eval_mode(self.model):
                    if next(steps, None) is None:
                        return
                yield from step.outputs
                step.outputs.clear()
        finally:
            step.clear()

    def scale_rates(self, factor: float) -> None:
        """Set every learning rate, including the tables', to `factor` times the rate that the job was built with."""
        for group, rate in zip(self.optimizer.param_groups if self.optimizer else [], self._rates, strict=True):
            group["lr"] = rate * factor
        if self._table_optimizer is not None:
            self.model.sparse.optimizer = replace(self._table_optimizer, lr=self._table_optimizer.lr * factor)

    def loader(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Checked batches on the device for a user training loop, in which tables update inside loss.backward().

        Over several ranks, each rank gives its local batches. `loss` is the mean over the local batch,
        weighted by `loss.weight(batch)` if there is one. When its backward returns, every parameter's .grad has the
        gradient of the mean over the global batch, once per batch. The loss of a local batch without weight does not
        count. For bf16 use torch.autocast in the loop.
        """
        self._check_trained()
        if self.plan.pipeline is not None:
            raise UserError("a pipeline trains in job.run: its order of micro-batches is part of the plan")
        if self.plan.experts:  # the loss's share of the global batch is needed before gradients of experts mix
            raise UserError("expert parallelism trains in job.run: train there, or plan without it")
        if self._step.accumulation.num_micro_batches > 1:
            raise UserError("accumulate is for job.run: in a user training loop tables update in every backward pass")
        if self._user_loop is not None:
            yield from self._user_loop.batches(loader, self.tracer)
            return
        if self._step.sharded_models:
            yield from single_process_batches(self._step.sharded_models[0], loader, self.mesh.device)
            return
        for batch in loader:
            check_batch(batch)
            yield batch.to(self.mesh.device)

    def state(self) -> State:
        """The full state of the job by logical name, from which training can continue.

        The tensors are the job's own, not copies: write or clone them before the next step. All ranks must call it;
        only rank 0 gets the full tables, and every rank all chunks of a pipeline: they need the memory for them. Error
        feedback residuals and the random generators of other ranks are not included: use `save` for those.
        """
        self._prepare_state_access()
        return self.local_state.capture(self.step)

    def load_state(self, state: SavedState) -> list[str]:
        """Continue from a state of the same model; a missing or unexpected name is an error.

        Returns the names of tensors that have another dtype in this job; their values were converted to it.
        """
        self._prepare_state_access()
        converted = self.local_state.restore(state)
        if library := state.numbers.get("products"):  # another order of sums would change the last bits
            use_library(library)
        restore_residuals(state, self.local_state.residuals, self.mesh.rank, self.mesh.size)
        self._step.num_steps = state.numbers["step"]
        self.changes.begin_lineage()
        return converted

    def save(self, root: str | Path) -> Path:
        """Write a checkpoint under `root` and wait until it is complete. All ranks call it; `root` must be shared."""
        saver = Saver(RankGroup(self.mesh), Path(root), keep=sys.maxsize)
        self.save_with(saver, {})
        saver.wait()
        return step_folder(Path(root), self.step)

    def save_with(self, saver: Saver, numbers: Mapping[str, Any]) -> None:
        """Begin a checkpoint that is written while training continues; `numbers` (JSON) are stored with it."""
        self._prepare_state_access()
        saver.begin(self.local_state, {"job": self.local_state.numbers(self.step), **numbers})

    def load(self, path: str | Path) -> list[str]:
        """Continue from a checkpoint of any number of ranks and any plan; every rank reads only its own part.

        Returns the names of tensors that have another dtype in this job. Damage is detected while values are read; the
        job's state is undefined after that error.
        """
        with closing(Checkpoint(path)) as checkpoint:
            return self.load_state(CheckpointState(checkpoint))

    def start_from(self, path: str | Path) -> list[str]:
        """Start at step 0 with the weights and optimizer state of another run's checkpoint.

        The settings of the dense optimizer (such as learning rates) and the random generators keep this job's values.
        Returns the same as `load`.
        """
        groups = [{**group} for group in self.optimizer.param_groups] if self.optimizer else []
        random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        library = library_in_use()
        converted = self.load(path)
        use_library(library)
        for group, settings in zip(self.optimizer.param_groups if self.optimizer else [], groups, strict=True):
            group.update({name: value for name, value in settings.items() if name != "params"})
        torch.set_rng_state(random_states[0])
        random.setstate(random_states[1])
        np.random.set_state(random_states[2])
        self._step.num_steps = 0
        return converted

    def cache_counts(self) -> dict[str, CacheCounts]:
        """By table with a cache: distinct rows of batches, and how many were missing there; on this rank."""
        sparse = sparse_of(self.model)
        return sparse.exchange.cache_counts() if sparse is not None else {}

    def copy_counts(self) -> dict[str, CopyCounts]:
        """By tables with bounded staleness, or on servers, that share their copies, on this rank."""
        exchange = self.model.sparse.exchange if sparse_of(self.model) is not None else None
        tables = exchange.copied_tables if isinstance(exchange, ShardedTables) else ()
        return {name: counts for each in tables for name, counts in each.counts().items()}

    def growth_counts(self) -> dict[str, dict[str, int]]:
        """By table that grows, on this rank: rows that it may have and has, entries of the map of ids, and rows that
        have expired or were evicted so far."""
        exchange = self.model.sparse.exchange if sparse_of(self.model) is not None else None
        return growth_counts(exchange) if isinstance(exchange, ShardedTables) else {}

    def check_weights(self) -> int:
        """Raise the same error on every rank if a weight is NaN or infinite: tables, dense parameters and buffers.

        All ranks call it between steps; each reads its own weights once (rows on disk were checked when they were
        written), then they all-gather the results. Returns the number of weights of float16 tables that are clamped to
        the largest float16.
        """
        self._prepare_state_access()
        num_clamped, error = 0, ""
        for weight in self.local_state.weights():
            index = first_nonfinite_row(weight.values) if weight.stored is None else weight.stored.nonfinite_row()
            if index is not None and not error:
                row = weight.rows[0] + index if isinstance(weight.rows, tuple) else int(weight.rows[index])
                error = (
                    f'step {self.step}: "{weight.name.removeprefix(MODEL_PREFIX)}" is not finite in row {row}; '
                    f"{NONFINITE_REMEDY}"
                )
            if weight.values.dtype == torch.float16:
                num_clamped += sum(num_saturated(chunk.values) for chunk in loaded_chunks(weight))
        rank_group = RankGroup(self.mesh)
        if errors := [rank_error for rank_error in rank_group.all_gather_text(error) if rank_error]:
            raise UserError(errors[0])
        return int(rank_group.all_gather(torch.tensor([num_clamped])).sum())

    def publish(self, root: str | Path, *, keep: int = 100) -> Path:
        """Publish the table rows that changed since the last publication under `root`; the first one is full.

        Predictors that follow `root` load it. All ranks call it; it is complete when the call returns. The last `keep`
        publications are kept.
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
        saver.begin(self.local_state, {"job": {"step": self.step}, **numbers})

    def _prepare_state_access(self) -> None:
        """Raise inside a step; free all-gathered parameters, so that a sharded model holds only its shards."""
        if self._step.inside_step:
            raise UserError(
                f"a job's state is complete only between steps, and this job is inside step {self.step + 1}; "
                "continue job.run until job.step increases"
            )
        for sharded in self._step.sharded_models:
            sharded.reshard()
        self._flush_copies()

    def _flush_copies(self) -> None:
        """Send all updates that copies of rows keep, and forget the copies. All ranks call it."""
        sparse = sparse_of(self.model)
        if sparse is not None and isinstance(sparse.exchange, ShardedTables):
            for tables in sparse.exchange.copied_tables:
                tables.flush()


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
