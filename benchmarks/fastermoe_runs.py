"""Seconds of the layers of a model under every policy, simulated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import moe_routing
from benchmarks.fastermoe_models import Model, Routings
from benchmarks.fastermoe_schedule import FloatArray, Schedule, Setting, Traffic, gain_bound
from benchmarks.moe_routing import IntArray
from shardwright.planner.expert_assignment import Assignment
from shardwright.planner.experts import (
    choose_copies,
    copy_candidates,
    imbalance_seconds,
    select_shadows,
    shadow_seconds,
    with_shadows,
    without_copies,
)
from shardwright.spec.expert_rows import ROW_ORDERS

Choose = Callable[[Setting, IntArray], Assignment]
RANKS_PER_GROUP = 4  # of the paper's schedule: FMOE_FASTER_GROUP_SIZE of its code


def choose_by_links(setting: Setting, chosen_RE: IntArray) -> Assignment:
    """Our choice of copies: the candidate with the least bound of overlap on the cluster's links (Equation 2), in the
    better order of rows."""

    def seconds(assignment: Assignment) -> tuple[float, float]:
        traffic = Traffic(setting, assignment)
        return traffic.overlapped_seconds, traffic.sequential_seconds

    layer = setting.paper_layer
    orders = [order(chosen_RE, layer.owners_E) for order in ROW_ORDERS.values()]
    return min((each for order in orders for each in copy_candidates(layer, order)), key=seconds)


def paper_shadows(setting: Setting, chosen_RE: IntArray) -> Assignment:
    """Algorithm 1, with the rate of the network card."""
    return with_shadows(setting.paper_layer, chosen_RE, select_shadows(setting.paper_layer, chosen_RE))


def best_prefix(setting: Setting, chosen_RE: IntArray) -> Assignment:
    """Algorithm 1 without its early end: as many of the most popular experts as give the least time by Equation 8."""
    layer = setting.paper_layer
    plain = without_copies(layer, chosen_RE)
    best, shadows = imbalance_seconds(layer, float(plain.loads_R.max())), list[int]()
    order = popular_experts(chosen_RE)
    for num in range(1, len(order) + 1):
        most_rows = float(with_shadows(layer, chosen_RE, order[:num]).loads_R.max())
        if (seconds := shadow_seconds(layer, num, most_rows)) < best:
            best, shadows = seconds, order[:num]
    return with_shadows(layer, chosen_RE, shadows)


def best_prefix_by_links(setting: Setting, chosen_RE: IntArray) -> Assignment:
    """As many of the most popular quarter of the experts as give the least time on the cluster's links."""
    order = popular_experts(chosen_RE)[: setting.num_experts // 4]
    candidates = [with_shadows(setting.paper_layer, chosen_RE, order[:num]) for num in range(len(order) + 1)]
    return min(candidates, key=lambda assignment: Traffic(setting, assignment).sequential_seconds)


def popular_experts(chosen_RE: IntArray) -> list[int]:
    return np.argsort(-chosen_RE.sum(0), kind="stable").tolist()


class Layer:
    """One layer in one iteration: its traffic under each choice of copies."""

    def __init__(self, setting: Setting, chosen_RE: IntArray, choose_shadows: Choose = paper_shadows) -> None:
        self.setting, self.chosen_RE = setting, chosen_RE
        self.plain = Traffic(setting, without_copies(setting.paper_layer, chosen_RE))
        self.shadows = Traffic(setting, choose_shadows(setting, chosen_RE))

    def paper_seconds(self, *, lockstep: bool = False) -> dict[str, float]:
        """Plain expert parallelism (FastMoE), and FasterMoE's methods one by one and together."""
        groups = self.setting.num_ranks // RANKS_PER_GROUP
        return {
            "plain": self.plain.sequential_seconds,
            "shadows": self.shadows.sequential_seconds,
            "steps": Schedule(self.plain, groups, lockstep).paper_seconds,
            "shadows, steps": Schedule(self.shadows, groups, lockstep).paper_seconds,
        }

    def our_seconds(self, num_groups: int) -> dict[str, float]:
        """Our schedule with copies chosen by all links, and by the planner's costs, as a running job chooses them."""
        planned = choose_copies(self.setting.planned_layer, self.chosen_RE, in_steps=True)
        return {
            "ours": Schedule(self.ours, num_groups).our_seconds,
            "ours, in a job": Schedule(Traffic(self.setting, planned), num_groups).our_seconds,
        }

    @property
    def ours(self) -> Traffic:
        return Traffic(self.setting, choose_by_links(self.setting, self.chosen_RE))


def ideal_seconds(setting: Setting, num_groups: int) -> float:
    """Even routing without copies in our schedule."""
    rows_RE = moe_routing.even_routing(setting.num_ranks, setting.num_experts, setting.rows)
    return Schedule(Traffic(setting, without_copies(setting.paper_layer, rows_RE)), num_groups).our_seconds


def group_options(num_ranks: int) -> tuple[int, ...]:
    """Powers of two up to one group for each rank."""
    return tuple(1 << power for power in range(num_ranks.bit_length()) if num_ranks % (1 << power) == 0)


def choose_groups(setting: Setting, samples: Sequence[IntArray]) -> int:
    """The number of groups with which our schedule takes least time over these samples."""
    traffic = [Layer(setting, chosen_RE).ours for chosen_RE in samples]
    return min(
        group_options(setting.num_ranks), key=lambda num: sum(Schedule(each, num).our_seconds for each in traffic)
    )


@dataclass(frozen=True)
class Run:
    """A model's seconds and counts by iteration and layer."""

    model: Model
    setting: Setting
    groups: int
    values: Mapping[str, FloatArray]

    def seconds(self, side: str) -> float:
        """Of all layers of an iteration: mean over the iterations."""
        return float(self.values[side].mean()) * self.model.num_layers

    def gain(self, side: str) -> float:
        return self.seconds("plain") / self.seconds(side)

    @property
    def shadowed_share(self) -> float:
        """Of the experts, mean over iterations and layers."""
        return float(self.values["shadowed"].mean()) / self.setting.num_experts

    def data_parallel_seconds(self, collectives: int) -> float:
        return self.setting.data_parallel_seconds(collectives) * self.model.num_layers


def simulate_model(
    model: Model,
    setting: Setting,
    routings: Routings,
    *,
    ours: bool = True,
    lockstep: bool = False,
    choose_shadows: Choose = paper_shadows,
) -> Run:
    samples = [chosen_RE for _, _, chosen_RE in routings.samples(setting)]
    groups = choose_groups(setting, samples[:: max(1, len(samples) // 6)]) if ours else 1
    rows = list[dict[str, float]]()
    for chosen_RE in samples:
        layer = Layer(setting, chosen_RE, choose_shadows)
        plain, shadows = layer.plain, layer.shadows
        most, least = (float(each.compute_R.max()) / setting.compute_row for each in (plain, shadows))
        unshadowed = imbalance_seconds(setting.paper_layer, most)
        num = shadows.num_copied
        rows.append(
            {
                **layer.paper_seconds(lockstep=lockstep),
                **(layer.our_seconds(groups) if ours else {}),
                "shadowed": num,
                "exchange": plain.exchange_seconds,
                "compute": plain.compute_seconds,
                "equation 7": unshadowed,
                "equation 8": shadow_seconds(setting.paper_layer, num, least) if num else unshadowed,
            }
        )
    values = {name: np.array([row[name] for row in rows]).reshape(-1, routings.num_layers) for name in rows[0]}
    return Run(model, setting, groups, values)


def layer_gains(values: Mapping[str, FloatArray]) -> tuple[list[float], list[float]]:
    pairs = zip(values["exchange"].mean(0), values["compute"].mean(0), strict=True)
    return [gain_bound(*pair) for pair in pairs], (values["plain"].mean(0) / values["steps"].mean(0)).tolist()
