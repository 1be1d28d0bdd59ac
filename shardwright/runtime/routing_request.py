"""What recorded routing says of a plan, or alone, with the sizes of experts as keys `experts.*`.

Shape legend: R rows, C channels, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

from shardwright.config.overrides import apply_overrides
from shardwright.errors import UserError, did_you_mean
from shardwright.layers.moe import EXPERTS
from shardwright.measure.describe import describe_experts
from shardwright.planner.plan import PlanningResult
from shardwright.planner.reasons import exact_precision
from shardwright.planner.routing_gains import RoutingGains, predict_gains
from shardwright.planner.search import define_problem
from shardwright.runtime.planning import PlanRequest
from shardwright.spec import files, presets
from shardwright.spec.checks import check_positive, raise_if_any
from shardwright.spec.cluster import Cluster
from shardwright.spec.routing_trace import RoutingTrace, read_trace
from shardwright.spec.workload import Dtype, Mixture, Workload

TORCH_DTYPES = MappingProxyType[str, torch.dtype](
    {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
)


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The keys `experts.*` of recorded routing without a model. `num_experts`: 0: as recorded; `redundant`: replicas of
    popular experts that the placement has in all."""

    channels: int
    hidden: int
    form: Literal["gelu", "swiglu"] = "gelu"
    dtype: Dtype = "float32"
    num_experts: int = 0
    redundant: int = 0


def analyse_trace(path: str, overrides: Sequence[str], cluster_name: str) -> RoutingGains:
    """The gains of recorded routing without a model: `shardwright plan ROUTING.jsonl`."""
    keys = apply_overrides({}, overrides)
    for key in keys:
        if key != "experts":
            raise UserError(f'{path}: key "{key}" is for a recipe{did_you_mean(key, ["experts"])}')
    sizes = files.from_plain(ExpertSizes, keys.get("experts", {}), f"{path}: experts")
    raise_if_any(check_positive("experts", channels=sizes.channels, hidden=sizes.hidden))
    cluster, trace = presets.load_cluster(cluster_name), read_trace(path, sizes.num_experts)
    gains = analyse(trace_workload(trace, sizes), cluster, trace, num_redundant=sizes.redundant, dtype=sizes.dtype)
    notes = list(gains.notes)
    if trace.format == "Megatron-LM" and not sizes.num_experts:
        num = max(map(len, trace.shares.values()))
        notes.append(f"experts: {num}, the highest in the trace plus one; if there are more, set experts.num_experts")
    return replace(gains, notes=tuple(notes))


def analyse_plan(request: PlanRequest, result: PlanningResult) -> RoutingGains | None:
    """The gains of the recorded routing that a plan was made for, if any."""
    if request.trace is None:
        return None
    gains = analyse(
        request.workload,
        request.cluster,
        request.trace,
        batch_size=request.batch_size,
        dtype=result.candidate.problem.precision.matmuls,
        axes=next((each.axes for each in result.plan.experts), ()) if result.plan.pipeline is None else (),
    )
    if result.plan.pipeline is None:
        return gains
    return replace(gains, notes=(*gains.notes, "experts: the plan's pipeline is left out; all ranks have all layers"))


def analyse(
    workload: Workload,
    cluster: Cluster,
    trace: RoutingTrace,
    *,
    batch_size: int = 0,
    num_redundant: int = 0,
    dtype: Dtype = "float32",
    axes: tuple[str, ...] = (),
) -> RoutingGains:
    """The gains of recorded routing in a model, with its experts' products in `dtype` if the cluster has a price."""
    priced = [price.dtype for price in cluster.device.prices if price.op == "matmul"]
    exact = exact_precision(workload)
    precision = replace(exact, matmuls=dtype if dtype in priced else exact.matmuls)
    problem = define_problem(workload, cluster, batch_size or workload.batch_size, precision)
    gains = predict_gains(problem, trace, num_redundant, axes)
    if dtype in priced:
        return gains
    note = f"products of {dtype} are priced like those of {precision.matmuls}, which {cluster.name} has"
    return replace(gains, notes=(*gains.notes, note))


def trace_workload(trace: RoutingTrace, sizes: ExpertSizes) -> Workload:
    """The mixtures of a trace, each with its mean number of rows."""
    mixtures: list[Mixture] = []
    for module, shares_E in trace.shares.items():
        counts = [each[module].sum() for each in trace.passes if module in each]
        rows = max(1, round(sum(counts) / len(counts)))
        mixtures.append(_describe_mixture(module, len(shares_E), rows, sizes))
    blocks = tuple(mixture.experts for mixture in mixtures)
    mixtures = [replace(mixture, block=mixture.experts.name) for mixture in mixtures]
    return Workload(1, 1, (), (), (), blocks=blocks, experts=tuple(mixtures))


def _describe_mixture(module: str, num_experts: int, rows: int, sizes: ExpertSizes) -> Mixture:
    with torch.device("meta"):
        experts = EXPERTS[sizes.form](num_experts, sizes.channels, sizes.hidden).to(TORCH_DTYPES[sizes.dtype])
        rows_RC = torch.empty(rows, sizes.channels, dtype=TORCH_DTYPES[sizes.dtype])
    share, rest = divmod(rows, num_experts)
    sizes_E = torch.tensor([share + (expert < rest) for expert in range(num_experts)])
    return describe_experts(module, experts, rows_RC, sizes_E, rows_RC, 1)
