"""Tables on servers over ranks: training with bounds of 0 equals one process, and a server that is killed and started
again changes nothing. `test_bounded_reads` tests larger bounds."""

import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from table_servers import ServerProcess
from test_bounded_ranks import bounded_plan
from test_steps import STEPS, assert_same, batch, make_model, single_plan, take, train_reference
from test_unused_features import Model, masked_batches

from shardwright.comm.transport.servers import TableServers
from shardwright.errors import UserError
from shardwright.planner.step.stages import step_stages
from shardwright.runtime.build import build
from shardwright.runtime.dense_layout import mesh_for
from shardwright.runtime.placements import keep_on_servers
from shardwright.spec.optimizer import SGD, AdaGrad, Adam, RowWiseAdaGrad
from shardwright.spec.plan import Bounded, Exact, Plan

EXACT = Bounded(0, 0, 320)
LINES = 96  # rows of a shard in memory, where ranks own the rows and others are on servers


@pytest.fixture(scope="module")
def servers():
    """Two servers, of one run after another."""
    with ExitStack() as stack:
        processes = [ServerProcess() for _ in range(2)]
        for process in processes:
            stack.callback(process.stop)
        yield tuple(process.address for process in processes)


def served_plan(single: Plan, world: int, sync: Bounded | int, names, servers: int) -> Plan:
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


def num_lookups(optimizer, tables) -> int:
    """Ids of these tables in all training batches."""
    names = {feature.name for feature in make_model(optimizer).sparse.features if feature.table in tables}
    batches = [batch(step).features for step in range(STEPS)]
    return sum(
        int(lengths.sum())
        for features in batches
        for name, lengths in zip(features.features, features.lengths, strict=True)
        if name in names
    )


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
        assert 0 < sum(counts.missed) <= counts.validated
        assert 0 < counts.sent_lookups < counts.lookups
        lookups = sum(each.lookups for answer in answers for each in answer[3].values())
        assert lookups == num_lookups(optimizer, ("t0", "t2"))


def resume(world: int, optimizer, addresses, sync: Bounded, folder: str, steps: int):
    """Run on a rank: logits of the second half of the steps, from the checkpoint."""
    model = make_model(optimizer)
    single = single_plan(model)
    plan = served_plan(single, world, sync, ("t0", "t2"), len(addresses)) if addresses else sharded(single, world)
    mesh = mesh_for(plan, servers=TableServers(addresses) if addresses else None)
    job = build(model, plan, mesh, optimizer=lambda p: torch.optim.Adam(p, 0.01))
    job.load(f"{folder}/step-{steps // 2:08d}")
    begin, end = 24 * mesh.rank // world, 24 * (mesh.rank + 1) // world
    outputs = [out.logits for out in job.run(take(batch(step), begin, end) for step in range(steps // 2, steps))]
    state = job.state()
    mesh.close()
    return outputs, {name: value for name, value in state.tensors.items() if not value.is_meta}


def sharded(single: Plan, world: int) -> Plan:
    return replace(bounded_plan(single, world, Exact(), names=()), stages=step_stages(ids_after="read"))


@pytest.mark.parametrize("sync", (EXACT, Bounded(6, 2, 320)))
def test_checkpoints_load_on_servers_and_on_ranks(ranks, servers, tmp_path, sync):
    optimizer, steps = Adam(0.01), 8
    answers = ranks.run(3, train, 3, optimizer, servers, True, sync, str(tmp_path), steps)
    again = ranks.run(3, resume, 3, optimizer, servers, sync, str(tmp_path), steps)
    for (outputs, *_), (resumed, _) in zip(answers, again, strict=True):
        assert all(map(torch.equal, outputs[steps // 2 :], resumed)), "to the bit, on the same ranks and servers"
    assert_same(answers[0][2], again[0][1])
    if sync == EXACT:
        for world, addresses in ((2, servers[:1]), (2, ())):
            others = ranks.run(world, resume, world, optimizer, addresses, sync, str(tmp_path), steps)
            assert_same(others[0][1], answers[0][2])


def train_beside_kills(world, optimizer, addresses, sync, seconds):
    """Run on a rank: as `train`, with pauses, so that the run lasts `seconds` or more."""
    model = make_model(optimizer)
    plan = served_plan(single_plan(model), world, sync, ("t0", "t2"), len(addresses))
    mesh = mesh_for(plan, servers=TableServers(addresses))
    job = build(model, plan, mesh, optimizer=lambda p: torch.optim.Adam(p, 0.01))
    begin, end = 24 * mesh.rank // world, 24 * (mesh.rank + 1) // world
    outputs = []
    for out in job.run(take(batch(step), begin, end) for step in range(60)):
        time.sleep(seconds / 60)
        outputs.append(out.logits)
    assert sync != LINES or job.cache_counts()["t2"].written_back > 0
    state = job.state()
    mesh.close()
    return outputs, {name: value for name, value in state.tensors.items() if not value.is_meta}


@pytest.mark.parametrize("sync", (EXACT, Bounded(6, 2, 320), LINES))
def test_a_killed_server_that_is_started_again_loses_nothing(ranks, tmp_path, sync):
    generator = torch.Generator().manual_seed(7)
    with ExitStack() as stack:
        processes = [ServerProcess(tmp_path / f"journal{number}") for number in range(2)]
        for process in processes:
            stack.callback(process.stop)
        addresses = tuple(process.address for process in processes)
        expected = ranks.run(2, train_beside_kills, 2, AdaGrad(0.1), addresses, sync, 0.0)
        killed = []

        def kill() -> None:
            for number in (0, 1, 1, 0):
                time.sleep(0.5 + float(torch.rand(1, generator=generator)) * 0.5)
                processes[number].kill()
                processes[number].start()
                killed.append(number)

        thread = threading.Thread(target=kill)
        thread.start()
        answers = ranks.run(2, train_beside_kills, 2, AdaGrad(0.1), addresses, sync, 8.0, seconds=200.0)
        thread.join()
    assert len(killed) == 4, "the faults have fired"
    for (outputs, state), (expected_outputs, expected_state) in zip(answers, expected, strict=True):
        assert all(map(torch.equal, outputs, expected_outputs))
        assert all(torch.equal(state[name], value) for name, value in expected_state.items())


def test_a_server_without_a_journal_says_that_the_rows_are_lost(ranks):
    process = ServerProcess()
    try:
        timer = threading.Timer(4.0, lambda: (process.kill(), process.start()))
        timer.start()
        with pytest.raises(Exception, match="no longer has the rows of this run"):
            ranks.run(2, train_beside_kills, 2, AdaGrad(0.1), (process.address,), EXACT, 20.0)
        timer.join()
    finally:
        process.stop()


def refused(world: int, addresses, message: str):
    model = make_model(AdaGrad(0.1))
    plan = served_plan(single_plan(model), world, EXACT, ("t0", "t2"), len(addresses))
    mesh = mesh_for(plan, servers=TableServers(addresses, timeout_seconds=1.0))
    with pytest.raises(UserError, match=message):
        build(model, plan, mesh, optimizer=lambda p: torch.optim.Adam(p, 0.01))
    mesh.close()


def test_a_server_that_is_not_there_is_named(ranks):
    ranks.run(2, refused, 2, ("tcp://127.0.0.1:9",), "table server tcp://127.0.0.1:9: no reply for 1 s")


def train_with_unused_features(world: int, optimizer, addresses):
    """Run on a rank: some features have no gradient in some steps."""
    model, whole = Model(optimizer), masked_batches(6, 1)
    plan = served_plan(single_plan(model, whole[0]), world, EXACT, ("t", "u"), len(addresses))
    mesh = mesh_for(plan, servers=TableServers(addresses))
    job = build(model, plan, mesh)
    size = whole[0].batch_size
    begin, end = (size * rank // world for rank in (mesh.rank, mesh.rank + 1))
    try:
        for _ in job.run([take(each, begin, end) for each in whole]):
            pass
        state = job.state()
    finally:
        mesh.close()
    return {name: value for name, value in state.tensors.items() if not value.is_meta}


@pytest.mark.parametrize("optimizer", (SGD(0.1, momentum=0.9), AdaGrad(0.1)))
def test_features_without_gradients_change_nothing(ranks, servers, optimizer):
    model = Model(optimizer)
    for whole in masked_batches(6, 1):
        model.loss(model(whole), whole).backward()
    (state, *_) = ranks.run(3, train_with_unused_features, 3, optimizer, servers)
    expected = {f"model.{name}": value for name, value in model.state_dict().items()}
    expected |= {f"tables.sparse.{name}": value for name, value in model.sparse.optimizer_state().items()}
    compared = [name for name in expected if name in state]
    assert len(compared) == len(expected)
    for name in compared:
        torch.testing.assert_close(state[name], expected[name], rtol=0, atol=1e-10)


def test_tables_with_different_numbers_of_steps_are_refused(ranks, servers):
    with pytest.raises(AssertionError, match="have had different numbers of steps"):
        ranks.run(2, train_with_unused_features, 2, Adam(0.1), servers)
