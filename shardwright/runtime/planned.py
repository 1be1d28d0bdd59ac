"""From a recipe, or a workload that was written down, and a cluster to a plan."""

from collections.abc import Sequence
from pathlib import Path

from shardwright import config
from shardwright.planner.answer import Answer, answer
from shardwright.runtime import proof
from shardwright.spec import files, presets
from shardwright.spec.workload import Workload


def planned(recipe: str, overrides: Sequence[str], cluster: str, batch_size: int = 0) -> Answer:
    if Path(recipe).suffix == ".json":
        keys = config.overridden({}, overrides)
        workload = files.read(Workload, recipe)
        workload.verify()
        allow, plan = config.planning(keys, recipe)
    else:
        settings = config.load(recipe, overrides)
        workload, allow, plan = proof.described(settings), settings.allow, settings.plan
    known = presets.cluster(cluster)
    return answer(workload, known, batch_size=batch_size, allow=allow, pins=plan.pins, way=plan.dense)
