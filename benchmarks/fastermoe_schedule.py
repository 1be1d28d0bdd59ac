"""Seconds of one mixture-of-experts layer, forward and backward, on the links of a cluster: simulated, nothing runs.

A phase of FasterMoE's schedule (section 4.2): S_j sends rows between groups of ranks at distance j on a ring, C_j
computes the rows received, R_j returns their outputs. A rank has two lanes: messages S_0, S_1, ..., R_0, R_1, ... and
computation C_0, C_1, .... C_j follows S_j; R_j follows C_j of all ranks. Messages take as long as the slowest link
(Equation 2), and a latency for each step. Rows for copies of experts have steps of their own, after their weights.

Shape legend: R ranks (RR: from, to), E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.expert_assignment import COMPUTE_PASSES, EXCHANGES, TRANSFERS, Assignment, ExpertLayer
from shardwright.planner.price import primitives
from shardwright.planner.problem import Precision
from shardwright.planner.search import define_problem
from shardwright.planner.step.expert_tasks import expert_costs
from shardwright.spec.cluster import Cluster
from shardwright.spec.expert_rows import owners_of
from shardwright.spec.plan import ExpertCosts
from shardwright.spec.wire import EXPERT_PART_BYTES
from shardwright.spec.workload import DTYPE_BYTES, Block, Dtype, Mixture, Workload

FloatArray = NDArray[np.float64]
ZERO_2, ZERO_3 = 2, 3  # collectives of all weights: all-gathers for each pass that needs them, a reduce-scatter


@dataclass(frozen=True)
class Setting:
    """A layer with its experts split over a cluster. `rows`: of a rank, tokens times experts per token."""

    cluster: Cluster
    num_experts: int
    channels: int
    hidden: int
    rows: int
    dtype: Dtype = "float32"
    products: int = 2  # matrices of channels x hidden in an expert; SwiGLU has 3

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_ranks

    @property
    def row_bytes(self) -> float:
        return DTYPE_BYTES[self.dtype] * self.channels

    @property
    def expert_bytes(self) -> float:
        return self.products * self.hidden * self.row_bytes

    @property
    def network_rate(self) -> float:
        """Bytes per second of a host's network card, or of a rank's own link: W_net of Equations 7 to 10."""
        outermost = self.cluster.levels[-1]
        return outermost.group_bytes_per_second or outermost.bytes_per_second

    @cached_property
    def compute_row(self) -> float:
        price = primitives.find_price(self.cluster.device, "matmul", self.dtype)
        return 2 * self.products * self.channels * self.hidden * price.seconds_per_flop

    @cached_property
    def paper_layer(self) -> ExpertLayer:
        """The layer of Equations 7 and 8, in which every rank sends at the rate of the network card."""
        rate = self.network_rate
        return self._layer(ExpertCosts(self.compute_row, self.row_bytes / rate, self.expert_bytes / rate))

    @cached_property
    def planned_layer(self) -> ExpertLayer:
        """The layer with the planner's costs, by which a running job chooses its copies."""
        num, row_bytes = self.num_experts, round(self.row_bytes)
        experts = Block("moe.experts", 0, round(num * self.expert_bytes), 0, 0, 0)
        mixture = Mixture("moe", "moe", num, self.rows * self.num_ranks, row_bytes, row_bytes, experts)
        block = replace(experts, name="moe")
        model = Workload(1, self.num_ranks, (), (), (), blocks=(block,), experts=(mixture,))
        problem = define_problem(model, self.cluster, self.num_ranks, Precision())
        costs = expert_costs(problem, mixture, problem.sample_groups)
        return self._layer(replace(costs, compute_row=self.compute_row))

    def _layer(self, costs: ExpertCosts) -> ExpertLayer:
        return ExpertLayer(tuple(owners_of(self.num_experts, self.num_ranks).tolist()), costs)

    @property
    def latency_seconds(self) -> float:
        return max(level.latency_seconds for level in self.cluster.levels)

    def link_seconds(self, bytes_RR: FloatArray) -> float:
        """Equation 2, and the latency of a message."""
        seconds = primitives.slowest_link_seconds(self.cluster, bytes_RR)
        return seconds + self.latency_seconds if seconds else 0.0

    @cached_property
    def all_gather_seconds(self) -> float:
        """One collective of all experts' weights, or gradients."""
        names, bytes_ = [level.name for level in self.cluster.levels], round(self.num_experts * self.expert_bytes)
        return primitives.collective_cost(self.cluster, "all_gather", names, bytes_).seconds

    def data_parallel_seconds(self, collectives: int) -> float:
        """All experts on every rank, which computes its own rows: 3 passes and ZERO_2 or ZERO_3 collectives."""
        return COMPUTE_PASSES * self.rows * self.compute_row + collectives * self.all_gather_seconds


class Traffic:
    """What an assignment moves: rows for owners of experts, rows for copies, and weights of copies along chains."""

    def __init__(self, setting: Setting, assignment: Assignment) -> None:
        self.setting = setting
        owners_E = np.array(assignment.layer.owners)
        ranges = assignment.ranges
        self.own_RR: FloatArray = ranges.rows_between(is_copy=False).astype(float)
        self.copied_RR: FloatArray = ranges.rows_between(is_copy=True).astype(float)
        self.weights_RR: FloatArray = np.zeros((setting.num_ranks, setting.num_ranks))
        chains = assignment.chains()
        for expert, ranks in chains.items():
            chain = [int(owners_E[expert]), *ranks]
            np.add.at(self.weights_RR, (chain[:-1], chain[1:]), setting.expert_bytes)
        self.num_copied = len(chains)
        self.longest_chain = max(map(len, chains.values()), default=0)

    @cached_property
    def weights_seconds(self) -> float:
        """All copies' weights, or their gradients; a chain of ranks hands them on in parts."""
        return self.setting.link_seconds(self.weights_RR)

    @cached_property
    def exchange_seconds(self) -> float:
        """All rows one way, in one all-to-all."""
        return self.setting.link_seconds((self.own_RR + self.copied_RR) * self.setting.row_bytes)

    @cached_property
    def compute_R(self) -> FloatArray:
        """Seconds of one pass over a rank's rows."""
        return (self.own_RR + self.copied_RR).sum(0) * self.setting.compute_row

    @cached_property
    def compute_seconds(self) -> float:
        """Equation 1."""
        return float(self.compute_R.max())

    @property
    def message_seconds(self) -> float:
        return EXCHANGES * self.exchange_seconds + TRANSFERS * self.weights_seconds

    @property
    def sequential_seconds(self) -> float:
        """Without overlap: the complete model on the cluster's links."""
        return COMPUTE_PASSES * self.compute_seconds + self.message_seconds

    @property
    def overlapped_seconds(self) -> float:
        """The least time with overlap, forward and backward, on the cluster's links."""
        messages, forward = self.message_seconds / 2, self.compute_seconds
        return max(messages, forward) + max(messages, 2 * forward)


@dataclass(frozen=True)
class Schedule:
    """The exchange of a layer in steps between `num_groups` groups of consecutive ranks.

    Each link carries its messages one after the other. `lockstep`: a step's messages wait for all of the step before.
    """

    traffic: Traffic
    num_groups: int
    lockstep: bool = False
    copies_first: bool = False

    @cached_property
    def rows(self) -> list[FloatArray]:
        """(RR) of each step, those for owners first, or those for copies."""
        group_R = np.arange(self.traffic.setting.num_ranks) * self.num_groups // self.traffic.setting.num_ranks
        distance_RR = (group_R[:, None] - group_R) % self.num_groups
        kinds = [self.traffic.own_RR, *([self.traffic.copied_RR] if self.traffic.num_copied else [])]
        kinds = kinds[::-1] if self.copies_first else kinds
        return [np.where(distance_RR == step, rows_RR, 0.0) for rows_RR in kinds for step in range(self.num_groups)]

    @cached_property
    def messages(self) -> list[FloatArray]:
        return [rows_RR * self.traffic.setting.row_bytes for rows_RR in self.rows]

    def arrivals(self, *, with_weights: bool) -> list[float]:
        """When the rows of each step have arrived; `with_weights`: of copies, too, before the rows for them."""
        if not with_weights or not self.traffic.num_copied:
            return self._until(self.messages)
        num = self.num_groups
        times = self._until([*self.messages[:num], self.traffic.weights_RR, *self.messages[num:]])
        return times[:num] + times[num + 1 :]

    @cached_property
    def remaining(self) -> list[float]:
        """By step: seconds from its first return to the end of the last step's, in the opposite direction."""
        return self._until([bytes_RR.T for bytes_RR in self.messages[::-1]])[::-1]

    def _until(self, messages: Sequence[FloatArray]) -> list[float]:
        """Seconds until the end of each of these messages."""
        setting = self.traffic.setting
        if self.lockstep:
            return np.cumsum([setting.link_seconds(bytes_RR) for bytes_RR in messages]).tolist()
        totals = np.cumsum(messages, axis=0)
        return [setting.link_seconds(total) + at * setting.latency_seconds for at, total in enumerate(totals)]

    def phase(
        self, passes: int = 1, *, with_weights: bool = False, num_steps: int | None = None
    ) -> tuple[float, FloatArray]:
        """When the last results have been returned, and when each rank's computation ends; of the first steps only."""
        arrivals, compute_row = self.arrivals(with_weights=with_weights), self.traffic.setting.compute_row
        returned, computed_R = arrivals[-1] + self.remaining[0], np.zeros(self.traffic.setting.num_ranks)
        steps = zip(arrivals, self.rows, self.remaining, strict=True)
        for arrival, rows_RR, remaining in islice(steps, num_steps):
            computed_R = np.maximum(computed_R, arrival) + passes * compute_row * rows_RR.sum(0)
            returned = max(returned, float(computed_R.max()) + remaining)
        return returned, computed_R

    @cached_property
    def forward_seconds(self) -> float:
        returned, computed_R = self.phase(with_weights=True)
        return max(returned, float(computed_R.max()))

    @property
    def paper_seconds(self) -> float:
        """FasterMoE: a backward step computes both gradients; those of copies' weights are reduced last."""
        returned, computed_R = self.phase(2)
        return self.forward_seconds + max(returned, float(computed_R.max())) + self.traffic.weights_seconds

    @property
    def our_seconds(self) -> float:
        """Ours: in backward rows for copies come first; gradients of weights are computed after those of inputs.

        Gradients of copies travel while ranks compute own rows, and share the links with all messages. Each rank of a
        chain adds its rows to a part of a gradient before it hands it on.
        """
        traffic, setting = self.traffic, self.traffic.setting
        backward = replace(self, copies_first=True)
        returned, computed_R = backward.phase()
        seconds = max(returned, float((computed_R + traffic.compute_R).max()))
        if traffic.num_copied:
            _, copied_R = backward.phase(num_steps=self.num_groups)
            copies_R = setting.compute_row * traffic.copied_RR.sum(0)
            part = min(1.0, EXPERT_PART_BYTES / setting.expert_bytes)
            part_seconds = part * (setting.expert_bytes / setting.network_rate + float(copies_R.max()))
            last_part = float((copied_R + copies_R).max()) + max(0, traffic.longest_chain - 1) * part_seconds
            total_RR = np.sum(self.messages, axis=0)
            links = setting.link_seconds(total_RR + total_RR.T + traffic.weights_RR.T)
            seconds = max(seconds, last_part + traffic.weights_seconds, links)
        return self.forward_seconds + seconds


def gain_bound(exchange_seconds: float, compute_seconds: float) -> float:
    """The most that the schedule can gain (figure 12), from seconds of one exchange and of one pass."""
    messages, forward = 2 * exchange_seconds, compute_seconds
    overlapped = max(messages, forward) + max(messages, 2 * forward)
    return (EXCHANGES * exchange_seconds + COMPUTE_PASSES * forward) / overlapped
