"""GraphSAGE with mean aggregation: a layer concatenates a node's vector with the mean of its neighbors' vectors.

Hamilton et al., "Inductive Representation Learning on Large Graphs" (2017). Samples are neighborhoods
(data/graphs/neighborhoods.py): a vector for each position, first of the node, then of its neighbors, then of theirs.

Shape legend: B samples, P positions, C channels, I inputs, D columns of a table.
"""

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import UserError
from shardwright.jagged import Batch, Vectors
from shardwright.layers.dropout import Dropout
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import ClassLoss
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.workload import Feature, Table


class NeighborhoodSource(Protocol):
    """Interface of a source of neighborhoods; `tables`: the rows of the table of each input."""

    @property
    def fanouts(self) -> Sequence[int]: ...

    @property
    def num_positions(self) -> int: ...

    @property
    def num_classes(self) -> int: ...

    @property
    def tables(self) -> dict[str, int]: ...


class GraphSAGE(nn.Module):
    def __init__(
        self, sparse: EmbeddingBags, fanouts: Sequence[int], num_classes: int, *, hidden: int, dropout: float = 0.0
    ) -> None:
        """The features of `sparse` are those of all positions, input by input; all tables have the same dim."""
        super().__init__()
        self.sparse = sparse
        self.dense = GraphSAGEDense(sparse.dims, fanouts, num_classes, hidden, dropout)
        self.loss = ClassLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class GraphSAGEDense(nn.Module):
    """The dense model of GraphSAGE: a layer for each distance."""

    def __init__(
        self, dims: Sequence[int], fanouts: Sequence[int], num_classes: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        self.fanouts = tuple(fanouts)
        self.level_sizes = [prod(self.fanouts[:distance]) for distance in range(len(self.fanouts) + 1)]
        self.num_inputs, rest = divmod(len(dims), sum(self.level_sizes))
        if rest or len(set(dims)) != 1:
            raise UserError(
                f"GraphSAGE: {len(dims)} features of dims {sorted(set(dims))} for {sum(self.level_sizes)} positions; "
                "wanted the same number for each position, of one dim"
            )
        widths = [self.num_inputs * dims[0], *[hidden] * (len(self.fanouts) - 1), num_classes]
        self.layers = nn.ModuleList(
            nn.Linear(2 * wide, narrow) for wide, narrow in zip(widths, widths[1:], strict=False)
        )
        self.dropouts = nn.ModuleList(Dropout(dropout) for _ in self.layers)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        x_BPC = vectors.pooled_BD.unflatten(1, (self.num_inputs, sum(self.level_sizes), -1)).transpose(1, 2).flatten(2)
        sizes = self.level_sizes
        for dropout, layer in zip(self.dropouts, self.layers, strict=True):
            levels = dropout(x_BPC).split(sizes, dim=1)
            pairs = zip(levels, levels[1:], strict=False)
            x_BPC = layer(torch.cat([torch.cat([near, self._means(far, near)], 2) for near, far in pairs], 1))
            sizes = sizes[:-1]
            if layer is not self.layers[-1]:
                x_BPC = functional.relu(x_BPC)
        return x_BPC.squeeze(1)

    @staticmethod
    def _means(far: Tensor, near: Tensor) -> Tensor:
        """The mean over the neighbors of each position."""
        return far.unflatten(1, (near.shape[1], -1)).mean(2)


def graphsage(
    source: NeighborhoodSource,
    optimizer: SparseOptimizer,
    *,
    dim: int,
    hidden: int,
    dropout: float = 0.0,
    init: float | None = None,
) -> nn.Module:
    """GraphSAGE for the neighborhoods of a source; words are averaged."""
    if not hasattr(source, "fanouts"):
        raise UserError(f"model.kind=graphsage needs a source of neighborhoods, data.kind=graph, not {source!r}")
    tables = [Table(name, rows, dim, init=init) for name, rows in source.tables.items()]
    features = [
        Feature(f"{name}{position}", name, "mean") for name in source.tables for position in range(source.num_positions)
    ]
    sparse = EmbeddingBags(tables, features, optimizer)
    return GraphSAGE(sparse, source.fanouts, source.num_classes, hidden=hidden, dropout=dropout)
