"""Lay out the experts of a model as a plan says: each rank keeps those that it owns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

from torch import nn

from shardwright.comm.mesh import Group, Mesh
from shardwright.errors import UserError, did_you_mean
from shardwright.experts.exchange import ParallelExperts
from shardwright.experts.hosts import HostExperts
from shardwright.experts.parameters import OwnedExperts
from shardwright.layers.moe import MoE
from shardwright.planner.experts import decide
from shardwright.spec.expert_rows import ROW_ORDERS
from shardwright.spec.lanes import COPIES, DENSE, EXPERTS
from shardwright.spec.plan import ExpertPlan, Plan


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """A rank's part of the experts of a model.

    `exchanges`: of its mixtures; `groups`: by id of a parameter, the ranks that own the other experts, and the ranks
    with replicas of this rank's.
    """

    exchanges: list[ParallelExperts | HostExperts] = field(default_factory=list[ParallelExperts | HostExperts])
    groups: dict[int, tuple[Group, Group]] = field(default_factory=dict[int, tuple[Group, Group]])

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether it is this rank's part of a parameter of experts."""
        return id(parameter) in self.groups

    def replicas(self, parameter: nn.Parameter) -> Group | None:
        """The ranks with replicas of this rank's experts; None for parameters that are not of experts."""
        return self.groups[id(parameter)][1] if self.owns(parameter) else None

    def by_owners(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[list[nn.Parameter], Group]]:
        """Those of the parameters that are of experts, by the group over which the experts are split."""
        groups = {id(group): group for group, _ in self.groups.values()}
        for group in groups.values():
            yield [p for p in parameters if self.owns(p) and self.groups[id(p)][0] is group], group

    def shard(self, model: nn.Module, plan: Plan, mesh: Mesh, everyone: Group, block: str = "") -> None:
        """Split the experts inside a block of the model, or of all that are not split yet."""
        done = {exchange.name for exchange in self.exchanges}
        for experts in plan.experts:
            moe = _mixture(model, experts.module)
            if moe is None or experts.module in done or not _is_inside(experts.module, block):
                continue
            owners, replicas = mesh.group(experts.axes, EXPERTS), _replicas(plan, mesh, experts)
            owned = OwnedExperts(experts.module, moe, owners, everyone, is_writer=replicas.index == 0)
            self.groups.update((id(parameter), (owners, replicas)) for parameter in owned.shards)
            self.exchanges.append(_make_exchange(experts, moe, mesh))
            moe.exchange = self.exchanges[-1]
            _prefetch_around(model, experts.module, moe, self.exchanges[-1])


def _make_exchange(experts: ExpertPlan, moe: MoE, mesh: Mesh) -> ParallelExperts | HostExperts:
    exchange = ParallelExperts(experts.module, mesh.group(experts.row_axes, EXPERTS), experts.groups)
    exchange.order_rows = ROW_ORDERS[experts.order]
    if experts.copies != "none":
        exchange.decide, exchange.copies = partial(decide, experts), mesh.group(experts.row_axes, COPIES)
    if experts.exchange == "flat":
        return exchange
    hosts = mesh.group(experts.axes[:1], EXPERTS)
    if moe.num_experts % hosts.size:
        raise UserError(
            f'the plan exchanges tokens of "{experts.module}" by hosts: {hosts.size} cannot have as many of its '
            f"{moe.num_experts} experts each; plan again"
        )
    return HostExperts(hosts, exchange)


def _prefetch_around(model: nn.Module, name: str, moe: MoE, exchange: ParallelExperts | HostExperts) -> None:
    """Prefetch copies at the start of the innermost module around the mixture with a forward pass of its own.

    Not if it has other mixtures: those before this one would have to wait for its copies.
    """
    inside = exchange.inside if isinstance(exchange, HostExperts) else exchange
    parts = name.split(".")
    parents = (model.get_submodule(".".join(parts[:num])) for num in reversed(range(len(parts))))
    parent = next((each for each in parents if not isinstance(each, nn.ModuleList | nn.ModuleDict)), None)
    if inside.copies is None or parent is None or sum(isinstance(each, MoE) for each in parent.modules()) > 1:
        return
    parent.register_forward_pre_hook(lambda *_: inside.prefetch(moe.experts))
    parent.register_forward_hook(lambda *_: inside.end_prefetch())


def check_experts(model: nn.Module, plan: Plan) -> None:
    """Raise if the plan splits the experts of a module that this model does not have, or by hosts along one axis."""
    names = [name for name, module in model.named_modules() if isinstance(module, MoE)]
    for experts in plan.experts:
        if experts.module not in names:
            raise UserError(
                f'the plan splits the experts of "{experts.module}", which is no MoE of this model'
                f"{did_you_mean(experts.module, names)}; plan this model again"
            )
        if not experts.row_axes:
            raise UserError(
                f'the plan exchanges tokens of "{experts.module}" by hosts, and splits its experts along '
                f"{', '.join(experts.axes)} only; name another axis, or set exchange to flat"
            )


def expert_groups(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The groups of a mesh that experts need: lanes and axes."""
    for experts in plan.experts:
        yield EXPERTS, experts.axes
        if experts.exchange == "hosts":
            yield EXPERTS, experts.axes[:1]
            yield EXPERTS, experts.row_axes
        if experts.copies != "none":
            yield COPIES, experts.row_axes
        if axes := _replica_axes(plan, experts):
            yield DENSE, axes


def _mixture(model: nn.Module, path: str) -> MoE | None:
    """The mixture at a path; None if another rank of a pipeline has it."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return module if isinstance(module, MoE) else None


def _replicas(plan: Plan, mesh: Mesh, experts: ExpertPlan) -> Group:
    axes, sizes = _replica_axes(plan, experts), dict(plan.mesh_axes)
    return mesh.group(axes, DENSE) if prod(sizes[axis] for axis in axes) > 1 else mesh.alone(DENSE)


def _replica_axes(plan: Plan, experts: ExpertPlan) -> tuple[str, ...]:
    return tuple(axis for axis in plan.sample_axes if axis not in experts.axes)


def _is_inside(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")
