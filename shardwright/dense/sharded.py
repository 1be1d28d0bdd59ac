"""FSDP/HSDP: sharded parameters, all-gathered just before a block runs and freed right after.

Phases: forward   while a block runs, the next `num_prefetched_blocks` blocks are all-gathered; it is resharded after
                  it has run, except the last block, which the backward pass needs first
        backward  the same in reverse order. Once a block has all its gradients they are reduce-scattered, overlapped
                  with the backward of the block before it, then all-reduced over replicas, overlapped with the rest
        end       a missing gradient counts as zero; it stays None if no rank has one. All collectives are waited for

With gradient accumulation, each micro-batch's gradients are reduce-scattered; the all-reduce over replicas is made
once, over the accumulated gradients. All ranks issue collectives in the same order: all-gathers in block order,
reductions in reverse block order, each as soon as its gradients and all reductions before it are complete. Parameters
of no block, or shared by several blocks, are replicated on all ranks (`ReplicatedModel`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.dense.flat_parameter import FlatParameter
from shardwright.dense.replicated import IssuedWork, ReplicatedModel
from shardwright.dense.weak_hook import weak_hook
from shardwright.errors import UserError

OffloadFunction = Callable[[Tensor], Tensor]
OUTPUT_TYPES = (Tensor, int, float, str, type(None))  # a block may return these, or nested containers of them
NO_OFFLOAD: Mapping[str, OffloadFunction] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ShardingGroups:
    """This rank's groups; `replicas` has the ranks with the same shards, for all-reduces."""

    all_gather: Group
    reduce_scatter: Group
    replicas: Group
    all_ranks: Group


class ShardedBlock:
    """A module with sharded parameters: one flat parameter per dtype, device and `requires_grad`."""

    def __init__(self, name: str, module: nn.Module, flat_parameters: Sequence[FlatParameter]) -> None:
        self.name, self.module, self.flat_parameters = name, module, flat_parameters
        self.trained_flat_parameters = [flat for flat in flat_parameters if flat.requires_grad]
        self.backward_started = False

    @property
    def trained_shards(self) -> list[nn.Parameter]:
        """This rank's rows of the trained parameters."""
        return [shard for flat in self.trained_flat_parameters for shard in flat.shards]

    @property
    def has_all_grads(self) -> bool:
        """Whether all trained parameters have their gradients of this backward pass."""
        return all(not flat.num_missing for flat in self.trained_flat_parameters)

    def unshard(self) -> list[Pending[Tensor]]:
        return [work for flat in self.flat_parameters if (work := flat.unshard()) is not None]

    def wait_for_unshard(self) -> None:
        for flat in self.flat_parameters:
            flat.wait_for_unshard()

    def reshard(self) -> None:
        for flat in self.flat_parameters:
            flat.reshard()


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
        self._reduce_scatters: list[tuple[ShardedBlock, list[Pending[Tensor]]]] = []  # in the order of issue
        self._replica_reductions: list[list[Pending[Any]]] = []  # of the first blocks of `_reduce_scatters`
        self._in_backward = self._any_backward_started = self._overlap = False
        self._is_last_micro_batch = True
        self._grad_scale = 1.0
        self._issued: list[IssuedWork] = []
        self._pending: Pending[None] | None = None  # the reductions of a backward pass
        self._last_name = ""  # of the last of them
        self.trace_wait: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        if bf16_reduce and groups.replicas.size > 1:
            for flat in (flat for block in blocks for flat in block.trained_flat_parameters):
                flat.residual = torch.zeros_like(flat.local_shard)
        for block in self._blocks:
            block.module.register_forward_pre_hook(partial(self._pre_forward, block))
            block.module.register_forward_hook(partial(self._post_forward, block))
            for flat in block.trained_flat_parameters:
                for index, leaf in enumerate(flat.leaves):
                    leaf.register_post_accumulate_grad_hook(
                        weak_hook(self._post_accumulate_grad, block, flat, index=index)
                    )

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
        self._reduce_scatters, self._replica_reductions, self._issued = [], [], []
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

    def end_backward(self) -> Pending[None]:
        """Issue the remaining reductions; after `wait()`, this rank's shards have their gradients.

        An all-reduce over all ranks determines which parameters have a gradient on any rank.
        """
        self._in_backward = self._any_backward_started = False
        for block in self._blocks:
            block.reshard()
        self._reduce_scatter(complete_only=False)
        replicated = self.replicated.end_backward() if self.replicated is not None else None
        has_local_grad = torch.tensor(
            [
                float(has_grad)
                for block in self._blocks
                for flat in block.trained_flat_parameters
                for has_grad in flat.has_step_grad
            ]
        )
        grad_counts = collective.all_reduce(has_local_grad, self._groups.all_ranks) if len(has_local_grad) else None

        def finish() -> None:
            self.continue_reduction()
            if replicated is not None:
                replicated.wait()
            has_grad = grad_counts.wait().gt(0.5).tolist() if grad_counts is not None else []
            for (block, _), works in zip(self._reduce_scatters, self._replica_reductions, strict=True):
                for flat, work in zip(block.trained_flat_parameters, works, strict=True):
                    flat.reduced_grad = work.wait()
            for flat in (flat for block in self._blocks for flat in block.trained_flat_parameters):
                flat.assign_grads(has_grad[: len(flat.leaves)])
                del has_grad[: len(flat.leaves)]
            self._reduce_scatters, self._replica_reductions = [], []  # frees the sums, which are gradients now
            self._pending = None

        self._pending = Pending(finish)
        return self._pending

    def continue_reduction(self) -> None:
        """Issue the all-reduce over replicas of all blocks that have been reduce-scattered."""
        self._reduce_over_replicas(len(self._reduce_scatters))
        if self.replicated is not None:
            self.replicated.continue_reduction()

    def finish_reductions(self) -> None:
        """Wait for the reductions of the last backward pass; the shards then have their gradients."""
        if self._pending is not None:
            with self.trace_wait(self._last_name):
                self._pending.wait()

    def reshard(self) -> None:
        """Reshard all blocks: a block that no backward pass reached is still unsharded."""
        for block in self._blocks:
            block.reshard()

    def pop_issued(self) -> list[IssuedWork]:
        """Return the collectives issued since the last call."""
        issued, self._issued = self._issued, []
        issued += self.replicated.pop_issued() if self.replicated is not None else []
        self._last_name = issued[-1][0] if issued else self._last_name
        return issued

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
            works = issued_block.unshard()
            self._issued += [(f"gather {issued_block.name}", self._groups.all_gather.lane, work) for work in works]
        with self.trace_wait(f"gather {block.name}"):
            block.wait_for_unshard()

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
        for block in self._order[::-1][len(self._reduce_scatters) :]:
            if complete_only and not block.has_all_grads:
                return
            self._reduce_over_replicas(len(self._reduce_scatters))
            works = [flat.reduce_scatter_grad() for flat in block.trained_flat_parameters]
            self._issued += [(f"scatter {block.name}", self._groups.reduce_scatter.lane, work) for work in works]
            self._reduce_scatters.append((block, works))

    def _reduce_over_replicas(self, num_blocks: int) -> None:
        """Issue the all-reduces over replicas of the first `num_blocks` reduce-scattered blocks."""
        group = self._groups.replicas
        for block, works in self._reduce_scatters[len(self._replica_reductions) : num_blocks]:
            reductions: list[Pending[Any]] = []
            for flat, work in zip(block.trained_flat_parameters, works, strict=True):
                if not self._is_last_micro_batch:
                    reductions.append(work)
                    continue
                with self.trace_wait(f"scatter {block.name}"):
                    total = flat.add_earlier_grad(work.wait())
                reductions.append(self._all_reduce(total, flat.residual, group))
            self._replica_reductions.append(reductions)
            if group.size > 1 and self._is_last_micro_batch:
                self._issued += [(f"reduce {block.name}", group.lane, work) for work in reductions]

    def _all_reduce(self, total: Tensor, residual: Tensor | None, group: Group) -> Pending[Any]:
        if residual is None:
            return collective.all_reduce(total, group)
        return collective.all_reduce_bf16(total, group, residual)


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
            if all(blocks_of.get(module) == {name} for module, _ in owners[parameter]):
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
