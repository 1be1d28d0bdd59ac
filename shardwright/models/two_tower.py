"""Two towers, a model of retrieval: the score of a user and an item is the dot product of their vectors.

Covington et al., "Deep Neural Networks for YouTube Recommendations" (2016); Yi et al., "Sampling-Bias-Corrected Neural
Modeling for Large Corpus Item Recommendations" (2019).

Shape legend: B samples, D columns of a vector, W columns of a tower's input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import UserError, did_you_mean
from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.in_batch_softmax import InBatchSoftmax, SoftmaxSpec, positive_weights
from shardwright.layers.mlp import MLP, PLAIN, MLPForm


@dataclass(frozen=True, slots=True)
class TowerInputs:
    """The inputs of a tower: features, of which the first identifies the user or item, and columns of the numbers."""

    features: tuple[str, ...]
    numbers: tuple[int, ...] = ()


class TwoTower(nn.Module):
    """A tower for users and one for items, over tables of one EmbeddingBags."""

    def __init__(
        self,
        sparse: EmbeddingBags,
        user: TowerInputs,
        item: TowerInputs,
        *,
        hidden: Sequence[int],
        loss: InBatchSoftmax,
        normalize: bool = True,
        form: MLPForm = PLAIN,
    ) -> None:
        """`hidden`: widths of both towers; the last is that of the vectors. `normalize`: vectors of length 1."""
        super().__init__()
        self.user, self.item = user.features[0], item.features[0]  # ids of user and item
        self.sparse = sparse
        self.dense = TwoTowerDense(sparse, (user, item), hidden, normalize=normalize, form=form, label=loss.label)
        self.loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class TwoTowerDense(nn.Module):
    """The dense model of two towers; returns (B, 2, D), the vectors of the user and of the item of each sample.

    Batch norms take their statistics from the positives, the samples that have a loss.
    """

    def __init__(
        self,
        sparse: EmbeddingBags,
        inputs: tuple[TowerInputs, TowerInputs],
        hidden: Sequence[int],
        *,
        normalize: bool,
        form: MLPForm,
        label: str,
    ) -> None:
        super().__init__()
        if not hidden:
            raise UserError("two towers with hidden=[]; give the widths of their layers, the last is that of a vector")
        form.refuse_number_vectors("two towers")
        if form.output_bias is not None:
            raise UserError(
                f"output_bias={form.output_bias:g}: two towers return vectors and have no such bias; drop it"
            )
        dims = dict(zip((feature.name for feature in sparse.features), sparse.dims, strict=True))
        self.inputs, self.normalize, self.label = inputs, normalize, label
        self.has_batch_norms = form.norm == "batch"
        widths = [sum(dims[name] for name in side.features) + len(side.numbers) for side in inputs]
        self.user, self.item = (MLP(width, hidden, activate_last=False, form=form) for width in widths)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        user_BW, item_BW = (self._gather(side, batch, vectors) for side in self.inputs)
        has_statistics = self.training and self.has_batch_norms
        is_positive_B = positive_weights(batch, self.label) > 0 if has_statistics else None
        vectors_B2D = torch.stack([self.user(user_BW, is_positive_B), self.item(item_BW, is_positive_B)], dim=1)
        return functional.normalize(vectors_B2D, dim=2) if self.normalize else vectors_B2D

    def _gather(self, side: TowerInputs, batch: Batch, vectors: Vectors) -> Tensor:
        """The columns of a tower's input."""
        columns = [vectors[name] for name in side.features]
        return torch.cat([*columns, *(batch.numbers[:, i : i + 1].to(columns[0].dtype) for i in side.numbers)], dim=1)


def make_two_tower(
    source: Any,
    sparse: EmbeddingBags,
    user: Sequence[str],
    item: Sequence[str],
    hidden: Sequence[int],
    spec: SoftmaxSpec,
    form: MLPForm = PLAIN,
) -> TwoTower:
    """Two towers over a source's features and numeric columns, each of which is of `user` or of `item`.

    A source may have `number_names`, the names of its numeric columns, and `id_shares(feature)`, by id its share of the
    training samples.
    """
    numbers = getattr(source, "number_names", tuple(f"number_{index}" for index in range(source.num_dense)))
    kinds = {name: multi_hot for name, _, multi_hot in source.features}
    _check_assignment(user, item, (*kinds, *numbers))
    for key, names in (("user", user), ("item", item)):
        if kinds.get(names[0], True):
            raise UserError(
                f'model.{key} begins with "{names[0]}"; wanted the id of the {key}, a feature with one id per sample'
            )
    sides = [
        TowerInputs(
            tuple(name for name in names if name in kinds),
            tuple(numbers.index(name) for name in names if name not in kinds),
        )
        for names in (user, item)
    ]
    find_shares = getattr(source, "id_shares", None)
    shares = find_shares(item[0]) if spec.correction and find_shares is not None else None
    loss = InBatchSoftmax(
        item[0],
        temperature=spec.temperature,
        groups=spec.groups,
        correction=spec.correction,
        log_shares=None if shares is None else torch.from_numpy(shares).log().float(),
    )
    return TwoTower(sparse, *sides, hidden=hidden, loss=loss, normalize=spec.normalize, form=form)


def _check_assignment(user: Sequence[str], item: Sequence[str], names: Sequence[str]) -> None:
    """Raise unless every feature and numeric column is of one tower."""
    for key, own in (("user", user), ("item", item)):
        if not own:
            raise UserError(f"model.{key} is empty; name the features of the {key}, its id first")
        for name in own:
            if name not in names:
                raise UserError(f'model.{key}: the data have no feature "{name}"{did_you_mean(name, names)}')
    for name in names:
        num = [*user, *item].count(name)
        if num > 1:
            raise UserError(f'feature "{name}" is {num} times in model.user and model.item; name it once')
        if not num:
            raise UserError(f'feature "{name}" is neither in model.user nor in model.item; add it to one of them')
