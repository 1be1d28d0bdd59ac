"""The recorded routing of a run: rows by expert and by rank, before and after copies, bytes between ranks.

Shape legend: R ranks that have a mixture; E experts.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean

import numpy as np

from shardwright.planner.expert_assignment import Assignment, ExpertLayer
from shardwright.planner.experts import NO_COSTS, assign, without_copies
from shardwright.planner.routing_gains import split_evenly
from shardwright.spec.axes import num_ranks
from shardwright.spec.expert_rows import IntArray, owners_of
from shardwright.spec.plan import ExpertPlan, Plan
from shardwright.spec.routing import RoutedRows
from shardwright.spec.workload import Mixture

Ranks = tuple[int, ...]  # positions among the ranks that have a mixture


@dataclass(frozen=True, eq=False)
class RoutedCall:
    """The rows of a mixture in a step.

    `split`: how its experts are split over ranks; None: every rank has all. `groups`: the ranks that share the experts
    with each other; empty: none do, or the run had another number of ranks in this step.
    """

    record: RoutedRows
    split: ExpertPlan | None
    groups: tuple[Ranks, ...]

    @cached_property
    def rows_RE(self) -> IntArray:
        return np.array(self.record.rows, np.int64)

    @cached_property
    def load_E(self) -> Sequence[float]:
        """Each expert's rows over an even share."""
        rows_E = self.rows_RE.sum(0)
        return (rows_E * len(rows_E) / max(1, int(rows_E.sum()))).tolist()

    @cached_property
    def assignments(self) -> tuple[Assignment, ...]:
        """The rows that ranks had and computed, by group of ranks that share experts."""
        computed_RE = np.array(self.record.computed, np.int64)
        order = self.split.order if self.split is not None else "ranks"
        return tuple(
            assign(self._layer(len(ranks)), self.rows_RE[list(ranks)], computed_RE[list(ranks)], order)
            for ranks in self.groups
        )

    @cached_property
    def without_copies(self) -> tuple[Assignment, ...]:
        return tuple(without_copies(each.layer, each.chosen_RE) for each in self.assignments)

    @property
    def num_copies(self) -> int:
        return sum(len(each.copies[0]) for each in self.assignments)

    @property
    def dropped_share(self) -> float:
        """Of all choices."""
        return self.record.dropped / max(1, self.record.dropped + int(self.rows_RE.sum()))

    @property
    def ideal_share(self) -> float | None:
        """Predicted seconds of even routing over those of the recorded one; None: the plan has no costs."""
        if not self.assignments or self.split is None or self.split.costs is None:
            return None
        rows_by_rank = [(each.layer, each.chosen_RE.sum(1)) for each in self.assignments]
        ideals = [without_copies(layer, split_evenly(rows_R, len(layer.owners)).T) for layer, rows_R in rows_by_rank]
        seconds = self.seconds(self.assignments)
        return self.seconds(ideals) / seconds if seconds else None

    def seconds(self, assignments: Sequence[Assignment]) -> float:
        """Predicted seconds of the slowest group, overlapped if rows are exchanged in steps."""
        in_steps = self.split is not None and self.split.groups > 1
        return max((each.stepped_seconds if in_steps else each.seconds for each in assignments), default=0.0)

    def _layer(self, num_owners: int) -> ExpertLayer:
        costs = self.split.costs if self.split is not None else None
        return ExpertLayer(tuple(owners_of(self.rows_RE.shape[1], num_owners).tolist()), costs or NO_COSTS)


def read_calls(records: Sequence[RoutedRows], plan: Plan | None) -> dict[str, list[RoutedCall]]:
    """The records by mixture, in the order of the model."""
    splits = {experts.module: experts for experts in plan.experts} if plan is not None else {}
    calls: dict[str, list[RoutedCall]] = defaultdict(list)
    for record in records:
        split = splits.get(record.module)
        if split is not None and split.exchange == "hosts":  # costs are those inside a host, and records of tokens
            split = replace(split, costs=None)
        groups = rank_groups(plan, split) if plan is not None and split is not None else ()
        fits = sum(map(len, groups)) == len(record.computed)
        calls[record.module].append(RoutedCall(record, split, groups if fits else ()))
    return {module: calls[module] for module in sorted(calls, key=_by_number)}


def rank_groups(plan: Plan, split: ExpertPlan) -> tuple[Ranks, ...]:
    """The groups of ranks along the axes over which a mixture is split, as positions among those that have it."""
    others = [axis for axis in plan.sample_axes if axis not in split.axes]
    groups: dict[int, list[int]] = defaultdict(list)
    for position, rank in enumerate(ranks_of_mixture(plan)):
        groups[plan.position(rank, others)[0]].append(position)
    return tuple(map(tuple, groups.values()))


def ranks_of_mixture(plan: Plan) -> list[int]:
    """The ranks that have the mixtures of the first chunk of a pipeline, or of the model."""
    return [rank for rank in range(num_ranks(plan.axes)) if plan.pipeline_rank(rank) == 0]


def imbalance(loads: Sequence[float]) -> float:
    """The largest over the mean; 1 where all are 0."""
    mean = fmean(loads)
    return max(loads) / mean if mean else 1.0


def rank_imbalance(assignments: Sequence[Assignment]) -> float:
    """The most rows that a rank computes over the mean of all ranks."""
    return imbalance(np.concatenate([each.loads_R for each in assignments]).tolist())


def bytes_between(call: RoutedCall, mixture: Mixture) -> Iterator[tuple[Ranks, IntArray, IntArray]]:
    """By group: its ranks, and the bytes that each sends each other of rows and of copies in forward and backward.

    A row's input and the gradient of its output travel to the rank that computes it, its output and the gradient of its
    input back. Weights of copies go along a chain from the owner on, gradients along it to the owner.
    """
    row_bytes = mixture.row_bytes + mixture.result_bytes
    expert_bytes = mixture.experts.parameter_bytes // mixture.num_experts
    if call.split is None or call.split.exchange == "hosts":  # rows do not say which tokens go to a host once
        return
    for ranks, assignment in zip(call.groups, call.assignments, strict=True):
        sent_RR = assignment.ranges.rows_between()
        rows_RR = (sent_RR + sent_RR.T) * row_bytes
        np.fill_diagonal(rows_RR, 0)
        copies_RR = np.zeros_like(rows_RR)
        for _, owner, chain in assignment.ranges.chains():
            for sender, receiver in (*pairwise((owner, *chain)), *pairwise((*chain, owner))):
                copies_RR[sender, receiver] += expert_bytes
        yield ranks, rows_RR, copies_RR


def link_level(plan: Plan, rank: int, other: int) -> str:
    """The outermost level of the network between two ranks."""
    for axis in plan.axes:
        if plan.position(rank, (axis.name,)) != plan.position(other, (axis.name,)):
            return axis.level
    return ""


def mean_or_none(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(present) if present else None


def _by_number(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts blocks.10 after blocks.9."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))
