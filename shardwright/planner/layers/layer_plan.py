"""The plan of a model of layers: axes with roles, cuts of the pipeline, what is recomputed, sharded and offloaded."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from shardwright.planner.layers.degrees import Degrees, Recomputation
from shardwright.planner.layers.layer_search import LayerSplit, Training
from shardwright.planner.step.stages import NO_BODIES, pipeline_stages, step_stages
from shardwright.spec import files
from shardwright.spec.axes import Axis, Role, num_ranks
from shardwright.spec.cluster import Cluster
from shardwright.spec.lanes import LANES
from shardwright.spec.plan import Dense, ExpertPlan, Pipeline, Plan, Recompute, RecomputePolicy, Wire

KEPT: Mapping[Recomputation, RecomputePolicy] = MappingProxyType(
    {"memory-bound": "products", "scores": "products", "full": "nothing"}
)


def make_layer_plan(training: Training, split: LayerSplit, why: Sequence[tuple[str, str]]) -> Plan:
    model, degrees = training.model, split.degrees
    axes = split_axes(training.cluster, degrees)
    replicas = tuple(axis.name for axis in axes if axis.role in ("data", "expert", "context"))
    shard = _sharding_axes(axes, degrees) if degrees.zero == 3 else ()
    layers = [f"layers.{layer}" for layer in range(model.layers)]
    kept = KEPT.get(degrees.recompute)
    plan = Plan(
        version=4,
        workload_digest=files.digest(model),
        cluster_digest=training.cluster.digest(),
        allow=("dense.bf16", "wire.bf16"),
        axes=axes,
        lanes=LANES,
        tables=(),
        dense=Dense(
            replicate=tuple(name for name in replicas if name not in shard),
            shard=shard,
            recompute=tuple(Recompute(layer, kept) for layer in layers) if kept else (),
            dtype="bfloat16",
            shard_optimizer=replicas if degrees.zero == 1 else (),
            offload_activations=degrees.offload if any(degrees.offload) else (),
        ),
        experts=tuple(_expert_plans(training, axes, degrees)),
        wire=Wire("bfloat16", "bfloat16", "float32"),
        pipeline=_pipeline(split) if degrees.pipeline > 1 else None,
        stages=pipeline_stages() if degrees.pipeline > 1 else step_stages(has_tables=False, bodies=NO_BODIES),
        why=tuple(why),
    )
    plan.verify()
    return plan


def _pipeline(split: LayerSplit) -> Pipeline:
    degrees = split.degrees
    schedule = "1f1b" if degrees.num_chunks == 1 else degrees.schedule
    return Pipeline(degrees.cuts, degrees.micro_batches(split.batch), schedule)


def _expert_plans(training: Training, axes: Sequence[Axis], degrees: Degrees) -> Iterator[ExpertPlan]:
    model = training.model
    inner = _innermost_axes(axes, degrees.expert)
    for layer in range(model.layers) if inner else ():
        if model.has_experts(layer):
            yield ExpertPlan(f"layers.{layer}.mlp", inner)


def _sharding_axes(axes: Sequence[Axis], degrees: Degrees) -> tuple[str, ...]:
    """Those of data and context parallelism, innermost first, until they have as many ranks as shard."""
    names: list[str] = []
    size = 1
    for axis in reversed(axes):
        if axis.role in ("data", "expert", "context") and size < degrees.num_shards:
            names.append(axis.name)
            size *= axis.size
    return tuple(reversed(names))


def _innermost_axes(axes: Sequence[Axis], size: int) -> tuple[str, ...]:
    """The innermost axes that have `size` ranks together; none for one rank."""
    count = next((count for count in range(len(axes) + 1) if num_ranks(axes[len(axes) - count :]) == size), 0)
    return tuple(axis.name for axis in axes[len(axes) - count :])


def split_axes(cluster: Cluster, degrees: Degrees) -> tuple[Axis, ...]:
    """Tensor ranks are neighbors, then context, data, and pipeline ranks; an axis that spans hosts and fills them is
    divided into one inside hosts and one between them. Data ranks that share experts have the role "expert"."""
    near = max(1, degrees.expert // (degrees.tensor * degrees.context)) if degrees.expert > degrees.tensor else 1
    sizes: tuple[tuple[Role, int], ...] = (
        ("tensor", degrees.tensor),
        ("context", degrees.context),
        ("expert", near),
        ("data", degrees.data // near),
        ("pipe", degrees.pipeline),
    )
    axes: list[Axis] = []
    inner, per_host = 1, cluster.ranks_per_host
    local, *outer = [level.name for level in cluster.levels] or ["local"]
    host = outer[0] if outer else local
    for role, size in sizes:
        inside = max(1, per_host // inner) if size * inner > per_host and inner < per_host else size
        if size > 1 and inner * inside <= per_host and size % inside == 0 and per_host % inner == 0:
            axes += [Axis(role, local, inside), *([Axis(role, host, size // inside)] if size > inside else [])]
        elif size > 1:
            axes.append(Axis(role, host, size))
        inner *= size
    return tuple(reversed(axes)) or (Axis("data", local, 1),)


def untrained_roles(plan: Plan) -> list[str]:
    """What this version plans and cannot train yet."""
    roles = [f"{role} parallelism" for role in ("tensor", "context") if any(axis.role == role for axis in plan.axes)]
    roles += ["ZeRO-1"] if plan.dense.shard_optimizer else []
    return roles + (["offload of activations"] if plan.dense.offload_activations else [])
