"""`shardwright plan`: plans of recipes and workload files, their pages, comparisons and exports."""

import json
import re
import runpy
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torchrec_plans
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.errors import UserError
from shardwright.planner import search
from shardwright.planner.plan import make_plan
from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.tables.schemes import all_schemes
from shardwright.planner.tables.sharding import Sharding
from shardwright.report import plan as page
from shardwright.report import torchrec_export
from shardwright.spec import files, presets
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.plan import Plan
from shardwright.spec.workload import Feature, FeatureStatistics, Table, Workload


def make_workload() -> Workload:
    names = [f"t{i}" for i in range(60)]
    return Workload(
        version=1,
        batch_size=4096,
        tables=tuple(Table(name, 1000 * (i + 1) ** 2, 128 if i % 2 else 16) for i, name in enumerate(names)),
        features=tuple(Feature(name, name) for name in names),
        statistics=tuple(
            FeatureStatistics(name, 1.0 + i, 0.5, ((1, 0.1), (10, 0.3)) if i in (2, 4) else ())
            for i, name in enumerate(names)
        ),
        optimizer=RowWiseAdaGrad(lr=0.1),
    )


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)


def test_plan_a_recipe(tmp_path):
    result = run("synthetic-dlrm", "--cluster", "zionex-128-a100", "-o", str(tmp_path / "p.json"), "--batch", "65536")
    assert result.exit_code == 0, result.output
    plan = files.read(Plan, tmp_path / "p.json")
    plan.verify()
    assert plan.mesh_axes == (("data@host", 16), ("data@local", 8)) and plan.allow == ()
    html = (tmp_path / "p.html").read_text()
    assert "All times are predicted" in html and "Memory of each rank" in html and "What bounds the step" in html
    assert "predicted" in result.output and "samples/s" in result.output


def test_plan_a_workload_file_with_pins_and_compare(tmp_path):
    path = tmp_path / "w.json"
    files.write(make_workload(), path)
    first, second = tmp_path / "one.json", tmp_path / "two.json"
    pins = ["plan.pins.t59=table@0", "plan.pins.t58=row"]
    result = run(str(path), "--cluster", "zionex-128-a100", "-o", str(first), *pins)
    assert "and 20 smaller tables; --explain shows all" in result.output
    tables = {table.table: table for table in files.read(Plan, first).tables}
    assert [rect.ranks for rect in tables["t59"].rects] == [(0,)] and len(tables["t58"].rects) == 128
    result = run(str(path), "--cluster", "zionex-128-a100", "-o", str(second), "--compare", str(first), "--explain")
    assert "Compared" in result.output and "slowest rank over average" in result.output
    assert "smaller tables" not in result.output
    fp16 = run(str(path), "--cluster", "zionex-128-a100", "-o", str(second), 'allow=["wire.fp16", "wire.bf16"]')
    assert "vectors in float16" in fp16.output and files.read(Plan, second).wire.vectors == "float16"


def test_a_comparison_counts_wire_bytes_and_splits_lookup_seconds(tmp_path):
    """fp16 halves the bytes sent; rows of fp16 tables are read in half the time, and are then converted."""
    workload, cluster = make_workload(), presets.load_cluster("zionex-128-a100")
    pins = {table.name: "table" for table in workload.tables}
    exact = make_plan(workload, cluster, batch_size=65_536, pins=pins)
    fp16 = make_plan(workload, cluster, batch_size=65_536, pins=pins, allow=["tables.fp16", "wire.fp16", "wire.bf16"])
    assert fp16.plan.wire.vectors == "float16"
    rows = {row[0]: row[1:] for row in page.comparison_grid(fp16, exact).rows}
    change = float(rows["sent, busiest rank"][-1].split()[0])
    assert -60 < change < -30
    for stage in ("lookup", "update"):
        if f"stage {stage}, slowest rank" in rows:
            assert f"{stage}, table rows" in rows and f"{stage}, ids, conversion and messages" in rows
    assert not any("fullest rank" in name and "lookup" in name for name in rows)


def test_bounds_add_up_to_the_step():
    result = make_plan(make_workload(), presets.load_cluster("zionex-128-a100"))
    grid = page.bound_grid(result)
    rows = {row[0]: row[1:] for row in grid.rows}
    assert "links: latency" in rows
    assert sum(float(row[2].split()[0]) for row in grid.rows) == pytest.approx(100, abs=0.3)
    assert grid.total[:1] == ("predicted step",) and grid.total[2] == "100 %"
    assert not any(
        re.search(r"\de-\d", cell) for row in (*grid.rows, *page.table_plan_grid(result).rows) for cell in row[1:]
    )


def test_plans_warn_that_preset_rates_are_published_ones():
    published = make_plan(make_workload(), presets.load_cluster("zionex-128-a100"))
    assert "published rates of zionex-128-a100; real machines do not reach them" in dict(published.plan.why)["step"]
    own_rates = make_plan(make_workload(), presets.load_cluster("two-cores"))
    assert "published" not in dict(own_rates.plan.why)["step"]


def test_reasons_explain_why_small_tables_have_no_replicas():
    """If replicas make the predicted step shorter, small tables have them, and there is no such reason."""
    small = tuple(Table(f"t{i}", 20_000, 16) for i in range(8))
    workload = replace(
        make_workload(),
        tables=small,
        features=tuple(Feature(table.name, table.name) for table in small),
        statistics=tuple(FeatureStatistics(table.name, 1.0, 0.5) for table in small),
    )
    result = make_plan(workload, presets.load_cluster("zionex-128-a100"))
    reason = dict(result.plan.why)["replicas"]
    assert reason.startswith("data-parallel replicas of the 8 tables below 1 % of a rank's memory would make the step ")
    assert "10.2 MB of gradients would be all-reduced" in reason
    cluster = presets.load_cluster("zionex-128-a100")
    slow = tuple(replace(level, bytes_per_second=level.bytes_per_second / 1e3) for level in cluster.levels)
    fewer_rows = replace(workload, batch_size=1 << 20, tables=tuple(replace(table, rows=4000) for table in small))
    result = make_plan(fewer_rows, replace(cluster, levels=slow))
    assert len(result.candidate.placed.data_parallel_tables) == 8 and "replicas" not in dict(result.plan.why)


def test_errors_in_arguments(tmp_path):
    path = tmp_path / "w.json"
    files.write(make_workload(), path)
    for arguments, message in (
        ((str(path), "--cluster", "zionex"), 'no cluster "zionex"'),
        ((str(path), "--cluster", "laptop", "-o", "p.toml"), "a plan is a .json file"),
        ((str(path), "--cluster", "laptop", "--export", "fairscale"), "allowed: torchrec"),
        ((str(path), "--cluster", "laptop", "alow=[]"), 'unknown key "alow"; did you mean "allow"'),
        ((str(path), "--cluster", "laptop", "plan.pin.t=row"), 'unknown key "plan.pin"; did you mean "pins"'),
        (("synthetic-dlrm", "--cluster", "laptop", "plan.pins.nobody=row"), 'pin of unknown table "nobody"'),
    ):
        with pytest.raises(UserError, match=message):
            run(*arguments)


def test_compare_refuses_the_plan_of_another_workload(tmp_path):
    result = make_plan(make_workload(), presets.load_cluster("laptop"))
    other = make_plan(replace(make_workload(), batch_size=8192), presets.load_cluster("laptop"))
    files.write(other.plan, tmp_path / "other.json")
    with pytest.raises(UserError, match="the plan is for workload"):
        page.read_other_plan(result, tmp_path / "other.json")


@pytest.fixture
def stub_torchrec(monkeypatch):
    """Stand-ins for the three TorchRec types that an export uses."""
    types = ModuleType("torchrec.distributed.types")

    @dataclass
    class ParameterSharding:
        sharding_type: str
        compute_kernel: str
        ranks: list[int]
        sharding_spec: Any

    @dataclass
    class ShardingPlan:
        plan: dict[str, Any]

    for name, value in (("EmbeddingModuleShardingPlan", dict), (ParameterSharding.__name__, ParameterSharding)):
        setattr(types, name, value)
    types.ShardingPlan = ShardingPlan  # type: ignore[attr-defined]
    for name, module in (("torchrec", ModuleType("torchrec")), ("torchrec.distributed.types", types)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "torchrec.distributed", ModuleType("torchrec.distributed"))


def test_the_torchrec_export_has_every_shard(tmp_path, stub_torchrec):
    cluster = presets.load_cluster("zionex-128-a100")
    pins = {"t1": "column:4", "t2": "row", "t3": "data", "t4": "table-row", "t5": "column-row:2"}
    target = make_plan(make_workload(), cluster, pins=pins, torchrec=True)
    path = page.write_torchrec_plan(target, tmp_path / "exported.py")
    assert path.stat().st_size < 8_000, "the file has patterns, not a rectangle for each rank"
    tables = runpy.run_path(str(path))["sharding_plan"]("sparse").plan["sparse"]
    assert set(tables) == {f"t{i}" for i in range(60)}
    for plan, table in zip(target.plan.tables, make_workload().tables, strict=True):
        exported = tables[table.name]
        assert exported.compute_kernel == ("dense" if exported.sharding_type == "data_parallel" else "fused")
        if exported.sharding_spec is None:
            assert exported.sharding_type == "data_parallel" and exported.ranks == list(range(128))
            continue
        shards = exported.sharding_spec.shards
        assert sum(shard.shard_sizes[0] * shard.shard_sizes[1] for shard in shards) == table.rows * table.dim
        devices = [(shard.placement.rank(), str(shard.placement.device())) for shard in shards]
        assert devices == [(rank, f"cuda:{rank % 8}") for rank in exported.ranks]
        columns = {(s.shard_offsets[1], s.shard_offsets[1] + s.shard_sizes[1]) for s in shards}
        assert columns == {rect.cols for rect in plan.rects}
        assert sorted(exported.ranks) == sorted(rank for rect in plan.rects for rank in rect.ranks)
    kinds = [tables[name].sharding_type for name in pins]
    assert kinds == ["column_wise", "row_wise", "data_parallel", "table_row_wise", "grid_shard"]
    assert tables["t4"].ranks == sorted(tables["t4"].ranks)


def test_the_torchrec_export_has_a_module_for_each_member(tmp_path, stub_torchrec):
    tables = (Table("user.site", 100, 8), Table("item.site", 200, 8), Table("item.tag", 300, 8))
    features = tuple(Feature(table.name, table.name) for table in tables)
    statistics = tuple(FeatureStatistics(table.name, 1.0, 0.5) for table in tables)
    workload = Workload(1, 4096, tables, features, statistics)
    path = page.write_torchrec_plan(
        make_plan(workload, presets.load_cluster("laptop"), torchrec=True), tmp_path / "exported.py"
    )
    modules = runpy.run_path(str(path))["sharding_plan"]("sparse").plan
    assert {module: list(tables) for module, tables in modules.items()} == {
        "sparse.user": ["site"],
        "sparse.item": ["site", "tag"],
    }


def test_layouts_that_torchrec_lacks_are_replanned_with_their_slowdown(tmp_path):
    """TorchRec has neither deduplicated row exchange nor rows split by load."""
    workload, cluster = make_workload(), presets.load_cluster("zionex-128-a100")
    hot = tuple(replace(ids, distinct_share=0.01, popularity=((10, 0.3), (100, 0.6))) for ids in workload.statistics)
    workload = replace(workload, batch_size=65_536, statistics=hot)
    result, target = make_plan(workload, cluster), make_plan(workload, cluster, torchrec=True)
    rows = sum(table.travel == "rows" for table in result.plan.tables)
    assert rows and not any(table.travel == "rows" or table.order != "id" for table in target.plan.tables)
    slowdown = torchrec_export.describe_slowdown(result, target)
    assert f"{target.candidate.seconds / result.candidate.seconds:.3g}x as long as with this plan" in slowdown
    assert f"TorchRec has no deduplicated row exchange ({rows} tables)" in slowdown
    assert slowdown in " ".join(torchrec_export.plan_source(target, slowdown).split())
    assert "only features that TorchRec has" in torchrec_export.describe_slowdown(target, target)
    with pytest.raises(UserError, match="has a layout that TorchRec does not have"):
        torchrec_export.plan_source(result)
    with pytest.raises(UserError, match='table "t1" is pinned to copy-table, which TorchRec does not have'):
        make_plan(make_workload(), cluster, pins={"t1": "copy-table"}, torchrec=True)


def test_the_command_exports_a_plan_within_torchrecs_limits(tmp_path):
    path = tmp_path / "w.json"
    files.write(make_workload(), path)
    result = run(str(path), "--cluster", "zionex-128-a100", "-o", str(tmp_path / "p.json"), "--export", "torchrec")
    assert "Within the limits of TorchRec a step is predicted to take" in result.output.replace("\n", " ")
    assert "Within the limits of TorchRec" in (tmp_path / "p.html").read_text()
    assert "Within the limits of TorchRec" in (tmp_path / "p.torchrec.py").read_text()


@pytest.mark.parametrize("case", torchrec_plans.CASES, ids=lambda case: torchrec_plans.name_of(*case))
def test_the_plan_for_torchrec_is_never_slower_than_torchrecs_own(case):
    """Predicted steps within TorchRec's limits; tests/torchrec_plans.py made its plans."""
    recipe, batch_size = case
    workload, cluster = torchrec_plans.workload(recipe), presets.load_cluster(torchrec_plans.CLUSTER)
    target = make_plan(workload, cluster, batch_size=batch_size, torchrec=True)
    problem = target.candidate.problem
    for plan in json.loads(torchrec_plans.FIXTURE.read_text())[torchrec_plans.name_of(*case)]:
        candidate = score_plan(problem, plan)
        assert target.candidate.seconds <= candidate.seconds * (1 + 1e-9)


def score_plan(problem: Problem, plan: list[Any]) -> search.Candidate:
    """Simulate the step of one of TorchRec's plans."""
    schemes = {scheme.torchrec: scheme.name for scheme in all_schemes().values() if scheme.torchrec}
    units, ranks, replicas = [], [], []
    numbers = {load.table.name: number for number, load in enumerate(problem.table_loads)}
    assert {name for name, _, _ in plan} == set(numbers)
    for name, kind, rank_ranges in plan:
        number, table_ranks, scheme = numbers[name], torchrec_plans.expand_ranks(rank_ranges), schemes[kind]
        if scheme == "data":
            replicas.append(number)
            continue
        row_levels = {"row": 2, "table-row": 1, "column-row": 1}.get(scheme, 0)
        size = {0: 1, 1: 8, 2: 128}[row_levels]
        within_levels = 1 if kind == "table_column_wise" else None
        sharding = Sharding(scheme, len(table_ranks) // size, row_levels, within_levels=within_levels)
        table_units = search.table_units(problem, number, sharding)
        units += table_units
        ranks += [tuple(table_ranks[i * size : (i + 1) * size]) for i in range(len(table_units))]
    candidate = search.evaluate(problem, search.Proposal(), PlacedTables(tuple(units), tuple(ranks), tuple(replicas)))
    assert candidate is not None
    return candidate


def test_torchrec_loads_the_export(tmp_path):
    """Runs where torchrec is installed, in a separate environment: docs/embedding-kernels.md."""
    pytest.importorskip("torchrec", reason="torchrec is not in this environment")
    pins = {"t1": "column:4", "t2": "row", "t3": "data"}
    result = make_plan(make_workload(), presets.load_cluster("zionex-128-a100"), pins=pins, torchrec=True)
    path = page.write_torchrec_plan(result, tmp_path / "exported.py")
    sharding = runpy.run_path(str(path))["sharding_plan"]("sparse")
    tables = sharding.get_plan_for_module("sparse")
    assert set(tables) == {f"t{i}" for i in range(60)}
    assert [len(tables[name].sharding_spec.shards) for name in ("t1", "t2")] == [4, 128]
    assert tables["t3"].sharding_spec is None and tables["t3"].sharding_type == "data_parallel"
