"""Tables on servers over ranks: training with bounds of 0 equals one process, no read misses more than its bound, no
update is lost, and a server that is killed and started again changes nothing."""

import os
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from drawn import examples
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from table_servers import ServerProcess
from test_bounded_ranks import NUM_ROWS, SAMPLES, CountingModel, bounded_plan, click_batch, streams
from test_steps import STEPS, assert_same, batch, make_model, single_plan, take, train_reference

from shardwright.comm.transport.servers import TableServers
from shardwright.errors import UserError
from shardwright.measure.describe import describe
from shardwright.planner.step.stages import step_stages
from shardwright.runtime.build import build
from shardwright.runtime.dense_layout import mesh_for
from shardwright.runtime.planning import keep_on_servers, plan_single_process
from shardwright.spec.optimizer import SGD, AdaGrad, Adam, RowWiseAdaGrad
from shardwright.spec.plan import Bounded, Exact, Plan

EXACT = Bounded(0, 0, 320)


@pytest.fixture(scope="module")
def servers():
    """Two servers, of one run after another."""
    with ExitStack() as stack:
        processes = [ServerProcess() for _ in range(2)]
        for process in processes:
            stack.callback(process.stop)
        yield tuple(process.address for process in processes)


def served_plan(single: Plan, world: int, sync: Bounded, names, servers: int) -> Plan:
    """The row-wise plan of `world` ranks in which the tables `names` are on servers."""
    plan = replace(bounded_plan(single, world, Exact(), names=()), stages=step_stages(ids_after="read"))
    return keep_on_servers(plan, {table.table: sync for table in plan.tables if table.table in names}, servers)


def train(world: int, optimizer, addresses, overlap: bool, sync: Bounded, folder: str = "", steps: int = STEPS):
    """Run on a rank: logits, evaluations, state; `folder`: where to save after half of the steps."""
    model = make_model(optimizer)
    plan = served_plan(single_plan(model), world, sync, ("t0", "t2"), len(addresses))
    mesh = mesh_for(plan, servers=TableServers(addresses))
    job = build(model, plan, mesh, optimizer=lambda p: torch.optim.Adam(p, 0.01), overlap=overlap)
    begin, end = 24 * mesh.rank // world, 24 * (mesh.rank + 1) // world
    outputs = []
    for out in job.run(take(batch(step), begin, end) for step in range(steps)):
        outputs.append(out.logits)
        if folder and job.step == steps // 2:
            job.save(folder)
    evaluated = [out.logits for out in job.evaluate([take(batch(100 + step), begin, end) for step in range(2)])]
    state, counts = job.state(), job.copy_counts()
    mesh.close()
    return outputs, evaluated, {name: value for name, value in state.tensors.items() if not value.is_meta}, counts


def assert_equal_to(answers, reference) -> None:
    for part, expected_parts in enumerate(reference[:2]):
        for number, expected in enumerate(expected_parts):
            logits = torch.cat([answer[part][number] for answer in answers])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    assert_same(answers[0][2], reference[2])


@pytest.mark.parametrize("optimizer", (SGD(0.1, momentum=0.9), AdaGrad(0.1), RowWiseAdaGrad(0.1), Adam(0.01)))
def test_bounds_of_0_train_like_one_process(ranks, servers, optimizer):
    reference = train_reference(optimizer)
    for world, overlap, num_servers in ((3, False, 2), (3, True, 2), (2, True, 1)):
        answers = ranks.run(world, train, world, optimizer, servers[:num_servers], overlap, EXACT)
        assert_equal_to(answers, reference)
        again = ranks.run(world, train, world, optimizer, servers[:num_servers], overlap, EXACT)
        for first, second in zip(answers, again, strict=True):
            assert all(map(torch.equal, first[0], second[0])), "updates are added in the order of ranks"
        counts = next(iter(answers[0][3].values()))
        assert counts.sent < counts.validated == counts.pushed == counts.read
        assert sum(counts.missed) == 0, "counted by the servers"
