"""Where the time of a predicted step goes: the parts add up to the step, whatever the bottleneck."""

from dataclasses import replace

import pytest

from shardwright.planner.plan import make_plan, resource_usage
from shardwright.planner.price import roofline
from shardwright.planner.step import critical_path
from shardwright.planner.step.critical_path import LATENCY, MATMULS, RESOURCES, seconds_by_resource
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
    found = make_plan(workload(batch_size), presets.load_cluster(cluster)).candidate
    parts = seconds_by_resource(found)
    assert tuple(parts) == RESOURCES and min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(found.seconds, rel=1e-6)


def test_a_step_shorter_than_rounding_is_no_end_of_the_path():
    """A dense part of one number: its optimizer step takes 6e-12 s on a GPU."""
    tiny = replace(workload(4096), blocks=(Block("bias", 1, 4, 4096, 8192, 4096, needs_vectors=True),))
    found = make_plan(tiny, presets.load_cluster("h200-64")).candidate
    assert sum(seconds_by_resource(found).values()) == pytest.approx(found.seconds, rel=1e-6)


def test_latency_bounds_a_small_batch_on_many_gpus_and_products_a_large_model():
    many = presets.load_cluster("zionex-128-a100")
    found = make_plan(workload(1024), many).candidate
    parts = seconds_by_resource(found)
    assert max(parts, key=lambda part: parts[part]) == LATENCY and parts[LATENCY] > 0.5 * found.seconds
    assert critical_path.latency_seconds(found) <= found.seconds
    assert (
        max(seconds for _, seconds in roofline.step_bound(many, resource_usage(found)).seconds_by_resource)
        < 0.1 * found.seconds
    )
    quick = replace(many, levels=tuple(replace(one, latency_seconds=0.0) for one in many.levels))
    assert seconds_by_resource(make_plan(workload(1024), quick).candidate)[LATENCY] < 1e-3 * found.seconds
    heavy = seconds_by_resource(make_plan(workload(65_536, flops=10**15), many).candidate)
    assert max(heavy, key=lambda part: heavy[part]) == MATMULS
