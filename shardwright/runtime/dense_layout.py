"""The dense part of a model as a plan lays it out: what each rank has of it, and the optimizer of that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from shardwright.comm.mesh import Group, Mesh
from shardwright.dense.activation_checkpoint import recompute
from shardwright.dense.adam_bf16 import kept_in
from shardwright.dense.clip_grad_norm import clip_steps
from shardwright.dense.flat_parameter import shard_of
from shardwright.dense.offload import away, move_state
from shardwright.dense.replicated import Replicated, broadcast_values
from shardwright.dense.sharded import Block, Shards, Ways, cut
from shardwright.errors import UserError, nearest
from shardwright.measure.describe import block_names, sparse_of
from shardwright.runtime.materialize import materialise
from shardwright.spec.plan import Plan

DenseOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
TRIED = (6, 4)  # the shape of a parameter on which an optimizer is tried


@dataclass(frozen=True, slots=True)
class DensePart:
    """`parameters` are this rank's, for the optimizer; `summing` sums their gradients, where there are other ranks;
    `shards` brings together what is cut or lies away, `moved` are the parameters that do. The ranks of `others` have
    the other pieces."""

    parameters: list[nn.Parameter]
    summing: Replicated | Shards | None = None
    shards: Shards | None = None
    moved: tuple[nn.Parameter, ...] = ()
    others: tuple[Group, ...] = ()

    @property
    def kept(self) -> Sequence[Tensor]:
        """What rounding on the wire is still to add."""
        return () if self.summing is None else self.summing.kept

    def optimizer(self, make: DenseOptimizer, *, state: torch.dtype, clip: float) -> torch.optim.Optimizer:
        """`state`: in what it keeps what it remembers; `clip`: the longest all gradients may be together, 0: any."""
        found = make(self.parameters)
        if isinstance(found, torch.optim.LBFGS):
            raise UserError("torch.optim.LBFGS evaluates the loss several times a step; the runtime does so once")
        if any(_cut(one) for one in self.parameters) and not _by_element(make, len(self.parameters)):
            raise UserError(
                f"{type(found).__name__} looks at parameters as wholes, and the plan cuts them among ranks: take an "
                "optimizer whose step is the same for every element, or a plan whose dense part replicates"
            )
        found = kept_in(found, state, _places)
        if self.moved:
            move_state(found, self.moved)
        if clip:
            pieces = [one for one in self.parameters if shard_of(one)]
            alike = [one for one in self.parameters if not shard_of(one)]
            clip_steps(found, pieces, clip, self.others, alike)
        return found


def lanes(plan: Plan) -> tuple[str, ...]:
    """On which weights and their gradients travel, where blocks are cut."""
    return ("gather", "scatter") if plan.dense.shard else ()


def along(plan: Plan) -> list[tuple[str, ...]]:
    """The sets of axes whose ranks talk among themselves."""
    return [(), *filter(None, (plan.dense.shard, plan.dense.replicate if plan.dense.shard else ()))]


def refuse(model: nn.Module, plan: Plan) -> None:
    """A plan whose dense part is not this model's, and a model that is in parts already."""
    known = block_names(model)
    for name in (*(one.block for one in plan.dense.recompute), *plan.dense.offload):
        if name not in known:
            raise UserError(f'the plan\'s dense part names block "{name}"{nearest(name, known)}; plan this model anew')
    if any(shard_of(parameter) for parameter in model.parameters()):
        raise UserError(f"an earlier build has taken this {type(model).__name__} apart: make the model anew")


def lay_out(model: nn.Module, plan: Plan, mesh: Mesh) -> DensePart:
    """Give the model its first values. Cut blocks among the ranks, as soon as they have theirs, or replicate them; put
    what is offloaded away; frame what is recomputed."""
    names = [name for name in block_names(model) if plan.dense.shard or name in plan.dense.offload]
    ways = _ways(plan, mesh) if names else None
    blocks = _made(model, names, ways, plan.dense.offload, mesh.device)
    sparse = sparse_of(model)
    held = {id(parameter) for parameter in sparse.parameters()} if sparse else set()
    inside = {id(shard) for block in blocks for unit in block.units for shard in unit.shards}
    moved = tuple(one for block in blocks if block.name in plan.dense.offload for one in block.shards)
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in held]
    rounded = plan.wire.dense == "bfloat16"
    rest = [p for p in trained if id(p) not in inside]
    everyone = mesh.group(lane=_lane(mesh))
    summing = Replicated(rest, everyone, rounded=rounded) if rest and mesh.size > 1 else None
    if mesh.size > 1:
        frozen = [p for p in model.parameters() if not p.requires_grad and id(p) not in held | inside]
        tables = {id(state) for state in sparse.buffers()} if sparse else set()
        broadcast_values([*frozen, *(state for state in model.buffers() if id(state) not in tables)], everyone)
    shards, others = None, ()
    if ways is not None:
        others = (ways.gather,) if ways.gather.size > 1 else ()
        shards = Shards(blocks, ways, summing, ahead=plan.dense.ahead, rounded=rounded)
    recompute(model, plan.dense.recompute)
    return DensePart(trained, shards or summing, shards, moved, others)


def _made(
    model: nn.Module, names: Sequence[str], ways: Ways | None, offload: Sequence[str], device: torch.device
) -> list[Block]:
    """First values, and what is cut of these blocks: one by one where the model was made on the meta device, so that no
    rank ever has all weights, unless a module around the blocks fills them."""
    if ways is None:
        materialise(model, device)
        return []
    keep = dict.fromkeys(offload, away)
    found: dict[str, list[Block]] = {}

    def made(name: str) -> None:
        found[name] = cut(model, names, ways, keep, [name])

    materialise(model, device, [name for name in names if device.type == "cpu" or name not in keep], made)
    for name in names:
        if name not in found:
            made(name)
    return [block for name in names for block in found[name]]


def _ways(plan: Plan, mesh: Mesh) -> Ways:
    """Along axes that shard pieces are gathered and added up; those that differ along the others have the same."""
    shard, replicate = plan.dense.shard, plan.dense.replicate
    sizes = dict(plan.axes)

    def group(axes: Sequence[str], lane: str) -> Group:
        return mesh.group(axes, lane) if prod(sizes[axis] for axis in axes) > 1 else mesh.alone(lane)

    last = _lane(mesh)
    first, second = ("gather", "scatter") if shard else (last, last)
    others = replicate if shard else tuple(sizes)
    return Ways(group(shard, first), group(shard, second), group(others, last), mesh.group(lane=last))


def _lane(mesh: Mesh) -> str:
    """Of sums over all ranks, where there are others."""
    return "dense" if "dense" in mesh.lanes else ""


def _cut(parameter: nn.Parameter) -> bool:
    """Whether other ranks have other rows of it."""
    shard = shard_of(parameter)
    return shard is not None and shard.shape != tuple(parameter.shape)


def _places(parameters: Sequence[Tensor]) -> list[int]:
    """Of each where its first number stands among those of all, were they whole."""
    found, start = [], 0
    for parameter in parameters:
        shard = shard_of(parameter)
        shape = torch.Size(shard.shape if shard is not None else parameter.shape)
        found.append(start + (shard.rows[0] * shape[1:].numel() if shard is not None else 0))
        start += shape.numel()
    return found


def _by_element(make: DenseOptimizer, num: int) -> bool:
    """Whether two steps of `num` parameters are those of their upper rows and of their lower rows apart."""
    drawn = torch.Generator().manual_seed(1)
    start, gradient = (torch.randn(TRIED, generator=drawn, dtype=torch.float64) for _ in range(2))

    def stepped(rows: slice) -> Tensor:
        parameters = [nn.Parameter(start[rows].clone()) for _ in range(num)]
        optimizer = make(parameters)
        for scale in (1.0, -0.3):
            for parameter in parameters:
                parameter.grad = scale * gradient[rows]
            optimizer.step()
        return torch.stack([parameter.detach() for parameter in parameters])

    half = TRIED[0] // 2
    with torch.random.fork_rng(devices=()):
        parts = [stepped(slice(half)), stepped(slice(half, None))]
        return torch.allclose(stepped(slice(None)), torch.cat(parts, 1), rtol=1e-12, atol=0)
