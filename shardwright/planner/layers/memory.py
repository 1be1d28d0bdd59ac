"""Memory of a rank of each pipeline rank: states, saved activations of the micro-batches in flight, and what offload
moves to the host.

Activations in flight follow from the schedule, in bytes, so that chunks of different sizes count as they are. With
offload, a share of what a micro-batch saves in a chunk is in host memory between its forward and its backward, except
for KEPT_CHUNKS of them: one is computed, one is on its way out, and two come back.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from shardwright.planner.layers.activations import FUSED, AttentionKernel, saved_bytes
from shardwright.planner.layers.degrees import Degrees, SequenceBatch
from shardwright.spec.pipeline import FORWARD, SCHEDULES
from shardwright.spec.transformer import Transformer

KEPT_CHUNKS = 4
GATHERED_LAYERS = 2  # with ZeRO-3: one computes, the next is all-gathered
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12  # bfloat16; float32; float32 weights and two moments
LOGIT_BYTES = 3 * 4  # PyTorch's cross entropy in float32: log-softmax, its gradient, and that of the logits


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one rank of a pipeline rank; `offload`: the share of the activations that it moves to the host."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # in device memory, at the peak
    logits: float  # of a micro-batch, on the last pipeline rank
    gathered: float  # weights that ZeRO-3 all-gathers, and gradients before their reduce-scatter
    offload: float
    host: float

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits + self.gathered


@dataclass(frozen=True, slots=True)
class SavedInFlight:
    """Of a pipeline rank, at the peak: saved bytes, and those that offload can move."""

    saved: float
    movable: float


def layer_weights(model: Transformer, degrees: Degrees, layer: int) -> tuple[float, float]:
    """Weights of a layer on a rank, before sharding: without experts, and of experts."""
    if model.experts is None or not model.has_experts(layer):
        return model.layer_parameters(layer) / degrees.tensor, 0.0
    experts = model.experts.num * model.mlp_parameters(model.experts.intermediate)
    return (model.layer_parameters(layer) - experts) / degrees.tensor, experts / degrees.expert


def stage_parameters(model: Transformer, degrees: Degrees, stage: int) -> tuple[float, float]:
    """Weights of a rank of a pipeline rank, before sharding: without experts, and of experts."""
    plain = expert = 0.0
    for chunk in degrees.rank_chunks(stage):
        for layer, num in model.layer_kinds(chunk):
            own = layer_weights(model, degrees, layer)
            plain, expert = plain + num * own[0], expert + num * own[1]
    is_first, is_last = stage == 0, stage == degrees.pipeline - 1
    num_embeddings = is_first + is_last - (model.tied and is_first and is_last)
    embeddings = num_embeddings * model.embedding_parameters / degrees.tensor
    return plain + embeddings, expert


def state_bytes(model: Transformer, degrees: Degrees, stage: int) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state of a rank of a pipeline rank."""
    plain, expert = stage_parameters(model, degrees, stage)
    sharded = plain / degrees.num_shards + expert / min(degrees.num_shards, degrees.expert_replicas)
    weights, gradients, optimizer = (
        width * (sharded if degrees.zero >= zero else plain + expert)
        for zero, width in ((3, WEIGHT_BYTES), (2, GRADIENT_BYTES), (1, OPTIMIZER_BYTES))
    )
    return weights, gradients, optimizer


def gathered_bytes(model: Transformer, degrees: Degrees) -> float:
    """Weights that ZeRO-3 all-gathers, at the peak, and gradients before their reduce-scatter."""
    if degrees.zero < 3 or degrees.num_shards == 1:
        return 0.0
    kinds = model.layer_kinds(range(model.layers))
    layer = max(sum(layer_weights(model, degrees, layer)) for layer, _ in kinds)
    head = model.embedding_parameters / degrees.tensor
    return WEIGHT_BYTES * max(GATHERED_LAYERS * layer, layer + head) + GRADIENT_BYTES * max(layer, head)


def in_flight(
    model: Transformer, batch: SequenceBatch, degrees: Degrees, stage: int, attention: AttentionKernel = FUSED
) -> SavedInFlight:
    """What the micro-batches between their forward and backward have saved, at the peak, and what is recomputed."""
    saved = tuple(
        sum(num * saved_bytes(model, layer, batch, degrees, attention) for layer, num in model.layer_kinds(chunk))
        for chunk in degrees.rank_chunks(stage)
    )
    schedule = "1f1b" if len(saved) == 1 else degrees.schedule
    held = _most_held(schedule, degrees.pipeline, stage, degrees.micro_batches(batch), saved)
    sizes = sorted(size for size, num in zip(saved, held, strict=True) for _ in range(num))
    again = recomputed_bytes(model, batch, degrees, attention)
    return SavedInFlight(sum(sizes) + again, sum(sizes[: max(0, len(sizes) - KEPT_CHUNKS)]))


def recomputed_bytes(
    model: Transformer, batch: SequenceBatch, degrees: Degrees, attention: AttentionKernel = FUSED
) -> float:
    """What full recomputation saves of the layer whose backward runs, besides the layer's input: all of it."""
    if degrees.recompute != "full":
        return 0.0
    whole = replace(degrees, recompute="none")
    return max(
        saved_bytes(model, layer, batch, whole, attention) - saved_bytes(model, layer, batch, degrees, attention)
        for layer, _ in model.layer_kinds(range(model.layers))
    )


@lru_cache(maxsize=4096)
def _most_held(
    schedule: str, num_ranks: int, stage: int, micro_batches: int, saved: tuple[float, ...]
) -> tuple[int, ...]:
    """By chunk of a pipeline rank, the micro-batches in flight when they have saved most."""
    num, held = len(saved), [0] * len(saved)
    most, peak, now = tuple(held), 0.0, 0.0
    # After the first forwards, the order repeats every num_ranks micro-batches.
    few = min(micro_batches, 4 * num_ranks)
    for token in SCHEDULES[schedule](num_ranks, stage, num, few):
        step = 1 if token.pass_ == FORWARD else -1
        held[token.chunk] += step
        now += step * saved[token.chunk]
        if now > peak:
            most, peak = tuple(held), now
    return most


def stage_memory(
    model: Transformer, batch: SequenceBatch, degrees: Degrees, limit: float, attention: AttentionKernel = FUSED
) -> list[StageMemory]:
    """Of each pipeline rank; without `degrees.offload`, the smallest share that fits into `limit` bytes, or all."""
    stages: list[StageMemory] = []
    gathered = gathered_bytes(model, degrees)
    for stage in range(degrees.pipeline):
        states, flight = state_bytes(model, degrees, stage), in_flight(model, batch, degrees, stage, attention)
        logits = logit_bytes(model, batch, degrees) if stage == degrees.pipeline - 1 else 0.0
        if degrees.offload:
            share = degrees.offload[stage]
        else:
            excess = sum(states) + logits + gathered + flight.saved - limit
            share = min(1.0, max(0.0, excess / flight.movable)) if flight.movable else 0.0
        moved = share * flight.movable
        stages.append(StageMemory(*states, flight.saved - moved, logits, gathered, share, moved))
    return stages


def logit_bytes(model: Transformer, batch: SequenceBatch, degrees: Degrees) -> float:
    return LOGIT_BYTES * batch.micro_sequences * batch.length / degrees.context * model.vocabulary / degrees.tensor
