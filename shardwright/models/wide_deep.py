"""Wide & Deep: the logits of a linear model and of an MLP, added.

Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016). Every feature has a vector and a weight; the weight
is in a table of dim 1 that reads the same ids.

Shape legend: B samples, F features, W columns of all vectors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import NumericLinear, num_deep_columns, numeric_columns
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.mlp import PLAIN, MLPForm, logit_mlp


class WideDeep(nn.Module):
    def __init__(self, sparse: EmbeddingBags, num_dense: int, *, hidden: Sequence[int], form: MLPForm = PLAIN) -> None:
        super().__init__()
        self.sparse = sparse
        self.dense = WideDeepDense(sparse.dims, num_dense, hidden, form)
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class WideDeepDense(nn.Module):
    """The dense model of Wide & Deep."""

    def __init__(self, dims: tuple[int, ...], num_dense: int, hidden: Sequence[int], form: MLPForm) -> None:
        super().__init__()
        self.deep_columns = num_deep_columns(dims)
        self.wide = NumericLinear(num_dense)
        self.numbers = form.number_embedding(num_dense, dims[0])
        self.deep = logit_mlp(form.number_width(num_dense, dims[0]) + self.deep_columns, hidden, form)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        deep_BW, wide_BF = vectors.pooled_BD.tensor_split([self.deep_columns], dim=1)
        wide_B = self.wide(batch.numbers) + wide_BF.sum(1)
        deep_input = torch.cat([numeric_columns(batch.numbers, self.numbers), deep_BW], dim=1)
        return wide_B + self.deep(deep_input).squeeze(1)
