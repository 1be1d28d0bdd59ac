"""Make plans: of a model and a batch (`plan_for`), a run (`plan_run`, `preview`) or a recipe (`read_plan_request`).

One process holds all tables (`plan_single_process`). For several ranks, only `PlanRequest.make_plan` calls the planner.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from shardwright import config
from shardwright.comm.mesh import host_topology, select_device, world_size
from shardwright.config import PlanSettings, Settings
from shardwright.config.overrides import apply_overrides
from shardwright.config.sections import parse_bytes
from shardwright.config.servers import ServerSettings
from shardwright.data.sources.source import Source
from shardwright.errors import UserError
from shardwright.jagged import Batch, check_batch
from shardwright.layers.loss import BinaryLoss, ClassLoss
from shardwright.layers.task_losses import TaskLosses
from shardwright.measure.describe import describe, sparse_of
from shardwright.measure.device import has_fast_bf16_matmul
from shardwright.planner import frontier
from shardwright.planner.pins import LayerRequest, TableRequest
from shardwright.planner.plan import PlanningResult, make_plan
from shardwright.planner.problem import ServerRequest
from shardwright.planner.step import prediction
from shardwright.planner.step.loop_cost import LoopCost
from shardwright.planner.step.stages import (
    NO_BODIES,
    ONE_RANK,
    ONE_RANK_GPU,
    step_stages,
)
from shardwright.runtime.launch import launcher
from shardwright.runtime.placements import keep_on_disk, keep_on_servers
from shardwright.runtime.run import measure_loop, recipe
from shardwright.runtime.served import make_servers
from shardwright.spec import files, presets
from shardwright.spec.cache_hits import with_recorded_hits
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Bounded, Plan, single_rank_plan
from shardwright.spec.routing_trace import RoutingTrace, read_trace, with_recorded_shares
from shardwright.spec.traffic import RunPrediction
from shardwright.spec.workload import Workload

USABLE_MEMORY_SHARE = 0.9  # of a host's memory
UNMEASURED_REASON = (
    "cluster",
    "not measured: rates of a published machine; measure this one and give plan.cluster=FILE",
)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The input of the planner: workload, cluster, global batch size (0: the workload's) and settings; the recorded
    routing that the workload has the shares of, if any; the batches of an optimizer step; table servers, if any."""

    workload: Workload
    cluster: Cluster
    batch_size: int
    allow: tuple[str, ...]
    settings: PlanSettings
    trace: RoutingTrace | None = None
    accumulate: int = 1
    servers: ServerRequest | None = None

    def make_plan(self, *, torchrec: bool = False) -> PlanningResult:
        """Make the plan; `torchrec`: within TorchRec's limits."""
        return make_plan(
            self.workload,
            self.cluster,
            batch_size=self.batch_size,
            allow=self.allow,
            pins=self.settings.pins,
            torchrec=torchrec,
            tables=TableRequest(self.settings.balance, self.accumulate, self.servers),
            layers=LayerRequest(
                pipeline=self.settings.pipeline,
                micro_batches=self.settings.micro_batches,
                experts=self.settings.experts,
                expert_groups=self.settings.expert_groups,
                expert_copies=self.settings.expert_copies,
                expert_exchange=self.settings.expert_exchange,
                dense=self.settings.dense,
            ),
        )


def plan_for(
    model: nn.Module,
    batch: Batch,
    *,
    allow: Sequence[str] = (),
    cluster: str = "",
    dense: str = "",
    pipeline: int = 0,
    micro_batches: int = 0,
    experts: int = 0,
) -> Plan:
    """The plan of this job; `allow` lists the permitted changes of the mathematics.

    A single process holds all tables. Over several ranks the planner chooses a sharding: `batch` is a global batch, the
    same on every rank; `cluster` is a file written by `shardwright measure`, or a preset; `dense` sets the parallelism
    strategy of the dense model, such as "HSDP + full" (default: the fastest that fits); `pipeline` the ranks of a
    pipeline (1: none; default: the planner chooses), and `micro_batches` the micro-batches of its step; `experts` the
    ranks that experts are split over (1: all on every rank).
    """
    settings = PlanSettings(
        cluster=cluster,
        dense=dense,
        pipeline=pipeline,
        micro_batches=micro_batches,
        experts=experts,
        memory="",
        balance=None,
        expert_copies="",
        expert_exchange="",
    )
    workload = describe(model, batch)
    if world_size() > 1:
        return plan_over_ranks(workload, allow, settings)[0]
    for key, value in settings.model_dump(exclude_defaults=True).items():
        raise UserError(f"{key}={value!r} is for several ranks; start this with torchrun")
    return plan_single_process(model, workload, allow)


def plan_single_process(
    model: nn.Module, workload: Workload, allow: Sequence[str], device: torch.device | None = None
) -> Plan:
    """The plan of one process: every table unsharded, on this device; None: the GPU if there is one."""
    device = device or select_device()
    leads = ONE_RANK_GPU if device.type == "cuda" else ONE_RANK
    stages = step_stages(has_tables=sparse_of(model) is not None, leads=leads, bodies=NO_BODIES)
    return single_rank_plan(workload, stages=stages, allow=tuple(allow), fast_bf16=has_fast_bf16_matmul(device))


def plan_within_memory(
    model: nn.Module,
    workload: Workload,
    allow: Sequence[str],
    settings: PlanSettings,
    accumulate: int = 1,
    servers: ServerRequest | None = None,
    device: torch.device | None = None,
) -> Plan:
    """The plan of one process within `settings.memory`: the planner chooses which rows are in memory, and which are on
    disk or on table servers."""
    cluster = _make_cluster(settings, 1, 1, 1)
    request = PlanRequest(workload, cluster, 0, tuple(allow), settings, accumulate=accumulate, servers=servers)
    result, plan = request.make_plan(), plan_single_process(model, workload, allow, device)
    placements = {table.table: table.placement for table in result.plan.tables}
    lines = {name: rows for name, placed in placements.items() if (rows := placed.tiers[0].rows) is not None}
    copies = {name: placed.sync for name, placed in placements.items() if isinstance(placed.sync, Bounded)}
    subjects = ("table", "memory", "servers") if lines or copies else ("servers",)
    chosen = [(subject, reason) for subject, reason in result.plan.why if subject.split(" ")[0] in subjects]
    if not lines and not copies:
        return replace(plan, why=(*plan.why, *chosen))
    others = [(subject, reason) for subject, reason in plan.why if not subject.startswith("table ")]
    unmeasured = () if settings.cluster else (UNMEASURED_REASON,)
    plan = keep_on_servers(plan, copies or lines, servers.num) if servers is not None else keep_on_disk(plan, lines)
    return replace(plan, why=(*unmeasured, *chosen, *others))


def _make_cluster(settings: PlanSettings, num_hosts: int, ranks_per_host: int, num_ranks: int) -> Cluster:
    """The cluster of the settings, with no more memory than they allow."""
    memory = int(USABLE_MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    disk = shutil.disk_usage(tempfile.gettempdir()).total  # the same on all ranks of a host, at all times
    cluster = (
        presets.load_cluster(settings.cluster)
        if settings.cluster
        else presets.unmeasured_cluster(num_hosts, ranks_per_host, memory // ranks_per_host, disk // ranks_per_host)
    )
    if cluster.num_ranks != num_ranks:
        raise UserError(
            f"plan.cluster={settings.cluster} has {cluster.num_ranks} ranks, this job {num_ranks}; measure {num_ranks}"
        )
    return presets.limit_memory(cluster, parse_bytes(settings.memory)) if settings.memory else cluster


def plan_over_ranks(
    workload: Workload,
    allow: Sequence[str],
    settings: PlanSettings,
    cluster_shape: tuple[int, int] | None = None,
    measure: Callable[[Plan], LoopCost] | None = None,
    micro_batches: int = 1,
    servers: ServerRequest | None = None,
) -> tuple[Plan, RunPrediction]:
    """The plan of a job over several ranks, and its predicted steps.

    `cluster_shape`: hosts and ranks per host, if the ranks are not started yet. `measure` times the training loop under
    the plan; its result is part of the predicted steps, not of the plan. Without settings.cluster the rates come from
    a preset.
    """
    num_hosts, local = cluster_shape or host_topology()
    cluster = _make_cluster(settings, num_hosts, local, num_hosts * local if cluster_shape else world_size())
    request = PlanRequest(workload, cluster, 0, tuple(allow), settings, accumulate=micro_batches, servers=servers)
    result = request.make_plan()
    plan = replace(result.plan, why=(*(() if settings.cluster else (UNMEASURED_REASON,)), *result.plan.why))
    best, loop_cost = result.candidate, measure(plan) if measure else None
    timeline = prediction.predict_timeline(
        best.problem, best.placed, best.loads, best.ids_after, loop_cost, micro_batches
    )
    return plan, RunPrediction(timeline, frontier.predict_steps(result.staleness, best))


def plan_run(
    settings: Settings, source: Source, model: nn.Module, *, cluster_shape: tuple[int, int] | None = None
) -> tuple[Workload, Plan, RunPrediction | None]:
    """Plan from the first batch, which reveals most errors of data and model.

    `cluster_shape`: hosts and ranks per host, if the ranks are not started yet.
    """
    if cluster_shape is None:
        launcher.check_num_ranks(settings.ranks)
        if settings.servers.start and (num_hosts := host_topology()[0]) > 1:
            raise UserError(
                f"servers.start={settings.servers.start} starts table servers on one host, and the ranks are on "
                f"{num_hosts}: start `shardwright serve-tables` there, and set servers.addresses"
            )
    device = select_device(settings.run.device)
    make_servers(settings.servers)
    recipe.evaluation_source(settings, source, 0)
    workload = _describe_first_batch(settings, source, model)
    if settings.plan.routing:
        workload = with_recorded_shares(workload, read_trace(settings.plan.routing))
    if settings.plan.hits:
        workload = with_recorded_hits(workload, settings.plan.hits)
    predicted = None
    if cluster_shape or world_size() > 1:
        # The first rank's prediction is written (RunDirectory.describe); the others keep shared cores and memory busy.
        measure = partial(measure_loop.measure_this_rank, settings, source, model) if cluster_shape is None else None
        allow = settings.allow
        if settings.train.progressive:  # evaluates every batch, before which all copies would be dropped
            allow = tuple(entry for entry in allow if not entry.startswith("staleness"))
        servers, micro_batches = _server_request(settings.servers), settings.train.accumulate
        plan, predicted = plan_over_ranks(
            workload, allow, settings.plan, cluster_shape, measure, micro_batches, servers
        )
    else:
        plan = _plan_one_rank(settings, model, workload, device)
    plan.verify(workload)
    return workload, plan, predicted


def _plan_one_rank(settings: Settings, model: nn.Module, workload: Workload, device: torch.device) -> Plan:
    servers = _server_request(settings.servers)
    for_one_rank = ("memory", "hits", "cluster") if settings.plan.memory or servers else ()
    for key in PlanSettings.model_fields:
        if getattr(settings.plan, key) and key not in for_one_rank:
            hint = "set plan.memory too" if key in ("hits", "cluster") else "set ranks=2 or more"
            raise UserError(f"plan.{key} is for several ranks; {hint}, or drop it")
    if settings.plan.memory or servers:
        accumulate = settings.train.accumulate
        return plan_within_memory(model, workload, settings.allow, settings.plan, accumulate, servers, device)
    return plan_single_process(model, workload, settings.allow, device)


def _server_request(settings: ServerSettings) -> ServerRequest | None:
    if not settings.num:
        return None
    return ServerRequest(settings.num, settings.own, settings.bytes_, encrypted=bool(settings.keys))


def preview(settings: Settings) -> tuple[Settings, Plan]:
    """The resolved settings and the plan that a run would have. No rank is started, and nothing is written except the
    cache of a click log."""
    source = recipe.make_source(settings)
    settings = recipe.epochs_to_steps(settings, source)
    model = recipe.make_model(settings, source)
    recipe.make_dense_optimizer(settings)
    is_started = world_size() > 1 or settings.ranks == 1
    return settings, plan_run(settings, source, model, cluster_shape=None if is_started else (1, settings.ranks))[1]


def read_plan_request(source: str, overrides: Sequence[str], cluster: str, batch_size: int = 0) -> PlanRequest:
    """A plan request from a recipe's name, a TOML file, or a workload's JSON file."""
    if Path(source).suffix == ".json":
        keys = apply_overrides({}, overrides)
        workload = files.read(Workload, source)
        workload.verify()
        allow, plan, servers = config.parse_planning(keys, source)
        accumulate = 1
    else:
        settings = config.load(source, overrides)
        accumulate = settings.train.accumulate
        workload, allow, plan, servers = describe_recipe(settings), settings.allow, settings.plan, settings.servers
    trace = read_trace(plan.routing) if plan.routing else None
    if trace:
        workload = with_recorded_shares(workload, trace)
    if plan.hits:
        workload = with_recorded_hits(workload, plan.hits)
    machines = presets.load_cluster(cluster)
    if plan.memory:
        machines = presets.limit_memory(machines, parse_bytes(plan.memory))
    request = _server_request(servers)
    return PlanRequest(workload, machines, batch_size, tuple(allow), plan, trace, accumulate, request)


def describe_recipe(settings: Settings) -> Workload:
    """The workload of a recipe, at its batch size, without training."""
    source = recipe.make_source(settings)
    return _describe_first_batch(settings, source, recipe.make_model(settings, source))


def _describe_first_batch(settings: Settings, source: Source, model: nn.Module) -> Workload:
    batch = recipe.make_loader(settings, source).peek()
    check_batch(batch)
    sparse = sparse_of(model)
    if sparse is not None:
        sparse.check(sparse.read(batch.features))
    if isinstance(model.loss, BinaryLoss | ClassLoss | TaskLosses):
        model.loss.check(batch)
    return describe(model, batch, getattr(source, "statistics", None))
