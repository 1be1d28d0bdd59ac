"""Costs of the training loop, measured before a run (runtime/run/measure_loop.py), for its prediction.

They are the costs of reading a batch, of the loader worker that prepares the next batch, of metrics, and of forward and
backward of the dense model. They are no part of a plan: all ranks must make the same plan, and measurements differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.planner.price import primitives
from shardwright.planner.problem import Problem
from shardwright.planner.step import block_tasks
from shardwright.planner.step.rank_calls import Task
from shardwright.spec.lanes import MAIN
from shardwright.spec.plan import Stage

READ, PREPARE, METRICS = "read", "prepare", "metrics"


@dataclass(frozen=True, slots=True)
class LoopCost:
    """Seconds per batch on each rank, and the bytes that ranks all-gather for metrics.

    `read_seconds` are on the rank's own thread, `prepare_seconds` in a loader worker (0: no worker). While the worker
    and the rank's computation both run, each runs at `shared_rate` of its speed. Every `batches_per_log` batches,
    results of `gathered_bytes` are all-gathered one after the other. `bottom_seconds` (overlapped with the exchange of
    vectors or their gradients) and `top_seconds` are of the dense model and the loss, forward and backward, of one
    micro-batch of a pipeline, the backward with what activation checkpointing repeats; 0: not measured, the planner's
    prices are used. All blocks may be the bottom, or the top.
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
        """Add the loop's stages: `prepare` one batch ahead of `read`, `metrics` last."""
        with_loop: list[Stage] = []
        for stage in stages:
            if stage.name == READ and self.prepare_seconds:
                with_loop.append(Stage(PREPARE, PREPARE, (), ("rows",), stage.lead + 1))
                with_loop.append(replace(stage, reads=("rows",)))
            else:
                with_loop.append(stage)
        return (*with_loop, Stage(METRICS, MAIN)) if self.metrics_seconds or self.gathered_bytes else tuple(with_loop)

    def apply_measured_pace(self, problem: Problem) -> Problem:
        """The problem with the measured speed of the dense model."""
        parts = 1 if problem.pipeline is None else problem.pipeline.micro_batches
        micro_batch, split = replace(problem, micro_batches=parts), block_tasks.split_blocks(problem)
        paces: list[tuple[float, float]] = []
        for direction, low, high in zip(("forward", "backward"), self.bottom_seconds, self.top_seconds, strict=True):
            bottom, top = (
                block_tasks.backward_task(micro_batch, blocks).seconds_on(0)
                if direction == "backward"
                else block_tasks.pass_task(micro_batch, blocks, direction).seconds_on(0)
                for blocks in split
            )
            if not (high if bottom and top else (low + high) * (bottom + top)):
                return problem
            all_blocks = (low + high) / (bottom + top)
            paces.append((low / bottom, high / top) if bottom and top else (all_blocks, all_blocks))
        (bottom_forward, top_forward), (bottom_backward, top_backward) = paces
        return replace(problem, bottom_pace=(bottom_forward, bottom_backward), top_pace=(top_forward, top_backward))

    def loop_tasks(self, problem: Problem) -> dict[str, Task]:
        """The task of each loop stage. On a GPU, computation leaves the processor to the worker."""
        all_gathers = [
            primitives.collective_cost(problem.cluster, "all_gather", problem.level_names, size)
            for size in self.gathered_bytes
        ]
        link_seconds = sum(cost.seconds for cost in all_gathers) / self.batches_per_log
        rate = self.shared_rate if problem.cluster.device.kind == "cpu" else 1.0
        return {
            READ: Task(seconds=self.read_seconds, kind="read"),
            PREPARE: Task(seconds=self.prepare_seconds, kind="read", shared_rate=rate),
            METRICS: Task(seconds=self.metrics_seconds + link_seconds, link_seconds=link_seconds),
        }
