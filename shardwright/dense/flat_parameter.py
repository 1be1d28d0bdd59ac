"""Parameters in one piece of memory, of which each rank of a group keeps a part: whole rows of each.

Whole they are only from `wait` to `release`: between, the memory of all is given back, and modules hold this rank's
rows. Parts are cut between rows, nearly even, so that they are rectangles of the parameters and lie in the whole as
they are: nothing is copied or padded to bring them together.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from ctypes import c_char
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from shardwright.comm import collective, flat_collectives
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending

ParameterOwners = Sequence[tuple[nn.Module, str]]  # the modules that have a parameter, and what they call it


@dataclass(frozen=True, slots=True, eq=False)
class ParameterShard:
    """Which rows of a whole parameter this rank has, the unit they are in, and whether this rank is to write them."""

    rows: tuple[int, int]
    full_shape: tuple[int, ...]  # of the whole
    flat_parameter: "FlatParameter"
    index: int  # its place there
    is_writer: bool

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (self.rows[1] - self.rows[0], *self.full_shape[1:])

    def matches_shape(self, values: Tensor) -> bool:
        """Whether these go with each of this rank's numbers."""
        return tuple(values.shape) == self.local_shape


class FlatParameter:
    """Parameters of one dtype, all trained or none; `keep` moves what this rank has of them to where it is to lie, and
    among `everyone` the first rank's values are those of all."""

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, ParameterOwners]],
        group: Group,
        offload: Callable[[Tensor], Tensor] | None = None,
        is_writer: bool = True,
        broadcast_group: Group | None = None,
    ) -> None:
        self._writes = is_writer
        self._group = group
        whole = [parameter for parameter, _ in parameters]
        self._places = [places for _, places in parameters]
        self.requires_grad = whole[0].requires_grad
        borders = shard_boundaries([tuple(one.shape) for one in whole], group.size)
        self._sizes = [end - start for start, end in pairwise(borders)]
        at = flat_collectives.shard_order(group).index(group.index)
        self._mine = borders[at], borders[at + 1]
        self._starts = [*accumulate((one.numel() for one in whole), initial=0)]
        with torch.no_grad():
            self._flat = torch.cat([one.detach().reshape(-1) for one in whole])
            if broadcast_group is not None:
                collective.broadcast(_memory(self._flat), 0, broadcast_group).wait()
            own = self._flat[slice(*self._mine)].clone()
            self.local_shard = offload(own) if offload is not None else own
            self._far = (
                offload(torch.zeros_like(own)) if offload is not None and self.requires_grad else None
            )  # its gradient
        self.leaves = [self._leaf(one, start) for one, start in zip(whole, self._starts, strict=False)]
        self.shards = [self._shard(at, one) for at, one in enumerate(whole)]
        self._pending: Pending[Tensor] | None = None
        self._here = True
        self._gradient: Tensor | None = None
        self.reduced_grad: Tensor | None = None
        self.residual: Tensor | None = None  # what rounding took from the sums of this rank's part
        self.has_grad = [False] * len(whole)
        self.has_earlier_grad = [False] * len(whole)
        self.reshard()

    @property
    def num_missing(self) -> int:
        """How many of its parameters have no gradient yet."""
        return self.has_grad.count(False)

    @property
    def has_step_grad(self) -> list[bool]:
        """Which have a gradient, from this batch or from earlier ones of the step."""
        return [now or before for now, before in zip(self.has_grad, self.has_earlier_grad, strict=True)]

    def unshard(self) -> Pending[Tensor] | None:
        """Begin to make it whole; what is under way, if that is new."""
        if self._here or self._pending is not None:
            return None
        self._flat.untyped_storage().resize_(len(self._flat) * self._flat.element_size())
        self._flat[slice(*self._mine)].copy_(self.local_shard)
        self._pending = flat_collectives.all_gather_flat(_memory(self._flat), self._sizes, self._group)
        return self._pending

    def wait_for_unshard(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            self._here = True
            self._put(self.leaves)

    def reshard(self) -> None:
        if self._pending is not None:
            self.wait_for_unshard()
        if self._here:
            self._here = False
            self._put(self.shards)
            self._flat.untyped_storage().resize_(0)

    def all_gather_tensors(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """From something like this rank's rows of each parameter that of all; every rank asks."""
        own = torch.cat([part.reshape(-1) for part in parts])
        flat = own.new_empty(self._starts[-1])
        flat[slice(*self._mine)] = own
        flat_collectives.all_gather_flat(flat, self._sizes, self._group).wait()
        shapes = [leaf.shape for leaf in self.leaves]
        return [flat[a:b].view(shape) for (a, b), shape in zip(pairwise(self._starts), shapes, strict=True)]

    def clear(self) -> None:
        """Before a backward pass."""
        self.has_grad = [False] * len(self.leaves)
        self.has_earlier_grad = [shard.grad is not None for shard in self.shards]
        self._gradient = self.reduced_grad = None

    def copy_grad(self, index: int, scale: float) -> None:
        """The gradient that autograd has left at a leaf, times `share`, to those of the others."""
        gradient, self.leaves[index].grad = self.leaves[index].grad, None
        assert gradient is not None
        if self._gradient is None:
            self._gradient = self._flat.new_empty(self._starts[-1])
        place = self._gradient[self._starts[index] : self._starts[index + 1]]
        if scale:
            torch.mul(gradient.reshape(-1), scale, out=place)
        else:  # of no samples the gradient may be no number
            place.zero_()
        self.has_grad[index] = True

    def reduce_scatter_grad(self) -> Pending[Tensor]:
        """This rank's part of the sum over the group, of what is there."""
        found, self._gradient = self._gradient, None
        if found is None:
            found = self._flat.new_zeros(self._starts[-1])
        else:
            for (start, end), given in zip(pairwise(self._starts), self.has_grad, strict=True):
                if not given:
                    found[start:end] = 0
        return flat_collectives.reduce_scatter_flat(found, self._sizes, self._group)

    def add_earlier_grad(self, total: Tensor) -> Tensor:
        """A sum with what earlier batches of the step have left at this rank's rows, which it takes from there."""
        for shard, view in zip(self.shards, self._views(total), strict=True):
            if shard.grad is not None:
                view.add_(shard.grad)
                shard.grad = None
        return total

    def assign_grads(self, has_grad: Sequence[bool]) -> None:
        """The sum to this rank's rows, beside what they have; `given` says of which any rank had a gradient."""
        total, self.reduced_grad = self.reduced_grad, None
        assert total is not None
        if self._far is not None and not any(one.grad is not None for one in self.shards):
            total = self._far.copy_(total)
        for shard, view, found in zip(self.shards, self._views(total), has_grad, strict=True):
            if found:
                shard.grad = view if shard.grad is None else shard.grad.add_(view.to(shard.device))

    def _leaf(self, parameter: nn.Parameter, start: int) -> nn.Parameter:
        """The whole parameter as autograd sees it: it has no version in common with the memory that is refilled."""
        view = parameter.detach().new_empty(0)
        view.set_(self._flat.untyped_storage(), start, parameter.shape, _strides(parameter.shape))
        return nn.Parameter(view, parameter.requires_grad)

    def _shard(self, at: int, parameter: nn.Parameter) -> nn.Parameter:
        rows, start = parameter.shape[0] if parameter.dim() else 1, self._starts[at]
        width = parameter.numel() // max(rows, 1)
        low, high = (min(max(end - start, 0), parameter.numel()) // max(width, 1) for end in self._mine)
        mine = (
            self.local_shard[start + low * width - self._mine[0] :][: (high - low) * width]
            if high > low
            else self.local_shard[:0]
        )
        told = ParameterShard((low, high), tuple(parameter.shape), self, at, self._writes)
        shard = nn.Parameter(mine.view(told.local_shape), parameter.requires_grad)
        shard.cut = told  # pyright: ignore[reportAttributeAccessIssue]
        return shard

    def _views(self, own: Tensor) -> list[Tensor]:
        """Of something as long as this rank's part what belongs to each of its shards."""
        ends = [*accumulate((shard.numel() for shard in self.shards), initial=0)]
        return [own[a:b].view_as(shard) for (a, b), shard in zip(pairwise(ends), self.shards, strict=True)]

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, places in zip(parameters, self._places, strict=True):
            for module, name in places:
                module._parameters[name] = parameter


def shard_of(parameter: Tensor) -> ParameterShard | None:
    """Which rows of a parameter these are; None: it is whole."""
    return getattr(parameter, "cut", None)


def shard_boundaries(shapes: Sequence[tuple[int, ...]], num_shards: int) -> list[int]:
    """Where parts begin and end in tensors of these shapes one behind the other: between rows, nearly even."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    starts = [*accumulate(sizes, initial=0)]
    found = [0]
    for part in range(1, num_shards):
        even = starts[-1] * part / num_shards
        at = min(bisect_right(starts, even) - 1, len(shapes) - 1)
        width = max(sizes[at] // max(shapes[at][0], 1), 1) if shapes[at] else max(sizes[at], 1)
        found.append(max(found[-1], min(starts[at] + round((even - starts[at]) / width) * width, starts[at + 1])))
    return [*found, starts[-1]]


def _memory(x: Tensor) -> Tensor:
    """The same memory as a tensor of its own: of what NumPy has seen, as messages do, torch never gives memory back."""
    if x.is_cuda or not len(x):
        return x
    return torch.frombuffer((c_char * (len(x) * x.element_size())).from_address(x.data_ptr()), dtype=x.dtype)


def _strides(shape: Sequence[int]) -> list[int]:
    return (
        [*accumulate((max(size, 1) for size in reversed(shape[1:])), lambda a, b: a * b, initial=1)][::-1]
        if shape
        else []
    )
