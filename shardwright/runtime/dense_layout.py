"""The dense part of a model as a plan lays it out: what each rank has of it, and the optimizer of that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from shardwright.comm.mesh import Group, Mesh
from shardwright.dense.activation_checkpoint import checkpoint_activations
from shardwright.dense.adam_bf16 import convert_state_dtype
from shardwright.dense.clip_grad_norm import register_clip_hook
from shardwright.dense.flat_parameter import shard_of
from shardwright.dense.offload import offload_optimizer_state, offload_tensor
from shardwright.dense.replicated import ReplicatedModel, broadcast_values
from shardwright.dense.sharded import ShardedBlock, ShardedModel, ShardingGroups, shard_model
from shardwright.errors import UserError, did_you_mean
from shardwright.measure.describe import block_names, sparse_of
from shardwright.runtime.materialize import materialize
from shardwright.spec.plan import Plan

DenseOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
TRIAL_SHAPE = (6, 4)  # the shape of a parameter on which an optimizer is tried


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """`parameters` are this rank's, for the optimizer; `summing` sums their gradients, where there are other ranks;
    `shards` brings together what is cut or lies away, `moved` are the parameters that do. The ranks of `others` have
    the other pieces."""

    parameters: list[nn.Parameter]
    reducer: ReplicatedModel | ShardedModel | None = None
    sharded_model: ShardedModel | None = None
    offloaded: tuple[nn.Parameter, ...] = ()
    shard_groups: tuple[Group, ...] = ()

    @property
    def residuals(self) -> Sequence[Tensor]:
        """What rounding on the wire is still to add."""
        return () if self.reducer is None else self.reducer.residuals

    def make_optimizer(self, make: DenseOptimizer, *, state_dtype: torch.dtype, clip: float) -> torch.optim.Optimizer:
        """`state`: in what it keeps what it remembers; `clip`: the longest all gradients may be together, 0: any."""
        found = make(self.parameters)
        if isinstance(found, torch.optim.LBFGS):
            raise UserError("torch.optim.LBFGS evaluates the loss several times a step; the runtime does so once")
        if any(_cut(one) for one in self.parameters) and not _by_element(make, len(self.parameters)):
            raise UserError(
                f"{type(found).__name__} looks at parameters as wholes, and the plan cuts them among ranks: take an "
                "optimizer whose step is the same for every element, or a plan whose dense part replicates"
            )
        found = convert_state_dtype(found, state_dtype, _places)
        if self.offloaded:
            offload_optimizer_state(found, self.offloaded)
        if clip:
            pieces = [one for one in self.parameters if shard_of(one)]
            alike = [one for one in self.parameters if not shard_of(one)]
            register_clip_hook(found, pieces, clip, self.shard_groups, alike)
        return found


def shard_lanes(plan: Plan) -> tuple[str, ...]:
    """On which weights and their gradients travel, where blocks are cut."""
    return ("gather", "scatter") if plan.dense.shard else ()


def group_axes(plan: Plan) -> list[tuple[str, ...]]:
    """The sets of axes whose ranks talk among themselves."""
    return [(), *filter(None, (plan.dense.shard, plan.dense.replicate if plan.dense.shard else ()))]


def check_dense_plan(model: nn.Module, plan: Plan) -> None:
    """A plan whose dense part is not this model's, and a model that is in parts already."""
    known = block_names(model)
    for name in (*(one.block for one in plan.dense.recompute), *plan.dense.offload):
        if name not in known:
            raise UserError(
                f'the plan\'s dense part names block "{name}"{did_you_mean(name, known)}; plan this model anew'
            )
    if any(shard_of(parameter) for parameter in model.parameters()):
        raise UserError(f"an earlier build has taken this {type(model).__name__} apart: make the model anew")


def distribute_dense(model: nn.Module, plan: Plan, mesh: Mesh) -> DenseLayout:
    """Give the model its first values. Cut blocks among the ranks, as soon as they have theirs, or replicate them; put
    what is offloaded away; frame what is recomputed."""
    names = [name for name in block_names(model) if plan.dense.shard or name in plan.dense.offload]
    ways = _ways(plan, mesh) if names else None
    blocks = _made(model, names, ways, plan.dense.offload, mesh.device)
    sparse = sparse_of(model)
    held = {id(parameter) for parameter in sparse.parameters()} if sparse else set()
    inside = {id(shard) for block in blocks for unit in block.flat_parameters for shard in unit.shards}
    moved = tuple(one for block in blocks if block.name in plan.dense.offload for one in block.trained_shards)
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in held]
    rounded = plan.wire.dense == "bfloat16"
    rest = [p for p in trained if id(p) not in inside]
    everyone = mesh.group(lane=_lane(mesh))
    summing = ReplicatedModel(rest, everyone, bf16_reduce=rounded) if rest and mesh.size > 1 else None
    if mesh.size > 1:
        frozen = [p for p in model.parameters() if not p.requires_grad and id(p) not in held | inside]
        tables = {id(state) for state in sparse.buffers()} if sparse else set()
        broadcast_values([*frozen, *(state for state in model.buffers() if id(state) not in tables)], everyone)
    shards, others = None, ()
    if ways is not None:
        others = (ways.all_gather,) if ways.all_gather.size > 1 else ()
        shards = ShardedModel(blocks, ways, summing, num_prefetched_blocks=plan.dense.ahead, bf16_reduce=rounded)
    checkpoint_activations(model, plan.dense.recompute)
    return DenseLayout(trained, shards or summing, shards, moved, others)


def _made(
    model: nn.Module, names: Sequence[str], ways: ShardingGroups | None, offload: Sequence[str], device: torch.device
) -> list[ShardedBlock]:
    """First values, and what is cut of these blocks: one by one where the model was made on the meta device, so that no
    rank ever has all weights, unless a module around the blocks fills them."""
    if ways is None:
        materialize(model, device)
        return []
    keep = dict.fromkeys(offload, offload_tensor)
    found: dict[str, list[ShardedBlock]] = {}

    def made(name: str) -> None:
        found[name] = shard_model(model, names, ways, keep, [name])

    materialize(model, device, [name for name in names if device.type == "cpu" or name not in keep], made)
    for name in names:
        if name not in found:
            made(name)
    return [block for name in names for block in found[name]]


def _ways(plan: Plan, mesh: Mesh) -> ShardingGroups:
    """Along axes that shard pieces are gathered and added up; those that differ along the others have the same."""
    shard, replicate = plan.dense.shard, plan.dense.replicate
    sizes = dict(plan.axes)

    def group(axes: Sequence[str], lane: str) -> Group:
        return mesh.group(axes, lane) if prod(sizes[axis] for axis in axes) > 1 else mesh.alone(lane)

    last = _lane(mesh)
    first, second = ("gather", "scatter") if shard else (last, last)
    others = replicate if shard else tuple(sizes)
    return ShardingGroups(group(shard, first), group(shard, second), group(others, last), mesh.group(lane=last))


def _lane(mesh: Mesh) -> str:
    """Of sums over all ranks, where there are others."""
    return "dense" if "dense" in mesh.lanes else ""


def _cut(parameter: nn.Parameter) -> bool:
    """Whether other ranks have other rows of it."""
    shard = shard_of(parameter)
    return shard is not None and shard.full_shape != tuple(parameter.shape)


def _places(parameters: Sequence[Tensor]) -> list[int]:
    """Of each where its first number stands among those of all, were they whole."""
    found, start = [], 0
    for parameter in parameters:
        shard = shard_of(parameter)
        shape = torch.Size(shard.full_shape if shard is not None else parameter.shape)
        found.append(start + (shard.rows[0] * shape[1:].numel() if shard is not None else 0))
        start += shape.numel()
    return found


def _by_element(make: DenseOptimizer, num: int) -> bool:
    """Whether two steps of `num` parameters are those of their upper rows and of their lower rows apart."""
    drawn = torch.Generator().manual_seed(1)
    start, gradient = (torch.randn(TRIAL_SHAPE, generator=drawn, dtype=torch.float64) for _ in range(2))

    def stepped(rows: slice) -> Tensor:
        parameters = [nn.Parameter(start[rows].clone()) for _ in range(num)]
        optimizer = make(parameters)
        for scale in (1.0, -0.3):
            for parameter in parameters:
                parameter.grad = scale * gradient[rows]
            optimizer.step()
        return torch.stack([parameter.detach() for parameter in parameters])

    half = TRIAL_SHAPE[0] // 2
    with torch.random.fork_rng(devices=()):
        parts = [stepped(slice(half)), stepped(slice(half, None))]
        return torch.allclose(stepped(slice(None)), torch.cat(parts, 1), rtol=1e-12, atol=0)
