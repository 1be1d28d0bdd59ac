"""From a model, a plan and a mesh to a job that trains: the one legal order.

    verify the plan -> refuse what cannot be honoured -> materialise a model built on the meta device -> move to the
    device -> optimizer of the dense part -> bind the stages

The model itself is kept as it is: no forward is patched, no module traced.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import nn

from shardwright.comm.mesh import Mesh
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers.embedding import EmbeddingBags
from shardwright.measure.describe import check_contract, describe, sparse_of
from shardwright.measure.device import multiplies_bf16
from shardwright.runtime.job import Job
from shardwright.runtime.materialise import materialise
from shardwright.runtime.step import LANES, Step, stages
from shardwright.spec.plan import Plan, whole, whole_table, widest
from shardwright.spec.workload import Table, Workload

DenseOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def plan_for(model: nn.Module, batch: Batch, *, allow: Sequence[str] = ()) -> Plan:
    """The plan of one process: every table whole, on this device; `allow` is what may change the mathematics."""
    return plan_workload(model, describe(model, batch), allow)


def plan_workload(model: nn.Module, workload: Workload, allow: Sequence[str]) -> Plan:
    return whole(workload, stages=stages(model), lanes=LANES, allow=tuple(allow), fast_bf16=multiplies_bf16())


def build(model: nn.Module, plan: Plan, mesh: Mesh | None = None, *, optimizer: DenseOptimizer | None = None) -> Job:
    """A job for this model under this plan; `optimizer` makes torch's own for the dense parameters."""
    mesh = mesh or Mesh()
    check_contract(model)
    sparse = sparse_of(model)
    if sparse is not None and sparse.optimizer is None and any(weight.requires_grad for weight in sparse.parameters()):
        raise UserError(
            f"{type(model).__name__}.sparse has no optimizer: pass EmbeddingBags(..., optimizer), "
            "or freeze the tables with requires_grad_(False)"
        )
    step = Step(model, None, mesh.device, products=getattr(torch, plan.dense.dtype))
    plan.verify(contracts={name: binding.contract for name, binding in step.bindings.items()})
    _refuse_unhonoured(plan, sparse.tables if sparse else (), mesh)
    if sparse is not None:
        _refuse_shared_weights(model, sparse)
    materialise(model, mesh.device)
    tables = {id(parameter) for parameter in sparse.parameters()} if sparse else set()
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in tables]
    if dense and optimizer is None:
        raise UserError(
            f"{type(model).__name__} has {len(dense)} dense parameters and no optimizer; "
            "pass build(..., optimizer=lambda parameters: torch.optim.Adam(parameters))"
        )
    if dense and optimizer is not None:
        step.optimizer = optimizer(dense)
        if isinstance(step.optimizer, torch.optim.LBFGS):
            raise UserError("torch.optim.LBFGS evaluates the loss several times a step; the runtime does so once")
    return Job(plan, mesh, step)


def _refuse_unhonoured(plan: Plan, tables: Sequence[Table], mesh: Mesh) -> None:
    """A plan may ask for more than this version can do; then it says so instead of doing less."""
    mine = {table.name: table for table in tables}
    planned = {table.table for table in plan.tables}
    if planned != set(mine):
        raise UserError(f"the plan holds tables {sorted(planned)}, the model {sorted(mine)}; plan this model anew")
    asked = {
        "axes": math.prod(size for _, size in plan.axes) != 1 or mesh.size != 1,
        "experts": bool(plan.experts),
        "wire": {plan.wire.vectors, plan.wire.gradients, plan.wire.dense} != {widest(tables)},
        "dense": bool(plan.dense.shard or plan.dense.recompute or plan.dense.offload),
    }
    for table in plan.tables:
        able = whole_table(mine[table.table])
        for part in (table, table.placement):
            honoured = able if part is table else able.placement
            for field in fields(part):
                if field.name != "placement":
                    refused = getattr(part, field.name) != getattr(honoured, field.name)
                    asked[f"{field.name} of table {table.table}"] = refused
    for what, refused in asked.items():
        if refused:
            raise UserError(
                f"the plan's {what}: this version trains in one process, with whole tables in one tier and their "
                "own precision; plan this model anew"
            )
    for stage in plan.stages:
        if stage.lead:
            raise UserError(f'the plan\'s stage "{stage.name}" has lead {stage.lead}; the serial executor runs lead 0')


def _refuse_shared_weights(model: nn.Module, sparse: EmbeddingBags) -> None:
    """A table's update is fused into its lookup: a gradient that another module gives its weight would be lost."""
    inside = set(sparse.modules())
    names = {id(sparse.weight(table.name)): table.name for table in sparse.tables}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False) if module not in inside else ():
            if id(parameter) in names:
                raise UserError(
                    f'"{path}.{name}" is also the weight of table "{names[id(parameter)]}", whose optimizer would '
                    "not see the gradients from there; give one of them a weight of its own"
                )
