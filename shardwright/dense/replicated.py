"""Data parallelism: parameters alike on all ranks, their gradients summed in buckets beside the backward pass.

Phases: a gradient that is ready goes into its bucket; buckets are issued in one order on every rank, each as soon as it
and all before it are whole; what a rank has no gradient for counts as zero, and as absent only where no rank has one.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending

BUCKET_BYTES = 1 << 20
IssuedWork = tuple[str, str, Pending[Any]]  # name, lane, work


class Bucket:
    """Some parameters' gradients in one piece, behind them for each whether there is one."""

    def __init__(self, parameters: Sequence[nn.Parameter], error_feedback: bool) -> None:
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        like = parameters[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=like.dtype, device=like.device)
        *views, self.has_grad = self.flat.split([*sizes, len(sizes)])
        self.views = [view.view_as(parameter) for view, parameter in zip(views, parameters, strict=True)]
        self.residual = torch.zeros_like(self.flat) if error_feedback else None
        self.num_missing = len(sizes)

    def clear(self) -> None:
        self.num_missing = len(self.parameters)
        self.flat.zero_()

    def copy_grad(self, index: int, scale: float) -> None:
        gradient = self.parameters[index].grad
        assert gradient is not None
        if scale == 1.0:
            self.views[index].copy_(gradient)
        elif scale:  # of no samples the gradient may be no number
            torch.mul(gradient, scale, out=self.views[index])
        self.has_grad[index] = 1
        self.num_missing -= 1

    def copy_remaining_grads(self, scale: float) -> None:
        """Gradients that were there before this backward pass, and to which it added nothing."""
        for at, parameter in enumerate(self.parameters):
            if parameter.grad is not None and not self.has_grad[at]:
                self.copy_grad(at, scale)

    def assign_grads(self) -> None:
        given = (self.has_grad > 0.5).tolist()
        for parameter, view, found in zip(self.parameters, self.views, given, strict=True):
            parameter.grad = view if found else None


class ReplicatedModel:
    """The dense parameters of a job; `rounded`: gradients travel in bf16, what rounding takes is added later."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group, *, bf16_reduce: bool = False) -> None:
        self._group, self._rounded = group, bf16_reduce
        self._buckets = [Bucket(one, bf16_reduce) for one in split_into_buckets(parameters)]
        self._pending: list[Pending[Any]] = []
        self._second: list[Pending[Tensor]] = []
        self._issued: list[IssuedWork] = []
        self._running = self._beside = False
        self._share = 1.0
        for bucket in self._buckets:
            for at, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket, at))
        broadcast_values(parameters, group)

    @property
    def residuals(self) -> list[Tensor]:
        """Of each bucket what rounding took, to be added to the next sum."""
        return [bucket.residual for bucket in self._buckets if bucket.residual is not None]

    @property
    def leaves(self) -> list[nn.Parameter]:
        """What autograd sees of the parameters."""
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    def begin_backward(self, *, overlap: bool, grad_scale: float = 1.0, is_last_micro_batch: bool = True) -> None:
        """Before a backward pass; `beside`: issue buckets while it runs; what it makes counts times `share`. Until the
        `last` of a step gradients add up on each rank."""
        self._pending, self._second, self._issued = [], [], []
        self._running, self._beside, self._share = is_last_micro_batch, overlap, grad_scale
        for bucket in self._buckets:
            bucket.clear()

    def end_backward(self) -> Pending[None]:
        """After it. Gradients are those of all ranks when this has been waited for."""
        if not self._running:
            return Pending(lambda: None)
        self._running = False
        for bucket in self._buckets[len(self._pending) :]:
            bucket.copy_remaining_grads(self._share)
        self._issue(whole_only=False)

        def summed() -> None:
            self.continue_reduction()
            for bucket, one in zip(self._buckets, self._second, strict=True):
                one.wait()
                bucket.assign_grads()

        return Pending(summed)

    def continue_reduction(self) -> None:
        """What follows the first half of a rounded sum: beside whatever comes before the gradients are needed."""
        for one in self._pending[len(self._second) :]:
            self._second.append(one.wait() if self._rounded else one)

    def pop_issued(self) -> list[IssuedWork]:
        """Since this was asked last."""
        found, self._issued = self._issued, []
        return found

    def _ready(self, bucket: Bucket, at: int, _: Tensor) -> None:
        if self._running:
            bucket.copy_grad(at, self._share)
            if self._beside and not bucket.num_missing:
                self._issue(whole_only=True)

    def _issue(self, *, whole_only: bool) -> None:
        for bucket in self._buckets[len(self._pending) :]:
            if whole_only and bucket.num_missing:
                return
            self._pending.append(self._reduce(bucket))
            self._issued.append(("reduce", self._group.lane, self._pending[-1]))

    def _reduce(self, bucket: Bucket) -> Pending[Any]:
        if self._rounded:
            return collective.two_phase_all_reduce_bf16(bucket.flat, self._group, bucket.residual)
        return collective.all_reduce(bucket.flat, self._group)


@torch.no_grad()
def broadcast_values(tensors: Iterable[Tensor], group: Group) -> None:
    """Broadcast rank 0's values of these tensors, of any dtype: one blocking broadcast per tensor."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        if values.numel():
            collective.broadcast(values.view(-1).view(torch.uint8), 0, group).wait()
            tensor.copy_(values)


def split_into_buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES
) -> list[list[nn.Parameter]]:
    """In the order in which a backward pass comes to them: the last first; one dtype and device in each."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        kind = (parameter.dtype, parameter.device)
        if not found or size > room or kind != (found[-1][0].dtype, found[-1][0].device):
            found.append([])
            room = bucket_bytes
        found[-1].append(parameter)
        room -= size
    return found
