"""Who takes part: named axes of ranks, the lanes between them, and the device of this process.

A mesh makes all process groups at once, in the plan's order, on every rank; later code is handed a mesh and never
makes groups of its own. Today it has its one-process form.
"""

import os
from collections.abc import Sequence

import torch

from shardwright.errors import UserError


def world_size() -> int:
    """The processes of this job, as torch.distributed or torchrun's environment has it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


class Mesh:
    """Axes are (name, size) pairs, outermost first; a lane is a communicator of its own on every axis."""

    def __init__(
        self,
        axes: Sequence[tuple[str, int]] = (),
        *,
        lanes: Sequence[str] = (),
        device: torch.device | str = "cpu",
        timeout_seconds: float = 60.0,
    ) -> None:
        self.axes = tuple(axes)
        self.lanes = tuple(lanes)
        self.device = torch.device(device)
        self.timeout_seconds = timeout_seconds
        self.rank = 0
        if self.size != 1:
            raise UserError(
                f"a mesh of {self.size} ranks (axes {dict(self.axes)}): this version trains in one process; "
                "use axes of size 1"
            )
        if world_size() != 1:
            raise UserError(
                f"{world_size()} processes were started, which would each train a model of their own: "
                "this version trains in one process; start it without torchrun"
            )

    @property
    def size(self) -> int:
        size = 1
        for _, axis_size in self.axes:
            size *= axis_size
        return size

    def index(self, axis: str) -> int:
        """This rank's place along an axis."""
        if axis not in dict(self.axes):
            raise UserError(f'no mesh axis "{axis}"; this mesh has {[name for name, _ in self.axes]}')
        return 0
