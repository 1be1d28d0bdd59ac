"""Table servers that are killed, links to them that fail, and ranks that are killed: the run, or the one that resumes
it, has the bits of an undisturbed one."""

import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pool
import pytest
import torch
from server_faults import (
    BOUNDED,
    OPTIMIZER,
    STEPS,
    ChangedMessages,
    Training,
    failing_link,
    read_progress,
    train,
    wait_for_progress,
)
from table_servers import ServerProcess
from test_served_ranks import EXACT, resume

from shardwright.comm.transport.servers import Caller, ServerConnector, TableServers
from shardwright.embeddings.service import calls
from shardwright.embeddings.service.owned_rows import OwnedSpec

MODES = pytest.mark.parametrize("sync", (EXACT, BOUNDED), ids=("exact", "bounded"))
NUM_SERVERS, CUT_SECONDS, RUN_SECONDS = 2, 5.0, 280.0


@pytest.fixture(scope="module")
def servers():
    """Servers of one run after another."""
    with ExitStack() as stack:
        processes = [ServerProcess() for _ in range(NUM_SERVERS)]
        for process in processes:
            stack.callback(process.stop)
        yield tuple(process.address for process in processes)


@pytest.fixture(scope="module")
def undisturbed(ranks, servers):
    """What the ranks of an undisturbed run have, by mode."""
    return {sync: ranks.run(2, train, Training(servers, sync)) for sync in (EXACT, BOUNDED)}


def assert_same_bits(answers, expected) -> None:
    for (outputs, state), (expected_outputs, expected_state) in zip(answers, expected, strict=True):
        assert len(outputs) == STEPS and all(map(torch.equal, outputs, expected_outputs))
        assert state.keys() == expected_state.keys()
        assert all(torch.equal(state[name], value) for name, value in expected_state.items())


def run_beside(ranks, training, disturb):
    """The answers of a run, while a thread calls `disturb`; raises the error of either."""
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(disturb)
        answers = ranks.run(training.world, train, training, seconds=RUN_SECONDS)
        future.result(60)
    return answers


@pytest.mark.slow
@pytest.mark.timeout(900)
@MODES
def test_servers_killed_at_twenty_random_moments_lose_nothing(ranks, undisturbed, tmp_path, sync):
    """`test_served_ranks` has a short form."""
    chance, progress, killed = random.Random(sync.pull), tmp_path / "progress", []
    moments = sorted((chance.randrange(STEPS - 4), 0.2 * chance.random(), chance.randrange(2)) for _ in range(20))
    with ExitStack() as stack:
        processes = [ServerProcess(tmp_path / f"journal{number}") for number in range(NUM_SERVERS)]
        for process in processes:
            stack.callback(process.stop)

        def kill() -> None:
            for step, delay, number in moments:
                wait_for_progress(progress, step)
                time.sleep(delay)
                assert processes[number].process.poll() is None, "alive"
                processes[number].kill()
                assert 0 <= read_progress(progress) < STEPS, "in the run"
                killed.append(step)
                processes[number].start()

        addresses = tuple(process.address for process in processes)
        answers = run_beside(ranks, Training(addresses, sync, pause=0.05, progress=str(progress)), kill)
    assert len(killed) == 20 and len({*killed}) > 10
    assert_same_bits(answers, undisturbed[sync])


@MODES
@pytest.mark.parametrize("closes", (False, True), ids=("held", "closed"))
def test_a_link_that_is_cut_for_five_seconds_changes_nothing(ranks, servers, undisturbed, tmp_path, sync, closes):
    progress = tmp_path / "progress"
    with failing_link(servers[1]) as link:

        def disturb() -> None:
            wait_for_progress(progress, 20)
            (link.cut if closes else link.hold)(CUT_SECONDS)
            assert 20 <= read_progress(progress) < STEPS, "in the run"

        training = Training((servers[0], link.address), sync, pause=0.02, progress=str(progress))
        start = time.monotonic()
        answers = run_beside(ranks, training, disturb)
        assert time.monotonic() - start > CUT_SECONDS
        assert (link.num_cut > 4 and link.num_refused) if closes else link.num_waiting, "ranks needed the link"
    assert_same_bits(answers, undisturbed[sync])


SHARES = {"lost": 0.03, "doubled": 0.1, "delayed": 0.04, "damaged": 0.03}


@MODES
def test_messages_lost_doubled_delayed_or_damaged_on_a_link_change_nothing(ranks, servers, undisturbed, sync):
    chance, fired = random.Random(sync.pull), Counter()
    with failing_link(servers[1], lambda _: ChangedMessages(chance, fired, SHARES)) as link:
        answers = ranks.run(2, train, Training((servers[0], link.address), sync), seconds=RUN_SECONDS)
    assert min(fired[fault] for fault in SHARES) >= 3, fired
    assert_same_bits(answers, undisturbed[sync])


@pytest.mark.parametrize("to_server", (True, False))
def test_connections_closed_after_damaged_bytes_change_nothing(ranks, servers, undisturbed, to_server):
    """A rank that gets such bytes connects again after half of the timeout."""
    chance, fired = random.Random(0), Counter()

    def make_filter(is_to_server):
        return ChangedMessages(chance, fired, {"no frame": 0.05 if is_to_server == to_server else 0.0}, num_first=15)

    with failing_link(servers[1], make_filter) as link:
        training = Training((servers[0], link.address), timeout_seconds=10.0)
        answers = ranks.run(2, train, training, seconds=RUN_SECONDS)
    assert fired["no frame"] >= 3, fired
    assert_same_bits(answers, undisturbed[EXACT])


def test_a_server_killed_before_it_opens_a_run_opens_it_when_it_is_back(tmp_path):
    process = ServerProcess(tmp_path)
    connector = ServerConnector(TableServers((process.address,), timeout_seconds=30.0), Caller("r", 0))
    try:
        connection = connector.connect(0)
        time.sleep(1.0)  # until zmq has connected
        process.process.send_signal(signal.SIGSTOP)
        reply = connection.call(calls.open_call(OwnedSpec(0, 1, OPTIMIZER, ())))
        time.sleep(0.5)  # until the call is in the socket of the server
        process.kill()
        process.start()
        assert "error" not in reply.wait().header
    finally:
        connector.close()
        process.stop()


@pytest.mark.parametrize("sync, rank", ((EXACT, 1), (BOUNDED, 2)), ids=("exact", "bounded"))
def test_a_run_whose_rank_was_killed_resumes_on_the_same_servers(ranks, servers, tmp_path, monkeypatch, sync, rank):
    world, timeout, progress = 3, 10.0, tmp_path / "progress"
    expected = ranks.run(world, train, Training(servers, sync, world, checkpoints=str(tmp_path / "undisturbed")))
    monkeypatch.setattr(pool, "SIZE", world)
    others, errors = pool.Pool(), {}
    training = Training(servers, sync, world, 0.1, str(progress), str(tmp_path / "saved"), timeout)
    try:
        port = pool.free_port()
        for pipe in others._pipes:
            pipe.send((0, train, world, port, (training,)))
        wait_for_progress(progress, STEPS // 2 + random.Random(rank).randrange(1, STEPS // 4))
        assert others._processes[rank].is_alive()
        others._processes[rank].kill()
        killed_at = read_progress(progress)
        start = time.monotonic()
        for survivor in {*range(world)} - {rank}:
            assert others._pipes[survivor].poll(60)
            _, succeeded, errors[survivor] = others._pipes[survivor].recv()
            assert not succeeded and time.monotonic() - start < timeout + 15, errors
    finally:
        for process in others._processes:
            process.kill()
            process.join()
        others.close()
    assert STEPS // 2 < killed_at < STEPS
    for error in errors.values():
        assert f"rank {rank} has sent no heartbeat" in error and "restart the job from its last checkpoint" in error
    answers = ranks.run(world, resume, world, OPTIMIZER, servers, sync, str(tmp_path / "saved"), STEPS)
    for (outputs, state), (expected_outputs, expected_state) in zip(answers, expected, strict=True):
        assert all(map(torch.equal, outputs, expected_outputs[STEPS // 2 :]))
        assert all(torch.equal(state[name], value) for name, value in expected_state.items() if "random" not in name)
