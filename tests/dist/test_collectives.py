"""Every collective and codec on one to four ranks against plain torch: uneven and empty splits, gradients, float64."""

import os
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.comm import collective
from shardwright.comm.codec import Bf16, Fp16, Int8, Plain
from shardwright.comm.collective import CollectiveMismatch
from shardwright.comm.mesh import Mesh
from shardwright.errors import UserError

WORLDS = (1, 2, 3, 4)
CODECS = {"plain": Plain(), "fp16": Fp16(), "bf16": Bf16(), "int8": Int8()}


def drawn(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def counts_of(world: int, seed: int) -> list[list[int]]:
    """Rows from each rank to each, some none."""
    draw = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 4, (world, world), generator=draw)
    found[torch.rand(world, world, generator=draw) < 0.3] = 0
    if seed % 3 == 0:
        found[0] = 0  # a rank that has nothing
    return found.tolist()


def job(world: int, lanes: tuple[str, ...] = (), check: bool = False) -> Mesh:
    return Mesh((("rank", world),), lanes=lanes, timeout_seconds=30, check=check)


def simple_ones(world: int, seed: int) -> bool:
    mesh = job(world)
    group, rank = mesh.group(), mesh.rank
    all_ = [drawn(5, 3, seed=seed + one) for one in range(world)]
    torch.testing.assert_close(collective.all_reduce(all_[rank].clone(), group).wait(), sum(all_), rtol=0, atol=1e-12)
    source = seed % world
    assert torch.equal(collective.broadcast(all_[rank].clone(), source, group).wait(), all_[source])
    sizes = [sum(row) for row in counts_of(world, seed)]
    pieces = [drawn(size, 2, seed=seed + 10 + one) for one, size in enumerate(sizes)]
    assert torch.equal(collective.all_gather(pieces[rank], sizes, group).wait(), torch.cat(pieces))
    total = sum(sizes)
    whole = [drawn(total, 2, seed=seed + 20 + one) for one in range(world)]
    expected = sum(whole[1:], whole[0]).split(sizes)[rank]
    assert torch.equal(collective.reduce_scatter(whole[rank], sizes, group).wait(), expected)
    found = collective.one_to_many(whole[0] if rank == source else whole[0][:0], sizes, source, group).wait()
    assert torch.equal(found, whole[0].split(sizes)[rank])
    found = collective.many_to_one(pieces[rank], sizes, source, group).wait()
    assert torch.equal(found, torch.cat(pieces) if rank == source else torch.cat(pieces)[:0])
    mesh.close()
    return True


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", range(4))
def test_sums_copies_and_gathers(ranks, world, seed):
    assert all(ranks.run(world, simple_ones, world, seed))


def all_to_all(world: int, seed: int, codec: str, dtype: torch.dtype) -> bool:
    mesh = job(world)
    group, rank, counts = mesh.group(), mesh.rank, counts_of(world, seed)
    rows = [[drawn(counts[a][b], 6, seed=seed + 7 * a + b, dtype=dtype) for b in range(world)] for a in range(world)]
    sent, received = counts[rank], [row[rank] for row in counts]
    expected = torch.cat([rows[a][rank] for a in range(world)])
    made = collective.all_to_all(torch.cat(rows[rank]), sent, received, group, CODECS[codec])
    found = made.wait()
    assert found.dtype == dtype and found.shape == expected.shape and made.end is not None and made.end >= made.start
    if world > 1:
        assert ((found - expected).abs() <= CODECS[codec].error_bound(expected)).all()
    lengths = torch.tensor(counts[rank]).view(world, 1)
    arriving = collective.all_to_all_rows(lengths, group).wait()
    assert arriving.flatten().tolist() == received
    rank_of_row = torch.arange(world).repeat_interleave(lengths.flatten())
    assert torch.equal(
        collective.all_to_all_jagged(rank_of_row, lengths, arriving, group).wait(), torch.full((sum(received),), rank)
    )
    mesh.close()
    return True


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_all_to_all(ranks, world, codec, dtype):
    for seed in range(3):
        assert all(ranks.run(world, all_to_all, world, seed, codec, dtype))


def two_levels(hosts: int, locals_: int, seed: int) -> bool:
    mesh = Mesh((("host", hosts), ("rank", locals_)), timeout_seconds=30)
    world, rank = hosts * locals_, mesh.rank
    counts = counts_of(world, seed)
    x = drawn(sum(counts[rank]), 3, seed=rank)
    received = [row[rank] for row in counts]
    plain = collective.all_to_all(x, counts[rank], received, mesh.group()).wait()
    found = collective.hierarchical_all_to_all(x, counts[rank], received, mesh.group("rank"), mesh.group("host")).wait()
    mesh.close()
    return torch.equal(plain, found)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)])
def test_in_two_levels_the_same_arrives(ranks, shape):
    for seed in range(3):
        assert all(ranks.run(shape[0] * shape[1], two_levels, *shape, seed))


def gradients(world: int, seed: int) -> bool:
    """The sum over ranks of a weighted sum: its gradient at a row is the weight where the row went."""
    mesh = job(world)
    group, rank, counts = mesh.group(), mesh.rank, counts_of(world, seed)
    x = drawn(sum(counts[rank]), 3, seed=rank).requires_grad_()
    received = [row[rank] for row in counts]
    arrived = collective.all_to_all_autograd(x, counts[rank], received, group)
    weights = [drawn(sum(row[one] for row in counts), 3, seed=100 + one) for one in range(world)]
    (arrived**2 * weights[rank]).sum().backward()
    pieces = [w.split([row[one] for row in counts])[rank] for one, w in enumerate(weights)]
    mesh.close()
    return torch.allclose(x.grad, 2 * x.detach() * torch.cat(pieces), rtol=1e-12)


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_travel_back(ranks, world):
    for seed in range(3):
        assert all(ranks.run(world, gradients, world, seed))


@given(
    rows=st.integers(0, 5), columns=st.integers(1, 9), scale=st.sampled_from([1e-44, 1e-30, 1e-3, 1.0, 1e4, 1e6]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_codecs_stay_within_their_bounds(rows, columns, scale, seed):
    x = drawn(rows, columns, seed=seed, dtype=torch.float32) * scale
    for codec in CODECS.values():
        back = codec.decode(codec.encode(x), x.dtype)
        assert back.shape == x.shape and ((back - x).abs() <= codec.error_bound(x)).all(), (codec, x, back)
    assert CODECS["int8"].encode(x).shape == (rows, columns + 4)


def lanes_and_views() -> tuple:
    mesh = Mesh((("host", 2), ("one", 1), ("rank", 2)), lanes=("ids", "vectors"), timeout_seconds=30)
    handles = {id(mesh.group("rank", lane).process_group) for lane in mesh.lanes}
    same = mesh.group(("one", "rank")) is mesh.group("rank")
    found = mesh.view(["rank"]), mesh.view(["host"]), mesh.index("host"), mesh.index("rank"), mesh.group("one").size
    x = [
        collective.all_reduce(torch.tensor([mesh.rank]), mesh.group("host", lane)).wait().item() for lane in mesh.lanes
    ]
    mesh.close()
    return found, len(handles), same, x


def test_axes_and_lanes(ranks):
    found = ranks.run(4, lanes_and_views)
    assert found[0][0] == ((0, 1), (0, 2), 0, 0, 1) and found[3][0] == ((2, 3), (1, 3), 1, 1, 1)
    assert all(two == 2 and same for _, two, same, _ in found)
    assert [x for *_, x in found] == [[2, 2], [4, 4], [2, 2], [4, 4]]


def different_things(what: str) -> str:
    mesh = job(2, check=True)
    x = torch.ones(4, 2)
    try:
        if what == "shape" and mesh.rank:
            collective.all_reduce(x[:3], mesh.group()).wait()
        elif what == "collective" and mesh.rank:
            collective.broadcast(x, 0, mesh.group()).wait()
        else:
            collective.all_reduce(x, mesh.group()).wait()
    except CollectiveMismatch as told:
        return str(told)
    finally:
        mesh.close()
    return ""


def careless(what: str) -> str:
    mesh = job(2, check=True)
    group, x = mesh.group(), torch.ones(4, 2)
    try:
        if what == "gather" and mesh.rank:
            collective.all_reduce(x, group).wait()
        elif what == "gather":
            collective.all_gather(x, [4, 4], group).wait()
        elif what == "splits":
            collective.all_to_all(x[:2], [1, 1], [1 + mesh.rank, 1], group).wait()
        elif what == "dtype":
            collective.all_reduce(x.short(), group).wait()
        elif what == "strides":
            collective.all_reduce(x[:, :1], group).wait()
    except (CollectiveMismatch, RuntimeError, UserError) as told:
        return f"{type(told).__name__}: {told}"
    finally:
        mesh.close()
    return ""


def test_what_cannot_be_is_told_and_nobody_blamed(ranks):
    assert all("rank 0: all_gather of [4, 4]" in told for told in ranks.run(2, careless, "gather"))
    for told in ranks.run(2, careless, "splits"):
        assert "rank 0 sends 1 rows to rank 1, which expects 2" in told
    assert all(told.startswith("RuntimeError: Invalid scalar type") for told in ranks.run(2, careless, "dtype"))
    assert all("strides (2, 1)" in told for told in ranks.run(2, careless, "strides"))


def scatters_to_one() -> bool:
    """A rank that gets nothing must still not let go of what it sends."""
    mesh = job(2)
    x = torch.full((1 << 20, 2), float(mesh.rank + 1))
    if mesh.rank == 0:
        time.sleep(0.3)
    found = collective.reduce_scatter(x, [1 << 20, 0], mesh.group()).wait()
    x.zero_()
    mesh.close()
    return len(found) == (0 if mesh.rank else 1 << 20) and bool((found == 3).all())


def test_a_rank_that_gets_nothing_waits_too(ranks):
    assert all(ranks.run(2, scatters_to_one))


def twice() -> bool:
    mesh = job(2)
    x = drawn(4, 3, seed=mesh.rank).requires_grad_()
    (first,) = torch.autograd.grad(
        (collective.all_to_all_autograd(x, [2, 2], [2, 2], mesh.group()) ** 3).sum(), x, create_graph=True
    )
    (second,) = torch.autograd.grad(first.sum(), x)
    mesh.close()
    return torch.allclose(second, 6 * x.detach())


def test_gradients_of_gradients_travel_too(ranks):
    assert all(ranks.run(2, twice))


def test_codecs_are_for_vectors():
    with pytest.raises(UserError, match="Fp16 is for vectors; these are torch.int64"):
        collective.all_to_all(torch.ones(2, 2, dtype=torch.int64), [2], [2], Mesh().group(), Fp16())


def again_and_again() -> int:
    import os

    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for _ in range(4):
        mesh = job(2, lanes=("a", "b"))
        collective.all_reduce(torch.ones(2), mesh.group()).wait()
        mesh.close()
        del mesh
        found.append(len(os.listdir("/proc/self/fd")))
    return found[-1] - found[0]


def test_a_mesh_that_is_closed_gives_back_what_it_took(ranks):
    assert all(more <= 6 for more in ranks.run(2, again_and_again))


def test_ranks_that_do_different_things_are_named(ranks):
    for told in ranks.run(2, different_things, "shape"):
        assert "rank 0: all_reduce as call 0 of torch.float32 (4, 2); rank 1" in told and "(3, 2)" in told
    for told in ranks.run(2, different_things, "collective"):
        assert "rank 0: all_reduce" in told and "rank 1: broadcast from 0" in told
    assert ranks.run(2, different_things, "") == ["", ""]


def test_splits_that_do_not_fit():
    group = Mesh().group()
    with pytest.raises(UserError, match="all_to_all of 3 rows"):
        collective.all_to_all(torch.ones(3, 2), [2], [2], group)
    with pytest.raises(UserError, match="all_gather of 3 rows"):
        collective.all_gather(torch.ones(3, 2), [2], group)
    with pytest.raises(UserError, match='no lane "id"; did you mean "ids"'):
        Mesh(lanes=("ids",)).group((), "id")
    with pytest.raises(UserError, match="1 processes were started for a mesh of 2 ranks"):
        Mesh((("rank", 2),))


def refused(world: int) -> list[str]:
    mesh = job(world)
    group, said = mesh.group(), []
    x = torch.zeros(world)
    calls = (
        lambda: collective.all_to_all(x, [1] * world, [1 + (at == mesh.rank) for at in range(world)], group),
        lambda: collective.all_reduce_bf16(torch.zeros(2, dtype=torch.int64), group),
        lambda: collective.all_reduce_bf16(torch.zeros(2), group, torch.zeros(3)),
    )
    for call in calls:
        with pytest.raises(UserError) as caught:
            call()
        said.append(str(caught.value))
    mesh.close()
    return said


def test_what_cannot_be_sent_is_refused_before_anything_is(ranks):
    for rank, (own, whole, kept) in enumerate(ranks.run(2, refused, 2)):
        assert own == f"all_to_all: rank {rank} sends itself 1 rows and expects 2"
        assert "torch.int64, which it would change" in whole and "kept torch.float32 (3,)" in kept


def ends(world: int) -> tuple[float, float, float]:
    """How long after its start an all-to-all ended, when it was waited for, and a second one that waited at once."""
    mesh = job(world)
    x = torch.zeros(world * 1000)
    pending = collective.all_to_all(x, [1000] * world, [1000] * world, mesh.group())
    time.sleep(0.3)
    pending.wait()
    assert pending.end is not None
    first, waited = pending.end - pending.start, time.perf_counter() - pending.start
    again = collective.all_to_all(x, [1000] * world, [1000] * world, mesh.group())
    again.wait()
    assert again.end is not None
    mesh.close()
    return first, waited, again.end - again.start


def test_an_exchange_says_when_it_ended_not_when_it_was_waited_for(ranks):
    for first, waited, again in ranks.run(3, ends, 3):
        assert 0 < first < 0.2 and waited >= 0.3 and 0 < again < 0.2


def rounded_sums(world: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """The largest error over its bound, and the mean error of 50 sums without and with what rounding took away."""
    mesh = job(world)
    group, rank = mesh.group(), mesh.rank
    all_ = [drawn(7, 13, seed=one, dtype=dtype) for one in range(world)]
    exact = sum(all_[1:], all_[0])
    found = collective.all_reduce_bf16(all_[rank].clone(), group).wait()
    bound = 2.0**-8 * (sum(one.abs() for one in all_) * (1 + 2.0**-8) + exact.abs())
    worst = float(((found - exact).abs() / bound).max())
    kept = torch.zeros_like(exact)
    plain, fed = torch.zeros_like(exact), torch.zeros_like(exact)
    for _ in range(50):
        plain += collective.all_reduce_bf16(all_[rank].clone(), group).wait() / 50
        fed += collective.all_reduce_bf16(all_[rank].clone(), group, kept).wait() / 50
    mesh.close()
    return worst, float((plain - exact).abs().mean()), float((fed - exact).abs().mean())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_bf16_stay_within_two_roundings_and_lose_nothing_in_the_long_run(ranks, world, dtype):
    for worst, plain, fed in ranks.run(world, rounded_sums, world, dtype):
        assert worst <= 1.0
        assert fed <= plain / 10 if world > 1 else max(plain, fed) < 1e-6


def rounded_sum_of_few(world: int) -> list[float]:
    mesh = job(world)
    found = [float(collective.all_reduce_bf16(torch.ones(num), mesh.group()).wait().sum()) for num in (0, 1, 2, 5)]
    mesh.close()
    return found


def test_sums_in_bf16_of_fewer_numbers_than_ranks(ranks):
    assert ranks.run(4, rounded_sum_of_few, 4) == [[0.0, 4.0, 8.0, 20.0]] * 4


def some_groups(world: int) -> tuple[int, list[str]]:
    mesh = Mesh([("host", 2), ("rank", world // 2)], lanes=("one", "other"), along=[("rank",)])
    told = []
    for axes in ("host", ("host", "rank"), "rank"):
        try:
            told.append(f"{mesh.group(axes, 'other').size}")
        except UserError as error:
            told.append(str(error))
    number = len(mesh._handles)
    mesh.close()
    return number, told


def test_a_mesh_makes_only_the_groups_it_was_asked_for(ranks):
    for number, (host, both, rank) in ranks.run(4, some_groups, 4):
        assert number == 4 and (both, rank) == ("4", "2")
        assert host == "this mesh has no groups along ['host']: make it with Mesh(..., along=[['host']])"


def threads() -> int:
    names = (Path("/proc/self/task", one, "comm").read_text() for one in os.listdir("/proc/self/task"))
    return sum("gloo" in name for name in names)


def closed(world: int, memory: bool) -> tuple[int, int, int, str]:
    """Gloo's threads before, with and after a mesh to whose group somebody holds on, and what that says then."""
    before = threads()
    mesh = Mesh([("rank", world)], memory=memory)
    group = mesh.group()
    collective.all_reduce(torch.ones(3), group).wait()
    there = threads()
    mesh.close()
    try:
        collective.all_reduce(torch.ones(3), group).wait()
    except UserError as error:
        return before, there, threads(), str(error)
    return before, there, threads(), ""


@pytest.mark.parametrize("memory", (True, False))
def test_a_closed_mesh_leaves_no_threads_and_says_that_it_is_closed(ranks, memory):
    for before, there, after, told in ranks.run(2, closed, 2, memory):
        assert there > before >= after
        assert "has been closed" in told
