"""DLRM: bottom MLP for numeric features, a table per id feature, dot products of all pairs, top MLP.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019).

Shape legend: B samples, F vectors of a sample, D columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import DotInteraction
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.mlp import MLP, PLAIN, MLPForm, logit_mlp
from shardwright.layers.moe import MoEMLP, MoESpec


class DLRM(nn.Module):
    """`bottom` ends at the tables' dim; a final layer to one logit follows `top`.

    Without numeric features there is no bottom MLP, and `bottom` may be empty. With a `mixture` each layer of `top` is
    a mixture of experts; if its gates have auxiliary losses, training returns logits and the penalties of samples.
    """

    def __init__(
        self,
        sparse: EmbeddingBags,
        num_dense: int,
        *,
        bottom: Sequence[int],
        top: Sequence[int],
        mixture: MoESpec | None = None,
        form: MLPForm = PLAIN,
    ) -> None:
        super().__init__()
        dim = common_dim("DLRM", sparse, num_dense, bottom)
        self.sparse = sparse
        bottom = bottom if num_dense else (dim,)
        self.dense = DLRMDense(len(sparse.features), num_dense, bottom, top, mixture, form)
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        return self.dense(batch, self.sparse(batch))


def common_dim(model: str, sparse: EmbeddingBags, num_dense: int, bottom: Sequence[int]) -> int:
    """The dim of all tables, which the bottom MLP must end at if there are numeric features."""
    dims = {table.dim for table in sparse.tables}
    if num_dense and not bottom:
        raise UserError(
            f"{model}: bottom=[] with {num_dense} numeric features; give widths of its layers, the last equal "
            f"to the dim of the tables {sorted(dims)}"
        )
    distinct_dims = {*dims, *bottom[-1:]}
    if len(distinct_dims) != 1:
        last = f"the bottom MLP ends at {bottom[-1]} and " if bottom else ""
        raise UserError(f"{model}: {last}the tables have dims {sorted(dims)}; all must be equal to be combined")
    return distinct_dims.pop()


class DLRMDense(nn.Module):
    """The dense model of DLRM."""

    def __init__(
        self,
        num_features: int,
        num_dense: int,
        bottom: Sequence[int],
        top: Sequence[int],
        mixture: MoESpec | None = None,
        form: MLPForm = PLAIN,
    ) -> None:
        super().__init__()
        form.refuse_number_vectors("DLRM")
        self.bottom = MLP(num_dense, bottom, form=form) if num_dense else None
        self.interaction = DotInteraction(num_features + bool(num_dense))
        width = bottom[-1] * bool(num_dense) + self.interaction.out_features
        if mixture and form != MLPForm(output_bias=form.output_bias):
            raise UserError("layers of experts are linear and ReLU: drop activation, norm and dropout of the MLPs")
        last = form.output(top[-1] if top else width)
        self.top = MoEMLP(width, top, last, mixture) if mixture else logit_mlp(width, top, form)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor | tuple[Tensor, Tensor]:
        out = self.top(self._interact(batch, vectors))
        return (out[0].squeeze(1), out[1]) if isinstance(out, tuple) else out.squeeze(1)

    def _interact(self, batch: Batch, vectors: Vectors) -> Tensor:
        """The inputs of the top MLP."""
        if self.bottom is None:
            return self.interaction(vectors.stacked())
        dense_BD = self.bottom(batch.numbers)
        x_BFD = torch.cat([dense_BD.unsqueeze(1), vectors.stacked()], dim=1)
        return torch.cat([dense_BD, self.interaction(x_BFD)], dim=1)
