"""A cluster's ranks, and every check of it by its message."""

from dataclasses import replace

import pytest

from shardwright.errors import UserError
from shardwright.spec.cluster import Cluster, Curve, Device, Level, Tier

DRAM = Tier("dram", 10**9, 1e10, 1e10)
MATMUL = Curve("matmul", "float32", ((64, 1e9), (128, 2e9)))
DEVICE = Device("core", "cpu", (DRAM,), (MATMUL,))
CLUSTER = Cluster(1, "lab", "emulated", DEVICE, (Level("bus", 2, 0.0, 1e9), Level("net", 4, 1e-5, 1e8, 131072)))


def test_num_ranks():
    CLUSTER.verify()
    assert CLUSTER.num_ranks == 8
    assert replace(CLUSTER, levels=()).num_ranks == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": replace(DEVICE, tiers=())}, 'device "core" has no memory tier'),
        ({"device": replace(DEVICE, tiers=(DRAM, DRAM))}, 'tier "dram" appears 2 times'),
        (
            {"device": replace(DEVICE, tiers=(replace(DRAM, bytes_=0),))},
            'tier "dram": bytes_ is 0; wanted more than 0',
        ),
        ({"device": replace(DEVICE, curves=(MATMUL, MATMUL))}, 'curve "matmul float32" appears 2 times'),
        ({"device": replace(DEVICE, curves=(replace(MATMUL, points=()),))}, "has no points"),
        (
            {"device": replace(DEVICE, curves=(replace(MATMUL, points=((4, 0),)),))},
            "rate is 0; wanted more than 0",
        ),
        (
            {"device": replace(DEVICE, curves=(replace(MATMUL, points=((4, 1), (4, 2))),))},
            'curve "matmul float32": size 4 follows 4; sizes must grow',
        ),
        ({"levels": (Level("bus", 2, 0, 1), Level("bus", 2, 0, 1))}, 'level "bus" appears 2 times'),
        ({"levels": (Level("bus", 0, 0, 1),)}, 'level "bus": num is 0; wanted more than 0'),
        ({"levels": (Level("bus", 2, -1, 1),)}, 'level "bus": latency_seconds is -1; wanted 0 or more'),
        (
            {"levels": (Level("bus", 2, 0, float("nan")),)},
            'level "bus": bytes_per_second is nan; wanted more than 0',
        ),
    ],
)
def test_checks(change, message):
    with pytest.raises(UserError) as caught:
        replace(CLUSTER, **change).verify()
    assert message in str(caught.value)
