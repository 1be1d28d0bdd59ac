"""Prices by groups of ranks: collectives of the groups along a plan's axes, and messages between two ranks.

Axes lie on the cluster's levels. Several axes may split a level: eight local ranks as tensor@local of 2 and data@local
of 4. A group along one of them is a part of the level and uses the level's links, which it may share with its sibling
groups: all groups communicate at once. A group along all axes of its levels has the price of the levels, as measured.

Shape legend: G groups, N ranks of a group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from shardwright.errors import UserError, did_you_mean
from shardwright.planner.price import primitives
from shardwright.planner.price.primitives import Cost
from shardwright.planner.price.rounds import Round, group_rounds
from shardwright.spec.axes import Axis, axes_text, num_ranks
from shardwright.spec.cluster import Cluster, Level

FULL_DUPLEX_RATIO = 1.5  # rate of both directions at once over that of one, from which on they do not share a link


class Link(NamedTuple):
    """A physical link: of a member of a network level, which is a rank or a group of ranks with one uplink."""

    level: str
    member: int
    direction: str = ""  # "out" or "in"; empty: both directions share the link's bandwidth


@dataclass(frozen=True)
class AxisGroups:
    """The groups of ranks that differ only along some of a plan's axes.

    `within`: only groups of these ranks communicate at once; empty: all groups.
    """

    cluster: Cluster
    axes: tuple[Axis, ...]  # of the plan, outermost first
    names: tuple[str, ...]  # of the axes along which a group's ranks differ
    within: tuple[int, ...] = ()

    @cached_property
    def size(self) -> int:
        """The number of ranks of a group."""
        return num_ranks(axis for axis in self.axes if axis.name in self.names)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The levels that a group spans, innermost first; `num` is the number of their members in the group."""
        nums = {
            level.name: num_ranks(axis for axis in self.axes if axis.level == level.name and axis.name in self.names)
            for level in self.cluster.levels
        }
        named = {axis.level for axis in self.axes if axis.name in self.names}
        return tuple(
            level if nums[level.name] == level.num else replace(level, num=nums[level.name])
            for level in self.cluster.levels
            if level.name in named and (nums[level.name] > 1 or level.num == 1)
        )

    @cached_property
    def level_names(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.levels)

    @property
    def by_level(self) -> "list[AxisGroups]":
        """The groups along the axes of each level that these groups span, innermost first."""
        axes_by_level = (
            tuple(axis.name for axis in self.axes if axis.level == level.name and axis.name in self.names)
            for level in self.levels
        )
        return [replace(self, names=names) for names in axes_by_level]

    @cached_property
    def spans_whole_levels(self) -> bool:
        """Whether the groups are those of the levels, which are measured."""
        return not self.within and all(level in self.cluster.levels for level in self.levels)

    @property
    def ranks_GN(self) -> np.ndarray:
        """The ranks of each group; the innermost axis varies fastest."""
        sizes = [axis.size for axis in self.axes]
        ranks = np.arange(prod(sizes)).reshape(sizes)
        chosen = [index for index, axis in enumerate(self.axes) if axis.name in self.names]
        groups_GN = np.moveaxis(ranks, chosen, range(-len(chosen), 0)).reshape(-1, self.size)
        return groups_GN[np.isin(groups_GN[:, 0], self.within)] if self.within else groups_GN

    def ranks_of(self, rank: int) -> tuple[int, ...]:
        """The group of a rank."""
        groups_GN = replace(self, within=()).ranks_GN
        return tuple(map(int, groups_GN[(groups_GN == rank).any(1)][0]))

    def rounds(self, op: str, bytes_: int) -> list[Round]:
        """The rounds of a collective of `bytes_` in every group at once."""
        return group_rounds(self.cluster, op, self.levels, self.ranks_GN, bytes_)

    def num_on_link(self, level: Level) -> int:
        """The number of groups that share one physical link of a level."""
        member_size = _ranks_per_link(self.cluster, level)
        members_GN = self.ranks_GN // member_size
        crossing = members_GN[(members_GN != members_GN[:, :1]).any(1)]
        return max((int((crossing == member).any(1).sum()) for member in np.unique(crossing)), default=0)


def group_cost(groups: AxisGroups, op: str, bytes_: int, *, sustained: bool = False) -> Cost:
    """A collective of `bytes_` in every group at once. `sustained`: in a long series of collectives.

    Parts of levels follow the formulas, scaled by what was measured for the whole levels.
    """
    cluster, names = groups.cluster, groups.level_names
    if groups.size == 1:
        return Cost(0.0, 0, "formula")
    price = primitives.sustained_cost if sustained else primitives.collective_cost
    if groups.spans_whole_levels:
        return price(cluster, op, names, bytes_)
    cost = primitives.fastest_algorithm_cost(cluster, op, lambda name: groups.rounds(name, bytes_))
    formula = primitives.formula_cost(cluster, op, names, bytes_)
    measured = primitives.collective_cost(cluster, op, names, bytes_)
    cost = replace(cost, seconds=cost.seconds * measured.seconds / formula.seconds) if formula.seconds else cost
    return primitives.in_series(cluster, cost) if sustained else cost


def send_cost(cluster: Cluster, source: int, target: int, bytes_: int) -> Cost:
    """A message from one rank to another, if nothing else uses its links."""
    return primitives.collective_cost(cluster, "one_way", (connecting_level(cluster, source, target).name,), bytes_)


def connecting_level(cluster: Cluster, source: int, target: int) -> Level:
    """The level whose links a message between two ranks crosses."""
    for index, level in enumerate(cluster.levels):
        size = cluster.group_size(index + 1)
        if source // size == target // size:
            return level
    raise UserError(f"ranks {source} and {target} are not connected; {cluster.name} has {cluster.num_ranks} ranks")


def message_links(cluster: Cluster, source: int, target: int) -> tuple[Link, ...]:
    """The links that a message uses: out of the source, into the target."""
    level = connecting_level(cluster, source, target)
    size, directions = _ranks_per_link(cluster, level), _directions(level)
    return Link(level.name, source // size, directions[0]), Link(level.name, target // size, directions[-1])


def collective_links(groups: AxisGroups, ranks: Sequence[int]) -> tuple[Link, ...]:
    """The links that a collective of these ranks, of one or more of the groups, uses."""
    members = ((level, rank // _ranks_per_link(groups.cluster, level)) for level in groups.levels for rank in ranks)
    links = (Link(level.name, member, direction) for level, member in members for direction in _directions(level))
    return tuple(dict.fromkeys(links))


def _directions(level: Level) -> tuple[str, ...]:
    """The directions that have a bandwidth of their own."""
    duplex_rate = level.both_bytes_per_second or 2 * level.bytes_per_second
    return ("out", "in") if duplex_rate >= FULL_DUPLEX_RATIO * level.bytes_per_second else ("",)


def check_axes(cluster: Cluster, axes: Sequence[Axis]) -> None:
    """Raise if the axes do not lie on the cluster's levels: outer levels first, each level split completely."""
    if message := next(_axis_errors(cluster, axes), ""):
        raise UserError(message)


def _axis_errors(cluster: Cluster, axes: Sequence[Axis]) -> Iterator[str]:
    names = [level.name for level in cluster.levels]
    for axis in axes:
        if axis.size > 1 and axis.level not in names:
            yield f'axis "{axis.name}": {cluster.name} has no level "{axis.level}"{did_you_mean(axis.level, names)}'
    if num_ranks(axes) != cluster.num_ranks:
        yield f"{axes_text(axes)} is {num_ranks(axes)} ranks; {cluster.name} has {cluster.num_ranks}"
    for level in cluster.levels:
        split = [axis for axis in axes if axis.level == level.name]
        if num_ranks(split) != level.num:
            yield f'{axes_text(split) or "no axis"} on level "{level.name}", which has {level.num} members'
    for outer, inner in pairwise(axis for axis in axes if axis.level in names):
        if names.index(outer.level) < names.index(inner.level):
            yield f'axis "{outer.name}" is before "{inner.name}"; list the axes of outer levels first'


def _ranks_per_link(cluster: Cluster, level: Level) -> int:
    """The ranks that share a physical link of a level: those of a member with an uplink, else one."""
    index = [outer.name for outer in cluster.levels].index(level.name)
    return cluster.group_size(index) if level.group_bytes_per_second is not None else 1
