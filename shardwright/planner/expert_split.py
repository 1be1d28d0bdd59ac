"""Expert parallelism: whether the experts of a model are split over ranks, over which, in how many steps, with which
copies of popular experts.

Candidates split the experts over the ranks along the innermost axes with different samples, one axis more at a time; of
each the number of steps and the copies are those with the least predicted time for the recorded routing, or for even
routing if none was recorded. Plans are compared by their whole step, as all plans are.

Shape legend: R ranks, E experts, H hosts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import comb, inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import UserError, did_you_mean
from shardwright.planner.dense_strategies import TIE_SHARE
from shardwright.planner.expert_assignment import COMPUTE_PASSES, EXCHANGES, TRANSFERS, ExpertLayer
from shardwright.planner.experts import assign, choose_copies, choose_order, decide, without_copies
from shardwright.planner.memory.budget import bytes_text
from shardwright.planner.pins import LayerRequest
from shardwright.planner.price.axis_groups import AxisGroups, group_cost
from shardwright.planner.problem import Problem, SplitExperts
from shardwright.planner.search import Candidate
from shardwright.planner.step import block_tasks
from shardwright.planner.step.expert_tasks import call_seconds, expert_costs
from shardwright.spec.expert_rows import ROW_ORDERS, IntArray, owners_of
from shardwright.spec.plan import (
    COPY_POLICIES,
    EXPERT_EXCHANGES,
    CopyPolicy,
    ExpertExchangeMode,
    ExpertPlan,
    ExpertRowOrderName,
)
from shardwright.spec.workload import Mixture

# The choice of copies takes time in every call: about this for each pair of a rank and an expert, and at all.
DECISION_SECONDS, DECISION_PAIR_SECONDS = 7e-4, 3e-7
SKEW = 1.2  # exponent of the popularity of experts by which their rows are ordered where no routing was recorded
MAX_DECISION_SHARE = 0.02  # of a call's time, for copies to be considered where no routing was recorded


def check_request(problems: Sequence[Problem], request: LayerRequest) -> None:
    """Raise if no plan has what the user pinned. `problems`: with all axes that come into question."""
    num, problem = request.experts, problems[0]
    if request.expert_copies and request.expert_copies not in COPY_POLICIES:
        suggestion = did_you_mean(request.expert_copies, COPY_POLICIES)
        raise UserError(f'plan.expert_copies="{request.expert_copies}" is unknown{suggestion}')
    if request.expert_exchange and request.expert_exchange not in EXPERT_EXCHANGES:
        suggestion = did_you_mean(request.expert_exchange, EXPERT_EXCHANGES)
        raise UserError(f'plan.expert_exchange="{request.expert_exchange}" is unknown{suggestion}')
    for name in ("expert_groups", "expert_copies", "expert_exchange"):
        if getattr(request, name) and num < 2:
            raise UserError(f"plan.{name} is for experts that are split over ranks: set plan.experts=2 or more")
    if num < 2:
        return
    if not problem.workload.experts:
        raise UserError(f"plan.experts={num}: this model has no mixture of experts")
    sizes = sorted({groups.size for each in problems for groups in _groups(each)})
    if num not in sizes:
        raise UserError(
            f"plan.experts={num} is no group of neighbouring ranks with different samples; {problem.cluster.name} has "
            f"groups of {', '.join(map(str, sizes)) or 'one rank'}"
        )
    fitting = [(each, groups) for each in problems for groups in _groups(each) if groups.size == num]
    if request.expert_exchange == "hosts" and not any(_all_can_go_by_hosts(*each) for each in fitting):
        axes = " or ".join(dict.fromkeys(", ".join(groups.names) for _, groups in fitting))
        raise UserError(
            f'plan.expert_exchange="hosts" needs experts split over two or more axes, and as many on each part of the '
            f"first; {num} ranks are split over {axes}"
        )
    if request.expert_groups > num:
        raise UserError(f"plan.expert_groups={request.expert_groups}: plan.experts={num} allows 1 to {num}")


def options(problem: Problem, request: LayerRequest) -> Iterator[tuple[str, ...]]:
    """The axes that the experts may be split over; (): all experts on every rank."""
    if request.experts < 2:
        yield ()
    if request.experts != 1 and problem.workload.experts:
        fewest = min(mixture.num_experts for mixture in problem.workload.experts)
        for groups in _groups(problem):
            if request.expert_exchange == "hosts" and not _all_can_go_by_hosts(problem, groups):
                continue
            if groups.size == request.experts or not request.experts and groups.size <= fewest:
                yield groups.names


def _all_can_go_by_hosts(problem: Problem, groups: AxisGroups) -> bool:
    return all(_can_go_by_hosts(mixture, groups) for mixture in problem.workload.experts)


def _groups(problem: Problem) -> Iterator[AxisGroups]:
    """The groups of ranks with different samples along the innermost axes, one more at a time."""
    names = problem.sample_groups.names
    for start in reversed(range(len(names))):
        groups = AxisGroups(problem.cluster, problem.mesh_axes, names[start:], problem.chunk_ranks)
        if groups.size > 1:
            yield groups


def split(problem: Problem, axes: tuple[str, ...], request: LayerRequest) -> Problem:
    """The problem with its experts split over the ranks along these axes."""
    if not axes:
        return problem
    groups = AxisGroups(problem.cluster, problem.mesh_axes, axes, problem.chunk_ranks)
    parts: list[SplitExperts] = []
    by_sizes: dict[tuple[Mixture, bool], SplitExperts] = {}  # most mixtures of a model differ only in their names
    for mixture in problem.workload.experts:
        sizes = replace(mixture, module="", block="", experts=replace(mixture.experts, name=""))
        key = sizes, _can_prefetch(problem, mixture)
        if key not in by_sizes:
            by_sizes[key] = _split_mixture(problem, mixture, groups, request)
        part = by_sizes[key]
        parts.append(replace(part, mixture=mixture, plan=replace(part.plan, module=mixture.module)))
    return replace(problem, experts=tuple(parts))


def _split_mixture(problem: Problem, mixture: Mixture, groups: AxisGroups, request: LayerRequest) -> SplitExperts:
    """The exchange, steps and copies of one mixture with which a call takes least time."""
    plans: list[ExpertPlan] = []
    for exchange in _exchanges(mixture, groups, request):
        empty = ExpertPlan(mixture.module, groups.names, exchange=exchange)
        part, skewed = _exchanging(problem, mixture, empty), _exchanging(problem, mixture, empty, is_skewed=True)
        if request.expert_groups > part.groups.size:
            continue
        for num in (request.expert_groups,) if request.expert_groups else (1, part.groups.size):
            for copies in _copy_policies(part, request):
                order = _order(skewed, num, copies)
                plans.append(replace(empty, groups=num, copies=copies, costs=part.layer.costs, order=order))
    if not plans:
        raise UserError(
            f"plan.expert_groups={request.expert_groups}: the ranks of a host exchange rows in at most as many steps "
            "as there are ranks"
        )
    return min((split_as(problem, plan) for plan in plans), key=lambda part: sum(call_seconds(part)))


def _exchanges(mixture: Mixture, groups: AxisGroups, request: LayerRequest) -> Sequence[ExpertExchangeMode]:
    """By hosts, if a token has several experts."""
    if request.expert_exchange:
        return [exchange for exchange in EXPERT_EXCHANGES if exchange == request.expert_exchange]
    by_hosts = mixture.num_chosen > 1 and _can_go_by_hosts(mixture, groups)
    return EXPERT_EXCHANGES if by_hosts else EXPERT_EXCHANGES[:1]


def _can_go_by_hosts(mixture: Mixture, groups: AxisGroups) -> bool:
    """Whether the experts are split over several hosts, with as many on each."""
    return len(groups.names) > 1 and mixture.num_experts % replace(groups, names=groups.names[:1]).size == 0


class _Exchanging(NamedTuple):
    """The ranks that exchange rows with each other, and the rows that each has for their experts."""

    groups: AxisGroups
    layer: ExpertLayer
    chosen_RE: IntArray
    host_seconds: float  # of tokens that go to other hosts, one way


def _exchanging(problem: Problem, mixture: Mixture, plan: ExpertPlan, *, is_skewed: bool = False) -> _Exchanging:
    """By hosts, inside the host with the most rows."""
    everyone, groups = (
        AxisGroups(problem.cluster, problem.mesh_axes, axes, problem.chunk_ranks) for axes in (plan.axes, plan.row_axes)
    )
    costs = plan.costs or expert_costs(problem, mixture, groups, everyone.size)
    rows, shares_E = mixture.rows * problem.local_batch_share, _shares(mixture, is_skewed=is_skewed)
    num_hosts, host_seconds = everyone.size // groups.size, 0.0
    if num_hosts > 1:
        shares_HE = shares_E.reshape(num_hosts, -1)
        host_seconds = _host_seconds(problem, mixture, plan, rows, shares_HE.sum(1))
        rows, shares_E = rows * num_hosts, shares_HE[shares_HE.sum(1).argmax()]
    ends_E = np.rint(shares_E.cumsum() * rows).astype(np.int64)
    owners_E = owners_of(len(shares_E), groups.size)
    chosen_RE = np.tile(np.diff(ends_E, prepend=0), (groups.size, 1))
    return _Exchanging(groups, ExpertLayer(tuple(owners_E.tolist()), costs), chosen_RE, host_seconds)


def _host_seconds(
    problem: Problem, mixture: Mixture, plan: ExpertPlan, rows: float, shares_H: NDArray[np.floating[Any]]
) -> float:
    """A token goes to each host that has one of its experts. With even shares its experts are distinct; with recorded
    ones they are drawn one by one."""
    hosts = AxisGroups(problem.cluster, problem.mesh_axes, plan.axes[:1], problem.chunk_ranks)
    num, elsewhere = mixture.num_chosen, mixture.num_experts - mixture.num_experts // hosts.size
    goes_H = 1 - (1 - shares_H) ** num
    if not mixture.shares:
        goes_H = np.full(hosts.size, 1 - comb(elsewhere, num) / comb(mixture.num_experts, num))
    busiest = max(float(goes_H.sum() - goes_H.min()), (hosts.size - 1) * float(goes_H.max()))
    row_bytes = (mixture.row_bytes + mixture.result_bytes) / 2
    bytes_ = rows / num * busiest * row_bytes * hosts.size / (hosts.size - 1)
    return group_cost(hosts, "all_to_all", max(1, round(bytes_)), sustained=True).seconds


def _shares(mixture: Mixture, *, is_skewed: bool) -> NDArray[np.floating[Any]]:
    """Of the rows, by expert: as recorded; without, even or skewed."""
    popularity_E = np.arange(1.0, mixture.num_experts + 1) ** -(SKEW if is_skewed else 0.0)
    return np.array(mixture.shares or popularity_E / popularity_E.sum())


def _order(part: _Exchanging, num_steps: int, copies: CopyPolicy) -> ExpertRowOrderName:
    """Shadows are on all ranks, each for its own rows. All others have the same order, so that results with and without
    copies are equal to the bit."""
    return "ranks" if copies == "shadows" else choose_order(part.layer, part.chosen_RE, in_steps=num_steps > 1)


def split_as(problem: Problem, plan: ExpertPlan) -> SplitExperts:
    """A mixture that is split as this plan says."""
    mixture = next((each for each in problem.workload.experts if each.module == plan.module), None)
    if mixture is None:
        raise UserError(f'the plan splits the experts of "{plan.module}", which the workload does not have; plan again')
    groups, layer, chosen_RE, host_seconds = _exchanging(problem, mixture, replace(plan, costs=None))
    computed_RE = decide(plan, ROW_ORDERS[plan.order](chosen_RE, layer.owners_E))
    assignment = assign(layer, chosen_RE, computed_RE, plan.order)
    own = max(np.bincount(layer.owners)) * mixture.experts.parameter_bytes / mixture.num_experts
    even, copying = (
        mixture.rows * problem.local_batch_share * layer.costs.compute_row,
        assignment.copy_seconds / TRANSFERS,
    )
    return SplitExperts(
        plan=plan,
        mixture=mixture,
        own_bytes=own,
        copied_bytes=0.0 if computed_RE is None else 2 * own,  # as many prefetched ones, and as many others, at most
        compute_seconds=assignment.compute_seconds / COMPUTE_PASSES,
        even_seconds=even,
        message_seconds=assignment.exchange_seconds / EXCHANGES,
        copy_seconds=copying,
        late_copy_seconds=max(0.0, copying - _seconds_before(problem, mixture, even)),
        latency=group_cost(groups, "all_to_all", 1).seconds,
        host_seconds=host_seconds,
    )


def _can_prefetch(problem: Problem, mixture: Mixture) -> bool:
    """Whether copies can leave at the start of the block: the mixture is inside it, and the only one."""
    is_inside = mixture.module.startswith(f"{mixture.block}.")
    return is_inside and sum(other.block == mixture.block for other in problem.workload.experts) == 1


def _seconds_before(problem: Problem, mixture: Mixture, even_seconds: float) -> float:
    """Forward seconds of the rest of the block, while copies may travel."""
    if not _can_prefetch(problem, mixture):
        return 0.0
    block = next(block for block in problem.workload.blocks if block.name == mixture.block)
    return max(0.0, block_tasks.pass_task(problem, [block], "forward").seconds_on(0) - even_seconds)


def _copy_policies(part: _Exchanging, request: LayerRequest) -> list[CopyPolicy]:
    """The policies to compare: copies if they pay for the recorded routing, or if choosing them takes little time."""
    if request.expert_copies:
        return [policy for policy in COPY_POLICIES if policy == request.expert_copies]
    plain = without_copies(part.layer, part.chosen_RE)
    deciding = DECISION_SECONDS + DECISION_PAIR_SECONDS * part.chosen_RE.size
    if choose_copies(part.layer, part.chosen_RE).seconds + deciding < plain.seconds:
        return ["fastest", "none"]
    return ["fastest"] if deciding < MAX_DECISION_SHARE * plain.seconds else ["none"]


def is_better(split: Candidate | None, whole: Candidate | None) -> bool:
    """Whether the step with split experts is shorter by more than a tie, or the model fits only so."""
    return split is not None and (whole is None or split.seconds * (1 + TIE_SHARE) < whole.seconds)


def describe_split(candidate: Candidate, unsplit_seconds: float, request: LayerRequest) -> str:
    """Why the experts are split so, or why not. `unsplit_seconds`: of a step with all experts on every rank; infinity:
    that does not fit, 0: it was not tried."""
    problem, pinned = candidate.problem, "as pinned, " if request.experts else ""
    if not problem.experts:
        return f"{pinned}all on every rank{'' if pinned else ': splitting them would not shorten the step'}"
    plans = [part.plan for part in problem.experts]
    groups = AxisGroups(problem.cluster, problem.mesh_axes, plans[0].axes)
    steps, copies = sorted({plan.groups for plan in plans}), " or ".join(sorted({plan.copies for plan in plans}))
    steps_text = f"{' or '.join(map(str, steps))} step{'s' * (steps != [1])}"
    by_hosts = "by hosts " if any(plan.exchange == "hosts" for plan in plans) else ""
    own = sum(part.own_bytes for part in problem.experts)
    total = sum(part.mixture.experts.parameter_bytes for part in problem.experts)
    text = (
        f"{pinned}split over {groups.size} ranks ({', '.join(groups.names)}), {bytes_text(own)} of {bytes_text(total)} "
        f"of weights on a rank; rows are exchanged {by_hosts}in {steps_text}; copies: {copies}"
    )
    if unsplit_seconds == inf:
        return f"{text}; all experts on every rank do not fit"
    if not unsplit_seconds:
        return text
    return f"{text}; the step is {candidate.seconds / unsplit_seconds:.3g}x as long as with all experts on every rank"
