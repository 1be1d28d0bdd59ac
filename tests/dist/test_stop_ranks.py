"""A stop requested by one rank ends all ranks after the same step, in one consistent state."""

import pytest
import torch
from test_steps import batch, cut_plan, model, part, plan_one

from shardwright.comm.all_gather_json import all_gather_json
from shardwright.comm.mesh import Mesh
from shardwright.runtime.build import build
from shardwright.spec.optimizer import RowWiseAdaGrad

STEPS = 40
MOST_AHEAD = 5  # steps that stages may have begun when a stop is asked for


def stopped(world: int, overlap: bool, accumulate: int, asking: int, asked_at: int) -> tuple:
    mine = model(RowWiseAdaGrad(0.1))
    plan = cut_plan(plan_one(mine), world, "read", "float64")
    job = build(mine, plan, optimizer=lambda p: torch.optim.SGD(p, 0.05), overlap=overlap, accumulate=accumulate)
    rank = job.mesh.rank
    ends = [24 * at // world for at in range(world + 1)]
    batches = (part(batch(number), ends[rank], ends[rank + 1]) for number in range(STEPS * accumulate))

    def stop() -> int:
        return 15 if rank == asking and job.step >= asked_at else 0

    outputs = list(job.run(batches, stop=stop))
    first = job.step, job.stop_signal, len(outputs)
    more = list(job.run([part(batch(0), ends[rank], ends[rank + 1])] * accumulate))
    found = *first, job.step, job.stop_signal, len(more)
    job.mesh.close()
    return found


@pytest.mark.parametrize(("overlap", "accumulate"), [(True, 1), (False, 1), (True, 3), (False, 2)])
@pytest.mark.parametrize("asking", [0, 1])
def test_all_ranks_end_with_the_same_step(ranks, overlap, accumulate, asking):
    one, other = ranks.run(2, stopped, 2, overlap, accumulate, asking, 5)
    assert one == other
    step, signal, outputs, after, signal_after, more = one
    assert 5 <= step <= 5 + MOST_AHEAD and signal == 15 and outputs == step * accumulate
    assert (after, signal_after, more) == (step + 1, 0, accumulate), "a job that was stopped goes on"


def test_a_stop_that_nobody_asks_for(ranks):
    assert ranks.run(2, stopped, 2, True, 1, 0, STEPS + 1) == [(STEPS, 0, STEPS, STEPS + 1, 0, 1)] * 2


def test_one_process_ends_with_a_whole_step():
    assert stopped_alone(5, 3) == (5, 15, 15)


def stopped_alone(asked_at: int, accumulate: int) -> tuple:
    mine = model(RowWiseAdaGrad(0.1))
    job = build(mine, plan_one(mine), optimizer=lambda p: torch.optim.SGD(p, 0.05), accumulate=accumulate)
    batches = (batch(number) for number in range(STEPS * accumulate))
    outputs = list(job.run(batches, stop=lambda: 15 if job.step >= asked_at else 0))
    return job.step, job.stop_signal, len(outputs)


def gathered(world: int) -> list:
    mesh = Mesh((("rank", world),))
    found = all_gather_json({"rank": mesh.rank, "words": "é" * 10 * mesh.rank}, world, mesh.group().process_group)
    mesh.close()
    return found


def test_json_of_different_lengths_is_gathered(ranks):
    wanted = [{"rank": rank, "words": "é" * 10 * rank} for rank in range(3)]
    assert ranks.run(3, gathered, 3) == [wanted] * 3
