"""Bounded staleness in the planner: which bounds, and how many rows ranks then exchange; and on the page of a run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_planner import make_cluster, make_workload
from test_row_copies import Twin

from shardwright.errors import UserError
from shardwright.planner import reprice, search, staleness
from shardwright.planner.plan import exact_precision, make_plan
from shardwright.planner.tables.sharding import TableLoad
from shardwright.report import render
from shardwright.runtime.placements import allow_staleness
from shardwright.spec import files
from shardwright.spec.cache_record import COPIES_FILE, CopyWindow
from shardwright.spec.optimizer import SGD
from shardwright.spec.plan import Bounded
from shardwright.spec.workload import Table

ROWS, RANKS = 20_000, 4


def skewed_workload():
    """Popular rows: a batch reads each of them many times."""
    workload = make_workload((ROWS, 256, 8.0), (ROWS, 256, 8.0))
    shares = np.cumsum(np.arange(1, ROWS + 1) ** -1.2)
    counts = np.unique(np.geomspace(1, ROWS - 1, 60).astype(int))
    popularity = tuple((int(k), float(shares[k - 1] / shares[-1])) for k in counts)
    statistics = tuple(
        replace(entry, popularity=popularity, distinct_share=0.4, distinct=((workload.batch_size, 0.4),))
        for entry in workload.statistics
    )
    return replace(workload, statistics=statistics)


def slow_cluster(bandwidth: float):
    return make_cluster(RANKS, rate=bandwidth)


@pytest.mark.parametrize("entry, most", (("staleness<=100", 100), ("staleness<=7", 7), ("staleness<=inf", 1 << 20)))
def test_bounds_use_what_is_allowed(entry, most):
    bounds = staleness.allowed_bounds((entry,), RANKS)
    assert bounds and all(sync.max_missed(RANKS) == most for sync in bounds)
    assert staleness.allowed_bounds((), RANKS) == [] == staleness.allowed_bounds((entry,), 1)


def test_shares_are_those_of_a_simulated_stream():
    """Ids are drawn independently from a power law; ranks have copies of a quarter of the rows."""
    rows, samples, steps = 2000, 150, 500
    weights = np.arange(1, rows + 1) ** -1.1
    shares = np.cumsum(weights) / weights.sum()
    points = np.unique(np.geomspace(1, rows - 1, 60).astype(int))
    load = TableLoad(Table("t", rows, 4), popularity=tuple((int(k), float(shares[k - 1])) for k in points))
    generator = np.random.default_rng(0)
    for sync in (Bounded(20, 5, 512), Bounded(100, 30, 512), Bounded(60, 20, 2048)):
        twin, read, pushed = Twin(RANKS, sync.copies, sync, SGD(1.0), 4, rows), 0, 0
        for step in range(steps):
            ids = [np.searchsorted(shares, generator.random(samples)) for _ in range(RANKS)]
            distinct, uses = zip(*(np.unique(own, return_counts=True) for own in ids), strict=True)
            batches, uses = list(map(torch.from_numpy, distinct)), iter(map(torch.from_numpy, uses))
            if step == steps // 2:
                read = pushed = twin.num_expired = twin.num_refreshed = 0
            counted = twin.num_pushed
            twin.run(
                [batches],
                lambda rank, step, rows: torch.zeros(len(rows), 4, dtype=torch.float64),
                lambda *_: None,
                step,
                lambda rows, uses=uses: next(uses),
            )
            read, pushed = read + sum(map(len, batches)), pushed + twin.num_pushed - counted
        num_rows, expected = staleness.exchanged_shares(load, sync, RANKS, samples)
        assert num_rows == pytest.approx(read / (RANKS * (steps - steps // 2)), rel=0.02)
        measured = twin.num_expired / read, twin.num_refreshed / read, pushed / read
        assert expected == pytest.approx(measured, abs=0.1), sync


def test_copies_on_slow_links_and_exact_training_on_fast_ones():
    workload = skewed_workload()
    slow = make_plan(workload, slow_cluster(1e6), allow=("staleness<=300",))
    slow.plan.verify(workload)
    exact = make_plan(workload, slow_cluster(1e6))
    assert slow.candidate.seconds < 0.95 * exact.candidate.seconds
    copied = [table for table in slow.plan.tables if isinstance(table.placement.sync, Bounded)]
    assert copied and all(table.placement.sync.max_missed(RANKS) == 300 for table in copied)
    assert any(stage.name == "validate" for stage in slow.plan.stages)
    assert "ranks read" in dict(slow.plan.why)["staleness"]
    assert "staleness" not in dict(exact.plan.why)
    fast = make_plan(workload, slow_cluster(1e12), allow=("staleness<=300",))
    assert all(table.placement.sync.kind == "exact" for table in fast.plan.tables)
    problem = search.define_problem(workload, slow_cluster(1e6), workload.batch_size, exact_precision(workload))
    assert reprice.reprice_plan(problem, slow.plan).seconds == pytest.approx(slow.candidate.seconds, rel=1e-6)


def test_more_staleness_is_never_slower():
    workload, cluster = skewed_workload(), slow_cluster(1e6)
    times = [
        make_plan(workload, cluster, allow=(f"staleness<={bound}",)).candidate.seconds for bound in (0, 10, 100, 1000)
    ]
    assert times == sorted(times, reverse=True)


def test_keep_copies_names_unknown_tables_and_what_a_plan_lacks():
    workload = skewed_workload()
    plan = make_plan(workload, slow_cluster(1e6), pins={"t0": "row", "t1": "row"}).plan
    with pytest.raises(UserError, match='no table "t9"'):
        allow_staleness(plan, {"t9": Bounded(1, 1, 64)})
    kept = allow_staleness(plan, {"t0": Bounded(10, 2, 64)})
    kept.verify(workload)
    assert "staleness<=16" in kept.allow and allow_staleness(kept, {"t0": Bounded(9, 2, 64)}).allow == kept.allow
    with pytest.raises(UserError, match="copies=16; wanted 32"):
        allow_staleness(plan, {"t0": Bounded(10, 2, 16)}).verify(workload)


def test_the_page_of_a_run_shows_copies(tmp_path):
    workload = skewed_workload()
    plan = allow_staleness(
        make_plan(workload, slow_cluster(1e6), pins={"t0": "row", "t1": "row"}).plan,
        {"t0": Bounded(10, 2, 4096), "t1": Bounded(10, 2, 64)},
    )
    (tmp_path / "config.toml").write_text("")
    files.write(plan, tmp_path / "plan.json")
    files.write(workload, tmp_path / "workload.json")
    windows = [CopyWindow(10 * k, 10, "t0, t1", 1000, 400, 100, 300, (50, 30, 20, *[0] * 30)) for k in range(1, 5)]
    (tmp_path / COPIES_FILE).write_text("".join(window.to_line() for window in windows))
    page = render(tmp_path).read_text()
    assert "Tables with bounded staleness" in page and "t0 and 1 more" in page
    assert "40.0" in page and "10.0" in page and "30.0" in page
