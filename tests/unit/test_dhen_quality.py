"""What benchmarks/dhen_quality.py says of its runs, and the sizes it finds."""

import pytest

from benchmarks.dhen_cases import CASES, DHEN, MORE_SEEDS, NEAR, RIVALS, TUNED, flops, model, sizes
from benchmarks.dhen_data import Planted
from benchmarks.dhen_summary import TABLE_1, by_rates, claim, summaries
from shardwright.spec.optimizer import RowWiseAdaGrad


def line(case: str, seed: int, ne: float, rates: tuple[float, float] = (0.002, 0.05)) -> dict:
    points = [{"samples": 1 << 21, "ne": ne + 0.01}, {"samples": 1 << 23, "ne": ne}]
    return {"data": "planted", "case": case, "seed": seed, "rates": rates, "digest": "", "forward_flops": 1} | {
        "points": points[: 2 if case in (DHEN, *RIVALS) else 1]
    }


def test_a_claim_wants_every_rival_beaten_by_more_than_the_interval(tmp_path):
    lines = [line(DHEN, seed, 0.8 + 0.001 * seed) for seed in (1, 2, 3)]
    lines += [line(rival, seed, 0.81 + 0.001 * seed) for rival in RIVALS[2:] for seed in (1, 2, 3)]
    lines += [line(RIVALS[0], seed, 0.803 + 0.004 * (seed == 2)) for seed in (1, 2, 3)]
    found = claim(lines, tmp_path)
    assert found["missing"] == [RIVALS[1]]
    assert found["beaten"] == {RIVALS[0]: False} | dict.fromkeys(RIVALS[2:], True)
    one = next(each for each in summaries(lines, tmp_path) if each.get("against") == RIVALS[2])
    assert one["seeds"] == 3 and [*one["ne_percent"]] == [str(1 << 21), str(1 << 23)]
    assert one["ne_percent"][str(1 << 23)][0] == pytest.approx(100 * (0.802 / 0.812 - 1), abs=1e-3)


def test_the_order_of_table_1_is_of_seeds_and_samples_that_all_have(tmp_path):
    lines = [line(case, 1, 0.8 + 0.01 * at) for at, case in enumerate(TABLE_1)] + [line("stack dcn 2", 2, 0.1)]
    (found,) = [each for each in summaries(lines, tmp_path) if "ours" in each]
    assert found["samples"] == 1 << 21 and set(found["ours"]) == set(found["paper"]) == set(TABLE_1)
    assert found["paper"][0] == "attention + linear 2"


def test_the_best_rates_are_named_for_each_case():
    lines = [line("dlrm", 9, ne, (0.002, rate)) for ne, rate in ((0.9, 0.05), (0.8, 0.4))]
    lines += [line(DHEN, 9, ne, (0.002, rate)) for ne, rate in ((0.7, 0.05), (0.85, 0.4))]
    assert [each["best"] for each in by_rates(lines)] == ["0.002 0.4", "0.002 0.05", "0.002 0.05"]


def test_cases_have_as_many_operations_as_those_they_are_held_against():
    data = Planted(None)
    first, optimizer = data.first(1), RowWiseAdaGrad(0.1)
    source = data.source(1)
    for name in ("stack dcn 2", "dlrm, wide"):
        case, twin = CASES[name], CASES[CASES[name].like]
        own, wanted = (
            flops(model(one, sizes(one, source, optimizer, first), source, optimizer), first) for one in (case, twin)
        )
        assert abs(own / wanted - 1) <= NEAR
    assert {*TUNED} < {*RIVALS} and {*MORE_SEEDS} <= {DHEN, *RIVALS}
