"""Parallelism strategies of the dense model: sharding, activation checkpointing, offload, combined.

Each combination is evaluated for memory and step time. The fastest that fits is chosen; the one with the fewest
techniques that fits is reported with it.

Techniques: parameters sharded over the ranks of a host (HSDP) or over all ranks (FSDP); selective or full activation
checkpointing; a rank's shards offloaded to the next memory tier. The rule of the paper (DHEN, 1.2.1: "only the smallest
set of techniques that the training needs") is read as follows: a set with fewer techniques is smaller; sets of equal
size are ordered as in the paper's list: sharding before checkpointing before offload, HSDP before FSDP, selective
before full checkpointing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from shardwright.errors import UserError, did_you_mean
from shardwright.planner import search
from shardwright.planner.memory import budget, dense_model
from shardwright.planner.pins import Pin
from shardwright.planner.problem import REST_BLOCK, PlacedTables, Problem
from shardwright.planner.search import Candidate
from shardwright.planner.step import tasks
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Dense, Recompute, RecomputePolicy
from shardwright.spec.workload import Block, Workload

RECOMPUTE_GRANULARITY = MappingProxyType[RecomputePolicy, str]({"products": "selective", "nothing": "full"})
UNAVAILABLE_REASONS = MappingProxyType(  # by word of a strategy's name: why no strategy has it here
    {
        "offload": "only one memory tier of a rank is known; set plan.cluster to a file of `shardwright measure`",
        "selective": "no block would save fewer activations if it saved only its products",
        "full": "no block would save fewer activations if it were recomputed",
        "hsdp": "the dense model cannot be sharded over these ranks",
        "fsdp": "the dense model cannot be sharded over these ranks",
    }
)
TIE_SHARE = 0.01  # of a step's time; within it, fewer techniques are better
# A smaller dense model uses DDP unless the user chose a strategy; on all clusters, so that a faster or larger one never
# makes a plan slower.
SMALL_DENSE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class DenseStrategy:
    """A combination of techniques.

    `num_shard_levels`: levels that parameters are sharded over, inside first. `num_recomputed`: how many blocks only,
    if not all.
    """

    name: str
    dense: Dense
    num_shard_levels: int = 0
    recompute_policy: RecomputePolicy | None = None  # of recomputed blocks; None: no recomputation
    num_recomputed: int = 0

    @property
    def num_techniques(self) -> int:
        return bool(self.num_shard_levels) + (self.recompute_policy is not None) + bool(self.dense.offload)

    @property
    def sort_key(self) -> tuple[int, bool, int, int]:
        """Orders strategies by their number of techniques, then as in the paper's list."""
        policy_rank = (None, "products", "nothing").index(self.recompute_policy)
        return self.num_techniques, bool(self.dense.offload), policy_rank, self.num_shard_levels


@dataclass(frozen=True, slots=True)
class DenseCandidate:
    """A strategy with its memory and step time, for tables as placed."""

    strategy: DenseStrategy
    memory_parts: dense_model.MemoryParts  # bytes of the dense model in the fastest tier, at its peak
    offloaded_bytes: float  # in the next tier
    free_bytes: float  # of the fastest tier, left for tables
    fits: bool
    seconds: float  # of a step, whether it fits or not

    @property
    def peak_bytes(self) -> float:
        return dense_model.total_bytes(self.memory_parts)


def all_strategies(workload: Workload, cluster: Cluster) -> tuple[DenseStrategy, ...]:
    """All strategies that differ for this model and cluster, the smallest set of techniques first."""
    strategies: list[DenseStrategy] = []
    tiers = cluster.device.tiers
    offloads = ((), _offload_blocks(workload)) if len(tiers) > 1 else ((),)
    axes = [*_mesh_axes(cluster)][: None if any(map(_can_move, workload.blocks)) else 1]
    for num_levels, (name, replicate, shard) in enumerate(axes):
        for policy in (None, "products", "nothing"):
            recompute = tuple(_recompute_blocks(workload, policy))
            for offload in dict.fromkeys(offloads) if recompute or policy is None else ():
                words = [name, *([RECOMPUTE_GRANULARITY[policy]] if policy else []), *(["offload"] if offload else [])]
                dense = Dense(replicate, shard, recompute, offload)
                strategies.append(DenseStrategy(" + ".join(words), dense, num_levels, policy))
    return tuple(sorted(strategies, key=lambda s: s.sort_key))


def requested_strategies(problem: Problem) -> tuple[DenseStrategy, ...]:
    """All strategies, or the one that the user named.

    "HSDP" alone shards over the innermost level; if that level has all ranks, it means FSDP.
    """
    strategies, words = all_strategies(problem.workload, problem.cluster), _words(problem.dense_strategy)
    if not problem.dense_strategy:
        return strategies
    if "hsdp" in words and not any("hsdp" in _words(strategy.name) for strategy in strategies):
        hsdp = (word for s in strategies for word in _words(s.name) if word.startswith("hsdp over "))
        words = words - {"hsdp"} | {next(hsdp, "fsdp")}
    matches = tuple(strategy for strategy in strategies if _words(strategy.name) == words)
    if not matches:
        unavailable = next(
            (
                word
                for word in UNAVAILABLE_REASONS
                if word in words and not any(word in _words(strategy.name) for strategy in strategies)
            ),
            "",
        )
        reason = (
            f": {UNAVAILABLE_REASONS[unavailable]}"
            if unavailable
            else did_you_mean(problem.dense_strategy, [strategy.name for strategy in strategies])
        )
        raise UserError(f'no parallelism strategy "{problem.dense_strategy}"{reason}')
    return matches


def _words(name: str) -> frozenset[str]:
    """The lower-case techniques in a strategy's name."""
    return frozenset(word.strip().lower() for word in name.split("+"))


def evaluate_strategies(problem: Problem, placed: PlacedTables, ids_after: str = "read") -> tuple[DenseCandidate, ...]:
    """A candidate of every strategy, for tables placed so and ids issued after `ids_after`.

    If a strategy fits only with recomputation, it is also evaluated with as few recomputed blocks as fit: the first
    blocks, whose activations are held longest.
    """
    candidates = [evaluate_strategy(problem, placed, strategy, ids_after) for strategy in requested_strategies(problem)]
    fitting = {candidate.strategy.dense for candidate in candidates if candidate.fits}
    for candidate in list(candidates) if not problem.dense_strategy else ():
        without_recompute = replace(candidate.strategy.dense, recompute=())
        if candidate.fits and candidate.strategy.recompute_policy is not None and without_recompute not in fitting:
            partial = _recompute_fewest(problem, placed, candidate.strategy)
            candidates += [evaluate_strategy(problem, placed, partial, ids_after)] if partial.num_recomputed else []
    return tuple(sorted(candidates, key=lambda c: (c.strategy.sort_key, -c.strategy.num_recomputed)))


def evaluate_strategy(
    base_problem: Problem, placed: PlacedTables, strategy: DenseStrategy, ids_after: str
) -> DenseCandidate:
    """The memory and step time of a strategy, for tables placed so."""
    problem = apply_strategy(base_problem, strategy)
    fast_id_shares = _fast_id_shares(problem, placed)
    loads = tasks.rank_loads(problem, placed, fast_id_shares or [1.0] * len(problem.table_loads))
    seconds, _ = tasks.predict_step(problem, placed, loads, (ids_after,))
    free_bytes = budget.memory_budget(problem).free_bytes[0]
    return DenseCandidate(
        strategy,
        dense_model.peak_memory(problem),
        dense_model.offloaded_bytes(problem),
        free_bytes,
        fast_id_shares is not None,
        seconds,
    )


def _fast_id_shares(problem: Problem, placed: PlacedTables) -> list[float] | None:
    """By table, the share of ids with rows in the fastest tier; None if there is no room."""
    free = budget.memory_budget(problem).free_bytes
    split = budget.split_rows_by_tier(problem, placed, free) if free[0] > 0 and _fits_offload(problem) else None
    return split[0] if split is not None else None


def _recompute_fewest(problem: Problem, placed: PlacedTables, strategy: DenseStrategy) -> DenseStrategy:
    """The strategy with as few recomputed blocks as fit; more never take more memory."""
    low, high = 0, len(strategy.dense.recompute)
    while high - low > 1:
        middle = (low + high) // 2
        fits = _fast_id_shares(apply_strategy(problem, _limit_recompute(strategy, middle)), placed) is not None
        low, high = (low, middle) if fits else (middle, high)
    return _limit_recompute(strategy, high)


def _limit_recompute(strategy: DenseStrategy, num: int) -> DenseStrategy:
    """The strategy with only the first `num` of its recomputed blocks."""
    recompute = strategy.dense.recompute
    if num == len(recompute):
        return strategy
    dense = replace(strategy.dense, recompute=recompute[:num])
    return replace(strategy, name=f"{strategy.name} ({num} of {len(recompute)})", dense=dense, num_recomputed=num)


def fastest_candidate(candidates: Sequence[DenseCandidate]) -> DenseCandidate | None:
    """The fastest candidate that fits; of those within TIE_SHARE, the one with the fewest techniques."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    best_seconds = min((candidate.seconds for candidate in fitting), default=0.0)
    ties = (candidate for candidate in fitting if candidate.seconds <= best_seconds * (1 + TIE_SHARE))
    return min(ties, key=lambda c: (c.strategy.num_techniques, c.seconds), default=None)


def smallest_candidate(candidates: Sequence[DenseCandidate]) -> DenseCandidate | None:
    """The candidate of the paper's rule, which recomputes all blocks or none."""
    return next((c for c in candidates if c.fits and not c.strategy.num_recomputed), None)


def place_tables_first(base_problem: Problem, pins: Mapping[str, Pin]) -> Candidate:
    """Place tables with the smallest strategy that leaves room, else with the one that leaves most."""
    problems = [
        (apply_strategy(base_problem, strategy, expand_blocks=False), strategy)
        for strategy in requested_strategies(base_problem)
    ]
    fitting = [p for p, _ in problems if budget.memory_budget(p).free_bytes[0] > 0 and _fits_offload(p)]
    roomiest = max(fitting or [problems[0][0]], key=lambda problem: budget.memory_budget(problem).free_bytes[0])
    for problem in (*fitting[:1], roomiest):
        try:
            return search.find_best(problem, pins)
        except UserError:
            if problem is roomiest:
                raise
    raise UserError(budget.describe_shortage(roomiest))


def choose_strategy(candidate: Candidate, pins: Mapping[str, Pin]) -> tuple[Candidate, tuple[DenseCandidate, ...]]:
    """The fastest strategy for these tables, which are placed again if it leaves other room for them.

    A small dense model uses DDP without evaluation: sharding it frees no room, and the prices of many small messages
    are less accurate than what sharding would gain.
    """
    is_unset = not candidate.problem.dense_strategy and not candidate.problem.dense.shard
    if is_unset and dense_model.total_bytes(dense_model.peak_memory(candidate.problem)) <= SMALL_DENSE_BYTES:
        return candidate, ()
    candidates = evaluate_strategies(candidate.problem, candidate.placed, candidate.ids_after)
    best = fastest_candidate(candidates)
    if best is None and candidate.problem.dense_strategy:
        raise UserError(_describe_overflow(candidates[0], candidate.problem))
    if best is None:
        return candidate, candidates
    problem = apply_strategy(candidate.problem, best.strategy)
    chosen = search.evaluate(problem, candidate.proposal, candidate.placed)
    assert chosen is not None
    if best.strategy.dense != candidate.problem.dense:
        new_placement = search.find_best(replace(problem, expand_blocks=False), pins)
        rival = search.evaluate(problem, new_placement.proposal, new_placement.placed)
        chosen = rival if rival is not None and rival.seconds < chosen.seconds * (1 - 1e-9) else chosen
    return chosen, candidates


def _describe_overflow(choice: DenseCandidate, problem: Problem) -> str:
    """Why the requested strategy does not fit: what it needs of each tier."""
    fast, *slower = problem.cluster.device.tiers
    needs = (
        f"{budget.bytes_text(choice.peak_bytes)} per rank in {fast.name}, which has {budget.bytes_text(fast.bytes_)}"
    )
    if choice.offloaded_bytes and slower:
        needs += (
            f", and {budget.bytes_text(choice.offloaded_bytes)} in {slower[0].name}, which has "
            f"{budget.bytes_text(slower[0].bytes_)}"
        )
    return (
        f"{choice.strategy.name}, as requested, does not fit beside the tables: it needs {needs}; choose another "
        "strategy, or none"
    )


def describe_choice(candidates: Sequence[DenseCandidate], problem: Problem) -> str:
    """The chosen strategy, and the paper's if it differs; nothing if both are DDP and none was requested."""
    best, rule = fastest_candidate(candidates), smallest_candidate(candidates)
    if (
        best is None
        or rule is None
        or (best is rule and not best.strategy.num_techniques and not problem.dense_strategy)
    ):
        return ""
    text = (
        f"{best.strategy.name}: {budget.bytes_text(best.peak_bytes)} per rank, predicted "
        f"{1e3 * best.seconds:.3g} ms a step"
    )
    baseline = candidates[0]
    if problem.dense_strategy:
        return f"as asked, {text}"
    if not baseline.fits:
        text += (
            f"; {baseline.strategy.name} would need {budget.bytes_text(baseline.peak_bytes)}, "
            f"{budget.bytes_text(-baseline.free_bytes)} too much"
        )
        text = text if baseline.free_bytes < 0 else text[: text.rindex(",")] + ", which leaves too little for tables"
    if best is rule:
        return f"{text}; it is also the smallest set of techniques that fits"
    difference = f"{100 * (rule.seconds / best.seconds - 1):.0f} % longer"
    return f"{text}; the smallest set of techniques that fits is {rule.strategy.name}, whose step is {difference}"


def apply_strategy(problem: Problem, strategy: DenseStrategy, *, expand_blocks: bool = True) -> Problem:
    """The problem with the dense model under this strategy."""
    return replace(problem, dense=strategy.dense, expand_blocks=expand_blocks)


def _mesh_axes(cluster: Cluster) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Name, replicating axes and sharding axes of each strategy; outer axes first, as in a plan."""
    names = tuple(level.name for level in reversed(cluster.levels)) or ("data",)
    yield "DDP", names, ()
    group_sizes = [prod(level.num for level in cluster.levels[:index]) for index in range(len(cluster.levels) + 1)]
    has_several = sum(1 < num < cluster.num_ranks for num in group_sizes) > 1
    for index, num in enumerate(group_sizes):
        if 1 < num < cluster.num_ranks:
            shard = names[len(names) - index :]
            yield f"HSDP over {', '.join(shard)}" if has_several else "HSDP", names[: len(names) - index], shard
    if cluster.num_ranks > 1:
        yield "FSDP", (), names


def _recompute_blocks(workload: Workload, policy: RecomputePolicy | None) -> Iterator[Recompute]:
    """The blocks that save fewer activations under this policy, as far as known."""
    for block in workload.blocks if policy else ():
        products = block.product_bytes if policy == "products" else 0
        is_known = block.input_bytes and (products or policy == "nothing") and block.name != REST_BLOCK
        if is_known and block.input_bytes + products < block.activation_bytes:
            assert policy is not None
            yield Recompute(block.name, policy)


def _offload_blocks(workload: Workload) -> tuple[str, ...]:
    """The blocks that can be offloaded."""
    return tuple(block.name for block in workload.blocks if _can_move(block))


def _can_move(block: Block) -> bool:
    """Whether a block's parameters can be sharded or offloaded."""
    return block.name != REST_BLOCK and block.parameter_bytes > 0


def _fits_offload(problem: Problem) -> bool:
    """Whether the next tier has room for what is offloaded."""
    tiers, offloaded = problem.cluster.device.tiers, dense_model.offloaded_bytes(problem)
    return not offloaded or offloaded <= tiers[1].bytes_ * (1 - budget.RESERVED_SHARE)
