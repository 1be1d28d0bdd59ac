"""Attribution of a predicted step's time to resources: the parts add up to the step, whatever the bottleneck."""

from dataclasses import replace

import pytest

from shardwright.planner.plan import make_plan, resource_usage
from shardwright.planner.price import roofline
from shardwright.planner.step import critical_path
from shardwright.planner.step.critical_path import LATENCY, MATMULS, RESOURCES, seconds_by_resource
from shardwright.spec import presets
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload


def make_workload(batch_size: int, flops: int = 10**6) -> Workload:
    names = [f"t{i}" for i in range(8)]
    return Workload(
        version=1,
        batch_size=batch_size,
        tables=tuple(Table(name, 100_000 * (i + 1), 64) for i, name in enumerate(names)),
        features=tuple(Feature(name, name) for name in names),
        statistics=tuple(FeatureStatistics(name, 4.0, 0.9) for name in names),
        optimizer=RowWiseAdaGrad(lr=0.1),
        blocks=(Block("top", 10**4, 4 * 10**4, flops, 2 * flops, 10**4),),
    )


@pytest.mark.parametrize("cluster", ["laptop", "two-cores", "h200-64", "zionex-128-a100"])
@pytest.mark.parametrize("batch_size", [1024, 65_536])
def test_the_parts_add_up_to_the_step(cluster, batch_size):
    candidate = make_plan(make_workload(batch_size), presets.load_cluster(cluster)).candidate
    parts = seconds_by_resource(candidate)
    assert tuple(parts) == RESOURCES and min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(candidate.seconds, rel=1e-6)


def test_a_stage_shorter_than_rounding_does_not_end_the_critical_path():
    """A dense model of one number: its optimizer step takes 6e-12 s on a GPU."""
    tiny_workload = replace(make_workload(4096), blocks=(Block("bias", 1, 4, 4096, 8192, 4096, needs_vectors=True),))
    candidate = make_plan(tiny_workload, presets.load_cluster("h200-64")).candidate
    assert sum(seconds_by_resource(candidate).values()) == pytest.approx(candidate.seconds, rel=1e-6)


def test_latency_bounds_a_small_batch_on_many_gpus_and_products_a_large_model():
    cluster = presets.load_cluster("zionex-128-a100")
    candidate = make_plan(make_workload(1024), cluster).candidate
    parts = seconds_by_resource(candidate)
    assert max(parts, key=lambda part: parts[part]) == LATENCY and parts[LATENCY] > 0.5 * candidate.seconds
    assert critical_path.latency_seconds(candidate) <= candidate.seconds
    assert (
        max(seconds for _, seconds in roofline.step_bound(cluster, resource_usage(candidate)).seconds_by_resource)
        < 0.1 * candidate.seconds
    )
    fast = replace(cluster, levels=tuple(replace(level, latency_seconds=0.0) for level in cluster.levels))
    assert seconds_by_resource(make_plan(make_workload(1024), fast).candidate)[LATENCY] < 1e-3 * candidate.seconds
    large_parts = seconds_by_resource(make_plan(make_workload(65_536, flops=10**15), cluster).candidate)
    assert max(large_parts, key=lambda part: large_parts[part]) == MATMULS
