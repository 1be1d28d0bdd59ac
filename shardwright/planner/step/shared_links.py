"""Collectives and messages in flight, and the network links that they share.

Operations on the same link share its bandwidth equally. An operation without `links` uses every link of its levels.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner.price.axis_groups import Link
from shardwright.planner.step.rank_calls import JointKey, Task


@dataclass(slots=True)
class RunningOp:
    """A collective or message in flight."""

    key: JointKey
    seconds_left: float  # at full bandwidth
    task: Task


def sharing_rates(ops: Sequence[RunningOp]) -> list[float]:
    """The rate of each operation: a share of the bandwidth of the busiest link that it uses."""
    if len(ops) < 2:
        return [1.0] * len(ops)
    whole_level: dict[str, int] = defaultdict(int)  # operations that use every link of a level
    users: dict[Link, int] = defaultdict(int)  # other operations, by link
    for op in ops:
        for link in op.task.links:
            users[link] += 1
        for level in op.task.levels if not op.task.links else ():
            whole_level[level] += 1
    busiest: dict[str, int] = defaultdict(int)
    for link, num in users.items():
        busiest[link.level] = max(busiest[link.level], num)
    return [1 / _num_users(op.task, whole_level, users, busiest) for op in ops]


def _num_users(task: Task, whole_level: dict[str, int], users: dict[Link, int], busiest: dict[str, int]) -> int:
    if task.links:
        return max(whole_level[link.level] + users[link] for link in task.links)
    return max((whole_level[level] + busiest[level] for level in task.levels), default=1)
