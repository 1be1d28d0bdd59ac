"""How a model of layers is split over ranks, and what it recomputes and offloads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwright.spec.transformer import Transformer

Recomputation = Literal["none", "scores", "memory-bound", "full"]


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Of a step: so many sequences of equal length over all ranks; a micro-batch has `micro_sequences` on each.
    `imbalance`: rows of the busiest rank's experts over the mean of all ranks."""

    sequences: int
    length: int
    micro_sequences: int = 1
    imbalance: float = 1.0


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks along each kind of parallelism, and chunks of a pipeline rank.

    `cuts`: layers of each chunk, in the order of the model; chunk k is on pipeline rank k % pipeline. `zero`: what data
    and context parallel ranks shard, 1: optimizer state, 2: gradients too, 3: weights too; over groups of `shard` of
    them (0: all; less: HSDP). `expert`: ranks over which experts are split, neighbors among those of tensor, context
    and data parallelism; experts themselves are whole. `recompute`: see activations.py. `offload`: the share of the
    saved activations that each pipeline rank moves to host memory.
    """

    cuts: tuple[int, ...]
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    zero: Literal[0, 1, 2, 3] = 1
    shard: int = 0
    sequence_parallel: bool = True
    recompute: Recomputation = "none"
    offload: tuple[float, ...] = ()
    schedule: Literal["1f1b", "interleaved"] = "interleaved"

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def replicas(self) -> int:
        """Ranks that have the same weights, but for sharding: those of data and context parallelism."""
        return self.data * self.context

    @property
    def num_shards(self) -> int:
        """Ranks that states are sharded over."""
        return self.shard or self.replicas

    @property
    def expert_replicas(self) -> int:
        return self.tensor * self.replicas // self.expert

    @property
    def num_chunks(self) -> int:
        """Of a pipeline rank."""
        return len(self.cuts) // self.pipeline

    def micro_batches(self, batch: SequenceBatch) -> int:
        return batch.sequences // (self.data * batch.micro_sequences)

    def chunk_layers(self, chunk: int) -> range:
        start = sum(self.cuts[:chunk])
        return range(start, start + self.cuts[chunk])

    def rank_chunks(self, pipeline_rank: int) -> list[range]:
        """The layers of each chunk of a pipeline rank."""
        return [self.chunk_layers(chunk) for chunk in range(pipeline_rank, len(self.cuts), self.pipeline)]


def even_cuts(layers: int, num: int) -> tuple[int, ...]:
    """Layers of `num` chunks that differ by one at most; the first chunks have fewer."""
    return tuple(layers * (k + 1) // num - layers * k // num for k in range(num))


def degree_errors(model: Transformer, batch: SequenceBatch, degrees: Degrees) -> Iterator[str]:
    """Why a model cannot be split so."""
    if sum(degrees.cuts) != model.layers:
        yield f"chunks of {sum(degrees.cuts)} layers; {model.name} has {model.layers}"
    if len(degrees.cuts) % degrees.pipeline:
        yield f"{len(degrees.cuts)} chunks on {degrees.pipeline} pipeline ranks; wanted as many on each"
    if model.heads % degrees.tensor:
        yield f"{model.heads} heads do not divide by a tensor degree of {degrees.tensor}"
    if model.intermediate % degrees.tensor:
        yield f"an MLP of {model.intermediate} channels does not divide by a tensor degree of {degrees.tensor}"
    per_round = degrees.data * batch.micro_sequences
    if batch.sequences % per_round:
        yield f"{batch.sequences} sequences do not divide by data degree times micro-batch ({per_round})"
    elif degrees.num_chunks > 1 and degrees.micro_batches(batch) % degrees.pipeline:
        micro = degrees.micro_batches(batch)
        yield f"{micro} micro-batches do not divide by a pipeline of {degrees.pipeline}, as interleaved chunks need"
    if degrees.sequence_parallel and batch.length % (degrees.tensor * degrees.context):
        yield f"sequences of {batch.length} do not divide by {degrees.tensor} tensor ranks for sequence parallelism"
    if degrees.context > 1 and batch.length % (2 * degrees.context):
        yield f"sequences of {batch.length} do not divide into {2 * degrees.context} parts for context parallelism"
    yield from _replica_errors(model, degrees)


def _replica_errors(model: Transformer, degrees: Degrees) -> Iterator[str]:
    if model.experts is not None and model.experts.num % degrees.expert:
        yield f"{model.experts.num} experts do not divide by an expert degree of {degrees.expert}"
    if (degrees.tensor * degrees.replicas) % degrees.expert:
        yield f"an expert degree of {degrees.expert} does not divide tensor times context times data"
    if degrees.replicas % degrees.num_shards:
        yield f"{degrees.replicas} data and context ranks do not divide into groups of {degrees.shard}"
