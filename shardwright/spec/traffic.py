"""Bytes that ranks and table servers send in steps, by kind of message and by link: recorded, and predicted."""

from dataclasses import dataclass
from json import dumps

from shardwright.spec import files
from shardwright.spec.timeline import Timeline

TRAFFIC_FILE, PREDICTED_FILE = "traffic.jsonl", "predicted_steps.json"  # of a run

IN_HOST, BETWEEN_HOSTS, TO_SERVERS = "inside a host", "between hosts", "with servers"
LINKS = (IN_HOST, BETWEEN_HOSTS, TO_SERVERS)

IDS = "ids and lengths"
VECTORS = "vectors and rows, forward"
GRADIENTS = "gradients and updates, backward"
VERSIONS = "versions and leases of copies"
DENSE = "dense gradients and weights"
EXPERTS = "rows and copies of experts"
PIPELINE = "activations of a pipeline"
FETCHES, ANSWERS, PUSHES = "versions sent to servers", "rows and leases from servers", "updates pushed to servers"
SWAPS, SWAPPED = "rows written to servers", "rows read from servers"
KINDS = (IDS, VECTORS, GRADIENTS, VERSIONS, FETCHES, ANSWERS, PUSHES, SWAPS, SWAPPED, DENSE, EXPERTS, PIPELINE)


@dataclass(frozen=True, slots=True)
class TrafficWindow:
    """Bytes of one kind on one link in the steps up to `step`, since the window before; sent by all ranks, or by
    servers to them."""

    step: int
    steps: int
    kind: str
    link: str
    bytes_: int

    def to_line(self) -> str:
        return dumps(files.to_plain(self), separators=(",", ":")) + "\n"


@dataclass(frozen=True, slots=True)
class KindBytes:
    """Bytes of one kind on one link in a step, of all ranks."""

    kind: str
    link: str
    bytes_: int


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A step that the planner has predicted. `pull`, `push`: of the bound of copies, whose reads miss at most
    `max_missed` updates, 0: exact. `waits`: seconds of it in which a rank waits for messages."""

    is_chosen: bool
    pull: int
    push: int
    max_missed: int
    seconds: float
    waits: float
    traffic: tuple[KindBytes, ...]


@dataclass(frozen=True, slots=True)
class PredictedSteps:
    """The chosen step of a plan, and those with other bounds of staleness that the planner has compared it with."""

    steps: tuple[PredictedStep, ...]


@dataclass(frozen=True, slots=True)
class RunPrediction:
    """What is predicted of a run over several ranks. `timeline`: with the training loop's own work."""

    timeline: Timeline
    steps: PredictedSteps
