"""Snapshots of workloads and plans of recipes, and of plans for clusters, compared byte by byte; `make bless` accepts
changes."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright import config
from shardwright.data.loading.loader import Loader
from shardwright.measure.describe import describe
from shardwright.planner.plan import make_plan
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run import recipe as assemble
from shardwright.spec import files, presets
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload

SNAPSHOTS = Path(__file__).parent / "plans"
SYNTHETIC = [name for name in config.recipes() if name.startswith("synthetic-")]  # the others need a dataset


@pytest.mark.parametrize("recipe", SYNTHETIC)
def test_plan_of_a_recipe(recipe, tmp_path, request):
    settings = config.load(recipe)
    source = assemble.make_source(settings)
    model = assemble.make_model(settings, source)
    with closing(Loader(source, batch_size=settings.train.batch_size, seed=settings.seed)) as loader:
        batch = next(iter(loader))
    values = {"workload": describe(model, batch), "plan": plan_for(model, batch)}
    for kind, value in values.items():
        assert_snapshot(value, f"{recipe}.{kind}.json", tmp_path, request)


@pytest.mark.parametrize("cluster", ["laptop", "two-cores", "h200-64", "zionex-128-a100"])
def test_plan_for_a_cluster(cluster, tmp_path, request):
    result = make_plan(skewed(), presets.load_cluster(cluster))
    assert_snapshot(result.plan, f"skewed.{cluster}.plan.json", tmp_path, request)


def test_plan_with_reduced_precision(tmp_path, request):
    result = make_plan(
        skewed(),
        presets.load_cluster("zionex-128-a100"),
        allow=["tables.fp16", "wire.fp16", "wire.bf16", "optimizer.bf16"],
    )
    assert_snapshot(result.plan, "skewed.rounded.plan.json", tmp_path, request)


def test_plan_with_replicas_in_two_hosts(tmp_path, request):
    """If ids repeat often, gradients of distinct rows are fewer bytes between hosts than vectors."""
    workload, cluster = skewed(), presets.load_cluster("zionex-128-a100")
    statistics = tuple(replace(feature, distinct_share=0.05) for feature in workload.statistics)
    cluster = replace(cluster, levels=(cluster.levels[0], replace(cluster.levels[1], num=2)))
    result = make_plan(replace(workload, statistics=statistics), cluster)
    assert any(rect.ranks == (0, 8) for table in result.plan.tables for rect in table.rects)
    assert_snapshot(result.plan, "skewed.two-hosts.plan.json", tmp_path, request)


def skewed() -> Workload:
    """Tables with many ids per sample, with many columns, with most rows, and small ones."""
    # rows, columns, ids per sample
    shapes = [(4_000_000, 64, 30.0), (500_000, 512, 8.0), (20_000_000, 32, 2.0), (300_000, 128, 5.0)]
    shapes += [(3_000 * (number + 1), 32, 1.0 + number / 4) for number in range(8)]
    popularity = tuple((10**exponent, 0.1 * (exponent + 1)) for exponent in range(3))
    names = [f"t{number}" for number in range(len(shapes))]
    return Workload(
        version=1,
        batch_size=65_536,
        tables=tuple(Table(name, rows, dim) for name, (rows, dim, _) in zip(names, shapes, strict=True)),
        features=tuple(Feature(name, name) for name in names),
        statistics=tuple(
            FeatureStatistics(name, ids, 0.5, popularity) for name, (_, _, ids) in zip(names, shapes, strict=True)
        ),
        optimizer=RowWiseAdaGrad(lr=0.01),
        blocks=(
            Block("bottom", 10**5, 4 * 10**5, 10**10, 2 * 10**10, 10**8, needs_vectors=False),
            Block("top", 10**6, 4 * 10**6, 10**11, 2 * 10**11, 10**8),
        ),
    )


def assert_snapshot(value, name, tmp_path, request):
    files.write(value, tmp_path / name)
    text = (tmp_path / name).read_text()
    if request.config.getoption("--bless"):
        SNAPSHOTS.mkdir(exist_ok=True)
        (SNAPSHOTS / name).write_text(text)
    assert text == (SNAPSHOTS / name).read_text(), f"{name} changed; if it should, run `make bless`"
