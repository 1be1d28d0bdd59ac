"""The ranks of a run: the first one writes, and all decide alike."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.mesh import MAIN, Mesh
from shardwright.runtime.run.metrics import Lifetime, Window


class Team:
    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.size = mesh.rank, mesh.size
        self._group = mesh.group(lane=MAIN) if mesh.size > 1 else None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def told(self, words: str) -> str:
        """What the first rank says."""
        return self.said(words if self.first else "")[0]

    def said(self, words: str) -> list[str]:
        """What each rank says."""
        if self._group is None:
            return [words]
        found = torch.tensor(list(words.encode()), dtype=torch.uint8)
        sizes = self.gathered(torch.tensor([len(found)])).tolist()
        return [bytes(one.tolist()).decode() for one in self._joined(found, sizes).split(sizes)]

    def gathered(self, x: Tensor) -> Tensor:
        """One row of each rank."""
        return x if self._group is None else collective.all_gather(x, [1] * self.size, self._group).wait()

    def together(self) -> None:
        """Go on when all have come here."""
        self.gathered(torch.zeros(1))

    def lifetime(self, lifetime: Lifetime) -> Lifetime:
        """That of all ranks."""
        return lifetime.of(self.gathered(lifetime.numbers().unsqueeze(0)).sum(0))

    def window(self, window: Window) -> Window:
        """The outputs of all ranks."""
        if self._group is None:
            return window
        columns = window.columns()
        own = torch.tensor([[len(column) if column is not None else -1 for column in columns.values()]])
        sizes_RC = self.gathered(own)
        found = {}
        for (name, column), sizes in zip(columns.items(), sizes_RC.T.tolist(), strict=True):
            if column is not None and min(sizes) >= 0:
                found[name] = self._joined(column, sizes)
        return window.of(found)

    def _joined(self, column: Tensor, sizes: Sequence[int]) -> Tensor:
        assert self._group is not None
        return collective.all_gather(column.contiguous(), sizes, self._group).wait()
