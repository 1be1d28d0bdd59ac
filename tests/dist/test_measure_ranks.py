"""Measuring on four ranks, as two hosts of two and flat."""

import os
from pathlib import Path

import pytest

from shardwright.measure import device, machine, network
from shardwright.planner.price import primitives


def measured(local: tuple[int, ...], folder: str):
    """Every rank is told how many of them are on its host."""
    few = pytest.MonkeyPatch()
    few.setenv("LOCAL_WORLD_SIZE", str(local[int(os.environ["RANK"])]))
    few.setattr(device, "TABLE_BYTES", 1 << 20)
    few.setattr(device, "COPY_BYTES", 1 << 20)
    few.setattr(device, "MATMUL_SHAPES", ((16, 16, 16), (64, 16, 32), (64, 64, 64)))
    few.setattr(network, "COLLECTIVE_BYTES", (1024, 1 << 16, 1 << 20))
    few.setattr(network, "LINK_BYTES", (1024, 1 << 20))
    try:
        return machine.measure_cluster("here", Path(folder), lambda what: None, window_seconds=1e-3)
    finally:
        few.undo()


@pytest.mark.parametrize(
    ("local", "levels"),
    [
        ((2, 2, 2, 2), {"local": 2, "host": 2}),
        ((4,) * 4, {"local": 4}),
        ((1,) * 4, {"host": 4}),
        ((1, 3, 3, 3), {"host": 4}),
    ],
)
def test_every_level_is_found(ranks, tmp_path, local, levels):
    found = ranks.run(4, measured, local, str(tmp_path), seconds=120)
    cluster = found[0]
    cluster.verify()
    assert {level.name: level.num for level in cluster.levels} == levels
    sets = 3 if len(levels) == 2 else 1
    assert len(cluster.collectives) == sets * len(network.COLLECTIVE_OPS) + len(levels) * len(network.LINK_PATTERNS)
    assert all(one.collectives == cluster.collectives for one in found)
    for one in cluster.collectives:
        second = 1 << 20 if one.op in network.LINK_PATTERNS else 1 << 16
        assert [sample.sizes for sample in one.samples][:2] == [(1024,), (second,)]
        assert primitives.collective_cost(cluster, one.op, one.levels, 5000).basis == "measured"
    assert len(cluster.beside) == sets * 2 * len(network.OVERLAP_BYTES)
