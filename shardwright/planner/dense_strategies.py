"""How the dense part is held: each combination of cutting weights, recomputing and offloading, what it takes of memory
and of a step, the fastest that fits, and beside it the fewest techniques that fit.

Techniques: weights cut among the ranks of a host (HSDP) or among all (FSDP); blocks recomputed but for their products,
or whole; a rank's own part in a slower tier. The rule of the paper (DHEN, 1.2.1: "only the smallest set of techniques
that the training needs") is read so: a set with fewer techniques is smaller; of as many that which comes first in the
paper's list, where cutting comes before recomputing and that before offloading; HSDP before FSDP, products kept before
nothing kept.
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
UNAVAILABLE_REASONS = MappingProxyType(  # why a word of a way may name nothing here
    {
        "offload": "of the memory of a rank one kind is known; name in plan.cluster what `shardwright measure` wrote",
        "selective": "no block would keep less if it kept its products alone",
        "full": "no block would keep less if it ran again",
        "hsdp": "nothing of the dense part can be cut among these ranks",
        "fsdp": "nothing of the dense part can be cut among these ranks",
    }
)
TIE_SHARE = 0.01  # of a step's time, so near that fewer techniques are better
SMALL_DENSE_BYTES = (
    1 << 26
)  # a dense part that takes no more is held by DDP, unasked; of whatever machines, so that faster
# or larger ones never make a plan slower


@dataclass(frozen=True, slots=True)
class DenseStrategy:
    """One combination; `cut`: over how many levels, inside first. `part`: of how many blocks only, where not of all."""

    name: str
    dense: Dense
    num_shard_levels: int = 0
    recompute_policy: RecomputePolicy | None = None  # of recomputed blocks; None: all stays
    num_recomputed: int = 0

    @property
    def num_techniques(self) -> int:
        return bool(self.num_shard_levels) + (self.recompute_policy is not None) + bool(self.dense.offload)

    @property
    def sort_key(self) -> tuple[int, bool, int, int]:
        """Smaller sets first."""
        recomputed = (None, "products", "nothing").index(self.recompute_policy)
        return self.num_techniques, bool(self.dense.offload), recomputed, self.num_shard_levels


@dataclass(frozen=True, slots=True)
class DenseCandidate:
    """A way with what it takes, where tables lie as placed."""

    strategy: DenseStrategy
    memory_parts: dense_model.MemoryParts  # bytes of the dense part in the fastest tier, at its fullest moment
    offloaded_bytes: float  # in the next tier
    free_bytes: float  # of the fastest tier, that is left for tables
    fits: bool
    seconds: float  # of a step, were there room

    @property
    def peak_bytes(self) -> float:
        return dense_model.total_bytes(self.memory_parts)


def all_strategies(workload: Workload, cluster: Cluster) -> tuple[DenseStrategy, ...]:
    """All that make a difference, the smallest set first."""
    found: list[DenseStrategy] = []
    tiers = cluster.device.tiers
    offloads = ((), _offloaded(workload)) if len(tiers) > 1 else ((),)
    axes = [*_axes(cluster)][: None if any(map(_may_move, workload.blocks)) else 1]
    for cut, (name, replicate, shard) in enumerate(axes):
        for kept in (None, "products", "nothing"):
            recompute = tuple(_recomputed(workload, kept))
            for offload in dict.fromkeys(offloads) if recompute or kept is None else ():
                words = [name, *([RECOMPUTE_GRANULARITY[kept]] if kept else []), *(["offload"] if offload else [])]
                dense = Dense(replicate, shard, recompute, offload)
                found.append(DenseStrategy(" + ".join(words), dense, cut, kept))
    return tuple(sorted(found, key=lambda way: way.sort_key))


def requested_strategies(problem: Problem) -> tuple[DenseStrategy, ...]:
    """All ways, or the one that is asked for. HSDP alone cuts over the ranks of the innermost level; where that has
    all ranks it is FSDP."""
    known, wanted = all_strategies(problem.workload, problem.cluster), _words(problem.dense_strategy)
    if not problem.dense_strategy:
        return known
    if "hsdp" in wanted and not any("hsdp" in _words(way.name) for way in known):
        inside = (word for way in known for word in _words(way.name) if word.startswith("hsdp over "))
        wanted = wanted - {"hsdp"} | {next(inside, "fsdp")}
    found = tuple(way for way in known if _words(way.name) == wanted)
    if not found:
        idle = next(
            (
                word
                for word in UNAVAILABLE_REASONS
                if word in wanted and not any(word in _words(way.name) for way in known)
            ),
            "",
        )
        why = (
            f": {UNAVAILABLE_REASONS[idle]}"
            if idle
            else did_you_mean(problem.dense_strategy, [one.name for one in known])
        )
        raise UserError(f'no way "{problem.dense_strategy}" to hold the dense part{why}')
    return found


def _words(name: str) -> frozenset[str]:
    return frozenset(word.strip().lower() for word in name.split("+"))


def evaluate_strategies(problem: Problem, placed: PlacedTables, ids_after: str = "read") -> tuple[DenseCandidate, ...]:
    """Every way, where tables lie so and ids are issued behind this; and where only recomputing makes room, that of as
    few blocks as do: the first ones, whose activations are there longest."""
    found = [evaluate_strategy(problem, placed, way, ids_after) for way in requested_strategies(problem)]
    fitting = {one.strategy.dense for one in found if one.fits}
    for one in list(found) if not problem.dense_strategy else ():
        whole = replace(one.strategy.dense, recompute=())
        if one.fits and one.strategy.recompute_policy is not None and whole not in fitting:
            few = _least_recomputed(problem, placed, one.strategy)
            found += [evaluate_strategy(problem, placed, few, ids_after)] if few.num_recomputed else []
    return tuple(sorted(found, key=lambda one: (one.strategy.sort_key, -one.strategy.num_recomputed)))


def evaluate_strategy(
    base_problem: Problem, placed: PlacedTables, strategy: DenseStrategy, ids_after: str
) -> DenseCandidate:
    problem = apply_strategy(base_problem, strategy)
    near = _near(problem, placed)
    loads = tasks.rank_loads(problem, placed, near or [1.0] * len(problem.table_loads))
    seconds, _ = tasks.predict_step(problem, placed, loads, (ids_after,))
    room = budget.memory_budget(problem).free_bytes[0]
    return DenseCandidate(
        strategy,
        dense_model.peak_memory(problem),
        dense_model.offloaded_bytes(problem),
        room,
        near is not None,
        seconds,
    )


def _near(problem: Problem, placed: PlacedTables) -> list[float] | None:
    """What of each table's ids lies in the fastest tier; None where there is no room."""
    free = budget.memory_budget(problem).free_bytes
    lying = budget.split_rows_by_tier(problem, placed, free) if free[0] > 0 and _far_fits(problem) else None
    return lying[0] if lying is not None else None


def _least_recomputed(posed: Problem, placed: PlacedTables, way: DenseStrategy) -> DenseStrategy:
    """With as few blocks recomputed as fit: more never take more memory."""
    low, high = 0, len(way.dense.recompute)
    while high - low > 1:
        middle = (low + high) // 2
        fits = _near(apply_strategy(posed, _of_few(way, middle)), placed) is not None
        low, high = (low, middle) if fits else (middle, high)
    return _of_few(way, high)


def _of_few(way: DenseStrategy, num: int) -> DenseStrategy:
    recompute = way.dense.recompute
    if num == len(recompute):
        return way
    dense = replace(way.dense, recompute=recompute[:num])
    return replace(way, name=f"{way.name} ({num} of {len(recompute)})", dense=dense, num_recomputed=num)


def fastest_candidate(candidates: Sequence[DenseCandidate]) -> DenseCandidate | None:
    """Of those that fit, and of those that are as fast that with the fewest techniques."""
    fitting = [one for one in candidates if one.fits]
    least = min((one.seconds for one in fitting), default=0.0)
    near = (one for one in fitting if one.seconds <= least * (1 + TIE_SHARE))
    return min(near, key=lambda one: (one.strategy.num_techniques, one.seconds), default=None)


def smallest_candidate(candidates: Sequence[DenseCandidate]) -> DenseCandidate | None:
    """The paper's rule, which knows no part of the blocks."""
    return next((one for one in candidates if one.fits and not one.strategy.num_recomputed), None)


def place_tables_first(base_problem: Problem, pins: Mapping[str, Pin]) -> Candidate:
    """Tables placed beside the smallest set that leaves room for them, else beside the one that leaves most."""
    known = [
        (apply_strategy(base_problem, way, expand_blocks=False), way) for way in requested_strategies(base_problem)
    ]
    roomy = [problem for problem, _ in known if budget.memory_budget(problem).free_bytes[0] > 0 and _far_fits(problem)]
    most = max(roomy or [known[0][0]], key=lambda problem: budget.memory_budget(problem).free_bytes[0])
    for problem in (*roomy[:1], most):
        try:
            return search.find_best(problem, pins)
        except UserError:
            if problem is most:
                raise
    raise UserError(budget.describe_shortage(most))


def choose_strategy(candidate: Candidate, pins: Mapping[str, Pin]) -> tuple[Candidate, tuple[DenseCandidate, ...]]:
    """The fastest way beside these tables, which are then placed anew where it leaves other room for them. Of a small
    dense part none but DDP is looked at: cut it leaves no room, and prices of many small messages are no better known
    than what it would gain."""
    unasked = not candidate.problem.dense_strategy and not candidate.problem.dense.shard
    if unasked and dense_model.total_bytes(dense_model.peak_memory(candidate.problem)) <= SMALL_DENSE_BYTES:
        return candidate, ()
    known = evaluate_strategies(candidate.problem, candidate.placed, candidate.ids_after)
    best = fastest_candidate(known)
    if best is None and candidate.problem.dense_strategy:
        raise UserError(_no_room(known[0], candidate.problem))
    if best is None:
        return candidate, known
    problem = apply_strategy(candidate.problem, best.strategy)
    made = search.evaluate(problem, candidate.proposal, candidate.placed)
    assert made is not None
    if best.strategy.dense != candidate.problem.dense:
        other = search.find_best(replace(problem, expand_blocks=False), pins)
        again = search.evaluate(problem, other.proposal, other.placed)
        made = again if again is not None and again.seconds < made.seconds * (1 - 1e-9) else made
    return made, known


def _no_room(one: DenseCandidate, problem: Problem) -> str:
    fast, *slower = problem.cluster.device.tiers
    where = f"{budget.bytes_text(one.peak_bytes)} of a rank in {fast.name}, which has {budget.bytes_text(fast.bytes_)}"
    if one.offloaded_bytes and slower:
        where += (
            f", and {budget.bytes_text(one.offloaded_bytes)} in {slower[0].name}, which has "
            f"{budget.bytes_text(slower[0].bytes_)}"
        )
    return (
        f"{one.strategy.name}, as asked for, does not fit beside the tables: it takes {where}; ask for another "
        "way, or none"
    )


def describe_choice(candidates: Sequence[DenseCandidate], problem: Problem) -> str:
    """What was chosen, and the paper's rule where it says otherwise; nothing where both say DDP."""
    best, rule = fastest_candidate(candidates), smallest_candidate(candidates)
    if (
        best is None
        or rule is None
        or (best is rule and not best.strategy.num_techniques and not problem.dense_strategy)
    ):
        return ""
    said = (
        f"{best.strategy.name}: {budget.bytes_text(best.peak_bytes)} per rank, predicted "
        f"{1e3 * best.seconds:.3g} ms a step"
    )
    plain = candidates[0]
    if problem.dense_strategy:
        return f"as asked, {said}"
    if not plain.fits:
        said += (
            f"; {plain.strategy.name} would need {budget.bytes_text(plain.peak_bytes)}, "
            f"{budget.bytes_text(-plain.free_bytes)} too much"
        )
        said = said if plain.free_bytes < 0 else said[: said.rindex(",")] + ", which leaves too little for tables"
    if best is rule:
        return f"{said}; it is also the smallest set of techniques that fits"
    more = f"{100 * (rule.seconds / best.seconds - 1):.0f} % longer"
    return f"{said}; the smallest set of techniques that fits is {rule.strategy.name}, whose step is {more}"


def apply_strategy(problem: Problem, strategy: DenseStrategy, *, expand_blocks: bool = True) -> Problem:
    return replace(problem, dense=strategy.dense, expand_blocks=expand_blocks)


def _axes(cluster: Cluster) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Name, axes that replicate and axes that cut; outer axes first, as a plan has them."""
    names = tuple(level.name for level in reversed(cluster.levels)) or ("data",)
    yield "DDP", names, ()
    inside = [prod(level.num for level in cluster.levels[:at]) for at in range(len(cluster.levels) + 1)]
    several = sum(1 < num < cluster.num_ranks for num in inside) > 1
    for at, num in enumerate(inside):
        if 1 < num < cluster.num_ranks:
            shard = names[len(names) - at :]
            yield f"HSDP over {', '.join(shard)}" if several else "HSDP", names[: len(names) - at], shard
    if cluster.num_ranks > 1:
        yield "FSDP", (), names


def _recomputed(workload: Workload, kept: RecomputePolicy | None) -> Iterator[Recompute]:
    """The blocks that then keep less, as far as is known of them."""
    for block in workload.blocks if kept else ():
        products = block.product_bytes if kept == "products" else 0
        known = block.input_bytes and (products or kept == "nothing") and block.name != REST_BLOCK
        if known and block.input_bytes + products < block.activation_bytes:
            assert kept is not None
            yield Recompute(block.name, kept)


def _offloaded(workload: Workload) -> tuple[str, ...]:
    return tuple(block.name for block in workload.blocks if _may_move(block))


def _may_move(block: Block) -> bool:
    return block.name != REST_BLOCK and block.parameter_bytes > 0


def _far_fits(problem: Problem) -> bool:
    tiers, far = problem.cluster.device.tiers, dense_model.offloaded_bytes(problem)
    return not far or far <= tiers[1].bytes_ * (1 - budget.RESERVED_SHARE)
