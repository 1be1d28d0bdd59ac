"""Between which numbers float32 stays, whatever the order of its sums: intervals in float64 that take the place of
tensors in the formulas of `kernels.reference`, each result wider by what one rounding may do to it.
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

ROUNDING = 2.0**-24  # of one operation, of the number it gives
OPERATION = 3 * ROUNDING  # and of the two numbers it takes, which may be constants that float32 has not exactly
SMALLEST = 2.0**-126


class Interval:
    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low, high
        self.dtype, self.shape = torch.float32, low.shape

    @classmethod
    def at(cls, x: Tensor) -> "Interval":
        return cls(x.double(), x.double())

    @classmethod
    def rounded(cls, low: Tensor, high: Tensor, by: float | Tensor = OPERATION) -> "Interval":
        low, high = low.nan_to_num(-torch.inf, torch.inf, -torch.inf), high.nan_to_num(torch.inf, torch.inf, -torch.inf)
        return cls(low - by * low.abs() - SMALLEST, high + by * high.abs() + SMALLEST)

    def has(self, x: Tensor) -> bool:
        return bool(((self.low <= x) & (x <= self.high)).all())

    def narrow(self, by: float) -> Tensor:
        """Which numbers are known so well, of themselves or of 1."""
        return self.high - self.low <= by * self.high.abs().clamp(min=1)

    def to(self, dtype: torch.dtype) -> "Interval":
        return self

    def unsqueeze(self, dim: int) -> "Interval":
        return Interval(self.low.unsqueeze(dim), self.high.unsqueeze(dim))

    def __getitem__(self, at: Any) -> "Interval":
        return Interval(self.low[at], self.high[at])

    def __setitem__(self, at: Any, value: "Interval") -> None:
        self.low[at], self.high[at] = value.low, value.high

    def __add__(self, other: "Interval | float") -> "Interval":
        return _ends(torch.add, self, other)

    def __sub__(self, other: "Interval | float") -> "Interval":
        return _ends(torch.sub, self, other)

    def __mul__(self, other: "Interval | float") -> "Interval":
        return _ends(torch.mul, self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: "Interval | float") -> "Interval":
        return self * (1 / other)

    def __rtruediv__(self, other: float) -> "Interval":
        through_0 = (self.low <= 0) & (self.high >= 0)
        low, high = other / self.high, other / self.low
        return Interval.rounded(torch.where(through_0, -torch.inf, low), torch.where(through_0, torch.inf, high))

    def __pow__(self, two: int) -> "Interval":
        assert two == 2
        low, high = self.low**2, self.high**2
        through_0 = (self.low <= 0) & (self.high >= 0)
        return Interval.rounded(torch.minimum(low, high).masked_fill(through_0, 0), torch.maximum(low, high))

    def sqrt(self) -> "Interval":
        return Interval.rounded(self.low.clamp(min=0).sqrt(), self.high.clamp(min=0).sqrt())

    def sum(self, dim: int) -> "Interval":
        """Of numbers that are not negative."""
        return Interval.rounded(self.low.sum(dim).clamp(min=0), self.high.sum(dim), self.shape[dim] * ROUNDING)

    def __gt__(self, other: float) -> "Condition":
        return Condition(self.low > other, self.high > other)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _: Any, given: Sequence[Any], __: Any = None
    ) -> "Interval":
        if function is torch.ones_like:
            return cls.at(torch.ones(given[0].shape))
        assert function is torch.where, function
        condition, one, other = given
        low = torch.where(condition.sure, one.low, torch.minimum(one.low, other.low))
        high = torch.where(condition.sure, one.high, torch.maximum(one.high, other.high))
        never = ~condition.possible
        return cls(torch.where(never, other.low, low), torch.where(never, other.high, high))


@dataclass
class Condition:
    """What is true of all numbers between, and of some."""

    sure: Tensor
    possible: Tensor

    def __and__(self, other: "Condition") -> "Condition":
        return Condition(self.sure & other.sure, self.possible & other.possible)

    __torch_function__ = Interval.__torch_function__


def _ends(do: Callable[[Any, Any], Tensor], one: Interval, other: Interval | float) -> Interval:
    others = (other.low, other.high) if isinstance(other, Interval) else (other,)
    found = torch.stack([do(a, b) for a in (one.low, one.high) for b in others])
    wrong = found.isnan().any(0)  # 0 times what has no end
    low, high = found.amin(0).masked_fill(wrong, -torch.inf), found.amax(0).masked_fill(wrong, torch.inf)
    return Interval.rounded(low, high)


def pooled(weight: Interval, ids: Jagged, feature: int, pooling: Any) -> Interval:
    """A feature's vectors."""
    values, lengths, by = ids.values.split(ids.lengths.sum(1).tolist())[feature], ids.lengths[feature], None
    if ids.weights is not None:
        by = ids.weights.split(ids.lengths.sum(1).tolist())[feature]
    low, high, size = (
        reference.lookup(one, values, lengths, by, pooling)
        for one in (weight.low, weight.high, torch.maximum(weight.low.abs(), weight.high.abs()))
    )
    terms = torch.ones_like(values) if pooling == "none" else lengths
    return _summed(low, high, size, terms)


def _summed(low: Tensor, high: Tensor, size: Tensor, terms: Tensor) -> Interval:
    """A sum of n numbers is off by n - 1 roundings of the sum of their magnitudes, in any order; and by five more, as
    each is multiplied by its id's weight, itself rounded, and by what a mean divides by.
    """
    by = (terms + 4).double().unsqueeze(1) * ROUNDING * (1 + 1e-6)
    return Interval(low - by * size - SMALLEST, high + by * size + SMALLEST)


def step(
    optimizer: SparseOptimizer, tensors: dict[str, Interval], read: Sequence[tuple[Feature, int]], numbers: Any
) -> None:
    """One table's optimizer step; `read`: the features that read it and their numbers."""
    ids, gradients, at = numbers
    sizes = ids.lengths.sum(1).tolist()
    rows, terms = [], []
    for feature, number in read:
        by = None if ids.weights is None else ids.weights.split(sizes)[number]
        lengths = ids.lengths[number]
        given = gradients[feature.name].double()
        rows.append(ids.values.split(sizes)[number])
        terms.append(reference.id_gradients(given, sizes[number], lengths, by, feature.pooling))
    rows_N, terms_ND = torch.cat(rows), torch.cat(terms)
    rows_U, sum_UD = reference.sum_by_row(rows_N, terms_ND)
    _, size_UD = reference.sum_by_row(rows_N, terms_ND.abs())
    counts_U = torch.unique(rows_N, return_counts=True)[1]
    weight, state = tensors["weight"], {name: one for name, one in tensors.items() if name != "weight"}
    summed = _summed(sum_UD, sum_UD, size_UD, counts_U)
    reference.update(optimizer, weight, state, (rows_U, summed), step=at)  # pyright: ignore


def between(case: Any, whole: Any) -> tuple[list[dict[str, Interval]], list[dict[str, Interval]]]:
    """The vectors of each step by feature, and at the end each table's weight and state."""
    bags = case.bags()
    tables = [{"weight": bags.weight(one.name).detach(), **bags.state(one.name)} for one in case.tables]
    tensors = [{name: Interval.at(x) for name, x in one.items()} for one in tables]
    numbers, vectors = case.table_of, []
    for at, (ids, gradients) in enumerate(zip(whole.batches, whole.gradients, strict=True)):
        features = list(enumerate(case.features))
        vectors.append({one.name: pooled(tensors[numbers[f]]["weight"], ids, f, one.pooling) for f, one in features})
        for number, held in enumerate(tensors):
            read = [(one, f) for f, one in features if numbers[f] == number]
            step(case.optimizer, held, read, (ids, gradients, at + 1))
    return vectors, tensors
