"""FSDP/HSDP: sharded parameters, all-gathered just before a block runs and freed right after.

Phases: forward   while a block runs, the next `num_prefetched_blocks` blocks are all-gathered; it is resharded after
                  it has run, except the last block, which the backward pass needs first
        backward  the same in reverse order. Once a block has all its gradients they are reduce-scattered, overlapped
                  with the backward of the block before it, then all-reduced over replicas, overlapped with the rest
        end       a missing gradient counts as zero; it stays None if no rank has one. All collectives are waited for

With gradient accumulation, each micro-batch's gradients are reduce-scattered; the all-reduce over replicas is made
once, over the accumulated gradients. Before a reduce-scatter is issued, the one before it is waited for, also that of
another chunk of a pipeline: a rank holds the whole gradients of two blocks at most. All ranks issue collectives in the
same order: all-gathers in block order, reductions in reverse block order, each as soon as its gradients and all
reductions before it are complete. Parameters of no block, or shared by several blocks, are replicated on all ranks
(`ReplicatedModel`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending, ready
from shardwright.dense.flat_parameter import FlatParameter
from shardwright.dense.replicated import ReplicatedModel
from shardwright.dense.weak_hook import weak_hook
from shardwright.errors import UserError
from shardwright.parameter_shard import shard_of
from shardwright.step.inner import InnerStage, InnerStages
from shardwright.step.slots import InFlight, Slots, accesses, issues

OffloadFunction = Callable[[Tensor], Tensor]
OUTPUT_TYPES = (Tensor, int, float, str, type(None))  # a block may return these, or nested containers of them
NO_OFFLOAD: Mapping[str, OffloadFunction] = MappingProxyType({})


@dataclass(slots=True)
class LastScatter:
    """The reduce-scatters of the block that issued them last."""

    stages: Sequence[InnerStage] = ()

    def replace(self, stages: Sequence[InnerStage]) -> None:
        """Wait for them, which frees the whole gradients; `stages` are the last from now on."""
        for stage in self.stages:
            stage.wait_for_value()
        self.stages = stages


@dataclass(frozen=True, slots=True)
class ShardingGroups:
    """This rank's groups; `replicas` has the ranks with the same shards, for all-reduces."""

    all_gather: Group
    reduce_scatter: Group
    replicas: Group
    all_ranks: Group
    last_scatter: LastScatter = field(default_factory=LastScatter)


class ShardedBlock:
    """A module with sharded parameters: one flat parameter per dtype, device and `requires_grad`.

    `gathers`, `scatters`, `reduces`: the stages that communicate, one for each flat parameter, or for each trained one.
    """

    def __init__(self, name: str, module: nn.Module, flat_parameters: Sequence[FlatParameter]) -> None:
        self.name, self.module, self.flat_parameters = name, module, flat_parameters
        self.trained_flat_parameters = [flat for flat in flat_parameters if flat.requires_grad]
        self.backward_started = False
        self.gathers, self.scatters, self.reduces = list[InnerStage](), list[InnerStage](), list[InnerStage]()

    @property
    def trained_shards(self) -> list[nn.Parameter]:
        """This rank's rows of the trained parameters."""
        return [shard for flat in self.trained_flat_parameters for shard in flat.shards]

    @property
    def has_all_grads(self) -> bool:
        """Whether all trained parameters have their gradients of this backward pass."""
        return all(not flat.num_missing for flat in self.trained_flat_parameters)

    def reshard(self) -> None:
        for flat, gather in zip(self.flat_parameters, self.gathers, strict=True):
            if gather.has_value:
                gather.wait_for_value()
                flat.reshard()
                gather.release()


class ShardedModel:
    """The dense model with sharded blocks; `replicated` has the parameters that are not sharded."""

    def __init__(
        self,
        blocks: Sequence[ShardedBlock],
        groups: ShardingGroups,
        replicated: ReplicatedModel | None,
        *,
        num_prefetched_blocks: int = 1,
        bf16_reduce: bool = False,
    ) -> None:
        """With `bf16_reduce`, all-reduces over replicas are in bf16, with error feedback."""
        self._blocks, self._groups = list(blocks), groups
        self.replicated, self._num_prefetched_blocks = replicated, num_prefetched_blocks
        self._order = list(self._blocks)  # in which they run forward
        self._forward_blocks: list[ShardedBlock] = []  # run since the last backward pass
        self._scattered: list[ShardedBlock] = []  # in the order of issue
        self._in_backward = self._any_backward_started = self._overlap = self._is_reducing = False
        self._is_last_micro_batch = True
        self._grad_scale = 1.0
        self.stages = replicated.stages if replicated is not None else InnerStages()
        if bf16_reduce and groups.replicas.size > 1:
            for flat in (flat for block in blocks for flat in block.trained_flat_parameters):
                flat.residual = torch.zeros_like(flat.local_shard)
        for block in self._blocks:
            self._bind_stages(block)
            block.module.register_forward_pre_hook(partial(self._pre_forward, block))
            block.module.register_forward_hook(partial(self._post_forward, block))
            for flat in block.trained_flat_parameters:
                for index, leaf in enumerate(flat.leaves):
                    leaf.register_post_accumulate_grad_hook(
                        weak_hook(self._post_accumulate_grad, block, flat, index=index)
                    )
        self._count = self.stages.bind("backward", groups.all_ranks.lane, self._count_grads)

    @property
    def in_backward(self) -> bool:
        """Whether this is between `begin_backward` and `end_backward`."""
        return self._in_backward

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The unsharded parameters, which are the leaves that autograd sees."""
        sharded = [leaf for block in self._blocks for flat in block.trained_flat_parameters for leaf in flat.leaves]
        return sharded + (self.replicated.leaves if self.replicated is not None else [])

    @property
    def residuals(self) -> list[Tensor]:
        """Error feedback residuals: the rounding errors that the next all-reduces add."""
        sharded = [
            flat.residual
            for block in self._blocks
            for flat in block.trained_flat_parameters
            if flat.residual is not None
        ]
        return sharded + (self.replicated.residuals if self.replicated is not None else [])

    def begin_backward(self, *, overlap: bool, grad_scale: float = 1.0, is_last_micro_batch: bool = True) -> None:
        """Prepare a backward pass, whose gradients are multiplied by `grad_scale`.

        With `overlap`, gradients are reduced while the backward pass runs. Replicas all-reduce only in the last
        micro-batch of a step.
        """
        self.finish_reductions()
        if self._scattered:  # by a backward pass that failed
            self._release_grads()
        self._in_backward, self._any_backward_started = True, False
        self._overlap, self._grad_scale, self._is_last_micro_batch = overlap, grad_scale, is_last_micro_batch
        self._order = [block for block in self._order if block not in self._forward_blocks] + self._forward_blocks
        self._forward_blocks = []
        for block in self._blocks:
            block.backward_started = False
            for flat in block.trained_flat_parameters:
                flat.clear()
        if self.replicated is not None:
            self.replicated.begin_backward(
                overlap=overlap, grad_scale=grad_scale, is_last_micro_batch=is_last_micro_batch
            )

    def end_backward(self) -> None:
        """Issue the remaining reductions."""
        self._in_backward = self._any_backward_started = False
        self.reshard()
        self._reduce_scatter(complete_only=False)
        if self.replicated is not None:
            self.replicated.end_backward()
        self.stages.run(self._count)
        self._is_reducing = True

    def continue_reduction(self) -> None:
        """Issue the all-reduce over replicas of all blocks that have been reduce-scattered."""
        self._reduce_over_replicas()
        if self.replicated is not None:
            self.replicated.continue_reduction()

    def finish_reductions(self) -> None:
        """Wait for the reductions of the last backward pass; this rank's shards then have their gradients."""
        if self._is_reducing:
            self.continue_reduction()
            if self.replicated is not None:
                self.replicated.finish_reductions()
            self._assign_grads()
            self._release_grads()  # frees the sums, which are gradients now
            self._is_reducing = False

    def reshard(self) -> None:
        """Reshard all blocks: a block that no backward pass reached is still unsharded."""
        for block in self._blocks:
            block.reshard()

    def _pre_forward(self, block: ShardedBlock, *_: Any) -> None:
        if self._any_backward_started:  # activation checkpointing runs the forward again
            self._unshard(block)
            return
        if torch.is_grad_enabled() and block not in self._forward_blocks:
            self._forward_blocks.append(block)
        self._unshard(block, self._blocks_to_prefetch(self._order, block))

    def _post_forward(self, block: ShardedBlock, _: nn.Module, __: Any, output: Any) -> None:
        if self._any_backward_started:
            return
        values = tree_leaves(output)
        tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        if torch.is_grad_enabled() and (invalid := [value for value in values if not isinstance(value, OUTPUT_TYPES)]):
            raise UserError(
                f'sharded block "{block.name}" returned a {type(invalid[0]).__name__}; the start of its backward pass '
                "is detected only on tensors: return tensors, or tuples, lists or dicts of them"
            )
        if not tensors or block is not self._order[-1]:
            block.reshard()
        for tensor in tensors:
            tensor.register_hook(partial(self._pre_backward, block))

    def _pre_backward(self, block: ShardedBlock, _: Tensor) -> None:
        """Gradient hook of a block's outputs: unshard the block before its backward."""
        self._any_backward_started = True
        if not block.backward_started:
            block.backward_started = True
            self._unshard(block, self._blocks_to_prefetch(self._order[::-1], block))

    def _blocks_to_prefetch(self, order: Sequence[ShardedBlock], block: ShardedBlock) -> Sequence[ShardedBlock]:
        start = order.index(block) + 1
        return order[start : start + self._num_prefetched_blocks]

    def _unshard(self, block: ShardedBlock, prefetched: Sequence[ShardedBlock] = ()) -> None:
        """Issue the all-gathers of this block and of those to prefetch; wait for this block's."""
        for issued_block in (block, *prefetched):
            self.stages.run(*issued_block.gathers)
        for gather in block.gathers:
            gather.wait_for_value()

    def _post_accumulate_grad(self, block: ShardedBlock, flat: FlatParameter, index: int) -> None:
        if not self._in_backward:
            raise UserError(
                f'block "{block.name}" is sharded, and this backward pass runs outside of job.run and of a loop over '
                "job.loader: train in one of them"
            )
        flat.copy_grad(index, self._grad_scale)
        if block.has_all_grads:
            block.reshard()
            if self._overlap:
                self._reduce_scatter(complete_only=True)

    def _reduce_scatter(self, *, complete_only: bool) -> None:
        """Issue reduce-scatters in reverse block order; if `complete_only`, stop at an incomplete block."""
        for block in self._order[::-1][len(self._scattered) :]:
            if complete_only and not block.has_all_grads:
                return
            self._reduce_over_replicas()
            self._groups.last_scatter.replace(block.scatters)
            self._scattered.append(block)
            self.stages.run(*block.scatters)

    def _reduce_over_replicas(self) -> None:
        """Issue the all-reduce over replicas of the last reduce-scattered block; those before it are issued already."""
        if self._is_last_micro_batch and self._scattered:
            self.stages.run(*self._scattered[-1].reduces)

    def _assign_grads(self) -> None:
        counts = self._count.wait_for_value()
        has_grad = iter((counts > 0.5).tolist())
        for block in self._blocks:
            sums = block.reduces if self._is_last_micro_batch else block.scatters
            for flat, stage in zip(block.trained_flat_parameters, sums, strict=True):
                flat.assign_grads(stage.wait_for_value(), [*islice(has_grad, len(flat.leaves))])

    def _release_grads(self) -> None:
        self._scattered = []
        for stage in (self._count, *(stage for block in self._blocks for stage in block.scatters + block.reduces)):
            stage.release()

    # Stages

    def _bind_stages(self, block: ShardedBlock) -> None:
        """Make the stages of a block; the names are those of the planner's bodies."""
        groups, bind = self._groups, self.stages.bind
        for number, flat in enumerate(block.flat_parameters):
            whole, scattered, reduced = (f"{block.name}.{number}.{name}" for name in ("whole", "scattered", "reduced"))
            block.gathers.append(bind(f"gather {block.name}", groups.all_gather.lane, issues(whole, flat.unshard)))
            if flat.requires_grad:
                scatter = issues(scattered, flat.reduce_scatter_grad)
                reduce = issues(reduced, partial(self._all_reduce, flat), (scattered,))
                block.scatters.append(bind(f"scatter {block.name}", groups.reduce_scatter.lane, scatter))
                block.reduces.append(bind(f"reduce {block.name}", groups.replicas.lane, reduce))

    def _all_reduce(self, flat: FlatParameter, scattered: Tensor) -> Pending[Tensor]:
        """All-reduce over the replicas what the micro-batches of a step have accumulated."""
        total, group = flat.add_earlier_grad(scattered), self._groups.replicas
        if group.size == 1:
            return ready(total)
        if flat.residual is None:
            return collective.all_reduce(total, group)
        return collective.all_reduce_bf16(total, group, flat.residual)

    @accesses(writes=("grad.counts",))
    def _count_grads(self, slots: Slots) -> None:
        """Count the ranks that have a gradient of each parameter: an all-reduce over all ranks."""
        flats = [flat for block in self._blocks for flat in block.trained_flat_parameters]
        has_local_grad = torch.tensor([float(has_grad) for flat in flats for has_grad in flat.has_step_grad])
        counts = collective.all_reduce(has_local_grad, self._groups.all_ranks) if flats else ready(has_local_grad)
        slots["grad.counts"] = InFlight("backward", slots.call.stage.lane, counts, is_single_event=False)


def shard_model(
    model: nn.Module,
    names: Sequence[str],
    groups: ShardingGroups,
    offload: Mapping[str, OffloadFunction] = NO_OFFLOAD,
    selected: Sequence[str] = (),
) -> list[ShardedBlock]:
    """Shard the parameters of the blocks `names`; first broadcast the values of rank 0 to all ranks.

    Parameters that a block shares with other blocks, or with modules outside all blocks, stay unsharded. `offload` maps
    blocks to the function that offloads this rank's shard. `selected`: shard only these of `names` in this call.
    """
    is_writer = groups.replicas.index == 0
    blocks = {name: model.get_submodule(name) for name in names}
    blocks_of: dict[nn.Module, set[str]] = {}
    for name, block in blocks.items():
        for module in block.modules():
            blocks_of.setdefault(module, set()).add(name)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, key))
    sharded_blocks = []
    for name in selected or blocks:
        block = blocks[name]
        kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for parameter in block.parameters():
            is_own = all(blocks_of.get(module) == {name} for module, _ in owners[parameter])
            if is_own and shard_of(parameter) is None:  # experts are sharded already
                kind = (parameter.dtype, parameter.device, parameter.requires_grad)
                kinds.setdefault(kind, []).append(parameter)
        with_owners = ([(parameter, owners[parameter]) for parameter in same_kind] for same_kind in kinds.values())
        flat_parameters = [
            FlatParameter(parameters, groups.all_gather, offload.get(name), is_writer, groups.all_ranks)
            for parameters in with_owners
        ]
        if flat_parameters:
            sharded_blocks.append(ShardedBlock(name, block, flat_parameters))
    return sharded_blocks
