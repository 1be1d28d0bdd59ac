"""The search for how a model of layers is split: all degrees that divide, pruned by memory, ranked by time.

Each candidate that fits gets an estimate from the work of its busiest rank and the fill of its pipeline. Those with the
shortest estimates are played pass by pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwright.planner.layers.degrees import Degrees, Recomputation, SequenceBatch, degree_errors, even_cuts
from shardwright.planner.layers.layer_time import LayerTimer, Overheads
from shardwright.planner.layers.memory import StageMemory, stage_memory
from shardwright.planner.layers.step_time import StepSeconds, estimate_step, step_seconds
from shardwright.spec.cluster import Cluster
from shardwright.spec.transformer import Transformer

MICRO_SEQUENCES = (1, 2, 4)
RECOMPUTATIONS: tuple[Recomputation, ...] = ("none", "memory-bound", "full")
MAX_CONTEXT, MIN_PART = 16, 1024  # ranks of context parallelism; tokens of a sequence on each
NUM_PLAYED = 60


@dataclass(frozen=True, slots=True)
class Training:
    """What is to be planned. `memory_bytes`: of a rank, that states and activations may use; `host_bytes`: of a rank,
    for offload; 0: no offload."""

    model: Transformer
    sequences: int
    length: int
    num_ranks: int
    cluster: Cluster
    memory_bytes: float
    host_bytes: float = 0.0
    overheads: Overheads = Overheads()


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A way to split that fits."""

    degrees: Degrees
    batch: SequenceBatch
    memory: tuple[StageMemory, ...]
    step: StepSeconds

    @property
    def fullest(self) -> StageMemory:
        return max(self.memory, key=lambda stage: stage.total)


def all_degrees(training: Training) -> Iterator[tuple[Degrees, SequenceBatch]]:
    """Every way to split that divides."""
    model, num = training.model, training.num_ranks
    for tensor in _divisors(min(training.cluster.ranks_per_host, num)):
        for context in _divisors(num // tensor):
            if context > MAX_CONTEXT or (context > 1 and training.length // context < MIN_PART):
                continue
            for pipeline in _divisors(num // (tensor * context)):
                data = num // (tensor * context * pipeline)
                if pipeline > model.layers or training.sequences % data:
                    continue
                yield from _with_chunks(training, tensor, context, pipeline, data)


def _with_chunks(
    training: Training, tensor: int, context: int, pipeline: int, data: int
) -> Iterator[tuple[Degrees, SequenceBatch]]:
    for cuts in _all_cuts(training.model.layers, pipeline):
        for expert in _expert_degrees(training.model, data * context):
            for recompute in RECOMPUTATIONS:
                degrees = Degrees(
                    cuts,
                    tensor=tensor,
                    context=context,
                    pipeline=pipeline,
                    data=data,
                    expert=expert,
                    recompute=recompute,
                )
                for micro in MICRO_SEQUENCES:
                    batch = SequenceBatch(training.sequences, training.length, micro)
                    if next(degree_errors(training.model, batch, degrees), None) is None:
                        yield degrees, batch


def _all_cuts(layers: int, pipeline: int) -> Iterator[tuple[int, ...]]:
    """Chunks of equally many layers; also with one layer less in the last, or in the first and the last, which have the
    head and the embedding."""
    if pipeline == 1:
        yield (layers,)
        return
    for chunks in range(pipeline, layers + 1, pipeline):
        if layers % chunks == 0:
            yield even_cuts(layers, chunks)
        elif (layers + 1) % chunks == 0 and layers + 1 > chunks:
            yield (*even_cuts(layers + 1, chunks)[:-1], (layers + 1) // chunks - 1)
        elif (layers + 2) % chunks == 0 and layers + 2 > chunks:
            inner = (layers + 2) // chunks
            yield (inner - 1, *[inner] * (chunks - 2), inner - 1)


def _expert_degrees(model: Transformer, replicas: int) -> list[int]:
    if model.experts is None:
        return [1]
    return [num for num in _divisors(replicas) if model.experts.num % num == 0]


def _divisors(num: int) -> list[int]:
    return [divisor for divisor in range(1, num + 1) if num % divisor == 0]


def search(training: Training, report: Callable[[str], None] = lambda line: None) -> list[LayerSplit]:
    """The ways to split that fit, shortest step first; those after the first NUM_PLAYED are estimated only."""
    fitting: list[LayerSplit] = []
    prices: dict[Any, Any] = {}
    num = 0
    for num, (degrees, batch) in enumerate(all_degrees(training), 1):
        if num % 5000 == 0:
            report(f"{num:,} configurations, {len(fitting):,} fit")
        memory = fitted_memory(training, degrees, batch)
        if memory is not None:
            offload = tuple(stage.offload for stage in memory)
            timer = LayerTimer(training.model, batch, degrees, training.cluster, training.overheads, prices)
            fitting.append(LayerSplit(replace(degrees, offload=offload), batch, memory, estimate_step(timer)))
    report(f"{num:,} configurations, {len(fitting):,} fit")
    fitting.sort(key=lambda split: split.step.total)
    played = [replace(split, step=step_seconds(_timer(training, split))) for split in fitting[:NUM_PLAYED]]
    return [*sorted(played, key=lambda split: split.step.total), *fitting[NUM_PLAYED:]]


def fitted_memory(training: Training, degrees: Degrees, batch: SequenceBatch) -> tuple[StageMemory, ...] | None:
    """The memory of each pipeline rank, if all fit."""
    stages = stage_memory(training.model, batch, degrees, training.memory_bytes)
    if not training.host_bytes and any(stage.offload for stage in stages):
        return None
    if any(s.total > training.memory_bytes * (1 + 1e-9) or s.host > max(training.host_bytes, 0.0) for s in stages):
        return None
    return tuple(stages)


def _timer(training: Training, split: LayerSplit) -> LayerTimer:
    return LayerTimer(training.model, split.batch, split.degrees, training.cluster, training.overheads)
