"""Experts on the page of a run: numbers of made-up routing, worked by hand."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_report import CHROMIUM, assert_runs

from shardwright.errors import UserError
from shardwright.planner.expert_assignment import ExpertLayer
from shardwright.planner.experts import choose_copies
from shardwright.report import render
from shardwright.report.expert_loads import bytes_between, read_calls
from shardwright.report.expert_roofline import MEASURED, measured_seconds, price_strategies
from shardwright.report.experts_page import MAX_STEPS
from shardwright.spec import files
from shardwright.spec.axes import Axis
from shardwright.spec.plan import ExpertCosts, ExpertPlan, Plan, single_rank_plan
from shardwright.spec.routing import RoutedRows
from shardwright.spec.timeline import Event, Timeline
from shardwright.spec.workload import Block, Mixture, Workload

COSTS = ExpertCosts(compute_row=2e-6, send_row=1e-6, send_expert=50e-6)
AXES = (Axis("data", "host", 2), Axis("data", "local", 2))
MIX = "blocks.0.mlp"
# Rows of four experts on four ranks: 100 each, 40 an expert if even on each pair of ranks.
UNEVEN = ((70, 10, 10, 10), (70, 10, 10, 10), (25, 25, 25, 25), (25, 25, 25, 25))
# Ranks 0 and 1 share the experts, as do 2 and 3. Rank 0 owns experts 0 and 1; rank 1 takes 60 rows of expert 0.
COMPUTED = ((80, 20, 0, 0), (60, 0, 20, 20), (50, 50, 0, 0), (0, 0, 50, 50))


def made_up_workload(modules: Sequence[str] = (MIX,)) -> Workload:
    experts = Block("experts", 4 * 1000, 4 * 4000, forward_flops=400 * 2000, backward_flops=1, activation_bytes=1)
    mixtures = tuple(
        Mixture(name, "block", 4, 400, row_bytes=100, result_bytes=60, experts=experts) for name in modules
    )
    return Workload(1, 8, (), (), (), None, (Block("block", 1, 4, 1, 1, 1),), mixtures)


def made_up_plan(workload: Workload, **changes) -> Plan:
    experts = tuple(ExpertPlan(m.module, ("data@local",), 2, "even", COSTS) for m in workload.experts)
    plan = replace(single_rank_plan(workload, stages=()), axes=AXES, experts=experts)
    return replace(plan, **changes)


def made_up_records(num_steps: int = 3, modules: Sequence[str] = (MIX,)) -> list[RoutedRows]:
    return [RoutedRows(20 * n, name, UNEVEN, COMPUTED, dropped=8) for n in range(1, num_steps + 1) for name in modules]


def write_run(folder: Path, plan: Plan | None, records: Sequence[RoutedRows], workload: Workload) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text('recipe = "made-up"\n')
    files.write(workload, folder / "workload.json")
    if plan is not None:
        files.write(plan, folder / "plan.json")
    (folder / "routing.jsonl").write_text("".join(record.to_line() for record in records))
    return folder


@pytest.fixture
def split_run(tmp_path: Path) -> Path:
    workload = made_up_workload()
    return write_run(tmp_path / "run", made_up_plan(workload), made_up_records(), workload)


def page_of(run: Path) -> tuple[str, dict]:
    """The section about experts as text, and the figures of the page."""
    page = render(run).read_text()
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    assert match
    section = page.partition("<h2>Experts</h2>")[2].partition("</section>")[0]
    return re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", section)), json.loads(match[1])


def test_loads_and_imbalances_before_and_after_copies(split_run: Path):
    text, figures = page_of(split_run)
    (loads,) = figures["expert_loads"]["data"]
    assert loads["x"] == [20, 40, 60]
    assert [row[0] for row in loads["text"]] == ["1.90", "0.70", "0.70", "0.70"]  # of 400 rows, 190, 70, 70, 70
    assert loads["z"][0][0] == pytest.approx(np.log2(1.9))
    expert, before, after = figures["expert_imbalance"]["data"]
    assert expert["y"] == pytest.approx([1.9] * 3)
    assert before["y"] == pytest.approx([160 / 100] * 3)  # rank 0 owns 140 + 20 of 400 rows, 100 a rank
    assert after["y"] == pytest.approx([1.0] * 3)
    assert figures["expert_copies"]["data"][0]["y"] == [1.0] * 3
    assert figures["expert_drops"]["data"][0]["y"] == pytest.approx([8 / 408] * 3)
    assert (
        "1 mixture of 4 experts, 3 steps recorded. They are split over the ranks along data@local; rows travel in 2"
        in text
    )
    assert f"{MIX} 400 1.90 1.60 1.00 1.0 2.0%" in text


def test_bytes_of_rows_and_copies(split_run: Path):
    (call,) = read_calls(made_up_records(1), made_up_plan(made_up_workload()))[MIX]
    (first, rows, copies), (second, other_rows, other_copies) = bytes_between(call, made_up_workload().experts[0])
    assert first == (0, 1) and second == (2, 3)
    # Ranges of expert 0's rows: rank 1's 70, then rank 0's 70; rank 1 computes the first 60, rank 0 the rest: 10 of
    # rank 1's rows and 10 of its expert 1 travel to rank 0, and 20 of rank 0's, of experts 2 and 3, to rank 1.
    assert rows.tolist() == [[0, (20 + 20) * 160], [(20 + 20) * 160, 0]]
    assert copies.tolist() == [[0, 4000], [4000, 0]]  # weights there, gradients back
    assert other_rows.tolist() == [[0, 100 * 160], [100 * 160, 0]] and not other_copies.any()
    text, _ = page_of(split_run)
    total = (2 * 40 + 2 * 100) * 160
    assert f"inside a host {total / 1e6:.2f} {8000 / 1e6:.2f} {(total + 8000) / 1e6:.2f}" in text
    assert "between hosts" not in text


def test_share_of_even_routing_is_predicted_from_the_costs(split_run: Path):
    (call,) = read_calls(made_up_records(1), made_up_plan(made_up_workload()))[MIX]
    # Both groups compute 100 rows a rank. The first sends 20 and a copy, the second 50, as even routing does.
    messages = [4 * 20 * 1e-6 + 2 * 50e-6, 4 * 50 * 1e-6]
    assert [each.exchange_seconds + each.copy_seconds for each in call.assignments] == pytest.approx(messages)
    # The 60 rows of the copy are computed once it has arrived, with the messages of 40 rows; the results of 20 rows
    # follow. The second group computes its 100 rows, then results of 50 follow.
    forward = 100 * 2e-6
    copied, even = (each.stepped_seconds for each in call.assignments)
    assert copied == pytest.approx((40e-6 + 50e-6 + 60 * 2e-6 + 20e-6) + 2 * forward)
    assert even == pytest.approx((forward + 50e-6) + 2 * forward)
    assert call.seconds(call.assignments) == even and call.ideal_share == pytest.approx(1.0)
    plain = replace(call.record, computed=((140, 20, 0, 0), (0, 0, 20, 20), *COMPUTED[2:]))
    (call,) = read_calls([plain], made_up_plan(made_up_workload()))[MIX]
    assert call.ideal_share == pytest.approx((250 + 400) / (320 + 80 + 640))  # 160 rows, 80 of them received
    assert "share of even routing, predicted" in page_of(split_run)[0]


def test_tokens_by_hosts_show_loads_but_no_bytes_and_no_predictions(tmp_path: Path):
    workload = made_up_workload()
    plan = made_up_plan(workload)
    experts = tuple(replace(e, axes=("data@host", "data@local"), exchange="hosts") for e in plan.experts)
    folder = write_run(tmp_path / "run", replace(plan, experts=experts), made_up_records(), workload)
    text, figures = page_of(folder)
    assert "a token goes to each group along data@host once" in text and "MB of rows" not in text
    assert {"expert_loads", "expert_imbalance"} <= set(figures) and "expert_roofline" not in figures


def test_points_of_the_roofline(split_run: Path):
    workload = made_up_workload()
    calls, mixtures = read_calls(made_up_records(), made_up_plan(workload)), {m.module: m for m in workload.experts}
    roofline = price_strategies(calls, mixtures, None)
    assert roofline is not None and MEASURED not in roofline.points
    assert roofline.peak == pytest.approx(2000 / 2e-6)  # FLOPs of a row over its seconds
    points = roofline.points
    assert points["data parallel"].ratio == pytest.approx(3 * 100 * 2e-6 / (2 * 0.5 * 4 * 50e-6))
    assert points["model parallel (simulated)"].ratio == pytest.approx(3 * 100 * 2e-6 / (4 * 1 * 100 * 1e-6))
    for name in ("data parallel", "model parallel (simulated)"):  # evenly loaded, nothing overlapped: on the curve
        ratio = points[name].ratio
        assert points[name].rate == pytest.approx(roofline.peak * ratio / (ratio + 1)), name
    # Plain expert parallelism: rank 0 computes 160 rows, and receives 80.
    plain = points["expert parallel"]
    assert plain.seconds == pytest.approx(3 * (3 * 160 * 2e-6 + 3 * 80 * 1e-6))
    assert plain.rate == pytest.approx(100 * 3 * 2000 / (3 * 160 * 2e-6 + 3 * 80 * 1e-6))
    best = choose_copies(ExpertLayer((0, 0, 1, 1), COSTS), np.array(UNEVEN[:2]), in_steps=True)
    assert points["ours"].seconds == pytest.approx(3 * max(best.stepped_seconds, 650e-6))
    ideal = {name: roofline.peak * min(1, point.ratio) for name, point in points.items()}
    assert all(point.rate <= ideal[name] * (1 + 1e-9) for name, point in points.items())
    assert {"steps", "shadows", "shadows, steps"} < set(points)
    names = [trace["name"] for trace in page_of(split_run)[1]["expert_roofline"]["data"]]
    assert names == ["ideal: all communication overlapped", "semi-ideal: none overlapped", *points]


def calls_of_a_step(step: int, start: float, seconds: float) -> list[Event]:
    """Two calls of a mixture, forward and backward, each with two messages there and back."""
    events: list[Event] = []
    for call in range(2):
        begin = start + 2 * call * seconds
        for kind, name, first, last in (
            ("flight", "send", 0.0, 0.3),
            ("flight", "send", 0.1, 0.4),
            ("flight", "return", 0.5, 0.8),
            ("wait", "send", 0.55, 0.6),
            ("wait", "return", 0.7, 1.0),
        ):
            number = 100 * step + len(events)
            times = {"start": begin + first * seconds, "end": begin + last * seconds}
            common = {"rank": 0, "lane": "experts", "step": step}
            events.append(Event(id=number, name=f"{name} {MIX}", kind=kind, **common, **times))
    return events


def test_the_measured_time_is_that_of_the_calls_of_recorded_steps(split_run: Path):
    """Steps count from 0 in the trace, and from 1 in the record."""
    events = [*calls_of_a_step(38, 0.0, 5e-3), *calls_of_a_step(39, 1.0, 2e-3), *calls_of_a_step(40, 2.0, 7e-3)]
    timeline = Timeline("measured", tuple(events))
    assert measured_seconds(timeline, MIX) == pytest.approx({38: 10e-3, 39: 4e-3, 40: 14e-3})
    assert measured_seconds(timeline, "blocks.1.mlp") == {}
    (split_run / "trace.json").write_text(timeline.to_chrome())
    (star,) = [trace for trace in page_of(split_run)[1]["expert_roofline"]["data"] if trace["name"] == MEASURED]
    assert star["y"] == pytest.approx([100 * 3 * 2000 / 4e-3 / 1e9])  # GFLOP/s of a rank, of step 40 alone


def test_experts_on_every_rank_have_loads_and_nothing_of_ranks(tmp_path: Path):
    workload = made_up_workload(("blocks.10.mlp", "blocks.9.mlp"))
    records = [replace(r, computed=(), dropped=0) for r in made_up_records(4, ("blocks.10.mlp", "blocks.9.mlp"))]
    run = write_run(tmp_path / "run", made_up_plan(workload, experts=()), records, workload)
    text, figures = page_of(run)
    assert [name for name in figures if name.startswith("expert")] == ["expert_loads", "expert_imbalance"]
    assert [trace["name"] for trace in figures["expert_imbalance"]["data"]] == ["an expert"]
    assert "Every rank has all of them" in text and "predicted" not in text and "inside a host" not in text
    assert text.index("blocks.9.mlp") < text.index("blocks.10.mlp")


def test_plans_without_costs_predict_nothing(tmp_path: Path):
    workload = made_up_workload()
    plan = made_up_plan(workload)
    plan = replace(plan, experts=tuple(replace(experts, costs=None) for experts in plan.experts))
    text, figures = page_of(write_run(tmp_path / "run", plan, made_up_records(), workload))
    assert "The plan has no costs of experts, so no times are predicted." in text
    assert "expert_roofline" not in figures and "share of even routing" not in text


def test_steps_on_another_number_of_ranks_count_for_experts_only(tmp_path: Path):
    """As after a run was resumed on more ranks, or with split experts."""
    workload = made_up_workload()
    for first in (RoutedRows(20, MIX, UNEVEN[:2], COMPUTED[:2]), RoutedRows(20, MIX, UNEVEN)):
        records = [first, *made_up_records(3)[1:]]
        _, figures = page_of(write_run(tmp_path / "run", made_up_plan(workload), records, workload))
        expert, before, _ = figures["expert_imbalance"]["data"]
        assert expert["y"][1:] == pytest.approx([1.9, 1.9]) and expert["y"][0] == pytest.approx(
            2.8 if len(first.rows) == 2 else 1.9
        )
        assert before["y"] == [None, pytest.approx(1.6), pytest.approx(1.6)]


def test_long_runs_show_some_of_their_steps_and_uneven_mixtures(tmp_path: Path):
    modules = [f"blocks.{n}.mlp" for n in range(7)]
    workload = made_up_workload(modules)
    num = 3 * MAX_STEPS
    records = [
        RoutedRows(n, name, ((10 * (index + 1), 10, 10, 10),)) for n in range(num) for index, name in enumerate(modules)
    ]
    text, figures = page_of(write_run(tmp_path / "run", None, records, workload))
    assert f"{num} steps recorded, of which {MAX_STEPS} are shown" in text
    maps = figures["expert_loads"]["data"]
    assert [each["hovertemplate"].partition(",")[0] for each in maps] == modules[3:]
    assert maps[0]["x"][0] == 0 and maps[0]["x"][-1] == num - 1 and len(maps[0]["x"]) == MAX_STEPS


def test_runs_without_routing_have_no_section_and_damage_is_named(split_run: Path):
    (split_run / "routing.jsonl").write_text((split_run / "routing.jsonl").read_text() + '{"step":80,"mod')
    assert "3 steps recorded" in page_of(split_run)[0]
    (split_run / "routing.jsonl").write_text('{"step":80}\n')
    with pytest.raises(UserError, match=r"routing.jsonl, line 1: "):
        render(split_run)
    (split_run / "routing.jsonl").unlink()
    text, figures = page_of(split_run)
    assert text == "" and not [name for name in figures if name.startswith("expert")]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine to open the page in")
def test_the_page_runs_in_a_browser_without_an_error(split_run: Path, tmp_path: Path):
    assert_runs(render(split_run), len(page_of(split_run)[1]), tmp_path)
