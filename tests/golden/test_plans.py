"""Recipe -> workload and plan, and workload and cluster -> plan, to the byte. A change here is seen, and accepted by
`make bless`."""

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
SYNTHETIC = [name for name in config.recipes() if name.startswith("synthetic-")]  # the others need a log


@pytest.mark.parametrize("recipe", SYNTHETIC)
def test_plan_of_a_recipe(recipe, tmp_path, request):
    settings = config.load(recipe)
    source = assemble.make_source(settings)
    model = assemble.make_model(settings, source)
    with closing(Loader(source, batch_size=settings.train.batch_size, seed=settings.seed)) as loader:
        batch = next(iter(loader))
    nouns = {"workload": describe(model, batch), "plan": plan_for(model, batch)}
    for noun, value in nouns.items():
        same(value, f"{recipe}.{noun}.json", tmp_path, request)


@pytest.mark.parametrize("cluster", ["laptop", "two-cores", "h200-64", "zionex-128-a100"])
def test_plan_for_a_cluster(cluster, tmp_path, request):
    made = make_plan(skewed(), presets.load_cluster(cluster))
    same(made.plan, f"skewed.{cluster}.plan.json", tmp_path, request)


def test_plan_with_all_that_may_be_rounded(tmp_path, request):
    made = make_plan(
        skewed(),
        presets.load_cluster("zionex-128-a100"),
        allow=["tables.fp16", "wire.fp16", "wire.bf16", "optimizer.bf16"],
    )
    same(made.plan, "skewed.rounded.plan.json", tmp_path, request)


def test_plan_with_copies_in_two_hosts(tmp_path, request):
    """Where ids come again often, rows with gradients are fewer bytes between hosts than vectors."""
    work, whole = skewed(), presets.load_cluster("zionex-128-a100")
    work = replace(work, statistics=tuple(replace(one, distinct_share=0.05) for one in work.statistics))
    made = make_plan(work, replace(whole, levels=(whole.levels[0], replace(whole.levels[1], num=2))))
    assert any(rect.ranks == (0, 8) for table in made.plan.tables for rect in table.rects)
    same(made.plan, "skewed.two-hosts.plan.json", tmp_path, request)


def skewed() -> Workload:
    """Rows, columns and ids of a sample of each table: one hot, one wide, one with most rows, small ones."""
    shapes = [(4_000_000, 64, 30.0), (500_000, 512, 8.0), (20_000_000, 32, 2.0), (300_000, 128, 5.0)]
    shapes += [(3_000 * (at + 1), 32, 1.0 + at / 4) for at in range(8)]
    popularity = tuple((10**at, 0.1 * (at + 1)) for at in range(3))
    names = [f"t{at}" for at in range(len(shapes))]
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


def same(value, name, tmp_path, request):
    files.write(value, tmp_path / name)
    made = (tmp_path / name).read_text()
    if request.config.getoption("--bless"):
        SNAPSHOTS.mkdir(exist_ok=True)
        (SNAPSHOTS / name).write_text(made)
    assert made == (SNAPSHOTS / name).read_text(), f"{name} changed; if it should, run `make bless`"
