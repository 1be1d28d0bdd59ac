"""Data parallelism (DDP): replicated parameters, gradients all-reduced in buckets during backward.

Each gradient is copied into its bucket as soon as it is accumulated. All ranks all-reduce buckets in the same order,
each as soon as it and all before it are complete. A missing gradient counts as zero; it stays None if no rank has one.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.dense.weak_hook import weak_hook
from shardwright.spec.wire import GRADIENT_BUCKET_BYTES, MAX_RECEIVED_BUCKETS
from shardwright.step.inner import InnerStage, InnerStages
from shardwright.step.slots import issues


class Bucket:
    """Flat gradients of some parameters, followed by one value per parameter: whether it has a gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group, error_feedback: bool) -> None:
        self.parameters, self.group = list(parameters), group
        sizes = [parameter.numel() for parameter in parameters]
        like = parameters[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=like.dtype, device=like.device)
        *views, self.has_grad = self.flat.split([*sizes, len(sizes)])
        self.views = [view.view_as(parameter) for view, parameter in zip(views, parameters, strict=True)]
        self.residual = torch.zeros_like(self.flat) if error_feedback else None
        self.num_missing = len(sizes)
        self.phases: list[InnerStage] = []  # of its all-reduce

    def clear(self) -> None:
        self.num_missing = len(self.parameters)
        self.flat.zero_()

    def copy_grad(self, index: int, scale: float) -> None:
        gradient = self.parameters[index].grad
        assert gradient is not None
        if scale == 1.0:
            self.views[index].copy_(gradient)
        elif scale:  # with 0 the bucket stays zero: the gradient of an empty batch may be NaN
            torch.mul(gradient, scale, out=self.views[index])
        self.has_grad[index] = 1
        self.num_missing -= 1

    def copy_remaining_grads(self, scale: float) -> None:
        """Copy gradients of earlier micro-batches that this backward pass did not add to."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and not self.has_grad[index]:
                self.copy_grad(index, scale)

    def assign_grads(self) -> None:
        has_grad = (self.has_grad > 0.5).tolist()
        for parameter, view, is_set in zip(self.parameters, self.views, has_grad, strict=True):
            parameter.grad = view if is_set else None


class ReplicatedModel:
    """Replicated dense parameters; the constructor broadcasts the values of the first rank that has them.

    With `bf16_reduce`, all-reduces are in bf16, with error feedback.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        *,
        bf16_reduce: bool = False,
        stage_of: Callable[[nn.Parameter], str] = lambda _: "reduce",
        group_of: Callable[[nn.Parameter], Group | None] = lambda _: None,
    ) -> None:
        """`stage_of`: the name of the plan's stage that reduces a parameter's gradient. `group_of`: the ranks with
        replicas of a parameter; None: those of `group`."""
        self.stages = InnerStages()
        self._buckets = list[Bucket]()
        for number, bucket_parameters in enumerate(split_into_buckets(parameters, group_of=group_of)):
            bucket = Bucket(bucket_parameters, group_of(bucket_parameters[0]) or group, bf16_reduce)
            bucket.phases = self._bind_stages(bucket, stage_of(bucket_parameters[-1]), f"bucket.{number}")
            self._buckets.append(bucket)
        self._num_issued = 0
        self._is_reducing = self._overlap = False
        self._grad_scale = 1.0
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(weak_hook(self._post_accumulate_grad, bucket, index=index))
            broadcast_values(reversed(bucket.parameters), bucket.group)

    @property
    def residuals(self) -> list[Tensor]:
        """Error feedback residuals by bucket: the rounding errors that the next all-reduce adds."""
        return [bucket.residual for bucket in self._buckets if bucket.residual is not None]

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The parameters, which are the leaves that autograd sees."""
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    def begin_backward(self, *, overlap: bool, grad_scale: float = 1.0, is_last_micro_batch: bool = True) -> None:
        """Prepare a backward pass, whose gradients are multiplied by `grad_scale`.

        With `overlap`, buckets are all-reduced while the backward pass runs. Before the last micro-batch of a step,
        gradients only accumulate on each rank.
        """
        self._release()
        self._is_reducing, self._overlap, self._grad_scale = is_last_micro_batch, overlap, grad_scale
        for bucket in self._buckets:
            bucket.clear()

    def end_backward(self) -> None:
        """Issue the remaining buckets; before the last micro-batch of a step, do nothing."""
        if not self._is_reducing:
            return
        self._is_reducing = False
        for bucket in self._buckets[self._num_issued :]:
            bucket.copy_remaining_grads(self._grad_scale)
        self._issue_buckets(complete_only=False)

    def continue_reduction(self) -> None:
        """Issue the second phase of bf16 all-reduces, so that it overlaps with what runs until `finish_reductions`."""
        for bucket in self._buckets[: self._num_issued]:
            self.stages.run(*bucket.phases)

    def finish_reductions(self) -> None:
        """Wait for the reductions of the last backward pass; gradients are then the sums over all ranks."""
        self.continue_reduction()
        for bucket in self._buckets[: self._num_issued]:
            bucket.phases[-1].wait_for_value()
            bucket.assign_grads()
        self._release()

    def _post_accumulate_grad(self, bucket: Bucket, index: int) -> None:
        if self._is_reducing:
            bucket.copy_grad(index, self._grad_scale)
            if self._overlap and not bucket.num_missing:
                self._issue_buckets(complete_only=True)

    def _issue_buckets(self, *, complete_only: bool) -> None:
        for bucket in self._buckets[self._num_issued :]:
            if complete_only and bucket.num_missing:
                return
            if bucket.flat.device.type == "cpu":
                self._free_received()
            self.stages.run(bucket.phases[0])
            self._num_issued += 1

    def _free_received(self) -> None:
        """Free what all-reduces have received from all ranks; wait if too many of this host's have not: by then this
        rank is far ahead of another."""
        in_flight = list[InnerStage]()
        for bucket in self._buckets[: self._num_issued]:
            phase = bucket.phases[-1]
            phase.take_if_ended()
            if phase.in_flight and bucket.group.shares_memory:
                in_flight.append(phase)
        if len(in_flight) >= MAX_RECEIVED_BUCKETS:
            in_flight[0].wait_for_value()

    def _release(self) -> None:
        self._num_issued = 0
        for bucket in self._buckets:
            for phase in bucket.phases:
                phase.release()

    def _bind_stages(self, bucket: Bucket, name: str, slot: str) -> list[InnerStage]:
        bind, group, lane = self.stages.bind, bucket.group, bucket.group.lane
        if bucket.residual is None:
            return [bind(name, lane, issues(slot, partial(collective.all_reduce, bucket.flat, group)))]
        send = partial(collective.two_phase_all_reduce_bf16, bucket.flat, group, bucket.residual)
        phase = f"{slot}.second"
        return [bind(name, lane, issues(phase, send)), bind(name, lane, issues(slot, lambda second: second, (phase,)))]


@torch.no_grad()
def broadcast_values(tensors: Iterable[Tensor], group: Group) -> None:
    """Broadcast rank 0's values of these tensors, of any dtype: one blocking broadcast per tensor."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        if values.numel():
            collective.broadcast(values.view(-1).view(torch.uint8), 0, group).wait()
            tensor.copy_(values)


def split_into_buckets(
    parameters: Sequence[nn.Parameter],
    bucket_bytes: int = GRADIENT_BUCKET_BYTES,
    group_of: Callable[[nn.Parameter], Group | None] = lambda _: None,
) -> list[list[nn.Parameter]]:
    """Group parameters in the order of the backward pass, last first; one dtype, device and group per bucket."""
    buckets: list[list[nn.Parameter]] = []
    free_bytes, last_kind = 0, None
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        kind = (parameter.dtype, parameter.device, id(group_of(parameter)))
        if not buckets or size > free_bytes or kind != last_kind:
            buckets.append([])
            last_kind = kind
            free_bytes = bucket_bytes
        buckets[-1].append(parameter)
        free_bytes -= size
    return buckets
