"""Groups of ranks along axes: their ranks, prices, links, and the axes that do not lie on a cluster's levels."""

from dataclasses import replace

import pytest

from shardwright.errors import UserError
from shardwright.planner.price import primitives
from shardwright.planner.price.axis_groups import (
    AxisGroups,
    Link,
    check_axes,
    collective_links,
    group_cost,
    message_links,
    send_cost,
)
from shardwright.spec import presets
from shardwright.spec.axes import Axis
from shardwright.spec.cluster import Cluster, Collective, Level, Sample

OPS = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast")
PIPE, DATA_HOST = Axis("pipe", "host", 2), Axis("data", "host", 2)
TENSOR, DATA = Axis("tensor", "local", 2), Axis("data", "local", 4)


def two_levels(**host: float) -> Cluster:
    """Four hosts of eight ranks."""
    local, outer = Level("local", 8, 1e-6, 100e9), Level("host", 4, 1e-5, 10e9, **host)
    return replace(presets.load_cluster("h200-64"), name="four", levels=(local, outer), collectives=(), beside=())


def test_groups_of_parts_of_levels():
    cluster, axes = two_levels(), (PIPE, DATA_HOST, DATA, TENSOR)
    check_axes(cluster, axes)
    assert AxisGroups(cluster, axes, ("tensor@local",)).ranks_GN[:3].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert AxisGroups(cluster, axes, ("data@local",)).ranks_GN[:2].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    both = AxisGroups(cluster, axes, ("data@host", "data@local"))
    assert both.ranks_of(1) == (1, 3, 5, 7, 9, 11, 13, 15) and both.size == 8
    assert [(level.name, level.num) for level in both.levels] == [("local", 4), ("host", 2)]
    first_stage = replace(both, within=tuple(range(16)))
    assert first_stage.ranks_GN.tolist() == [[*range(0, 16, 2)], [*range(1, 16, 2)]]
    assert AxisGroups(cluster, axes, ("pipe@host",)).ranks_of(3) == (3, 19)


@pytest.mark.parametrize("name", ["laptop", "two-cores", "h200-64", "zionex-128-a100"])
@pytest.mark.parametrize("sustained", [True, False])
def test_groups_of_whole_levels_have_the_price_of_the_levels(name, sustained):
    cluster = presets.load_cluster(name)
    for num in range(1, len(cluster.axes) + 1):
        names = tuple(axis.name for axis in cluster.axes[-num:])
        groups = AxisGroups(cluster, cluster.axes, names)
        price = primitives.sustained_cost if sustained else primitives.collective_cost
        for op in OPS if groups.size > 1 else ():
            levels = tuple(level.name for level in cluster.levels[:num])
            assert group_cost(groups, op, 1 << 20, sustained=sustained) == price(cluster, op, levels, 1 << 20)


@pytest.mark.parametrize("op", OPS)
def test_a_part_of_a_level_has_the_price_of_a_level_with_as_many_ranks(op):
    whole = two_levels()
    smaller = replace(whole, levels=(replace(whole.levels[0], num=4), whole.levels[1]))
    part = AxisGroups(whole, (Axis("pipe", "host", 4), Axis("tensor", "local", 2), DATA), ("data@local",))
    expected = primitives.formula_cost(smaller, op, ("local",), 1 << 20)
    assert group_cost(part, op, 1 << 20).seconds == pytest.approx(expected.seconds)


def test_sibling_groups_share_an_uplink():
    axes = (PIPE, DATA_HOST, TENSOR, DATA)
    own, shared = two_levels(), two_levels(group_bytes_per_second=10e9)
    groups = {cluster: AxisGroups(cluster, axes, ("data@host",)) for cluster in (own, shared)}
    assert [groups[cluster].num_on_link(cluster.levels[1]) for cluster in (own, shared)] == [1, 8]
    seconds = [group_cost(groups[cluster], "all_to_all", 1 << 28).seconds for cluster in (own, shared)]
    assert seconds[1] == pytest.approx(8 * seconds[0], rel=1e-2)
    one_group = replace(groups[shared], within=(0, 8))
    assert group_cost(one_group, "all_to_all", 1 << 28).seconds == pytest.approx(seconds[0])


def test_what_was_measured_for_a_level_scales_the_price_of_its_parts():
    cluster, size = two_levels(), 1 << 20
    seconds = 3 * primitives.formula_cost(cluster, "all_reduce", ("local",), size).seconds
    sample = Sample((size,), (seconds,))
    measured = Collective(
        op="all_reduce", levels=("local",), nums=(8,), latency_seconds=0, bytes_per_second=1, error=0, samples=(sample,)
    )
    groups = AxisGroups(cluster, (Axis("pipe", "host", 4), TENSOR, DATA), ("data@local",))
    expected = 3 * group_cost(groups, "all_reduce", size).seconds
    slow = replace(groups, cluster=replace(cluster, collectives=(measured,)))
    assert group_cost(slow, "all_reduce", size).seconds == pytest.approx(expected)


def test_messages_use_the_links_of_the_level_they_cross():
    shared = two_levels(group_bytes_per_second=10e9)
    assert send_cost(shared, 0, 1, 10**9).seconds == pytest.approx(1e-6 + 0.01)
    assert send_cost(shared, 0, 9, 10**9).seconds == pytest.approx(1e-5 + 0.1)
    assert message_links(shared, 0, 9) == (Link("host", 0, "out"), Link("host", 1, "in"))
    assert message_links(shared, 9, 10) == (Link("local", 9, "out"), Link("local", 10, "in"))
    assert message_links(two_levels(), 0, 9) == (Link("host", 0, "out"), Link("host", 9, "in"))
    assert message_links(two_levels(both_bytes_per_second=10e9), 0, 9) == (Link("host", 0), Link("host", 9))
    groups = AxisGroups(shared, (PIPE, DATA_HOST, TENSOR, DATA), ("data@host",))
    assert {(link.level, link.member) for link in collective_links(groups, groups.ranks_of(0))} == {
        ("host", 0),
        ("host", 1),
    }


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((Axis("pipe", "host", 4), DATA), "pipe@host 4 x data@local 4 is 16 ranks; four has 32"),
        ((Axis("pipe", "rack", 4), Axis("data", "local", 8)), 'axis "pipe@rack": four has no level "rack"'),
        ((Axis("pipe", "host", 8), DATA), 'data@local 4 on level "local", which has 8 members'),
        ((Axis("data", "local", 8), Axis("pipe", "host", 4)), 'axis "data@local" is before "pipe@host"; list the axes'),
    ],
)
def test_axes_that_do_not_lie_on_the_levels(axes, message):
    with pytest.raises(UserError, match=message):
        check_axes(two_levels(), axes)
