"""A stop requested by one rank ends all ranks after the same step, in one consistent state."""

import pytest
import torch
from test_steps import batch, make_model, shard_plan, single_plan, take

from shardwright.comm.all_gather_json import all_gather_json
from shardwright.comm.mesh import Mesh
from shardwright.runtime.build import build
from shardwright.spec.optimizer import RowWiseAdaGrad

STEPS = 40
MAX_STEPS_IN_FLIGHT = 5  # steps that stages may have begun when a stop is requested


def request_stop(world: int, overlap: bool, accumulate: int, stop_rank: int, stop_step: int) -> tuple:
    """(step, stop signal, outputs) after a run with a stop request, and after another step."""
    model = make_model(RowWiseAdaGrad(0.1))
    plan = shard_plan(single_plan(model), world, "read", "float64")
    job = build(model, plan, optimizer=lambda p: torch.optim.SGD(p, 0.05), overlap=overlap, accumulate=accumulate)
    rank = job.mesh.rank
    lo, hi = 24 * rank // world, 24 * (rank + 1) // world
    batches = (take(batch(number), lo, hi) for number in range(STEPS * accumulate))

    def stop() -> int:
        return 15 if rank == stop_rank and job.step >= stop_step else 0

    outputs = list(job.run(batches, stop=stop))
    at_stop = job.step, job.stop_signal, len(outputs)
    more_outputs = list(job.run([take(batch(0), lo, hi)] * accumulate))
    result = *at_stop, job.step, job.stop_signal, len(more_outputs)
    job.mesh.close()
    return result


@pytest.mark.parametrize(("overlap", "accumulate"), [(True, 1), (False, 1), (True, 3), (False, 2)])
@pytest.mark.parametrize("stop_rank", [0, 1])
def test_all_ranks_stop_after_the_same_step(ranks, overlap, accumulate, stop_rank):
    first, second = ranks.run(2, request_stop, 2, overlap, accumulate, stop_rank, 5)
    assert first == second
    step, signal, outputs, next_step, next_signal, more_outputs = first
    assert 5 <= step <= 5 + MAX_STEPS_IN_FLIGHT and signal == 15 and outputs == step * accumulate
    assert (next_step, next_signal, more_outputs) == (step + 1, 0, accumulate), "a stopped job can run again"


def test_a_run_without_a_stop_request_runs_all_steps(ranks):
    assert ranks.run(2, request_stop, 2, True, 1, 0, STEPS + 1) == [(STEPS, 0, STEPS, STEPS + 1, 0, 1)] * 2


def test_one_process_stops_after_all_micro_batches_of_a_step():
    assert request_stop_in_one_process(5, 3) == (5, 15, 15)


def request_stop_in_one_process(stop_step: int, accumulate: int) -> tuple:
    model = make_model(RowWiseAdaGrad(0.1))
    job = build(model, single_plan(model), optimizer=lambda p: torch.optim.SGD(p, 0.05), accumulate=accumulate)
    batches = (batch(number) for number in range(STEPS * accumulate))
    outputs = list(job.run(batches, stop=lambda: 15 if job.step >= stop_step else 0))
    return job.step, job.stop_signal, len(outputs)


def gather_json(world: int) -> list:
    mesh = Mesh((("rank", world),))
    gathered = all_gather_json({"rank": mesh.rank, "words": "é" * 10 * mesh.rank}, world, mesh.group().process_group)
    mesh.close()
    return gathered


def test_json_of_different_lengths_is_gathered(ranks):
    expected = [{"rank": rank, "words": "é" * 10 * rank} for rank in range(3)]
    assert ranks.run(3, gather_json, 3) == [expected] * 3
