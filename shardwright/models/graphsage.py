"""GraphSAGE with mean aggregation: a layer concatenates a node's vector with the mean of its neighbors' vectors.

Hamilton et al., "Inductive Representation Learning on Large Graphs" (2017). Samples are neighborhoods
(data/graphs/neighborhoods.py): a vector for each position, first of the node, then of its neighbors, then of theirs.

Shape legend: B samples, P positions, C channels, I inputs, D columns of a table, N nodes, E neighbors of all nodes,
F numeric features of a node.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Protocol

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

NEIGHBORS_AT_ONCE = 1 << 18  # whose vectors are gathered at once, where all neighbors count


class NeighborhoodSource(Protocol):
    """Interface of a source of neighborhoods; `tables`: the rows of the table of each input."""

    @property
    def fanouts(self) -> Sequence[int]: ...

    @property
    def num_positions(self) -> int: ...

    @property
    def num_classes(self) -> int: ...

    @property
    def num_numbers(self) -> int: ...

    @property
    def tables(self) -> dict[str, int]: ...


class Widths(NamedTuple):
    """`numbers`: numeric features of a node; `hidden`: width of the layers before the last."""

    numbers: int
    hidden: int
    classes: int


class GraphSAGE(nn.Module):
    def __init__(
        self,
        sparse: EmbeddingBags | None,
        fanouts: Sequence[int],
        widths: Widths,
        *,
        dropout: float = 0.0,
        direct: bool = False,
    ) -> None:
        """The features of `sparse` are those of all positions, input by input; all tables have the same dim.

        `direct`: the tables hold the weights of the first layer, a column for each of its outputs from the node and for
        each from the neighbors.
        """
        super().__init__()
        if sparse is not None:
            self.sparse = sparse
        self.dense = GraphSAGEDense(sparse.dims if sparse else (), fanouts, widths, dropout, direct)
        self.loss = ClassLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch) if hasattr(self, "sparse") else None)


class GraphSAGEDense(nn.Module):
    """The dense model of GraphSAGE: a layer for each distance."""

    def __init__(
        self, dims: Sequence[int], fanouts: Sequence[int], widths: Widths, dropout: float, direct: bool = False
    ) -> None:
        super().__init__()
        self.fanouts = tuple(fanouts)
        self.level_sizes = [prod(self.fanouts[:distance]) for distance in range(len(self.fanouts) + 1)]
        self.num_positions, self.num_numbers, self.direct = sum(self.level_sizes), widths.numbers, direct
        self.num_inputs, rest = divmod(len(dims), self.num_positions)
        if rest or len(set(dims)) > 1 or not (dims or widths.numbers):
            raise UserError(
                f"GraphSAGE: {len(dims)} features of dims {sorted(set(dims))} for {self.num_positions} positions; "
                "wanted the same number for each position, of one dim"
            )
        outputs = [*[widths.hidden] * (len(self.fanouts) - 1), widths.classes]
        first = 2 * outputs[0] if direct else self.num_inputs * (dims[0] if dims else 0) + widths.numbers
        self.numbers = nn.Linear(widths.numbers, first, bias=False) if direct and widths.numbers else None
        pairs = list(zip([first, *outputs], outputs, strict=False))
        layers: list[nn.Module] = [nn.Linear(2 * wide, narrow) for wide, narrow in pairs]
        self.layers = nn.ModuleList([SumOfHalves(outputs[0]), *layers[1:]] if direct else layers)
        self.dropouts = nn.ModuleList(Dropout(dropout) for _ in self.layers)

    def forward(self, batch: Batch, vectors: Vectors | None) -> Tensor:
        x_BPC, sizes = self.read_inputs(batch, vectors), self.level_sizes
        for index, layer in enumerate(self.layers):
            levels = (x_BPC if index == 0 else self.dropouts[index](x_BPC)).split(sizes, dim=1)
            pairs = zip(levels, levels[1:], strict=False)
            x_BPC = layer(torch.cat([torch.cat([near, self._means(far, near)], 2) for near, far in pairs], 1))
            sizes = sizes[:-1]
            if layer is not self.layers[-1]:
                x_BPC = functional.relu(x_BPC)
        return x_BPC.squeeze(1)

    def read_inputs(self, batch: Batch, vectors: Vectors | None) -> Tensor:
        """What the first layer reads of each position, (B, P, C)."""
        numbers_BPF = batch.numbers.unflatten(1, (self.num_positions, self.num_numbers)) if self.num_numbers else None
        parts = [] if numbers_BPF is None else [numbers_BPF]
        if vectors is not None:
            vectors_BIPD = vectors.pooled_BD.unflatten(1, (self.num_inputs, self.num_positions, -1))
            if self.direct:
                parts.append(vectors_BIPD.sum(1))
            else:
                parts.insert(0, vectors_BIPD.transpose(1, 2).flatten(2))
        if not self.direct:
            return self.dropouts[0](torch.cat(parts, 2))
        if self.numbers is not None:
            parts[0] = self.numbers(self.dropouts[0](parts[0]))
        return sum(parts[1:], parts[0])

    @staticmethod
    def _means(far: Tensor, near: Tensor) -> Tensor:
        """The mean over the neighbors of each position."""
        return far.unflatten(1, (near.shape[1], -1)).mean(2)

    @torch.no_grad()
    def score_all_neighbors(self, x_NC: Tensor, starts: Tensor, neighbors_E: Tensor) -> Tensor:
        """The logits of all nodes, from means over all neighbors of each, layer by layer.

        `x_NC`: what the first layer reads of each node; node n has neighbors starts[n] to starts[n + 1] of
        `neighbors_E`; without any it is its own. Memory is that of a layer's inputs and outputs for all nodes.
        """
        for layer in self.layers:
            x_NC = layer(torch.cat([x_NC, mean_of_neighbors(x_NC, starts, neighbors_E)], 1))
            if layer is not self.layers[-1]:
                x_NC = functional.relu(x_NC)
        return x_NC


class SumOfHalves(nn.Module):
    """The first layer of GraphSAGE where tables hold its weights: adds half of a node's columns and half of the means.

    Its input is a node's columns, then the mean of those of its neighbors, each twice as wide as the output.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, pairs: Tensor) -> Tensor:
        width = len(self.bias)
        return pairs[..., :width] + pairs[..., 3 * width :] + self.bias


def mean_of_neighbors(x_NC: Tensor, starts: Tensor, neighbors_E: Tensor) -> Tensor:
    """The mean over the neighbors of each node; a node without neighbors is its own."""
    sizes = starts.diff()
    sums_NC = torch.zeros_like(x_NC)
    for lo in range(0, len(neighbors_E), NEIGHBORS_AT_ONCE):
        part = neighbors_E[lo : lo + NEIGHBORS_AT_ONCE]
        owners = torch.searchsorted(starts, torch.arange(lo, lo + len(part)), right=True) - 1
        sums_NC.index_add_(0, owners, x_NC[part])
    return torch.where((sizes > 0)[:, None], sums_NC / sizes.clamp(min=1)[:, None], x_NC)


def graphsage(
    source: NeighborhoodSource,
    optimizer: SparseOptimizer | None = None,
    *,
    hidden: int,
    dim: int = 0,
    dropout: float = 0.0,
    init: float | None = None,
) -> nn.Module:
    """GraphSAGE for the neighborhoods of a source; words are averaged.

    `dim`: columns of the tables; 0: tables hold the weights of the first layer, in 2 * hidden columns.
    """
    if not hasattr(source, "fanouts"):
        raise UserError(f"model.kind=graphsage needs a source of neighborhoods, data.kind=graph, not {source!r}")
    if source.tables and optimizer is None:
        raise UserError(f"section [tables] is missing; the model has tables of {' and '.join(source.tables)}")
    if dim and not source.tables:
        raise UserError(f"model.dim={dim}, but the source has no ids, and so the model no tables; drop it")
    width = hidden if len(source.fanouts) > 1 else source.num_classes
    tables = [Table(name, rows, dim or 2 * width, init=init) for name, rows in source.tables.items()]
    features = [
        Feature(f"{name}{position}", name, "mean") for name in source.tables for position in range(source.num_positions)
    ]
    sparse = EmbeddingBags(tables, features, optimizer) if tables else None
    widths = Widths(source.num_numbers, hidden, source.num_classes)
    return GraphSAGE(sparse, source.fanouts, widths, dropout=dropout, direct=not dim)
