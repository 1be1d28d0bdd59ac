"""Messages through the memory of a host: every size, any order, no place, no memory, lost peers, and nothing left behind."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from pool import free_port
from test_collectives import counts_of, drawn

from shardwright.comm import collective, shared_memory
from shardwright.comm.shared_memory import INITIAL_RING_BYTES, INLINE_BYTES
from shardwright.comm.ring import LINE_BYTES, Ring
from shardwright.comm.mesh import Mesh
from shardwright.errors import UserError


def job(world: int, lanes: tuple[str, ...] = (), **words) -> Mesh:
    return Mesh((("rank", world),), lanes=lanes, timeout_seconds=30, **words)


def content(source: int, target: int, size: int) -> torch.Tensor:
    return (torch.arange(size) * (source + 3) + 7 * target).to(torch.uint8)


def exchanged(group, rank: int, sizes: list[list[int]]):
    """An all-to-all under way, and what has to come."""
    world = group.size
    x = torch.cat([content(rank, to, sizes[rank][to]) for to in range(world)])
    received = [sizes[of][rank] for of in range(world)]
    expected = torch.cat([content(of, rank, sizes[of][rank]) for of in range(world)])
    return collective.all_to_all(x, sizes[rank], received, group), expected


EDGES = (0, 1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, LINE_BYTES * 1000, INITIAL_RING_BYTES - LINE_BYTES)
LARGE = (INITIAL_RING_BYTES, 3 * INITIAL_RING_BYTES + 5)


def any_size(world: int) -> bool:
    mesh = job(world)
    assert mesh.near == tuple(other for other in range(world) if other != mesh.rank) and mesh.group().shares_memory
    sizes = (*EDGES, *LARGE)
    for first in range(len(sizes)):
        matrix = [[sizes[(first + 2 * of + to) % len(sizes)] for to in range(world)] for of in range(world)]
        pending, expected = exchanged(mesh.group(), mesh.rank, matrix)
        assert torch.equal(pending.wait(), expected)
    mesh.close()
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_every_size_arrives(ranks, world):
    assert all(ranks.run(world, any_size, world))


def many_under_way(world: int, without_memory: bool) -> bool:
    """A hundred exchanges before the first is waited for, on two lanes, then waited for from the last to the first."""
    mesh = job(world, ("a", "b"))
    few = pytest.MonkeyPatch()
    if without_memory:
        few.setattr(os, "memfd_create", no_memory)
    under_way = []
    for turn in range(100):
        size = EDGES[turn % len(EDGES)] // (1 + turn % 3)
        matrix = [[size + of + to for to in range(world)] for of in range(world)]
        under_way.append(exchanged(mesh.group(lane=mesh.lanes[turn % 2]), mesh.rank, matrix))
        under_way.append(exchanged(mesh.group(lane=mesh.lanes[turn % 2]), mesh.rank, counts_of(world, turn)))
    order = reversed(under_way) if mesh.rank else under_way
    fine = all([torch.equal(pending.wait(), expected) for pending, expected in order])
    few.undo()
    mesh.close()
    return fine


def no_memory(name: str) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("without_memory", [False, True])
def test_many_at_once_in_any_order_with_and_without_memory(ranks, without_memory):
    assert all(ranks.run(3, many_under_way, 3, without_memory))


def no_receiver_yet() -> tuple[int, int]:
    """What one way takes grows while nobody takes it, and is used again when somebody does."""
    mesh = job(2)
    group = mesh.group()
    size = 1 << 18
    mine = [[0, size], [0, 0]]
    under_way = [exchanged(group, mesh.rank, mine) for _ in range(20 if mesh.rank == 0 else 0)]
    time.sleep(0.2 * mesh.rank)
    under_way += [exchanged(group, mesh.rank, mine) for _ in range(20 if mesh.rank else 0)]
    assert all(torch.equal(pending.wait(), expected) for pending, expected in under_way)
    collective.broadcast(torch.zeros(1), 1, group).wait()
    ring = group.local_channels[1 - mesh.rank]._mine
    before = ring.bytes_ if ring else 0
    for _ in range(20):
        pending, expected = exchanged(group, mesh.rank, mine)
        assert torch.equal(pending.wait(), expected)
        collective.broadcast(torch.zeros(1), 1, group).wait()
    after = group.local_channels[1 - mesh.rank]._mine
    mesh.close()
    return before, after.bytes_ if after else 0


def test_a_ring_grows_and_is_used_again(ranks):
    (before, after), silent = ranks.run(2, no_receiver_yet)
    assert INITIAL_RING_BYTES < before == after and silent == (0, 0)


def ring(bytes_: int) -> Ring:
    made = shared_memory._made(bytes_)
    assert made is not None
    os.close(made[1])
    return made[0]


def test_places_of_a_ring_never_overlap():
    found, under_way = ring(4096), []
    draw = torch.Generator().manual_seed(0)
    placed = 0
    for _ in range(3000):
        size = int(torch.randint(1, 900, (), generator=draw))
        at = found.reserve(size)
        if at is None:
            assert under_way
        else:
            placed += 1
            assert at >= LINE_BYTES and at + size <= 4096
            assert all(at + size <= start or end <= at for start, end in under_way), (at, size, under_way)
            under_way.append((at, at + size))
        if under_way and (at is None or torch.rand((), generator=draw) < 0.4):
            under_way.pop(0)
            found.mark_consumed()
    assert placed > 1000
    assert shared_memory._made(shared_memory.MAX_RING_BYTES + 1) is None


def sums(world: int, dtype: torch.dtype) -> list:
    mesh = job(world)
    found = []
    for size in (0, 1, 1000, 100_001, 1 << 20):
        all_ = [(100 * drawn(size, seed=one)).to(dtype) for one in range(world)]
        x = all_[mesh.rank].clone()
        assert collective.all_reduce(x, mesh.group()).wait() is x
        if size <= 100_001:
            expected = all_[0].clone()
            for one in all_[1:]:
                expected += one
            assert torch.equal(x, expected)
        found.append(x)
    mesh.close()
    return [x[:1000].tolist() for x in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_sums_are_in_the_order_of_ranks_and_the_same_on_all(ranks, dtype):
    first, *others = ranks.run(4, sums, 4, dtype)
    assert all(one == first for one in others)


def on_two_hosts(local: str | None, local_rank: bool, memory_: bool, cut: bool) -> tuple:
    """Who is near, and whether an exchange arrives, where the launcher says so many to a host."""
    few = pytest.MonkeyPatch()
    rank = int(os.environ["RANK"])
    if local:
        few.setenv("LOCAL_WORLD_SIZE", local)
    if local_rank:
        few.setenv("LOCAL_RANK", str(rank % int(local or 4)))
    if cut and rank == 0:
        few.setattr(shared_memory, "_called", refused)
    mesh = Mesh((("host", 2), ("local", 2)), timeout_seconds=30, memory=memory_)
    found = mesh.near, mesh.group("local").shares_memory, mesh.group().shares_memory
    for group in (mesh.group(), mesh.group("local"), mesh.group("host")):
        matrix = [[20_000 + of + to for to in range(group.size)] for of in range(group.size)]
        pending, expected = exchanged(group, group.index, matrix)
        assert torch.equal(pending.wait(), expected)
        assert collective.all_reduce(torch.ones(3), group).wait().tolist() == [group.size] * 3
        rows = torch.full((group.index + 1, 2), float(group.index))
        whole = collective.all_gather(rows, list(range(1, group.size + 1)), group).wait()
        assert whole[:, 0].tolist() == [float(of) for of in range(group.size) for _ in range(of + 1)]
    few.undo()
    mesh.close()
    return found


def without_a_folder(folder: str, variable: str) -> tuple:
    few = pytest.MonkeyPatch()
    few.setattr("tempfile.tempdir", folder or None)
    few.setenv("SHARDWRIGHT_MEMORY", variable)
    mesh = job(2)
    pending, expected = exchanged(mesh.group(), mesh.rank, [[0, 20_000], [20_000, 0]])
    arrived = torch.equal(pending.wait(), expected)
    near = mesh.near
    few.undo()
    mesh.close()
    return arrived, near


def test_gloo_has_what_no_name_can_be_called_for_and_all_that_is_left_to_it(ranks, tmp_path):
    deep = tmp_path / ("long" * 30)
    deep.mkdir()
    assert ranks.run(2, without_a_folder, "", "1") == [(True, (1,)), (True, (0,))]
    assert ranks.run(2, without_a_folder, str(deep), "1") == [(True, ())] * 2
    assert ranks.run(2, without_a_folder, str(tmp_path / "missing"), "1") == [(True, ())] * 2
    assert ranks.run(2, without_a_folder, "", "0") == [(True, ())] * 2
    assert list(deep.iterdir()) == []


def refused(rank: int, name: str, num: int, seconds: float):
    raise ConnectionRefusedError


def test_only_ranks_of_one_host_are_near(ranks):
    pairs = [((1,), True, False), ((0,), True, False), ((3,), True, False), ((2,), True, False)]
    assert ranks.run(4, on_two_hosts, "2", True, True, False) == pairs
    assert ranks.run(4, on_two_hosts, "2", False, True, False) == pairs
    assert [near for near, *_ in ranks.run(4, on_two_hosts, "1", True, True, False)] == [()] * 4
    assert ranks.run(4, on_two_hosts, None, False, False, False) == [((), False, False)] * 4


def test_a_rank_that_cannot_be_called_is_reached_by_gloo_and_both_know(ranks):
    found = ranks.run(4, on_two_hosts, None, False, True, True)
    assert found == [((), False, False), ((2, 3), False, False), ((1, 3), True, False), ((1, 2), True, False)]


def taken(folder: str = "/proc/self/fd") -> int:
    gc.collect()
    return len(os.listdir(folder))


def mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("shardwright (deleted)")


def opened_and_closed() -> tuple[int, int, int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    files, under = [], 0
    for _ in range(4):
        mesh = job(2, ("a", "b"))
        pending, expected = exchanged(mesh.group(), mesh.rank, [[0, INITIAL_RING_BYTES], [INITIAL_RING_BYTES, 0]])
        assert torch.equal(pending.wait(), expected)
        under = mapped()
        mesh.close()
        del mesh, pending
        files.append(taken())
    time.sleep(0.1)
    return files[-1] - files[0], under, mapped()


def test_a_mesh_that_is_closed_leaves_no_file_and_no_memory(ranks):
    for more, under, left in ranks.run(2, opened_and_closed):
        assert more <= 6 and under >= 2 and left == 0


def unlike() -> str:
    mesh = job(2)
    channel = mesh.group().local_channels[1 - mesh.rank]
    channel.send(torch.zeros(5 + mesh.rank)).wait()
    try:
        channel.receive(torch.zeros(5)).wait()
        return ""
    except RuntimeError as told:
        return str(told)
    finally:
        mesh.close()


def test_a_message_of_another_size_is_refused(ranks):
    assert ranks.run(2, unlike) == ["a message of 24 bytes where 20 were awaited", ""]


def closed_while_waiting() -> list[str]:
    mesh = job(2)
    channel = mesh.group().local_channels[1 - mesh.rank]
    told: list[str] = []

    def wait(work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            told.append(str(error))

    threads = [threading.Thread(target=wait, args=(channel.receive(torch.zeros(3)),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    mesh.close()
    for thread in threads:
        thread.join(5)
    return told


def test_who_still_waits_when_a_mesh_is_closed_is_told(ranks):
    for told in ranks.run(2, closed_while_waiting):
        assert len(told) == 3 and all("connection" in one for one in told)


KILLED = """
import os, signal, sys, time, torch
from shardwright.comm import collective
from shardwright.comm.mesh import Mesh
from shardwright.comm.heartbeat import PeerLost
mesh = Mesh((("rank", 2),), timeout_seconds=20)
group, n = mesh.group(), 1 << 20
x = torch.full((2 * n,), float(mesh.rank))
mesh.heartbeat.stage, mesh.heartbeat.step = "sum gradients", 3
assert mesh.near == (1 - mesh.rank,)
first = collective.all_to_all(x, [n, n], [n, n], group)
if mesh.rank == 1:
    print("ready", flush=True)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1.5)
assert first.wait()[n:].eq(1).all()  # what lay in the ring is there yet
try:
    collective.all_to_all(x, [n, n], [n, n], group).wait()
except PeerLost as told:
    print(told, flush=True)
os._exit(0)
"""


@pytest.mark.fault
def test_a_peer_that_is_killed_is_named_what_it_sent_is_there_and_nothing_is_left():
    folder = tempfile.mkdtemp()  # a short path: names of sockets have little room
    place = {"TMPDIR": folder, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED],
            env=os.environ | place | {"RANK": str(rank), "TORCH_CPP_LOG_LEVEL": "FATAL"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "rank 1 has not been heard of for 2 s, in sum gradients of step 3" in told[0], told
    assert ranks[1].returncode == -signal.SIGKILL
    assert os.listdir(folder) == []
    os.rmdir(folder)


def test_a_mesh_of_one_has_nobody_near():
    with pytest.raises(UserError):
        Mesh((("rank", 2),))
    assert Mesh().near == ()
