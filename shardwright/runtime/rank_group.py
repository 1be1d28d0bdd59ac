"""Collectives of a run's control flow: texts, small tensors and metrics, so that all ranks decide the same.

Shape legend: R ranks, C metric columns.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.comm import collective
from shardwright.comm.mesh import Mesh
from shardwright.rectangle import dtype_name
from shardwright.runtime.run.metrics import TaskLifetimes, WindowMetrics


class RankGroup:
    """All ranks of a mesh; every method that communicates is a blocking all-gather on the first lane.

    In one process nothing is communicated.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        """`mesh`: None: this process alone."""
        self.rank, self.size = (mesh.rank, mesh.size) if mesh is not None else (0, 1)
        self._group = mesh.group() if mesh is not None and mesh.size > 1 else None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text; the texts of other ranks are ignored."""
        return self.all_gather_text(text if self.is_first else "")[0]

    def all_gather_text(self, text: str) -> list[str]:
        """The text of each rank."""
        if self._group is None:
            return [text]
        encoded = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor([len(encoded)])).tolist()
        return [bytes(rank_text.tolist()).decode() for rank_text in self._concat(encoded, sizes).split(sizes)]

    def all_gather_json(self, value: Any) -> list[Any]:
        """The JSON value of each rank; between ranks tuples become lists."""
        return (
            [value] if self._group is None else [json.loads(text) for text in self.all_gather_text(json.dumps(value))]
        )

    def broadcast_missing(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every rank's tensors by name: each is broadcast by the first rank that has it, to those that do not."""
        if self._group is None:
            return dict(tensors)
        local = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
        ranks, complete = self.all_gather_json(local), dict(tensors)
        for name in dict.fromkeys(name for specs in ranks for name in specs):
            holders = [rank for rank, specs in enumerate(ranks) if name in specs]
            if len(holders) == self.size:
                continue
            dtype, shape = ranks[holders[0]][name]
            values = torch.empty(shape, dtype=getattr(torch, dtype))  # other holders keep theirs
            if self.rank == holders[0]:
                values = tensors[name].detach().contiguous()
            if values.numel():
                collective.broadcast(values.view(-1).view(torch.uint8), holders[0], self._group).wait()
            complete.setdefault(name, values)
        return complete

    def all_gather(self, x: Tensor) -> Tensor:
        """All-gather a row from each rank."""
        return x if self._group is None else collective.all_gather(x, [1] * self.size, self._group).wait()

    def concat(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, in the order of ranks; their number may differ by rank."""
        sizes = self.all_gather(torch.tensor([len(rows)])).tolist()
        return rows if self._group is None else self._concat(rows, sizes)

    def barrier(self) -> None:
        """Wait until all ranks call it."""
        self.all_gather(torch.zeros(1))

    def all_reduce_lifetime(self, lifetime: TaskLifetimes) -> TaskLifetimes:
        """Add up the lifetime metrics of all ranks."""
        return lifetime.from_vector(self.all_gather(lifetime.to_vector().unsqueeze(0)).sum(0))

    def all_gather_window(self, window: WindowMetrics) -> WindowMetrics:
        """Concatenate the window metrics of all ranks; drops a column that a rank does not have."""
        if self._group is None:
            return window
        columns = window.columns()
        local_sizes = torch.tensor([[len(column) if column is not None else -1 for column in columns.values()]])
        sizes_RC = self.all_gather(local_sizes)
        gathered_columns = {}
        for (name, column), sizes in zip(columns.items(), sizes_RC.T.tolist(), strict=True):
            if column is not None and min(sizes) >= 0:
                gathered_columns[name] = self._concat(column, sizes)
        return window.from_columns(gathered_columns)

    def _concat(self, column: Tensor, sizes: Sequence[int]) -> Tensor:
        """All-gather a vector whose size may differ by rank; `sizes` by rank."""
        assert self._group is not None
        return collective.all_gather(column.contiguous(), sizes, self._group).wait()


ONE_RANK = RankGroup()
