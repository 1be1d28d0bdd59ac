"""DIN: the target's attention over the user's history, and an MLP.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (2018). Ids of the history and of the target have
one table. With pooling by mean instead of attention the model is its baseline, and equal in all else.

Shape legend: B samples, D columns.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import numeric_columns
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.mlp import PLAIN, MLPForm, logit_mlp
from shardwright.layers.target_attention import TargetAttention
from shardwright.models.click_inputs import ClickInputs
from shardwright.models.history_fields import HistoryFields, aligned_features, find_histories

POOLINGS = ("attention", "mean")


class DIN(nn.Module):
    """DIN; each of `histories` has an attention layer. Those that `sparse` pools are inputs of the MLP instead."""

    def __init__(
        self,
        sparse: EmbeddingBags,
        num_dense: int,
        histories: tuple[HistoryFields, ...],
        *,
        attention: Sequence[int],
        hidden: Sequence[int],
        normalize: bool = False,
        form: MLPForm = PLAIN,
    ) -> None:
        super().__init__()
        self.aligned = aligned_features(histories)
        self.sparse = sparse
        self.dense = DINDense(sparse, num_dense, histories, attention, hidden, normalize, form)
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class DINDense(nn.Module):
    """The dense model of DIN."""

    def __init__(
        self,
        sparse: EmbeddingBags,
        num_dense: int,
        histories: tuple[HistoryFields, ...],
        attention: Sequence[int],
        hidden: Sequence[int],
        normalize: bool,
        form: MLPForm,
    ) -> None:
        super().__init__()
        self.histories = histories
        dim = sparse.dims[0]
        self.blocks = nn.ModuleList(
            TargetAttention(len(fields.keys) * dim, attention, normalize=normalize) for fields in histories
        )
        self.numbers = form.number_embedding(num_dense, dim)
        self.deep = logit_mlp(form.number_width(num_dense, dim) + sum(sparse.dims), hidden, form)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        attended = [
            block(fields.join_targets(vectors), fields.join_keys(vectors), fields.lengths(batch))
            for fields, block in zip(self.histories, self.blocks, strict=True)
        ]
        numbers = numeric_columns(batch.numbers, self.numbers)
        return self.deep(torch.cat([numbers, vectors.pooled_BD, *attended], dim=1)).squeeze(1)


def din(
    inputs: ClickInputs,
    *,
    dim: int,
    attention: list[int],
    hidden: list[int],
    pooling: str = "attention",
    normalize: bool = False,
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """DIN for the histories of a source."""
    histories = find_histories(inputs.source, "din")
    if pooling not in POOLINGS:
        raise UserError(f'model.pooling="{pooling}"; allowed: {", ".join(POOLINGS)}')
    if pooling == "mean":
        if normalize:
            raise UserError("model.normalize=true with model.pooling=mean, which has no weights; drop one of the two")
        histories = ()
    sequences = [key for fields in histories for key in fields.keys]
    sparse = inputs.embedding_bags(dim, init=init, sequences=sequences)
    return DIN(
        sparse,
        inputs.source.num_dense,
        histories,
        attention=attention,
        hidden=hidden,
        normalize=normalize,
        form=inputs.form(mlp),
    )
