"""The plan of a job over several ranks: the planner's, from what is known of the machines."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardwright.comm.mesh import host_topology, world_size
from shardwright.errors import UserError
from shardwright.planner.plan import make_plan
from shardwright.planner.step import tasks
from shardwright.planner.step.loop_cost import LoopCost
from shardwright.spec import presets
from shardwright.spec.plan import Plan
from shardwright.spec.timeline import Timeline
from shardwright.spec.workload import Workload

USABLE_MEMORY_SHARE = 0.9  # of a host's memory
UNMEASURED_REASON = (
    "cluster",
    "not measured: rates of a published machine; measure this one and give plan.cluster=FILE",
)


def plan_over_ranks(
    workload: Workload,
    cluster: str = "",
    allow: Sequence[str] = (),
    pins: Mapping[str, str] | None = None,
    dense_strategy: str = "",
    cluster_shape: tuple[int, int] | None = None,
    measure_loop: Callable[[Plan], LoopCost] | None = None,
) -> tuple[Plan, Timeline]:
    """Who holds what over the ranks of this job, and the steps that the planner sees; `cluster` is a file or a name,
    `way` the parallelism strategy of the dense part if one is set, `size` the hosts and ranks per host if the ranks
    are not started yet. What `measure` finds of a training loop under the plan is in the steps, not in the plan.

    The state of tables stays in its own precision, whatever is allowed: this version does not train others.
    """
    num_hosts, local = cluster_shape or host_topology()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    known = (
        presets.load_cluster(cluster)
        if cluster
        else presets.unmeasured_cluster(num_hosts, local, int(USABLE_MEMORY_SHARE * memory) // local)
    )
    if known.num_ranks != (ranks := num_hosts * local if cluster_shape else world_size()):
        raise UserError(f"plan.cluster={cluster} has {known.num_ranks} ranks, this job {ranks}; measure with as many")
    allowed = tuple(entry for entry in allow if not entry.startswith("state."))
    made = make_plan(workload, known, allow=allowed, pins=pins, dense_strategy=dense_strategy)
    found = made.candidate
    plan = replace(made.plan, why=(*(() if cluster else (UNMEASURED_REASON,)), *made.plan.why))
    loop = measure_loop(plan) if measure_loop else None
    return plan, tasks.predict_timeline(found.problem, found.placed, found.loads, found.ids_after, loop)
