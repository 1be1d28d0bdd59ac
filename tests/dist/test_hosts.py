"""All-reduce over several hosts: equal bits on all ranks, any size and order, concurrent messages, and lost peers."""

import os
import socket
import subprocess
import sys
import threading
import time
from itertools import combinations

import pytest
import torch
from pool import free_port
from test_collectives import random_tensor
from test_memory import start_exchange

from shardwright.comm import collective
from shardwright.comm.collective import CROSS_HOST_REDUCE_BYTES
from shardwright.comm.hierarchical import hierarchical_all_reduce
from shardwright.comm.mesh import Group, Mesh
from shardwright.comm.pending import ChainedWork, Waiter
from shardwright.comm.shared_memory import Channel

SIZES = (0, 1, 2, 3, 5, 1001, CROSS_HOST_REDUCE_BYTES // 12, CROSS_HOST_REDUCE_BYTES // 8 + 3, 100_003, 1 << 20)


class TwoHosts:
    """A mesh of four ranks, two per host by the launcher's variables; `first`: rank with local rank 0 on host 1."""

    def __init__(self, lanes: tuple[str, ...] = (), first: int = 2, **options) -> None:
        rank = int(os.environ["RANK"])
        self._patch = pytest.MonkeyPatch()
        self._patch.setenv("LOCAL_WORLD_SIZE", "2")
        self._patch.setenv("LOCAL_RANK", str(rank if rank < first else rank - first))
        self.mesh = Mesh((("host", 2), ("local", 2)), lanes=lanes, timeout_seconds=30, **options)

    def __enter__(self) -> Mesh:
        return self.mesh

    def __exit__(self, *_) -> None:
        self._patch.undo()
        self.mesh.close()


def tensors_of_ranks(size: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [(1000 * random_tensor(size, seed=seed + rank)).to(dtype) for rank in range(4)]


def sum_by_host(tensors: list[torch.Tensor]) -> torch.Tensor:
    return (tensors[0] + tensors[1]) + (tensors[2] + tensors[3])


def all_reduce_sizes(dtype: torch.dtype) -> list[bytes]:
    sums = []
    with TwoHosts() as mesh:
        for size in SIZES:
            all_ = tensors_of_ranks(size, dtype)
            x = all_[mesh.rank].clone()
            pending = collective.all_reduce(x, mesh.group())
            assert pending.wait() is x and pending.end is not None and pending.end >= pending.start
            small = 3 * x.nbytes <= CROSS_HOST_REDUCE_BYTES
            assert torch.equal(x, all_[0] + all_[1] + all_[2] + all_[3] if small else sum_by_host(all_))
            y = all_[mesh.rank].clone()
            pending = hierarchical_all_reduce(y, mesh.group().next_hierarchical_group())
            assert torch.equal(pending.wait(), sum_by_host(all_))
            sums += [x.numpy().tobytes(), y.numpy().tobytes()]
        matrix = all_[mesh.rank][:60].view(3, 4, 5).clone()
        pending = hierarchical_all_reduce(matrix, mesh.group().next_hierarchical_group())
        assert torch.equal(pending.wait(), sum_by_host(all_)[:60].view(3, 4, 5))
    return sums


def all_reduce_bf16_sizes(dtype: torch.dtype) -> list[bytes]:
    """Host sums are exact and rounded once before they cross hosts; with error feedback the mean error vanishes."""
    sums = []
    with TwoHosts() as mesh:
        for size in (1001, CROSS_HOST_REDUCE_BYTES // 12, 100_003):
            all_ = tensors_of_ranks(size, dtype)
            x = all_[mesh.rank].clone()
            collective.all_reduce_bf16(x, mesh.group()).wait()
            exact, sums = sum_by_host(all_), [*sums, x.numpy().tobytes()]
            if 3 * x.nbytes > CROSS_HOST_REDUCE_BYTES:
                hosts = ((all_[0] + all_[1]).bfloat16().to(dtype), (all_[2] + all_[3]).bfloat16().to(dtype))
                assert torch.equal(x, hosts[0] + hosts[1])
        residual, with_feedback, plain = (torch.zeros_like(exact) for _ in range(3))
        for _ in range(50):
            with_feedback += collective.all_reduce_bf16(all_[mesh.rank].clone(), mesh.group(), residual).wait() / 50
            plain += collective.all_reduce_bf16(all_[mesh.rank].clone(), mesh.group()).wait() / 50
        mean = float(exact.abs().mean())
        assert float((with_feedback - exact).abs().mean()) < 2**-13 * mean < 2**-11 * mean
        assert float((plain - exact).abs().mean()) > 2**-11 * mean
    return [*sums, with_feedback.numpy().tobytes()]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_sums_rounded_between_hosts_are_equal_on_all_ranks(ranks, dtype):
    first, *others = ranks.run(4, all_reduce_bf16_sizes, dtype)
    assert all(sums == first for sums in others)


@pytest.mark.parametrize("dtype", sorted(collective.SUMMABLE_DTYPES, key=str))
def test_sums_of_any_size_are_added_by_host_and_equal_on_all_ranks(ranks, dtype):
    first, *others = ranks.run(4, all_reduce_sizes, dtype)
    assert all(sums == first for sums in others)


def reduce_and_exchange_in_any_order() -> bool:
    """Ranks start lanes in different orders, with all-to-alls between the sums, and wait in different orders."""
    with TwoHosts(lanes=("a", "b")) as mesh:
        in_flight = []
        for lane in mesh.lanes if mesh.rank % 2 else reversed(mesh.lanes):
            group = mesh.group(lane=lane)
            for i in range(12):
                all_ = tensors_of_ranks(20_000 * (i % 3) + 12_000 + i, torch.float32, seed=i + ord(lane))
                in_flight.append((collective.all_reduce(all_[mesh.rank].clone(), group), sum_by_host(all_)))
                matrix = [[30_000 + 1000 * i + source + target for target in range(4)] for source in range(4)]
                in_flight.append(start_exchange(group, mesh.rank, matrix))
        order = torch.randperm(len(in_flight), generator=torch.Generator().manual_seed(mesh.rank)).tolist()
        is_equal = [torch.equal(in_flight[number][0].wait(), in_flight[number][1]) for number in order]
        return all(is_equal)  # after a wait for each


def test_concurrent_sums_and_other_messages_of_the_same_lanes(ranks):
    assert all(ranks.run(4, reduce_and_exchange_in_any_order))


def wait_late_on_one_rank() -> tuple[float, float]:
    """Seconds that waiting took, and seconds until the last sum completed."""
    with TwoHosts() as mesh:
        all_ = tensors_of_ranks(100_000, torch.float32)
        collective.all_reduce(torch.ones(1), mesh.group()).wait()
        start = time.perf_counter()
        in_flight = [collective.all_reduce(all_[mesh.rank].clone(), mesh.group()) for _ in range(5)]
        if mesh.rank == 3:
            time.sleep(2)
        before = time.perf_counter()
        for pending in in_flight:
            assert torch.equal(pending.wait(), sum_by_host(all_))
        return time.perf_counter() - before, max(pending.end for pending in in_flight) - start


def test_sums_complete_without_a_wait_and_record_when(ranks):
    for waited, completed in ranks.run(4, wait_late_on_one_rank):
        assert waited < 1.5 and completed < 1.5


def reduce_in_groups(options: dict, first: int) -> tuple[list[bool], list[float], list[str]]:
    """Whether each group reduces hierarchically, its sums, and the threads that remain after the mesh is closed."""
    with TwoHosts(first=first, **options) as mesh:
        groups = [mesh.group(), mesh.group("local"), mesh.group("host")]
        sums = [collective.all_reduce(torch.ones(50_000), group).wait().sum().item() / 50_000 for group in groups]
        hierarchical = [bool(group.hierarchical_groups) for group in groups]
    deadline = time.monotonic() + 5
    while (names := [t.name for t in threading.enumerate() if t.name == "waiter"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return hierarchical, sums, names


def test_only_groups_with_several_ranks_on_each_of_several_hosts_reduce_hierarchically(ranks):
    sizes = [4.0, 2.0, 2.0]
    assert ranks.run(4, reduce_in_groups, {}, 2) == [([True, False, False], sizes, [])] * 4
    # Three ranks on one host, one on the other.
    assert ranks.run(4, reduce_in_groups, {}, 3) == [([False] * 3, sizes, [])] * 4
    assert ranks.run(4, reduce_in_groups, {"memory": False}, 2) == [([True, False, False], sizes, [])] * 4


def groups_in_one_process(hosts: int, locals_: int) -> list[Group]:
    """The group object of each rank, all in this process, with shared memory also between different hosts."""
    num = hosts * locals_
    channels: list[dict[int, Channel]] = [{} for _ in range(num)]
    for first, second in combinations(range(num), 2):
        channels[first][second], channels[second][first] = (Channel(end, 20.0) for end in socket.socketpair())
    ranks_by_host = tuple(tuple(range(host * locals_, (host + 1) * locals_)) for host in range(hosts))
    ranks = tuple(range(num))
    return [
        Group(ranks, rank, "main", None, None, Waiter(), local_channels=channels[rank], hosts=ranks_by_host)
        for rank in ranks
    ]


@pytest.mark.parametrize(("hosts", "locals_"), [(2, 2), (2, 4), (3, 2), (4, 3), (5, 2)])
def test_any_number_of_hosts_and_ranks(hosts, locals_):
    groups = groups_in_one_process(hosts, locals_)
    for size in (0, 1, locals_ + 1, hosts * locals_ - 1, 1000, 50_021):
        all_ = [random_tensor(size, seed=rank) for rank in range(len(groups))]
        by_host = [all_[first : first + locals_] for first in range(0, len(all_), locals_)]
        expected = sum(sum(tensors[1:], tensors[0]) for tensors in by_host)
        in_flight = [hierarchical_all_reduce(x.clone(), group) for x, group in zip(all_, groups, strict=True)]
        assert all(torch.equal(pending.wait(), expected) for pending in in_flight)
        residuals = [torch.zeros_like(x) for x in all_]
        in_flight = [
            hierarchical_all_reduce(x.clone(), group, bf16_across_hosts=True, residual=residual)
            for x, group, residual in zip(all_, groups, residuals, strict=True)
        ]
        first, *others = [pending.wait() for pending in in_flight]
        assert all(torch.equal(first, other) for other in others)
        bound = 2**-8 * sum(sum(tensors).abs() for tensors in by_host) + 2**-8 * expected.abs() + 1e-4
        assert ((first - expected).abs() <= bound).all()
        # The residuals contain all rounding errors.
        torch.testing.assert_close(first + sum(residuals), expected, rtol=1e-5, atol=1e-5)
    for group in groups:
        group.waiter.stop()
        for channel in group.local_channels.values():
            channel.close()


def test_chained_work_fails_if_its_predecessor_failed():
    done = []

    def fails() -> None:
        raise RuntimeError("connection lost")

    waiter = Waiter()
    first, second, third = (
        waiter.chain(fails),
        waiter.chain(lambda: done.append(2)),
        waiter.chain(lambda: done.append(3)),
    )
    thread = threading.Thread(target=lambda: pytest.raises(RuntimeError, third.wait))
    thread.start()
    for work in (first, second):
        with pytest.raises(RuntimeError, match="connection lost"):
            work.wait()
    thread.join(5)
    assert not thread.is_alive() and done == []


def test_chained_work_waits_for_its_predecessor():
    done = []
    first = ChainedWork(lambda: done.append(1), None)
    second = ChainedWork(lambda: done.append(2), first)
    thread = threading.Thread(target=second.wait)
    thread.start()
    time.sleep(0.1)
    assert done == []
    first.wait()
    thread.join(5)
    assert done == [1, 2]


RANK_SCRIPT = """
import os, signal, sys, time, torch
from shardwright.comm import collective
from shardwright.comm.mesh import Mesh
from shardwright.comm.heartbeat import PeerLost
mesh = Mesh((("rank", 4),), timeout_seconds=float(sys.argv[2]))
group, x = mesh.group(), torch.ones(1 << 18)
assert group.hierarchical_groups
collective.all_reduce(x, group).wait()
mesh.heartbeat.stage, mesh.heartbeat.step = "sum gradients", 3
in_flight = [collective.all_reduce(x.clone(), group) for _ in range(2)] if mesh.rank != 3 else []
if mesh.rank == 3:
    if sys.argv[1] == "killed":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.heartbeat.stage = "look up"
    time.sleep(60)
start = time.perf_counter()
for pending in reversed(in_flight):
    try:
        pending.wait()
        print("whole", flush=True)
    except PeerLost as error:
        print(f"{time.perf_counter() - start:.1f} {error}", flush=True)
os._exit(0)
"""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("mode", "seconds", "reason"),
    [("killed", 20, "rank 3 has sent no heartbeat for 2 s"), ("away", 4, "rank 3 is in look up of step 3")],
)
def test_all_other_ranks_name_a_rank_that_is_missing_from_a_sum_in_time(mode, seconds, reason):
    variables = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_SCRIPT, mode, str(seconds)],
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        survivors = [rank.communicate(timeout=90)[0].splitlines() for rank in ranks[:3]]
    finally:
        for rank in ranks:
            rank.kill()
        ranks[3].communicate()
    for lines in survivors:
        assert len(lines) == 2 and all(reason in line for line in lines), survivors
        assert all(float(line.split()[0]) < seconds + 25 for line in lines), survivors
