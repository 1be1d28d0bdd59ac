"""Flat parameters (FSDP): parameters concatenated in one tensor that is sharded over a group.

The flat tensor has storage from `unshard` to `reshard`, and modules see full parameters once it is all-gathered; at
other times they hold this rank's rows. Shard boundaries lie between rows, nearly even: a shard consists of whole rows
of each parameter and is contiguous in the flat tensor, so that an all-gather needs no padding, and no copy except of
this rank's shard.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from ctypes import c_char
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from shardwright.comm import collective, flat_collectives
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.parameter_shard import ParameterShard

ParameterOwners = Sequence[tuple[nn.Module, str]]  # the modules that have a parameter, and its name in each


class FlatParameter:
    """Parameters of one dtype and device, all trained or all frozen, sharded over `group`.

    `offload` copies this rank's shard to offloaded memory. With `broadcast_group`, the constructor broadcasts the
    values of its first rank.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, ParameterOwners]],
        group: Group,
        offload: Callable[[Tensor], Tensor] | None = None,
        is_writer: bool = True,
        broadcast_group: Group | None = None,
    ) -> None:
        self._is_writer = is_writer
        self._group = group
        tensors = [parameter for parameter, _ in parameters]
        self._owners = [owners for _, owners in parameters]
        self.requires_grad = tensors[0].requires_grad
        boundaries = shard_boundaries([tuple(tensor.shape) for tensor in tensors], group.size)
        self._shard_sizes = [end - start for start, end in pairwise(boundaries)]
        position = flat_collectives.shard_order(group).index(group.index)
        self._local_range = boundaries[position], boundaries[position + 1]
        self._offsets = [*accumulate((tensor.numel() for tensor in tensors), initial=0)]
        with torch.no_grad():
            self._flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            if broadcast_group is not None:
                collective.broadcast(_alias_memory(self._flat), 0, broadcast_group).wait()
            local = self._flat[slice(*self._local_range)].clone()
            self.local_shard = offload(local) if offload is not None else local
            self._offloaded_grad = (
                offload(torch.zeros_like(local)) if offload is not None and self.requires_grad else None
            )
        self.leaves = [self._make_leaf(tensor, start) for tensor, start in zip(tensors, self._offsets, strict=False)]
        self.shards = [self._make_shard(index, tensor) for index, tensor in enumerate(tensors)]
        self._is_unsharded = True
        self._flat_grad: Tensor | None = None
        self.residual: Tensor | None = None  # error feedback residual of this rank's shard
        self.has_grad = [False] * len(tensors)
        self.has_earlier_grad = [False] * len(tensors)
        self.reshard()

    @property
    def num_missing(self) -> int:
        """How many of the parameters have no gradient yet."""
        return self.has_grad.count(False)

    @property
    def has_step_grad(self) -> list[bool]:
        """By parameter: whether this micro-batch or an earlier one of the step gave it a gradient."""
        return [now or before for now, before in zip(self.has_grad, self.has_earlier_grad, strict=True)]

    def unshard(self) -> Pending[None]:
        """Issue the all-gather over the group; from `wait()` on, modules see the full parameters."""
        self._flat.untyped_storage().resize_(len(self._flat) * self._flat.element_size())
        self._flat[slice(*self._local_range)].copy_(self.local_shard)
        flat = _alias_memory(self._flat)
        return flat_collectives.all_gather_flat(flat, self._shard_sizes, self._group).then(self._set_unsharded)

    def _set_unsharded(self, _: Tensor) -> None:
        self._is_unsharded = True
        self._set_module_parameters(self.leaves)

    def reshard(self) -> None:
        """Free the flat tensor; no all-gather may be in flight."""
        if self._is_unsharded:
            self._is_unsharded = False
            self._set_module_parameters(self.shards)
            self._flat.untyped_storage().resize_(0)

    def all_gather_tensors(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """All-gather full tensors from `parts`, shaped like this rank's shards; a blocking collective."""
        local = torch.cat([part.reshape(-1) for part in parts])
        flat = local.new_empty(self._offsets[-1])
        flat[slice(*self._local_range)] = local
        flat_collectives.all_gather_flat(flat, self._shard_sizes, self._group).wait()
        shapes = [leaf.shape for leaf in self.leaves]
        return [flat[a:b].view(shape) for (a, b), shape in zip(pairwise(self._offsets), shapes, strict=True)]

    def clear(self) -> None:
        """Reset the gradients before a backward pass; gradients of earlier micro-batches stay at the shards."""
        self.has_grad = [False] * len(self.leaves)
        self.has_earlier_grad = [shard.grad is not None for shard in self.shards]
        self._flat_grad = None

    def copy_grad(self, index: int, scale: float) -> None:
        """Move the gradient of a leaf, multiplied by `scale`, to the flat gradient."""
        gradient, self.leaves[index].grad = self.leaves[index].grad, None
        assert gradient is not None
        if self._flat_grad is None:
            self._flat_grad = self._flat.new_empty(self._offsets[-1])
        view = self._flat_grad[self._offsets[index] : self._offsets[index + 1]]
        if scale:
            torch.mul(gradient.reshape(-1), scale, out=view)
        else:  # the gradient of an empty batch may be NaN
            view.zero_()
        self.has_grad[index] = True

    def reduce_scatter_grad(self) -> Pending[Tensor]:
        """Issue the reduce-scatter of the flat gradient over the group; missing gradients are zeros."""
        flat_grad, self._flat_grad = self._flat_grad, None
        if flat_grad is None:
            flat_grad = self._flat.new_zeros(self._offsets[-1])
        else:
            for (start, end), has_grad in zip(pairwise(self._offsets), self.has_grad, strict=True):
                if not has_grad:
                    flat_grad[start:end] = 0
        return flat_collectives.reduce_scatter_flat(flat_grad, self._shard_sizes, self._group)

    def add_earlier_grad(self, total: Tensor) -> Tensor:
        """Add the shards' gradients of earlier micro-batches to `total`, in place, and clear them."""
        for shard, view in zip(self.shards, self._split_by_shard(total), strict=True):
            if shard.grad is not None:
                view.add_(shard.grad)
                shard.grad = None
        return total

    def assign_grads(self, total: Tensor, has_grad: Sequence[bool]) -> None:
        """Add the reduced gradient to the gradients of shards of which any rank has a gradient (`has_grad`)."""
        if self._offloaded_grad is not None and not any(shard.grad is not None for shard in self.shards):
            total = self._offloaded_grad.copy_(total)
        for shard, view, is_set in zip(self.shards, self._split_by_shard(total), has_grad, strict=True):
            if is_set:
                shard.grad = view if shard.grad is None else shard.grad.add_(view.to(shard.device))

    def _make_leaf(self, parameter: nn.Parameter, start: int) -> nn.Parameter:
        """The full parameter that autograd sees: it shares the storage of the flat tensor.

        It has its own version counter, so that autograd accepts that the storage is refilled before backward.
        """
        view = parameter.detach().new_empty(0)
        view.set_(self._flat.untyped_storage(), start, parameter.shape, _strides(parameter.shape))
        return nn.Parameter(view, parameter.requires_grad)

    def _make_shard(self, index: int, parameter: nn.Parameter) -> nn.Parameter:
        num_rows, start = parameter.shape[0] if parameter.dim() else 1, self._offsets[index]
        width = parameter.numel() // max(num_rows, 1)
        low, high = (min(max(end - start, 0), parameter.numel()) // max(width, 1) for end in self._local_range)
        values = (
            self.local_shard[start + low * width - self._local_range[0] :][: (high - low) * width]
            if high > low
            else self.local_shard[:0]
        )
        parameter_shard = ParameterShard((low, high), tuple(parameter.shape), self, index, self._is_writer)
        return parameter_shard.mark(nn.Parameter(values.view(parameter_shard.local_shape), parameter.requires_grad))

    def _split_by_shard(self, flat: Tensor) -> list[Tensor]:
        """Views, shaped like the shards, of a flat tensor as long as `local_shard`."""
        offsets = [*accumulate((shard.numel() for shard in self.shards), initial=0)]
        return [flat[a:b].view_as(shard) for (a, b), shard in zip(pairwise(offsets), self.shards, strict=True)]

    def _set_module_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, owners in zip(parameters, self._owners, strict=True):
            for module, name in owners:
                module._parameters[name] = parameter


def shard_boundaries(shapes: Sequence[tuple[int, ...]], num_shards: int) -> list[int]:
    """Offsets of nearly even shards of concatenated tensors of `shapes`, each at the start of a row."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    starts = [*accumulate(sizes, initial=0)]
    boundaries = [0]
    for shard in range(1, num_shards):
        even_offset = starts[-1] * shard / num_shards
        i = min(bisect_right(starts, even_offset) - 1, len(shapes) - 1)
        width = max(sizes[i] // max(shapes[i][0], 1), 1) if shapes[i] else max(sizes[i], 1)
        boundary = min(starts[i] + round((even_offset - starts[i]) / width) * width, starts[i + 1])
        boundaries.append(max(boundaries[-1], boundary))
    return [*boundaries, starts[-1]]


def _alias_memory(x: Tensor) -> Tensor:
    """A tensor on the same memory, for messages: torch cannot resize a storage that NumPy has seen."""
    if x.is_cuda or not len(x):
        return x
    return torch.frombuffer((c_char * (len(x) * x.element_size())).from_address(x.data_ptr()), dtype=x.dtype)


def _strides(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    return (
        [*accumulate((max(size, 1) for size in reversed(shape[1:])), lambda a, b: a * b, initial=1)][::-1]
        if shape
        else []
    )
