"""Interval arithmetic: bounds, in float64, of what float32 can compute in any order of summation.

Intervals replace tensors in the formulas of `kernels.reference`; each operation widens its result by a rounding error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.jagged import Jagged
from shardwright.kernels import reference
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.workload import Feature

ROUNDING = 2.0**-24  # relative rounding error of one operation
OPERATION = 3 * ROUNDING  # of the result and of both operands, which may be constants that float32 only approximates
SMALLEST = 2.0**-126


class Interval:
    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low, high
        self.dtype, self.shape = torch.float32, low.shape

    @classmethod
    def exact(cls, x: Tensor) -> "Interval":
        return cls(x.double(), x.double())

    @classmethod
    def widened(cls, low: Tensor, high: Tensor, error: float | Tensor = OPERATION) -> "Interval":
        low, high = low.nan_to_num(-torch.inf, torch.inf, -torch.inf), high.nan_to_num(torch.inf, torch.inf, -torch.inf)
        return cls(low - error * low.abs() - SMALLEST, high + error * high.abs() + SMALLEST)

    def contains(self, x: Tensor) -> bool:
        return bool(((self.low <= x) & (x <= self.high)).all())

    def is_narrow(self, tolerance: float) -> Tensor:
        """Mask of the numbers whose bounds differ by at most `tolerance`, relative to the number or to 1."""
        return self.high - self.low <= tolerance * self.high.abs().clamp(min=1)

    def to(self, dtype: torch.dtype) -> "Interval":
        return self

    def unsqueeze(self, dim: int) -> "Interval":
        return Interval(self.low.unsqueeze(dim), self.high.unsqueeze(dim))

    def __getitem__(self, index: Any) -> "Interval":
        return Interval(self.low[index], self.high[index])

    def __setitem__(self, index: Any, value: "Interval") -> None:
        self.low[index], self.high[index] = value.low, value.high

    def __add__(self, other: "Interval | float") -> "Interval":
        return _combine_ends(torch.add, self, other)

    def __sub__(self, other: "Interval | float") -> "Interval":
        return _combine_ends(torch.sub, self, other)

    def __mul__(self, other: "Interval | float") -> "Interval":
        return _combine_ends(torch.mul, self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: "Interval | float") -> "Interval":
        return self * (1 / other)

    def __rtruediv__(self, other: float) -> "Interval":
        contains_0 = (self.low <= 0) & (self.high >= 0)
        low, high = other / self.high, other / self.low
        return Interval.widened(torch.where(contains_0, -torch.inf, low), torch.where(contains_0, torch.inf, high))

    def __pow__(self, exponent: int) -> "Interval":
        assert exponent == 2
        low, high = self.low**2, self.high**2
        contains_0 = (self.low <= 0) & (self.high >= 0)
        return Interval.widened(torch.minimum(low, high).masked_fill(contains_0, 0), torch.maximum(low, high))

    def sqrt(self) -> "Interval":
        return Interval.widened(self.low.clamp(min=0).sqrt(), self.high.clamp(min=0).sqrt())

    def sum(self, dim: int) -> "Interval":
        """Sum of numbers that are not negative."""
        return Interval.widened(self.low.sum(dim).clamp(min=0), self.high.sum(dim), self.shape[dim] * ROUNDING)

    def __gt__(self, other: float) -> "Condition":
        return Condition(self.low > other, self.high > other)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _: Any, arguments: Sequence[Any], __: Any = None
    ) -> "Interval":
        if function is torch.ones_like:
            return cls.exact(torch.ones(arguments[0].shape))
        assert function is torch.where, function
        condition, if_true, if_false = arguments
        low = torch.where(condition.sure, if_true.low, torch.minimum(if_true.low, if_false.low))
        high = torch.where(condition.sure, if_true.high, torch.maximum(if_true.high, if_false.high))
        never = ~condition.possible
        return cls(torch.where(never, if_false.low, low), torch.where(never, if_false.high, high))


@dataclass
class Condition:
    """Masks: a comparison is true of all numbers of the interval (sure), or of some of them (possible)."""

    sure: Tensor
    possible: Tensor

    def __and__(self, other: "Condition") -> "Condition":
        return Condition(self.sure & other.sure, self.possible & other.possible)

    __torch_function__ = Interval.__torch_function__


def _combine_ends(operation: Callable[[Any, Any], Tensor], first: Interval, second: Interval | float) -> Interval:
    second_ends = (second.low, second.high) if isinstance(second, Interval) else (second,)
    results = torch.stack([operation(a, b) for a in (first.low, first.high) for b in second_ends])
    is_nan = results.isnan().any(0)  # 0 times infinity
    low, high = results.amin(0).masked_fill(is_nan, -torch.inf), results.amax(0).masked_fill(is_nan, torch.inf)
    return Interval.widened(low, high)


def vector_bounds(weight: Interval, ids: Jagged, feature: int, pooling: Any) -> Interval:
    """Bounds of a feature's vectors."""
    values, lengths, id_weights = ids.values.split(ids.lengths.sum(1).tolist())[feature], ids.lengths[feature], None
    if ids.weights is not None:
        id_weights = ids.weights.split(ids.lengths.sum(1).tolist())[feature]
    low, high, magnitude = (
        reference.lookup(rows, values, lengths, id_weights, pooling)
        for rows in (weight.low, weight.high, torch.maximum(weight.low.abs(), weight.high.abs()))
    )
    num_terms = torch.ones_like(values) if pooling == "none" else lengths
    return _sum_bounds(low, high, magnitude, num_terms)


def _sum_bounds(low: Tensor, high: Tensor, magnitude: Tensor, num_terms: Tensor) -> Interval:
    """The error of a sum of n numbers is at most n - 1 roundings of the sum of their magnitudes, in any order; plus
    five more, because each number is multiplied by its id's weight, itself rounded, and by a mean's divisor.
    """
    error = (num_terms + 4).double().unsqueeze(1) * ROUNDING * (1 + 1e-6)
    return Interval(low - error * magnitude - SMALLEST, high + error * magnitude + SMALLEST)


def update_bounds(
    optimizer: SparseOptimizer, tensors: dict[str, Interval], features: Sequence[tuple[Feature, int]], batch: Any
) -> None:
    """One table's optimizer step on its bounds, in place; `features`: those of the table with their numbers;
    `batch`: (ids, gradients, step number)."""
    ids, gradients, step_number = batch
    sizes = ids.lengths.sum(1).tolist()
    rows, terms = [], []
    for feature, number in features:
        id_weights = None if ids.weights is None else ids.weights.split(sizes)[number]
        lengths = ids.lengths[number]
        vector_gradients = gradients[feature.name].double()
        rows.append(ids.values.split(sizes)[number])
        terms.append(reference.id_gradients(vector_gradients, sizes[number], lengths, id_weights, feature.pooling))
    rows_N, terms_ND = torch.cat(rows), torch.cat(terms)
    rows_U, sum_UD = reference.sum_by_row(rows_N, terms_ND)
    _, magnitude_UD = reference.sum_by_row(rows_N, terms_ND.abs())
    counts_U = torch.unique(rows_N, return_counts=True)[1]
    weight, state = tensors["weight"], {name: x for name, x in tensors.items() if name != "weight"}
    sum_bounds = _sum_bounds(sum_UD, sum_UD, magnitude_UD, counts_U)
    reference.update(optimizer, weight, state, (rows_U, sum_bounds), step=step_number)  # pyright: ignore


def run_bounds(case: Any, run: Any) -> tuple[list[dict[str, Interval]], list[dict[str, Interval]]]:
    """Bounds of each step's vectors by feature, and of each table's final weight and state."""
    bags = case.bags()
    tables = [{"weight": bags.weight(table.name).detach(), **bags.state(table.name)} for table in case.tables]
    tensors = [{name: Interval.exact(x) for name, x in table.items()} for table in tables]
    table_of, vectors = case.table_of, []
    for step, (ids, gradients) in enumerate(zip(run.batches, run.gradients, strict=True), start=1):
        features = list(enumerate(case.features))
        weights = [tensors[number]["weight"] for number in table_of]
        vectors.append({feature.name: vector_bounds(weights[f], ids, f, feature.pooling) for f, feature in features})
        for number, bounds in enumerate(tensors):
            of_table = [(feature, f) for f, feature in features if table_of[f] == number]
            update_bounds(case.optimizer, bounds, of_table, (ids, gradients, step))
    return vectors, tensors
