"""Parallelism strategies of the dense model: sharding, activation checkpointing, offload, combined.

Each combination is evaluated for memory and step time. The fastest that fits is chosen; the smallest that fits (with
the fewest techniques) is reported with it.

Techniques: parameters sharded over the ranks of a host (HSDP) or over all ranks (FSDP); selective or full activation
checkpointing; a rank's shards offloaded to the next memory tier. The rule of the paper (DHEN, 1.2.1: "only the smallest
set of techniques that the training needs") is read as follows: a set with fewer techniques is smaller; sets of equal
size are ordered as in the paper's list: sharding before checkpointing before offload, HSDP before FSDP, selective
before full checkpointing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardwright.errors import UserError, did_you_mean
from shardwright.planner import search
from shardwright.planner.memory import budget, dense_model, row_tiers
from shardwright.planner.memory.shortage import describe_shortage
from shardwright.planner.pins import Pin
from shardwright.planner.problem import REST_BLOCK, PlacedTables, Problem
from shardwright.planner.search import Candidate
from shardwright.planner.step import prediction, tasks
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Dense, Recompute, RecomputePolicy
from shardwright.spec.row_cache import SERVERS
from shardwright.spec.workload import Block, Workload

RECOMPUTE_GRANULARITY = MappingProxyType[RecomputePolicy, str]({"products": "selective", "nothing": "full"})
UNAVAILABLE_REASONS = MappingProxyType(  # by technique in a strategy's name: why no strategy has it
    {
        "offload": "only one memory tier of a rank is known; set plan.cluster to the file of `shardwright measure`",
        "selective": "no block would save fewer activations if it saved only its products",
        "full": "no block would save fewer activations if it were recomputed",
        "hsdp": "the dense model cannot be sharded over these ranks",
        "fsdp": "the dense model cannot be sharded over these ranks",
    }
)
TIE_SHARE = 0.01  # of a step's time; within it, fewer techniques are better
# A smaller dense model uses DDP unless the user chose a strategy. The limit is the same for all clusters, so that a
# faster or larger one never makes a plan slower.
SMALL_DENSE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class DenseStrategy:
    """A combination of techniques.

    `num_shard_levels`: the number of levels that parameters are sharded over, innermost first. `num_recomputed`: the
    number of recomputed blocks, if not all that can be; else 0.
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
    free_bytes: float  # of the fastest tier, for tables
    fits: bool
    seconds: float  # of a step, whether it fits or not

    @property
    def peak_bytes(self) -> float:
        return dense_model.total_bytes(self.memory_parts)


def all_strategies(workload: Workload, cluster: Cluster) -> tuple[DenseStrategy, ...]:
    """All strategies that differ for this model and cluster, the smallest set of techniques first."""
    strategies: list[DenseStrategy] = []
    movable = tuple(block.name for block in workload.blocks if _can_move(block))
    has_slower = any(tier.name != SERVERS for tier in cluster.device.tiers[1:])
    offloads = ((), movable) if has_slower else ((),)
    axes = [*_mesh_axes(cluster)][: None if movable else 1]
    for num_levels, (name, replicate, shard) in enumerate(axes):
        for policy in (None, "products", "nothing"):
            recompute = tuple(recompute_blocks(workload, policy))
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
        names = [strategy.name for strategy in strategies]
        unavailable = words.difference(*map(_words, names))
        reasons = [f": {reason}" for word, reason in UNAVAILABLE_REASONS.items() if word in unavailable]
        reason = reasons[0] if reasons else did_you_mean(problem.dense_strategy, names)
        raise UserError(f'no parallelism strategy "{problem.dense_strategy}"{reason}')
    return matches


def _words(name: str) -> frozenset[str]:
    """The lower-case techniques in a strategy's name."""
    return frozenset(word.strip().lower() for word in name.split("+"))


def evaluate_strategies(problem: Problem, placed: PlacedTables, ids_after: str = "read") -> tuple[DenseCandidate, ...]:
    """A candidate for every strategy, with this placement of tables and ids issued after `ids_after`.

    If a strategy fits only with recomputation, it is also evaluated with the fewest recomputed blocks with which it
    fits: the first blocks, whose activations are held longest.
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
    """The memory and step time of a strategy, with this placement of tables."""
    problem = apply_strategy(base_problem, strategy)
    tiers = _split_rows(problem, placed)
    loads = tasks.rank_loads(problem, placed, [table.found for table in tiers or row_tiers.whole_tables(problem)])
    seconds, _ = prediction.predict_step(problem, placed, loads, (ids_after,))
    peak, offloaded = dense_model.peak_memory(problem), dense_model.offloaded_bytes(problem)
    free_bytes = budget.memory_budget(problem).free_bytes[0]
    return DenseCandidate(strategy, peak, offloaded, free_bytes, tiers is not None, seconds)


def _split_rows(problem: Problem, placed: PlacedTables) -> list[row_tiers.RowTiers] | None:
    """The tiers of every table; None if there is no room."""
    return row_tiers.split_rows(problem, placed) if _has_room(problem) else None


def _recompute_fewest(problem: Problem, placed: PlacedTables, strategy: DenseStrategy) -> DenseStrategy:
    """The strategy with the fewest recomputed blocks with which it fits; more blocks never take more memory."""
    low, high = 0, len(strategy.dense.recompute)
    while high - low > 1:
        middle = (low + high) // 2
        fits = _split_rows(apply_strategy(problem, _limit_recompute(strategy, middle)), placed) is not None
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
    """The fastest candidate that fits; among ties (TIE_SHARE), the one with the fewest techniques."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    best_seconds = min((candidate.seconds for candidate in fitting), default=0.0)
    ties = (candidate for candidate in fitting if candidate.seconds <= best_seconds * (1 + TIE_SHARE))
    return min(ties, key=lambda c: (c.strategy.num_techniques, c.seconds), default=None)


def smallest_candidate(candidates: Sequence[DenseCandidate]) -> DenseCandidate | None:
    """The smallest set of techniques that fits, as in the paper's rule: all blocks are recomputed or none."""
    return next((c for c in candidates if c.fits and not c.strategy.num_recomputed), None)


def place_tables_first(base_problem: Problem, pins: Mapping[str, Pin]) -> Candidate:
    """Place tables with the smallest strategy that leaves room; if they do not fit, with the one that leaves most."""
    problems = [
        apply_strategy(base_problem, strategy, expand_blocks=False) for strategy in requested_strategies(base_problem)
    ]
    fitting = [problem for problem in problems if _has_room(problem)]
    roomiest = max(fitting or problems[:1], key=lambda problem: budget.memory_budget(problem).free_bytes[0])
    for problem in (*fitting[:1], roomiest):
        try:
            return search.find_best(problem, pins)
        except UserError:
            if problem is roomiest:
                raise
    raise UserError(describe_shortage(roomiest))


def choose_strategy(candidate: Candidate, pins: Mapping[str, Pin]) -> tuple[Candidate, tuple[DenseCandidate, ...]]:
    """Choose the fastest strategy. If it is new, also place tables again and keep the faster placement.

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


def _describe_overflow(candidate: DenseCandidate, problem: Problem) -> str:
    """Why the requested strategy does not fit: what it needs of each tier."""
    fast, *slower = problem.cluster.device.tiers
    needs = (
        f"{budget.bytes_text(candidate.peak_bytes)} per rank in {fast.name}, which has {budget.bytes_text(fast.bytes_)}"
    )
    if candidate.offloaded_bytes and slower:
        needs += (
            f", and {budget.bytes_text(candidate.offloaded_bytes)} in {slower[0].name}, which has "
            f"{budget.bytes_text(slower[0].bytes_)}"
        )
    return (
        f"{candidate.strategy.name}, as requested, does not fit together with the tables: it needs {needs}; "
        "choose another strategy, or none"
    )


def describe_choice(candidates: Sequence[DenseCandidate], problem: Problem) -> str:
    """Describe the chosen and the smallest strategy; empty if both are DDP and the user requested none."""
    best, smallest = fastest_candidate(candidates), smallest_candidate(candidates)
    if (
        best is None
        or smallest is None
        or (best is smallest and not best.strategy.num_techniques and not problem.dense_strategy)
    ):
        return ""
    text = (
        f"{best.strategy.name}: {budget.bytes_text(best.peak_bytes)} per rank, predicted "
        f"{1e3 * best.seconds:.3g} ms a step"
    )
    baseline = candidates[0]
    if problem.dense_strategy:
        return f"as requested, {text}"
    if not baseline.fits:
        text += (
            f"; {baseline.strategy.name} would need {budget.bytes_text(baseline.peak_bytes)}, "
            f"{budget.bytes_text(-baseline.free_bytes)} too much"
        )
        text = text if baseline.free_bytes < 0 else text[: text.rindex(",")] + ", which leaves too little for tables"
    if best is smallest:
        return f"{text}; it is also the smallest set of techniques that fits"
    difference = f"{100 * (smallest.seconds / best.seconds - 1):.0f} % longer"
    return f"{text}; the smallest set of techniques that fits is {smallest.strategy.name}, whose step is {difference}"


def apply_strategy(problem: Problem, strategy: DenseStrategy, *, expand_blocks: bool = True) -> Problem:
    """The problem with this strategy for the dense model."""
    return replace(problem, dense=strategy.dense, expand_blocks=expand_blocks)


def _mesh_axes(cluster: Cluster) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Name, replicating axes and sharding axes of each strategy; outer axes first, as in a plan."""
    names = tuple(axis.name for axis in cluster.axes)
    yield "DDP", names, ()
    group_sizes = [cluster.group_size(num_levels) for num_levels in range(len(cluster.levels) + 1)]
    has_several_sizes = sum(1 < num < cluster.num_ranks for num in group_sizes) > 1
    for index, num in enumerate(group_sizes):
        if 1 < num < cluster.num_ranks:
            shard = names[len(names) - index :]
            levels = ", ".join(axis.level for axis in cluster.axes[len(names) - index :])
            yield f"HSDP over {levels}" if has_several_sizes else "HSDP", names[: len(names) - index], shard
    if cluster.num_ranks > 1:
        yield "FSDP", (), names


def recompute_blocks(workload: Workload, policy: RecomputePolicy | None) -> Iterator[Recompute]:
    """The blocks that are known to save fewer activations under this policy."""
    for block in workload.blocks if policy else ():
        products = block.product_bytes if policy == "products" else 0
        is_known = block.input_bytes and (products or policy == "nothing") and block.name != REST_BLOCK
        if is_known and block.input_bytes + products < block.activation_bytes:
            assert policy is not None
            yield Recompute(block.name, policy)


def _can_move(block: Block) -> bool:
    """Whether a block's parameters can be sharded or offloaded."""
    return block.name != REST_BLOCK and block.parameter_bytes > 0


def _has_room(problem: Problem) -> bool:
    """Whether the fastest tier has room for tables, and the next tier for what is offloaded."""
    tiers, offloaded = problem.cluster.device.tiers, dense_model.offloaded_bytes(problem)
    fits_offload = not offloaded or offloaded <= tiers[1].bytes_ * (1 - budget.RESERVED_SHARE)
    return fits_offload and budget.memory_budget(problem).free_bytes[0] > 0
