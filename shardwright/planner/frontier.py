"""The staleness frontier: the predicted step of exact training, and with copies of rows that may be ever staler."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardwright.errors import UserError
from shardwright.planner import owned_rows, search, staleness
from shardwright.planner.pins import Pin
from shardwright.planner.problem import Problem
from shardwright.planner.search import Candidate
from shardwright.planner.step import message_bytes, prediction
from shardwright.spec.plan import Bounded
from shardwright.spec.traffic import PredictedStep, PredictedSteps

EXACT = Bounded(0, 0)
BOUNDS = (10, 100)  # `pull` and `push`: HET's s


@dataclass(frozen=True, slots=True)
class StalenessOptions:
    """What the planner knows of copies of rows when it has made a plan. `problem`: before bounds are chosen; `tried`:
    with the bounds that the recipe allows."""

    problem: Problem
    pins: Mapping[str, Pin]
    exact: Candidate
    tried: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """The best candidate with this bound. Without copies, which may be faster, it trains exactly."""

    sync: Bounded
    candidate: Candidate

    @property
    def has_copies(self) -> bool:
        return bound_of(self.candidate) != EXACT

    @property
    def max_missed(self) -> int:
        """The updates of other ranks that a read misses at most."""
        return self.sync.max_missed(self.candidate.problem.cluster.num_ranks)


def bound_of(candidate: Candidate) -> Bounded:
    """The bound of a candidate's copies, of any number of rows; EXACT without."""
    loads = candidate.problem.placed_loads(candidate.placed)
    sync = next((load.copied.sync for load in loads if load.copied is not None), EXACT)
    return Bounded(sync.pull, sync.push)


def predict_steps(options: StalenessOptions | None, chosen: Candidate) -> PredictedSteps:
    """The chosen candidate's step, and with other bounds those of exact training and of what the planner has tried."""
    others = (options.exact, *options.tried) if options is not None else ()
    points = _sort_by_staleness([FrontierPoint(bound_of(each), each) for each in _distinct(chosen, *others)])
    return PredictedSteps(tuple(predict_step(point, chosen) for point in points))


def frontier(options: StalenessOptions, chosen: Candidate) -> list[FrontierPoint]:
    """By staleness: exact training, the bounds of HET, and the chosen candidate."""
    points = [FrontierPoint(bound_of(each), each) for each in _distinct(chosen, options.exact)]
    bounds = {point.sync for point in points}
    points += (
        point for each in BOUNDS if (sync := Bounded(each, each)) not in bounds for point in _best(options, sync)
    )
    return _sort_by_staleness(points)


def _sort_by_staleness(points: Iterable[FrontierPoint]) -> list[FrontierPoint]:
    return sorted(points, key=lambda point: (point.max_missed, point.sync.push))


def _best(options: StalenessOptions, sync: Bounded) -> Iterator[FrontierPoint]:
    """The best candidate with this bound; none if it does not fit."""
    problem = options.problem
    try:
        if problem.served_tables:
            bounded = owned_rows.give_rows(problem, sync)
        else:
            bounded = staleness.choose_bounds(problem, [sync])
        yield FrontierPoint(sync, search.find_best(bounded, options.pins))
    except UserError:
        return


def _distinct(*candidates: Candidate) -> list[Candidate]:
    """Those with different bounds, the first of each."""
    return list({bound_of(each): each for each in reversed(candidates)}.values())[::-1]


def predict_step(point: FrontierPoint, chosen: Candidate) -> PredictedStep:
    """The candidate's step, with its waits and bytes. Without the training loop's work, and without the bytes if a step
    has several batches (accumulate)."""
    candidate = point.candidate
    problem, placed, loads = candidate.problem, candidate.placed, candidate.loads
    timeline = prediction.predict_timeline(problem, placed, loads, candidate.ids_after)
    return PredictedStep(
        candidate is chosen,
        point.sync.pull,
        point.sync.push,
        point.max_missed,
        candidate.seconds,
        prediction.message_wait_seconds(timeline),
        message_bytes.bytes_by_kind(problem, placed, loads) if problem.accumulate == 1 else (),
    )
