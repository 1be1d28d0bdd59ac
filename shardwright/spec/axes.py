"""Mesh axes: what the ranks along an axis do differently, and over which network level.

A role may have several axes (replicate over data@host, shard over data@local), and a level may be split by several
roles (eight local ranks as tensor@local of 2 and data@local of 4).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Role = Literal["pipe", "data", "context", "tensor", "expert"]
SAMPLE_ROLES = frozenset(("data", "expert"))  # ranks along these axes have different samples


class Axis(NamedTuple):
    """`size` ranks with a role, over a network level."""

    role: Role
    level: str
    size: int

    @property
    def name(self) -> str:
        return axis_name(self.role, self.level)


ONE_RANK_AXES = (Axis("data", "local", 1),)


def axis_name(role: Role, level: str) -> str:
    return f"{role}@{level}"


def num_ranks(axes: Iterable[Axis]) -> int:
    return math.prod(axis.size for axis in axes)


def axes_text(axes: Sequence[Axis]) -> str:
    """For messages: "data@host 2 x data@local 4"."""
    return " x ".join(f"{axis.name} {axis.size}" for axis in axes)
