"""The plan of a job over several ranks: the planner's, from what is known of the machines."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardwright.comm.mesh import hosts, world_size
from shardwright.errors import UserError
from shardwright.planner.plan import answer
from shardwright.planner.step import tasks
from shardwright.planner.step.loop_cost import LoopCost
from shardwright.spec import presets
from shardwright.spec.plan import Plan
from shardwright.spec.timeline import Timeline
from shardwright.spec.workload import Workload

USABLE = 0.9  # of a host's memory
UNSURE = ("cluster", "not measured: rates of a published machine; measure this one and give plan.cluster=FILE")


def over_ranks(
    workload: Workload,
    cluster: str = "",
    allow: Sequence[str] = (),
    pins: Mapping[str, str] | None = None,
    way: str = "",
    size: tuple[int, int] | None = None,
    measure: Callable[[Plan], LoopCost] | None = None,
) -> tuple[Plan, Timeline]:
    """Who holds what over the ranks of this job, and the steps that the planner sees; `cluster` is a file or a name,
    `way` the parallelism strategy of the dense part if one is set, `size` the hosts and ranks per host if the ranks
    are not started yet. What `measure` finds of a training loop under the plan is in the steps, not in the plan.

    The state of tables stays in its own precision, whatever is allowed: this version does not train others.
    """
    num_hosts, local = size or hosts()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    known = presets.cluster(cluster) if cluster else presets.unmeasured(num_hosts, local, int(USABLE * memory) // local)
    if known.num_ranks != (ranks := num_hosts * local if size else world_size()):
        raise UserError(f"plan.cluster={cluster} has {known.num_ranks} ranks, this job {ranks}; measure with as many")
    allowed = tuple(entry for entry in allow if not entry.startswith("state."))
    made = answer(workload, known, allow=allowed, pins=pins, way=way)
    found = made.found
    plan = replace(made.plan, why=(*(() if cluster else (UNSURE,)), *made.plan.why))
    loop = measure(plan) if measure else None
    return plan, tasks.timeline(found.problem, found.placed, found.loads, found.behind, loop)
