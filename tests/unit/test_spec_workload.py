"""A workload's sizes, and the message of every check."""

from dataclasses import replace

import pytest

from shardwright.errors import UserError
from shardwright.spec.optimizer import SGD, Adam, RowWiseAdaGrad
from shardwright.spec.workload import Block, Feature, FeatureStatistics, Table, Workload

WORKLOAD = Workload(
    version=1,
    batch_size=8,
    tables=(Table("user", 100, 4), Table("item", 10, 2, "float16")),
    features=(Feature("viewer", "user"), Feature("author", "user", "mean"), Feature("seen", "item", "none")),
    statistics=(FeatureStatistics("seen", 3.5, 0.25),),
    optimizer=RowWiseAdaGrad(0.1),
    blocks=(Block("bottom", 20, 80, 320, 640, 64), Block("top", 5, 20, 80, 160, 16)),
)


def test_sizes():
    WORKLOAD.verify()
    assert WORKLOAD.table_bytes == 100 * 4 * 4 + 10 * 2 * 2
    assert WORKLOAD.state_bytes == (100 + 10) * 4
    assert replace(WORKLOAD, optimizer=Adam(0.1)).state_bytes == 2 * (100 * 4 + 10 * 2) * 4
    assert replace(WORKLOAD, optimizer=None).state_bytes == 0
    assert replace(WORKLOAD, tables=(Table("user", 3, 2, "float64"),)).state_bytes == 3 * 8
    assert (WORKLOAD.dense_parameters, WORKLOAD.dense_bytes) == (25, 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "workload: batch_size is 0; wanted more than 0"),
        (
            {"tables": (*WORKLOAD.tables, Table("user", 1, 1))},
            'table "user" appears 2 times; names must differ',
        ),
        (
            {"tables": (Table("user", 0, 4), WORKLOAD.tables[1])},
            'table "user": rows is 0; wanted more than 0',
        ),
        (
            {"tables": (Table("user", 1, -4), WORKLOAD.tables[1])},
            'table "user": dim is -4; wanted more than 0',
        ),
        (
            {"tables": (Table("user", 1, 4, init=-0.1), WORKLOAD.tables[1])},
            'table "user": init is -0.1; wanted 0 or more',
        ),
        ({"features": (*WORKLOAD.features, WORKLOAD.features[0])}, 'feature "viewer" appears 2 times'),
        (
            {"features": (*WORKLOAD.features, Feature("x", "usr"))},
            'feature "x" reads unknown table "usr"; did you mean "user"?',
        ),
        (
            {"statistics": (FeatureStatistics("sen", 1, 1),)},
            'statistics of feature "sen": unknown feature; did you mean "seen"?',
        ),
        ({"statistics": WORKLOAD.statistics * 2}, 'statistics of feature "seen" appears 2 times'),
        ({"statistics": (FeatureStatistics("seen", -1, 1),)}, "ids_per_sample is -1; wanted 0 or more"),
        (
            {"statistics": (FeatureStatistics("seen", 1, 0),)},
            "distinct_share is 0; wanted more than 0, at most 1",
        ),
        ({"optimizer": SGD(-1)}, "sparse optimizer sgd: lr is -1; wanted 0 or more"),
        ({"blocks": WORKLOAD.blocks[:1] * 2}, 'block "bottom" appears 2 times; names must differ'),
        ({"blocks": (Block("b", 1, 1, -1, 1, 1),)}, 'block "b": forward_flops is -1; wanted 0 or more'),
    ],
)
def test_errors_in_workloads(change, message):
    with pytest.raises(UserError) as caught:
        replace(WORKLOAD, **change).verify()
    assert message in str(caught.value)


def test_all_errors_are_reported_at_once_up_to_a_limit():
    with pytest.raises(UserError) as caught:
        replace(WORKLOAD, batch_size=0, optimizer=SGD(-1)).verify()
    assert str(caught.value).count(";") == 3
    with pytest.raises(UserError, match="; and 980 more$"):
        replace(WORKLOAD, tables=WORKLOAD.tables + tuple(Table(f"t{i}", 0, 1) for i in range(1000))).verify()
