"""Every collective and codec on one to four ranks against plain torch: uneven and empty splits, gradients, float64."""

import os
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.comm import collective
from shardwright.comm.codec import Bf16, Fp16, Int8, Plain
from shardwright.comm.collective import CollectiveMismatch
from shardwright.comm.mesh import Mesh
from shardwright.errors import UserError

WORLDS = (1, 2, 3, 4)
CODECS = {"plain": Plain(), "fp16": Fp16(), "bf16": Bf16(), "int8": Int8()}


def random_tensor(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def send_counts(world: int, seed: int) -> list[list[int]]:
    """Number of rows from each rank to each rank, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (world, world), generator=generator)
    counts[torch.rand(world, world, generator=generator) < 0.3] = 0
    if seed % 3 == 0:
        counts[0] = 0  # a rank that sends nothing
    return counts.tolist()


def make_mesh(world: int, lanes: tuple[str, ...] = (), check: bool = False) -> Mesh:
    return Mesh((("rank", world),), lanes=lanes, timeout_seconds=30, check=check)


def reduce_broadcast_and_gather(world: int, seed: int) -> bool:
    mesh = make_mesh(world)
    group, rank = mesh.group(), mesh.rank
    by_rank = [random_tensor(5, 3, seed=seed + number) for number in range(world)]
    total = collective.all_reduce(by_rank[rank].clone(), group).wait()
    torch.testing.assert_close(total, sum(by_rank), rtol=0, atol=1e-12)
    source = seed % world
    assert torch.equal(collective.broadcast(by_rank[rank].clone(), source, group).wait(), by_rank[source])
    sizes = [sum(row) for row in send_counts(world, seed)]
    shards = [random_tensor(size, 2, seed=seed + 10 + number) for number, size in enumerate(sizes)]
    assert torch.equal(collective.all_gather(shards[rank], sizes, group).wait(), torch.cat(shards))
    full = [random_tensor(sum(sizes), 2, seed=seed + 20 + number) for number in range(world)]
    expected = sum(full[1:], full[0]).split(sizes)[rank]
    assert torch.equal(collective.reduce_scatter(full[rank], sizes, group).wait(), expected)
    scattered = collective.one_to_many(full[0] if rank == source else full[0][:0], sizes, source, group).wait()
    assert torch.equal(scattered, full[0].split(sizes)[rank])
    gathered = collective.many_to_one(shards[rank], sizes, source, group).wait()
    assert torch.equal(gathered, torch.cat(shards) if rank == source else torch.cat(shards)[:0])
    mesh.close()
    return True


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", range(4))
def test_reduce_broadcast_and_gather(ranks, world, seed):
    assert all(ranks.run(world, reduce_broadcast_and_gather, world, seed))


def exchange(world: int, seed: int, codec: str, dtype: torch.dtype) -> bool:
    mesh = make_mesh(world)
    group, rank, counts, size = mesh.group(), mesh.rank, send_counts(world, seed), range(world)
    rows = [[random_tensor(counts[a][b], 6, seed=seed + 7 * a + b, dtype=dtype) for b in size] for a in size]
    sent, received = counts[rank], [row[rank] for row in counts]
    expected = torch.cat([rows[a][rank] for a in range(world)])
    pending = collective.all_to_all(torch.cat(rows[rank]), sent, received, group, CODECS[codec])
    result = pending.wait()
    assert result.dtype == dtype and result.shape == expected.shape
    assert pending.end is not None and pending.end >= pending.start
    if world > 1:
        assert ((result - expected).abs() <= CODECS[codec].error_bound(expected)).all()
    lengths = torch.tensor(counts[rank]).view(world, 1)
    received_lengths = collective.all_to_all_rows(lengths, group).wait()
    assert received_lengths.flatten().tolist() == received
    rank_of_row = torch.arange(world).repeat_interleave(lengths.flatten())
    jagged = collective.all_to_all_jagged(rank_of_row, lengths, received_lengths, group).wait()
    assert torch.equal(jagged, torch.full((sum(received),), rank))
    mesh.close()
    return True


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_all_to_all(ranks, world, codec, dtype):
    for seed in range(3):
        assert all(ranks.run(world, exchange, world, seed, codec, dtype))


def equals_hierarchical_all_to_all(hosts: int, locals_: int, seed: int) -> bool:
    mesh = Mesh((("host", hosts), ("rank", locals_)), timeout_seconds=30)
    world, rank = hosts * locals_, mesh.rank
    counts = send_counts(world, seed)
    x = random_tensor(sum(counts[rank]), 3, seed=rank)
    received = [row[rank] for row in counts]
    flat = collective.all_to_all(x, counts[rank], received, mesh.group()).wait()
    pending = collective.hierarchical_all_to_all(x, counts[rank], received, mesh.group("rank"), mesh.group("host"))
    hierarchical = pending.wait()
    mesh.close()
    return torch.equal(flat, hierarchical)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)])
def test_hierarchical_all_to_all_equals_the_flat_one(ranks, shape):
    for seed in range(3):
        assert all(ranks.run(shape[0] * shape[1], equals_hierarchical_all_to_all, *shape, seed))


def gradients_match(world: int, seed: int) -> bool:
    """The loss is a weighted sum of squares of received rows; a row's gradient has the weight of its receiver."""
    mesh = make_mesh(world)
    group, rank, counts = mesh.group(), mesh.rank, send_counts(world, seed)
    x = random_tensor(sum(counts[rank]), 3, seed=rank).requires_grad_()
    received_counts = [row[rank] for row in counts]
    rows = collective.all_to_all_autograd(x, counts[rank], received_counts, group)
    weights = [random_tensor(sum(row[number] for row in counts), 3, seed=100 + number) for number in range(world)]
    (rows**2 * weights[rank]).sum().backward()
    own_weights = [w.split([row[number] for row in counts])[rank] for number, w in enumerate(weights)]
    mesh.close()
    return torch.allclose(x.grad, 2 * x.detach() * torch.cat(own_weights), rtol=1e-12)


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_are_sent_back(ranks, world):
    for seed in range(3):
        assert all(ranks.run(world, gradients_match, world, seed))


@given(
    rows=st.integers(0, 5), columns=st.integers(1, 9), scale=st.sampled_from([1e-44, 1e-30, 1e-3, 1.0, 1e4, 1e6]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_codecs_stay_within_their_bounds(rows, columns, scale, seed):
    x = random_tensor(rows, columns, seed=seed, dtype=torch.float32) * scale
    for codec in CODECS.values():
        decoded = codec.decode(codec.encode(x), x.dtype)
        assert decoded.shape == x.shape and ((decoded - x).abs() <= codec.error_bound(x)).all(), (codec, x, decoded)
    assert CODECS["int8"].encode(x).shape == (rows, columns + 4)


def lanes_and_views() -> tuple:
    mesh = Mesh((("host", 2), ("one", 1), ("rank", 2)), lanes=("ids", "vectors"), timeout_seconds=30)
    handles = {id(mesh.group("rank", lane).process_group) for lane in mesh.lanes}
    is_same_group = mesh.group(("one", "rank")) is mesh.group("rank")
    views = mesh.view(["rank"]), mesh.view(["host"]), mesh.index("host"), mesh.index("rank"), mesh.group("one").size
    sums = [
        collective.all_reduce(torch.tensor([mesh.rank]), mesh.group("host", lane)).wait().item() for lane in mesh.lanes
    ]
    mesh.close()
    return views, len(handles), is_same_group, sums


def test_axes_and_lanes(ranks):
    answers = ranks.run(4, lanes_and_views)
    assert answers[0][0] == ((0, 1), (0, 2), 0, 0, 1) and answers[3][0] == ((2, 3), (1, 3), 1, 1, 1)
    assert all(num_handles == 2 and is_same_group for _, num_handles, is_same_group, _ in answers)
    assert [sums for *_, sums in answers] == [[2, 2], [4, 4], [2, 2], [4, 4]]


def run_different_collectives(difference: str) -> str:
    mesh = make_mesh(2, check=True)
    x = torch.ones(4, 2)
    try:
        if difference == "shape" and mesh.rank:
            collective.all_reduce(x[:3], mesh.group()).wait()
        elif difference == "collective" and mesh.rank:
            collective.broadcast(x, 0, mesh.group()).wait()
        else:
            collective.all_reduce(x, mesh.group()).wait()
    except CollectiveMismatch as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def run_invalid_collective(mistake: str) -> str:
    mesh = make_mesh(2, check=True)
    group, x = mesh.group(), torch.ones(4, 2)
    try:
        if mistake == "gather" and mesh.rank:
            collective.all_reduce(x, group).wait()
        elif mistake == "gather":
            collective.all_gather(x, [4, 4], group).wait()
        elif mistake == "splits":
            collective.all_to_all(x[:2], [1, 1], [1 + mesh.rank, 1], group).wait()
        elif mistake == "dtype":
            collective.all_reduce(x.short(), group).wait()
        elif mistake == "strides":
            collective.all_reduce(x[:, :1], group).wait()
    except (CollectiveMismatch, RuntimeError, UserError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        mesh.close()
    return ""


def test_invalid_collectives_are_errors_on_all_ranks(ranks):
    run = run_invalid_collective
    assert all("rank 0: all_gather of [4, 4]" in error for error in ranks.run(2, run, "gather"))
    for error in ranks.run(2, run, "splits"):
        assert "rank 0 sends 1 rows to rank 1, which expects 2" in error
    assert all(error.startswith("RuntimeError: Invalid scalar type") for error in ranks.run(2, run, "dtype"))
    assert all("strides (2, 1)" in error for error in ranks.run(2, run, "strides"))


def reduce_scatter_to_rank_0() -> bool:
    """A rank that receives nothing must still keep its input until it is sent."""
    mesh = make_mesh(2)
    x = torch.full((1 << 20, 2), float(mesh.rank + 1))
    if mesh.rank == 0:
        time.sleep(0.3)
    result = collective.reduce_scatter(x, [1 << 20, 0], mesh.group()).wait()
    x.zero_()
    mesh.close()
    return len(result) == (0 if mesh.rank else 1 << 20) and bool((result == 3).all())


def test_a_rank_that_receives_nothing_waits_until_its_input_is_sent(ranks):
    assert all(ranks.run(2, reduce_scatter_to_rank_0))


def second_derivative_matches() -> bool:
    mesh = make_mesh(2)
    x = random_tensor(4, 3, seed=mesh.rank).requires_grad_()
    (first,) = torch.autograd.grad(
        (collective.all_to_all_autograd(x, [2, 2], [2, 2], mesh.group()) ** 3).sum(), x, create_graph=True
    )
    (second,) = torch.autograd.grad(first.sum(), x)
    mesh.close()
    return torch.allclose(second, 6 * x.detach())


def test_second_derivatives_are_exchanged(ranks):
    assert all(ranks.run(2, second_derivative_matches))


def test_codecs_refuse_integers():
    with pytest.raises(UserError, match="the codec Fp16 would change torch.int64"):
        collective.all_to_all(torch.ones(2, 2, dtype=torch.int64), [2], [2], Mesh().group(), Fp16())


def count_leaked_files() -> int:
    import os

    import torch.distributed as dist

    dist.init_process_group("gloo")
    num_files = []
    for _ in range(4):
        mesh = make_mesh(2, lanes=("a", "b"))
        collective.all_reduce(torch.ones(2), mesh.group()).wait()
        mesh.close()
        del mesh
        num_files.append(len(os.listdir("/proc/self/fd")))
    return num_files[-1] - num_files[0]


def test_a_closed_mesh_closes_its_files(ranks):
    assert all(leaked <= 6 for leaked in ranks.run(2, count_leaked_files))


def test_ranks_that_run_different_collectives_are_named(ranks):
    for error in ranks.run(2, run_different_collectives, "shape"):
        assert "rank 0: all_reduce as call 0 of torch.float32 (4, 2); rank 1" in error and "(3, 2)" in error
    for error in ranks.run(2, run_different_collectives, "collective"):
        assert "rank 0: all_reduce" in error and "rank 1: broadcast from 0" in error
    assert ranks.run(2, run_different_collectives, "") == ["", ""]


def test_splits_lanes_and_axes_that_do_not_fit_are_errors():
    group = Mesh().group()
    with pytest.raises(UserError, match="all_to_all of 3 rows"):
        collective.all_to_all(torch.ones(3, 2), [2], [2], group)
    with pytest.raises(UserError, match="all_gather of 3 rows"):
        collective.all_gather(torch.ones(3, 2), [2], group)
    with pytest.raises(UserError, match='no lane "id"; did you mean "ids"'):
        Mesh(lanes=("ids",)).group((), "id")
    with pytest.raises(UserError, match="1 processes were started for a mesh of 2 ranks"):
        Mesh((("rank", 2),))


def run_refused_calls(world: int) -> list[str]:
    mesh = make_mesh(world)
    group, messages = mesh.group(), []
    x = torch.zeros(world)
    calls = (
        lambda: collective.all_to_all(x, [1] * world, [1 + (rank == mesh.rank) for rank in range(world)], group),
        lambda: collective.all_reduce_bf16(torch.zeros(2, dtype=torch.int64), group),
        lambda: collective.all_reduce_bf16(torch.zeros(2), group, torch.zeros(3)),
    )
    for call in calls:
        with pytest.raises(UserError) as error:
            call()
        messages.append(str(error.value))
    mesh.close()
    return messages


def test_invalid_calls_are_refused_before_anything_is_sent(ranks):
    for rank, (own_rows, dtype, residual) in enumerate(ranks.run(2, run_refused_calls, 2)):
        assert own_rows == f"all_to_all: rank {rank} sends itself 1 rows and expects 2"
        assert "would change torch.int64" in dtype and "residual torch.float32 (3,)" in residual


def measure_exchanges(world: int) -> tuple[float, float, float]:
    """Seconds from the start of an all-to-all to its end and to the end of a late wait; to the end of a second one."""
    mesh = make_mesh(world)
    x = torch.zeros(world * 1000)
    pending = collective.all_to_all(x, [1000] * world, [1000] * world, mesh.group())
    time.sleep(0.3)
    pending.wait()
    assert pending.end is not None
    first, waited = pending.end - pending.start, time.perf_counter() - pending.start
    second = collective.all_to_all(x, [1000] * world, [1000] * world, mesh.group())
    second.wait()
    assert second.end is not None
    mesh.close()
    return first, waited, second.end - second.start


def test_the_end_of_an_exchange_is_when_it_completed_not_when_it_was_waited_for(ranks):
    for first, waited, second in ranks.run(3, measure_exchanges, 3):
        assert 0 < first < 0.2 and waited >= 0.3 and 0 < second < 0.2


def bf16_sum_errors(world: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """Largest error relative to its bound; mean error of 50 sums without and with error feedback."""
    mesh = make_mesh(world)
    group, rank = mesh.group(), mesh.rank
    by_rank = [random_tensor(7, 13, seed=number, dtype=dtype) for number in range(world)]
    exact = sum(by_rank[1:], by_rank[0])
    rounded = collective.all_reduce_bf16(by_rank[rank].clone(), group).wait()
    bound = 2.0**-8 * (sum(x.abs() for x in by_rank) * (1 + 2.0**-8) + exact.abs())
    largest = float(((rounded - exact).abs() / bound).max())
    residual = torch.zeros_like(exact)
    plain, with_feedback = torch.zeros_like(exact), torch.zeros_like(exact)
    for _ in range(50):
        plain += collective.all_reduce_bf16(by_rank[rank].clone(), group).wait() / 50
        with_feedback += collective.all_reduce_bf16(by_rank[rank].clone(), group, residual).wait() / 50
    mesh.close()
    return largest, float((plain - exact).abs().mean()), float((with_feedback - exact).abs().mean())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bf16_sums_err_by_at_most_two_roundings_and_average_out_with_error_feedback(ranks, world, dtype):
    for largest, plain, with_feedback in ranks.run(world, bf16_sum_errors, world, dtype):
        assert largest <= 1.0
        assert with_feedback <= plain / 10 if world > 1 else max(plain, with_feedback) < 1e-6


def bf16_sums_of_few_numbers(world: int) -> list[float]:
    mesh = make_mesh(world)
    sums = [float(collective.all_reduce_bf16(torch.ones(num), mesh.group()).wait().sum()) for num in (0, 1, 2, 5)]
    mesh.close()
    return sums


def test_bf16_sums_of_fewer_numbers_than_ranks(ranks):
    assert ranks.run(4, bf16_sums_of_few_numbers, 4) == [[0.0, 4.0, 8.0, 20.0]] * 4


def group_sizes_or_errors(world: int) -> tuple[int, list[str]]:
    mesh = Mesh([("host", 2), ("rank", world // 2)], groups=[("one", ()), ("other", ()), ("other", ("rank",))])
    results = []
    for axes in ("host", ("host", "rank"), "rank"):
        try:
            results.append(f"{mesh.group(axes, 'other').size}")
        except UserError as error:
            results.append(str(error))
    num_groups = len(mesh._handles)
    mesh.close()
    return num_groups, results


def test_a_mesh_makes_only_the_requested_groups(ranks):
    for num_groups, (along_host, along_both, along_rank) in ranks.run(4, group_sizes_or_errors, 4):
        assert num_groups == 3 and (along_both, along_rank) == ("4", "2")
        assert along_host == (
            "this mesh has no group of lane \"other\" along ['host']: "
            "make it with Mesh(..., groups=[..., (\"other\", ['host'])])"
        )


def count_gloo_threads() -> int:
    names = (Path("/proc/self/task", thread, "comm").read_text() for thread in os.listdir("/proc/self/task"))
    return sum("gloo" in name for name in names)


def use_closed_mesh(world: int, memory: bool) -> tuple[int, int, int, str]:
    """Number of Gloo's threads before, with and after a mesh whose group is still referenced; the group's error."""
    before = count_gloo_threads()
    mesh = Mesh([("rank", world)], memory=memory)
    group = mesh.group()
    collective.all_reduce(torch.ones(3), group).wait()
    during = count_gloo_threads()
    mesh.close()
    try:
        collective.all_reduce(torch.ones(3), group).wait()
    except UserError as error:
        return before, during, count_gloo_threads(), str(error)
    return before, during, count_gloo_threads(), ""


@pytest.mark.parametrize("memory", (True, False))
def test_a_closed_mesh_leaves_no_threads_and_its_use_is_an_error(ranks, memory):
    for before, during, after, error in ranks.run(2, use_closed_mesh, 2, memory):
        assert during > before >= after
        assert "has been closed" in error
