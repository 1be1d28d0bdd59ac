"""A model in training, driven step by step or handed to a user's own loop."""

from collections.abc import Iterable, Iterator
from typing import Any

from shardwright.comm.mesh import Mesh
from shardwright.jagged import Batch, check
from shardwright.runtime.serial import run_serial
from shardwright.runtime.state import State, capture, restore
from shardwright.runtime.step import Output, Step, stages
from shardwright.runtime.tracer import Tracer
from shardwright.spec.plan import Plan


class Job:
    """A model in training. `run` drives whole steps; `loader` leaves the loop to its user."""

    def __init__(self, plan: Plan, mesh: Mesh, step: Step) -> None:
        self.plan = plan
        self.mesh = mesh
        self.model: Any = step.model
        self.optimizer = step.optimizer
        self.tracer = Tracer(rank=mesh.rank, device=mesh.device)
        self._step = step

    @property
    def step(self) -> int:
        """Training steps done."""
        return self._step.count

    def run(self, loader: Iterable[Batch]) -> Iterator[Output]:
        """Train on every batch, yielding its output once its updates are in the model."""
        self.model.train()
        self._step.batches = iter(loader)
        for _ in run_serial(self.plan.stages, self._step.bindings(), self.tracer):
            yield self._step.emitted.popleft()

    def evaluate(self, loader: Iterable[Batch]) -> Iterator[Output]:
        """Outputs without any update."""
        step = Step(self.model, None, self.mesh.device, training=False)
        step.batches = iter(loader)
        self.model.eval()
        try:
            for _ in run_serial(stages(self.model, training=False), step.bindings()):
                yield step.emitted.popleft()
        finally:
            self.model.train()

    def loader(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Checked batches on the device for a user's own loop; there tables update inside loss.backward()."""
        for batch in loader:
            check(batch)
            yield batch.to(self.mesh.device)

    def state(self) -> State:
        """All that a continuation needs, by logical name."""
        return capture(self.model, self.optimizer, self.step)

    def load_state(self, state: State) -> None:
        """Continue from a state of the same model; a missing or unexpected name is an error."""
        restore(state, self.model, self.optimizer)
        self._step.count = state.numbers["step"]
