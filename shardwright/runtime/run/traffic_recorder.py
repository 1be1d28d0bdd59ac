"""Record windows of training steps: the bytes that all ranks send, by kind of message and by link."""

from collections import Counter
from types import MappingProxyType

from shardwright.comm.sent_bytes import REPLY, SERVER_LANE, SentKey
from shardwright.planner.step.loop_cost import METRICS
from shardwright.runtime.job import Job
from shardwright.runtime.rank_group import RankGroup
from shardwright.spec import lanes, traffic
from shardwright.spec.traffic import TrafficWindow

KIND_OF_LANE = MappingProxyType[str, str](
    {
        lanes.DENSE: traffic.DENSE,
        lanes.GATHER: traffic.DENSE,
        lanes.SCATTER: traffic.DENSE,
        lanes.EXPERTS: traffic.EXPERTS,
        lanes.COPIES: traffic.EXPERTS,
        lanes.PIPE: traffic.PIPELINE,
        lanes.PIPE_BACKWARD: traffic.PIPELINE,
    }
)
KIND_OF_STAGE = MappingProxyType(
    {
        (lanes.IDS, "lengths"): traffic.IDS,
        (lanes.IDS, "ids"): traffic.IDS,
        (lanes.WIRE, "ids"): traffic.IDS,  # with weights
        (lanes.WIRE, "meet"): traffic.VECTORS,
        (lanes.WIRE, "vectors"): traffic.VECTORS,
        (lanes.WIRE, "backward"): traffic.GRADIENTS,
        (lanes.WIRE, "spread"): traffic.GRADIENTS,
        (lanes.WIRE, "update"): traffic.GRADIENTS,
        (lanes.IDS, "counts"): traffic.VERSIONS,
        (lanes.IDS, "validate"): traffic.VERSIONS,
        (lanes.IDS, "renew"): traffic.VERSIONS,
        (SERVER_LANE, "read"): traffic.FETCHES,
        (SERVER_LANE, REPLY + "read"): traffic.ANSWERS,
        (SERVER_LANE, "push"): traffic.PUSHES,
        (SERVER_LANE, "swap"): traffic.SWAPS,
        (SERVER_LANE, REPLY + "swap"): traffic.SWAPPED,
    }
)


def kind_of(key: SentKey) -> str:
    """The kind of a message of a training step; "" for others, as of evaluations, which follow stage "metrics"."""
    lane, stage, _ = key
    if stage == METRICS:
        return ""
    return KIND_OF_LANE.get(lane, "") or KIND_OF_STAGE.get((lane, stage), "")


class TrafficRecorder:
    """Counts of all ranks. All ranks make it, and call its functions."""

    def __init__(self, job: Job, rank_group: RankGroup) -> None:
        self._sent, self._rank_group = job.mesh.sent, rank_group
        self._has_messages = job.plan.num_ranks > 1 or bool(job.plan.servers)
        self._step, self._before = job.step, self._totals()

    def gather(self, step: int) -> list[TrafficWindow]:
        """The windows since the last call; none for a rank alone."""
        if not self._has_messages:
            return []
        steps, totals = step - self._step, self._totals()
        own = [(*key, bytes_ - self._before[key]) for key, bytes_ in totals.items()]
        self._step, self._before, sums = step, totals, Counter[tuple[str, str]]()
        for of_rank in self._rank_group.all_gather_json(own):
            for kind, link, bytes_ in of_rank:
                sums[kind, link] += bytes_
        return [TrafficWindow(step, steps, kind, link, bytes_) for (kind, link), bytes_ in sums.items() if bytes_]

    def _totals(self) -> Counter[tuple[str, str]]:
        totals = Counter[tuple[str, str]]()
        for key, bytes_ in self._sent.totals().items():
            if kind := kind_of(key):
                totals[kind, key[2]] += bytes_
        return totals
