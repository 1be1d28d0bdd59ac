"""Seconds of a step: the passes of all chunks in the order of the schedule, and what comes after them.

A pass starts when its rank has ended the one before and its input has arrived. Data parallel collectives that are not
hidden, and the optimizer, follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from shardwright.planner.layers.activations import VALUE_BYTES, saved_bytes
from shardwright.planner.layers.degrees import Degrees
from shardwright.planner.layers.layer_time import DTYPE, LayerTimer, PassSeconds, Work
from shardwright.planner.layers.memory import GRADIENT_BYTES, OPTIMIZER_BYTES, WEIGHT_BYTES, stage_parameters
from shardwright.planner.layers.rank_groups import group_links, ring_seconds
from shardwright.planner.price import primitives
from shardwright.spec.pipeline import FORWARD, SCHEDULES

Part = Work | Literal["chunks", "offload", "bubble", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = (*get_args(Work), "chunks", "offload", "bubble", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """`bubble`: share of the passes' time in which it waits."""

    passes: float
    bubble: float
    gradients: float  # exposed collectives of gradients and weights, of the slowest pipeline rank
    optimizer: float
    offload: float = 0.0  # copies to and from the host that the first and last passes do not hide

    @property
    def total(self) -> float:
        return self.passes + self.gradients + self.optimizer + self.offload


class SimulatedPass(NamedTuple):
    """A forward or backward of a chunk of the model, for one micro-batch."""

    rank: int  # of the pipeline
    chunk: int
    micro: int
    is_forward: bool
    start: float
    end: float


def chunk_seconds(timer: LayerTimer) -> list[PassSeconds]:
    """Of each chunk of the model, for a micro-batch; the last has the head. Copies to and from the host are hidden by
    a chunk's forward and backward as far as these take as long."""
    chunks: list[PassSeconds] = []
    for chunk in range(len(timer.degrees.cuts)):
        seconds = PassSeconds(timer.overheads.chunk_seconds / 3, timer.overheads.chunk_seconds * 2 / 3)
        for layer, num in timer.model.layer_kinds(timer.degrees.chunk_layers(chunk)):
            seconds += timer.layer_seconds(layer).scale(num)
        chunks.append(seconds)
    chunks[-1] += timer.head()
    if any(timer.degrees.offload):
        copies = [max(host_copies(timer, chunk)) for chunk in range(len(chunks))]
        chunks = [
            seconds if copy <= seconds.total else seconds.scale(copy / seconds.total)
            for seconds, copy in zip(chunks, copies, strict=True)
        ]
    return chunks


def host_copies(timer: LayerTimer, chunk: int) -> tuple[float, float]:
    """Seconds of what offload copies to the host, and back, of a chunk's micro-batch."""
    degrees, device = timer.degrees, timer.cluster.device
    share = degrees.offload[chunk % degrees.pipeline]
    layers = timer.model.layer_kinds(degrees.chunk_layers(chunk))
    bytes_ = share * sum(num * saved_bytes(timer.model, layer, timer.batch, degrees) for layer, num in layers)
    out, back = (primitives.find_price(device, op, "").seconds_per_byte for op in ("device_to_host", "host_to_device"))
    return bytes_ * out, bytes_ * back


def exposed_copies(timer: LayerTimer, chunks: Sequence[PassSeconds]) -> float:
    """Copies that the forwards before the first backward, and the backwards after the last forward, do not hide; of the
    slowest pipeline rank."""
    degrees = timer.degrees
    if not any(degrees.offload):
        return 0.0
    exposed: list[float] = []
    for rank in range(degrees.pipeline):
        out, back = host_copies(timer, rank)
        num = min(
            (degrees.num_chunks - 1) * degrees.pipeline + (degrees.pipeline - 1 - rank),
            degrees.micro_batches(timer.batch) * degrees.num_chunks,
        )
        exposed.append(num * (max(0.0, out - chunks[rank].forward) + max(0.0, back - chunks[rank].backward)))
    return max(exposed)


def simulate_passes(
    chunks: Sequence[PassSeconds], degrees: Degrees, micro_batches: int, message_seconds: float = 0.0
) -> list[SimulatedPass]:
    """The passes of a step, if the ranks of a pipeline run these chunks in the order of the schedule."""
    num, ends, simulated = len(chunks), dict[tuple[str, int, int], float](), list[SimulatedPass]()
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
                start = max(clocks[rank], arrived)
                clocks[rank] = start + (chunks[chunk].forward if is_forward else chunks[chunk].backward)
                ends[pass_, chunk, micro] = clocks[rank]
                simulated.append(SimulatedPass(rank, chunk, micro, is_forward, start, clocks[rank]))
                positions[rank] += 1
            else:
                waiting.discard(rank)
    return simulated


def busiest_rank(chunks: Sequence[PassSeconds], num_ranks: int) -> tuple[int, float]:
    """The pipeline rank whose passes of a micro-batch take longest, and their seconds."""
    busy = [sum(chunks[c].total for c in range(r, len(chunks), num_ranks)) for r in range(num_ranks)]
    return busy.index(max(busy)), max(busy)


def step_seconds(timer: LayerTimer) -> StepSeconds:
    degrees, micro_batches = timer.degrees, timer.degrees.micro_batches(timer.batch)
    chunks = chunk_seconds(timer)
    passes = max(each.end for each in simulate_passes(chunks, degrees, micro_batches, message_seconds(timer)))
    busy, ranks = busiest_rank(chunks, degrees.pipeline)[1], range(degrees.pipeline)
    return StepSeconds(
        passes=passes,
        bubble=max(0.0, 1 - micro_batches * busy / passes),
        gradients=max(gradient_seconds(timer, rank, chunks) for rank in ranks),
        optimizer=max(optimizer_seconds(timer, rank) for rank in ranks),
        offload=exposed_copies(timer, chunks),
    )


def estimate_step(timer: LayerTimer) -> StepSeconds:
    """The step without a simulation: the passes of the busiest rank, and the time until it starts and after it ends."""
    degrees, micro_batches = timer.degrees, timer.degrees.micro_batches(timer.batch)
    chunks, num = chunk_seconds(timer), degrees.pipeline
    busy = busiest_rank(chunks, num)[1]
    fill = sum(chunks[c].total for c in range(num - 1)) + 2 * (num - 1) * message_seconds(timer)
    passes = micro_batches * busy + fill
    return StepSeconds(
        passes,
        fill / passes,
        gradient_seconds(timer, 0, chunks),
        optimizer_seconds(timer, 0),
        exposed_copies(timer, chunks),
    )


def step_parts(timer: LayerTimer, step: StepSeconds) -> dict[Part, float]:
    """Seconds that add up to the step: the work of the busiest pipeline rank by kind, and what it waits for."""
    degrees, micro_batches = timer.degrees, timer.degrees.micro_batches(timer.batch)
    chunks = chunk_seconds(timer)
    rank, busy = busiest_rank(chunks, degrees.pipeline)
    parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    for layer, num in (kind for chunk in degrees.rank_chunks(rank) for kind in timer.model.layer_kinds(chunk)):
        for work, seconds in timer.layer(layer).items():
            parts[work] += micro_batches * num * seconds.total
    if rank == degrees.pipeline - 1:
        parts["products"] += micro_batches * timer.head().total
    parts["chunks"] = micro_batches * degrees.num_chunks * timer.overheads.chunk_seconds
    parts["offload"] = micro_batches * busy - sum(parts.values()) + step.offload
    parts["bubble"] = step.passes - micro_batches * busy
    parts["gradients"], parts["optimizer"] = step.gradients, step.optimizer
    return parts


def message_seconds(timer: LayerTimer) -> float:
    """Of the activations between two chunks."""
    degrees = timer.degrees
    if degrees.pipeline == 1:
        return 0.0
    inner = timer.degrees.num_ranks // degrees.pipeline
    links = group_links(timer.cluster, degrees.pipeline, inner, 1)
    bytes_ = VALUE_BYTES * timer.tokens * timer.model.hidden / degrees.tensor
    return links.latency_seconds + bytes_ / links.bytes_per_second


def gradient_seconds(timer: LayerTimer, pipeline_rank: int, chunks: Sequence[PassSeconds]) -> float:
    """Exposed collectives of gradients and weights of a pipeline rank, over ranks along data and context: all, or what
    takes longer than the passes of the chunks that hide them."""
    scatter, gather = gradient_collectives(timer, pipeline_rank)
    if not timer.overheads.hides_gradients:
        return scatter + gather
    degrees = timer.degrees
    chunks = chunks[pipeline_rank :: degrees.pipeline]
    # Of the last micro-batches, a chunk's gradients are sent while the chunks after it run.
    others = min(degrees.pipeline, degrees.micro_batches(timer.batch)) * (len(chunks) - 1) / len(chunks)
    forward, backward = (
        max(1.0, others) * sum(seconds) for seconds in zip(*((c.forward, c.backward) for c in chunks), strict=True)
    )
    return max(0.0, scatter - backward) + max(0.0, gather - forward)


def gradient_collectives(timer: LayerTimer, pipeline_rank: int) -> tuple[float, float]:
    """Reduce-scatters of gradients, and all-gathers of weights, once a step; with ZeRO-3 only the all-reduce between
    groups that shard (HSDP)."""
    degrees = timer.degrees
    plain, expert = stage_parameters(timer.model, degrees, pipeline_rank)
    scatter = gather = 0.0
    for weights, inner, size in (
        (plain, degrees.tensor, degrees.replicas),
        (expert, degrees.expert, degrees.expert_replicas),
    ):
        shards = min(degrees.num_shards, size)
        shard_links = group_links(timer.cluster, shards, inner, degrees.num_ranks // (shards * inner))
        if degrees.zero < 3:
            width = WEIGHT_BYTES if degrees.zero else GRADIENT_BYTES
            gather += ring_seconds(shard_links, width * weights)
        if degrees.zero < 2:
            scatter += ring_seconds(shard_links, GRADIENT_BYTES * weights)
        copies = size // shards
        links = group_links(timer.cluster, copies, inner * shards, degrees.num_ranks // (size * inner))
        scatter += 2 * ring_seconds(links, GRADIENT_BYTES * weights / shards)
    return scatter, gather


def optimizer_seconds(timer: LayerTimer, pipeline_rank: int) -> float:
    degrees = timer.degrees
    plain, expert = stage_parameters(timer.model, degrees, pipeline_rank)
    weights = plain + expert
    if degrees.zero:
        weights = plain / degrees.num_shards + expert / min(degrees.num_shards, degrees.expert_replicas)
    rate = primitives.find_price(timer.cluster.device, "matmul", DTYPE).seconds_per_byte
    return (GRADIENT_BYTES + 2 * OPTIMIZER_BYTES + WEIGHT_BYTES) * weights * rate
