"""Sharding schemes of other packages: registration, planning, prices and entry points."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from test_planner import make_cluster, make_workload

from shardwright.embeddings.layout import build_layout
from shardwright.errors import UserError
from shardwright.planner import reprice, search
from shardwright.planner.plan import make_plan
from shardwright.planner.step import traffic
from shardwright.planner.tables import schemes
from shardwright.planner.tables.schemes import Scheme, SearchPosition
from shardwright.planner.tables.sharding import Sharding, rows_on_ranks
from shardwright.spec import files
from shardwright.spec.plan import Plan

DIM, BATCH = 64, 512
VECTOR_BYTES = 4 * BATCH * DIM  # of the vectors of a global batch


def first_ranks(num: int, search: SearchPosition | None = None) -> Scheme:
    """Row-wise over the first `num` ranks of each host."""

    def shardings(table_load, cluster):
        ranks = [rank for rank in range(cluster.num_ranks) if rank % cluster.levels[0].num < num]
        yield rows_on_ranks("first-ranks", ranks, cluster)

    return Scheme("first-ranks", shardings, lambda *_: f"rows over {num} ranks of each host", search)


@pytest.fixture
def register(monkeypatch):
    """Register schemes for one test."""
    registered = dict(schemes.all_schemes())
    monkeypatch.setattr(schemes, "_registered", lambda: registered)
    return schemes.register_scheme


@pytest.mark.parametrize("num, ranks", [(1, (0, 4)), (2, (0, 1, 4, 5)), (4, tuple(range(8)))])
def test_a_pinned_table_has_its_rows_on_the_schemes_ranks(register, num, ranks):
    register(first_ranks(num))
    workload = make_workload((1000, DIM, 5.0), (500, DIM, 1.0))
    result = make_plan(workload, make_cluster(4, 2), pins={"t0": "first-ranks"})
    result.plan.verify(workload)
    table = result.plan.tables[0]
    assert table.scheme == "first-ranks" and sorted(rect.ranks for rect in table.rects) == [(rank,) for rank in ranks]
    assert [rect.rows[1] - rect.rows[0] for rect in table.rects] == [1000 // len(ranks)] * len(ranks)
    assert reprice.reprice_plan(result.candidate.problem, result.plan).seconds == pytest.approx(
        result.candidate.seconds
    )


def test_a_scheme_over_all_ranks_costs_as_much_as_row_wise(register):
    register(first_ranks(4))
    workload = make_workload((1000, DIM, 5.0))
    results = [make_plan(workload, make_cluster(4, 2), pins={"t0": pin}) for pin in ("first-ranks", "row")]
    assert results[0].candidate.seconds == pytest.approx(results[1].candidate.seconds)


@pytest.mark.parametrize("num", (1, 2, 3))
def test_predicted_messages_equal_those_of_the_layout(register, num):
    """Partial sums are reduced in a host if several of its ranks hold rows, else sent directly."""
    register(first_ranks(num))
    workload = make_workload((1000, DIM, 5.0))
    result = make_plan(workload, make_cluster(4, 2), pins={"t0": "first-ranks"})
    candidate = result.candidate
    host_RR, rest_RR = traffic.vector_hops(candidate.problem, candidate.placed, "float32", backward=False)
    layout = build_layout(
        workload.tables, workload.features, {table.table: table for table in result.plan.tables}, 8, ranks_per_host=4
    )
    sources_RR = np.zeros((8, 8))
    for client in range(8):
        for rank, _, group in layout.response_sources(client):
            sources_RR[rank, client] += 4 * BATCH / 8 * group.width
    contributors_RR = np.zeros((8, 8))
    for rank, host_reduce in enumerate(layout.host_reduces):
        for contributor, _ in host_reduce.contributors if host_reduce else ():
            contributors_RR[contributor, rank] += VECTOR_BYTES / 4
    assert rest_RR == pytest.approx(sources_RR) and host_RR == pytest.approx(contributors_RR)
    assert rest_RR.sum() == 2 * VECTOR_BYTES and host_RR.sum() == (0 if num == 1 else 2 * num * VECTOR_BYTES)
    assert candidate.loads.reduces_in_host == (num > 1)


def test_a_scheme_with_a_search_position_is_tried_without_a_pin(register):
    register(first_ranks(2, SearchPosition(-1, -1, -1)))
    workload = make_workload((1000, DIM, 5.0))
    for torchrec in (False, True):
        problem = make_plan(workload, make_cluster(4, 2), torchrec=torchrec).candidate.problem
        shardings = search._shardings_in_order(problem, 0, search.Proposal(), has_replicas=False)
        assert (shardings[0].scheme == "first-ranks") != torchrec and shardings[-1].scheme == "row"


def test_errors_in_schemes_and_pins(register):
    register(first_ranks(2))
    workload = make_workload((1000, DIM, 5.0))
    with pytest.raises(UserError, match='"first-ranks" is already defined; choose another name'):
        register(first_ranks(1))
    with pytest.raises(UserError, match='no scheme "first-rank"; did you mean "first-ranks"'):
        make_plan(workload, make_cluster(4, 2), pins={"t0": "first-rank"})
    with pytest.raises(UserError, match="pinned to first-ranks, which TorchRec does not have: pin it to one of table"):
        make_plan(workload, make_cluster(4, 2), pins={"t0": "first-ranks"}, torchrec=True)
    with pytest.raises(UserError, match=r"pinned to \(0, 1, 2, 3\); its rows are split over ranks \(0, 1, 4, 5\)"):
        make_plan(workload, make_cluster(4, 2), pins={"t0": "first-ranks@0,1,2,3"})


def test_plans_of_version_1_have_no_schemes(tmp_path):
    workload = make_workload((1000, DIM, 5.0), (500, DIM, 1.0))
    result = make_plan(workload, make_cluster(4, 2), pins={"t0": "row", "t1": "column:2"})
    data: Any = files.to_plain(result.plan) | {"version": 1}
    for table in data["tables"]:
        assert table.pop("scheme")
    plan = files.from_plain(Plan, data, "plan")
    plan.verify(workload)
    assert [table.scheme for table in plan.tables] == ["", ""]
    assert reprice.reprice_plan(result.candidate.problem, plan).seconds == pytest.approx(result.candidate.seconds)


def test_every_built_in_scheme_names_its_shardings():
    load = make_plan(make_workload((1000, 128, 5.0)), make_cluster(2, 2)).candidate.problem.table_loads[0]
    for scheme in schemes.BUILT_IN:
        shardings = list(scheme.shardings(load, make_cluster(2, 2)))
        assert shardings and all(sharding.scheme == scheme.name for sharding in shardings)
        assert all(isinstance(sharding, Sharding) and scheme.describe(sharding, load) for sharding in shardings)


@pytest.mark.parametrize("name, message", [("first-ranks", "first-ranks"), ("row", "its name is taken")])
def test_installed_packages_add_schemes(tmp_path, name, message):
    (tmp_path / "my_schemes.py").write_text(
        "from shardwright.planner.tables.schemes import Scheme\n"
        f"MINE = Scheme({name!r}, lambda load, cluster: iter(()), lambda sharding, load: '')\n"
    )
    info = tmp_path / "my_schemes-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: my-schemes\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[shardwright.schemes]\nmine = my_schemes:MINE\n")
    code = "from shardwright.planner.tables.schemes import all_schemes; print(list(all_schemes()))"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert message in result.stdout + result.stderr
