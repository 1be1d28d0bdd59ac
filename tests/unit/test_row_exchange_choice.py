"""The planner's choice between the exchange of vectors and of distinct rows, and the bytes of each."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_planner import make_cluster, make_workload

from shardwright.embeddings.layout import build_layout
from shardwright.embeddings.outgoing import RequestBuilder
from shardwright.embeddings.responses import ResponseAssembly
from shardwright.embeddings.row_order import make_row_order
from shardwright.jagged import Jagged, narrow
from shardwright.layers.embedding import EmbeddingBags
from shardwright.measure import describe
from shardwright.planner import plan as planning
from shardwright.planner import reprice, search
from shardwright.planner.plan import make_plan
from shardwright.planner.step import traffic
from shardwright.planner.tables import row_exchange
from shardwright.planner.tables.sharding import Sharding
from shardwright.spec import files
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.plan import Plan
from shardwright.spec.workload import Feature, FeatureStatistics, Table

RANKS, LOCAL_BATCH = 4, 512
TABLES = (Table("few", 40, 64), Table("skewed", 600, 64), Table("long", 3000, 16), Table("even", 10**6, 16))
FEATURES = (*(Feature(table.name, table.name) for table in TABLES), Feature("again", "even", "mean"))


def batch(samples: int = RANKS * LOCAL_BATCH, seed: int = 0) -> Jagged:
    """Few rows, popular rows, long bags, and rarely repeated rows with a second feature."""
    rng = np.random.default_rng(seed)
    lengths = [rng.poisson(mean, samples) for mean in (1, 1.5, 8, 1, 1)]
    rows = [40, 600, 3000, 10**6, 10**6]
    ids = [
        rng.integers(0, num, length.sum()) if num in (40, 10**6) else num ** rng.random(length.sum()) - 1
        for num, length in zip(rows, lengths, strict=True)
    ]
    names = tuple(feature.name for feature in FEATURES)
    return Jagged(names, torch.from_numpy(np.concatenate(ids)).long(), torch.from_numpy(np.stack(lengths)).long())


def describe_batch(ids: Jagged):
    """The layer and the workload of a batch, with the statistics that `describe` measures."""
    bags = EmbeddingBags(TABLES, FEATURES, RowWiseAdaGrad(lr=0.1))
    statistics = describe._statistics(bags, ids, ())
    blocks = make_workload((1, 4, 1.0)).blocks
    return bags, replace(
        make_workload((1, 4, 1.0)),
        batch_size=ids.batch_size,
        tables=TABLES,
        features=FEATURES,
        statistics=statistics,
        blocks=blocks,
    )


def test_distinct_ids_are_counted_for_parts_of_the_batch():
    ids = batch()
    bags, workload = describe_batch(ids)
    for number, feature in enumerate(workload.statistics):
        by_size = dict(feature.distinct)
        assert by_size[ids.batch_size] == feature.distinct_share
        assert min(by_size) == ids.batch_size >> describe.NUM_HALVINGS
        parts = [narrow(ids, rank * LOCAL_BATCH, rank * LOCAL_BATCH + LOCAL_BATCH) for rank in range(RANKS)]
        rank_ids = [part.values.split(part.lengths.sum(1).tolist())[number] for part in parts]
        num_distinct = sum(len(part.unique()) for part in rank_ids) / RANKS
        rows = next(table.rows for table in TABLES if table.name == FEATURES[number].table)
        expected = row_exchange.expected_distinct_ids(feature, workload.batch_size, rows, LOCAL_BATCH)
        assert expected == pytest.approx(num_distinct)


def test_distinct_ids_of_other_batch_sizes_follow_a_power_law():
    """A power law between each two measured sizes; from one id for a single measured size."""
    one_size = FeatureStatistics("f", 2.0, 0.5)
    assert row_exchange.expected_distinct_ids(one_size, 512, 10**6, 512) == pytest.approx(512)
    assert row_exchange.expected_distinct_ids(one_size, 512, 10**6, 0.25) == 0.5
    power = np.log(512) / np.log(1024)
    assert row_exchange.expected_distinct_ids(one_size, 512, 10**6, 64) == pytest.approx(128**power)
    assert row_exchange.expected_distinct_ids(one_size, 512, 10**6, 4096) == pytest.approx(8192**power)
    assert row_exchange.expected_distinct_ids(one_size, 512, 300, 512) == 300
    two_sizes = replace(one_size, distinct=((64, 0.8), (512, 0.5)))
    assert row_exchange.expected_distinct_ids(two_sizes, 512, 10**6, 64) == pytest.approx(0.8 * 128)
    assert 0.8 * 128 < row_exchange.expected_distinct_ids(two_sizes, 512, 10**6, 200) < 512
    extrapolated = row_exchange.expected_distinct_ids(two_sizes, 512, 10**6, 2048)
    assert 512 < extrapolated < 4 * 512 and row_exchange.expected_distinct_ids(two_sizes, 512, 600, 2048) == 600


def measure_bytes(bags: EmbeddingBags, plan: Plan, ids: Jagged) -> tuple[np.ndarray, np.ndarray]:
    """Bytes from rank to rank (R, R): of ids with their lengths, and of vectors or rows."""
    plans = {table.table: table for table in plan.tables}
    layout = build_layout(TABLES, FEATURES, plans, RANKS)
    orders = [make_row_order(plans[table.name].order, table.rows, torch.arange(table.rows)) for table in TABLES]
    ids_RR, values_RR = np.zeros((RANKS, RANKS)), np.zeros((RANKS, RANKS))
    for rank in range(RANKS):
        local_ids = narrow(ids, rank * LOCAL_BATCH, (rank + 1) * LOCAL_BATCH)
        request = RequestBuilder(bags, layout, orders, rank).build(local_ids)
        ids_RR[rank] = [4 * size for size in request.splits]
        values_RR[:, rank] = [
            4 * size for size in ResponseAssembly(bags, layout, rank, torch.device("cpu")).received_sizes(request)
        ]
    return ids_RR, values_RR


@pytest.mark.parametrize("scheme", ("table", "column", "row"))
@pytest.mark.parametrize("rows", ((), ("few", "skewed"), ("few", "skewed", "long", "even")))
def test_predicted_bytes_equal_those_of_the_messages(scheme, rows):
    ids = batch()
    bags, workload = describe_batch(ids)
    pins = {table.name: "row" if scheme == "row" else f"table@{rank}" for rank, table in enumerate(TABLES)}
    pins |= {"few": "column:2@0,1", "skewed": "column:2@2,3"} if scheme == "column" else {}
    result = make_plan(workload, make_cluster(RANKS), pins=pins)
    tables = (replace(table, travel="rows" if table.table in rows else "vectors") for table in result.plan.tables)
    plan = replace(result.plan, tables=tuple(tables))
    plan.verify(workload)
    repriced = reprice.reprice_plan(result.candidate.problem, plan)
    ids_RR, values_RR = measure_bytes(bags, plan, ids)
    predicted_R = sum(traffic._vector_bytes_by_levels(repriced.problem, repriced.placed, "float32").values())
    predicted_RR = traffic.id_traffic(repriced.problem, repriced.placed)
    if scheme == "row":  # the prediction does not depend on which ids are hot: compare totals
        ids_RR, values_RR, predicted_RR, predicted_R = (
            num_bytes.sum(keepdims=True) for num_bytes in (ids_RR, values_RR, predicted_RR, predicted_R)
        )
    assert values_RR.sum(1) == pytest.approx(predicted_R, rel=0.005)
    assert ids_RR.sum(0) == pytest.approx(predicted_RR.sum(0), abs=4 * RANKS * RANKS * len(rows))  # counts


def test_slow_links_exchange_distinct_rows():
    """The exchange is chosen for each table, and is in the plan, its reasons and its price."""
    ids = batch()
    _, workload = describe_batch(ids)
    pins = {table.name: f"table@{rank}" for rank, table in enumerate(TABLES[:-1])}
    slow = make_plan(workload, make_cluster(RANKS, rate=1e7), pins=pins)
    by_name = {table.table: table for table in slow.plan.tables}
    assert [name for name, table in by_name.items() if table.travel == "rows"] == ["few", "skewed"]
    assert dict(slow.plan.why)["table skewed"].startswith("as pinned; deduplicated row exchange (")
    vectors_only = replace(slow.plan, tables=tuple(replace(table, travel="vectors") for table in slow.plan.tables))
    assert reprice.reprice_plan(slow.candidate.problem, vectors_only).seconds > slow.candidate.seconds
    repriced = reprice.reprice_plan(slow.candidate.problem, slow.plan)
    assert repriced.seconds == pytest.approx(slow.candidate.seconds) and repriced.ids_after == slow.candidate.ids_after
    fast = make_plan(workload, make_cluster(RANKS, rate=1e13), pins=pins)
    assert {table.travel for table in fast.plan.tables} == {"vectors"}


def test_plans_without_the_travel_field_exchange_vectors(tmp_path):
    _, workload = describe_batch(batch())
    plan = make_plan(workload, make_cluster(RANKS)).plan
    data: Any = files.to_plain(plan)
    for table in data["tables"]:
        del table["travel"]
    assert {table.travel for table in files.from_plain(Plan, data, "plan").tables} == {"vectors"}
    files.write(plan, tmp_path / "plan.json")
    assert files.read(Plan, tmp_path / "plan.json") == plan


def test_tables_with_unpooled_features_exchange_rows():
    _, workload = describe_batch(batch())
    unpooled = replace(workload, features=(FEATURES[0], replace(FEATURES[1], pooling="none"), *FEATURES[2:]))
    result = make_plan(unpooled, make_cluster(RANKS))
    table = next(t for t in result.plan.tables if t.table == "skewed")
    assert table.travel == "rows" and "not all of its features are pooled" in dict(result.plan.why)["table skewed"]
    vectors = replace(result.plan, tables=tuple(replace(t, travel="vectors") for t in result.plan.tables))
    plans = {plan.table: plan for plan in vectors.tables}
    assert build_layout(TABLES, unpooled.features, plans, RANKS).row_exchange_tables == {1}
    tables = (replace(t, travel="rows" if t.table == "skewed" else "vectors") for t in result.plan.tables)
    equal = replace(result.plan, tables=tuple(tables))
    seconds = [reprice.reprice_plan(result.candidate.problem, plan).seconds for plan in (vectors, equal)]
    assert seconds[0] == pytest.approx(seconds[1])


def test_distinct_ids_are_spread_more_evenly_than_ids():
    """A rank requests a hot row once, so ranks that hold hot rows get a smaller share of distinct ids."""
    ids = 4096.0
    _, workload = describe_batch(batch())
    exact = planning.exact_precision(workload)
    problem = search.define_problem(workload, make_cluster(RANKS), 4 * LOCAL_BATCH, exact)
    hot = replace(problem.table_loads[1], popularity=((1, 0.3), (10, 0.6), (100, 0.9)))
    distinct = dict(row_exchange._distinct_popularity(hot, ids))
    assert distinct[1] < 0.01 and distinct[10] < 0.05 and distinct[100] < 0.3
    assert list(distinct.values()) == sorted(distinct.values())


def test_the_byte_ratio_of_the_row_exchange_counts_row_and_column_shards():
    """Row-wise shards each send partial vectors; each of a table's column shards needs the ids."""
    _, workload = describe_batch(batch())
    problem = search.define_problem(workload, make_cluster(RANKS), 4 * LOCAL_BATCH, planning.exact_precision(workload))
    table_wise, column_wise, row_wise = (
        search.row_exchange_share(problem, 1, sharding)
        for sharding in (Sharding("table"), Sharding("column", 2), Sharding("row", row_levels=1))
    )
    vectors, rows = problem.table_loads[1], problem.row_exchange_loads[1]
    assert table_wise == pytest.approx(rows.ids_per_sample * (4 + 64 * 8) / (vectors.ids_per_sample * 4 + 4 + 64 * 8))
    assert row_wise < table_wise / 3.9 and column_wise == pytest.approx(table_wise, rel=0.05)
