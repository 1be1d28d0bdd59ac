"""AutoInt: layers of self-attention among the features of a sample.

Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks" (2019). A numeric
feature has an embedding too, scaled by its value. With `hidden` an MLP runs in parallel (AutoInt+).

Shape legend: B samples, F features, D columns.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import FieldAttention, NumericEmbedding
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.mlp import PLAIN, MLPForm, logit_mlp


class AutoInt(nn.Module):
    """AutoInt; `head_dim` columns for each of `num_heads` heads of every layer."""

    def __init__(
        self,
        sparse: EmbeddingBags,
        num_dense: int,
        *,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        hidden: Sequence[int] = (),
        form: MLPForm = PLAIN,
    ) -> None:
        super().__init__()
        dims = [sparse.dims[0]] + [num_heads * head_dim] * num_layers
        layers = [FieldAttention(dim, num_heads=num_heads, head_dim=head_dim) for dim in dims[:-1]]
        self.sparse = sparse
        self.dense = AutoIntDense(dims, len(sparse.features) + num_dense, num_dense, layers, hidden, form)
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class AutoIntDense(nn.Module):
    """The dense model of AutoInt."""

    def __init__(
        self,
        dims: Sequence[int],
        num_fields: int,
        num_dense: int,
        layers: Sequence[FieldAttention],
        hidden: Sequence[int],
        form: MLPForm,
    ) -> None:
        super().__init__()
        self.numbers = NumericEmbedding(num_dense, dims[0])
        self.layers = nn.ModuleList(layers)
        self.head = form.output(num_fields * dims[-1])
        self.deep = logit_mlp(num_fields * dims[0], hidden, replace(form, output_bias=None)) if hidden else None

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        first_BFD = x_BFD = torch.cat([self.numbers(batch.numbers), vectors.stacked()], dim=1)
        for layer in self.layers:
            x_BFD = layer(x_BFD)
        logit_B = self.head(x_BFD.flatten(1)).squeeze(1)
        return logit_B if self.deep is None else logit_B + self.deep(first_BFD.flatten(1)).squeeze(1)
