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

from shardwright.errors import UserError, nearest
from shardwright.planner import search
from shardwright.planner.memory import budget, dense_model
from shardwright.planner.problem import REST, Placed, Problem
from shardwright.planner.search import Found, Pin
from shardwright.planner.step import tasks
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Dense, Kept, Recompute
from shardwright.spec.workload import Block, Workload

SAID = MappingProxyType[Kept, str]({"products": "selective", "nothing": "full"})
IDLE = MappingProxyType(  # why a word of a way may name nothing here
    {
        "offload": "of the memory of a rank one kind is known; name in plan.cluster what `shardwright measure` wrote",
        "selective": "no block would keep less if it kept its products alone",
        "full": "no block would keep less if it ran again",
        "hsdp": "nothing of the dense part can be cut among these ranks",
        "fsdp": "nothing of the dense part can be cut among these ranks",
    }
)
SAME = 0.01  # of a step's time, so near that fewer techniques are better
LITTLE_BYTES = 1 << 26  # a dense part that takes no more is held by DDP, unasked; of whatever machines, so that faster
# or larger ones never make a plan slower


@dataclass(frozen=True, slots=True)
class Way:
    """One combination; `cut`: over how many levels, inside first. `part`: of how many blocks only, where not of all."""

    name: str
    dense: Dense
    cut: int = 0
    kept: Kept | None = None  # of recomputed blocks; None: all stays
    part: int = 0

    @property
    def techniques(self) -> int:
        return bool(self.cut) + (self.kept is not None) + bool(self.dense.offload)

    @property
    def rank(self) -> tuple[int, bool, int, int]:
        """Smaller sets first."""
        recomputed = (None, "products", "nothing").index(self.kept)
        return self.techniques, bool(self.dense.offload), recomputed, self.cut


@dataclass(frozen=True, slots=True)
class Combination:
    """A way with what it takes, where tables lie as placed."""

    way: Way
    parts: dense_model.Parts  # bytes of the dense part in the fastest tier, at its fullest moment
    far_bytes: float  # in the next tier
    room: float  # of the fastest tier, that is left for tables
    fits: bool
    seconds: float  # of a step, were there room

    @property
    def bytes_(self) -> float:
        return dense_model.total(self.parts)


def ways(workload: Workload, cluster: Cluster) -> tuple[Way, ...]:
    """All that make a difference, the smallest set first."""
    found: list[Way] = []
    tiers = cluster.device.tiers
    offloads = ((), _offloaded(workload)) if len(tiers) > 1 else ((),)
    axes = [*_axes(cluster)][: None if any(map(_may_move, workload.blocks)) else 1]
    for cut, (name, replicate, shard) in enumerate(axes):
        for kept in (None, "products", "nothing"):
            recompute = tuple(_recomputed(workload, kept))
            for offload in dict.fromkeys(offloads) if recompute or kept is None else ():
                words = [name, *([SAID[kept]] if kept else []), *(["offload"] if offload else [])]
                dense = Dense(replicate, shard, recompute, offload)
                found.append(Way(" + ".join(words), dense, cut, kept))
    return tuple(sorted(found, key=lambda way: way.rank))


def asked(posed: Problem) -> tuple[Way, ...]:
    """All ways, or the one that is asked for. HSDP alone cuts over the ranks of the innermost level; where that has
    all ranks it is FSDP."""
    known, wanted = ways(posed.workload, posed.cluster), _words(posed.way)
    if not posed.way:
        return known
    if "hsdp" in wanted and not any("hsdp" in _words(way.name) for way in known):
        inside = (word for way in known for word in _words(way.name) if word.startswith("hsdp over "))
        wanted = wanted - {"hsdp"} | {next(inside, "fsdp")}
    found = tuple(way for way in known if _words(way.name) == wanted)
    if not found:
        idle = next(
            (word for word in IDLE if word in wanted and not any(word in _words(way.name) for way in known)), ""
        )
        why = f": {IDLE[idle]}" if idle else nearest(posed.way, [one.name for one in known])
        raise UserError(f'no way "{posed.way}" to hold the dense part{why}')
    return found


def _words(name: str) -> frozenset[str]:
    return frozenset(word.strip().lower() for word in name.split("+"))


def combinations(posed: Problem, placed: Placed, behind: str = "read") -> tuple[Combination, ...]:
    """Every way, where tables lie so and ids are issued behind this; and where only recomputing makes room, that of as
    few blocks as do: the first ones, whose activations are there longest."""
    found = [combination(posed, placed, way, behind) for way in asked(posed)]
    fitting = {one.way.dense for one in found if one.fits}
    for one in list(found) if not posed.way else ():
        whole = replace(one.way.dense, recompute=())
        if one.fits and one.way.kept is not None and whole not in fitting:
            few = _least_recomputed(posed, placed, one.way)
            found += [combination(posed, placed, few, behind)] if few.part else []
    return tuple(sorted(found, key=lambda one: (one.way.rank, -one.way.part)))


def combination(posed: Problem, placed: Placed, way: Way, behind: str) -> Combination:
    problem = held_so(posed, way)
    near = _near(problem, placed)
    loads = tasks.loads(problem, placed, near or [1.0] * len(problem.demands))
    seconds, _ = tasks.seconds(problem, placed, loads, (behind,))
    room = budget.budget(problem).free[0]
    return Combination(
        way, dense_model.fullest(problem), dense_model.far_bytes(problem), room, near is not None, seconds
    )


def _near(problem: Problem, placed: Placed) -> list[float] | None:
    """What of each table's ids lies in the fastest tier; None where there is no room."""
    free = budget.budget(problem).free
    lying = budget.near_shares(problem, placed, free) if free[0] > 0 and _far_fits(problem) else None
    return lying[0] if lying is not None else None


def _least_recomputed(posed: Problem, placed: Placed, way: Way) -> Way:
    """With as few blocks recomputed as fit: more never take more memory."""
    low, high = 0, len(way.dense.recompute)
    while high - low > 1:
        middle = (low + high) // 2
        fits = _near(held_so(posed, _of_few(way, middle)), placed) is not None
        low, high = (low, middle) if fits else (middle, high)
    return _of_few(way, high)


def _of_few(way: Way, num: int) -> Way:
    recompute = way.dense.recompute
    if num == len(recompute):
        return way
    dense = replace(way.dense, recompute=recompute[:num])
    return replace(way, name=f"{way.name} ({num} of {len(recompute)})", dense=dense, part=num)


def fastest(found: Sequence[Combination]) -> Combination | None:
    """Of those that fit, and of those that are as fast that with the fewest techniques."""
    fitting = [one for one in found if one.fits]
    least = min((one.seconds for one in fitting), default=0.0)
    near = (one for one in fitting if one.seconds <= least * (1 + SAME))
    return min(near, key=lambda one: (one.way.techniques, one.seconds), default=None)


def smallest(found: Sequence[Combination]) -> Combination | None:
    """The paper's rule, which knows no part of the blocks."""
    return next((one for one in found if one.fits and not one.way.part), None)


def placed_first(posed: Problem, pins: Mapping[str, Pin]) -> Found:
    """Tables placed beside the smallest set that leaves room for them, else beside the one that leaves most."""
    known = [(held_so(posed, way, by_block=False), way) for way in asked(posed)]
    roomy = [problem for problem, _ in known if budget.budget(problem).free[0] > 0 and _far_fits(problem)]
    most = max(roomy or [known[0][0]], key=lambda problem: budget.budget(problem).free[0])
    for problem in (*roomy[:1], most):
        try:
            return search.best(problem, pins)
        except UserError:
            if problem is most:
                raise
    raise UserError(budget.short_of(most))


def chosen(found: Found, pins: Mapping[str, Pin]) -> tuple[Found, tuple[Combination, ...]]:
    """The fastest way beside these tables, which are then placed anew where it leaves other room for them. Of a small
    dense part none but DDP is looked at: cut it leaves no room, and prices of many small messages are no better known
    than what it would gain."""
    unasked = not found.problem.way and not found.problem.dense.shard
    if unasked and dense_model.total(dense_model.fullest(found.problem)) <= LITTLE_BYTES:
        return found, ()
    known = combinations(found.problem, found.placed, found.behind)
    best = fastest(known)
    if best is None and found.problem.way:
        raise UserError(_no_room(known[0], found.problem))
    if best is None:
        return found, known
    problem = held_so(found.problem, best.way)
    made = search.scored(problem, found.proposal, found.placed)
    assert made is not None
    if best.way.dense != found.problem.dense:
        other = search.best(replace(problem, by_block=False), pins)
        again = search.scored(problem, other.proposal, other.placed)
        made = again if again is not None and again.seconds < made.seconds * (1 - 1e-9) else made
    return made, known


def _no_room(one: Combination, problem: Problem) -> str:
    fast, *slower = problem.cluster.device.tiers
    where = f"{budget.told(one.bytes_)} of a rank in {fast.name}, which has {budget.told(fast.bytes_)}"
    if one.far_bytes and slower:
        where += f", and {budget.told(one.far_bytes)} in {slower[0].name}, which has {budget.told(slower[0].bytes_)}"
    return (
        f"{one.way.name}, as asked for, does not fit beside the tables: it takes {where}; ask for another way, or none"
    )


def told(found: Sequence[Combination], problem: Problem) -> str:
    """What was chosen, and the paper's rule where it says otherwise; nothing where both say DDP."""
    best, rule = fastest(found), smallest(found)
    if best is None or rule is None or (best is rule and not best.way.techniques and not problem.way):
        return ""
    said = f"{best.way.name}: {budget.told(best.bytes_)} per rank, predicted {1e3 * best.seconds:.3g} ms a step"
    plain = found[0]
    if problem.way:
        return f"as asked, {said}"
    if not plain.fits:
        said += f"; {plain.way.name} would need {budget.told(plain.bytes_)}, {budget.told(-plain.room)} too much"
        said = said if plain.room < 0 else said[: said.rindex(",")] + ", which leaves too little for tables"
    if best is rule:
        return f"{said}; it is also the smallest set of techniques that fits"
    more = f"{100 * (rule.seconds / best.seconds - 1):.0f} % longer"
    return f"{said}; the smallest set of techniques that fits is {rule.way.name}, whose step is {more}"


def held_so(posed: Problem, way: Way, *, by_block: bool = True) -> Problem:
    return replace(posed, dense=way.dense, by_block=by_block)


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


def _recomputed(workload: Workload, kept: Kept | None) -> Iterator[Recompute]:
    """The blocks that then keep less, as far as is known of them."""
    for block in workload.blocks if kept else ():
        products = block.product_bytes if kept == "products" else 0
        known = block.input_bytes and (products or kept == "nothing") and block.name != REST
        if known and block.input_bytes + products < block.activation_bytes:
            assert kept is not None
            yield Recompute(block.name, kept)


def _offloaded(workload: Workload) -> tuple[str, ...]:
    return tuple(block.name for block in workload.blocks if _may_move(block))


def _may_move(block: Block) -> bool:
    return block.name != REST and block.parameter_bytes > 0


def _far_fits(problem: Problem) -> bool:
    tiers, far = problem.cluster.device.tiers, dense_model.far_bytes(problem)
    return not far or far <= tiers[1].bytes_ * (1 - budget.RESERVED)
