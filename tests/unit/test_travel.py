"""What travels of a table: the planner's choice between its vectors and its distinct rows, and the bytes of either."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_planner import cluster, workload

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

RANKS, OWN = 4, 512
TABLES = (Table("few", 40, 64), Table("skewed", 600, 64), Table("long", 3000, 16), Table("even", 10**6, 16))
FEATURES = (*(Feature(one.name, one.name) for one in TABLES), Feature("again", "even", "mean"))


def batch(samples: int = RANKS * OWN, seed: int = 0) -> Jagged:
    """Few rows, popular rows, long bags, rows that hardly come again; and a second feature of these."""
    draw = np.random.default_rng(seed)
    lengths = [draw.poisson(mean, samples) for mean in (1, 1.5, 8, 1, 1)]
    rows = [40, 600, 3000, 10**6, 10**6]
    ids = [
        draw.integers(0, num, length.sum()) if num in (40, 10**6) else num ** draw.random(length.sum()) - 1
        for num, length in zip(rows, lengths, strict=True)
    ]
    names = tuple(one.name for one in FEATURES)
    return Jagged(names, torch.from_numpy(np.concatenate(ids)).long(), torch.from_numpy(np.stack(lengths)).long())


def described(ids: Jagged):
    """The workload of these ids, with the statistics that describe counts in them."""
    bags = EmbeddingBags(TABLES, FEATURES, RowWiseAdaGrad(lr=0.1))
    counted = describe._statistics(bags, ids, ())
    blocks = workload((1, 4, 1.0)).blocks
    return bags, replace(
        workload((1, 4, 1.0)),
        batch_size=ids.batch_size,
        tables=TABLES,
        features=FEATURES,
        statistics=counted,
        blocks=blocks,
    )


def test_distinct_ids_are_counted_in_parts_of_the_batch():
    ids = batch()
    bags, work = described(ids)
    for at, one in enumerate(work.statistics):
        by_size = dict(one.distinct)
        assert by_size[ids.batch_size] == one.distinct_share and min(by_size) == ids.batch_size >> describe.NUM_HALVINGS
        parts = [narrow(ids, rank * OWN, rank * OWN + OWN) for rank in range(RANKS)]
        each = [part.values.split(part.lengths.sum(1).tolist())[at] for part in parts]
        found = sum(len(part.unique()) for part in each) / RANKS
        rows = next(table.rows for table in TABLES if table.name == FEATURES[at].table)
        assert row_exchange.expected_distinct_ids(one, work.batch_size, rows, OWN) == pytest.approx(found)


def test_distinct_ids_of_other_sizes():
    """One known size: a power law through one id; between known sizes its pieces, beyond as along the last."""
    known = FeatureStatistics("f", 2.0, 0.5)
    assert row_exchange.expected_distinct_ids(known, 512, 10**6, 512) == pytest.approx(512)
    assert row_exchange.expected_distinct_ids(known, 512, 10**6, 0.25) == 0.5
    power = np.log(512) / np.log(1024)
    assert row_exchange.expected_distinct_ids(known, 512, 10**6, 64) == pytest.approx(128**power)
    assert row_exchange.expected_distinct_ids(known, 512, 10**6, 4096) == pytest.approx(8192**power)
    assert row_exchange.expected_distinct_ids(known, 512, 300, 512) == 300
    counted = replace(known, distinct=((64, 0.8), (512, 0.5)))
    assert row_exchange.expected_distinct_ids(counted, 512, 10**6, 64) == pytest.approx(0.8 * 128)
    assert 0.8 * 128 < row_exchange.expected_distinct_ids(counted, 512, 10**6, 200) < 512
    late = row_exchange.expected_distinct_ids(counted, 512, 10**6, 2048)
    assert 512 < late < 4 * 512 and row_exchange.expected_distinct_ids(counted, 512, 600, 2048) == 600


def measured(bags: EmbeddingBags, plan: Plan, ids: Jagged) -> tuple[np.ndarray, np.ndarray]:
    """From rank to rank (R, R): bytes of ids with their lengths, and of vectors or rows on their way."""
    plans = {one.table: one for one in plan.tables}
    layout = build_layout(TABLES, FEATURES, plans, RANKS)
    orders = [make_row_order(plans[one.name].order, one.rows, torch.arange(one.rows)) for one in TABLES]
    asked_RR, there_RR = np.zeros((RANKS, RANKS)), np.zeros((RANKS, RANKS))
    for rank in range(RANKS):
        asked = RequestBuilder(bags, layout, orders, rank).build(narrow(ids, rank * OWN, rank * OWN + OWN))
        asked_RR[rank] = [4 * size for size in asked.splits]
        there_RR[:, rank] = [4 * size for size in ResponseAssembly(bags, layout, rank).received_sizes(asked)]
    return asked_RR, there_RR


@pytest.mark.parametrize("scheme", ("table", "column", "row"))
@pytest.mark.parametrize("rows", ((), ("few", "skewed"), ("few", "skewed", "long", "even")))
def test_predicted_bytes_are_those_of_the_messages(scheme, rows):
    ids = batch()
    bags, work = described(ids)
    pins = {one.name: "row" if scheme == "row" else f"table@{at}" for at, one in enumerate(TABLES)}
    pins |= {"few": "column:2@0,1", "skewed": "column:2@2,3"} if scheme == "column" else {}
    made = make_plan(work, cluster(RANKS), pins=pins)
    asking = (replace(one, travel="rows" if one.table in rows else "vectors") for one in made.plan.tables)
    plan = replace(made.plan, tables=tuple(asking))
    plan.verify(work)
    found = reprice.reprice_plan(made.candidate.problem, plan)
    asked_RR, there_RR = measured(bags, plan, ids)
    predicted_R = sum(traffic._vector_bytes_by_levels(found.problem, found.placed, "float32").values())
    predicted_RR = traffic.id_traffic(found.problem, found.placed)
    if scheme == "row":  # which rows are hot is not known here: of all ranks together
        asked_RR, there_RR, predicted_RR, predicted_R = (
            one.sum(keepdims=True) for one in (asked_RR, there_RR, predicted_RR, predicted_R)
        )
    assert there_RR.sum(1) == pytest.approx(predicted_R, rel=0.005)
    assert asked_RR.sum(0) == pytest.approx(predicted_RR.sum(0), abs=4 * RANKS * RANKS * len(rows))  # counts


def test_hot_rows_travel_once_where_links_are_slow():
    """What travels is chosen table by table, told in the plan, its reasons and its file, and priced again alike."""
    ids = batch()
    _, work = described(ids)
    pins = {one.name: f"table@{at}" for at, one in enumerate(TABLES[:-1])}
    slow = make_plan(work, cluster(RANKS, rate=1e7), pins=pins)
    by_name = {one.table: one for one in slow.plan.tables}
    assert [name for name, one in by_name.items() if one.travel == "rows"] == ["few", "skewed"]
    assert dict(slow.plan.why)["table skewed"].startswith("as pinned; deduplicated row exchange (")
    never = replace(slow.plan, tables=tuple(replace(one, travel="vectors") for one in slow.plan.tables))
    assert reprice.reprice_plan(slow.candidate.problem, never).seconds > slow.candidate.seconds
    again = reprice.reprice_plan(slow.candidate.problem, slow.plan)
    assert again.seconds == pytest.approx(slow.candidate.seconds) and again.ids_after == slow.candidate.ids_after
    fast = make_plan(work, cluster(RANKS, rate=1e13), pins=pins)
    assert {one.travel for one in fast.plan.tables} == {"vectors"}


def test_a_plan_from_before_has_vectors_travel(tmp_path):
    _, work = described(batch())
    made = make_plan(work, cluster(RANKS)).plan
    data: Any = files.to_plain(made)
    for one in data["tables"]:
        del one["travel"]
    assert {one.travel for one in files.from_plain(Plan, data, "plan").tables} == {"vectors"}
    files.write(made, tmp_path / "plan.json")
    assert files.read(Plan, tmp_path / "plan.json") == made


def test_where_features_are_not_pooled_rows_travel():
    _, work = described(batch())
    mixed = replace(work, features=(FEATURES[0], replace(FEATURES[1], pooling="none"), *FEATURES[2:]))
    made = make_plan(mixed, cluster(RANKS))
    planned = next(one for one in made.plan.tables if one.table == "skewed")
    assert planned.travel == "rows" and "not all of its features are pooled" in dict(made.plan.why)["table skewed"]
    other = replace(made.plan, tables=tuple(replace(one, travel="vectors") for one in made.plan.tables))
    plans = {one.table: one for one in other.tables}
    assert build_layout(TABLES, mixed.features, plans, RANKS).row_exchange_tables == {1}
    assert reprice.reprice_plan(made.candidate.problem, other).seconds == pytest.approx(
        reprice.reprice_plan(
            made.candidate.problem,
            replace(
                made.plan,
                tables=tuple(
                    replace(one, travel="rows" if one.table == "skewed" else "vectors") for one in made.plan.tables
                ),
            ),
        ).seconds
    )


def test_rows_are_asked_more_evenly_than_ids():
    """A rank asks a hot row once: with it on its own, a rank that holds hot rows is asked less."""
    ids = 4096.0
    _, work = described(batch())
    demand = search.define_problem(work, cluster(RANKS), 4 * OWN, planning.exact_precision(work)).table_loads[1]
    hot = replace(demand, popularity=((1, 0.3), (10, 0.6), (100, 0.9)))
    flat = dict(row_exchange._flatter(hot, ids))
    assert flat[1] < 0.01 and flat[10] < 0.05 and flat[100] < 0.3
    assert list(flat.values()) == sorted(flat.values())


def test_the_share_of_bytes_counts_parts_and_pieces():
    """Rows over ranks make vectors come in parts, columns in pieces make ids go twice."""
    _, work = described(batch())
    posed = search.define_problem(work, cluster(RANKS), 4 * OWN, planning.exact_precision(work))
    whole, cut, spread = (
        search.row_exchange_share(posed, 1, one)
        for one in (Sharding("table"), Sharding("column", 2), Sharding("row", row_levels=1))
    )
    vectors, rows = posed.table_loads[1], posed.row_exchange_loads[1]
    assert whole == pytest.approx(rows.ids_per_sample * (4 + 64 * 8) / (vectors.ids_per_sample * 4 + 4 + 64 * 8))
    assert spread < whole / 3.9 and cut == pytest.approx(whole, rel=0.05)
