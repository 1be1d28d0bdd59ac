"""Sums over ranks of several hosts: the same bits on all, any size and order, beside other messages, and lost peers."""

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
from test_collectives import drawn
from test_memory import exchanged

from shardwright.comm import collective
from shardwright.comm.collective import CROSS_HOST_REDUCE_BYTES
from shardwright.comm.hierarchical import hierarchical_all_reduce
from shardwright.comm.shared_memory import Channel
from shardwright.comm.mesh import Group, Mesh
from shardwright.comm.pending import ChainedWork, Waiter

SIZES = (0, 1, 2, 3, 5, 1001, CROSS_HOST_REDUCE_BYTES // 12, CROSS_HOST_REDUCE_BYTES // 8 + 3, 100_003, 1 << 20)


class TwoHosts:
    """A mesh of four ranks, two of them to a host, as a launcher would tell."""

    def __init__(self, lanes: tuple[str, ...] = (), first: int = 2, **words) -> None:
        rank = int(os.environ["RANK"])
        self._few = pytest.MonkeyPatch()
        self._few.setenv("LOCAL_WORLD_SIZE", "2")
        self._few.setenv("LOCAL_RANK", str(rank if rank < first else rank - first))
        self.mesh = Mesh((("host", 2), ("local", 2)), lanes=lanes, timeout_seconds=30, **words)

    def __enter__(self) -> Mesh:
        return self.mesh

    def __exit__(self, *_) -> None:
        self._few.undo()
        self.mesh.close()


def of_all(size: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [(1000 * drawn(size, seed=seed + one)).to(dtype) for one in range(4)]


def by_host(all_: list[torch.Tensor]) -> torch.Tensor:
    return (all_[0] + all_[1]) + (all_[2] + all_[3])


def sums(dtype: torch.dtype) -> list[bytes]:
    found = []
    with TwoHosts() as mesh:
        for size in SIZES:
            all_ = of_all(size, dtype)
            x = all_[mesh.rank].clone()
            pending = collective.all_reduce(x, mesh.group())
            assert pending.wait() is x and pending.end is not None and pending.end >= pending.start
            small = 3 * x.nbytes <= CROSS_HOST_REDUCE_BYTES
            assert torch.equal(x, all_[0] + all_[1] + all_[2] + all_[3] if small else by_host(all_))
            over = all_[mesh.rank].clone()
            assert torch.equal(hierarchical_all_reduce(over, mesh.group().next_hierarchical_group()).wait(), by_host(all_))
            found += [x.numpy().tobytes(), over.numpy().tobytes()]
        matrix = all_[mesh.rank][:60].view(3, 4, 5).clone()
        assert torch.equal(hierarchical_all_reduce(matrix, mesh.group().next_hierarchical_group()).wait(), by_host(all_)[:60].view(3, 4, 5))
    return found


def rounded_sums(dtype: torch.dtype) -> list[bytes]:
    """Of two hosts: inside each added in full, rounded once on the way to the other; nothing is lost in the long run."""
    found = []
    with TwoHosts() as mesh:
        for size in (1001, CROSS_HOST_REDUCE_BYTES // 12, 100_003):
            all_ = of_all(size, dtype)
            x = all_[mesh.rank].clone()
            collective.all_reduce_bf16(x, mesh.group()).wait()
            exact, found = by_host(all_), [*found, x.numpy().tobytes()]
            if 3 * x.nbytes > CROSS_HOST_REDUCE_BYTES:
                hosts = ((all_[0] + all_[1]).bfloat16().to(dtype), (all_[2] + all_[3]).bfloat16().to(dtype))
                assert torch.equal(x, hosts[0] + hosts[1])
        kept, total, plain = torch.zeros_like(exact), torch.zeros_like(exact), torch.zeros_like(exact)
        for _ in range(50):
            total += collective.all_reduce_bf16(all_[mesh.rank].clone(), mesh.group(), kept).wait() / 50
            plain += collective.all_reduce_bf16(all_[mesh.rank].clone(), mesh.group()).wait() / 50
        size_of = float(exact.abs().mean())
        assert float((total - exact).abs().mean()) < 2**-13 * size_of < 2**-11 * size_of
        assert float((plain - exact).abs().mean()) > 2**-11 * size_of
    return [*found, total.numpy().tobytes()]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_sums_whose_crossing_is_rounded_are_the_same_on_all(ranks, dtype):
    first, *others = ranks.run(4, rounded_sums, dtype)
    assert all(one == first for one in others)


@pytest.mark.parametrize("dtype", sorted(collective.SUMMABLE_DTYPES, key=str))
def test_sums_of_any_size_are_added_host_by_host_and_the_same_on_all(ranks, dtype):
    first, *others = ranks.run(4, sums, dtype)
    assert all(one == first for one in others)


def in_any_order() -> bool:
    """Lanes in another order on each rank, all-to-alls between the sums, waited for in yet another."""
    with TwoHosts(lanes=("a", "b")) as mesh:
        under_way = []
        for lane in mesh.lanes if mesh.rank % 2 else reversed(mesh.lanes):
            group = mesh.group(lane=lane)
            for turn in range(12):
                all_ = of_all(20_000 * (turn % 3) + 12_000 + turn, torch.float32, seed=turn + ord(lane))
                under_way.append((collective.all_reduce(all_[mesh.rank].clone(), group), by_host(all_)))
                size = 30_000 + 1000 * turn
                under_way.append(exchanged(group, mesh.rank, [[size + of + to for to in range(4)] for of in range(4)]))
        order = torch.randperm(len(under_way), generator=torch.Generator().manual_seed(mesh.rank)).tolist()
        return all([torch.equal(under_way[at][0].wait(), under_way[at][1]) for at in order])


def test_sums_under_way_at_once_beside_other_messages_of_their_lane(ranks):
    assert all(ranks.run(4, in_any_order))


def one_comes_late() -> tuple[float, float]:
    """How long waiting took, and when the last of the sums had ended."""
    with TwoHosts() as mesh:
        all_ = of_all(100_000, torch.float32)
        collective.all_reduce(torch.ones(1), mesh.group()).wait()
        start = time.perf_counter()
        under_way = [collective.all_reduce(all_[mesh.rank].clone(), mesh.group()) for _ in range(5)]
        if mesh.rank == 3:
            time.sleep(2)
        before = time.perf_counter()
        for one in under_way:
            assert torch.equal(one.wait(), by_host(all_))
        return time.perf_counter() - before, max(one.end for one in under_way) - start


def test_sums_go_on_while_nobody_waits_and_say_when_they_ended(ranks):
    for waited, ended in ranks.run(4, one_comes_late):
        assert waited < 1.5 and ended < 1.5


def shape(words: dict, first: int) -> tuple[list[bool], list[float], list[str]]:
    """Which groups sum host by host, what sums are, and the threads that a closed mesh leaves."""
    with TwoHosts(first=first, **words) as mesh:
        groups = [mesh.group(), mesh.group("local"), mesh.group("host")]
        found = [collective.all_reduce(torch.ones(50_000), one).wait().sum().item() / 50_000 for one in groups]
        by_hosts = [bool(one.hierarchical_groups) for one in groups]
    ends = time.monotonic() + 5
    while (left := [one.name for one in threading.enumerate() if one.name == "waiter"]) and time.monotonic() < ends:
        time.sleep(0.01)
    return by_hosts, found, left


def test_only_groups_with_several_ranks_on_each_of_several_hosts_sum_so(ranks):
    sizes = [4.0, 2.0, 2.0]
    assert ranks.run(4, shape, {}, 2) == [([True, False, False], sizes, [])] * 4
    assert ranks.run(4, shape, {}, 3) == [([False] * 3, sizes, [])] * 4  # three ranks on one host, one on the other
    assert ranks.run(4, shape, {"memory": False}, 2) == [([True, False, False], sizes, [])] * 4


def in_threads(hosts: int, locals_: int) -> list[Group]:
    """The group as each of its ranks has it, all in this process, and near each other whatever their host."""
    num = hosts * locals_
    near: list[dict[int, Channel]] = [{} for _ in range(num)]
    for one, other in combinations(range(num), 2):
        ends = socket.socketpair()
        near[one][other], near[other][one] = (Channel(end, 20.0) for end in ends)
    places = tuple(tuple(range(host * locals_, (host + 1) * locals_)) for host in range(hosts))
    return [
        Group(tuple(range(num)), at, "main", None, None, Waiter(), local_channels=near[at], hosts=places) for at in range(num)
    ]


@pytest.mark.parametrize(("hosts", "locals_"), [(2, 2), (2, 4), (3, 2), (4, 3), (5, 2)])
def test_any_number_of_hosts_and_ranks(hosts, locals_):
    groups = in_threads(hosts, locals_)
    for size in (0, 1, locals_ + 1, hosts * locals_ - 1, 1000, 50_021):
        all_ = [drawn(size, seed=one) for one in range(len(groups))]
        expected = sum(sum(all_[at : at + locals_][1:], all_[at]) for at in range(0, len(all_), locals_))
        under_way = [hierarchical_all_reduce(x.clone(), group) for x, group in zip(all_, groups, strict=True)]
        assert all(torch.equal(one.wait(), expected) for one in under_way)
        kept = [torch.zeros_like(x) for x in all_]
        rounding = [
            hierarchical_all_reduce(x.clone(), group, bf16_across_hosts=True, residual=lost)
            for x, group, lost in zip(all_, groups, kept, strict=True)
        ]
        first, *others = [one.wait() for one in rounding]
        assert all(torch.equal(first, other) for other in others)
        by_hosts = [sum(all_[at : at + locals_]) for at in range(0, len(all_), locals_)]
        bound = 2**-8 * sum(one.abs() for one in by_hosts) + 2**-8 * expected.abs() + 1e-4
        assert ((first - expected).abs() <= bound).all()
        torch.testing.assert_close(first + sum(kept), expected, rtol=1e-5, atol=1e-5)  # nothing is lost
    for group in groups:
        group.waiter.stop()
        for channel in group.local_channels.values():
            channel.close()


def test_what_comes_after_a_turn_that_failed_fails_too():
    done = []

    def fails() -> None:
        raise RuntimeError("connection lost")

    waiter = Waiter()
    first, second, third = waiter.chain(fails), waiter.chain(lambda: done.append(2)), waiter.chain(lambda: done.append(3))
    last = threading.Thread(target=lambda: pytest.raises(RuntimeError, third.wait))
    last.start()
    for turn in (first, second):
        with pytest.raises(RuntimeError, match="connection lost"):
            turn.wait()
    last.join(5)
    assert not last.is_alive() and done == []


def test_a_turn_waits_for_the_one_before_it():
    done = []
    first = ChainedWork(lambda: done.append(1), None)
    second = ChainedWork(lambda: done.append(2), first)
    early = threading.Thread(target=second.wait)
    early.start()
    time.sleep(0.1)
    assert done == []
    first.wait()
    early.join(5)
    assert done == [1, 2]


LOST = """
import os, signal, sys, time, torch
from shardwright.comm import collective
from shardwright.comm.mesh import Mesh
from shardwright.comm.heartbeat import PeerLost
mesh = Mesh((("rank", 4),), timeout_seconds=float(sys.argv[2]))
group, x = mesh.group(), torch.ones(1 << 18)
assert group.hierarchical_groups
collective.all_reduce(x, group).wait()
mesh.heartbeat.stage, mesh.heartbeat.step = "sum gradients", 3
under_way = [collective.all_reduce(x.clone(), group) for _ in range(2)] if mesh.rank != 3 else []
if mesh.rank == 3:
    if sys.argv[1] == "killed":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.heartbeat.stage = "look up"
    time.sleep(60)
start = time.perf_counter()
for one in reversed(under_way):
    try:
        one.wait()
        print("whole", flush=True)
    except PeerLost as told:
        print(f"{time.perf_counter() - start:.1f} {told}", flush=True)
os._exit(0)
"""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("mode", "seconds", "why"),
    [("killed", 20, "rank 3 has not been heard of for 2 s"), ("away", 4, "rank 3 is elsewhere, in look up of step 3")],
)
def test_a_rank_that_is_missing_from_a_sum_is_named_by_all_others_in_time(mode, seconds, why):
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    place |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LOST, mode, str(seconds)],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        lines = [rank.communicate(timeout=90)[0].splitlines() for rank in ranks[:3]]
    finally:
        for rank in ranks:
            rank.kill()
        ranks[3].communicate()
    for survivor in lines:
        assert len(survivor) == 2 and all(why in line for line in survivor), lines
        assert all(float(line.split()[0]) < seconds + 25 for line in survivor), lines
