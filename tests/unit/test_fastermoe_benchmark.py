"""The simulated figures of benchmarks/fastermoe.py: schedules by hand and by the simulator, formulas, labels."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import fastermoe
from benchmarks.fastermoe_claims import AS_ASSUMED, claim_line
from benchmarks.fastermoe_models import MODELS, Figure4Routings, Routings, recorded_rows, with_one_level
from benchmarks.fastermoe_runs import best_prefix, choose_by_links, paper_shadows, simulate_model
from benchmarks.fastermoe_schedule import ZERO_2, ZERO_3, Schedule, Setting, Traffic, gain_bound
from shardwright.planner.experts import balance, imbalance_seconds, shadow_seconds, with_shadows, without_copies
from shardwright.planner.step.rank_calls import Task
from shardwright.planner.step.simulate import simulate_calls
from shardwright.spec.calls import Call
from shardwright.spec.cluster import Cluster, Device, Level, Price
from shardwright.spec.plan import Stage


def make_setting(num_ranks: int, latency: float = 0.0) -> Setting:
    """One expert a rank; a row takes a second to compute, and a second to send."""
    device = Device("hand", "cuda", (), (Price(op="matmul", dtype="float32", seconds_per_flop=0.25),))
    cluster = Cluster(1, "hand", "preset", device, (Level("local", num_ranks, latency, 4.0),))
    return Setting(cluster, num_ranks, channels=1, hidden=1, rows=10)


def plain_traffic(setting: Setting, chosen) -> Traffic:
    return Traffic(setting, without_copies(setting.paper_layer, np.array(chosen)))


CHOSEN = [[4, 6], [6, 4]]  # 10 rows for each expert, 6 of them from the other rank


def test_one_group_is_sequential():
    setting = make_setting(2)
    traffic = plain_traffic(setting, CHOSEN)
    assert setting.compute_row == 1 and setting.row_bytes == 4 and setting.expert_bytes == 8
    assert Schedule(traffic, 1).forward_seconds == 6 + 10 + 6
    assert Schedule(traffic, 1).paper_seconds == traffic.sequential_seconds == 3 * 10 + 4 * 6


@pytest.mark.parametrize("lockstep", [False, True])
def test_two_groups_by_hand(lockstep):
    """Own rows are computed while the others' arrive. Forward: C_0 0 to 4, S_1 0 to 6, C_1 6 to 12, R_1 12 to 18;
    backward, in double time: C_0 0 to 8, C_1 8 to 20, R_1 20 to 26."""
    schedule = Schedule(plain_traffic(make_setting(2), CHOSEN), 2, lockstep)
    assert schedule.forward_seconds == 18
    assert schedule.paper_seconds == 18 + 26
    # Ours: C_0 and C_1 as in forward, gradients of weights 12 to 22 while R_1 is sent.
    assert schedule.our_seconds == 18 + 22
    assert gain_bound(6, 10) == 54 / (max(12, 10) + max(12, 20))


def test_copies_by_hand():
    """All rows are for expert 0, which rank 1 has a copy of. Its 8 bytes take 2 seconds there and 2 back."""
    setting = make_setting(2)
    chosen = np.array([[10, 0], [10, 0]])
    traffic = Traffic(setting, with_shadows(setting.paper_layer, chosen, [0]))
    assert traffic.weights_seconds == 2 and traffic.exchange_seconds == 0 and traffic.longest_chain == 1
    assert traffic.sequential_seconds == 3 * 10 + 2 * 2
    assert Schedule(traffic, 1).paper_seconds == (2 + 10) + (20 + 2)
    assert Schedule(traffic, 1).our_seconds == (2 + 10) + (10 + 10 + 2)


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_lockstep_agrees_with_the_simulator_of_steps(num_groups):
    setting, draw = make_setting(4), np.random.default_rng(3)
    schedule = Schedule(plain_traffic(setting, draw.integers(0, 9, (4, 4))), num_groups, lockstep=True)
    tasks, sends, computes, returns = dict[str, Task](), [], [], []
    for step, rows in enumerate(schedule.rows):
        sends.append(Stage(f"S{step}", "experts", (), (f"s{step}",)))
        computes.append(Stage(f"C{step}", "main", (f"s{step}",), (f"c{step}",)))
        returns.append(Stage(f"R{step}", "experts", (f"c{step}",), (f"r{step}",)))
        exchange = Task(seconds=setting.link_seconds(4 * rows), is_collective=True)
        compute = Task(seconds=tuple(rows.sum(0).tolist()))
        tasks |= {f"S{step}": exchange, f"C{step}": compute, f"R{step}": exchange}
    timeline = simulate_calls([Call(stage, 0) for stage in (*sends, *computes, *returns)], tasks, 4, blocking=False)
    assert max(event.end for event in timeline.events) == pytest.approx(schedule.forward_seconds)


@pytest.mark.parametrize("num_groups", [1, 2, 4, 8, 16])
def test_the_schedule_gains_at_most_the_bound(num_groups):
    setting = MODELS[1].setting
    for _, _, chosen_RE in Routings("", 2, 3).samples(setting):
        traffic = plain_traffic(setting, chosen_RE)
        most = gain_bound(traffic.exchange_seconds, traffic.compute_seconds)
        assert traffic.sequential_seconds / Schedule(traffic, num_groups).paper_seconds <= most * (1 + 1e-9)


def test_data_parallel_seconds_are_the_formulas():
    """3 Pi1 + 6 E (N-1)/N / Pi2 for ZeRO-3, 4 E for ZeRO-2, in units of the time to send a rank's rows."""
    setting = with_one_level(MODELS[0].setting)
    levels = tuple(replace(level, latency_seconds=0.0) for level in setting.cluster.levels)
    setting = replace(setting, cluster=replace(setting.cluster, levels=levels))
    unit = setting.rows * setting.row_bytes / setting.network_rate
    pi1, pi2 = setting.rows * setting.compute_row / unit, setting.rows / (2 * setting.channels)
    assert pi1 == pytest.approx(1.11, abs=0.01) and pi2 == 1
    for collectives, factor in ((ZERO_2, 4), (ZERO_3, 6)):
        expected = unit * (3 * pi1 + factor * 16 * 15 / 16 / pi2)
        assert setting.data_parallel_seconds(collectives) == pytest.approx(expected)


def test_ranks_of_a_host_share_its_card():
    """johnny: of each rank's rows half cross to the other host, those of 8 ranks over one card of 6.25 GB/s."""
    setting = MODELS[0].setting
    even_RR = np.full((16, 16), setting.rows * setting.row_bytes / 16)
    seconds = 8 * setting.rows * setting.row_bytes / 2 / 6.25e9
    assert setting.link_seconds(even_RR) == pytest.approx(seconds + 1.4e-5)
    # A chain through all ranks crosses once in each direction at most.
    chosen_RE = np.zeros((16, 16), np.int64)
    chosen_RE[:, 3] = setting.rows
    traffic = Traffic(setting, with_shadows(setting.paper_layer, chosen_RE, [3]))
    assert traffic.weights_seconds == pytest.approx(setting.expert_bytes / 6.25e9 + 1.4e-5)


def test_recorded_rows_are_folded():
    """Layer 0 has rows for experts 0, 1 and 4, as 1 : 2 : 1; layer 1 has all rows for expert 31."""
    counts = np.zeros((16, 12, 4, 32), np.int64)
    counts[:, 0, :, 0], counts[:, 0, :, 1], counts[:, 0, :, 4] = 100, 200, 100
    counts[:, 1, :, 31] = 400
    setting = MODELS[0].setting
    rows = recorded_rows(counts, 0, setting)
    assert rows.shape == (16, 16) and (rows.sum(1) == setting.rows).all()
    assert rows[5, 0] == 3 * setting.rows / 4 and rows[5, 2] == setting.rows / 4
    wide = MODELS[5].setting
    rows = recorded_rows(counts, 0, wide)
    assert rows.shape == (64, 64) and (rows.sum(1) == wide.rows).all()
    assert rows[63, 1] == wide.rows / 4 and rows[63, 63] == wide.rows / 2


def test_figure_4_has_hot_experts_of_3_times_the_mean():
    setting = MODELS[0].setting
    rows_E = np.sort(Figure4Routings("", 1).rows(setting, 0, 0).sum(0)) / setting.rows / 16
    assert rows_E[-4:].sum() == pytest.approx(0.8, abs=0.02) and rows_E[-5] < 0.03


def test_our_choice_is_the_least_bound_of_all_candidates():
    setting = MODELS[2].setting
    for _, _, chosen_RE in Routings("", 1, 3).samples(setting):
        best = Traffic(setting, choose_by_links(setting, chosen_RE)).overlapped_seconds
        others = [without_copies(setting.paper_layer, chosen_RE), paper_shadows(setting, chosen_RE)]
        others.append(balance(setting.paper_layer, chosen_RE))
        assert best <= min(Traffic(setting, other).overlapped_seconds for other in others)


def test_the_best_prefix_goes_on_where_algorithm_1_ends():
    """Two equally popular experts: with a shadow of one, the other's rank has 200 rows instead of 160; of both, 80."""
    setting = replace(make_setting(4), hidden=10)  # 10 seconds to compute a row, 20 to send an expert
    chosen_RE = np.array([[40, 40, 0, 0]] * 4)
    layer = setting.paper_layer
    assert imbalance_seconds(layer, 160) == 3 * 1600 + 4 * 160 < shadow_seconds(layer, 1, 200) == 3 * 2000 + 2 * 20
    assert paper_shadows(setting, chosen_RE).chains() == {}
    assert shadow_seconds(layer, 2, 80) == 3 * 800 + 2 * 2 * 20
    assert best_prefix(setting, chosen_RE).chains().keys() == {0, 1}


def test_a_deviation_has_a_reason():
    alternatives = {AS_ASSUMED: 2.0, "no difference": 2.01, "more": 2.4, "most": 4.1}
    line = claim_line("gain", 4.0, 2.0, 3.0, alternatives)
    assert line["simulated_over_paper"] == 0.5 and line["reason"] == "most: 4.1, within 20%"
    assert line["alternatives"].keys() == {AS_ASSUMED, "more", "most"}
    assert (
        claim_line("gain", 8.0, 2.0, None, alternatives, "a note")["reason"]
        == "most: 4.1, still not within 20%; a note"
    )
    assert claim_line("gain", 1.0, 2.0, None, alternatives)["reason"] == "none of the alternatives is closer"
    assert "reason" not in claim_line("gain", 2.0, 2.0, None, alternatives)


def test_a_run_is_the_mean_of_iterations_times_layers():
    model = MODELS[0]
    run = simulate_model(model, model.setting, Routings("", 2, 3))
    assert run.values["plain"].shape == (2, 3)
    assert run.seconds("plain") == pytest.approx(12 * run.values["plain"].mean())
    assert run.gain("plain") == 1 and run.gain("ours") >= run.gain("steps") > 1


def test_every_line_says_that_it_is_simulated(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fastermoe", "--smoke"])
    assert fastermoe.main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"model", "shadowed", "layers", "bandwidth"} <= {line["what"] for line in lines}
    assert all(line["simulated"] is True and "no trace" in line["routing"] for line in lines)
