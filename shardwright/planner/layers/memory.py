"""Memory of a rank of each pipeline rank: states, saved activations of the micro-batches in flight, and what offload
moves to the host.

Activations in flight are played from the schedule, in bytes, so that chunks of different sizes count as they are. With
offload, a share of what a micro-batch saves in a chunk is in host memory between its forward and its backward, except
for KEPT_CHUNKS of them: one is computed, one is on its way out, and two come back.
"""

from dataclasses import dataclass
from functools import lru_cache

from shardwright.planner.layers.activations import FUSED, AttentionKernel, layer_bytes
from shardwright.planner.layers.degrees import Degrees, SequenceBatch
from shardwright.spec.pipeline import FORWARD, SCHEDULES
from shardwright.spec.transformer import Transformer

KEPT_CHUNKS = 4
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12  # bfloat16; float32; float32 weights and two moments


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one rank of a pipeline rank; `offload`: the share of the activations that it moves to the host."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # in device memory, at the peak
    offload: float
    host: float

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations


@dataclass(frozen=True, slots=True)
class SavedInFlight:
    """Of a pipeline rank, at the peak: saved bytes, and those that offload can move."""

    saved: float
    movable: float


def stage_parameters(model: Transformer, degrees: Degrees, stage: int) -> tuple[float, float]:
    """Weights of a rank of a pipeline rank: without experts, and of experts."""
    plain = expert = 0.0
    for layer in (layer for chunk in degrees.rank_chunks(stage) for layer in chunk):
        if model.experts is not None and model.has_experts(layer):
            experts = model.experts.num * model.mlp_parameters(model.experts.intermediate)
            plain += (model.layer_parameters(layer) - experts) / degrees.tensor
            expert += experts / degrees.expert
        else:
            plain += model.layer_parameters(layer) / degrees.tensor
    is_first, is_last = stage == 0, stage == degrees.pipeline - 1
    num_embeddings = is_first + is_last - (model.tied and is_first and is_last)
    return plain + num_embeddings * model.embedding_parameters / degrees.tensor, expert


def state_bytes(model: Transformer, degrees: Degrees, stage: int) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state of a rank of a pipeline rank."""
    plain, expert = stage_parameters(model, degrees, stage)
    replicas = degrees.data * degrees.context
    sizes: list[float] = []
    for zero, width in ((3, WEIGHT_BYTES), (2, GRADIENT_BYTES), (1, OPTIMIZER_BYTES)):
        is_shared = degrees.zero >= zero
        sizes.append(
            width * (plain / (replicas if is_shared else 1) + expert / (replicas / degrees.expert if is_shared else 1))
        )
    return sizes[0], sizes[1], sizes[2]


def in_flight(
    model: Transformer, batch: SequenceBatch, degrees: Degrees, stage: int, attention: AttentionKernel = FUSED
) -> SavedInFlight:
    """What the micro-batches between their forward and backward have saved, at the peak."""
    by_kind = {
        model.has_experts(layer): sum(layer_bytes(model, layer, batch, degrees, attention).values())
        for layer in {0, model.layers - 1}
    }
    saved = tuple(sum(by_kind[model.has_experts(layer)] for layer in chunk) for chunk in degrees.rank_chunks(stage))
    schedule = "1f1b" if len(saved) == 1 else degrees.schedule
    held = _most_held(schedule, degrees.pipeline, stage, degrees.micro_batches(batch), saved)
    sizes = sorted(size for size, num in zip(saved, held, strict=True) for _ in range(num))
    return SavedInFlight(sum(sizes), sum(sizes[: max(0, len(sizes) - KEPT_CHUNKS)]))


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
    for stage in range(degrees.pipeline):
        states, flight = state_bytes(model, degrees, stage), in_flight(model, batch, degrees, stage, attention)
        if degrees.offload:
            share = degrees.offload[stage]
        else:
            excess = sum(states) + flight.saved - limit
            share = min(1.0, max(0.0, excess / flight.movable)) if flight.movable else 0.0
        moved = share * flight.movable
        stages.append(StageMemory(*states, flight.saved - moved, share, moved))
    return stages
