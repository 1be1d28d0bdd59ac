"""Deep & Cross Network: cross layers, each raising the order of feature products, and an MLP.

Wang et al., "Deep & Cross Network for Ad Click Predictions" (2017): x0 (x . w) + b + x, in parallel with the MLP. Wang
et al., "DCN V2" (2021): x0 * (W x + b) + x, of full or low rank, before the MLP (stacked) or parallel to it.

Shape legend: B samples, W columns of numeric features and vectors together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import Cross, CrossV2, NumericEmbedding, numeric_columns
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.mlp import MLP, PLAIN, MLPForm


class DCN(nn.Module):
    """`num_cross` layers of DCN, or of DCN V2 with `v2`; `rank` 0 is a full matrix."""

    def __init__(
        self,
        sparse: EmbeddingBags,
        num_dense: int,
        *,
        num_cross: int,
        hidden: Sequence[int],
        v2: bool = False,
        rank: int = 0,
        stacked: bool = False,
        form: MLPForm = PLAIN,
    ) -> None:
        super().__init__()
        numbers = form.number_embedding(num_dense, sparse.dims[0])
        width = form.number_width(num_dense, sparse.dims[0]) + sum(sparse.dims)
        crosses = [CrossV2(width, rank=rank) if v2 else Cross(width) for _ in range(num_cross)]
        self.sparse = sparse
        self.dense = DCNDense(width, numbers, crosses, hidden, stacked, form)
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class DCNDense(nn.Module):
    """The dense model of DCN."""

    def __init__(
        self,
        width: int,
        numbers: NumericEmbedding | None,
        crosses: Sequence[nn.Module],
        hidden: Sequence[int],
        stacked: bool,
        form: MLPForm,
    ) -> None:
        super().__init__()
        self.stacked = stacked
        self.numbers = numbers
        self.crosses = nn.ModuleList(crosses)
        self.deep = MLP(width, hidden, form=form)
        last = hidden[-1] if hidden else width
        self.head = form.output(last if stacked else width + last)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        first_BW = x_BW = torch.cat([numeric_columns(batch.numbers, self.numbers), vectors.pooled_BD], dim=1)
        for cross in self.crosses:
            x_BW = cross(first_BW, x_BW)
        out = self.deep(x_BW) if self.stacked else torch.cat([x_BW, self.deep(first_BW)], dim=1)
        return self.head(out).squeeze(1)
