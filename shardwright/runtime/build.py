"""From a model, a plan and a mesh to a job that trains: the one legal order.

    verify the plan -> refuse what cannot be honoured -> materialise a model built on the meta device -> move to the
    device -> optimizer of the dense part -> bind the stages

The model itself is kept as it is: no forward is patched, no module traced.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from shardwright.comm.mesh import Mesh
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.measure.describe import describe, sparse_of
from shardwright.runtime.job import Job
from shardwright.runtime.step import LANES, Step, stages
from shardwright.spec.plan import Exact, Plan, whole

DenseOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def plan_for(model: nn.Module, batch: Batch) -> Plan:
    """The plan of one process: every table whole, on this device."""
    return whole(describe(model, batch), stages=stages(model), lanes=LANES)


def build(model: nn.Module, plan: Plan, mesh: Mesh | None = None, *, optimizer: DenseOptimizer | None = None) -> Job:
    """A job for this model under this plan; `optimizer` makes torch's own for the dense parameters."""
    mesh = mesh or Mesh()
    sparse = sparse_of(model)
    if sparse is None and not callable(getattr(model, "loss", None)):
        raise UserError(f"{type(model).__name__} has no `loss(logits, batch)`; the runtime needs it as a child module")
    if sparse is not None and sparse.optimizer is None and any(weight.requires_grad for weight in sparse.parameters()):
        raise UserError(
            f"{type(model).__name__}.sparse has no optimizer: pass EmbeddingBags(..., optimizer), "
            "or freeze the tables with requires_grad_(False)"
        )
    step = Step(model, None, mesh.device)
    plan.verify(contracts={name: binding.contract for name, binding in step.bindings().items()})
    _refuse_unhonoured(plan, model, mesh)
    _materialise(model, mesh.device)
    tables = {id(parameter) for parameter in sparse.parameters()} if sparse else set()
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in tables]
    if dense and optimizer is None:
        raise UserError(
            f"{type(model).__name__} has {len(dense)} dense parameters and no optimizer; "
            "pass build(..., optimizer=lambda parameters: torch.optim.Adam(parameters))"
        )
    if dense and optimizer is not None:
        step.optimizer = optimizer(dense)
    return Job(plan, mesh, step)


def _refuse_unhonoured(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    """A plan may ask for more than this version can do; then it says so instead of doing less."""
    sparse = sparse_of(model)
    rows = {table.name: (table.rows, table.dim) for table in sparse.tables} if sparse else {}
    planned = {table.table for table in plan.tables}
    if planned != set(rows):
        raise UserError(f"the plan holds tables {sorted(planned)}, the model {sorted(rows)}; plan this model anew")
    asked = {
        "axes": math.prod(size for _, size in plan.axes) != mesh.size,
        "experts": bool(plan.experts),
        "wire": len({plan.wire.vectors, plan.wire.gradients, plan.wire.dense}) != 1,
        "dense": bool(plan.dense.shard or plan.dense.recompute or plan.dense.offload),
    }
    for table in plan.tables:
        (rows_, dim) = rows[table.table]
        one = len(table.rects) == 1 and table.rects[0].rows == (0, rows_) and table.rects[0].cols == (0, dim)
        asked[f"rects of table {table.table}"] = not one or table.rects[0].ranks != (0,)
        asked[f"order of table {table.table}"] = table.order != "id"
        asked[f"tiers of table {table.table}"] = len(table.placement.tiers) != 1
        asked[f"sync of table {table.table}"] = table.placement.sync != Exact()
    for what, refused in asked.items():
        if refused:
            raise UserError(f"the plan's {what}: this version trains in one process with whole tables in one tier")
    for stage in plan.stages:
        if stage.lead:
            raise UserError(f'the plan\'s stage "{stage.name}" has lead {stage.lead}; the serial executor runs lead 0')


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give a model built under torch.device("meta") real tensors, keeping ties; others only move."""
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)
        return
    _check_resets(model)
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, first_name), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))
    for module in reversed(list(model.modules())):
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()


def _check_resets(model: nn.Module) -> None:
    """Every module with tensors on the meta device must know how to fill them, or lie inside one that does."""
    for name, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        above = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
        able = any(hasattr(model.get_submodule(path), "reset_parameters") for path in (name, *above, ""))
        if any(tensor.is_meta for tensor in own) and not able:
            raise UserError(
                f'module "{name}" ({type(module).__name__}) is on the meta device without reset_parameters(); '
                "add it, or build the model outside torch.device('meta')"
            )
