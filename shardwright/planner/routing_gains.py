"""What copies, steps and a permanent placement of experts would gain on a cluster, for recorded routing.

Every recorded pass of a mixture is priced by the complete model (planner/expert_assignment.py) under each policy. A
permanent placement is made from the first half of the passes and priced on the second.

Shape legend: S source ranks, R ranks, E experts, N ranks of a group that the experts are split over, P passes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import UserError
from shardwright.planner import experts
from shardwright.planner.expert_assignment import Assignment, ExpertLayer
from shardwright.planner.expert_placement import place_experts
from shardwright.planner.price.axis_groups import AxisGroups
from shardwright.planner.problem import Problem
from shardwright.planner.step.expert_tasks import expert_costs
from shardwright.spec.expert_placement import ExpertPlacement, PlacedMixture
from shardwright.spec.expert_rows import IntArray, owners_of
from shardwright.spec.routing_trace import RoutingTrace
from shardwright.spec.workload import Mixture

FloatArray = NDArray[np.float64]
COPY_PARTS = 2  # a copy holds weights and their gradients
SCALE_MARGIN = 0.01  # smaller differences between recorded and planned rows are not worth a note


@dataclass(frozen=True, eq=False)
class PassPrices:
    """Predicted seconds of forward and backward of a mixture in one pass, and its loads, on the slowest group of ranks.

    `plain`: experts where they are. `shadows`: Algorithm 1. `steps`: in steps. `even`: copies for even
    loads. `fastest`: the fastest choice of copies, in steps. `ideal`: even routing, in steps.
    """

    plain: float
    shadows: float
    steps: float
    even: float
    fastest: float
    ideal: float
    imbalance: float  # largest over mean rows of a rank
    imbalance_left: float  # with the copies of `fastest`
    num_copies: int  # that a rank holds of other ranks' experts, at most


POLICIES = ("shadows", "steps", "even", "fastest", "ideal")


@dataclass(frozen=True, eq=False)
class MixtureGains:
    """The prices of each sampled pass of a mixture, in order, and a permanent placement of its experts.

    `placed_seconds`, `placed_imbalance`: of the passes from `num_placing` on, under the placement, which was made from
    those before; of all passes, if there is only one.
    """

    mixture: Mixture
    numbers: tuple[int, ...]  # of the passes
    prices: tuple[PassPrices, ...]
    placed: PlacedMixture
    placed_seconds: FloatArray
    placed_imbalance: FloatArray

    def seconds(self, policy: str) -> FloatArray:
        return np.array([getattr(price, policy) for price in self.prices])

    def gains(self, policy: str) -> FloatArray:
        """Seconds of plain expert parallelism over those of a policy, of each pass."""
        return self.seconds("plain") / self.seconds(policy)

    @property
    def placed_gains(self) -> FloatArray:
        return self.seconds("plain")[-len(self.placed_seconds) :] / self.placed_seconds

    @property
    def copy_bytes(self) -> float:
        """Memory of a rank's copies, at most."""
        expert_bytes = self.mixture.experts.parameter_bytes / self.mixture.num_experts
        return COPY_PARTS * expert_bytes * max(price.num_copies for price in self.prices)


@dataclass(frozen=True, eq=False)
class RoutingGains:
    """The gains of all recorded mixtures of a model. `notes`: what was assumed, in sentences."""

    problem: Problem
    trace: RoutingTrace
    mixtures: tuple[MixtureGains, ...]
    notes: tuple[str, ...]

    @cached_property
    def placement(self) -> ExpertPlacement:
        return ExpertPlacement(1, self.problem.cluster.name, tuple(each.placed for each in self.mixtures))

    def total_seconds(self, policy: str) -> FloatArray:
        """Seconds of all mixtures, of each pass that has all of them."""
        by_pass = [dict(zip(each.numbers, each.seconds(policy), strict=True)) for each in self.mixtures]
        whole = set(by_pass[0]).intersection(*by_pass[1:])
        return np.array([sum(seconds[number] for seconds in by_pass) for number in sorted(whole)])

    def total_gains(self, policy: str) -> FloatArray:
        return self.total_seconds("plain") / self.total_seconds(policy)


def predict_gains(
    problem: Problem, trace: RoutingTrace, num_redundant: int = 0, axes: tuple[str, ...] = ()
) -> RoutingGains:
    """Price all sampled passes of a trace of the problem's mixtures; all ranks have different samples.

    `axes`: those that the experts are split over; empty: `expert_axes`.
    """
    if problem.cluster.num_ranks == 1:
        raise UserError(f"{problem.cluster.name} has one rank, which has all experts; give a cluster of several ranks")
    by_module = {mixture.module: mixture for mixture in problem.workload.experts}
    mixtures, notes = [by_module[module] for module in trace.shares], dict[str, None]()
    gains: list[MixtureGains] = []
    for mixture in mixtures:
        numbers = tuple(number for number, each in enumerate(trace.passes) if mixture.module in each)
        recorded = [trace.passes[number][mixture.module] for number in numbers]
        scale = (
            mixture.rows * problem.batch_size / problem.workload.batch_size / np.mean([each.sum() for each in recorded])
        )
        passes = [fold_ranks(rows_SE, problem.cluster.num_ranks, float(scale)) for rows_SE in recorded]
        groups = AxisGroups(problem.cluster, problem.mesh_axes, axes or expert_axes(problem, mixture))
        notes |= dict.fromkeys(_describe_ranks(problem, recorded[0], groups, float(scale)))
        gains.append(_mixture_gains(problem, mixture, groups, (numbers, passes), num_redundant))
    return RoutingGains(problem, trace, tuple(gains), (_describe_sample(trace), *notes))


def fold_ranks(rows_SE: IntArray, num_ranks: int, scale: float = 1.0) -> IntArray:
    """(R, E) The rows that each of `num_ranks` would have: sums of consecutive sources, or, if these are not a multiple
    of the ranks, as many of each expert's rows on every rank. `scale`: of all rows."""
    num_sources, num_experts = rows_SE.shape
    if num_sources % num_ranks == 0:
        folded_RE = rows_SE.reshape(num_ranks, -1, num_experts).sum(1)
        return folded_RE if scale == 1 else np.rint(folded_RE * scale).astype(np.int64)
    return split_evenly(np.rint(rows_SE.sum(0) * scale).astype(np.int64), num_ranks)


def split_evenly(totals: IntArray, num: int) -> IntArray:
    """`num` rows of whole numbers, as equal as possible, that sum to `totals`."""
    ends = totals * np.arange(1, num + 1)[:, None] // num
    return np.diff(ends, axis=0, prepend=0)


def expert_axes(problem: Problem, mixture: Mixture) -> tuple[str, ...]:
    """All axes; if they have more ranks than there are experts, only inner ones."""
    names: list[str] = []
    num_ranks = 1
    for axis in reversed(problem.mesh_axes):
        if names and num_ranks * axis.size > mixture.num_experts:
            break
        names.append(axis.name)
        num_ranks *= axis.size
    return tuple(reversed(names))


def _mixture_gains(
    problem: Problem,
    mixture: Mixture,
    groups: AxisGroups,
    recorded: tuple[tuple[int, ...], Sequence[IntArray]],
    num_redundant: int,
) -> MixtureGains:
    numbers, passes = recorded
    owners = tuple(owners_of(mixture.num_experts, groups.size).tolist())
    layer = ExpertLayer(owners, expert_costs(problem, mixture, groups))
    by_group = [[rows_RE[ranks_N] for ranks_N in groups.ranks_GN] for rows_RE in passes]
    prices = tuple(_slowest([price_pass(layer, rows_NE) for rows_NE in pass_]) for pass_ in by_group)
    num_placing = (len(passes) + 1) // 2
    loads_PE = np.array([rows_RE.sum(0) for rows_RE in passes[:num_placing]])
    placed = place_experts(mixture.module, loads_PE, groups.size, num_redundant)
    placed_passes = [[assign_placed(layer, rows_NE, placed) for rows_NE in pass_] for pass_ in by_group]
    counted = placed_passes[num_placing:] or placed_passes
    return MixtureGains(
        mixture,
        numbers,
        prices,
        placed,
        np.array([max(each.seconds for each in pass_) for pass_ in counted]),
        np.array([max(map(imbalance, pass_)) for pass_ in counted]),
    )


def price_pass(layer: ExpertLayer, chosen_NE: IntArray) -> PassPrices:
    plain = experts.without_copies(layer, chosen_NE)
    shadowed = experts.with_shadows(layer, chosen_NE, experts.select_shadows(layer, chosen_NE))
    fastest = experts.choose_copies(layer, chosen_NE, in_steps=True)
    even_NE = split_evenly(chosen_NE.sum(1), chosen_NE.shape[1]).T
    return PassPrices(
        plain.seconds,
        shadowed.seconds,
        plain.stepped_seconds,
        experts.balance(layer, chosen_NE).seconds,
        fastest.stepped_seconds,
        experts.without_copies(layer, even_NE).stepped_seconds,
        imbalance(plain),
        imbalance(fastest),
        int(np.bincount(fastest.copies[0], minlength=1).max()),
    )


def imbalance(assignment: Assignment) -> float:
    """The largest over the mean number of rows that a rank computes."""
    return float(assignment.loads_R.max() / max(1e-300, assignment.loads_R.mean()))


def assign_placed(layer: ExpertLayer, chosen_NE: IntArray, placed: PlacedMixture) -> Assignment:
    """Each expert's rows are split evenly over its ranks. Gradients of replicas are reduced to the owner, and weights
    sent back, at the price of a copy."""
    computed_NE, totals_E = np.zeros_like(chosen_NE), chosen_NE.sum(0)
    for expert, ranks in enumerate(placed.ranks):
        computed_NE[list(ranks), expert] = split_evenly(totals_E[[expert]], len(ranks))[:, 0]
    owners = tuple(ranks[0] for ranks in placed.ranks)
    return experts.assign(ExpertLayer(owners, layer.costs), chosen_NE, computed_NE)


def _slowest(prices: Sequence[PassPrices]) -> PassPrices:
    """By each field the largest of all groups of ranks, which wait for each other."""
    fields: Mapping[str, object] = PassPrices.__dataclass_fields__
    return PassPrices(*(max(getattr(price, name) for price in prices) for name in fields))


def _describe_sample(trace: RoutingTrace) -> str:
    num, total = len(trace.passes), trace.num_passes
    passes = f"{num} of {total} passes, evenly sampled" if num < total else f"{num} passes"
    return f"routing of {len(trace.shares)} mixtures in {passes}, from {trace.path} (format of {trace.format})"


def _describe_ranks(problem: Problem, rows_SE: IntArray, groups: AxisGroups, scale: float) -> Iterator[str]:
    num_sources, num_ranks = len(rows_SE), problem.cluster.num_ranks
    if num_sources % num_ranks:
        yield f"rows of {num_sources} recorded ranks are spread evenly over {num_ranks}, which differ more in a run"
    elif num_sources > num_ranks:
        yield f"rows of {num_sources // num_ranks} consecutive recorded ranks are added up for each of {num_ranks}"
    yield f"experts are split over {groups.size} ranks ({', '.join(groups.names)})"
    if abs(scale - 1) > SCALE_MARGIN:
        yield f"recorded rows are scaled by {scale:.3g} to those of the planned batch"
