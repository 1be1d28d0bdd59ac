"""Where the time of a predicted step goes: the parts add up to the step, whatever the bottleneck."""

from dataclasses import replace

import pytest

from shardwright.planner.plan import answer, load
from shardwright.planner.price import roofline
from shardwright.planner.step import critical_path
from shardwright.planner.step.critical_path import LATENCY, PARTS, PRODUCTS, step_parts
from shardwright.spec import presets
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload


def workload(batch_size: int, flops: int = 10**6) -> Workload:
    names = [f"t{at}" for at in range(8)]
    return Workload(
        version=1,
        batch_size=batch_size,
        tables=tuple(Table(name, 100_000 * (at + 1), 64) for at, name in enumerate(names)),
        features=tuple(Feature(name, name) for name in names),
        statistics=tuple(FeatureStatistics(name, 4.0, 0.9) for name in names),
        optimizer=RowWiseAdaGrad(lr=0.1),
        blocks=(Block("top", 10**4, 4 * 10**4, flops, 2 * flops, 10**4),),
    )


@pytest.mark.parametrize("cluster", ["laptop", "two-cores", "h200-64", "zionex-128-a100"])
@pytest.mark.parametrize("batch_size", [1024, 65_536])
def test_the_parts_add_up_to_the_step(cluster, batch_size):
    found = answer(workload(batch_size), presets.cluster(cluster)).found
    parts = step_parts(found)
    assert tuple(parts) == PARTS and min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(found.seconds, rel=1e-6)


def test_a_step_shorter_than_rounding_is_no_end_of_the_path():
    """A dense part of one number: its optimizer step takes 6e-12 s on a GPU."""
    tiny = replace(workload(4096), blocks=(Block("bias", 1, 4, 4096, 8192, 4096, needs_vectors=True),))
    found = answer(tiny, presets.cluster("h200-64")).found
    assert sum(step_parts(found).values()) == pytest.approx(found.seconds, rel=1e-6)


def test_latency_bounds_a_small_batch_on_many_gpus_and_products_a_large_model():
    many = presets.cluster("zionex-128-a100")
    found = answer(workload(1024), many).found
    parts = step_parts(found)
    assert max(parts, key=lambda part: parts[part]) == LATENCY and parts[LATENCY] > 0.5 * found.seconds
    assert critical_path.latency_seconds(found) <= found.seconds
    assert max(seconds for _, seconds in roofline.bound(many, load(found)).parts) < 0.1 * found.seconds
    quick = replace(many, levels=tuple(replace(one, latency_seconds=0.0) for one in many.levels))
    assert step_parts(answer(workload(1024), quick).found)[LATENCY] < 1e-3 * found.seconds
    heavy = step_parts(answer(workload(65_536, flops=10**15), many).found)
    assert max(heavy, key=lambda part: heavy[part]) == PRODUCTS
