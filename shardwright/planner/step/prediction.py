"""The predicted step: what each rank does, simulated; the ranks of a pipeline differ.

Shape legend: R ranks, S stages.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.step import pipeline_step, simulate, tasks
from shardwright.planner.step.exposed import exposed_seconds
from shardwright.planner.step.loop_cost import LoopCost
from shardwright.planner.step.rank_calls import RankCalls, expand_calls
from shardwright.planner.step.stages import IDS_AFTER
from shardwright.planner.step.tasks import RankLoads
from shardwright.spec.plan import Stage
from shardwright.spec.timeline import Timeline

WARM_STEPS, COUNTED_STEPS = 3, 3
TAIL_STEPS = 3  # at least; as many as the largest lead, so that counted steps have all stages that run ahead
_COUNTED = WARM_STEPS - 1, WARM_STEPS + COUNTED_STEPS - 1  # the steps at whose ends counting begins and ends
PIPELINE_STEPS = 4  # of which the third counts: the largest lead is a step, and each step fills the pipeline anew


def step_calls(
    problem: Problem,
    placed: PlacedTables,
    loads: RankLoads,
    ids_after: str,
    loop_cost: LoopCost | None = None,
    micro_batches: int = 1,
) -> list[RankCalls]:
    """What each rank does in the predicted steps. `loop_cost`: what the training loop adds to each of the step's
    `micro_batches`."""
    loop_cost = loop_cost or LoopCost()
    paced = loop_cost.apply_measured_pace(problem)
    if problem.pipeline is not None:
        return pipeline_step.pipeline_calls(paced, WARM_STEPS + COUNTED_STEPS + TAIL_STEPS, micro_batches)
    stages = loop_cost.add_loop_stages(tasks.required_stages(problem, loads, ids_after))
    calls = expand_calls(stages, _num_steps(stages), micro_batches)
    by_stage = tasks.stage_tasks(paced, placed, loads) | loop_cost.loop_tasks(problem)
    return [RankCalls(calls, by_stage)] * problem.cluster.num_ranks


def predict_timeline(
    problem: Problem,
    placed: PlacedTables,
    loads: RankLoads,
    ids_after: str,
    loop_cost: LoopCost | None = None,
    micro_batches: int = 1,
) -> Timeline:
    """The predicted timeline of all ranks; the arguments are those of `step_calls`."""
    calls = step_calls(problem, placed, loads, ids_after, loop_cost, micro_batches)
    return simulate.simulate_ranks(calls, blocking=problem.cluster.device.kind == "cpu")


def predict_step(
    problem: Problem, placed: PlacedTables, loads: RankLoads, choices: Sequence[str] = tuple(IDS_AFTER)
) -> tuple[float, str]:
    """Seconds of a step, and the best of `choices` for `ids_after`; without tables there are no ids.

    Simulates only ranks that no other rank dominates; the others never delay a step. Of a pipeline, one replica.
    """
    blocking, seconds = problem.cluster.device.kind == "cpu", dict[str, float]()
    if problem.pipeline is not None:
        calls = pipeline_step.pipeline_calls(problem, PIPELINE_STEPS, one_replica=True)
        timeline = simulate.simulate_ranks(calls, blocking=blocking)
        return simulate.steady_step_seconds(timeline, 1, 1), choices[0]
    by_stage = tasks.stage_tasks(problem, placed, loads)
    seconds_SR = np.array([task.seconds for task in by_stage.values() if isinstance(task.seconds, tuple)])
    ranks = _undominated_ranks(seconds_SR.T)
    chosen = {
        name: replace(task, seconds=tuple(task.seconds_on(rank) for rank in ranks))
        if isinstance(task.seconds, tuple)
        else task
        for name, task in by_stage.items()
    }
    choices = choices if problem.workload.tables else choices[:1]
    for after in choices:
        stages = tasks.required_stages(problem, loads, after)
        calls = expand_calls(stages, _num_steps(stages))
        timeline = simulate.simulate_calls(calls, chosen, len(ranks), blocking=blocking)
        seconds[after] = counted_step_seconds(timeline)
    best = min(choices, key=seconds.__getitem__)
    return seconds[best], best


def counted_step_seconds(timeline: Timeline) -> float:
    """Seconds of one step of `timeline`, averaged over the counted steps (without warm-up and tail)."""
    last = max(event.step for event in timeline.events)
    return simulate.steady_step_seconds(timeline, WARM_STEPS - 1, last - (WARM_STEPS + COUNTED_STEPS - 1))


def message_wait_seconds(timeline: Timeline) -> float:
    """Seconds of one of the counted steps of `timeline` in which a rank waits for messages; the mean over ranks."""
    ends = [max(event.end for event in timeline.events if event.step == step) for step in _COUNTED]
    messages, _ = exposed_seconds(timeline.events, *ends)
    return messages / (len({event.rank for event in timeline.events}) * COUNTED_STEPS)


def _num_steps(stages: Sequence[Stage]) -> int:
    return WARM_STEPS + COUNTED_STEPS + max(TAIL_STEPS, *(stage.lead for stage in stages))


def _undominated_ranks(seconds_RS: np.ndarray) -> list[int]:
    """The Pareto front of slow ranks: no other rank is at least as slow at every stage; of equal ranks, the first."""
    front: list[int] = []
    for rank in np.lexsort(tuple(-column for column in seconds_RS.T[::-1])):
        if not any((seconds_RS[other] >= seconds_RS[rank]).all() for other in front):
            front.append(int(rank))
    return sorted(front)
