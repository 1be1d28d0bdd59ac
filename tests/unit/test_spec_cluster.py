"""A cluster's number of ranks, and the message of every check."""

from dataclasses import replace

import pytest

from shardwright.errors import UserError
from shardwright.spec.cluster import Beside, Cluster, Collective, Device, Level, Price, Sample, Tier

DRAM = Tier("dram", 10**9, 1e10, 1e10)
MATMUL = Price(op="matmul", dtype="float32", seconds_per_flop=1e-9, samples=(Sample((64, 64, 64), (1e-3,)),))
DEVICE = Device("core", "cpu", (DRAM,), (MATMUL,))
CLUSTER = Cluster(1, "lab", "emulated", DEVICE, (Level("bus", 2, 0.0, 1e9), Level("net", 4, 1e-5, 1e8, 131072)))


ALL_REDUCE = Collective(
    op="all_reduce",
    levels=("bus",),
    nums=(2,),
    latency_seconds=0.0,
    bytes_per_second=1e9,
    error=0.0,
    samples=(Sample((4,), (1.0,)),),
)
OVERLAP = Beside(
    op="all_reduce", levels=("bus",), bytes_=4, collective_seconds=1.0, matmul_seconds=1.0, together_seconds=1.5
)


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
        ({"device": replace(DEVICE, prices=(MATMUL, MATMUL))}, 'price "matmul float32" appears 2 times'),
        ({"device": replace(DEVICE, prices=(Price(op="copy"),))}, 'price "copy" is zero'),
        (
            {"device": replace(DEVICE, prices=(replace(MATMUL, call_seconds=-1.0),))},
            'price "matmul float32": call_seconds is -1.0; wanted 0 or more',
        ),
        (
            {"device": replace(DEVICE, prices=(replace(MATMUL, samples=(Sample((4,), (0.0,)),)),))},
            'price "matmul float32": sample (4,): seconds is 0.0; wanted more than 0',
        ),
        (
            {
                "device": replace(
                    DEVICE, prices=(replace(MATMUL, samples=(Sample((4,), (1.0,)), Sample((4,), (2.0,)))),)
                )
            },
            'price "matmul float32": sample "(4,)" appears 2 times',
        ),
        (
            {"device": replace(DEVICE, prices=(replace(MATMUL, samples=(Sample((4, 0), (1.0,)),)),))},
            "a sample of sizes (4, 0); wanted 3, each above 0",
        ),
        ({"collectives": (ALL_REDUCE, ALL_REDUCE)}, 'collective "all_reduce over bus" appears 2 times'),
        (
            {"collectives": (replace(ALL_REDUCE, levels=("rack",)),)},
            'all_reduce over level "rack", which the cluster does not',
        ),
        ({"collectives": (replace(ALL_REDUCE, nums=()),)}, 'collective "all_reduce over bus": 0 sizes for 1 levels'),
        ({"collectives": (replace(ALL_REDUCE, samples=()),)}, 'collective "all_reduce over bus" has no samples'),
        (
            {"beside": (replace(OVERLAP, matmul_seconds=0.0),)},
            "all_reduce overlapped with matmul: matmul_seconds is 0.0",
        ),
        ({"beside": (replace(OVERLAP, levels=("rack",)),)}, 'all_reduce over level "rack", which the cluster does not'),
        (
            {"levels": (Level("bus", 2, 0, 1, group_bytes_per_second=0.0),)},
            'level "bus": group_bytes_per_second is 0.0; wanted more than 0',
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
def test_errors_in_clusters(change, message):
    with pytest.raises(UserError) as caught:
        replace(CLUSTER, **change).verify()
    assert message in str(caught.value)
