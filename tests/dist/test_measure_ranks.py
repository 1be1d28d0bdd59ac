"""Measurement of a cluster over four ranks: as two hosts of two ranks, one host, or four hosts."""

import os
from pathlib import Path

import pytest

from shardwright.measure import device, machine, network
from shardwright.planner.price import primitives


def measure(ranks_per_host: tuple[int, ...], folder: str):
    """Measure with small sizes; `ranks_per_host`: for each rank, what the launcher says of its host."""
    patch = pytest.MonkeyPatch()
    patch.setenv("LOCAL_WORLD_SIZE", str(ranks_per_host[int(os.environ["RANK"])]))
    patch.setattr(device, "TABLE_BYTES", 1 << 20)
    patch.setattr(device, "COPY_BYTES", 1 << 20)
    patch.setattr(device, "MATMUL_SHAPES", ((16, 16, 16), (64, 16, 32), (64, 64, 64)))
    patch.setattr(network, "COLLECTIVE_BYTES", (1024, 1 << 16, 1 << 20))
    patch.setattr(network, "LINK_BYTES", (1024, 1 << 20))
    try:
        return machine.measure_cluster("here", Path(folder), lambda what: None, window_seconds=1e-3)
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("ranks_per_host", "levels"),
    [
        ((2, 2, 2, 2), {"local": 2, "host": 2}),
        ((4,) * 4, {"local": 4}),
        ((1,) * 4, {"host": 4}),
        ((1, 3, 3, 3), {"host": 4}),
    ],
)
def test_every_network_level_is_measured(ranks, tmp_path, ranks_per_host, levels):
    clusters = ranks.run(4, measure, ranks_per_host, str(tmp_path), seconds=120)
    cluster = clusters[0]
    cluster.verify()
    assert {level.name: level.num for level in cluster.levels} == levels
    sets = 3 if len(levels) == 2 else 1
    assert len(cluster.collectives) == sets * len(network.COLLECTIVE_OPS) + len(levels) * len(network.LINK_PATTERNS)
    assert all(other.collectives == cluster.collectives for other in clusters)
    for measured in cluster.collectives:
        second = 1 << 20 if measured.op in network.LINK_PATTERNS else 1 << 16
        assert [sample.sizes for sample in measured.samples][:2] == [(1024,), (second,)]
        assert primitives.collective_cost(cluster, measured.op, measured.levels, 5000).basis == "measured"
    assert len(cluster.beside) == sets * 2 * len(network.OVERLAP_BYTES)
