"""Batches of jagged id features, like TorchRec's KeyedJaggedTensor: a tensor of all ids, and lengths.

Lengths instead of offsets, so that batches can be split, concatenated and sent without rewriting them. Operations are
plain functions, not methods. The embedding layer, not this module, checks that ids are within their table.

Shape legend: N ids, F features, B samples, D columns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardwright.errors import UserError, did_you_mean

PROBE_SAMPLES = 8  # samples that are checked first; most features with a gradient have a nonzero there


@dataclass(frozen=True, slots=True)
class Jagged:
    """Ids of the features of a batch, feature by feature, sample by sample."""

    features: tuple[str, ...]
    values: Tensor  # (N,) int32 or int64
    lengths: Tensor  # (F, B) int32 or int64
    weights: Tensor | None = None  # (N,) weight of each id
    # By feature, all ids are known to be from 0 to below it, and lengths to be right: kernels skip checks for which the
    # CPU would have to wait for a GPU. None: not known, as in every Jagged that `replace` makes.
    id_bounds: tuple[int, ...] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[1]

    def on_cpu(self) -> "Jagged":
        """The same ids on the CPU."""
        return self if self.values.device.type == "cpu" else self.to("cpu")

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Jagged":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Jagged":
        """Apply `change`, which may move tensors but not change their numbers, to each tensor."""
        weights = None if self.weights is None else change(self.weights)
        moved = Jagged(self.features, change(self.values), change(self.lengths), weights)
        return moved if self.id_bounds is None else with_id_bounds(moved, self.id_bounds)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of samples: id features, numeric features, labels by name, weights by sample.

    `start`: the place of its first sample in the global batch; None: not known.
    """

    features: Jagged
    dense: Tensor | None  # (B, any)
    labels: dict[str, Tensor]
    weights: Tensor | None = None  # (B,)
    start: int | None = None

    @property
    def batch_size(self) -> int:
        return self.features.batch_size

    @property
    def numbers(self) -> Tensor:
        """The numeric features; (B, 0) if there are none."""
        if self.dense is not None:
            return self.dense
        return self.features.lengths.new_empty(self.batch_size, 0, dtype=torch.float32)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply `change` to each tensor."""
        return Batch(
            self.features.map(change),
            None if self.dense is None else change(self.dense),
            {name: change(label) for name, label in self.labels.items()},
            None if self.weights is None else change(self.weights),
            self.start,
        )

    def narrow(self, start: int, stop: int) -> "Batch":
        """Select samples `start` to `stop` (excluded)."""
        return Batch(
            narrow(self.features, start, stop),
            None if self.dense is None else self.dense[start:stop],
            {name: label[start:stop] for name, label in self.labels.items()},
            None if self.weights is None else self.weights[start:stop],
            None if self.start is None else self.start + start,
        )


@dataclass(frozen=True, slots=True)
class Vectors:
    """Result of a lookup: concatenated pooled vectors, and for unpooled features a row per id."""

    features: tuple[str, ...]
    dims: tuple[int, ...]
    pooled_BD: Tensor  # columns of the pooled features, in the order of `features`
    sequences: dict[str, Tensor]  # by unpooled feature: (number of its ids, dim)

    def __getitem__(self, feature: str) -> Tensor:
        if feature in self.sequences:
            return self.sequences[feature]
        if feature not in self.features:
            raise UserError(f'no vectors for feature "{feature}"{did_you_mean(feature, self.features)}')
        index = self.features.index(feature)
        start = sum(self.dims[:index])
        return self.pooled_BD[:, start : start + self.dims[index]]

    def stacked(self) -> Tensor:
        """Pooled vectors as (B, F, D); all dims must be equal."""
        if len(set(self.dims)) != 1:
            raise UserError(f"vectors of dims {self.dims} cannot be stacked; use the same dim for all features")
        return self.pooled_BD.unflatten(1, (len(self.dims), self.dims[0]))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.pooled_BD, *self.sequences.values())

    def receive(self, ready: Callable[[], None] | None = None) -> list[Any]:
        """Set `.grad` to backward's own tensors, without copies; call between forward and backward.

        By default torch copies a gradient that is a view of a wider tensor, such as the gradients of inputs of `cat`.
        `ready` is called when every tensor has its gradient. Keep the returned graph nodes if no graph holds them yet.
        """
        pending = set(range(len(self.tensors())))

        def keep_gradient(gradients: Sequence[Tensor], tensor: Tensor, index: int) -> tuple[None]:
            tensor.grad = gradients[0]
            pending.discard(index)
            if not pending and ready is not None:
                ready()
            return (None,)

        nodes = [get_gradient_edge(tensor).node for tensor in self.tensors()]
        for index, (node, tensor) in enumerate(zip(nodes, self.tensors(), strict=True)):
            node.register_prehook(partial(keep_gradient, tensor=tensor, index=index))
        return nodes

    def gradients(self) -> "Vectors":
        """Gradients of the vectors; zeros where the loss does not depend on them."""

        def gradient_or_zeros(tensor: Tensor) -> Tensor:
            return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

        sequences = {name: gradient_or_zeros(sequence) for name, sequence in self.sequences.items()}
        return Vectors(self.features, self.dims, gradient_or_zeros(self.pooled_BD), sequences)


def features_with_gradient(gradients: Vectors) -> frozenset[str]:
    """Names of features with a nonzero gradient; reads all samples only where the first are all zero."""
    used = {name for name, rows in gradients.sequences.items() if bool(rows[:PROBE_SAMPLES].any()) or bool(rows.any())}
    ends = list(accumulate(gradients.dims))
    spans = dict(zip(gradients.features, zip([0, *ends], ends, strict=False), strict=True))
    is_nonzero_D = gradients.pooled_BD[:PROBE_SAMPLES].any(0).tolist()
    for name, (start, end) in spans.items():
        if any(is_nonzero_D[start:end]) or bool(gradients.pooled_BD[:, start:end].any()):
            used.add(name)
    return frozenset(used)


def with_id_bounds(jagged: Jagged, bounds: tuple[int, ...]) -> Jagged:
    """The same ids, of which these bounds are known; see `Jagged.id_bounds`."""
    bounded = replace(jagged)
    object.__setattr__(bounded, "id_bounds", bounds)
    return bounded


def find_id_bounds(jagged: Jagged) -> Jagged:
    """The same ids with bounds, found on the CPU, of a batch that passed `check_batch`; none if an id is negative."""
    counts = _in_one_thread(jagged.lengths).sum(1).tolist()
    if counts and counts[0] and set(counts) == {counts[0]}:
        lows, highs = (bounds.tolist() for bounds in torch.aminmax(jagged.values.view(len(counts), -1), dim=1))
    else:
        ranges = [torch.aminmax(part) if len(part) else (0, -1) for part in jagged.values.split(counts)]
        lows, highs = [int(low) for low, _ in ranges], [int(high) for _, high in ranges]
    return jagged if min(lows, default=0) < 0 else with_id_bounds(jagged, tuple(high + 1 for high in highs))


def _in_one_thread(x: Tensor) -> Any:
    """A NumPy view of a tensor on the CPU: to wake threads would take longer than its sum."""
    return x.numpy() if x.device.type == "cpu" else x


def offsets(jagged: Jagged) -> Tensor:
    """Start of each bag in `values`, (F * B + 1,); the last entry is the number of ids."""
    flat = jagged.lengths.reshape(-1)
    starts = flat.new_zeros(flat.numel() + 1, dtype=torch.int64)
    torch.cumsum(flat, 0, out=starts[1:])
    return starts


def ids_per_feature(jagged: Jagged) -> list[int]:
    """Number of ids of each feature."""
    return jagged.lengths.sum(1).tolist()


def select(jagged: Jagged, features: Sequence[str]) -> Jagged:
    """Select `features`, in their order."""
    for name in features:
        if name not in jagged.features:
            raise UserError(f'the batch has no feature "{name}"{did_you_mean(name, jagged.features)}')
    indices = [jagged.features.index(name) for name in features]
    values = jagged.values.split(ids_per_feature(jagged))
    weights = None if jagged.weights is None else jagged.weights.split(ids_per_feature(jagged))
    selected = Jagged(
        tuple(features),
        _concat_or_empty([values[i] for i in indices], jagged.values),
        jagged.lengths[indices],
        None if weights is None else _concat_or_empty([weights[i] for i in indices], weights[0]),
    )
    bounds = jagged.id_bounds
    return selected if bounds is None else with_id_bounds(selected, tuple(bounds[i] for i in indices))


def narrow(jagged: Jagged, start: int, stop: int) -> Jagged:
    """Select samples `start` to `stop` (excluded) of every feature."""
    size = jagged.batch_size
    if not 0 <= start <= stop <= size:
        raise UserError(f"samples {start} to {stop} of a batch of {size}; wanted 0 <= start <= stop <= {size}")
    ends = offsets(jagged)
    spans = [slice(int(ends[row * size + start]), int(ends[row * size + stop])) for row in range(len(jagged.features))]
    return Jagged(
        jagged.features,
        _concat_or_empty([jagged.values[span] for span in spans], jagged.values),
        jagged.lengths[:, start:stop],
        None if jagged.weights is None else _concat_or_empty([jagged.weights[span] for span in spans], jagged.weights),
    )


def concat(parts: Sequence[Jagged]) -> Jagged:
    """Concatenate the samples of several batches that have the same features."""
    if len({part.features for part in parts}) != 1:
        raise UserError(f"batches of different features cannot be concatenated: {[part.features for part in parts]}")
    values_by_part = [part.values.split(ids_per_feature(part)) for part in parts]
    by_feature = [part_values[row] for row in range(len(parts[0].features)) for part_values in values_by_part]
    weights = None
    if all(part.weights is not None for part in parts):
        weights_by_part = [part.weights.split(ids_per_feature(part)) for part in parts if part.weights is not None]
        weights = torch.cat(
            [part_values[row] for row in range(len(parts[0].features)) for part_values in weights_by_part]
        )
    elif any(part.weights is not None for part in parts):
        raise UserError("batches with and without id weights cannot be concatenated")
    joined = Jagged(
        parts[0].features,
        _concat_or_empty(by_feature, parts[0].values),
        torch.cat([part.lengths for part in parts], dim=1),
        weights,
    )
    bounds = [part.id_bounds for part in parts if part.id_bounds is not None]
    return with_id_bounds(joined, tuple(map(max, *bounds, bounds[0]))) if len(bounds) == len(parts) else joined


def from_lists(bags: Mapping[str, Sequence[Sequence[int]]]) -> Jagged:
    """Create from a list of ids per sample for each feature: {"site": [[3], [], [7, 7]]}."""
    if len({len(samples) for samples in bags.values()}) > 1:
        sizes = {name: len(samples) for name, samples in bags.items()}
        raise UserError(f"features have different numbers of samples: {sizes}; give a list of ids for each sample")
    lengths = [[len(ids) for ids in samples] for samples in bags.values()]
    values = [i for samples in bags.values() for ids in samples for i in ids]
    return Jagged(tuple(bags), torch.tensor(values, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64))


def to_lists(jagged: Jagged) -> dict[str, list[list[int]]]:
    """Convert to a list of ids per sample for each feature; the inverse of `from_lists`."""
    bags = jagged.values.split(jagged.lengths.reshape(-1).tolist())
    size = jagged.batch_size
    return {
        name: [bag.tolist() for bag in bags[row * size : (row + 1) * size]] for row, name in enumerate(jagged.features)
    }


def from_keyed(keyed: Any) -> Jagged:
    """Convert a KeyedJaggedTensor of TorchRec, or any object with the same methods.

    The methods are keys(), values(), lengths() and weights_or_none(). All features need the same number of samples: a
    variable batch per feature is an error.
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
            "a KeyedJaggedTensor with inverse indices represents more samples than it has lengths: "
            "expand it with its inverse indices before from_keyed"
        )
    return Jagged(names, keyed.values(), lengths.view(len(names), -1), keyed.weights_or_none())


def to_keyed(jagged: Jagged, keyed: Any) -> Any:
    """Convert to TorchRec's format; `keyed` is its class: to_keyed(jagged, KeyedJaggedTensor)."""
    lengths = jagged.lengths.reshape(-1)
    return keyed(keys=list(jagged.features), values=jagged.values, lengths=lengths, weights=jagged.weights)


def check_batch(batch: Batch, *, allow_zero_weights: bool = False) -> None:
    """Raise UserError for a batch with inconsistent lengths or values that are not finite.

    A label that is NaN is missing: the losses that use it check whether it may be.
    `allow_zero_weights`: accept a batch whose sample weights are all 0, which a local batch may have.
    """
    jagged = batch.features
    if jagged.lengths.dim() != 2 or jagged.lengths.shape[0] != len(jagged.features):
        expected = f"({len(jagged.features)} features, batch)"
        raise UserError(f"lengths have shape {tuple(jagged.lengths.shape)}; wanted {expected}")
    lengths = _in_one_thread(jagged.lengths)
    if jagged.lengths.numel() and int(lengths.min()) < 0:
        feature, sample = (jagged.lengths < 0).nonzero()[0].tolist()
        length = int(jagged.lengths[feature, sample])
        raise UserError(f'feature "{jagged.features[feature]}", sample {sample}: negative length {length}')
    total = int(lengths.sum())
    if total != jagged.values.numel():
        raise UserError(f"lengths add up to {total}, but the batch holds {jagged.values.numel()} ids")
    if jagged.weights is not None:
        _check_id_weights(jagged.weights, jagged.values)
    columns = {"numeric features": batch.dense, "sample weights": batch.weights}
    columns |= {f'label "{name}"': label for name, label in batch.labels.items()}
    for name, column in columns.items():
        if column is not None:
            _check_column(name, column, batch.batch_size, allow_nan=name.startswith("label"))
    if batch.weights is not None and batch.batch_size:
        if float(batch.weights.min()) < 0:
            raise UserError(
                f"sample weights: sample {int(batch.weights.argmin())} has a negative weight; wanted 0 or more"
            )
        if float(batch.weights.sum()) == 0 and not allow_zero_weights:
            raise UserError("sample weights: all are 0, so the batch has no loss; drop samples of weight 0")


def _check_id_weights(weights: Tensor, values: Tensor) -> None:
    if weights.shape != values.shape:
        raise UserError(f"{weights.numel()} id weights for {values.numel()} ids; give a weight for each id")
    if not math.isfinite(weights.sum().item()):
        bad_positions = (~torch.isfinite(weights)).nonzero()
        if bad_positions.numel():
            position = int(bad_positions[0])
            raise UserError(f"id weights: weight {position} is {weights[position].item()}; clean or drop the id")


def _check_column(name: str, column: Tensor, batch_size: int, *, allow_nan: bool) -> None:
    if column.dim() == 0 or column.shape[0] != batch_size:
        raise UserError(f"{name}: shape {tuple(column.shape)} in a batch of {batch_size} samples")
    if not column.is_floating_point() or math.isfinite(column.sum().item()):
        return  # a sum is finite only if all terms are
    bad_positions = (column.isinf() if allow_nan else ~torch.isfinite(column)).nonzero()
    if bad_positions.numel():
        position = bad_positions[0].tolist()
        location = f"sample {position[0]}" + (f", column {position[1]}" if len(position) > 1 else "")
        raise UserError(f"{name}: {location} is {column[tuple(position)].item()}; clean or drop the sample")


def _concat_or_empty(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else like.new_empty(0)
