"""Published runs of models of layers: each can be split as it says, and its step agrees with the share of the peak that
its source prints."""

import pytest

from benchmarks.layer_published import choose, memory_bytes, result_line, summary
from benchmarks.published_runs import A100_FLOPS, SOURCES, gpt_flops, published_runs
from shardwright.planner.layers.degrees import degree_errors

RUNS = published_runs()


def test_runs_can_be_split_as_published():
    assert {run.source for run in RUNS} == {*SOURCES}
    for run in RUNS:
        assert not [*degree_errors(run.model, run.batch, run.degrees)], run
        assert run.degrees.micro_batches(run.batch) >= 1 and (run.seconds or run.gib)
    ranks = {run.degrees.num_ranks for run in RUNS if run.source == "narayanan"}
    assert ranks == {32, 64, 128, 256, 512, 1024, 1536, 1920, 2520, 3072}


@pytest.mark.parametrize("run", [run for run in RUNS if run.source in ("narayanan", "korthikanti") and run.seconds])
def test_steps_agree_with_the_published_share_of_the_peak(run):
    passes = 4 if run.source == "narayanan" else 3
    share = gpt_flops(run.model, run.batch, passes) / (run.seconds * run.degrees.num_ranks * A100_FLOPS)
    assert 100 * share == pytest.approx(run.percent, abs=0.5)


def test_open_settings_fit_the_memory():
    run = next(run for run in RUNS if run.is_open)
    chosen = choose(run)
    assert memory_bytes(chosen) <= run.cluster.device.tiers[0].bytes_ and not [
        *degree_errors(run.model, chosen.batch, chosen.degrees)
    ]


def test_errors_are_small_where_code_and_model_agree():
    """Llama 3 on 8,192 and 16,384 H100, and Megatron-LM on A100: within a tenth in their mean."""
    lines = [result_line(run) for run in RUNS if run.source in ("narayanan", "llama3")]
    last = summary(lines)
    assert last["llama3"]["mean_step_error_percent"] < 5 and last["narayanan"]["mean_step_error_percent"] < 7
