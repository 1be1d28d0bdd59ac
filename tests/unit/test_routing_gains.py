"""What copies, steps and placements of experts would gain: by hand, on a cluster, and by the command line."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_routing_trace import write_ours
from typer.testing import CliRunner

from shardwright import config
from shardwright.cli import app
from shardwright.errors import UserError
from shardwright.planner.expert_assignment import ExpertLayer
from shardwright.planner.expert_placement import exchange_slots, place_experts
from shardwright.planner.experts import without_copies
from shardwright.planner.routing_gains import POLICIES, assign_placed, expert_axes, price_pass
from shardwright.report.routing import gain_figure, gain_grid
from shardwright.runtime.planning import preview
from shardwright.runtime.routing_request import analyse_trace
from shardwright.spec import files
from shardwright.spec.expert_placement import ExpertPlacement, PlacedMixture
from shardwright.spec.plan import ExpertCosts, Plan

LAYER = ExpertLayer((0, 1, 2), ExpertCosts(compute_row=1.0, send_row=1.0, send_expert=10.0, hand_on=5.0))
SIZES = ["experts.channels=256", "experts.hidden=512"]


def test_a_pass_by_hand():
    """Expert 0 has 60 of 90 rows. Plain: 3 x 60 to compute, 3 x 40 to exchange, once more meanwhile. In steps the
    40 rows that rank 0 receives arrive together but for 5, so that they are computed after 35 + 40; then results of 20
    leave, or gradients of weights of 60 rows follow: (75 + 20) + (75 + 60). With even routing max(40, 30 + 10) +
    max(40, 30 + 30). Shadows: as in test_expert_copies."""
    price = price_pass(LAYER, np.array([[20, 5, 5], [20, 5, 5], [20, 5, 5]]))
    assert (price.plain, price.steps, price.ideal, price.shadows) == (300, 230, 100, 130)
    assert price.imbalance == 2 and price.imbalance_left < 1.5 and price.num_copies == 1
    assert price.fastest <= price.steps and price.even < price.plain


def test_a_placement_by_hand():
    """Experts 0 and 1 have most rows and are both on rank 0. Exchanged with 3, both ranks compute 10 rows."""
    layer = ExpertLayer((0, 0, 1, 1), LAYER.costs)
    chosen = np.array([[4, 4, 1, 1], [4, 4, 1, 1]])
    placed = place_experts("m", chosen.sum(0)[None], 2)
    assert placed.experts in (((0, 2), (1, 3)), ((0, 3), (1, 2)))
    assigned = assign_placed(layer, chosen, placed)
    assert assigned.loads_R.tolist() == [10, 10] and not len(assigned.copies[0])
    assert assigned.seconds == 3 * 10 + 3 * 5 < without_copies(layer, chosen).seconds == 3 * 16 + 3 * 8


def test_replicas_share_the_rows_and_cost_a_copy():
    chosen = np.array([[6, 1, 1, 0], [6, 1, 1, 0]])
    placed = place_experts("m", chosen.sum(0)[None], 2, num_redundant=2)
    assert placed.ranks[0] == (0, 1) and [len(held) for held in placed.experts] == [3, 3]
    assigned = assign_placed(ExpertLayer((0, 0, 1, 1), LAYER.costs), chosen, placed)
    assert assigned.computed_RE[:, 0].tolist() == [6, 6] and assigned.computed_RE.sum(0).tolist() == [12, 2, 2, 0]
    assert assigned.copy_seconds > 0


def test_placements_are_even_in_every_pass_not_on_average():
    """All experts have the same mean; 0 and 1 are popular in the same passes, and 2 and 3 in the others."""
    shares = np.array([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    ranks = np.array([0, 0, 1, 1])
    exchange_slots(np.arange(4), shares, ranks, 2)
    assert ranks[0] != ranks[1] and ranks[2] != ranks[3]


@given(st.data(), st.integers(1, 24), st.integers(1, 8), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_every_expert_is_placed(data, num_experts, num_ranks, num_passes):
    redundant = data.draw(st.integers(0, num_experts * (num_ranks - 1)))
    draw = np.random.default_rng(data.draw(st.integers(0, 100)))
    loads = draw.geometric(0.05, (num_passes, num_experts)) * draw.integers(0, 2, num_experts) + 1
    placed = place_experts("m", loads, num_ranks, redundant)
    ExpertPlacement(1, "c", (placed,)).verify()
    sizes = [len(held) for held in placed.experts]
    assert sum(sizes) == num_experts + redundant and max(sizes) - min(sizes) <= 1
    if not redundant:
        assert sorted(placed.slots) == list(range(num_experts))


def test_more_replicas_than_ranks_are_refused():
    with pytest.raises(UserError, match="experts.redundant=5: 4 experts on 2 ranks have at most 4 replicas"):
        place_experts("m", np.ones((1, 4), np.int64), 2, 5)


def test_the_form_of_sglang():
    """Layer 0 has no mixture. A placement with other numbers of experts on the ranks has no such form."""
    mixtures = tuple(PlacedMixture(f"decoder.layers.{i}", 4, ((0, 3, 1), (1, 2, 0))) for i in (1, 2))
    placement = ExpertPlacement(1, "c", mixtures)
    expected = [[0, 1, 2, 3, 0, 1], [0, 3, 1, 1, 2, 0], [0, 3, 1, 1, 2, 0]]
    assert placement.to_sglang() == {"physical_to_logical_map": expected}
    assert mixtures[0].ranks == ((0, 1), (0, 1), (1,), (0,))
    uneven = ExpertPlacement(1, "c", (PlacedMixture("layers.0", 3, ((0, 1), (2,))),))
    assert uneven.to_sglang() == "3 experts on 2 ranks are not as many on each"
    twice = ExpertPlacement(1, "c", (mixtures[0], PlacedMixture("mtp.1", 4, mixtures[0].experts)))
    assert "no layer number of its own" in str(twice.to_sglang())
    with pytest.raises(UserError, match="expert 2 is on no rank"):
        ExpertPlacement(1, "c", (PlacedMixture("m", 3, ((0,), (1,))),)).verify()


@pytest.fixture
def trace_path(tmp_path):
    """Two mixtures on 16 ranks over 6 steps; the popular experts are others in the second half."""
    draw, shares = np.random.default_rng(1), np.arange(1, 33) ** -1.2
    passes = []
    for step in range(6):
        popularity = np.roll(shares, 0 if step < 3 else 7)
        passes.append({f"blocks.{i}.mlp": draw.multinomial(512, popularity / popularity.sum(), 16) for i in range(2)})
    return write_ours(tmp_path / "routing.jsonl", [{m: rows.tolist() for m, rows in each.items()} for each in passes])


def test_gains_on_a_cluster(trace_path):
    gains = analyse_trace(trace_path, SIZES, "johnny")
    for policy in ("plain", *POLICIES):
        summed = sum(each.seconds(policy) for each in gains.mixtures)
        assert gains.total_seconds(policy) == pytest.approx(summed) and len(summed) == 6
    assert all(gains.total_gains("fastest") >= gains.total_gains("steps")) and all(gains.total_gains("steps") > 1)
    loads = np.array([each["blocks.0.mlp"].sum(0) for each in gains.trace.passes])
    first = gains.mixtures[0]
    assert first.placed == place_experts("blocks.0.mlp", loads[:3], 16), "of the first half only"
    assert len(first.placed_seconds) == len(first.placed_gains) == 3
    assert gain_grid(gains).total[0] == "all"
    assert [each["name"] for each in gain_figure(gains).data][-1] == "placement"


def test_experts_are_split_over_at_most_as_many_ranks(tmp_path):
    """Eight experts on johnny, 2 hosts x 8 ranks: within a host. The slower host counts."""
    rows = np.ones((16, 8), np.int64) * 100
    rows[8:, 0] = 1000
    gains = analyse_trace(write_ours(tmp_path / "r.jsonl", [{"a": rows.tolist()}]), SIZES, "johnny")
    assert expert_axes(gains.problem, gains.mixtures[0].mixture) == ("data@local",)
    (price,) = gains.mixtures[0].prices
    assert price.imbalance == pytest.approx(8 * 8000 / (8 * 1700))
    assert len(gains.mixtures[0].placed_seconds) == 1  # a single pass is placed and priced


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)


def test_plan_recorded_routing(tmp_path, trace_path):
    output = tmp_path / "p.json"
    keys = (*SIZES, "experts.form=swiglu", "experts.dtype=bfloat16", "experts.redundant=16")
    result = run(trace_path, "--cluster", "johnny", *keys, "-o", str(output))
    assert "published rates of johnny" in result.output and "fastest, in steps" in result.output
    assert "Products of bfloat16 are priced like those of float32" in result.output
    placement = files.read(ExpertPlacement, output.with_suffix(".placement.json"))
    placement.verify()
    assert [each.module for each in placement.mixtures] == ["blocks.0.mlp", "blocks.1.mlp"]
    slots = json.loads(output.with_suffix(".sglang.json").read_text())["physical_to_logical_map"]
    assert [len(each) for each in slots] == [48, 48] and slots[1] == list(placement.mixtures[1].slots)
    assert "Experts: what copies and steps would gain" in output.with_suffix(".html").read_text()
    assert not output.exists()


def test_plan_a_recipe_for_recorded_routing(tmp_path):
    """Recorded rows are scaled to the recipe's batch; the plan is of the workload with the recorded shares."""
    rows = {f"blocks.{i}.mlp": [[40, 8, 8, 8, 0, 0, 0, 0]] for i in range(4)}
    path, output = write_ours(tmp_path / "r.jsonl", [rows]), tmp_path / "p.json"
    result = run("moe-gpt", "--cluster", "h200-64", "--batch", "64", f"plan.routing={path}", "-o", str(output))
    assert "Rows of 1 recorded ranks are spread evenly over 64" in result.output
    assert "Recorded rows are scaled by 256 to those" in result.output
    assert "Experts: what copies and steps would gain" in output.with_suffix(".html").read_text()
    split = run("moe-gpt", "--cluster", "johnny", f"plan.routing={path}", "plan.experts=8", "-o", str(output))
    assert "Experts are split over 8 ranks (data@local)" in split.output
    plain = run("moe-gpt", "--cluster", "h200-64", "--batch", "64", "-o", str(tmp_path / "q.json"))
    assert "what copies and steps" not in plain.output and not (tmp_path / "q.placement.json").exists()
    digests = [files.read(Plan, tmp_path / name).workload_digest for name in ("p.json", "q.json")]
    assert digests[0] != digests[1]
    planned = preview(config.load("moe-gpt", ["ranks=2", f"plan.routing={path}"]))[1]
    assert planned.workload_digest == digests[0]


def test_errors_of_the_command(tmp_path, trace_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train"}\n')
    other = write_ours(tmp_path / "other.jsonl", [{"layers.0": [[1, 2]]}])
    for arguments, message in (
        ((trace_path, "--cluster", "johnny", *SIZES, "--batch", "8"), "--batch is for a recipe; drop it"),
        ((trace_path, "--cluster", "johnny", *SIZES, "plan.dense=DDP"), 'key "plan" is for a recipe'),
        ((trace_path, "--cluster", "johnny", *SIZES, "experts.hiden=4"), "hiden"),
        ((trace_path, "--cluster", "johnny", "experts.channels=4"), "hidden"),
        ((trace_path, "--cluster", "johnny", "experts.channels=4", "experts.hidden=0"), "hidden"),
        ((trace_path, "--cluster", "laptop", *SIZES), "laptop has one rank"),
        ((str(tmp_path / "metrics.jsonl"), "--cluster", "johnny", *SIZES), "line 1: no record of routing"),
        ((str(tmp_path / "no.jsonl"), "--cluster", "johnny", *SIZES), "no.jsonl: cannot be read"),
        (("moe-gpt", "--cluster", "h200-64", f"plan.routing={other}"), '"layers.0" is not in the model'),
    ):
        with pytest.raises(UserError, match=message):
            run(*arguments, "-o", str(tmp_path / "p.json"))
