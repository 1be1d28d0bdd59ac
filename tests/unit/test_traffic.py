"""Bytes of a step by kind and link: names of kinds, closed forms of the prediction, and the section of a run's page."""

from dataclasses import replace

import numpy as np
import pytest
from test_planner import make_cluster, make_workload
from test_staleness import RANKS, skewed_workload, slow_cluster
from test_table_pages import write_run

from shardwright.comm.sent_bytes import REPLY, SERVER_LANE, SentBytes
from shardwright.planner import frontier
from shardwright.planner.plan import make_plan
from shardwright.planner.step import traffic as step_traffic
from shardwright.planner.step.message_bytes import bytes_by_kind
from shardwright.report import render
from shardwright.report.run_record import read_record
from shardwright.report.traffic_page import describe_traffic, mean_bytes
from shardwright.runtime.run.traffic_recorder import kind_of
from shardwright.spec import files, lanes, traffic
from shardwright.spec.traffic import BETWEEN_HOSTS, IN_HOST, PREDICTED_FILE, TO_SERVERS, TrafficWindow
from shardwright.spec.wire import REQUEST_HEADER_BYTES


def test_kinds_follow_lanes_and_stages():
    assert kind_of((lanes.DENSE, "backward", IN_HOST)) == traffic.DENSE == kind_of((lanes.GATHER, "forward", IN_HOST))
    assert kind_of((lanes.IDS, "renew", IN_HOST)) == traffic.VERSIONS
    assert kind_of((lanes.WIRE, "vectors", IN_HOST)) == traffic.VECTORS
    assert kind_of((lanes.WIRE, "backward", IN_HOST)) == traffic.GRADIENTS
    assert kind_of((SERVER_LANE, REPLY + "read", TO_SERVERS)) == traffic.ANSWERS
    for lane in (lanes.WIRE, lanes.GATHER, SERVER_LANE):
        assert not kind_of((lane, "metrics", IN_HOST))  # an evaluation
    assert not kind_of((lanes.MAIN, "read", IN_HOST)) and not kind_of((SERVER_LANE, "open", TO_SERVERS))


def test_counts_know_the_ranks_of_their_host():
    sent = SentBytes()
    sent.set_host(2, (), 2)  # ranks 2 and 3
    sent.stage = "vectors"
    sent.add(lanes.WIRE, 3, 10)
    sent.add(lanes.WIRE, 1, 5)
    sent.add_to_next(lanes.WIRE, (2, 3, 0), 1, 7)
    sent.set_host(2, ((0, 2), (1, 3)), 2)
    sent.add(lanes.WIRE, 0, 1)
    key = lanes.WIRE, "vectors"
    assert sent.totals() == {(*key, IN_HOST): 11, (*key, BETWEEN_HOSTS): 12}


@pytest.mark.parametrize("cluster", (make_cluster(4, rate=1e9), make_cluster(2, 2, rate=1e9)))
def test_predicted_kinds_add_up_to_the_bytes_of_the_step(cluster):
    workload = make_workload((5000, 32, 3.0), (300, 16, 1.0), (70, 16, 1.0))
    candidate = make_plan(workload, cluster).candidate
    parts = bytes_by_kind(candidate.problem, candidate.placed, candidate.loads)
    total_RR = step_traffic.step_traffic(candidate.problem, candidate.placed) + REQUEST_HEADER_BYTES
    np.fill_diagonal(total_RR, 0.0)
    assert sum(part.bytes_ for part in parts) == pytest.approx(total_RR.sum(), abs=len(parts))
    hosts = np.arange(4) // cluster.ranks_per_host
    inside = total_RR[hosts[:, None] == hosts].sum()
    assert sum(part.bytes_ for part in parts if part.link == IN_HOST) == pytest.approx(inside, abs=len(parts))


def test_copies_send_rows_and_push_updates():
    """The bytes of both directions are those that the planner prices, half each way."""
    candidate = make_plan(skewed_workload(), slow_cluster(1e6), allow=("staleness<=300",)).candidate
    by_kind = {part.kind: part.bytes_ for part in bytes_by_kind(candidate.problem, candidate.placed, candidate.loads)}
    priced = sum(
        sum(step_traffic.vector_hops(candidate.problem, candidate.placed, "float32", backward=backward))
        for backward in (False, True)
    )
    np.fill_diagonal(priced, 0.0)
    assert by_kind[traffic.VECTORS] + by_kind[traffic.GRADIENTS] == pytest.approx(priced.sum(), rel=1e-3)
    assert by_kind[traffic.VECTORS] < by_kind[traffic.GRADIENTS]  # most rows are renewed, and not sent
    assert by_kind[traffic.IDS] == REQUEST_HEADER_BYTES * RANKS * (RANKS - 1) and by_kind[traffic.VERSIONS] > 0


def window(step: int, kind: str, bytes_: int, link: str = IN_HOST) -> TrafficWindow:
    return TrafficWindow(step, 10, kind, link, bytes_)


def test_the_page_shows_bytes_measured_and_predicted_exact_and_bounded(tmp_path):
    workload = skewed_workload()
    result = make_plan(workload, slow_cluster(1e6), allow=("staleness<=300",))
    windows = [window(step, traffic.VECTORS, 10_000 * step) for step in (10, 20, 30, 40)]
    windows += [window(step, traffic.DENSE, 5_000_000, BETWEEN_HOSTS) for step in (10, 20, 30, 40)]
    write_run(tmp_path, result.plan, workload, traffic=windows)
    files.write(frontier.predict_steps(result.staleness, result.candidate), tmp_path / PREDICTED_FILE)
    run = read_record(tmp_path)
    assert mean_bytes(run.traffic) == {(traffic.VECTORS, IN_HOST): 35_000, (traffic.DENSE, BETWEEN_HOSTS): 500_000}
    section = describe_traffic(run)
    assert section is not None and section.steps is not None
    assert "Measured: 535 kB, of it 500 kB between hosts" in section.text
    names = section.kinds.columns[2:]
    assert names[0] == "measured" and {names[1].split(",")[0], names[2].split(",")[0]} == {"predicted"}
    row = next(row for row in section.kinds.rows if row[:2] == (traffic.VECTORS, IN_HOST))
    assert row[2] == "35 kB"
    exact, chosen = section.steps.rows
    assert "(chosen)" in chosen[0] and exact[0] == "exact" and float(chosen[3]) > 1.05 and exact[3] == "1.00"
    page = render(tmp_path).read_text()
    assert "Messages of a step" in page and "Exact and stale steps" in page


def test_runs_without_records_have_no_section(tmp_path):
    workload = skewed_workload()
    assert describe_traffic(write_run(tmp_path, make_plan(workload, slow_cluster(1e9)).plan, workload)) is None


def test_several_batches_of_a_step_are_not_predicted():
    result = make_plan(skewed_workload(), slow_cluster(1e6))
    candidate = replace(result.candidate, problem=replace(result.candidate.problem, accumulate=2))
    (step,) = frontier.predict_steps(None, candidate).steps
    assert step.is_chosen and not step.traffic and step.seconds == candidate.seconds
