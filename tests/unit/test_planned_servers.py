"""Table servers in the planner and in recipes: which rows are there, what calls cost, reasons, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from test_planner import make_cluster
from test_row_tiers import LARGE, ROWS, cluster_with
from test_staleness import RANKS, skewed_workload, slow_cluster
from torch import nn
from typer.testing import CliRunner

from shardwright import config
from shardwright.cli import app
from shardwright.config import TrainSettings
from shardwright.errors import UserError
from shardwright.planner import dense_strategies, reprice, search
from shardwright.planner.pins import TableRequest
from shardwright.planner.plan import PlanningResult, exact_precision, make_plan
from shardwright.planner.problem import ServerRequest
from shardwright.planner.step import server_calls
from shardwright.planner.tables import cache_hits
from shardwright.runtime import planning
from shardwright.runtime.memory_check import server_bytes, table_bytes_by_purpose
from shardwright.runtime.planning import preview
from shardwright.runtime.supported import cached_rows, is_cached_from_servers
from shardwright.spec import files
from shardwright.spec.optimizer import AdaGrad
from shardwright.spec.plan import Bounded
from shardwright.spec.row_cache import DISK, SERVERS
from shardwright.spec.workload import Growth

TWO, OWNERS = ServerRequest(2), ServerRequest(2, own=True)
MEMORY = 5.5e7  # of which the tables of LARGE, 104 MB, have 44


def with_servers(request: ServerRequest, workload=LARGE, cluster=None, **options) -> PlanningResult:
    cluster = cluster or cluster_with(("dram", MEMORY), (DISK, 1e9))
    result = make_plan(workload, cluster, tables=TableRequest(servers=request), **options)
    result.plan.verify(workload)
    return result


@pytest.mark.parametrize("sizes", ((1,), (2,), (2, 2)))
def test_rows_that_do_not_fit_in_memory_are_on_servers_in_place_of_the_disk(sizes):
    cluster = cluster_with(("dram", 4e7 / np.prod(sizes) + 1.5e7), (DISK, 1e9), sizes=sizes)
    result, on_disk = with_servers(TWO, cluster=cluster), make_plan(LARGE, cluster)
    large, small = result.plan.tables
    assert result.plan.servers == 2 and is_cached_from_servers(large) and not is_cached_from_servers(small)
    assert cached_rows(large) == cached_rows(on_disk.plan.tables[0]), "the same memory has the same rows"
    assert any(stage.name == "prefetch" for stage in result.plan.stages)
    why = dict(result.plan.why)
    assert "the others on table servers" in why["table t0"]
    assert "table servers (2) have rows of 1 table" in why["servers"] and "on table servers" in why["memory"]
    problem = search.define_problem(LARGE, cluster, LARGE.batch_size, exact_precision(LARGE))
    assert reprice.reprice_plan(problem, result.plan).seconds == pytest.approx(result.candidate.seconds)
    back = reprice.reprice_plan(result.candidate.problem, on_disk.plan)
    assert back.seconds == pytest.approx(on_disk.candidate.seconds), "the disk is there again"
    assert result.plan.cluster_digest == on_disk.plan.cluster_digest


def test_calls_take_the_time_of_their_bytes_on_the_slowest_link():
    """By hand: two ranks, one of which has the whole table."""
    for rate in (1e9, 1e7):
        cluster = cluster_with(("dram", MEMORY), (DISK, 1e9), sizes=(2,))
        cluster = replace(cluster, levels=(replace(cluster.levels[0], bytes_per_second=rate),))
        candidate = with_servers(TWO, cluster=cluster, pins={"t0": "table"}).candidate
        missing = LARGE.batch_size * 4 * 0.5 * candidate.tiers[0].found[1]
        row_bytes = 64 * 4 + 4
        there, back = missing * (row_bytes + 2 * 4), missing * row_bytes
        expected = (there + back) / rate + 2 * cluster.levels[0].latency_seconds
        expected += server_calls.SERVER_PASSES * (there + back) / 2 / 1e10
        assert sorted(candidate.loads.prefetch_R) == pytest.approx([0, expected])


def test_ranks_share_the_links_of_hosts_and_of_servers():
    cluster = make_cluster(2, 2)
    outer = replace(cluster.levels[1], group_bytes_per_second=1e8, bytes_per_second=1e8)
    problem = search.define_problem(LARGE, cluster, LARGE.batch_size, exact_precision(LARGE))
    problem = replace(problem, cluster=replace(cluster, levels=(cluster.levels[0], outer)), servers=ServerRequest(4))
    bytes_R = np.array([1e8, 3e8, 0.0, 0.0])
    assert [*server_calls.link_seconds(problem, bytes_R)] == [4.0, 4.0, 1.0, 1.0], "of a host; of four servers"
    problem = replace(problem, servers=ServerRequest(1))
    assert [*server_calls.link_seconds(problem, bytes_R)] == [4.0] * 4, "of the server"
    encrypted = replace(problem, servers=ServerRequest(1, encrypted=True))
    more_R = server_calls.call_seconds(encrypted, bytes_R, bytes_R) - server_calls.call_seconds(
        problem, bytes_R, bytes_R
    )
    assert more_R[0] == pytest.approx(2e-9 * (2e8 + 8e8)) and more_R[2] == 0


def test_the_step_waits_for_rows_on_slow_links_and_fewer_servers_take_longer(monkeypatch):
    cluster = cluster_with(("dram", MEMORY), (DISK, 1e9))
    assert with_servers(TWO).candidate.seconds == pytest.approx(make_plan(LARGE, cluster).candidate.seconds), "hidden"
    over_ranks = cluster_with(("dram", 2.5e7), (DISK, 1e9), sizes=(4,))
    slow = replace(over_ranks, levels=(replace(over_ranks.levels[0], bytes_per_second=2e6),))
    few, many = (with_servers(ServerRequest(num), cluster=slow, pins={"t0": "row"}).candidate for num in (1, 4))
    assert few.loads.prefetch_R.max() > 3 * many.loads.prefetch_R.max()
    monkeypatch.setattr(server_calls, "LOOPBACK", replace(server_calls.LOOPBACK, bytes_per_second=1e6))
    candidate = with_servers(TWO).candidate
    assert candidate.seconds == pytest.approx(candidate.loads.prefetch_R[0], rel=0.01)


def test_servers_are_not_used_if_all_rows_fit():
    result = with_servers(TWO, cluster=cluster_with(("dram", 1e9), (DISK, 1e9)))
    assert result.plan.servers == 0 and all(len(table.placement.tiers) == 1 for table in result.plan.tables)
    assert "not used: the ranks' memory holds all rows" in dict(result.plan.why)["servers"]


def test_what_servers_do_not_support_is_not_planned():
    assert with_servers(TWO, allow=("tables.fp16",)).plan.tables[0].placement.weight_dtype == "float32"
    wire = with_servers(OWNERS, cluster=cluster_with(("dram", 1e9), sizes=(2,)), allow=("wire.fp16",)).plan.wire
    assert wire.vectors == wire.gradients == "float32"
    problem = with_servers(TWO).candidate.problem
    assert not any(each.dense.offload for each in dense_strategies.all_strategies(LARGE, problem.cluster))
    with pytest.raises(UserError, match="this model has none: drop the section"):
        with_servers(TWO, workload=replace(LARGE, tables=(), features=(), statistics=()))
    with pytest.raises(UserError, match=r"the tables are frozen.*: drop \[servers\]"):
        with_servers(TWO, workload=replace(LARGE, optimizer=None))
    with pytest.raises(UserError, match="more or larger table servers"):
        with_servers(ServerRequest(1, bytes_=10**7))
    for change, options, message in (
        ({"optimizer": AdaGrad(0.1, weight_decay=0.1)}, {}, "clip and weight_decay.*: set servers.own=false"),
        ({}, {"pins": {"t0": "row"}}, 'table "t0" is pinned.*: drop plan.pins'),
        ({"tables": tuple(replace(t, growth=Growth(10)) for t in LARGE.tables)}, {}, "tables that grow"),
    ):
        with pytest.raises(UserError, match=message):
            with_servers(OWNERS, workload=replace(LARGE, **change), **options)
    with pytest.raises(UserError, match="gradient accumulation"):
        make_plan(LARGE, make_cluster(2), tables=TableRequest(accumulate=2, servers=OWNERS))
    with pytest.raises(UserError, match="2 table servers have 18 MB: use more or larger ones"):
        with_servers(ServerRequest(2, own=True, bytes_=10**7))
    with pytest.raises(UserError, match="copies of the rows of 2 batches need"):
        with_servers(OWNERS, cluster=cluster_with(("dram", 7e6)))


def test_servers_own_all_rows_and_ranks_have_copies():
    cluster = cluster_with(("dram", MEMORY), (DISK, 1e9), sizes=(2,))
    result = with_servers(OWNERS, cluster=cluster)
    assert result.plan.servers == 2
    for table, planned in zip(LARGE.tables, result.plan.tables, strict=True):
        assert [rect.ranks for rect in planned.rects] == [(2,), (3,)] and planned.rects[1].rows[1] == table.rows
        sync = planned.placement.sync
        assert isinstance(sync, Bounded) and (sync.pull, sync.push) == (0, 0)
        assert min(table.rows, 2 * LARGE.batch_size // 2) <= sync.copies <= table.rows + 31
    needs = table_bytes_by_purpose(LARGE, result.plan, nn.Module(), (0, 1), TrainSettings.model_validate({}))
    loads = [load.copied for load in result.candidate.problem.row_exchange_loads]
    assert needs["copies of rows of other ranks"] == 2 * sum(copied.bytes_ for copied in loads if copied is not None)
    assert needs["weights"] == 0, "servers have them"
    with_clocks = sum(table.rows * (table.dim * 4 * 2 + 16) for table in LARGE.tables) + 2 * LARGE.state_bytes
    assert server_bytes(LARGE, result.plan) == with_clocks
    copies = result.candidate.problem.bytes_on_every_rank(result.candidate.placed)
    assert 0.6 * 0.9 * MEMORY < copies < 0.9 * MEMORY, "copies take the memory that is left"
    assert any(stage.name == "fetch" for stage in result.plan.stages)
    assert "table servers own its rows" in dict(result.plan.why)["table t0"]
    problem = search.define_problem(LARGE, cluster, LARGE.batch_size, exact_precision(LARGE))
    assert reprice.reprice_plan(problem, result.plan).seconds == pytest.approx(result.candidate.seconds)
    sharded = make_plan(LARGE, cluster)
    back = reprice.reprice_plan(result.candidate.problem, sharded.plan)
    assert back.seconds == pytest.approx(sharded.candidate.seconds)


def test_tables_that_grow_stay_on_ranks():
    grown = replace(LARGE.tables[1], growth=Growth(10))
    result = with_servers(OWNERS, replace(LARGE, tables=(LARGE.tables[0], grown)), make_cluster(2))
    assert [min(table.rects[0].ranks) >= 2 for table in result.plan.tables] == [True, False]


def test_bounds_are_used_if_they_make_the_step_shorter():
    workload, cluster = skewed_workload(), slow_cluster(1e6)
    exact = with_servers(OWNERS, workload, cluster)
    bounded = with_servers(OWNERS, workload, cluster, allow=("staleness<=300",))
    assert bounded.candidate.seconds < 0.5 * exact.candidate.seconds
    syncs = [table.placement.sync for table in bounded.plan.tables]
    assert all(isinstance(sync, Bounded) and sync.max_missed(RANKS) == 300 for sync in syncs)
    why = dict(bounded.plan.why)["servers"]
    assert f"exact {1e3 * exact.candidate.seconds:.3g} ms" in why and "= 300 updates" in why
    problem = search.define_problem(workload, cluster, workload.batch_size, exact_precision(workload))
    assert reprice.reprice_plan(problem, bounded.plan).seconds == pytest.approx(bounded.candidate.seconds)
    fewer = with_servers(ServerRequest(1, own=True), workload, cluster)
    assert fewer.candidate.seconds > 1.5 * exact.candidate.seconds, "all ranks share the servers' links"


def test_rows_sent_by_owners_are_those_of_a_simulated_stream():
    """Ids are drawn independently from a power law; a copy is sent again if another rank has used its row."""
    rows, num_ids, steps, generator = 500, 60, 600, np.random.default_rng(0)
    shares = np.cumsum(np.arange(1, rows + 1) ** -1.2)
    shares /= shares[-1]
    load = replace(
        search.define_problem(LARGE, make_cluster(2), 512, exact_precision(LARGE)).table_loads[0],
        table=replace(LARGE.tables[0], rows=rows),
        popularity=tuple((k, float(shares[k - 1])) for k in range(1, rows)),
    )
    for ranks in (1, 2, 3):
        fresh, sent, used = np.zeros((ranks, rows), bool), 0, 0
        for step in range(steps):
            batches = [np.unique(np.searchsorted(shares, generator.random(num_ids))) for _ in range(ranks)]
            for rank, batch in enumerate(batches):
                if step >= steps // 2:
                    used, sent = used + len(batch), sent + int((~fresh[rank, batch]).sum())
                fresh[rank, batch] = True
            for rank, batch in enumerate(batches):
                fresh[np.arange(ranks) != rank, batch[:, None]] = False
        _, (validated, expected, pushed) = cache_hits.exact_shares(load, rows, ranks, num_ids)
        assert expected == pytest.approx(sent / used, abs=0.03)
        assert pushed == 1 and validated == (1 if ranks > 1 else expected)


@pytest.mark.parametrize(
    "overrides, message",
    (
        (["servers.start=1", 'servers.addresses=["tcp://127.0.0.1:5800"]'], "drop one of the two"),
        (["servers.start=1", "servers.keys=a.keys"], "set servers.addresses, or drop it"),
        (["servers.own=true"], "servers.own is set, and there are no table servers: set servers.start or"),
        (["servers.memory=4 GB"], "servers.memory is set, and there are no table servers"),
        (["servers.start=1", "servers.memory=much"], "is not a number of bytes"),
        (["servers.begin=1"], 'unknown key "servers.begin"'),
    ),
)
def test_keys_that_do_not_work_together_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        config.load("synthetic-dlrm", overrides)


def test_a_recipe_shows_its_plan_without_a_server(monkeypatch):
    memory = ["plan.memory=12 MB", "train.steps=2", "train.batch_size=256"]
    settings, plan = preview(config.load("synthetic-dlrm", [*memory, "servers.start=2"]))
    assert plan.servers == 2 and settings.servers.start == 2 and "servers" in dict(plan.why)
    assert any(is_cached_from_servers(table) for table in plan.tables)
    address = 'servers.addresses=["tcp://127.0.0.1:5800"]'
    plan = preview(config.load("synthetic-dlrm", [address, "servers.own=true", "train.steps=2"]))[1]
    assert all(rect.ranks == (1,) for table in plan.tables for rect in table.rects)
    plan = preview(config.load("synthetic-dlrm", ["ranks=2", address, "servers.own=true", "train.steps=2"]))[1]
    assert plan.servers == 1 and plan.num_ranks == 2
    with pytest.raises(UserError, match="not on this host, and no keys are set"):
        preview(config.load("synthetic-dlrm", ['servers.addresses=["tcp://10.0.0.1:5800"]', "train.steps=2"]))
    monkeypatch.setattr(planning, "host_topology", lambda: (2, 1))
    with pytest.raises(UserError, match="servers.start=2 starts table servers on one host.*set servers.addresses"):
        preview(config.load("synthetic-dlrm", [*memory, "servers.start=2"]))


@pytest.mark.parametrize("own", ("false", "true"))
def test_plan_command_with_servers(tmp_path, own):
    files.write(LARGE, tmp_path / "workload.json")
    cluster = cluster_with(("dram", MEMORY), (DISK, 1e9), sizes=(2,))
    files.write(cluster, tmp_path / "cluster.toml")
    files.write(make_plan(LARGE, cluster).plan, tmp_path / "other.json")
    command = ["plan", str(tmp_path / "workload.json"), "--cluster", str(tmp_path / "cluster.toml"), "servers.start=3"]
    command += [f"servers.own={own}", "--compare", str(tmp_path / "other.json"), "-o", str(tmp_path / "plan.json")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    plan = files.read(planning.Plan, tmp_path / "plan.json")
    assert plan.servers == 3 and "table servers (3)" in result.output.replace("\n", " ")
    if own == "false":
        assert plan.tables[0].placement.tiers[-1].tier == SERVERS and (cached_rows(plan.tables[0]) or ROWS) < ROWS
