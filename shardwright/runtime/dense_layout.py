"""Lay out the dense model as a plan says: sharded, replicated or offloaded parameters, and their optimizer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from shardwright.comm.mesh import DEFAULT_LANE, Group, Mesh
from shardwright.comm.transport.servers import TableServers
from shardwright.dense.activation_checkpoint import checkpoint_activations
from shardwright.dense.adam_bf16 import convert_state_dtype
from shardwright.dense.clip_grad_norm import register_clip_hook
from shardwright.dense.offload import offload_optimizer_state, offload_tensor
from shardwright.dense.pipeline import AbsentModule, Boundaries, PipelineRank, check_cuttable, cut_model
from shardwright.dense.replicated import ReplicatedModel, broadcast_values
from shardwright.dense.sharded import ShardedBlock, ShardedModel, ShardingGroups, shard_model
from shardwright.errors import UserError, did_you_mean
from shardwright.measure.describe import block_names, meta_twin, sparse_of
from shardwright.parameter_shard import shard_of
from shardwright.runtime.expert_layout import ExpertLayout, check_experts, expert_groups
from shardwright.runtime.materialize import materialize
from shardwright.spec.calls import reducing_stages
from shardwright.spec.lanes import DENSE, IDS, PIPE, PIPE_BACKWARD, SHARD_LANES, WIRE
from shardwright.spec.pipeline import Chunk, rank_chunks
from shardwright.spec.plan import Plan
from shardwright.spec.wire import MAX_UNNAMED_BUCKETS, gradient_buckets

DenseOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
TRIAL_SHAPE = (6, 4)  # shape of the parameters on which `_is_elementwise` tries an optimizer


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """A rank's part of the dense model."""

    parameters: list[nn.Parameter]  # the trained parameters or shards of this rank, for the optimizer
    reducers: tuple[ReplicatedModel | ShardedModel, ...] = ()  # of gradients over ranks; in a pipeline, by chunk
    offloaded: tuple[nn.Parameter, ...] = ()
    shard_groups: tuple[Group, ...] = ()  # groups whose ranks have the other shards
    pipeline: PipelineRank | None = None
    pipeline_groups: tuple[Group, ...] = ()  # groups whose ranks have the other chunks of a pipeline
    experts: ExpertLayout = field(default_factory=ExpertLayout)

    @property
    def residuals(self) -> Sequence[Tensor]:
        """Error feedback residuals of the gradient reduction."""
        return [residual for reducer in self.reducers for residual in reducer.residuals]

    def make_optimizer(self, make: DenseOptimizer, *, state_dtype: torch.dtype, clip: float) -> torch.optim.Optimizer:
        """Create the dense optimizer. `clip`: maximum global norm of all dense gradients; 0: no clipping."""
        optimizer = make(self.parameters)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError("torch.optim.LBFGS evaluates the loss several times a step; the runtime does so once")
        if any(_is_sharded(p) for p in self.parameters) and not _is_elementwise(make, len(self.parameters)):
            raise UserError(
                f"{type(optimizer).__name__} needs full parameters, and the plan shards them over ranks: use an "
                "optimizer that updates every element by itself, or a plan that replicates the dense model"
            )
        optimizer = convert_state_dtype(optimizer, state_dtype, _element_offsets)
        if self.offloaded:
            offload_optimizer_state(optimizer, self.offloaded)
        if clip:
            sharded = [p for p in self.parameters if shard_of(p) and not self.experts.owns(p)]
            replicated = [p for p in self.parameters if not shard_of(p)]
            experts = [(parameters, (group,)) for parameters, group in self.experts.by_owners(self.parameters)]
            parts = [(sharded, self.shard_groups), *experts, (replicated, ())]
            register_clip_hook(optimizer, parts, clip, self.pipeline_groups)
        return optimizer


def mesh_for(
    plan: Plan,
    timeout_seconds: float = 60.0,
    servers: TableServers | None = None,
    device: torch.device | str = "cpu",
) -> Mesh:
    """The mesh of a job under this plan, with exactly the groups that the job uses. `servers`: the plan's.

    The first lane is of the run's control flow (`RankGroup`). Ids and vectors are exchanged between all ranks with
    different samples, weights between the ranks that share them, gradients between replicas.
    """
    groups: list[tuple[str, tuple[str, ...]]] = [(DEFAULT_LANE, ()), (IDS, announced_axes(plan))]
    if plan.sample_axes or plan.pipeline is None:
        groups.append((DENSE, plan.sample_axes))
    if plan.pipeline is not None:
        groups += [(lane, plan.pipeline_axes) for lane in (PIPE, PIPE_BACKWARD)]
    if plan.tables:
        groups.append((WIRE, plan.sample_axes))
    if plan.dense.shard:
        groups += [(lane, plan.dense.shard) for lane in SHARD_LANES]
        groups += [(DENSE, plan.dense.replicate)] if plan.dense.replicate else []
    groups += expert_groups(plan)
    mesh = Mesh(plan.mesh_axes, groups=groups, timeout_seconds=timeout_seconds, device=device)
    mesh.servers = servers
    return mesh


def announced_axes(plan: Plan) -> tuple[str, ...]:
    """The axes along which batches are announced; none: to all ranks. Those of a pipeline end and stop together."""
    return () if plan.pipeline is not None else plan.sample_axes


def check_dense_plan(model: nn.Module, plan: Plan) -> None:
    """Raise if the plan names blocks that this model does not have, or an earlier build has sharded the model."""
    blocks = block_names(model)
    for name in (*(recompute.block for recompute in plan.dense.recompute), *plan.dense.offload):
        if name not in blocks:
            raise UserError(f'the plan names unknown block "{name}"{did_you_mean(name, blocks)}; plan this model again')
    check_experts(model, plan)
    if plan.pipeline is not None:
        check_cuttable(model)
        num_blocks = len(model.get_submodule("blocks"))  # pyright: ignore[reportArgumentType]
        if sum(plan.pipeline.blocks) != num_blocks:
            raise UserError(
                f"the pipeline's chunks {list(plan.pipeline.blocks)} have {sum(plan.pipeline.blocks)} blocks, and the "
                f"model has {num_blocks}; plan this model again"
            )
        for chunk in rank_chunks(plan.pipeline, 1, 0):
            modules = [model.get_submodule(name) for name in _module_names(chunk)]
            if not any(parameter.requires_grad for module in modules for parameter in module.parameters()):
                raise UserError(
                    f"chunk {chunk.number} of the pipeline has no trained parameter: cut elsewhere, or train without "
                    "plan.pipeline"
                )
    if any(shard_of(parameter) for parameter in model.parameters()):
        raise UserError(f"an earlier build has sharded this {type(model).__name__}: create the model again")


def distribute_dense(model: nn.Module, plan: Plan, mesh: Mesh) -> DenseLayout:
    """Initialize the model on the mesh's device, and lay out its dense parameters.

    A pipeline keeps this rank's chunks. Blocks are sharded as soon as they are initialized, or replicated; those to
    offload are moved to the next memory tier; checkpointed blocks are wrapped. The frozen dense parameters and buffers
    of the first of the ranks with different samples are broadcast on the dense lane.
    """
    pipeline = _cut_for_pipeline(model, plan, mesh) if plan.pipeline is not None else None
    names = [name for name in block_names(model) if plan.dense.shard or name in plan.dense.offload]
    groups = _sharding_groups(plan, mesh) if names else None
    sample_ranks, experts = _dense_group(plan, mesh), ExpertLayout()
    shard_experts = partial(experts.shard, model, plan, mesh, sample_ranks)
    blocks = _materialize_blocks(model, names, groups, plan.dense.offload, mesh.device, shard_experts)
    sparse = sparse_of(model)
    table_ids = {id(parameter) for parameter in sparse.parameters()} if sparse else set()
    shard_ids = {id(shard) for block in blocks for unit in block.flat_parameters for shard in unit.shards}
    offloaded = tuple(shard for block in blocks if block.name in plan.dense.offload for shard in block.trained_shards)
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in table_ids]
    if sample_ranks.size > 1:
        own_ids = table_ids | shard_ids | set(experts.groups)
        frozen = [p for p in model.parameters() if not p.requires_grad and id(p) not in own_ids]
        table_state_ids = {id(state) for state in sparse.buffers()} if sparse else set()
        broadcast_values([*frozen, *(b for b in model.buffers() if id(b) not in table_state_ids)], sample_ranks)
    reducers: list[ReplicatedModel | ShardedModel] = []
    for suffix, part in _parts(pipeline):
        own_ids = {id(parameter) for name in part for parameter in model.get_submodule(name).parameters()}
        unsharded = [p for p in parameters if id(p) in own_ids - shard_ids]
        unsharded = [p for p in unsharded if (replicas := experts.replicas(p)) is None or replicas.size > 1]
        own_blocks = [block for block in blocks if any(_is_inside(block.name, name) for name in part)]
        stages = reducing_stages(plan.stages)
        if pipeline is not None:
            stages = _bucket_stages(model, part, plan, suffix, experts)
        stage_of = _reducing_stage(model, stages, f"reduce{suffix}")
        reducers += _make_reducer(plan, unsharded, own_blocks, groups, sample_ranks, stage_of, experts.replicas)
    shard_groups = (groups.all_gather,) if groups is not None and groups.all_gather.size > 1 else ()
    checkpoint_activations(model, [entry for entry in plan.dense.recompute if _is_present(model, entry.block)])
    pipeline_groups = (mesh.group(plan.pipeline_axes, PIPE),) if pipeline is not None else ()
    return DenseLayout(parameters, tuple(reducers), offloaded, shard_groups, pipeline, pipeline_groups, experts)


def _cut_for_pipeline(model: nn.Module, plan: Plan, mesh: Mesh) -> PipelineRank:
    """Keep this rank's chunks of the model."""
    assert plan.pipeline is not None
    num_ranks = plan.num_pipeline_ranks
    chunks = rank_chunks(plan.pipeline, num_ranks, plan.pipeline_rank(mesh.rank))
    starts = [0, *accumulate(plan.pipeline.blocks)][:-1]
    boundaries = Boundaries(meta_twin(model), starts)
    cut_model(model, chunks)
    groups = mesh.group(plan.pipeline_axes, PIPE), mesh.group(plan.pipeline_axes, PIPE_BACKWARD)
    return PipelineRank(model, chunks, groups, boundaries)


def _parts(pipeline: PipelineRank | None) -> list[tuple[str, list[str]]]:
    """The modules whose gradients are reduced together: all of the model, or those of each chunk, with its suffix."""
    if pipeline is None:
        return [("", [""])]
    return [(chunk.suffix, _module_names(chunk)) for chunk in pipeline.chunks.values()]


def _module_names(chunk: Chunk) -> list[str]:
    """The modules of a chunk."""
    return [
        *(["embed"] if chunk.is_first else []),
        *(f"blocks.{number}" for number in range(*chunk.blocks)),
        *(["head"] if chunk.is_last else []),
    ]


def _bucket_stages(
    model: nn.Module, modules: Sequence[str], plan: Plan, suffix: str, experts: ExpertLayout
) -> dict[str, str]:
    """By module of a chunk, the stage that reduces its gradients: the planner's, which are not in a pipeline's plan."""
    if plan.dense.shard:
        return {}
    reduced = {name: [p for p in model.get_submodule(name).parameters() if not experts.owns(p)] for name in modules}
    sizes = {name: sum(p.numel() * p.itemsize for p in parameters) for name, parameters in reduced.items()}
    buckets = gradient_buckets((name, sizes[name]) for name in reversed(modules))
    if len(buckets) <= MAX_UNNAMED_BUCKETS:
        return dict.fromkeys(modules, f"reduce{suffix}")
    return {name: f"reduce {last}" for last, names in buckets.items() for name in names}


def _reducing_stage(model: nn.Module, stages: dict[str, str], default: str) -> Callable[[nn.Parameter], str]:
    """The name of the stage that reduces a parameter's gradient. `stages`: by block; `default`: if there are none."""
    by_id = {
        id(parameter): stages[name]
        for name in block_names(model)
        if name in stages
        for parameter in model.get_submodule(name).parameters()
    }
    last = next(reversed(stages.values()), default)
    return lambda parameter: by_id.get(id(parameter), last)


def _make_reducer(
    plan: Plan,
    unsharded: Sequence[nn.Parameter],
    blocks: Sequence[ShardedBlock],
    groups: ShardingGroups | None,
    sample_ranks: Group,
    stage_of: Callable[[nn.Parameter], str],
    group_of: Callable[[nn.Parameter], Group | None],
) -> Iterator[ReplicatedModel | ShardedModel]:
    """What reduces the gradients of these parameters and blocks; nothing on one rank without sharded blocks."""
    is_bf16 = plan.wire.dense == "bfloat16"
    replicated = None
    if unsharded and sample_ranks.size > 1:
        replicated = ReplicatedModel(unsharded, sample_ranks, bf16_reduce=is_bf16, stage_of=stage_of, group_of=group_of)
    if groups is not None:
        yield ShardedModel(blocks, groups, replicated, num_prefetched_blocks=plan.dense.ahead, bf16_reduce=is_bf16)
    elif replicated is not None:
        yield replicated


def _is_inside(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _is_present(model: nn.Module, block: str) -> bool:
    return not isinstance(model.get_submodule(block), AbsentModule)


def _materialize_blocks(
    model: nn.Module,
    names: Sequence[str],
    groups: ShardingGroups | None,
    offload: Sequence[str],
    device: torch.device,
    shard_experts: Callable[..., None],
) -> list[ShardedBlock]:
    """Initialize the model, split its experts, and shard these blocks.

    Blocks of a model on the meta device are initialized and sharded one by one, so that no rank ever has all weights,
    unless a module that contains the blocks initializes them.
    """
    if groups is None:
        materialize(model, device)
        shard_experts()
        return []
    offload_functions = dict.fromkeys(offload, offload_tensor)
    sharded: dict[str, list[ShardedBlock]] = {}

    def shard(name: str) -> None:
        shard_experts(name)
        sharded[name] = shard_model(model, names, groups, offload_functions, [name])

    materialize(model, device, [name for name in names if device.type == "cpu" or name not in offload_functions], shard)
    for name in names:
        if name not in sharded:
            shard(name)
    shard_experts()
    return [block for name in names for block in sharded[name]]


def _sharding_groups(plan: Plan, mesh: Mesh) -> ShardingGroups:
    """Groups along the plan's `shard` axes for all-gather and reduce-scatter, along the other axes for replicas."""
    shard, replicate = plan.dense.shard, plan.dense.replicate
    sizes = dict(plan.mesh_axes)

    def group(axes: Sequence[str], lane: str) -> Group:
        return mesh.group(axes, lane) if prod(sizes[axis] for axis in axes) > 1 else mesh.alone(lane)

    dense = _dense_lane(mesh)
    gather, scatter = SHARD_LANES if shard else (dense, dense)
    replicas = replicate if shard else plan.sample_axes
    return ShardingGroups(group(shard, gather), group(shard, scatter), group(replicas, dense), _dense_group(plan, mesh))


def _dense_group(plan: Plan, mesh: Mesh) -> Group:
    """The ranks with different samples, which hold replicas or shards of the same parameters."""
    lane, sizes = _dense_lane(mesh), dict(plan.mesh_axes)
    is_alone = mesh.size == 1 or prod(sizes[axis] for axis in plan.sample_axes) == 1
    return mesh.alone(lane) if is_alone else mesh.group(plan.sample_axes, lane)


def _dense_lane(mesh: Mesh) -> str:
    """The lane of all-reduces of dense gradients; the default lane in a mesh without lane `dense`."""
    return DENSE if DENSE in mesh.lanes else ""


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Whether this is a shard of a parameter, whose other rows are on other ranks."""
    shard = shard_of(parameter)
    return shard is not None and shard.full_shape != tuple(parameter.shape)


def _element_offsets(parameters: Sequence[Tensor]) -> list[int]:
    """The index of each parameter's first element among the concatenated elements of all full parameters."""
    offsets, start = [], 0
    for parameter in parameters:
        shard = shard_of(parameter)
        shape = torch.Size(shard.full_shape if shard is not None else parameter.shape)
        offsets.append(start + (shard.rows[0] * shape[1:].numel() if shard is not None else 0))
        start += shape.numel()
    return offsets


def _is_elementwise(make: DenseOptimizer, num: int) -> bool:
    """Whether two steps on `num` full parameters equal two steps on their upper and lower rows separately."""
    generator = torch.Generator().manual_seed(1)
    start, gradient = (torch.randn(TRIAL_SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))

    def run_steps(rows: slice) -> Tensor:
        parameters = [nn.Parameter(start[rows].clone()) for _ in range(num)]
        optimizer = make(parameters)
        for scale in (1.0, -0.3):
            for parameter in parameters:
                parameter.grad = scale * gradient[rows]
            optimizer.step()
        return torch.stack([parameter.detach() for parameter in parameters])

    half = TRIAL_SHAPE[0] // 2
    with torch.random.fork_rng(devices=()):
        halves = [run_steps(slice(half)), run_steps(slice(half, None))]
        return torch.allclose(run_steps(slice(None)), torch.cat(halves, 1), rtol=1e-12, atol=0)
