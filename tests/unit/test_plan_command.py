"""`shardwright plan`: a recipe or a workload on file, a cluster, and what is written, shown and compared."""

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


def workload() -> Workload:
    names = [f"t{at}" for at in range(60)]
    return Workload(
        version=1,
        batch_size=4096,
        tables=tuple(Table(name, 1000 * (at + 1) ** 2, 128 if at % 2 else 16) for at, name in enumerate(names)),
        features=tuple(Feature(name, name) for name in names),
        statistics=tuple(
            FeatureStatistics(name, 1.0 + at, 0.5, ((1, 0.1), (10, 0.3)) if at in (2, 4) else ())
            for at, name in enumerate(names)
        ),
        optimizer=RowWiseAdaGrad(lr=0.1),
    )


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)


def test_a_recipe(tmp_path):
    done = run("synthetic-dlrm", "--cluster", "zionex-128-a100", "-o", str(tmp_path / "p.json"), "--batch", "65536")
    assert done.exit_code == 0, done.output
    made = files.read(Plan, tmp_path / "p.json")
    made.verify()
    assert made.axes == (("host", 16), ("local", 8)) and made.allow == ()
    shown = (tmp_path / "p.html").read_text()
    assert "All times are predicted" in shown and "Memory of each rank" in shown and "What bounds the step" in shown
    assert "predicted" in done.output and "samples/s" in done.output


def test_a_workload_pins_and_a_comparison(tmp_path):
    path = tmp_path / "w.json"
    files.write(workload(), path)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    pins = ["plan.pins.t59=table@0", "plan.pins.t58=row"]
    done = run(str(path), "--cluster", "zionex-128-a100", "-o", str(one), *pins)
    assert "and 20 smaller tables; --explain shows all" in done.output
    tables = {table.table: table for table in files.read(Plan, one).tables}
    assert [rect.ranks for rect in tables["t59"].rects] == [(0,)] and len(tables["t58"].rects) == 128
    done = run(str(path), "--cluster", "zionex-128-a100", "-o", str(two), "--compare", str(one), "--explain")
    assert (
        "Compared" in done.output and "slowest rank over average" in done.output and "smaller tables" not in done.output
    )
    rounded = run(str(path), "--cluster", "zionex-128-a100", "-o", str(two), 'allow=["wire.fp16", "wire.bf16"]')
    assert "vectors in float16" in rounded.output and files.read(Plan, two).wire.vectors == "float16"


def test_a_comparison_counts_bytes_of_the_wire_and_does_not_contradict_itself(tmp_path):
    """fp16 halves what is sent; rows of fp16 tables are read in half the time, and are then converted."""
    work, cluster = workload(), presets.load_cluster("zionex-128-a100")
    pins = {one.name: "table" for one in work.tables}
    exact = make_plan(work, cluster, batch_size=65_536, pins=pins)
    rounded = make_plan(work, cluster, batch_size=65_536, pins=pins, allow=["tables.fp16", "wire.fp16", "wire.bf16"])
    assert rounded.plan.wire.vectors == "float16"
    rows = {row[0]: row[1:] for row in page.comparison_grid(rounded, exact).rows}
    change = float(rows["sent, busiest rank"][-1].split()[0])
    assert -60 < change < -30
    for stage in ("lookup", "update"):
        if f"stage {stage}, slowest rank" in rows:
            assert f"of {stage}: rows of tables" in rows and f"of {stage}: ids, conversion and messages" in rows
    assert not any("fullest rank" in name and "lookup" in name for name in rows)


def test_the_bounds_account_for_the_step():
    made = make_plan(workload(), presets.load_cluster("zionex-128-a100"))
    grid = page.bound_grid(made)
    rows = {row[0]: row[1:] for row in grid.rows}
    assert "links: latency" in rows
    assert sum(float(row[2].split()[0]) for row in grid.rows) == pytest.approx(100, abs=0.3)
    assert grid.total[:1] == ("predicted step",) and grid.total[2] == "100 %"
    assert not any(
        re.search(r"\de-\d", cell) for row in (*grid.rows, *page.table_plan_grid(made).rows) for cell in row[1:]
    )


def test_a_presets_rates_are_said_to_be_nobodys():
    made = make_plan(workload(), presets.load_cluster("zionex-128-a100"))
    assert "published rates of zionex-128-a100; real machines do not reach them" in dict(made.plan.why)["step"]
    measured = make_plan(workload(), presets.load_cluster("two-cores"))
    assert "published" not in dict(measured.plan.why)["step"]


def test_why_small_tables_have_no_replicas_is_said():
    """Or small tables have replicas, because the predicted step is shorter with them."""
    small = tuple(Table(f"t{at}", 20_000, 16) for at in range(8))
    work = replace(
        workload(),
        tables=small,
        features=tuple(Feature(one.name, one.name) for one in small),
        statistics=tuple(FeatureStatistics(one.name, 1.0, 0.5) for one in small),
    )
    made = make_plan(work, presets.load_cluster("zionex-128-a100"))
    reason = dict(made.plan.why)["replicas"]
    assert reason.startswith("data-parallel replicas of the 8 tables below 1 % of a rank's memory would make the step ")
    assert "10.2 MB of gradients would be all-reduced" in reason
    whole = presets.load_cluster("zionex-128-a100")
    slow = tuple(replace(level, bytes_per_second=level.bytes_per_second / 1e3) for level in whole.levels)
    few = replace(work, batch_size=1 << 20, tables=tuple(replace(one, rows=4000) for one in small))
    made = make_plan(few, replace(whole, levels=slow))
    assert len(made.candidate.placed.data_parallel_tables) == 8 and "replicas" not in dict(made.plan.why)


def test_mistakes(tmp_path):
    path = tmp_path / "w.json"
    files.write(workload(), path)
    for arguments, said in (
        ((str(path), "--cluster", "zionex"), 'no cluster "zionex"'),
        ((str(path), "--cluster", "laptop", "-o", "p.toml"), "a plan is a .json file"),
        ((str(path), "--cluster", "laptop", "--export", "fairscale"), "allowed: torchrec"),
        ((str(path), "--cluster", "laptop", "alow=[]"), 'unknown key "alow"; did you mean "allow"'),
        ((str(path), "--cluster", "laptop", "plan.pin.t=row"), 'unknown key "plan.pin"; did you mean "pins"'),
        (("synthetic-dlrm", "--cluster", "laptop", "plan.pins.nobody=row"), 'pin of unknown table "nobody"'),
    ):
        with pytest.raises(UserError, match=said):
            run(*arguments)


def test_another_workloads_plan_is_not_compared(tmp_path):
    made = make_plan(workload(), presets.load_cluster("laptop"))
    other = make_plan(replace(workload(), batch_size=8192), presets.load_cluster("laptop"))
    files.write(other.plan, tmp_path / "other.json")
    with pytest.raises(UserError, match="the plan is for workload"):
        page.read_other_plan(made, tmp_path / "other.json")


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


def test_the_export_makes_every_shard_from_a_pattern(tmp_path, stub_torchrec):
    cluster = presets.load_cluster("zionex-128-a100")
    pins = {"t1": "column:4", "t2": "row", "t3": "data", "t4": "table-row", "t5": "column-row:2"}
    target = make_plan(workload(), cluster, pins=pins, torchrec=True)
    path = page.write_torchrec_plan(target, tmp_path / "exported.py")
    assert path.stat().st_size < 8_000, "patterns, not a rectangle of every rank"
    tables = runpy.run_path(str(path))["sharding_plan"]("sparse").plan["sparse"]
    assert set(tables) == {f"t{at}" for at in range(60)}
    for planned, table in zip(target.plan.tables, workload().tables, strict=True):
        made = tables[table.name]
        assert made.compute_kernel == ("dense" if made.sharding_type == "data_parallel" else "fused")
        if made.sharding_spec is None:
            assert made.sharding_type == "data_parallel" and made.ranks == list(range(128))
            continue
        shards = made.sharding_spec.shards
        assert sum(one.shard_sizes[0] * one.shard_sizes[1] for one in shards) == table.rows * table.dim
        places = [(one.placement.rank(), str(one.placement.device())) for one in shards]
        assert places == [(rank, f"cuda:{rank % 8}") for rank in made.ranks]
        columns = {(one.shard_offsets[1], one.shard_offsets[1] + one.shard_sizes[1]) for one in shards}
        assert columns == {rect.cols for rect in planned.rects}
        assert sorted(made.ranks) == sorted(rank for rect in planned.rects for rank in rect.ranks)
    kinds = [tables[name].sharding_type for name in pins]
    assert kinds == ["column_wise", "row_wise", "data_parallel", "table_row_wise", "grid_shard"]
    assert tables["t4"].ranks == sorted(tables["t4"].ranks)


def test_what_torchrec_lacks_is_planned_again_and_its_price_is_said(tmp_path):
    """A plan with deduplicated row exchange and rows split by load is not exported, since TorchRec has neither."""
    work, cluster = workload(), presets.load_cluster("zionex-128-a100")
    hot = tuple(replace(one, distinct_share=0.01, popularity=((10, 0.3), (100, 0.6))) for one in work.statistics)
    work = replace(work, batch_size=65_536, statistics=hot)
    made, target = make_plan(work, cluster), make_plan(work, cluster, torchrec=True)
    rows = sum(one.travel == "rows" for one in made.plan.tables)
    assert rows and not any(one.travel == "rows" or one.order != "id" for one in target.plan.tables)
    lost = torchrec_export.describe_slowdown(made, target)
    assert f"{target.candidate.seconds / made.candidate.seconds:.3g}x as long as with this plan" in lost
    assert f"TorchRec has no deduplicated row exchange ({rows} tables)" in lost
    assert lost in " ".join(torchrec_export.plan_source(target, lost).split())
    assert "only what TorchRec has" in torchrec_export.describe_slowdown(target, target)
    with pytest.raises(UserError, match="has a layout that TorchRec does not have"):
        torchrec_export.plan_source(made)
    with pytest.raises(UserError, match='table "t1" is pinned to copy-table, which TorchRec does not have'):
        make_plan(workload(), cluster, pins={"t1": "copy-table"}, torchrec=True)


def test_the_command_exports_what_was_planned_for_torchrec(tmp_path):
    path = tmp_path / "w.json"
    files.write(workload(), path)
    done = run(str(path), "--cluster", "zionex-128-a100", "-o", str(tmp_path / "p.json"), "--export", "torchrec")
    assert "Within the limits of TorchRec a step is predicted to take" in done.output.replace("\n", " ")
    assert "Within the limits of TorchRec" in (tmp_path / "p.html").read_text()
    assert "Within the limits of TorchRec" in (tmp_path / "p.torchrec.py").read_text()


@pytest.mark.parametrize("case", torchrec_plans.CASES, ids=lambda case: torchrec_plans.name_of(*case))
def test_the_plan_for_torchrec_is_never_slower_than_torchrecs_own(case):
    """Simulated, within TorchRec's limits; its plans are in torchrec_plans.json (tests/torchrec_plans.py)."""
    recipe, batch_size = case
    work, cluster = torchrec_plans.workload(recipe), presets.load_cluster(torchrec_plans.CLUSTER)
    target = make_plan(work, cluster, batch_size=batch_size, torchrec=True)
    problem = target.candidate.problem
    for plan in json.loads(torchrec_plans.FIXTURE.read_text())[torchrec_plans.name_of(*case)]:
        theirs = scored_plan(problem, plan)
        assert target.candidate.seconds <= theirs.seconds * (1 + 1e-9)


def scored_plan(problem: Problem, plan: list[Any]) -> search.Candidate:
    """The step of one of TorchRec's plans."""
    cuts = {scheme.torchrec: scheme.name for scheme in all_schemes().values() if scheme.torchrec}
    units, ranks, replicas = [], [], []
    numbers = {demand.table.name: number for number, demand in enumerate(problem.table_loads)}
    assert {name for name, _, _ in plan} == set(numbers)
    for name, kind, shortened in plan:
        number, where = numbers[name], torchrec_plans.expanded(shortened)
        if cuts[kind] == "data":
            replicas.append(number)
            continue
        reach = {"row": 2, "table-row": 1, "column-row": 1}.get(cuts[kind], 0)
        spread = {0: 1, 1: 8, 2: 128}[reach]
        cut = Sharding(
            cuts[kind], len(where) // spread, reach, within_levels=1 if kind == "table_column_wise" else None
        )
        pieces = search.table_units(problem, number, cut)
        units += pieces
        ranks += [tuple(where[at * spread : (at + 1) * spread]) for at in range(len(pieces))]
    found = search.evaluate(problem, search.Proposal(), PlacedTables(tuple(units), tuple(ranks), tuple(replicas)))
    assert found is not None
    return found


def test_torchrec_takes_the_export(tmp_path):
    """Where torchrec is installed (it has an environment of its own: docs/embedding-kernels.md)."""
    pytest.importorskip("torchrec", reason="torchrec is not in this environment")
    pins = {"t1": "column:4", "t2": "row", "t3": "data"}
    made = make_plan(workload(), presets.load_cluster("zionex-128-a100"), pins=pins, torchrec=True)
    path = page.write_torchrec_plan(made, tmp_path / "exported.py")
    sharding = runpy.run_path(str(path))["sharding_plan"]("sparse")
    tables = sharding.get_plan_for_module("sparse")
    assert set(tables) == {f"t{at}" for at in range(60)}
    assert [len(tables[name].sharding_spec.shards) for name in ("t1", "t2")] == [4, 128]
    assert tables["t3"].sharding_spec is None and tables["t3"].sharding_type == "data_parallel"
