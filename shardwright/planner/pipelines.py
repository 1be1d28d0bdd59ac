"""The choice of a pipeline: ranks, chunks, cuts between blocks, and micro-batches, or none.

Candidates lay the pipeline on one level of the cluster and data parallelism on the rest. Cuts balance the time of the
chunks. Each candidate has the smallest set of techniques with which its fullest rank fits (dense_strategies.py). The
candidates with the shortest estimated steps are simulated. The planner prefers no pipeline unless one is faster by more
than TIE_SHARE, or only a pipeline fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from shardwright.errors import UserError
from shardwright.planner import expert_split, search
from shardwright.planner.chunks import chunk_blocks, cut_blocks, ranks_by_stage, uncuttable_reason
from shardwright.planner.dense_strategies import RECOMPUTE_GRANULARITY, SMALL_DENSE_BYTES, TIE_SHARE, recompute_blocks
from shardwright.planner.memory import budget, dense_model
from shardwright.planner.pins import LayerRequest
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.search import Candidate
from shardwright.planner.step import block_tasks, expert_tasks
from shardwright.spec.axes import SAMPLE_ROLES, Axis, axes_text, num_ranks
from shardwright.spec.cluster import Cluster
from shardwright.spec.pipeline import rank_chunks
from shardwright.spec.plan import Dense, Pipeline, Recompute, RecomputePolicy
from shardwright.spec.workload import Block

MAX_CHUNKS = 4  # of a rank
MICRO_BATCHES_PER_RANK = (1, 2, 4, 8)  # micro-batches over ranks of the pipeline
NUM_SIMULATED = 6  # candidates with the shortest estimated steps
BALANCE_POWER = 8  # of a chunk's time: the sum of the powers is about that of the longest chunk, and prefers even ones


@dataclass(frozen=True, slots=True)
class PipelineCandidate:
    """A pipeline that fits, and its predicted step."""

    candidate: Candidate
    strategy: str  # of the dense model: the techniques


def check_request(problem: Problem, request: LayerRequest) -> None:
    """Raise if no plan has what the user pinned."""
    num, cluster = request.pipeline, problem.cluster
    if request.micro_batches and num < 2:
        raise UserError(f"plan.micro_batches={request.micro_batches} is for a pipeline: set plan.pipeline=2 or more")
    if num < 2:
        return
    if reason := uncuttable_reason(problem.workload):
        raise UserError(f"plan.pipeline={num}: this model cannot be a pipeline: {reason}")
    num_blocks = len(cut_blocks(problem.workload))
    if num > num_blocks:
        raise UserError(f"plan.pipeline={num}: the model has {num_blocks} blocks, and each rank needs one or more")
    layouts = [*_layouts(cluster, num)]
    if not layouts:
        sizes = ", ".join(f"{level.name} {level.num}" for level in cluster.levels) or "one rank"
        raise UserError(f"plan.pipeline={num} divides no level of {cluster.name} ({sizes}); choose a divisor of one")
    local = max(problem.batch_size // _num_data(axes) for axes in layouts)
    if request.micro_batches > local:
        raise UserError(f"plan.micro_batches={request.micro_batches}: a rank has only {local} samples of a batch")


def is_proposed(problem: Problem, baseline: Candidate | None, request: LayerRequest) -> bool:
    """Whether pipelines are considered. Without a pin: not for a small dense model that fits, as for other strategies,
    and not if the user requested a strategy."""
    if request.pipeline:
        return request.pipeline > 1
    if problem.torchrec or problem.dense_strategy or problem.cluster.num_ranks == 1:
        return False
    if uncuttable_reason(problem.workload):
        return False
    return baseline is None or dense_model.total_bytes(dense_model.peak_memory(baseline.problem)) > SMALL_DENSE_BYTES


def best_pipeline(problem: Problem, request: LayerRequest) -> PipelineCandidate | None:
    """The pipeline with the shortest predicted step; None if none fits."""
    estimated: list[tuple[float, int, Problem, str]] = []
    for number, shaped in enumerate(_shapes(replace(problem, expand_blocks=True), request)):
        for strategy, dense in _dense_options(shaped):
            own = replace(shaped, dense=dense)
            if budget.memory_budget(own).free_bytes[0] > 0:
                estimated.append((_estimate_seconds(own), number, own, strategy))
                break
    best: PipelineCandidate | None = None
    for _, _, own, strategy in sorted(estimated, key=lambda entry: entry[:2])[:NUM_SIMULATED]:
        candidate = search.evaluate(own, search.Proposal(), PlacedTables((), ()))
        if candidate is not None and (best is None or candidate.seconds < best.candidate.seconds * (1 - 1e-9)):
            best = PipelineCandidate(candidate, strategy)
    return best


def describe_overflow(problem: Problem, request: LayerRequest) -> str:
    """Why no pipeline that the user pinned fits: what the smallest needs."""
    shapes = _shapes(problem, request)
    options = (replace(shaped, dense=dense) for shaped in shapes for _, dense in _dense_options(shaped))
    least, fast = min(map(_peak_bytes, options), default=inf), problem.cluster.device.tiers[0]
    if least == inf:
        return f'plan.pipeline={request.pipeline} has no strategy "{problem.dense_strategy}"; drop plan.dense'
    return (
        f"plan.pipeline={request.pipeline} does not fit: its fullest rank needs {budget.bytes_text(least)} or more of "
        f"{fast.name}, and {1 - budget.RESERVED_SHARE:.0%} of {budget.bytes_text(fast.bytes_)} can be used"
    )


def is_better(pipeline: PipelineCandidate, baseline: Candidate | None) -> bool:
    """Whether the pipeline's step is shorter by more than a tie, or the model fits only with it."""
    return baseline is None or pipeline.candidate.seconds * (1 + TIE_SHARE) < baseline.seconds


def describe_pipeline(pipeline: PipelineCandidate, baseline: Candidate | None, request: LayerRequest) -> str:
    """Why this pipeline, or why none."""
    problem, seconds = pipeline.candidate.problem, pipeline.candidate.seconds
    assert problem.pipeline is not None
    cuts, num = problem.pipeline.blocks, num_ranks(axis for axis in problem.mesh_axes if axis.role == "pipe")
    text = (
        f"{axes_text(problem.mesh_axes)}, {len(cuts) // num} chunks a rank of {_cuts_text(cuts)} blocks, "
        f"{problem.pipeline.micro_batches} micro-batches, {pipeline.strategy}"
    )
    needs = f"{budget.bytes_text(_peak_bytes(problem))} on its fullest rank, predicted {1e3 * seconds:.3g} ms a step"
    if baseline is None:
        return f"{text}: {needs}; without a pipeline the model does not fit"
    comparison = f"{seconds / baseline.seconds:.3g}x as long as without a pipeline"
    if request.pipeline:
        return f"as pinned, {text}: {needs}, {comparison}"
    if is_better(pipeline, baseline):
        return f"{text}: {needs}, {comparison}"
    return f"none: with the best one ({text}) the step would be {comparison}"


def _cuts_text(cuts: Sequence[int]) -> str:
    return str(cuts[0]) if len(set(cuts)) == 1 else ", ".join(map(str, cuts))


def _peak_bytes(problem: Problem) -> float:
    return dense_model.total_bytes(budget.memory_budget(problem).memory_parts)


# Candidates


def layouts(problem: Problem, request: LayerRequest) -> Iterator[Problem]:
    """The problem with the axes of each pipeline that the user pinned; itself, without a pin."""
    if request.pipeline < 2:
        yield problem
    else:
        yield from (replace(problem, axes=axes) for axes in _layouts(problem.cluster, request.pipeline))


def _layouts(cluster: Cluster, num_pipe: int = 0) -> Iterator[tuple[Axis, ...]]:
    """The axes with a pipeline along one level, of `num_pipe` ranks if given, and data parallelism along the rest."""
    for level in cluster.levels:
        for size in range(2, level.num + 1):
            if level.num % size or num_pipe not in (0, size):
                continue
            is_only = len(cluster.levels) == 1  # then a data axis of one rank stands for no data parallelism
            data = (Axis("data", level.name, level.num // size),) if level.num > size or is_only else ()
            split = (Axis("pipe", level.name, size), *data)
            by_level = [split if other is level else (Axis("data", other.name, other.num),) for other in cluster.levels]
            yield tuple(axis for axes in reversed(by_level) for axis in axes)


def _num_data(axes: Sequence[Axis]) -> int:
    return num_ranks(axis for axis in axes if axis.role in SAMPLE_ROLES)


def _shapes(problem: Problem, request: LayerRequest) -> Iterator[Problem]:
    """The problem with each pipeline: axes, chunks of each rank, micro-batches, the cuts that balance it, and experts
    split over its data axes or not."""
    num_blocks = len(cut_blocks(problem.workload))
    for axes in _layouts(problem.cluster, request.pipeline if request.pipeline > 1 else 0):
        num_pipe = problem.cluster.num_ranks // _num_data(axes)
        laid = replace(problem, axes=axes)
        seconds = _block_seconds(laid)
        for num_chunks in range(1, min(MAX_CHUNKS, num_blocks // num_pipe) + 1):
            cuts = balanced_cuts(seconds, num_chunks * num_pipe)
            for micro_batches in _micro_batch_counts(problem.batch_size // _num_data(axes), num_pipe, request):
                if num_chunks == 1:
                    yield from _with_experts(laid, Pipeline(cuts, micro_batches, "1f1b"), request)
                elif micro_batches % num_pipe == 0:
                    yield from _with_experts(laid, Pipeline(cuts, micro_batches, "interleaved"), request)


def _with_experts(problem: Problem, pipeline: Pipeline, request: LayerRequest) -> Iterator[Problem]:
    piped = replace(problem, pipeline=pipeline)
    for axes in expert_split.options(problem, request):
        yield replace(piped, experts=expert_split.split(micro_batch_problem(piped), axes, request).experts)


def micro_batch_problem(problem: Problem) -> Problem:
    """The problem at the size of a micro-batch of its pipeline; itself, without a pipeline."""
    return problem if problem.pipeline is None else replace(problem, micro_batches=problem.pipeline.micro_batches)


def _micro_batch_counts(local_batch: int, num_pipe: int, request: LayerRequest) -> list[int]:
    """Numbers of micro-batches to try, each of one sample or more; those that divide the local batch, if any do."""
    if request.micro_batches:
        return [request.micro_batches] if request.micro_batches <= local_batch else []
    counts = [num_pipe * factor for factor in MICRO_BATCHES_PER_RANK if num_pipe * factor <= local_batch]
    counts = counts or [local_batch] * (local_batch > 0)
    return [count for count in counts if local_batch % count == 0] or counts


def _block_seconds(problem: Problem) -> list[float]:
    """Seconds of both passes of each block that may be cut; the first has the embedding's, too, the last the head's."""
    cuttable = cut_blocks(problem.workload)
    chunks = rank_chunks(Pipeline((1,) * len(cuttable), 1), 1, 0)
    return [_pass_seconds(problem, chunk_blocks(problem.workload, chunk)) for chunk in chunks]


def _pass_seconds(problem: Problem, blocks: Sequence[Block]) -> float:
    forward, backward = block_tasks.pass_task(problem, blocks, "forward"), block_tasks.backward_task(problem, blocks)
    exchanged = sum(expert_tasks.added_seconds(problem, blocks, direction) for direction in ("forward", "backward"))
    return forward.seconds_on(0) + backward.seconds_on(0) + exchanged


def balanced_cuts(seconds: Sequence[float], num_chunks: int) -> tuple[int, ...]:
    """The number of blocks of each chunk, one or more, with the most even seconds."""
    sums = [0.0]
    for value in seconds:
        sums.append(sums[-1] + value)
    mean = sums[-1] / num_chunks or 1.0
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *[(inf, ())] * len(seconds)]  # by number of blocks
    for chunk in range(1, num_chunks + 1):
        ends = range(chunk, len(seconds) - (num_chunks - chunk) + 1)
        shortest = {
            end: min(
                (best[start][0] + ((sums[end] - sums[start]) / mean) ** BALANCE_POWER, (*best[start][1], end - start))
                for start in range(chunk - 1, end)
            )
            for end in ends
        }
        best = [shortest.get(end, (inf, ())) for end in range(len(seconds) + 1)]
    return best[-1][1]


def _dense_options(problem: Problem) -> Iterator[tuple[str, Dense]]:
    """Strategies of the dense model along the data axes, the smallest set of techniques first."""
    data = tuple(axis.name for axis in problem.mesh_axes if axis.role in SAMPLE_ROLES)
    layouts = [("DDP", data, ()), ("FSDP", (), data)][: 2 if problem.sample_groups.size > 1 else 1]
    policies: list[tuple[RecomputePolicy | None, tuple[Recompute, ...]]] = [
        (policy, tuple(recompute_blocks(problem.workload, policy))) for policy in (None, "products", "nothing")
    ]
    options = [
        (" + ".join((name, *([RECOMPUTE_GRANULARITY[policy]] if policy else ()))), Dense(replicate, shard, recompute))
        for name, replicate, shard in layouts
        for policy, recompute in policies
        if recompute or policy is None
    ]
    wanted = problem.dense_strategy.lower()
    yield from sorted(
        ((name, dense) for name, dense in options if wanted in ("", name.lower())),
        key=lambda option: bool(option[1].shard) + bool(option[1].recompute),
    )


def _estimate_seconds(problem: Problem) -> float:
    """About the seconds of a step: the slowest rank's passes, and the bubble before and after them."""
    assert problem.pipeline is not None
    pipeline, stages = problem.pipeline, ranks_by_stage(problem)
    seconds = [
        sum(
            _pass_seconds(replace(problem, micro_batches=pipeline.micro_batches), chunk_blocks(problem.workload, chunk))
            for chunk in rank_chunks(pipeline, len(stages), index)
        )
        for index in range(len(stages))
    ]
    num_chunks = len(pipeline.blocks) // len(stages)
    return max(seconds) * (pipeline.micro_batches + (len(stages) - 1) / num_chunks)
