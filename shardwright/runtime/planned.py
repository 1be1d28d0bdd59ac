"""From a recipe, or a workload that was written down, and a cluster to a plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright import config
from shardwright.config import PlanSettings
from shardwright.planner.plan import PlanningResult, make_plan
from shardwright.runtime import planning
from shardwright.spec import files, presets
from shardwright.spec.cluster import Cluster
from shardwright.spec.workload import Workload


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The input of the planner: workload, cluster, global batch size and settings."""

    workload: Workload
    cluster: Cluster
    batch_size: int
    allow: tuple[str, ...]
    settings: PlanSettings

    def make_plan(self, *, torchrec: bool = False) -> PlanningResult:
        """Make the plan; `torchrec`: within TorchRec's limits."""
        return make_plan(
            self.workload,
            self.cluster,
            batch_size=self.batch_size,
            allow=self.allow,
            pins=self.settings.pins,
            dense_strategy=self.settings.dense,
            torchrec=torchrec,
        )


def read_plan_request(recipe: str, overrides: Sequence[str], cluster: str, batch_size: int = 0) -> PlanRequest:
    """A plan request from a recipe's name, a TOML file, or a workload's JSON file."""
    if Path(recipe).suffix == ".json":
        keys = config.apply_overrides({}, overrides)
        workload = files.read(Workload, recipe)
        workload.verify()
        allow, plan = config.parse_planning(keys, recipe)
    else:
        settings = config.load(recipe, overrides)
        workload, allow, plan = planning.describe_recipe(settings), settings.allow, settings.plan
    return PlanRequest(workload, presets.load_cluster(cluster), batch_size, tuple(allow), plan)
