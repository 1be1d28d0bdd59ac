"""What is measured before a run (runtime/run/measure_loop.py) and enters its prediction: reading a batch, a loader
worker that prepares the next, metrics, and the dense part's forward and backward pass.

They are no part of a plan: all ranks must make the same plan, and no two measurements agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.planner.price import primitives
from shardwright.planner.problem import Problem
from shardwright.planner.step import block_tasks
from shardwright.planner.step.simulate import MAIN, Task
from shardwright.spec.plan import Stage

READ, PREPARE, METRICS = "read", "prepare", "metrics"


@dataclass(frozen=True, slots=True)
class LoopCost:
    """Seconds per batch on each rank, and what ranks exchange for metrics.

    `read_seconds` of the rank's own thread; `prepare_seconds` of a loader worker, 0 without one. While the worker and
    the rank's computation both run, each has `shared_rate` of its speed. At every log line, that is every
    `log_batches` batches, results of `gathered_bytes` are all-gathered one after the other. `bottom_seconds`
    and `top_seconds` are those of the dense part and the loss, forward and backward: what runs while vectors or their
    gradients travel, and the rest; 0: not measured, the planner's prices count.
    """

    read_seconds: float = 0.0
    prepare_seconds: float = 0.0
    metrics_seconds: float = 0.0
    shared_rate: float = 1.0
    gathered_bytes: tuple[int, ...] = ()
    batches_per_log: int = 1
    bottom_seconds: tuple[float, float] = (0.0, 0.0)
    top_seconds: tuple[float, float] = (0.0, 0.0)

    def add_loop_stages(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """The stages of a step with those of the loop: `prepare` is one batch ahead of `read`, `metrics` come last."""
        found: list[Stage] = []
        for stage in stages:
            if stage.name == READ and self.prepare_seconds:
                found.append(Stage(PREPARE, PREPARE, (), ("rows",), stage.lead + 1))
                found.append(replace(stage, reads=("rows",)))
            else:
                found.append(stage)
        return (*found, Stage(METRICS, MAIN)) if self.metrics_seconds or self.gathered_bytes else tuple(found)

    def apply_measured_pace(self, problem: Problem) -> Problem:
        """The problem with the dense part as fast as it was measured."""
        low, top = (
            [block for block in problem.workload.blocks if block.needs_vectors == needed] for needed in (False, True)
        )
        paces: list[tuple[float, float]] = []
        for way, below, above in zip(("forward", "backward"), self.bottom_seconds, self.top_seconds, strict=True):
            bottom, rest = (block_tasks.pass_task(problem, each, way).seconds_on(0) for each in (low, top))
            if not (above and rest):
                return problem
            paces.append((below / bottom, above / rest) if bottom else (1.0, (below + above) / rest))
        (bottom_forward, top_forward), (bottom_backward, top_backward) = paces
        return replace(problem, bottom_pace=(bottom_forward, bottom_backward), top_pace=(top_forward, top_backward))

    def loop_tasks(self, problem: Problem) -> dict[str, Task]:
        """What each of the loop's stages takes. On a GPU computation leaves the processor to the worker."""
        gathers = [
            primitives.collective_cost(problem.cluster, "all_gather", problem.level_names, size)
            for size in self.gathered_bytes
        ]
        links = sum(one.seconds for one in gathers) / self.batches_per_log
        rate = self.shared_rate if problem.cluster.device.kind == "cpu" else 1.0
        return {
            READ: Task(seconds=self.read_seconds, kind="read"),
            PREPARE: Task(seconds=self.prepare_seconds, kind="read", shared_rate=rate),
            METRICS: Task(seconds=self.metrics_seconds + links, link_seconds=links),
        }
