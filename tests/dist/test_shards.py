"""FSDP and HSDP over one to four ranks, on one host or two, compared with the unsharded model up to rounding."""

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
from shardwright.dense.activation_checkpoint import checkpoint_activations
from shardwright.dense.flat_parameter import FlatParameter, shard_boundaries
from shardwright.dense.replicated import ReplicatedModel
from shardwright.dense.sharded import ShardedModel, ShardingGroups, shard_model
from shardwright.errors import UserError
from shardwright.parameter_shard import shard_of
from shardwright.spec.plan import Recompute

LANES = ("dense", "gather", "scatter")
STEPS, BATCH = 6, 12


class Net(nn.Module):
    """Blocks with odd shapes, a scalar, a frozen weight, a shared parameter and module; a parameter in no block."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(7, 5 + number) for number in range(4))
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


class Block(nn.Module):
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
    "across-hosts": (("host",), ("local",)),
    "replicated": ((), ("host", "local")),
}


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train_single(skip: int, dtype: torch.dtype) -> list[Tensor]:
    """Final parameters in one process; block 1 is skipped in step `skip`."""
    net = Net(dtype)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(step).to(dtype), step == skip).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def make_groups(mesh: Mesh, kind: str) -> ShardingGroups:
    shard, replicate = KINDS[kind]
    by_lane = {lane: mesh.group(shard, lane) if shard else mesh.alone(lane) for lane in ("gather", "scatter")}
    replicas = mesh.group(replicate, "dense") if replicate else mesh.alone("dense")
    return ShardingGroups(by_lane["gather"], by_lane["scatter"], replicas, mesh.group(lane="dense"))


def train(kind: str, overlap: bool, ahead: int, saved: tuple[str, ...], hosts: int, skip: int, dtype: torch.dtype):
    """(rows, values) of this rank's final parameters, trained on its share of every batch."""
    with ExitStack() as stack:
        if hosts == 2:
            mesh = stack.enter_context(TwoHosts(lanes=LANES))
        else:
            world = int(os.environ["WORLD_SIZE"])
            mesh = Mesh((("host", 1), ("local", world)), lanes=LANES, timeout_seconds=30)
            stack.callback(mesh.close)
        net = Net(dtype)
        groups = make_groups(mesh, kind)
        blocks = shard_model(net, NAMES, groups)
        sharded = {id(shard) for block in blocks for flat in block.flat_parameters for shard in flat.shards}
        rest = [p for p in net.parameters() if p.requires_grad and id(p) not in sharded]
        model = ShardedModel(blocks, groups, ReplicatedModel(rest, groups.all_ranks), num_prefetched_blocks=ahead)
        checkpoint_activations(net, [Recompute(name, saved[0]) for name in NAMES] if saved else [])
        assert all(p.data_ptr() == 0 or shard_of(p) or id(p) in set(map(id, rest)) for p in net.parameters())
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.01)
        share = 1 / mesh.size
        for step in range(STEPS):
            optimizer.zero_grad()
            local = batch(step).to(dtype).tensor_split(mesh.size)[mesh.rank]
            loss = net(local, step == skip)
            model.begin_backward(overlap=overlap)
            (loss * share).backward()
            model.end_backward()
            model.finish_reductions()
            optimizer.step()
        with torch.no_grad():
            net(batch(0).to(dtype))
        assert all(flat._flat.untyped_storage().nbytes() == 0 for block in blocks for flat in block.flat_parameters)
        parameters = []
        for parameter in net.parameters():
            shard = shard_of(parameter)
            parameters.append((shard.rows if shard else None, parameter.detach().numpy().copy()))
        return parameters


def concat_shards(answers: list, like: list[Tensor]) -> list[Tensor]:
    """Full parameters from the shards of all ranks; replicas must have equal bits."""
    parameters = []
    for shards, p in zip(zip(*answers, strict=True), like, strict=True):
        full, by_rows = torch.full((p.shape[0] if p.dim() else 1, *p.shape[1:]), torch.nan, dtype=p.dtype), {}
        for rows, values in shards:
            low, high = rows or (0, len(full))
            shard = torch.from_numpy(values).view(high - low, *p.shape[1:])
            assert torch.equal(by_rows.setdefault((low, high), shard), shard)
            full[low:high] = shard
        parameters.append(full.view(p.shape))
    return parameters


CASES = [
    ("fsdp", True, 1, (), 2, 4),
    ("hsdp", True, 1, (), 2, 4),
    ("across-hosts", True, 2, (), 2, 4),
    ("replicated", True, 1, (), 2, 4),
    ("fsdp", False, 0, ("nothing",), 2, 4),
    ("hsdp", True, 3, ("products",), 2, 4),
    ("fsdp", True, 1, (), 1, 3),
    ("fsdp", True, 1, ("nothing",), 1, 2),
    ("fsdp", True, 1, (), 1, 1),
]


@pytest.mark.parametrize(("kind", "overlap", "ahead", "saved", "hosts", "world"), CASES)
def test_sharded_blocks_train_like_unsharded_ones(ranks, kind, overlap, ahead, saved, hosts, world):
    for skip, dtype, tolerance in ((-1, torch.float64, 1e-10), (2, torch.float64, 1e-10), (-1, torch.float32, 1e-4)):
        single = train_single(skip, dtype)
        answers = ranks.run(world, train, kind, overlap, ahead, saved, hosts, skip, dtype)
        for value, expected in zip(concat_shards(answers, single), single, strict=True):
            assert (value - expected).abs().max() <= tolerance, (skip, dtype)


SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=200)
@given(SHAPES, st.integers(1, 9))
def test_shard_boundaries_are_between_rows(shapes, num):
    boundaries = shard_boundaries(shapes, num)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    widths = [size // (shape[0] if shape else 1) for size, shape in zip(sizes, shapes, strict=True)]
    assert boundaries[0] == 0 and boundaries[-1] == sum(sizes)
    assert boundaries == sorted(boundaries) and len(boundaries) == num + 1
    for boundary in boundaries:
        start = 0
        for size, width in zip(sizes, widths, strict=True):
            assert not start < boundary < start + size or (boundary - start) % width == 0
            start += size
    assert all(abs(boundary - sum(sizes) * i / num) <= max(widths) for i, boundary in enumerate(boundaries))


def gather_and_reduce_flat(memory: bool) -> bool:
    with TwoHosts(memory=memory) as mesh:
        group = mesh.group()
        assert group.hierarchical_groups
        for sizes in ([3, 0, 5, 2], [0, 0, 0, 7], [1 << 16, 5, 1 << 17, 1]):
            index = flat_collectives.shard_order(group).index(mesh.rank)
            full = torch.arange(sum(sizes), dtype=torch.float64)
            start = sum(sizes[:index])
            local = torch.full_like(full, torch.nan)
            local[start : start + sizes[index]] = full[start : start + sizes[index]]
            assert torch.equal(flat_collectives.all_gather_flat(local, sizes, group).wait(), full)
            shard = flat_collectives.reduce_scatter_flat(full * (mesh.rank + 1), sizes, group).wait()
            assert torch.equal(shard, full[start : start + sizes[index]] * 10)
    return True


@pytest.mark.parametrize("memory", [True, False])
def test_flat_collectives_over_two_hosts(ranks, memory):
    assert all(ranks.run(4, gather_and_reduce_flat, memory))


def run_unannounced_backward() -> str:
    mesh = Mesh((("host", 1), ("local", 2)), lanes=LANES, timeout_seconds=30)
    net = Net()
    groups = make_groups(mesh, "fsdp")
    ShardedModel(shard_model(net, NAMES, groups), groups, None)
    try:
        net(batch(0)).backward()
        message = ""
    except UserError as error:
        message = str(error)
    collective.all_reduce(torch.ones(1), groups.all_ranks).wait()
    mesh.close()
    return message


def test_a_backward_pass_without_begin_backward_is_an_error(ranks):
    messages = ranks.run(2, run_unannounced_backward)
    assert all('block "blocks.3" is sharded' in message for message in messages)


def test_shards_are_the_rows_that_the_rank_holds(ranks):
    assert ranks.run(2, shard_linear_layer) == [True, True]


def shard_linear_layer() -> bool:
    mesh = Mesh((("host", 1), ("local", 2)), lanes=LANES, timeout_seconds=30)
    net = nn.Linear(6, 5)
    before = [p.detach().clone() for p in net.parameters()]
    flat = FlatParameter([(net.weight, [(net, "weight")]), (net.bias, [(net, "bias")])], mesh.group(lane="gather"))
    for parameter, full in zip(net.parameters(), before, strict=True):
        shard = shard_of(parameter)
        assert shard is not None and shard.full_shape == tuple(full.shape)
        assert torch.equal(parameter, full[slice(*shard.rows)])
    assert abs(len(flat.local_shard) - 35 / 2) <= 6
    assert sum(b - a for a, b in pairwise(shard_boundaries([(5, 6), (5,)], 2))) == 35
    mesh.close()
    return True
