"""Build a job from a model, a plan and a mesh. Each phase needs the result of the one before it:

    verify the plan, refuse unsupported plans -> shard the tables -> materialize the rest of a model on the meta device
    and move it; shard or replicate its blocks -> make its optimizer -> bind the stages

The model itself is kept as it is: no forward is patched, no module traced.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from shardwright.comm.codec import Bf16, Fp16, Plain
from shardwright.comm.mesh import Group, Mesh, current_rank
from shardwright.embeddings.announcement import BatchAnnouncer
from shardwright.embeddings.cached_shard import Caches, DiskStores
from shardwright.embeddings.exchange import Lanes, ShardedTables
from shardwright.embeddings.host_tables import HostTables
from shardwright.embeddings.layout import build_layout
from shardwright.embeddings.row_order import GrowthOrder, make_row_order
from shardwright.errors import UserError
from shardwright.kernels.matmul import library_in_use, preferred_library, use_library
from shardwright.kernels.native import retain_freed_memory
from shardwright.kernels.reference import num_row_sums
from shardwright.layers.draws import LayerDraws, StepDraws
from shardwright.layers.dropout import Dropout
from shardwright.layers.embedding import EmbeddingTables, find_tables
from shardwright.layers.gates import TopKGate
from shardwright.measure.describe import check_contract, sparse_of
from shardwright.planner.step.stages import has_host_reduce, with_gpu
from shardwright.runtime import dense_layout
from shardwright.runtime.accumulation import GradientAccumulation
from shardwright.runtime.agreement import check_agreement
from shardwright.runtime.batch_norms import share_batch_norms
from shardwright.runtime.bindings import StepBindings
from shardwright.runtime.dense_layout import DenseOptimizer, announced_axes, mesh_for
from shardwright.runtime.job import Job
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.served import check_servers, connect_servers, open_stores, open_tables
from shardwright.runtime.supported import (
    EXACT_REMEDY,
    cached_rows,
    check_gpu,
    check_supported,
    gpu_rows,
    is_single_process,
)
from shardwright.runtime.user_loop import UserLoop
from shardwright.spec.lanes import IDS, WIRE
from shardwright.spec.pipeline import rank_chunks, rank_stages
from shardwright.spec.plan import Plan
from shardwright.spec.row_cache import FLOAT32_LINES, STEPS_IN_FLIGHT

CACHING_DEVICES = ("cuda",)  # that may have a cache of rows in host memory
CODECS = MappingProxyType({"float64": Plain, "float32": Plain, "float16": Fp16, "bfloat16": Bf16})


def build(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh | None = None,
    *,
    optimizer: DenseOptimizer | None = None,
    hottest: Mapping[str, Tensor] | None = None,
    overlap: bool = True,
    accumulate: int = 1,
    clip: float = 0.0,
) -> Job:
    """Build a job for this model under this plan; `optimizer` creates the torch optimizer of the dense parameters.

    `hottest` has the most frequent ids of tables with rows in load order. Without `overlap`, every stage completes
    before the next begins; with it, a batch for a GPU is read while the one before is computed. `accumulate`:
    micro-batches per step. `clip`: maximum global norm of the gradients of all dense parameters, 0: none; optimizers of
    tables clip their gradients themselves.
    """
    retain_freed_memory()
    use_library(library_in_use() or preferred_library())
    check_contract(model)
    sparse = sparse_of(model)
    _set_paths(model)
    if sparse is not None and sparse.optimizer is None and any(weight.requires_grad for weight in sparse.parameters()):
        raise UserError(
            f"{type(model).__name__}.sparse has no optimizer: pass EmbeddingBags(..., optimizer), "
            "or freeze the tables with requires_grad_(False)"
        )
    check_supported(plan, sparse.tables if sparse else ())
    dense_layout.check_dense_plan(model, plan)
    _check_stages(model, plan)
    check_servers(plan, mesh.servers if mesh is not None else None)
    options = _Options(optimizer, hottest or {}, overlap, accumulate, clip)
    if mesh is not None:
        if mesh.device.type == "cuda":
            check_gpu(plan, sparse.tables if sparse else ())
            plan = replace(plan, stages=with_gpu(plan.stages, num_ranks=plan.num_ranks))
        return _build_on(model, plan, mesh, options)
    mesh = mesh_for(plan)
    try:
        return _build_on(model, plan, mesh, options)
    except BaseException:
        mesh.close()
        raise


@dataclass(frozen=True, slots=True)
class _Options:
    optimizer: DenseOptimizer | None
    hottest: Mapping[str, Tensor]
    overlap: bool
    accumulate: int
    clip: float


def _build_on(model: nn.Module, plan: Plan, mesh: Mesh, options: _Options) -> Job:
    sparse = sparse_of(model)
    if mesh.axes != plan.mesh_axes and (mesh.size, plan.num_ranks) != (1, 1):
        raise UserError(f"the plan is for axes {dict(plan.mesh_axes)}, the mesh has {dict(mesh.axes)}")
    if sparse is not None:
        _refuse_shared_weights(model, sparse)
        sparse.hold({table.table: table.placement.weight_dtype for table in plan.tables})
    if not is_single_process(plan):
        use_library(check_agreement(model, plan, options.hottest, options.accumulate, RankGroup(mesh)))
    if sparse is not None:
        place_tables(sparse, plan, mesh, options)
    parts = plan.pipeline.micro_batches if plan.pipeline is not None else 1
    draws = _key_draws(model, plan, mesh.rank, parts)
    share_batch_norms(model, plan, mesh)
    layout = dense_layout.distribute_dense(model, plan, mesh)
    if layout.parameters and options.optimizer is None:
        raise UserError(
            f"{type(model).__name__} has {len(layout.parameters)} dense parameters and no optimizer; "
            "pass build(..., optimizer=lambda parameters: torch.optim.Adam(parameters))"
        )
    if sparse is not None:
        announcer = sparse.exchange
    else:
        announcer = BatchAnnouncer(mesh.group(announced_axes(plan), IDS) if mesh.size > 1 else mesh.alone())
    overlap = options.overlap and not is_single_process(plan)
    step = StepBindings(
        model,
        rank_stages(plan, mesh.rank),
        mesh,
        announcer,
        layout,
        GradientAccumulation(options.accumulate, layout.parameters, parts),
        autocast_dtype=getattr(torch, plan.dense.dtype),
        overlap=overlap,
    )
    step.keyed_draws = draws.keyed
    user_loop = None
    if not is_single_process(plan) and plan.pipeline is None:
        user_loop = UserLoop(step)
    if layout.parameters and options.optimizer is not None:
        state_dtype = getattr(torch, plan.dense.state)
        step.optimizer = layout.make_optimizer(options.optimizer, state_dtype=state_dtype, clip=options.clip)
    return Job(plan, step, overlap=options.overlap, user_loop=user_loop, residuals=layout.residuals)


def _key_draws(model: nn.Module, plan: Plan, rank: int, num_parts: int) -> StepDraws:
    """Let the layers of the model draw what they would draw in one process."""
    part, _ = plan.position(rank, plan.sample_axes)
    draws = StepDraws(part, num_parts)
    for path, module in model.named_modules():
        if isinstance(module, TopKGate | Dropout):
            module.draws = LayerDraws(draws, path)
    return draws


def _check_stages(model: nn.Module, plan: Plan) -> None:
    """Verify the plan, and that the functions of this rank's stages access exactly the slots that they declare."""
    rank = current_rank() if plan.num_ranks > 1 else 0
    stages, chunks = rank_stages(plan, rank), ()
    if plan.pipeline is not None:
        plan.verify()
        chunks = rank_chunks(plan.pipeline, plan.num_pipeline_ranks, plan.pipeline_rank(rank))
    replace(plan, stages=stages).verify(contracts=StepBindings.contracts(model, stages, chunks))


def place_tables(sparse: EmbeddingTables, plan: Plan, mesh: Mesh, options: _Options) -> None:
    """Shard the tables, or keep them in host memory, as planned."""
    if isinstance(sparse.exchange, HostTables):
        raise UserError("an earlier build keeps rows of these tables in GPU memory: create the model again")
    if is_single_process(plan):
        _cache_on_gpu(sparse, plan, mesh.device)
    else:
        shard_tables(sparse, plan, mesh, options)


def _cache_on_gpu(sparse: EmbeddingTables, plan: Plan, device: torch.device) -> None:
    """Keep tables in host memory as planned, with some of their rows in GPU memory."""
    plans = {table.table: table for table in plan.tables}
    lines = {i: num for i, table in enumerate(sparse.tables) if (num := gpu_rows(plans[table.name])) is not None}
    if not lines:
        return
    if device.type not in CACHING_DEVICES:
        raise UserError(
            f'table "{sparse.tables[min(lines)].name}" is planned with rows in GPU memory, and this job is on the '
            f'{device.type.upper()}: pass build(..., Mesh(device="cuda"))'
        )
    sparse.exchange = HostTables(sparse, lines, device)


def shard_tables(sparse: EmbeddingTables, plan: Plan, mesh: Mesh, options: _Options) -> None:
    """Shard the tables as planned; this rank keeps only its shards."""
    wire, ids = _sample_group(plan, mesh, WIRE), _sample_group(plan, mesh, IDS)
    plans = {table.table: table for table in plan.tables}
    needs_full_rows = sparse.optimizer is not None and num_row_sums(sparse.optimizer) > 0
    ranks_per_host = plan.axes[-1].size if has_host_reduce(plan.stages) else 0
    layout = build_layout(
        sparse.tables,
        sparse.features,
        plans,
        mesh.size,
        num_servers=plan.servers,
        needs_full_rows=needs_full_rows,
        ranks_per_host=ranks_per_host,
    )
    orders = [
        GrowthOrder(table.rows)
        if table.growth is not None
        else make_row_order(plans[table.name].order, table.rows, options.hottest.get(table.name))
        for table in sparse.tables
    ]
    if any(group.bounded for groups in (*layout.table_groups, *layout.served) for group in groups):
        _check_bounded_training(sparse, options)
    lanes = Lanes(ids, wire, CODECS[plan.wire.vectors](), CODECS[plan.wire.gradients]())
    lines = [(index, cached_rows(plans[table.name])) for index, table in enumerate(sparse.tables)]
    lines_by_table = {index: num for index, num in lines if num is not None}
    in_flight = STEPS_IN_FLIGHT * options.accumulate
    connector = connect_servers(mesh)
    stores = open_stores(sparse, layout, plan, RankGroup(mesh), connector)
    in_float32 = FLOAT32_LINES in plan.allow
    caches = Caches(lines_by_table, in_float32, stores or DiskStores()) if lines_by_table else None
    sharded = ShardedTables(sparse, layout, orders, lanes, mesh.device, caches, in_flight, connector)
    if sharded.served.groups:
        open_tables(sharded, RankGroup(mesh))
    sparse.give_up(sharded)


def _check_bounded_training(sparse: EmbeddingTables, options: _Options) -> None:
    """Raise for what tables with bounded staleness do not support."""
    optimizer = sparse.optimizer
    if optimizer is None or not all(weight.requires_grad for weight in sparse.parameters()):
        raise UserError(
            f"tables with bounded staleness, or on servers, are trained, but some of these are frozen: {EXACT_REMEDY}"
        )
    if optimizer.clip or optimizer.weight_decay:
        raise UserError(
            f"the tables' optimizer has clip={optimizer.clip:g}, weight_decay={optimizer.weight_decay:g}; bounded "
            f"staleness and table servers support neither: set both to 0, or {EXACT_REMEDY}"
        )
    if options.accumulate > 1:
        raise UserError(
            f"accumulate={options.accumulate} does not work with bounded staleness or table servers: set accumulate=1, "
            f"or {EXACT_REMEDY}"
        )


def _sample_group(plan: Plan, mesh: Mesh, lane: str) -> Group:
    """The ranks with different samples, on a lane; in one process any mesh of one rank will do."""
    return mesh.group(plan.sample_axes, lane) if mesh.size > 1 else mesh.alone()


def _set_paths(model: nn.Module) -> None:
    """Seed tables outside the child `sparse` with their module path."""
    bags = dict(find_tables(model))
    if len(bags) > 1:
        where = ", ".join(f'"{path}"' for path in bags)
        raise UserError(
            f"{type(model).__name__} has several EmbeddingBags ({where}), and a step exchanges ids once: make them "
            "members of self.sparse = EmbeddingBagsDict({...}), and attributes of nothing else"
        )
    for path, module in bags.items():
        if path not in ("sparse", ""):
            module.set_path(path)


def _refuse_shared_weights(model: nn.Module, sparse: EmbeddingTables) -> None:
    """Raise if another module has a table's weight: its gradients would miss the table's fused update."""
    inside = set(sparse.modules())
    names = {id(sparse.weight(table.name)): table.name for table in sparse.tables}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False) if module not in inside else ():
            if id(parameter) in names:
                raise UserError(
                    f'"{path}.{name}" is also the weight of table "{names[id(parameter)]}", whose optimizer would '
                    "not see the gradients from there; give each its own weight"
                )
