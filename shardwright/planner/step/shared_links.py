"""Collectives and messages in flight, and the network links that they share.

Alone, an operation uses a share of its links' bandwidth (`Task.link_share`): less than 1 where it also waits, for a
processor or for other messages. Operations whose shares of a link add up to more than 1 slow each other down: none gets
more than an equal part, except of what others leave. An operation without `links` uses every link of its levels.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner.price.axis_groups import Link
from shardwright.planner.step.rank_calls import JointKey, Task

MIN_SHARE = 1e-9  # of a link's bandwidth


@dataclass(slots=True)
class RunningOp:
    """A collective or message in flight."""

    key: JointKey
    seconds_left: float  # at full bandwidth
    task: Task


def sharing_rates(ops: Sequence[RunningOp]) -> list[float]:
    """The rate of each operation: what the busiest link that it uses leaves of its rate."""
    if len(ops) < 2:
        return [1.0] * len(ops)
    whole_level: dict[str, list[float]] = defaultdict(list)  # shares of operations that use every link of a level
    on_link: dict[Link, list[float]] = defaultdict(list)  # shares of other operations
    for op in ops:
        for link in op.task.links:
            on_link[link].append(op.task.link_share)
        for level in op.task.levels if not op.task.links else ():
            whole_level[level].append(op.task.link_share)
    part_of = {link: _equal_part(whole_level[link.level] + shares) for link, shares in on_link.items()}
    smallest = {level: _equal_part(shares) for level, shares in whole_level.items()}
    for link, part in part_of.items():
        smallest[link.level] = min(part, smallest.get(link.level, 1.0))
    return [_rate(op.task, part_of, smallest) for op in ops]


def _rate(task: Task, part_of: dict[Link, float], smallest: dict[str, float]) -> float:
    parts = [part_of[link] for link in task.links] if task.links else [smallest[level] for level in task.levels]
    return min(1.0, min(parts, default=1.0) / max(task.link_share, MIN_SHARE))


def _equal_part(shares: Sequence[float]) -> float:
    """The most that an operation gets of a link on which operations want these shares; 1 if there is enough for all."""
    left = 1.0
    for waiting, share in zip(range(len(shares), 0, -1), sorted(shares), strict=True):
        if share * waiting > left:
            return left / waiting
        left -= share
    return 1.0
