"""The staleness frontier of a plan: predicted steps by bound, beside the change of AUC measured on another model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_planner import make_cluster
from test_staleness import RANKS, skewed_workload, slow_cluster

from shardwright.planner import frontier
from shardwright.planner.pins import TableRequest
from shardwright.planner.plan import make_plan
from shardwright.planner.problem import ServerRequest
from shardwright.planner.step import prediction
from shardwright.report import communication
from shardwright.report import plan as plan_page
from shardwright.report.staleness_frontier import NOT_WORTH_IT, describe_frontier
from shardwright.report.staleness_quality import read_quality
from shardwright.spec.plan import Bounded

ROOT = Path(__file__).parents[2]


def test_quality_is_that_of_the_results_file():
    quality = read_quality()
    lines = [json.loads(line) for line in (ROOT / quality.source).read_text().splitlines()]
    (taken,), rows = [line["taken"] for line in lines if "taken" in line], [line for line in lines if "mode" in line]
    by_mode = {row["mode"]: row for row in rows}
    synchronous = by_mode["synchronous"]
    assert taken["commit"].startswith(quality.commit) and synchronous["simulated"].startswith(
        f"{quality.workers} workers"
    )
    assert (synchronous["model"], synchronous["steps"]) == ("het_wide_deep", quality.steps)
    assert quality.auc == round(synchronous["auc"], 4)
    for change in quality.changes:
        assert change.points == by_mode[f"bounded {change.bound}"]["auc_change"]


def test_changes_are_for_measured_bounds_only():
    quality = read_quality()
    assert quality.change(Bounded(100, 100, 64)) == "-0.04" and quality.change(Bounded(10, 10)) == "0.00"
    assert quality.change(Bounded(100, 99)) == "" == quality.change(Bounded(7, 7))


@pytest.mark.parametrize("allow", ((), ("staleness<=300",)))
def test_more_staleness_is_faster_on_slow_links(allow):
    result = make_plan(skewed_workload(), slow_cluster(1e6), allow=allow)
    assert result.staleness is not None
    points = frontier.frontier(result.staleness, result.candidate)
    missed = [point.max_missed for point in points]
    assert missed == sorted(missed) and {0, RANKS * 10, RANKS * 100} <= {*missed}
    seconds = [point.candidate.seconds for point in points]
    assert seconds[-1] < 0.95 * seconds[0]
    assert [point.candidate is result.candidate for point in points].count(True) == 1
    assert points[-1].has_copies and not points[0].has_copies
    section = describe_frontier(result)
    ((_, grid),) = section.grids
    assert grid.rows[0][0] == ("exact" if allow else "exact (chosen)") and grid.rows[0][-1] == ""
    assert [row[-1] for row in grid.rows if row[0] == "100, 100"] == ["-0.04"]
    assert "not a prediction for yours" in section.notes[0] and "20,000 steps" in section.notes[0]
    assert any("(chosen)" in row[0] for row in grid.rows)


def test_the_page_of_a_plan_draws_it(tmp_path):
    result = make_plan(skewed_workload(), slow_cluster(1e6))
    section = describe_frontier(result)
    page = plan_page.render(result, tmp_path / "plan.html", stale=section).read_text()
    assert "What staleness would buy" in page and "AUC -0.04" in page
    step, waits = section.figures[0].data
    assert len(step["x"]) == 3 == len(waits["y"]) and max(waits["y"]) < max(step["y"])


def test_fast_links_pipelines_and_one_rank_have_none():
    workload = skewed_workload()
    fast = describe_frontier(make_plan(workload, slow_cluster(1e12)))
    assert fast.notes == (NOT_WORTH_IT,) and not fast.grids and not fast.figures
    assert make_plan(workload, make_cluster(1, rate=1e9)).staleness is None
    half = replace(workload, tables=tuple(replace(table, dtype="float16") for table in workload.tables))
    assert describe_frontier(make_plan(half, slow_cluster(1e6))).notes == ()


def test_servers_that_own_rows_have_a_frontier():
    result = make_plan(skewed_workload(), slow_cluster(1e6), tables=TableRequest(servers=ServerRequest(1, own=True)))
    assert result.staleness is not None
    points = frontier.frontier(result.staleness, result.candidate)
    assert [point.sync.push for point in points] == [0, 10, 100] and points[1].has_copies
    assert points[1].candidate.seconds < points[0].candidate.seconds
    steps = [frontier.predict_step(point, result.candidate) for point in points]
    sent = [{part.kind: part.bytes_ for part in step.traffic} for step in steps]
    assert sent[0]["rows and leases from servers"] > sent[2]["rows and leases from servers"] > 0
    assert "table servers" in describe_frontier(result).notes[0]


def test_waits_are_those_of_the_predicted_timeline():
    candidate = make_plan(skewed_workload(), slow_cluster(1e6)).candidate
    timeline = prediction.predict_timeline(candidate.problem, candidate.placed, candidate.loads, candidate.ids_after)
    waits = communication.predicted_waits(timeline)
    assert prediction.message_wait_seconds(timeline) == pytest.approx(waits.messages, rel=0.02)
