"""Messages through shared memory of a host: all sizes, any order, full rings, no memory, lost peers, and cleanup."""

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
from test_collectives import random_tensor, send_counts

from shardwright.comm import collective, shared_memory
from shardwright.comm.mesh import Mesh
from shardwright.comm.ring import LINE_BYTES, Ring
from shardwright.comm.shared_memory import INITIAL_RING_BYTES, INLINE_BYTES
from shardwright.errors import UserError


def make_mesh(world: int, lanes: tuple[str, ...] = (), **options) -> Mesh:
    return Mesh((("rank", world),), lanes=lanes, timeout_seconds=30, **options)


def content(source: int, target: int, size: int) -> torch.Tensor:
    return (torch.arange(size) * (source + 3) + 7 * target).to(torch.uint8)


def start_exchange(group, rank: int, sizes: list[list[int]]):
    """An all-to-all in flight, and the tensor that it must receive; `sizes[source][target]` bytes."""
    world = group.size
    x = torch.cat([content(rank, target, sizes[rank][target]) for target in range(world)])
    received_sizes = [sizes[source][rank] for source in range(world)]
    expected = torch.cat([content(source, rank, sizes[source][rank]) for source in range(world)])
    return collective.all_to_all(x, sizes[rank], received_sizes, group), expected


EDGES = (0, 1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, LINE_BYTES * 1000, INITIAL_RING_BYTES - LINE_BYTES)
LARGE = (INITIAL_RING_BYTES, 3 * INITIAL_RING_BYTES + 5)


def exchange_all_sizes(world: int) -> bool:
    mesh = make_mesh(world)
    assert mesh.near == tuple(other for other in range(world) if other != mesh.rank) and mesh.group().shares_memory
    sizes = (*EDGES, *LARGE)
    for first in range(len(sizes)):
        matrix = [[sizes[(first + 2 * a + b) % len(sizes)] for b in range(world)] for a in range(world)]
        pending, expected = start_exchange(mesh.group(), mesh.rank, matrix)
        assert torch.equal(pending.wait(), expected)
    mesh.close()
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_messages_of_every_size(ranks, world):
    assert all(ranks.run(world, exchange_all_sizes, world))


def exchange_many(world: int, without_memory: bool) -> bool:
    """Start 200 exchanges on two lanes before any wait; all ranks but 0 wait from the last to the first."""
    mesh = make_mesh(world, ("a", "b"))
    patch = pytest.MonkeyPatch()
    if without_memory:
        patch.setattr(os, "memfd_create", no_memory)
    in_flight = []
    for i in range(100):
        group, size = mesh.group(lane=mesh.lanes[i % 2]), EDGES[i % len(EDGES)] // (1 + i % 3)
        matrix = [[size + source + target for target in range(world)] for source in range(world)]
        in_flight.append(start_exchange(group, mesh.rank, matrix))
        in_flight.append(start_exchange(group, mesh.rank, send_counts(world, i)))
    order = reversed(in_flight) if mesh.rank else in_flight
    is_equal = [torch.equal(pending.wait(), expected) for pending, expected in order]
    patch.undo()
    mesh.close()
    return all(is_equal)


def no_memory(name: str) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("without_memory", [False, True])
def test_many_concurrent_exchanges_with_and_without_memory(ranks, without_memory):
    assert all(ranks.run(3, exchange_many, 3, without_memory))


def ring_sizes_with_late_receiver() -> tuple[int, int]:
    """Bytes of this rank's ring after 20 messages to a receiver that starts late, and after 20 received at once."""
    mesh = make_mesh(2)
    group = mesh.group()
    size = 1 << 18
    matrix = [[0, size], [0, 0]]
    in_flight = [start_exchange(group, mesh.rank, matrix) for _ in range(20 if mesh.rank == 0 else 0)]
    time.sleep(0.2 * mesh.rank)
    in_flight += [start_exchange(group, mesh.rank, matrix) for _ in range(20 if mesh.rank else 0)]
    assert all(torch.equal(pending.wait(), expected) for pending, expected in in_flight)
    collective.broadcast(torch.zeros(1), 1, group).wait()
    ring = group.local_channels[1 - mesh.rank]._send_ring
    before = ring.bytes_ if ring else 0
    for _ in range(20):
        pending, expected = start_exchange(group, mesh.rank, matrix)
        assert torch.equal(pending.wait(), expected)
        collective.broadcast(torch.zeros(1), 1, group).wait()
    after = group.local_channels[1 - mesh.rank]._send_ring
    mesh.close()
    return before, after.bytes_ if after else 0


def test_a_ring_grows_for_a_late_receiver_and_is_then_reused(ranks):
    (before, after), receiver = ranks.run(2, ring_sizes_with_late_receiver)
    assert INITIAL_RING_BYTES < before == after and receiver == (0, 0)


def make_ring(bytes_: int) -> Ring:
    ring_and_file = shared_memory._create_ring(bytes_)
    assert ring_and_file is not None
    os.close(ring_and_file[1])
    return ring_and_file[0]


def test_reserved_ranges_of_a_ring_never_overlap():
    ring, reserved = make_ring(4096), []
    generator = torch.Generator().manual_seed(0)
    num_reserved = 0
    for _ in range(3000):
        size = int(torch.randint(1, 900, (), generator=generator))
        offset = ring.reserve(size)
        if offset is None:
            assert reserved
        else:
            num_reserved += 1
            assert offset >= LINE_BYTES and offset + size <= 4096
            assert all(offset + size <= start or end <= offset for start, end in reserved), (offset, size, reserved)
            reserved.append((offset, offset + size))
        if reserved and (offset is None or torch.rand((), generator=generator) < 0.4):
            reserved.pop(0)
            ring.mark_consumed()
    assert num_reserved > 1000
    assert shared_memory._create_ring(shared_memory.MAX_RING_BYTES + 1) is None


def all_reduce_sizes(world: int, dtype: torch.dtype) -> list:
    mesh = make_mesh(world)
    sums = []
    for size in (0, 1, 1000, 100_001, 1 << 20):
        by_rank = [(100 * random_tensor(size, seed=rank)).to(dtype) for rank in range(world)]
        x = by_rank[mesh.rank].clone()
        assert collective.all_reduce(x, mesh.group()).wait() is x
        if size <= 100_001:
            expected = by_rank[0].clone()
            for tensor in by_rank[1:]:
                expected += tensor
            assert torch.equal(x, expected)
        sums.append(x)
    mesh.close()
    return [x[:1000].tolist() for x in sums]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_sums_are_in_rank_order_and_equal_on_all_ranks(ranks, dtype):
    first, *others = ranks.run(4, all_reduce_sizes, 4, dtype)
    assert all(sums == first for sums in others)


def exchange_on_two_hosts(local_world_size: str | None, local_rank: bool, memory: bool, refuse: bool) -> tuple:
    """Exchange in all groups, under a launcher's variables; returns (ranks that share memory, which groups do).
    With `refuse`, rank 0 cannot connect to other ranks' shared memory."""
    patch = pytest.MonkeyPatch()
    rank = int(os.environ["RANK"])
    if local_world_size:
        patch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    if local_rank:
        patch.setenv("LOCAL_RANK", str(rank % int(local_world_size or 4)))
    if refuse and rank == 0:
        patch.setattr(shared_memory, "_connect", refuse_connection)
    mesh = Mesh((("host", 2), ("local", 2)), timeout_seconds=30, memory=memory)
    result = mesh.near, mesh.group("local").shares_memory, mesh.group().shares_memory
    for group in (mesh.group(), mesh.group("local"), mesh.group("host")):
        matrix = [[20_000 + source + target for target in range(group.size)] for source in range(group.size)]
        pending, expected = start_exchange(group, group.index, matrix)
        assert torch.equal(pending.wait(), expected)
        assert collective.all_reduce(torch.ones(3), group).wait().tolist() == [group.size] * 3
        rows = torch.full((group.index + 1, 2), float(group.index))
        gathered = collective.all_gather(rows, list(range(1, group.size + 1)), group).wait()
        assert gathered[:, 0].tolist() == [float(index) for index in range(group.size) for _ in range(index + 1)]
    patch.undo()
    mesh.close()
    return result


def exchange_with_directory(directory: str, link: str = "") -> tuple:
    patch = pytest.MonkeyPatch()
    patch.setattr("tempfile.tempdir", directory or None)
    if link:
        patch.setenv("SHARDWRIGHT_LAB_LINK", link)
    mesh = make_mesh(2)
    pending, expected = start_exchange(mesh.group(), mesh.rank, [[0, 20_000], [20_000, 0]])
    is_equal = torch.equal(pending.wait(), expected)
    near = mesh.near
    patch.undo()
    mesh.close()
    return is_equal, near


def test_gloo_is_used_without_a_usable_directory_for_sockets_or_if_links_have_a_rate(ranks, tmp_path):
    long_path = tmp_path / ("long" * 30)
    long_path.mkdir()
    assert ranks.run(2, exchange_with_directory, "") == [(True, (1,)), (True, (0,))]
    assert ranks.run(2, exchange_with_directory, str(long_path)) == [(True, ())] * 2
    assert ranks.run(2, exchange_with_directory, str(tmp_path / "missing")) == [(True, ())] * 2
    assert ranks.run(2, exchange_with_directory, "", "8gbit") == [(True, ())] * 2
    assert list(long_path.iterdir()) == []


def refuse_connection(rank: int, name: str, num: int, seconds: float):
    raise ConnectionRefusedError


def test_only_ranks_of_the_same_host_share_memory(ranks):
    pairs = [((1,), True, False), ((0,), True, False), ((3,), True, False), ((2,), True, False)]
    assert ranks.run(4, exchange_on_two_hosts, "2", True, True, False) == pairs
    assert ranks.run(4, exchange_on_two_hosts, "2", False, True, False) == pairs
    assert [near for near, *_ in ranks.run(4, exchange_on_two_hosts, "1", True, True, False)] == [()] * 4
    assert ranks.run(4, exchange_on_two_hosts, None, False, False, False) == [((), False, False)] * 4


def test_both_ranks_use_gloo_if_one_cannot_connect(ranks):
    answers = ranks.run(4, exchange_on_two_hosts, None, False, True, True)
    assert answers == [((), False, False), ((2, 3), False, False), ((1, 3), True, False), ((1, 2), True, False)]


def count_open_files(directory: str = "/proc/self/fd") -> int:
    gc.collect()
    return len(os.listdir(directory))


def count_mapped_rings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("shardwright (deleted)")


def open_and_close_meshes() -> tuple[int, int, int]:
    """Open files that leaked, rings mapped while the last mesh is open, and rings mapped at the end."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    files, rings = [], 0
    for _ in range(4):
        mesh = make_mesh(2, ("a", "b"))
        pending, expected = start_exchange(mesh.group(), mesh.rank, [[0, INITIAL_RING_BYTES], [INITIAL_RING_BYTES, 0]])
        assert torch.equal(pending.wait(), expected)
        rings = count_mapped_rings()
        mesh.close()
        del mesh, pending
        files.append(count_open_files())
    time.sleep(0.1)
    return files[-1] - files[0], rings, count_mapped_rings()


def test_a_closed_mesh_leaves_no_files_and_no_memory(ranks):
    for leaked_files, rings, leaked_rings in ranks.run(2, open_and_close_meshes):
        assert leaked_files <= 6 and rings >= 2 and leaked_rings == 0


def receive_other_size() -> str:
    mesh = make_mesh(2)
    channel = mesh.group().local_channels[1 - mesh.rank]
    channel.send(torch.zeros(5 + mesh.rank)).wait()
    try:
        channel.receive(torch.zeros(5)).wait()
        return ""
    except RuntimeError as error:
        return str(error)
    finally:
        mesh.close()


def test_a_message_of_another_size_is_an_error(ranks):
    assert ranks.run(2, receive_other_size) == ["received a message of 24 bytes where 20 were expected", ""]


def close_while_waiting() -> list[str]:
    mesh = make_mesh(2)
    channel = mesh.group().local_channels[1 - mesh.rank]
    errors: list[str] = []

    def wait(work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait, args=(channel.receive(torch.zeros(3)),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    mesh.close()
    for thread in threads:
        thread.join(5)
    return errors


def test_closing_a_mesh_fails_pending_waits(ranks):
    for errors in ranks.run(2, close_while_waiting):
        assert len(errors) == 3 and all("connection" in error for error in errors)


RANK_SCRIPT = """
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
assert first.wait()[n:].eq(1).all()  # messages in the ring can still be received
try:
    collective.all_to_all(x, [n, n], [n, n], group).wait()
except PeerLost as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.fault
def test_a_killed_peer_is_named_its_messages_arrive_and_no_files_remain():
    directory = tempfile.mkdtemp()  # a short path: socket names are limited in length
    variables = {"TMPDIR": directory, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    variables["MASTER_PORT"] = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_SCRIPT],
            env=os.environ | variables | {"RANK": str(rank), "TORCH_CPP_LOG_LEVEL": "FATAL"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "rank 1 has sent no heartbeat for 2 s, while this rank is in sum gradients of step 3" in outputs[0], outputs
    assert ranks[1].returncode == -signal.SIGKILL
    assert os.listdir(directory) == []
    os.rmdir(directory)


def test_a_mesh_of_one_rank_shares_memory_with_no_other():
    with pytest.raises(UserError):
        Mesh((("rank", 2),))
    assert Mesh().near == ()
