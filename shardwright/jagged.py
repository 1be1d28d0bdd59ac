"""The combined format: the ids of all features of a batch in one piece, with lengths.

Lengths rather than offsets, so that batches are cut, joined and sent without rewriting them. Everything beyond the
fields is a plain function. This file knows no table: whether an id fits its table is the embedding layer's question.

Shape legend: N ids, F features, B samples, D columns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardwright.errors import UserError, did_you_mean

PROBE_SAMPLES = 8  # samples that are read first


@dataclass(frozen=True, slots=True)
class Jagged:
    """Ids of several features over one batch, feature by feature, sample by sample."""

    features: tuple[str, ...]
    values: Tensor  # (N,) int32 or int64
    lengths: Tensor  # (F, B) int32 or int64
    weights: Tensor | None = None  # (N,) one per id

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[1]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Jagged":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Jagged":
        """The same, of what `change` makes of each tensor."""
        weights = None if self.weights is None else change(self.weights)
        return Jagged(self.features, change(self.values), change(self.lengths), weights)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of samples: id features, dense features, labels by name, weights by sample."""

    features: Jagged
    dense: Tensor | None  # (B, any)
    labels: dict[str, Tensor]
    weights: Tensor | None = None  # (B,)

    @property
    def batch_size(self) -> int:
        return self.features.batch_size

    @property
    def numbers(self) -> Tensor:
        """The dense features; (B, 0) where there are none."""
        if self.dense is not None:
            return self.dense
        return self.features.lengths.new_empty(self.batch_size, 0, dtype=torch.float32)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same, of what `change` makes of each tensor."""
        return Batch(
            self.features.map(change),
            None if self.dense is None else change(self.dense),
            {name: change(label) for name, label in self.labels.items()},
            None if self.weights is None else change(self.weights),
        )


@dataclass(frozen=True, slots=True)
class Vectors:
    """What a lookup gives: pooled vectors side by side, and for unpooled features one row per id."""

    features: tuple[str, ...]
    dims: tuple[int, ...]
    pooled_BD: Tensor  # the pooled features' columns, in order
    sequences: dict[str, Tensor]  # unpooled feature -> (ids of the feature, its dim)

    def __getitem__(self, feature: str) -> Tensor:
        if feature in self.sequences:
            return self.sequences[feature]
        if feature not in self.features:
            raise UserError(f'no vectors for feature "{feature}"{did_you_mean(feature, self.features)}')
        at = self.features.index(feature)
        start = sum(self.dims[:at])
        return self.pooled_BD[:, start : start + self.dims[at]]

    def stacked(self) -> Tensor:
        """The pooled vectors as (B, F, D); all dims must be equal."""
        if len(set(self.dims)) != 1:
            raise UserError(f"vectors of different dims {self.dims} do not stack; use the same dim everywhere")
        return self.pooled_BD.unflatten(1, (len(self.dims), self.dims[0]))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.pooled_BD, *self.sequences.values())

    def receive(self, ready: Callable[[], None] | None = None) -> list[Any]:
        """Between forward and backward: have the gradients stay where backward makes them. Torch copies what is part of
        a wider tensor, as below a `cat` all of them are. `ready` is called when each of these vectors has its own.
        Before forward, keep what this returns: torch forgets it where no graph holds it."""
        left = set(range(len(self.tensors())))

        def received(gradients: Sequence[Tensor], tensor: Tensor, at: int) -> tuple[None]:
            tensor.grad = gradients[0]
            left.discard(at)
            if not left and ready is not None:
                ready()
            return (None,)

        nodes = [get_gradient_edge(tensor).node for tensor in self.tensors()]
        for at, (node, tensor) in enumerate(zip(nodes, self.tensors(), strict=True)):
            node.register_prehook(partial(received, tensor=tensor, at=at))
        return nodes

    def gradients(self) -> "Vectors":
        """The gradients these vectors received, zero where the loss did not depend on them."""

        def grad(tensor: Tensor) -> Tensor:
            return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

        sequences = {name: grad(sequence) for name, sequence in self.sequences.items()}
        return Vectors(self.features, self.dims, grad(self.pooled_BD), sequences)


def features_with_gradient(gradients: Vectors) -> frozenset[str]:
    """The features with a nonzero gradient. A few samples suffice for most features; the others are read completely."""
    used = {name for name, rows in gradients.sequences.items() if bool(rows[:PROBE_SAMPLES].any()) or bool(rows.any())}
    ends = list(accumulate(gradients.dims))
    spans = dict(zip(gradients.features, zip([0, *ends], ends, strict=False), strict=True))
    in_few_D = gradients.pooled_BD[:PROBE_SAMPLES].any(0).tolist()
    for name, (start, end) in spans.items():
        if any(in_few_D[start:end]) or bool(gradients.pooled_BD[:, start:end].any()):
            used.add(name)
    return frozenset(used)


def offsets(jagged: Jagged) -> Tensor:
    """(F * B + 1,) where each bag begins; the last entry is the number of ids."""
    flat = jagged.lengths.reshape(-1)
    starts = flat.new_zeros(flat.numel() + 1, dtype=torch.int64)
    torch.cumsum(flat, 0, out=starts[1:])
    return starts


def ids_per_feature(jagged: Jagged) -> list[int]:
    """Number of ids of each feature."""
    return jagged.lengths.sum(1).tolist()


def select(jagged: Jagged, features: Sequence[str]) -> Jagged:
    """Only these features, in this order."""
    for name in features:
        if name not in jagged.features:
            raise UserError(f'the batch has no feature "{name}"{did_you_mean(name, jagged.features)}')
    at = [jagged.features.index(name) for name in features]
    values = jagged.values.split(ids_per_feature(jagged))
    weights = None if jagged.weights is None else jagged.weights.split(ids_per_feature(jagged))
    return Jagged(
        tuple(features),
        _joined([values[i] for i in at], jagged.values),
        jagged.lengths[at],
        None if weights is None else _joined([weights[i] for i in at], weights[0]),
    )


def narrow(jagged: Jagged, start: int, stop: int) -> Jagged:
    """Samples start to stop of every feature, stop excluded."""
    size = jagged.batch_size
    if not 0 <= start <= stop <= size:
        raise UserError(f"samples {start} to {stop} of a batch of {size}; wanted 0 <= start <= stop <= {size}")
    ends = offsets(jagged)
    spans = [slice(int(ends[row * size + start]), int(ends[row * size + stop])) for row in range(len(jagged.features))]
    return Jagged(
        jagged.features,
        _joined([jagged.values[span] for span in spans], jagged.values),
        jagged.lengths[:, start:stop],
        None if jagged.weights is None else _joined([jagged.weights[span] for span in spans], jagged.weights),
    )


def concat(parts: Sequence[Jagged]) -> Jagged:
    """The samples of several batches of the same features, one after the other."""
    if len({part.features for part in parts}) != 1:
        raise UserError(f"batches of different features do not join: {[part.features for part in parts]}")
    split = [part.values.split(ids_per_feature(part)) for part in parts]
    by_feature = [pieces[row] for row in range(len(parts[0].features)) for pieces in split]
    weights = None
    if all(part.weights is not None for part in parts):
        shares = [part.weights.split(ids_per_feature(part)) for part in parts if part.weights is not None]
        weights = torch.cat([pieces[row] for row in range(len(parts[0].features)) for pieces in shares])
    elif any(part.weights is not None for part in parts):
        raise UserError("batches with and without id weights do not join")
    return Jagged(
        parts[0].features,
        _joined(by_feature, parts[0].values),
        torch.cat([part.lengths for part in parts], dim=1),
        weights,
    )


def from_lists(bags: Mapping[str, Sequence[Sequence[int]]]) -> Jagged:
    """{"site": [[3], [], [7, 7]]}: for each feature a list of ids per sample."""
    if len({len(samples) for samples in bags.values()}) > 1:
        sizes = {name: len(samples) for name, samples in bags.items()}
        raise UserError(f"features disagree on the number of samples: {sizes}")
    lengths = [[len(ids) for ids in samples] for samples in bags.values()]
    values = [i for samples in bags.values() for ids in samples for i in ids]
    return Jagged(tuple(bags), torch.tensor(values, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64))


def to_lists(jagged: Jagged) -> dict[str, list[list[int]]]:
    bags = jagged.values.split(jagged.lengths.reshape(-1).tolist())
    size = jagged.batch_size
    return {
        name: [bag.tolist() for bag in bags[row * size : (row + 1) * size]] for row, name in enumerate(jagged.features)
    }


def from_keyed(keyed: Any) -> Jagged:
    """From torchrec's KeyedJaggedTensor, or anything with its keys(), values(), lengths() and weights_or_none().

    All features need the same number of samples: a variable batch per feature is an error.
    """
    names, lengths = tuple(keyed.keys()), keyed.lengths()
    strides = keyed.stride_per_key() if hasattr(keyed, "stride_per_key") else []
    if len(set(strides)) > 1 or lengths.numel() % max(1, len(names)):
        sizes = ", ".join(f"{name} {size}" for name, size in zip(names, strides, strict=False))
        raise UserError(
            f"a KeyedJaggedTensor with a variable batch per feature ({sizes or f'{lengths.numel()} lengths'} for "
            f"{len(names)} features) has no common batch size: expand it with its inverse indices before from_keyed"
        )
    if getattr(keyed, "inverse_indices_or_none", lambda: None)() is not None:
        raise UserError(
            "a KeyedJaggedTensor with inverse indices stands for more samples than it has lengths: "
            "expand it with its inverse indices before from_keyed"
        )
    return Jagged(names, keyed.values(), lengths.view(len(names), -1), keyed.weights_or_none())


def to_keyed(jagged: Jagged, keyed: Any) -> Any:
    """To torchrec's form; `keyed` is its class: to_keyed(jagged, KeyedJaggedTensor)."""
    lengths = jagged.lengths.reshape(-1)
    return keyed(keys=list(jagged.features), values=jagged.values, lengths=lengths, weights=jagged.weights)


def from_nested(bags: Mapping[str, Any]) -> Jagged:
    """From one torch.nested tensor (jagged layout) of ids per feature."""
    parts = [_without_holes(bag) for bag in bags.values()]
    return Jagged(tuple(bags), torch.cat([values for values, _ in parts]), torch.stack([sizes for _, sizes in parts]))


def _without_holes(bag: Any) -> tuple[Tensor, Tensor]:
    """The ids of a nested tensor and how many each sample has; a narrowed one skips some of its storage."""
    if bag.lengths() is None and int(bag.offsets()[0]) == 0 and int(bag.offsets()[-1]) == bag.values().numel():
        return bag.values(), bag.offsets().diff()
    samples = bag.unbind()
    return torch.cat(samples), torch.tensor([ids.numel() for ids in samples])


def to_nested(jagged: Jagged) -> dict[str, Tensor]:
    """To one torch.nested tensor (jagged layout) of ids per feature."""
    values = jagged.values.split(ids_per_feature(jagged))
    starts = torch.nn.functional.pad(jagged.lengths.cumsum(1), (1, 0))
    return {
        name: torch.nested.nested_tensor_from_jagged(values[row], starts[row])
        for row, name in enumerate(jagged.features)
    }


def check_batch(batch: Batch, *, allow_zero_weights: bool = False) -> None:
    """Refuse what no model can train on: lengths that do not fit, numbers that are not finite.

    Of a `share` of a batch all samples may have weight 0.
    """
    jagged = batch.features
    if jagged.lengths.dim() != 2 or jagged.lengths.shape[0] != len(jagged.features):
        wanted = f"({len(jagged.features)} features, batch)"
        raise UserError(f"lengths have shape {tuple(jagged.lengths.shape)}; wanted {wanted}")
    if jagged.lengths.numel() and int(jagged.lengths.min()) < 0:
        feature, sample = (jagged.lengths < 0).nonzero()[0].tolist()
        length = int(jagged.lengths[feature, sample])
        raise UserError(f'feature "{jagged.features[feature]}", sample {sample}: negative length {length}')
    total = int(jagged.lengths.sum())
    if total != jagged.values.numel():
        raise UserError(f"lengths add up to {total}, but the batch holds {jagged.values.numel()} ids")
    if jagged.weights is not None:
        _check_id_weights(jagged.weights, jagged.values)
    columns = {"dense features": batch.dense, "sample weights": batch.weights}
    columns |= {f'label "{name}"': label for name, label in batch.labels.items()}
    for name, column in columns.items():
        if column is not None:
            _check_column(name, column, batch.batch_size)
    if batch.weights is not None and batch.batch_size:
        if float(batch.weights.min()) < 0:
            raise UserError(
                f"sample weights: sample {int(batch.weights.argmin())} has a negative one; wanted 0 or more"
            )
        if float(batch.weights.sum()) == 0 and not allow_zero_weights:
            raise UserError("sample weights: all are 0, so the batch has no loss; drop such samples")


def _check_id_weights(weights: Tensor, values: Tensor) -> None:
    if weights.shape != values.shape:
        raise UserError(f"{weights.numel()} id weights for {values.numel()} ids; one each is needed")
    if not math.isfinite(weights.sum().item()):
        wrong = (~torch.isfinite(weights)).nonzero()
        if wrong.numel():
            place = int(wrong[0])
            raise UserError(f"id weights: that of id {place} is {weights[place].item()}; clean or drop such ids")


def _check_column(name: str, column: Tensor, batch_size: int) -> None:
    if column.dim() == 0 or column.shape[0] != batch_size:
        raise UserError(f"{name}: shape {tuple(column.shape)} in a batch of {batch_size} samples")
    if not column.is_floating_point() or math.isfinite(column.sum().item()):
        return  # a sum is finite only if all it adds are
    wrong = (~torch.isfinite(column)).nonzero()
    if wrong.numel():
        place = wrong[0].tolist()
        where = f"sample {place[0]}" + (f", column {place[1]}" if len(place) > 1 else "")
        raise UserError(f"{name}: {where} is {column[tuple(place)].item()}; clean or drop such rows")


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else like.new_empty(0)
