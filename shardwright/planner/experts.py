"""Which experts to copy to other ranks for one iteration: the shadows of FasterMoE, and balancing.

Equation numbers are those of FasterMoE (PPoPP'22).

Shape legend: R ranks, E experts.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import inf

import numpy as np

from shardwright.errors import UserError
from shardwright.planner.expert_assignment import COMPUTE_PASSES, EXCHANGES, TRANSFERS, Assignment, ExpertLayer
from shardwright.spec.expert_rows import (
    ORDER_BOUND,
    ROW_ORDERS,
    BoolArray,
    ExpertRowOrder,
    IntArray,
    balance_rows,
    rank_order,
    rows_of_owners,
)
from shardwright.spec.plan import ExpertCosts, ExpertPlan, ExpertRowOrderName

NO_COSTS = ExpertCosts(0.0, 0.0, 0.0)
# Of a rank's rows over the mean, that copies are tried for; and whether ranks give only what they have above it.
BALANCES = ((1.0, False), (ORDER_BOUND, False), (1.1, True))


def without_copies(layer: ExpertLayer, chosen_RE: IntArray) -> Assignment:
    """Every row is computed by the owner of its expert."""
    return Assignment(layer, rank_order(chosen_RE, layer.owners_E), _shadowed(layer, chosen_RE, []))


def with_shadows(layer: ExpertLayer, chosen_RE: IntArray, experts: Sequence[int]) -> Assignment:
    """Every rank computes its own rows of these experts."""
    return Assignment(layer, rank_order(chosen_RE, layer.owners_E), _shadowed(layer, chosen_RE, experts))


def _shadowed(layer: ExpertLayer, chosen_RE: IntArray, experts: Sequence[int]) -> IntArray:
    computed_RE = rows_of_owners(chosen_RE, layer.owners_E)
    computed_RE[:, list(experts)] = chosen_RE[:, list(experts)]
    return computed_RE


def select_shadows(layer: ExpertLayer, chosen_RE: IntArray) -> list[int]:
    """Algorithm 1: experts in descending order of rows, until one does not reduce the time of Equations 7 and 8.

    As published it counts a rank's rows, not those that are still exchanged, nor those that a rank has already.
    """
    loads_R = np.bincount(layer.owners_E, chosen_RE.sum(0), len(chosen_RE))
    best, shadows = imbalance_seconds(layer, loads_R.max(initial=0)), list[int]()
    for expert in np.argsort(-chosen_RE.sum(0), kind="stable").tolist():
        loads_R[layer.owners[expert]] -= chosen_RE[:, expert].sum()
        loads_R += chosen_RE[:, expert]
        seconds = shadow_seconds(layer, len(shadows) + 1, loads_R.max(initial=0))
        if seconds >= best:
            return shadows
        best = seconds
        shadows.append(expert)
    return shadows


def imbalance_seconds(layer: ExpertLayer, most_rows: float) -> float:
    """Equation 7."""
    return COMPUTE_PASSES * most_rows * layer.costs.compute_row + EXCHANGES * most_rows * layer.costs.send_row


def shadow_seconds(layer: ExpertLayer, num_shadows: int, most_rows: float) -> float:
    """Equation 8."""
    computing = COMPUTE_PASSES * most_rows * layer.costs.compute_row
    return computing + TRANSFERS * num_shadows * layer.costs.send_expert


def assign(
    layer: ExpertLayer, chosen_RE: IntArray, computed_RE: IntArray | None, order: ExpertRowOrderName = "balanced"
) -> Assignment:
    """What ranks compute if rows are in this order; None: no copies."""
    if computed_RE is None:
        return without_copies(layer, chosen_RE)
    return Assignment(layer, ROW_ORDERS[order](chosen_RE, layer.owners_E), computed_RE)


def balance(layer: ExpertLayer, chosen_RE: IntArray, bound: float = 1.0) -> Assignment:
    """Copies with which no rank computes more than `bound` times the mean number of rows, rounded up."""
    if bound < 1:
        raise UserError(f"balancing within {bound:g} times the mean; wanted 1 or more")
    return assign(layer, chosen_RE, balance_rows(chosen_RE, layer.owners_E, bound))


def copy_candidates(
    layer: ExpertLayer, order: ExpertRowOrder, prefetched_RE: BoolArray | None = None
) -> Iterator[Assignment]:
    """Balancing by `BALANCES`, prefetched copies first or not, Algorithm 1's shadows, and no copies; all with
    rows in this order."""
    first = (None,) if prefetched_RE is None else (prefetched_RE, None)
    for (bound, fewest), first_RE in product(BALANCES, first):
        computed_RE = balance_rows(order.chosen_RE, order.owners_E, bound, first_RE, fewest_rows=fewest)
        yield Assignment(layer, order, computed_RE, prefetched_RE)
    for shadows in dict.fromkeys((tuple(select_shadows(layer, order.chosen_RE)), ())):  # once, if no shadow pays
        yield Assignment(layer, order, _shadowed(layer, order.chosen_RE, shadows), prefetched_RE)


def choose_copies(
    layer: ExpertLayer, chosen_RE: IntArray, order: ExpertRowOrderName | None = None, *, in_steps: bool = False
) -> Assignment:
    """The fastest candidate by the complete model; without `order`, in the better one."""
    names: Sequence[ExpertRowOrderName] = [order] if order is not None else [*ROW_ORDERS]
    orders = [ROW_ORDERS[name](chosen_RE, layer.owners_E) for name in names]
    return _fastest([each for order in orders for each in copy_candidates(layer, order)], in_steps=in_steps)


def choose_order(layer: ExpertLayer, chosen_RE: IntArray, *, in_steps: bool) -> ExpertRowOrderName:
    """The order of rows in which the fastest copies take less time."""

    def seconds(name: ExpertRowOrderName) -> float:
        best = choose_copies(layer, chosen_RE, name, in_steps=in_steps)
        return best.stepped_seconds if in_steps else best.seconds

    return min(ROW_ORDERS, key=seconds)


def _fastest(candidates: Iterable[Assignment], *, in_steps: bool) -> Assignment:
    best, least = None, inf
    for each in candidates:
        if best is None or each.compute_seconds < least:  # else it is slower whatever its messages take
            seconds = each.stepped_seconds if in_steps else each.seconds
            if best is None or seconds < least:
                best, least = each, seconds
    assert best is not None
    return best


def decide(plan: ExpertPlan, order: ExpertRowOrder, prefetched_RE: BoolArray | None = None) -> IntArray | None:
    """How many rows of each expert every rank computes, by the plan's `copies`; None: no copies.

    `prefetched_RE`: the copies that ranks have already; the choice of shadows does not depend on them.
    """
    layer = ExpertLayer(tuple(order.owners_E.tolist()), plan.costs or NO_COSTS)
    match plan.copies:
        case "none":
            return None
        case "even":
            return balance_rows(order.chosen_RE, order.owners_E, 1.0, prefetched_RE)
        case "shadows":
            return _shadowed(layer, order.chosen_RE, select_shadows(layer, order.chosen_RE))
        case "fastest":
            candidates = copy_candidates(layer, order, prefetched_RE)
            return _fastest(candidates, in_steps=plan.groups > 1).computed_RE
