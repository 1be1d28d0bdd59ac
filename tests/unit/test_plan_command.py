"""`shardwright plan`: a recipe or a workload on file, a cluster, and what is written, shown and compared."""

import re
import runpy
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.errors import UserError
from shardwright.planner import search
from shardwright.planner.answer import answer
from shardwright.report import plan as page
from shardwright.report import torchrec
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
    work, cluster = workload(), presets.cluster("zionex-128-a100")
    pins = {one.name: "table" for one in work.tables}
    exact = answer(work, cluster, batch_size=65_536, pins=pins)
    rounded = answer(work, cluster, batch_size=65_536, pins=pins, allow=["tables.fp16", "wire.fp16", "wire.bf16"])
    assert rounded.plan.wire.vectors == "float16"
    rows = {row[0]: row[1:] for row in page.compared(rounded, exact).rows}
    change = float(rows["sent, busiest rank"][-1].split()[0])
    assert -60 < change < -30
    for stage in ("lookup", "update"):
        if f"stage {stage}, slowest rank" in rows:
            assert f"of {stage}: rows of tables" in rows and f"of {stage}: ids, conversion and messages" in rows
    assert not any("fullest rank" in name and "lookup" in name for name in rows)


def test_the_bounds_account_for_the_step():
    made = answer(workload(), presets.cluster("zionex-128-a100"))
    grid = page.bounds(made)
    rows = {row[0]: row[1:] for row in grid.rows}
    assert "links: latency" in rows
    assert sum(float(row[2].split()[0]) for row in grid.rows) == pytest.approx(100, abs=0.3)
    assert grid.total[:1] == ("predicted step",) and grid.total[2] == "100 %"
    assert not any(re.search(r"\de-\d", cell) for row in (*grid.rows, *page.tables(made).rows) for cell in row[1:])


def test_a_presets_rates_are_said_to_be_nobodys():
    made = answer(workload(), presets.cluster("zionex-128-a100"))
    assert "published rates of zionex-128-a100; real machines do not reach them" in dict(made.plan.why)["step"]
    measured = answer(workload(), presets.cluster("two-cores"))
    assert "published" not in dict(measured.plan.why)["step"]


def test_why_small_tables_have_no_replicas_is_said():
    """Or they have, where the predicted step is shorter with them."""
    small = tuple(Table(f"t{at}", 20_000, 16) for at in range(8))
    work = replace(
        workload(),
        tables=small,
        features=tuple(Feature(one.name, one.name) for one in small),
        statistics=tuple(FeatureStatistics(one.name, 1.0, 0.5) for one in small),
    )
    made = answer(work, presets.cluster("zionex-128-a100"))
    reason = dict(made.plan.why)["replicas"]
    assert reason.startswith("data-parallel replicas of the 8 tables below 1 % of a rank's memory would make the step ")
    assert "10.2 MB of gradients would be all-reduced" in reason
    few = replace(work, tables=tuple(replace(one, rows=40) for one in small))
    found = answer(few, presets.cluster("zionex-128-a100")).found
    other = search.with_replicas(found, {})
    assert len(found.placed.replicas) == 8 or (other is not None and other.seconds >= found.seconds)


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
    made = answer(workload(), presets.cluster("laptop"))
    other = answer(replace(workload(), batch_size=8192), presets.cluster("laptop"))
    files.write(other.plan, tmp_path / "other.json")
    with pytest.raises(UserError, match="the plan is for workload"):
        page.read_other(made, tmp_path / "other.json")


def test_the_export_says_every_shard(tmp_path):
    cluster = presets.cluster("zionex-128-a100")
    pins = {"t1": "column:4", "t2": "row", "t3": "data", "t4": "table-row"}
    made = answer(workload(), cluster, pins=pins)
    text = torchrec.exported(made)
    literal = text[text.index("TABLES = ") : text.index("\n}\n") + 2]
    path = tmp_path / "literal.py"
    path.write_text(literal)
    tables = runpy.run_path(str(path))["TABLES"]
    assert made.found.placed.by_table[4][0][1] != tuple(tables["t4"][2]) == tuple(sorted(tables["t4"][2]))
    assert set(tables) == {f"t{at}" for at in range(60)}
    for number, (kind, kernel, ranks, shards) in enumerate(tables.values()):
        table = workload().tables[number]
        assert kernel == ("dense" if kind == "data_parallel" else "fused")
        if shards:
            assert sum(rows * columns for _, (rows, columns), _ in shards) == table.rows * table.dim
            assert [int(place.split("/")[0].removeprefix("rank:")) for _, _, place in shards] == ranks
    kinds = {name: kind for name, (kind, *_) in tables.items()}
    assert [kinds[name] for name in pins] == ["column_wise", "row_wise", "data_parallel", "table_row_wise"]


def test_torchrec_takes_the_export(tmp_path):
    """Where torchrec is installed (it has an environment of its own: docs/embedding-kernels.md)."""
    pytest.importorskip("torchrec", reason="torchrec is not in this environment")
    made = answer(workload(), presets.cluster("zionex-128-a100"), pins={"t1": "column:4", "t2": "row", "t3": "data"})
    path = page.exported(made, tmp_path / "exported.py")
    sharding = runpy.run_path(str(path))["sharding_plan"]("sparse")
    tables = sharding.get_plan_for_module("sparse")
    assert set(tables) == {f"t{at}" for at in range(60)}
    assert [len(tables[name].sharding_spec.shards) for name in ("t1", "t2")] == [4, 128]
    assert tables["t3"].sharding_spec is None and tables["t3"].sharding_type == "data_parallel"
