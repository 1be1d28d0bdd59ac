"""DeepFM: a factorization machine and an MLP over the same vectors.

Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (2017). A numeric feature has an
embedding too, scaled by its value.

Shape legend: B samples, F features, D columns of a vector, W columns of all vectors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import FactorizationMachine, NumericEmbedding, NumericLinear, num_deep_columns
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.mlp import PLAIN, MLPForm, logit_mlp


class DeepFM(nn.Module):
    """Every feature has a vector and a weight; the weight is in a table of dim 1 that reads the same ids."""

    def __init__(self, sparse: EmbeddingBags, num_dense: int, *, hidden: Sequence[int], form: MLPForm = PLAIN) -> None:
        super().__init__()
        self.sparse = sparse
        self.dense = DeepFMDense(sparse.dims, num_dense, hidden, form)
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class DeepFMDense(nn.Module):
    """The dense model of DeepFM."""

    def __init__(self, dims: tuple[int, ...], num_dense: int, hidden: Sequence[int], form: MLPForm) -> None:
        super().__init__()
        self.dim, self.deep_columns = dims[0], num_deep_columns(dims)
        self.first_order = NumericLinear(num_dense)
        self.numbers = NumericEmbedding(num_dense, self.dim)
        self.second_order = FactorizationMachine()
        self.deep = logit_mlp(self.deep_columns + num_dense * self.dim, hidden, form)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        deep_BW, wide_BF = vectors.pooled_BD.tensor_split([self.deep_columns], dim=1)
        x_BFD = torch.cat([self.numbers(batch.numbers), deep_BW.unflatten(1, (-1, self.dim))], dim=1)
        first_B = self.first_order(batch.numbers) + wide_BF.sum(1)
        return first_B + self.second_order(x_BFD) + self.deep(x_BFD.flatten(1)).squeeze(1)
