"""Blocks cut over one to four ranks, on one host or two, against the same network whole: to the last digits."""

import os
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hosts import TwoHosts
from torch import Tensor, nn

from shardwright.comm import collective, flat_collectives
from shardwright.comm.mesh import Mesh
from shardwright.dense.replicated import ReplicatedModel
from shardwright.dense.activation_checkpoint import checkpoint_activations
from shardwright.dense.sharded import ShardedModel, ShardingGroups, shard_model
from shardwright.dense.flat_parameter import FlatParameter, shard_boundaries, shard_of
from shardwright.errors import UserError
from shardwright.spec.plan import Recompute

LANES = ("dense", "gather", "scatter")
STEPS, BATCH = 6, 12


class Net(nn.Module):
    """Blocks with odd shapes, a scalar, a frozen part, a parameter and a module that two share, and one of no block."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Part(7, 5 + number) for number in range(4))
        self.blocks[2].second.weight = self.blocks[1].second.weight = nn.Parameter(torch.randn(7, 6) / 3)
        self.blocks[2].first = nn.Linear(7, 6)
        self.blocks[3].norm = self.blocks[0].norm
        self.shift = nn.Parameter(torch.zeros(7))
        self.blocks[3].first.weight.requires_grad_(False)
        self.to(dtype)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x if skip and number == 1 else block(x)
        return ((x + self.shift)[:, :3].sum(1) - 1).square().mean()


class Part(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.ones(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.scale * self.second(torch.tanh(self.first(x))))


NAMES = [f"blocks.{number}" for number in range(4)]
KINDS = {  # axes that shard, axes that replicate
    "fsdp": (("host", "local"), ()),
    "hsdp": (("local",), ("host",)),
    "across": (("host",), ("local",)),
    "alone": ((), ("host", "local")),
}


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def whole(optimizer, steps: int = STEPS, skip: int = -1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    net = Net(dtype)
    made = optimizer([p for p in net.parameters() if p.requires_grad])
    for step in range(steps):
        made.zero_grad()
        net(batch(step).to(dtype), step == skip).backward()
        made.step()
    return [p.detach() for p in net.parameters()]


def ways(mesh: Mesh, kind: str) -> ShardingGroups:
    shard, replicate = KINDS[kind]
    of = {lane: mesh.group(shard, lane) if shard else mesh.alone(lane) for lane in ("gather", "scatter")}
    replicas = mesh.group(replicate, "dense") if replicate else mesh.alone("dense")
    return ShardingGroups(of["gather"], of["scatter"], replicas, mesh.group(lane="dense"))


def trained(kind: str, beside: bool, ahead: int, kept: tuple[str, ...], hosts: int, skip: int, dtype: torch.dtype):
    """The whole parameters after some steps, each rank with its share of every batch."""
    with ExitStack() as stack:
        if hosts == 2:
            mesh = stack.enter_context(TwoHosts(lanes=LANES))
        else:
            world = int(os.environ["WORLD_SIZE"])
            mesh = Mesh((("host", 1), ("local", world)), lanes=LANES, timeout_seconds=30)
            stack.callback(mesh.close)
        net = Net(dtype)
        made = ways(mesh, kind)
        blocks = shard_model(net, NAMES, made)
        inside = {id(leaf) for block in blocks for unit in block.flat_parameters for leaf in unit.shards}
        rest = [p for p in net.parameters() if p.requires_grad and id(p) not in inside]
        shards = ShardedModel(blocks, made, ReplicatedModel(rest, made.all_ranks), num_prefetched_blocks=ahead)
        checkpoint_activations(net, [Recompute(name, kept[0]) for name in NAMES] if kept else [])
        assert all(p.data_ptr() == 0 or shard_of(p) or id(p) in {id(one) for one in rest} for p in net.parameters())
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.01)
        share = 1 / mesh.size
        for step in range(STEPS):
            optimizer.zero_grad()
            mine = batch(step).to(dtype).tensor_split(mesh.size)[mesh.rank]
            loss = net(mine, step == skip)
            shards.begin_backward(overlap=beside)
            (loss * share).backward()
            shards.end_backward().wait()
            optimizer.step()
        with torch.no_grad():
            net(batch(0).to(dtype))
        assert all(unit._flat.untyped_storage().nbytes() == 0 for block in blocks for unit in block.flat_parameters)
        found = []
        for parameter in net.parameters():
            shard = shard_of(parameter)
            found.append((shard.rows if shard else None, parameter.detach().numpy().copy()))
        return found


def joined(answers: list, like: list[Tensor]) -> list[Tensor]:
    """What the ranks have of each parameter, in its place; replicas must agree to the bit."""
    found = []
    for each, one in zip(zip(*answers, strict=True), like, strict=True):
        total, seen = torch.full((one.shape[0] if one.dim() else 1, *one.shape[1:]), torch.nan, dtype=one.dtype), {}
        for rows, values in each:
            low, high = rows or (0, len(total))
            mine = torch.from_numpy(values).view(high - low, *one.shape[1:])
            assert torch.equal(seen.setdefault((low, high), mine), mine)
            total[low:high] = mine
        found.append(total.view(one.shape))
    return found


CASES = [
    ("fsdp", True, 1, (), 2, 4),
    ("hsdp", True, 1, (), 2, 4),
    ("across", True, 2, (), 2, 4),
    ("alone", True, 1, (), 2, 4),
    ("fsdp", False, 0, ("nothing",), 2, 4),
    ("hsdp", True, 3, ("products",), 2, 4),
    ("fsdp", True, 1, (), 1, 3),
    ("fsdp", True, 1, ("nothing",), 1, 2),
    ("fsdp", True, 1, (), 1, 1),
]


@pytest.mark.parametrize(("kind", "beside", "ahead", "kept", "hosts", "world"), CASES)
def test_blocks_that_are_cut_train_as_whole_ones(ranks, kind, beside, ahead, kept, hosts, world):
    for skip, dtype, most in ((-1, torch.float64, 1e-10), (2, torch.float64, 1e-10), (-1, torch.float32, 1e-4)):
        like = whole(lambda p: torch.optim.Adam(p, 0.01), skip=skip, dtype=dtype)
        answers = ranks.run(world, trained, kind, beside, ahead, kept, hosts, skip, dtype)
        for found, wanted in zip(joined(answers, like), like, strict=True):
            assert (found - wanted).abs().max() <= most, (skip, dtype)


SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=200)
@given(SHAPES, st.integers(1, 9))
def test_parts_begin_and_end_between_rows(shapes, num):
    found = shard_boundaries(shapes, num)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    widths = [size // (shape[0] if shape else 1) for size, shape in zip(sizes, shapes, strict=True)]
    assert found[0] == 0 and found[-1] == sum(sizes) and found == sorted(found) and len(found) == num + 1
    for border in found:
        start = 0
        for size, width in zip(sizes, widths, strict=True):
            assert not start < border < start + size or (border - start) % width == 0
            start += size
    assert all(abs(border - sum(sizes) * at / num) <= max(widths) for at, border in enumerate(found))


def gathered_and_added(memory: bool) -> bool:
    with TwoHosts(memory=memory) as mesh:
        group = mesh.group()
        assert group.hierarchical_groups
        for sizes in ([3, 0, 5, 2], [0, 0, 0, 7], [1 << 16, 5, 1 << 17, 1]):
            at = flat_collectives.shard_order(group).index(mesh.rank)
            total = torch.arange(sum(sizes), dtype=torch.float64)
            start = sum(sizes[:at])
            mine = torch.full_like(total, torch.nan)
            mine[start : start + sizes[at]] = total[start : start + sizes[at]]
            assert torch.equal(flat_collectives.all_gather_flat(mine, sizes, group).wait(), total)
            found = flat_collectives.reduce_scatter_flat(total * (mesh.rank + 1), sizes, group).wait()
            assert torch.equal(found, total[start : start + sizes[at]] * 10)
    return True


@pytest.mark.parametrize("memory", [True, False])
def test_pieces_over_two_hosts(ranks, memory):
    assert all(ranks.run(4, gathered_and_added, memory))


def stray() -> str:
    mesh = Mesh((("host", 1), ("local", 2)), lanes=LANES, timeout_seconds=30)
    net = Net()
    made = ways(mesh, "fsdp")
    ShardedModel(shard_model(net, NAMES, made), made, None)
    try:
        net(batch(0)).backward()
        told = ""
    except UserError as error:
        told = str(error)
    collective.all_reduce(torch.ones(1), made.all_ranks).wait()
    mesh.close()
    return told


def test_a_backward_pass_that_nobody_knows_of_is_refused(ranks):
    assert all('block "blocks.3" is sharded' in told for told in ranks.run(2, stray))


def test_shards_are_rows_in_the_memory_of_the_rank(ranks):
    assert ranks.run(2, rows) == [True, True]


def rows() -> bool:
    mesh = Mesh((("host", 1), ("local", 2)), lanes=LANES, timeout_seconds=30)
    net = nn.Linear(6, 5)
    before = [p.detach().clone() for p in net.parameters()]
    unit = FlatParameter([(net.weight, [(net, "weight")]), (net.bias, [(net, "bias")])], mesh.group(lane="gather"))
    for parameter, whole_ in zip(net.parameters(), before, strict=True):
        shard = shard_of(parameter)
        assert shard is not None and shard.full_shape == tuple(whole_.shape)
        assert torch.equal(parameter, whole_[slice(*shard.rows)])
    assert abs(len(unit.local_shard) - 35 / 2) <= 6 and sum(b - a for a, b in pairwise(shard_boundaries([(5, 6), (5,)], 2))) == 35
    mesh.close()
    return True
