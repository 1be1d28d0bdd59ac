"""Wide & Deep, DeepFM and DCN as HET trains them; MLPs and heads have no biases.

Miao et al., "HET: Scaling out Huge Embedding Model Training via Cache-enabled Distributed Framework" (PVLDB 2021), with
its code's layers. On Criteo's 13 numbers and 26 features of 128 columns the dense models have the paper's 138 K, 918 K
and 1.01 M parameters: nearly all parameters, and all communication that HET saves, are in the tables.

Shape legend: B samples, F features, D columns of a vector, W columns of vectors, or of numeric features and vectors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import Cross, FactorizationMachine, NumericLinear, num_deep_columns
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.mlp import MLP


class HetModel(nn.Module):
    """Tables and one of the dense models below."""

    def __init__(self, sparse: EmbeddingBags, dense: nn.Module) -> None:
        super().__init__()
        self.sparse, self.dense, self.loss = sparse, dense, BinaryLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class HetWideDeep(nn.Module):
    """An MLP over the numeric features alone; one linear layer over its output and all vectors."""

    def __init__(self, dims: Sequence[int], num_dense: int, hidden: Sequence[int]) -> None:
        super().__init__()
        widths = (num_dense, *hidden) if num_dense else (0,)
        self.deep = MLP(num_dense, widths[1:], bias=False)
        self.head = nn.Linear(sum(dims) + widths[-1], 1, bias=False)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        return self.head(torch.cat([vectors.pooled_BD, self.deep(batch.numbers)], dim=1)).squeeze(1)


class HetDeepFM(nn.Module):
    """The numeric features have weights, but no vectors: neither products nor the MLP reads them."""

    def __init__(self, dims: Sequence[int], num_dense: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.dim, self.deep_columns = dims[0], num_deep_columns(tuple(dims))
        self.numbers = NumericLinear(num_dense)
        self.second_order = FactorizationMachine()
        self.deep = MLP(self.deep_columns, (*hidden, 1), activate_last=False, bias=False)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        deep_BW, wide_BF = vectors.pooled_BD.tensor_split([self.deep_columns], dim=1)
        first_B = self.numbers(batch.numbers) + wide_BF.sum(1)
        return first_B + self.second_order(deep_BW.unflatten(1, (-1, self.dim))) + self.deep(deep_BW).squeeze(1)


class HetDCN(nn.Module):
    """Three cross layers in parallel with the MLP."""

    def __init__(self, dims: Sequence[int], num_dense: int, hidden: Sequence[int]) -> None:
        super().__init__()
        width = num_dense + sum(dims)
        self.crosses = nn.ModuleList(Cross(width) for _ in range(3))
        self.deep = MLP(width, hidden, bias=False)
        self.head = nn.Linear(width + (hidden[-1] if hidden else width), 1, bias=False)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        first_BW = x_BW = torch.cat([batch.numbers, vectors.pooled_BD], dim=1)
        for cross in self.crosses:
            x_BW = cross(first_BW, x_BW)
        return self.head(torch.cat([x_BW, self.deep(first_BW)], dim=1)).squeeze(1)
