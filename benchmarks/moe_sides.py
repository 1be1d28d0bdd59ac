"""Sides of benchmarks/moe.py: what each rank computes, and the time that the complete model predicts.

Shape legend: R ranks, E experts.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from benchmarks import moe_policies, moe_routing
from shardwright.planner.expert_assignment import COMPUTE_PASSES, EXCHANGES, Assignment, ExpertLayer
from shardwright.planner.experts import decide, without_copies
from shardwright.spec.expert_rows import BoolArray, ExpertRowOrder, IntArray, balanced_order, rank_order
from shardwright.spec.plan import CopyPolicy, ExpertCosts, ExpertPlan

CHANNELS, ALPHA, ROWS, EXPERTS_PER_RANK, NUM_CHOSEN = 384, 4, 5760, 2, 2
CAPACITY = 1.2  # of an expert, over the mean number of rows
COSTS, GATHER = "costs", "gather"  # a turn that times rows and messages; of its times, one not in the model's costs
TRACE, EVEN = "trace", "even routing"  # workloads; the second is the ideal
PLAIN, AGAIN, SHADOWS, STEPS = "plain", "plain, again", "shadows", "steps"
SHADOWS_STEPS, EVEN_STEPS, OURS = "shadows, steps", "even, steps", "ours"
GSHARD, ZERO_2, ZERO_3 = "GShard, capacity 1.2", "ZeRO-2", "ZeRO-3"
COMPUTATION, MESSAGES = "plain, computation", "plain, messages"
BALANCED, BALANCED_STEPS, BALANCED_OURS = EVEN, f"{EVEN}, steps", f"{EVEN}, ours"
Policy = CopyPolicy | Literal["EPLB", "LLEP", "quota"]
Decide = Callable[[ExpertRowOrder, BoolArray | None], IntArray | None]
Execution = Literal["exchange", "computation", "messages", "capacity", "zero 2", "zero 3"]


@dataclass(frozen=True, slots=True)
class Side:
    """`policy`: of copies; `in_steps`: rows are exchanged in steps; `is_even`: with even routing."""

    policy: Policy = "none"
    in_steps: bool = False
    execution: Execution = "exchange"
    is_even: bool = False


SIDES: MappingProxyType[str, Side] = MappingProxyType(
    {
        PLAIN: Side(),
        AGAIN: Side(),
        SHADOWS: Side("shadows"),
        STEPS: Side("none", True),
        SHADOWS_STEPS: Side("shadows", True),
        EVEN_STEPS: Side("even", True),
        OURS: Side("fastest", True),
        "EPLB": Side("EPLB", True),
        "LLEP": Side("LLEP", True),
        "quota": Side("quota", True),
        GSHARD: Side(execution="capacity"),
        ZERO_2: Side(execution="zero 2"),
        ZERO_3: Side(execution="zero 3"),
        COMPUTATION: Side(execution="computation"),
        MESSAGES: Side(execution="messages"),
        BALANCED: Side(is_even=True),
        BALANCED_STEPS: Side("none", True, is_even=True),
        BALANCED_OURS: Side("fastest", True, is_even=True),
    }
)


def expert_bytes() -> int:
    return 2 * ALPHA * CHANNELS**2 * 4


def counts_of(workload: str, number: int, num_ranks: int, *, is_previous: bool = False) -> IntArray:
    """Rows of each expert by rank: a workload's draw, or what a policy that follows history sees before it.

    That is the draw before; of a trace, the same layer one recorded iteration before.
    """
    shape = num_ranks, EXPERTS_PER_RANK * num_ranks, ROWS
    if workload == TRACE:
        trace = moe_routing.read_trace(os.environ["MOE_TRACE"])
        return moe_routing.fold_trace(trace, number, *shape, lag=int(is_previous))
    return moe_routing.GENERATORS[workload](number - is_previous, *shape)


def routing_of(side: str, workload: str, number: int, num_ranks: int) -> IntArray:
    return counts_of("W0" if SIDES[side].is_even else workload, number, num_ranks)


def num_slots(num_ranks: int) -> int:
    """Rows in GShard's buffer of an expert on a rank."""
    return math.ceil(CAPACITY * ROWS / (EXPERTS_PER_RANK * num_ranks))


def decide_of(side: str, workload: str, number: int, num_ranks: int, costs: ExpertCosts) -> Decide | None:
    """The side's choice of copies, from exact counts; EPLB's from those before."""
    policy, in_steps = SIDES[side].policy, SIDES[side].in_steps
    match policy:
        case "none":
            return None
        case "EPLB":
            previous_RE = counts_of(workload, number, num_ranks, is_previous=True)
            return lambda order, _: moe_policies.eplb(order.chosen_RE, previous_RE=previous_RE)
        case "LLEP":
            return lambda order, _: moe_policies.llep(order.chosen_RE)
        case "quota":
            return lambda order, _: moe_policies.quota(order.chosen_RE)
        case _:
            return partial(decide, ExpertPlan("moe", (), num_ranks if in_steps else 1, policy, costs))


def order_rows_of(side: str) -> Callable[[IntArray, IntArray], ExpertRowOrder]:
    return rank_order if SIDES[side].policy in ("none", "shadows") else balanced_order


def assignment_of(side: str, workload: str, number: int, num_ranks: int, costs: ExpertCosts) -> Assignment:
    """What each rank computes in the exchange of this side."""
    counts_RE = routing_of(side, workload, number, num_ranks)
    layer = ExpertLayer(tuple(expert // EXPERTS_PER_RANK for expert in range(counts_RE.shape[1])), costs)
    policy = decide_of(side, workload, number, num_ranks, costs)
    order = order_rows_of(side)(counts_RE, layer.owners_E)
    computed_RE = policy(order, None) if policy is not None else None
    return without_copies(layer, counts_RE) if computed_RE is None else Assignment(layer, order, computed_RE)


def costs_of(timed: Mapping[str, float]) -> ExpertCosts:
    """The model's costs of those timed."""
    costs = {name: value for name, value in timed.items() if name != GATHER}
    return ExpertCosts(**costs)  # pyright: ignore[reportArgumentType]  # `shared` is not timed


def predict(side: str, workload: str, number: int, num_ranks: int, timed: Mapping[str, float]) -> dict[str, Any]:
    """The complete model's seconds and bound, and figures of the side's assignment."""
    costs, gather = costs_of(timed), timed[GATHER]
    counts_RE, execution = routing_of(side, workload, number, num_ranks), SIDES[side].execution
    num_others = EXPERTS_PER_RANK * (num_ranks - 1)
    computing = COMPUTE_PASSES * costs.compute_row
    if execution in ("zero 2", "zero 3"):
        transfers = 2 if execution == "zero 2" else 3  # of all experts of other ranks
        seconds = computing * int(counts_RE.sum(1).max()) + transfers * num_others * costs.send_expert + gather
        return {"predicted": seconds, "most_rows_over_mean": float(counts_RE.sum(1).max() / ROWS)}
    if execution == "capacity":
        rows, sent = num_slots(num_ranks) * EXPERTS_PER_RANK * num_ranks, num_slots(num_ranks) * num_others
        dropped = (counts_RE - num_slots(num_ranks)).clip(min=0).sum() / counts_RE.sum()
        seconds = computing * rows + EXCHANGES * sent * costs.send_row + gather
        return {"predicted": seconds, "most_rows_over_mean": rows / ROWS, "dropped": float(dropped)}
    assignment = assignment_of(side, workload, number, num_ranks, costs)
    if execution == "computation":
        return {"predicted": assignment.compute_seconds}
    if execution == "messages":
        return {"predicted": assignment.exchange_seconds}
    seconds = assignment.stepped_seconds if SIDES[side].in_steps else assignment.seconds
    return {
        "predicted": seconds + gather,
        "bound": assignment.overlapped_seconds,
        "copies": len(assignment.copies[0]),
        "most_rows_over_mean": float(assignment.loads_R.max() / ROWS),
    }
