"""The search for how a model of layers is split: all degrees that divide, pruned by memory, ranked by time.

Each candidate gets an estimate from the work of its busiest rank and the fill of its pipeline. Of those that fit, those
with the shortest estimates are simulated pass by pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, Literal

from shardwright.planner.layers.degrees import Degrees, Recomputation, SequenceBatch, degree_errors, even_cuts
from shardwright.planner.layers.layer_time import DTYPE, LayerTimer, Overheads
from shardwright.planner.layers.memory import StageMemory, stage_memory
from shardwright.planner.layers.step_time import StepSeconds, estimate_step, step_seconds
from shardwright.spec.cluster import Cluster
from shardwright.spec.model_flops import ModelFlops
from shardwright.spec.transformer import Transformer

MICRO_SEQUENCES = (1, 2, 4)
RECOMPUTATIONS: tuple[Recomputation, ...] = ("none", "memory-bound", "full")
MAX_CONTEXT, MIN_PART = 16, 1024  # ranks of context parallelism; tokens of a sequence on each
NUM_SIMULATED = 60


@dataclass(frozen=True, slots=True)
class SplitPins:
    """What a user fixes of a split; 0 and None: free. `chunks`: of a pipeline rank. `micro`: sequences of a
    micro-batch."""

    tensor: int = 0
    context: int = 0
    pipeline: int = 0
    chunks: int = 0
    data: int = 0
    expert: int = 0
    micro: int = 0
    zero: Literal[0, 1, 3] = 0
    recompute: Recomputation | None = None

    @property
    def fixed_values(self) -> dict[str, int | str]:
        """Those that are fixed, by name."""
        return {name: value for name in (each.name for each in fields(self)) if (value := getattr(self, name))}

    def allow(self, degrees: Degrees, batch: SequenceBatch) -> bool:
        chosen = {name: getattr(degrees, name, 0) for name in self.fixed_values}
        chosen |= {"chunks": degrees.num_chunks, "micro": batch.micro_sequences}
        return all(chosen[name] == value for name, value in self.fixed_values.items())


@dataclass(frozen=True, slots=True)
class Training:
    """What is to be planned. `memory_bytes`: of a rank, that states and activations may use; `host_bytes`: of a rank,
    for offload; 0: no offload. `expert_shares`: of the rows, by expert, in recorded passes; empty: equal."""

    model: Transformer
    sequences: int
    length: int
    num_ranks: int
    cluster: Cluster
    memory_bytes: float
    host_bytes: float = 0.0
    overheads: Overheads = Overheads()
    expert_shares: tuple[tuple[float, ...], ...] = ()
    pins: SplitPins = SplitPins()

    def imbalance(self, ranks: int) -> float:
        """Rows of the busiest rank's experts over the mean, if they are split over so many ranks; mean over the
        recorded passes."""
        own = self.model.experts.num // ranks if self.model.experts else 0
        loads = [
            max(sum(shares[first : first + own]) for first in range(0, len(shares), own)) * ranks
            for shares in self.expert_shares
        ]
        return sum(loads) / len(loads) if loads else 1.0

    def timer(self, degrees: Degrees, batch: SequenceBatch, priced: dict[Any, Any] | None = None) -> LayerTimer:
        timer = LayerTimer(self.model, batch, degrees, self.cluster, self.overheads)
        return timer if priced is None else replace(timer, priced=priced)

    def step_of(self, split: "LayerSplit") -> StepSeconds:
        """Its step, simulated pass by pass."""
        return step_seconds(self.timer(split.degrees, split.batch))

    def tokens_per_second(self, step: StepSeconds) -> float:
        return self.sequences * self.length / step.total

    @property
    def flops(self) -> ModelFlops:
        price = next(price for price in self.cluster.device.prices if (price.op, price.dtype) == ("matmul", DTYPE))
        peak = self.cluster.device.peak_flops_per_second
        source = "NVIDIA's data sheet" if peak else "the rate of large products"
        model = self.model
        return ModelFlops(
            1,
            model.matrix_parameters,
            model.attention_width,
            self.length,
            self.num_ranks,
            peak or 1 / price.seconds_per_flop,
            source,
        )


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A way to split the model, with its memory and its step."""

    degrees: Degrees
    batch: SequenceBatch
    memory: tuple[StageMemory, ...]
    step: StepSeconds

    @property
    def fullest(self) -> StageMemory:
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def host_bytes(self) -> float:
        """Of a rank, on the pipeline rank that offloads most."""
        return max(stage.host for stage in self.memory)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`splits`: those that fit, shortest step first; after the first NUM_SIMULATED they are only estimated.
    `oversized`: those that do not fit, estimated, shortest first."""

    training: Training
    splits: tuple[LayerSplit, ...]
    oversized: tuple[LayerSplit, ...] = field(default=())


def all_degrees(training: Training) -> Iterator[tuple[Degrees, SequenceBatch]]:
    """Every way to split that divides and that the pins allow."""
    num, per_host = training.num_ranks, training.cluster.ranks_per_host
    for tensor in _divisors(min(per_host, num)):
        for context in _divisors(num // tensor):
            if num % tensor or (context != training.pins.context and not _is_searched(context, training.length)):
                continue
            for pipeline in _divisors(num // (tensor * context)):
                data = num // (tensor * context * pipeline)
                if pipeline > training.model.layers or training.sequences % data:
                    continue
                shape = Degrees((), tensor=tensor, context=context, pipeline=pipeline, data=data)
                yield from _with_chunks(training, shape)


def _is_searched(context: int, length: int) -> bool:
    return context == 1 or (context <= MAX_CONTEXT and length // context >= MIN_PART)


def _with_chunks(training: Training, shape: Degrees) -> Iterator[tuple[Degrees, SequenceBatch]]:
    model = training.model
    pins = training.pins
    micro_sequences = (pins.micro,) if pins.micro else MICRO_SEQUENCES
    imbalances = {ranks: training.imbalance(ranks) for ranks in _expert_degrees(model, shape)}
    choices = product(
        _all_cuts(model.layers, shape.pipeline),
        imbalances.items(),
        _all_shardings(training, shape),
        (pins.recompute,) if pins.recompute else RECOMPUTATIONS,
        micro_sequences,
    )
    for cuts, (expert, imbalance), (zero, shard), recompute, micro in choices:
        batch = SequenceBatch(training.sequences, training.length, micro, imbalance)
        degrees = replace(shape, cuts=cuts, expert=expert, zero=zero, shard=shard, recompute=recompute)
        if training.pins.allow(degrees, batch) and next(degree_errors(model, batch, degrees), None) is None:
            yield degrees, batch


def _all_shardings(training: Training, shape: Degrees) -> Iterator[tuple[Literal[1, 3], int]]:
    """ZeRO-1; without a pipeline also ZeRO-3, over all replicas and over those in a host (HSDP)."""
    yield 1, 0
    if shape.pipeline == 1 and shape.replicas > 1:
        yield 3, 0
        near = training.cluster.ranks_per_host // shape.tensor
        if 1 < near < shape.replicas and shape.replicas % near == 0:
            yield 3, near


def _all_cuts(layers: int, pipeline: int) -> Iterator[tuple[int, ...]]:
    """Chunks of equally many layers; also with one layer less in the last, or in the first and the last, which have the
    head and the embedding; with one or two chunks on a rank also if sizes differ by one elsewhere."""
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
        elif chunks <= 2 * pipeline:
            yield even_cuts(layers, chunks)


def _expert_degrees(model: Transformer, shape: Degrees) -> list[int]:
    """One, the tensor ranks, or the tensor and context ranks with some of the data ranks."""
    if model.experts is None:
        return [1]
    near = shape.tensor * shape.context
    sizes = sorted({1, shape.tensor, *(near * data for data in _divisors(shape.data))})
    return [size for size in sizes if model.experts.num % size == 0]


def _divisors(num: int) -> list[int]:
    return [divisor for divisor in range(1, num + 1) if num % divisor == 0]


def search(training: Training, report: Callable[[str], None] = lambda line: None) -> SearchResult:
    """All ways to split, those that fit apart from those that do not."""
    fitting, oversized, prices = list[LayerSplit](), list[LayerSplit](), dict[Any, Any]()
    num = 0
    for num, (degrees, batch) in enumerate(all_degrees(training), 1):
        if num % 1000 == 0:
            report(f"{num:,} configurations, {len(fitting):,} fit")
        memory = split_memory(training, degrees, batch)
        degrees = replace(degrees, offload=tuple(stage.offload for stage in memory))
        split = LayerSplit(degrees, batch, memory, estimate_step(training.timer(degrees, batch, prices)))
        (fitting if fits(training, memory) else oversized).append(split)
    report(f"{num:,} configurations, {len(fitting):,} fit")
    fitting.sort(key=_order)
    oversized.sort(key=_order)
    simulated = [replace(split, step=training.step_of(split)) for split in fitting[:NUM_SIMULATED]]
    simulated.sort(key=_order)
    return SearchResult(training, (*simulated, *fitting[NUM_SIMULATED:]), tuple(oversized))


def price_split(training: Training, degrees: Degrees, batch: SequenceBatch) -> LayerSplit:
    """A given split, whether it fits or not, without offload unless the degrees have it."""
    degrees = degrees if degrees.offload else replace(degrees, offload=(0.0,) * degrees.pipeline)
    batch = replace(batch, imbalance=training.imbalance(degrees.expert))
    memory = tuple(stage_memory(training.model, batch, degrees, training.memory_bytes))
    return LayerSplit(degrees, batch, memory, step_seconds(training.timer(degrees, batch)))


def _order(split: LayerSplit) -> tuple[float, ...]:
    """Shortest step first; of equal ones that with the fewest kinds of parallelism."""
    degrees = split.degrees
    return (split.step.total, degrees.context, degrees.tensor, degrees.pipeline, split.batch.micro_sequences)


def split_memory(training: Training, degrees: Degrees, batch: SequenceBatch) -> tuple[StageMemory, ...]:
    """Of each pipeline rank, with as much offload as it takes to fit, where there is host memory for it."""
    if not training.host_bytes:
        degrees = replace(degrees, offload=(0.0,) * degrees.pipeline)
    return tuple(stage_memory(training.model, batch, degrees, training.memory_bytes))


def fits(training: Training, memory: tuple[StageMemory, ...]) -> bool:
    return all(
        stage.total <= training.memory_bytes * (1 + 1e-9) and stage.host <= training.host_bytes for stage in memory
    )
