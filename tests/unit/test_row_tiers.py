"""Tables that do not fit in the fastest memory: what the planner puts where, and which rows a cache will have."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import make_cluster, make_workload

from shardwright import config
from shardwright.embeddings.cache_simulation import Policy, TableAccesses, simulate
from shardwright.errors import UserError
from shardwright.planner import reprice, search
from shardwright.planner.memory import budget, row_tiers
from shardwright.planner.pins import TableRequest
from shardwright.planner.plan import exact_precision, make_plan
from shardwright.planner.tables import cache_hits
from shardwright.planner.tables.sharding import TableLoad
from shardwright.runtime.planning import preview, read_plan_request
from shardwright.runtime.supported import cached_rows
from shardwright.spec import files
from shardwright.spec.cache_hits import RecordedHits, with_recorded_hits
from shardwright.spec.cluster import Cluster, Price, Tier
from shardwright.spec.row_cache import DISK, HALF_LIFE_BATCHES, LINE_BYTES, WAYS
from shardwright.spec.workload import CacheHits, Table

ROWS = 400_000
LARGE = make_workload((ROWS, 64, 4.0), (2000, 64, 1.0), hot=True)  # 104 MB, and 0.5 MB


def cluster_with(*tiers: tuple[str, float], sizes: tuple[int, ...] = (1,)) -> Cluster:
    cluster = make_cluster(*sizes)
    device = replace(cluster.device, tiers=tuple(Tier(name, int(bytes_), 1e10, 1e10) for name, bytes_ in tiers))
    return replace(cluster, device=device)


@pytest.mark.parametrize("sizes", ((1,), (2,), (2, 2)))
def test_rows_that_do_not_fit_in_memory_are_on_disk(sizes):
    cluster = cluster_with(("dram", 4e7 / np.prod(sizes) + 1.5e7), (DISK, 1e9), sizes=sizes)
    result = make_plan(LARGE, cluster)
    result.plan.verify(LARGE)
    large, small = result.plan.tables
    lines = cached_rows(large)
    assert lines is not None and lines % WAYS == 0 and len(small.placement.tiers) == 1
    num_shards = len({rect.rows for rect in large.rects})
    # One rank's memory may hold all lines: copies that hide behind the step do not pay for more shards.
    assert 0.08 * ROWS < lines * num_shards < 0.5 * ROWS
    assert all(len(rect.ranks) == 1 for rect in large.rects)
    assert any(stage.name == "prefetch" for stage in result.plan.stages)
    found = result.candidate.tiers[0].found
    assert sum(found) == pytest.approx(1) and 0 < found[0] < 1
    why = dict(result.plan.why)["table t0"]
    assert f"a cache of {lines * num_shards:,} rows" in why and "in dram" in why and "the others in ssd" in why
    problem = search.define_problem(LARGE, cluster, LARGE.batch_size, exact_precision(LARGE))
    repriced = reprice.reprice_plan(problem, result.plan)
    assert repriced.seconds == pytest.approx(result.candidate.seconds)
    assert repriced.tiers[0].found == pytest.approx(found)


def test_float32_lines_take_the_room_of_float32_weights():
    cluster = cluster_with(("dram", 3e7), (DISK, 1e9))
    plans = [make_plan(LARGE, cluster, allow=("tables.fp16", *wide)).plan for wide in ((), ("cache.fp32",))]
    narrow, wide = (cached_rows(plan.tables[0]) for plan in plans)
    assert narrow is not None and wide is not None
    assert plans[1].tables[0].placement.weight_dtype == "float16"
    state_bytes = LARGE.state_bytes / sum(table.rows for table in LARGE.tables)
    bytes_of_line = [64 * width + state_bytes + LINE_BYTES for width in (2, 4)]
    # The planner takes whole intervals of the popularity curve.
    assert wide / narrow == pytest.approx(bytes_of_line[0] / bytes_of_line[1], rel=0.1)


def test_three_tiers_are_filled_one_after_the_other():
    cluster = cluster_with(("hbm", 2e7), ("dram", 5e7), (DISK, 1e9))
    result = make_plan(LARGE, cluster)
    result.plan.verify(LARGE)
    (fast, first), (middle, second), (slow, rest) = result.plan.tables[0].placement.tiers
    assert (fast, middle, slow, rest) == ("hbm", "dram", DISK, None)
    row_bytes = 64 * 4 + 4
    assert 0.7 * 0.9 * 5e7 < second * row_bytes <= 0.9 * 5e7 and 0 < first * row_bytes < 0.9 * 2e7
    assert [*result.candidate.tiers[0].found] == sorted(result.candidate.tiers[0].found, reverse=True) or (
        sum(result.candidate.tiers[0].found) == pytest.approx(1)
    )


@settings(max_examples=40, deadline=None)
@given(
    memory=st.floats(1.2e7, 2e8),
    rows=st.lists(st.integers(100, 300_000), min_size=1, max_size=4),
    accumulate=st.integers(1, 3),
    sizes=st.sampled_from([(1,), (2,), (3,)]),
)
def test_every_split_fits_and_holds_the_steps_in_flight(memory, rows, accumulate, sizes):
    workload = make_workload(*((num, 32, 2.0) for num in rows), hot=True)
    cluster = cluster_with(("dram", memory), (DISK, 1e9), sizes=sizes)
    try:
        result = make_plan(workload, cluster, tables=TableRequest(accumulate=accumulate))
    except UserError as error:
        assert "need" in str(error)
        return
    candidate = result.candidate
    room = budget.memory_budget(candidate.problem).free_bytes[0]
    used_R = np.zeros(cluster.num_ranks)
    for table in result.plan.tables:
        lines = cached_rows(table)
        for rect in table.rects:
            shard_rows = rect.rows[1] - rect.rows[0]
            used_R[list(rect.ranks)] += min(shard_rows, lines or shard_rows) * (rect.cols[1] - rect.cols[0]) * 4
        if lines is not None:
            in_flight = 2 * accumulate * 0.5 * 512 * 2.0 / len(table.rects)
            assert min(lines, max(rect.rows[1] - rect.rows[0] for rect in table.rects)) >= in_flight
    assert (used_R <= room).all()


def test_without_room_for_the_steps_in_flight_the_plan_is_refused():
    with pytest.raises(UserError, match="the rows of the steps in flight need .* of dram"):
        make_plan(LARGE, cluster_with(("dram", 2e7), (DISK, 1e9)), tables=TableRequest(accumulate=20))


def test_column_shards_may_be_on_disk_and_replicas_are_not():
    cluster = cluster_with(("dram", 3e7), (DISK, 1e9), sizes=(2,))
    (table, *_) = make_plan(LARGE, cluster, pins={"t0": "column:2"}).plan.tables
    assert cached_rows(table) and {rect.cols for rect in table.rects} == {(0, 32), (32, 64)}
    with pytest.raises(UserError, match="no sharding found"):
        make_plan(LARGE, cluster, pins={"t0": "data"})


def test_placing_all_tables_of_a_rank_is_one_call():
    cluster = cluster_with(("dram", 5.5e7), (DISK, 1e9))
    place = Price(op="place", call_seconds=0.5, seconds_per_byte=1e-9)
    cluster = replace(cluster, device=replace(cluster.device, prices=(*cluster.device.prices, place)))
    workload = make_workload((ROWS // 2, 64, 4.0), (ROWS // 2, 64, 4.0), hot=True)
    result = make_plan(workload, cluster)
    assert [cached_rows(table) is not None for table in result.plan.tables] == [True, True]
    assert result.candidate.loads.expect_R == pytest.approx([0.5 + 8e-9 * workload.batch_size * 8])


ZIPF_LOAD = TableLoad(
    Table("t", 20_000, 8),
    popularity=tuple(
        (int(k), float(np.log1p(k) / np.log1p(20_000))) for k in np.unique(np.geomspace(1, 15_000, 40).astype(int))
    ),
)


@pytest.mark.parametrize("lines", (2048, 4096, 10240))
def test_expected_hits_are_those_of_a_simulated_cache(lines):
    """Rows drawn independently from the popularity curve, in a cache as in training; less exact if it is very small."""
    rng, num_ids, rows = np.random.default_rng(0), 300, ZIPF_LOAD.table.rows
    points = np.array(((0, 0.0), *ZIPF_LOAD.popularity, (rows, 1.0)))
    drawn = [np.interp(rng.random(num_ids), points[:, 1], points[:, 0]).astype(np.int64) for _ in range(1000)]
    batches = tuple(torch.from_numpy(np.unique(ids)) for ids in drawn)
    hits = simulate(
        TableAccesses("t", rows, 4, batches), lines, Policy("ours", HALF_LIFE_BATCHES, adapts=True, ahead=1)
    )
    assert cache_hits.found_share(ZIPF_LOAD, lines, num_ids) == pytest.approx(hits.rate, abs=0.015)
    few = simulate(TableAccesses("t", rows, 4, batches), 1024, Policy("ours", HALF_LIFE_BATCHES, adapts=True, ahead=1))
    assert cache_hits.found_share(ZIPF_LOAD, 1024, num_ids) == pytest.approx(few.rate, abs=0.03)


def test_recorded_hits_are_interpolated(tmp_path):
    load = replace(ZIPF_LOAD, hits=((1000, 0.3), (4000, 0.5)))
    assert [cache_hits.found_share(load, lines, 300) for lines in (500, 1000, 2500, 20_000)] == [0.15, 0.3, 0.4, 1.0]
    path = tmp_path / "hits.json"
    files.write(RecordedHits(1, "a recipe", (CacheHits("t0", ((1000, 0.3), (4000, 0.5))),)), path)
    workload = with_recorded_hits(LARGE, str(path))
    workload.verify()
    assert workload.digest() != LARGE.digest()
    result = make_plan(workload, cluster_with(("dram", 5e7), (DISK, 1e9)))
    assert result.candidate.tiers[0].found[0] > 0.5
    files.write(RecordedHits(1, "a recipe", (CacheHits("other", ()),)), path)
    with pytest.raises(UserError, match='hits of table "other" of a recipe'):
        with_recorded_hits(LARGE, str(path))
    with pytest.raises(UserError, match="do not grow"):
        replace(LARGE, cache_hits=(CacheHits("t0", ((10, 0.5), (20, 0.4))),)).verify()


def test_weights_of_work_and_bytes_are_keys_of_a_plan():
    workload, cluster = make_workload(*((20_000, 32, 3.0 + i) for i in range(6)), hot=True), make_cluster(4)
    default = {proposal.balance_weights for proposal in search.proposals(cluster)}
    assert default == set(search.BALANCE_WEIGHTS)
    chosen = {proposal.balance_weights for proposal in search.proposals(cluster, balance=(0.0, 1.0))}
    assert chosen == {(0.0, 1.0, search.BALANCE_WEIGHTS[0][-1])}
    bytes_only = make_plan(workload, cluster, tables=TableRequest(balance=(0.0, 1.0)))
    assert bytes_only.candidate.proposal.balance_weights[:2] == (0.0, 1.0)
    assert make_plan(workload, cluster, tables=TableRequest()).plan == make_plan(workload, cluster).plan


def test_a_recipe_needs_only_a_number_of_bytes():
    settings, plan = preview(config.load("synthetic-dlrm", ["plan.memory=30 MB", "train.steps=2"]))
    on_disk = {table.table: cached_rows(table) for table in plan.tables if cached_rows(table)}
    assert on_disk and len(on_disk) < len(plan.tables), plan.tables
    why = dict(plan.why)
    assert all("a cache of" in why[f"table {name}"] for name in on_disk)
    assert settings.plan.memory == "30 MB"
    whole = preview(config.load("synthetic-dlrm", ["plan.memory=20 GB", "train.steps=2"]))[1]
    assert all(cached_rows(table) is None for table in whole.tables)
    request = read_plan_request("synthetic-dlrm", ["plan.memory=60 MB", "train.accumulate=2"], "two-cores")
    assert request.cluster.device.tiers[0].bytes_ == 60_000_000 and request.accumulate == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.memory=4", "plan.memory"),
        ("plan.memory=4 GiB", 'as "4 GB"'),
        ("plan.balance=[1]", "plan.balance"),
        ("plan.balance=[0, 0]", "one of them above 0"),
        ("plan.cluster=two-cores", "set plan.memory too"),
    ],
)
def test_mistakes_are_named(override, message):
    with pytest.raises(UserError, match=message):
        preview(config.load("synthetic-dlrm", [override]))


def test_disk_that_is_too_small_is_a_shortage():
    with pytest.raises(UserError, match="short by"):
        make_plan(LARGE, cluster_with(("dram", 2e7), (DISK, 1e7)))
    assert row_tiers.SPARE_LINES > 1
