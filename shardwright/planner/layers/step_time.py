"""Seconds of a step: the passes of all chunks in the order of the schedule, and what comes after them.

A pass starts when its rank has ended the one before and its input has arrived. Data parallel collectives that are not
hidden, and the optimizer, follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner.layers.activations import VALUE_BYTES
from shardwright.planner.layers.degrees import Degrees
from shardwright.planner.layers.layer_time import DTYPE, LayerTimer, PassSeconds
from shardwright.planner.layers.memory import GRADIENT_BYTES, OPTIMIZER_BYTES, WEIGHT_BYTES, stage_parameters
from shardwright.planner.layers.rank_groups import group_links, ring_seconds
from shardwright.planner.price import primitives
from shardwright.spec.pipeline import FORWARD, SCHEDULES


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """`bubble`: share of the passes' time in which it waits."""

    passes: float
    bubble: float
    gradients: float  # exposed collectives of gradients and weights, of the slowest pipeline rank
    optimizer: float

    @property
    def total(self) -> float:
        return self.passes + self.gradients + self.optimizer


def chunk_seconds(timer: LayerTimer) -> list[PassSeconds]:
    """Of each chunk of the model, for a micro-batch; the last has the head."""
    chunks: list[PassSeconds] = []
    for chunk in range(len(timer.degrees.cuts)):
        seconds = PassSeconds(timer.overheads.chunk_seconds / 3, timer.overheads.chunk_seconds * 2 / 3)
        for layer in timer.degrees.chunk_layers(chunk):
            seconds += timer.layer_seconds(layer)
        chunks.append(seconds)
    chunks[-1] += timer.head()
    return chunks


def play(chunks: Sequence[PassSeconds], degrees: Degrees, micro_batches: int, message_seconds: float = 0.0) -> float:
    """Seconds until the last pass ends, if the ranks of a pipeline run these chunks in the order of the schedule."""
    num, ends = len(chunks), dict[tuple[str, int, int], float]()
    schedule = SCHEDULES["1f1b" if degrees.num_chunks == 1 else degrees.schedule]
    tokens = [[*schedule(degrees.pipeline, r, degrees.num_chunks, micro_batches)] for r in range(degrees.pipeline)]
    positions, clocks, waiting = [0] * degrees.pipeline, [0.0] * degrees.pipeline, set(range(degrees.pipeline))
    while waiting:
        for rank in sorted(waiting):
            own = tokens[rank]
            while positions[rank] < len(own):
                pass_, local, micro = own[positions[rank]]
                chunk = local * degrees.pipeline + rank
                is_forward = pass_ == FORWARD
                before = chunk - 1 if is_forward else chunk + 1
                arrived = 0.0
                if 0 <= before < num:
                    ended = ends.get((pass_, before, micro))
                    if ended is None:
                        break
                    arrived = ended + message_seconds
                seconds = chunks[chunk].forward if is_forward else chunks[chunk].backward
                clocks[rank] = max(clocks[rank], arrived) + seconds
                ends[pass_, chunk, micro] = clocks[rank]
                positions[rank] += 1
            else:
                waiting.discard(rank)
    return max(clocks)


def step_seconds(timer: LayerTimer) -> StepSeconds:
    degrees, micro_batches = timer.degrees, timer.degrees.micro_batches(timer.batch)
    chunks = chunk_seconds(timer)
    passes = play(chunks, degrees, micro_batches, message_seconds(timer))
    busy = [sum(chunks[c].total for c in range(r, len(chunks), degrees.pipeline)) for r in range(degrees.pipeline)]
    ranks = range(degrees.pipeline)
    return StepSeconds(
        passes=passes,
        bubble=1 - micro_batches * max(busy) / passes,
        gradients=max(gradient_seconds(timer, rank) for rank in ranks),
        optimizer=max(optimizer_seconds(timer, rank) for rank in ranks),
    )


def estimate_step(timer: LayerTimer) -> StepSeconds:
    """The step without playing it: the passes of the busiest rank, and the time until it starts and after it ends."""
    degrees, micro_batches = timer.degrees, timer.degrees.micro_batches(timer.batch)
    chunks, num = chunk_seconds(timer), degrees.pipeline
    busy = [sum(chunks[c].total for c in range(r, len(chunks), num)) for r in range(num)]
    fill = sum(chunks[c].total for c in range(num - 1)) + 2 * (num - 1) * message_seconds(timer)
    passes = micro_batches * max(busy) + fill
    return StepSeconds(passes, fill / passes, gradient_seconds(timer, 0), optimizer_seconds(timer, 0))


def message_seconds(timer: LayerTimer) -> float:
    """Of the activations between two chunks."""
    degrees = timer.degrees
    if degrees.pipeline == 1:
        return 0.0
    inner = timer.degrees.num_ranks // degrees.pipeline
    links = group_links(timer.cluster, degrees.pipeline, inner, 1)
    bytes_ = VALUE_BYTES * timer.tokens * timer.model.hidden / degrees.tensor
    return bytes_ / links.bytes_per_second


def gradient_seconds(timer: LayerTimer, pipeline_rank: int) -> float:
    """Reduce-scatter of gradients and all-gather of weights over data and context ranks, of a pipeline rank."""
    degrees, cluster = timer.degrees, timer.cluster
    plain, _ = stage_parameters(timer.model, degrees, pipeline_rank)
    size = degrees.data * degrees.context
    links = group_links(cluster, size, degrees.tensor, degrees.num_ranks // (size * degrees.tensor))
    return ring_seconds(links, (GRADIENT_BYTES + WEIGHT_BYTES) * plain) if links.cards else 0.0


def optimizer_seconds(timer: LayerTimer, pipeline_rank: int) -> float:
    plain, expert = stage_parameters(timer.model, timer.degrees, pipeline_rank)
    shares = timer.degrees.data * timer.degrees.context if timer.degrees.zero else 1
    rate = primitives.find_price(timer.cluster.device, "matmul", DTYPE).seconds_per_byte
    return (2 * OPTIMIZER_BYTES - GRADIENT_BYTES) * (plain + expert) / shares * rate
