"""The ranks of a run: the first one writes, and all decide alike."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.mesh import DEFAULT_LANE, Mesh
from shardwright.runtime.run.metrics import LifetimeMetrics, WindowMetrics


class RankGroup:
    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.size = mesh.rank, mesh.size
        self._group = mesh.group(lane=DEFAULT_LANE) if mesh.size > 1 else None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast_text(self, text: str) -> str:
        """What the first rank says."""
        return self.all_gather_text(text if self.is_first else "")[0]

    def all_gather_text(self, text: str) -> list[str]:
        """What each rank says."""
        if self._group is None:
            return [text]
        found = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor([len(found)])).tolist()
        return [bytes(one.tolist()).decode() for one in self._joined(found, sizes).split(sizes)]

    def all_gather(self, x: Tensor) -> Tensor:
        """One row of each rank."""
        return x if self._group is None else collective.all_gather(x, [1] * self.size, self._group).wait()

    def barrier(self) -> None:
        """Go on when all have come here."""
        self.all_gather(torch.zeros(1))

    def all_reduce_lifetime(self, lifetime: LifetimeMetrics) -> LifetimeMetrics:
        """That of all ranks."""
        return lifetime.from_vector(self.all_gather(lifetime.to_vector().unsqueeze(0)).sum(0))

    def all_gather_window(self, window: WindowMetrics) -> WindowMetrics:
        """The outputs of all ranks."""
        if self._group is None:
            return window
        columns = window.columns()
        own = torch.tensor([[len(column) if column is not None else -1 for column in columns.values()]])
        sizes_RC = self.all_gather(own)
        found = {}
        for (name, column), sizes in zip(columns.items(), sizes_RC.T.tolist(), strict=True):
            if column is not None and min(sizes) >= 0:
                found[name] = self._joined(column, sizes)
        return window.from_columns(found)

    def _joined(self, column: Tensor, sizes: Sequence[int]) -> Tensor:
        assert self._group is not None
        return collective.all_gather(column.contiguous(), sizes, self._group).wait()
