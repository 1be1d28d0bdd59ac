"""DHEN: stacked layers, each an ensemble of different interaction modules in parallel.

Zhang et al., "DHEN: A Deep and Hierarchical Ensemble Network for Large-Scale Click-Through Rate Prediction" (2022).
Tables and a bottom MLP give embeddings; each layer maps M embeddings to another number of them; a head reads the last
layer's output.

Shape legend: B samples, M embeddings, D columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.ensemble import EnsembleLayer, EnsembleSpec
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.mlp import MLP, PLAIN, MLPForm, logit_mlp
from shardwright.models.dlrm import common_dim


class DHEN(nn.Module):
    """DHEN over id and numeric features.

    `bottom` ends at the tables' dim; `layers` has one spec per layer; a final layer to one logit follows `top`. Without
    numeric features there is no bottom MLP, and `bottom` may be empty.
    """

    def __init__(
        self,
        sparse: EmbeddingBags,
        num_dense: int,
        *,
        bottom: Sequence[int],
        top: Sequence[int],
        layers: Sequence[EnsembleSpec],
        form: MLPForm = PLAIN,
    ) -> None:
        super().__init__()
        dim = common_dim("DHEN", sparse, num_dense, bottom)
        self.sparse = sparse
        bottom = bottom if num_dense else (dim,)
        self.dense = DHENDense(len(sparse.features), num_dense, bottom, top, layers, form)
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class DHENDense(nn.Module):
    """The dense model of DHEN."""

    def __init__(
        self,
        num_features: int,
        num_dense: int,
        bottom: Sequence[int],
        top: Sequence[int],
        layers: Sequence[EnsembleSpec],
        form: MLPForm = PLAIN,
    ) -> None:
        super().__init__()
        form.refuse_number_vectors("DHEN")
        dim, num = bottom[-1], num_features + bool(num_dense)
        self.bottom = MLP(num_dense, bottom, form=form) if num_dense else None
        self.blocks = nn.ModuleList()
        for index, spec in enumerate(layers):
            try:
                block = EnsembleLayer(num, dim, spec, num_dense)
            except UserError as error:
                raise UserError(f"DHEN, layer {index + 1} of {len(layers)}: {error}") from None
            self.blocks.append(block)
            num = block.num_out
        self.head = logit_mlp(num * dim, top, form)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        x_BMD = vectors.stacked()
        if self.bottom is not None:
            x_BMD = torch.cat([self.bottom(batch.numbers).unsqueeze(1), x_BMD], dim=1)
        for block in self.blocks:
            x_BMD = block(x_BMD, batch.numbers) if block.reads_numbers else block(x_BMD)
        return self.head(x_BMD.flatten(1)).squeeze(1)
