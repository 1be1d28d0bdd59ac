"""benchmarks/dhen_quality.py: its summaries of runs, and the model sizes it chooses."""

import json

import pytest

from benchmarks.dhen_cases import CASES, DHEN, FLOPS_TOLERANCE, MORE_SEEDS, RIVALS, TUNED, flops, model, sizes
from benchmarks.dhen_data import Planted
from benchmarks.dhen_quality import read_lines
from benchmarks.dhen_summary import TABLE_1, by_rates, claim, summaries
from shardwright.spec.optimizer import RowWiseAdaGrad


def make_line(case: str, seed: int, ne: float, rates: tuple[float, float] = (0.002, 0.05)) -> dict:
    points = [{"samples": 1 << 21, "ne": ne + 0.01}, {"samples": 1 << 23, "ne": ne}]
    return {"data": "planted", "case": case, "seed": seed, "rates": rates, "digest": "", "forward_flops": 1} | {
        "points": points[: 2 if case in (DHEN, *RIVALS) else 1]
    }


def test_a_claim_needs_every_rival_beaten_by_more_than_the_interval(tmp_path):
    lines = [make_line(DHEN, seed, 0.8 + 0.001 * seed) for seed in (1, 2, 3)]
    lines += [make_line(rival, seed, 0.81 + 0.001 * seed) for rival in RIVALS[2:] for seed in (1, 2, 3)]
    lines += [make_line(RIVALS[0], seed, 0.803 + 0.004 * (seed == 2)) for seed in (1, 2, 3)]
    claim_line = claim(lines, tmp_path)
    assert claim_line["missing"] == [RIVALS[1]]
    assert claim_line["beaten"] == {RIVALS[0]: False} | dict.fromkeys(RIVALS[2:], True)
    summary = next(s for s in summaries(lines, tmp_path) if s.get("against") == RIVALS[2])
    assert summary["seeds"] == 3 and [*summary["ne_percent"]] == [str(1 << 21), str(1 << 23)]
    assert summary["ne_percent"][str(1 << 23)][0] == pytest.approx(100 * (0.802 / 0.812 - 1), abs=1e-3)


def test_the_order_of_table_1_uses_only_seeds_and_samples_that_all_cases_have(tmp_path):
    lines = [make_line(case, 1, 0.8 + 0.01 * i) for i, case in enumerate(TABLE_1)] + [make_line("stack dcn 2", 2, 0.1)]
    (order,) = [summary for summary in summaries(lines, tmp_path) if "ours" in summary]
    assert order["samples"] == 1 << 21 and set(order["ours"]) == set(order["paper"]) == set(TABLE_1)
    assert order["paper"][0] == "attention + linear 2"


def test_the_best_rates_are_named_for_each_case():
    lines = [make_line("dlrm", 9, ne, (0.002, rate)) for ne, rate in ((0.9, 0.05), (0.8, 0.4))]
    lines += [make_line(DHEN, 9, ne, (0.002, rate)) for ne, rate in ((0.7, 0.05), (0.85, 0.4))]
    assert [row["best"] for row in by_rates(lines)] == ["0.002 0.4", "0.002 0.05", "0.002 0.05"]


def test_runs_read_from_a_file_name_the_commit_of_their_code(tmp_path):
    """Runs of a results file have the commit of its header, unless they name another."""
    lines = [{"taken": {"benchmark": "dhen_quality", "commit": "a" * 40, "modified": []}}]
    lines += [{"digest": "first"}, {"digest": "second", "commit": "b" * 40, "modified": ["x.py"]}, {"claim": "no run"}]
    (tmp_path / "runs").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = read_lines(tmp_path / "runs").values()
    assert first == {"digest": "first", "commit": "a" * 40, "modified": []}
    assert second == {"digest": "second", "commit": "b" * 40, "modified": ["x.py"]}


def test_balanced_experts_are_those_of_the_rival_with_a_balance_loss():
    plain, balanced = CASES["dlrm, experts 2"], CASES["dlrm, balanced experts 2"]
    assert balanced.experts[:2] == plain.experts and min(balanced.experts[2:]) > 0
    data, optimizer = Planted(None), RowWiseAdaGrad(0.1)
    source, first = data.source(1), data.first(1)
    sizes_ = [sizes(case, source, optimizer, first) for case in (plain, balanced)]
    assert sizes_[0] == sizes_[1]
    models = [model(case, sizes_[0], source, optimizer) for case in (plain, balanced)]
    assert flops(models[0], first) == flops(models[1], first)
    assert [module.dense.top.has_penalty for module in models] == [False, True]


def test_compared_cases_have_equal_numbers_of_operations():
    data = Planted(None)
    first, optimizer = data.first(1), RowWiseAdaGrad(0.1)
    source = data.source(1)
    for name in ("stack dcn 2", "dlrm, wide"):
        case, twin = CASES[name], CASES[CASES[name].like]
        actual, expected = (
            flops(model(c, sizes(c, source, optimizer, first), source, optimizer), first) for c in (case, twin)
        )
        assert abs(actual / expected - 1) <= FLOPS_TOLERANCE
    assert {*TUNED} < {*RIVALS} and {*MORE_SEEDS} <= {DHEN, *RIVALS}
