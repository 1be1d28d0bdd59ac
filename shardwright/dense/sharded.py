"""Parameters cut among ranks, whole only around their block's turn: FSDP, and HSDP where there are replicas of a cut.

Phases: forward   a block's pieces are gathered before its turn, those of `ahead` more blocks beside it; then let go
        backward  the same the other way round; gradients of a block, once all are there, are added up to each rank's
                  piece beside the block before it, and these over the replicas beside all that follows
        end       what has no gradient counts as zero, and as absent where no rank has one; all is waited for

Where several batches make a step, sums over replicas are those of its last batch, of all that is there.
Every rank issues in one order: gathers in that of the blocks, sums in that of the blocks backwards, each as soon as it
and all before it are whole. Parameters of no block, or of several, are whole on all ranks (`Replicated`).
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
from shardwright.errors import UserError

OffloadFunction = Callable[[Tensor], Tensor]
OUTPUT_TYPES = (Tensor, int, float, str, type(None))  # what a block may give, or hold in what it gives
NO_OFFLOAD: Mapping[str, OffloadFunction] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ShardingGroups:
    """Who a rank's pieces are gathered from and added up with, who has the same pieces, and who trains along."""

    all_gather: Group
    reduce_scatter: Group
    replicas: Group
    all_ranks: Group


class ShardedBlock:
    """A module whose parameters are cut, by dtype and by whether they are trained."""

    def __init__(self, name: str, module: nn.Module, flat_parameters: Sequence[FlatParameter]) -> None:
        self.name, self.module, self.flat_parameters = name, module, flat_parameters
        self.trained_flat_parameters = [unit for unit in flat_parameters if unit.requires_grad]
        self.backward_started = False  # backwards

    @property
    def trained_shards(self) -> list[nn.Parameter]:
        """This rank's rows of the parameters that are trained."""
        return [shard for unit in self.trained_flat_parameters for shard in unit.shards]

    @property
    def has_all_grads(self) -> bool:
        """Whether all its gradients are there."""
        return all(not unit.num_missing for unit in self.trained_flat_parameters)

    def unshard(self) -> list[Pending[Tensor]]:
        return [work for unit in self.flat_parameters if (work := unit.unshard()) is not None]

    def wait_for_unshard(self) -> None:
        for unit in self.flat_parameters:
            unit.wait_for_unshard()

    def reshard(self) -> None:
        for unit in self.flat_parameters:
            unit.reshard()


class ShardedModel:
    """The dense part of a job whose blocks are cut; `rest` has what is not."""

    def __init__(
        self,
        blocks: Sequence[ShardedBlock],
        groups: ShardingGroups,
        replicated: ReplicatedModel | None,
        *,
        num_prefetched_blocks: int = 1,
        bf16_reduce: bool = False,
    ) -> None:
        """`rounded`: sums over replicas travel in bf16, what rounding takes is added later."""
        self._blocks, self._ways, self.replicated, self._ahead = list(blocks), groups, replicated, num_prefetched_blocks
        self._order = list(self._blocks)  # in which they have their turns
        self._seen: list[ShardedBlock] = []
        self._under_way: list[tuple[ShardedBlock, list[Pending[Tensor]]]] = []  # sums, in the order of issue
        self._halves: list[list[Pending[Any]]] = []  # of these, over replicas
        self._running = self._back = self._beside = False
        self._last = True
        self._share = 1.0
        self._issued: list[IssuedWork] = []
        self.trace_wait: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        if bf16_reduce and groups.replicas.size > 1:
            for unit in (unit for block in blocks for unit in block.trained_flat_parameters):
                unit.residual = torch.zeros_like(unit.local_shard)
        for block in self._blocks:
            block.module.register_forward_pre_hook(partial(self._before, block))
            block.module.register_forward_hook(partial(self._after, block))
            for unit in block.trained_flat_parameters:
                for at, leaf in enumerate(unit.leaves):
                    leaf.register_post_accumulate_grad_hook(partial(self._ready, block, unit, at))

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._running

    @property
    def leaves(self) -> list[nn.Parameter]:
        """What autograd sees of the parameters."""
        own = [leaf for block in self._blocks for unit in block.trained_flat_parameters for leaf in unit.leaves]
        return own + (self.replicated.leaves if self.replicated is not None else [])

    @property
    def residuals(self) -> list[Tensor]:
        """What rounding took, to be added to the next sums."""
        own = [
            unit.residual
            for block in self._blocks
            for unit in block.trained_flat_parameters
            if unit.residual is not None
        ]
        return own + (self.replicated.residuals if self.replicated is not None else [])

    def begin_backward(self, *, overlap: bool, grad_scale: float = 1.0, is_last_micro_batch: bool = True) -> None:
        """Before a backward pass; `beside`: sum what is whole while it runs; what it makes counts times `share`. Where
        it is not the `last` of a step, nothing is summed over replicas yet."""
        self._under_way, self._halves, self._issued = [], [], []
        self._running, self._beside, self._share, self._last = True, overlap, grad_scale, is_last_micro_batch
        self._back = False
        self._order = [block for block in self._order if block not in self._seen] + self._seen
        self._seen = []
        for block in self._blocks:
            block.backward_started = False
            for unit in block.trained_flat_parameters:
                unit.clear()
        if self.replicated is not None:
            self.replicated.begin_backward(
                overlap=overlap, grad_scale=grad_scale, is_last_micro_batch=is_last_micro_batch
            )

    def end_backward(self) -> Pending[None]:
        """After it. Each rank's pieces have their gradients when this has been waited for."""
        self._running = self._back = False
        for block in self._blocks:
            block.reshard()
        self._sum(whole_only=False)
        rest = self.replicated.end_backward() if self.replicated is not None else None
        given = torch.tensor(
            [
                float(one)
                for block in self._blocks
                for unit in block.trained_flat_parameters
                for one in unit.has_step_grad
            ]
        )
        told = collective.all_reduce(given, self._ways.all_ranks) if len(given) else None

        def summed() -> None:
            self.continue_reduction()
            if rest is not None:
                rest.wait()
            found = told.wait().gt(0.5).tolist() if told is not None else []
            for (block, _), halves in zip(self._under_way, self._halves, strict=True):
                for unit, half in zip(block.trained_flat_parameters, halves, strict=True):
                    unit.reduced_grad = half.wait()
            for unit in (unit for block in self._blocks for unit in block.trained_flat_parameters):
                unit.assign_grads(found[: len(unit.leaves)])
                del found[: len(unit.leaves)]
            self._under_way, self._halves = [], []  # they keep the sums, which are gradients now

        return Pending(summed)

    def continue_reduction(self) -> None:
        """The sums over replicas of what is added up among those who hold the pieces."""
        self._replicate(len(self._under_way))
        if self.replicated is not None:
            self.replicated.continue_reduction()

    def reshard(self) -> None:
        """Have modules hold this rank's rows: a block that nothing went back through has stayed whole."""
        for block in self._blocks:
            block.reshard()

    def pop_issued(self) -> list[IssuedWork]:
        """Since this was asked last."""
        found, self._issued = self._issued, []
        return found + (self.replicated.pop_issued() if self.replicated is not None else [])

    def _before(self, block: ShardedBlock, *_: Any) -> None:
        if self._back:  # it runs again, in its backward pass
            self._arrive(block)
            return
        if torch.is_grad_enabled() and block not in self._seen:
            self._seen.append(block)
        self._arrive(block, self._next(self._order, block))

    def _after(self, block: ShardedBlock, _: nn.Module, __: Any, output: Any) -> None:
        if self._back:
            return
        given = tree_leaves(output)
        tensors = [one for one in given if isinstance(one, Tensor) and one.requires_grad]
        if torch.is_grad_enabled() and (odd := [one for one in given if not isinstance(one, OUTPUT_TYPES)]):
            raise UserError(
                f'block "{block.name}", whose weights are whole only in its turn, gave a {type(odd[0]).__name__}, in '
                "which its backward pass is not found: give tensors, or tuples, lists or dicts of them"
            )
        if not tensors or block is not self._order[-1]:
            block.reshard()
        for tensor in tensors:
            tensor.register_hook(partial(self._backwards, block))

    def _backwards(self, block: ShardedBlock, _: Tensor) -> None:
        """A gradient of what the block gave is there."""
        self._back = True
        if not block.backward_started:
            block.backward_started = True
            self._arrive(block, self._next(self._order[::-1], block))

    def _next(self, order: Sequence[ShardedBlock], block: ShardedBlock) -> Sequence[ShardedBlock]:
        at = order.index(block) + 1
        return order[at : at + self._ahead]

    def _arrive(self, block: ShardedBlock, ahead: Sequence[ShardedBlock] = ()) -> None:
        for one in (block, *ahead):
            works = one.unshard()
            self._issued += [("gather", self._ways.all_gather.lane, work) for work in works]
        with self.trace_wait("gather"):
            block.wait_for_unshard()

    def _ready(self, block: ShardedBlock, unit: FlatParameter, at: int, _: Tensor) -> None:
        if not self._running:
            raise UserError(
                f'block "{block.name}" is cut among ranks, and this backward pass is not one of job.run, or of a loop '
                "over job.loader: take batches from these"
            )
        unit.copy_grad(at, self._share)
        if block.has_all_grads:
            block.reshard()
            if self._beside:
                self._sum(whole_only=True)

    def _sum(self, *, whole_only: bool) -> None:
        """Those of all blocks, in the order in which a backward pass comes to them, while they are whole."""
        for block in self._order[::-1][len(self._under_way) :]:
            if whole_only and not block.has_all_grads:
                return
            self._replicate(len(self._under_way))
            works = [unit.reduce_scatter_grad() for unit in block.trained_flat_parameters]
            self._issued += [("scatter", self._ways.reduce_scatter.lane, work) for work in works]
            self._under_way.append((block, works))

    def _replicate(self, num: int) -> None:
        """Sums over replicas of the first so many blocks."""
        group = self._ways.replicas
        for block, works in self._under_way[len(self._halves) : num]:
            halves: list[Pending[Any]] = []
            for unit, work in zip(block.trained_flat_parameters, works, strict=True):
                if not self._last:
                    halves.append(work)
                    continue
                with self.trace_wait("scatter"):
                    total = unit.add_earlier_grad(work.wait())
                halves.append(self._over_replicas(total, unit.residual, group))
            self._halves.append(halves)
            self._issued += [("reduce", group.lane, half) for half in halves if group.size > 1 and self._last]

    def _over_replicas(self, total: Tensor, kept: Tensor | None, group: Group) -> Pending[Any]:
        if kept is None:
            return collective.all_reduce(total, group)
        return collective.all_reduce_bf16(total, group, kept)


def shard_model(
    model: nn.Module,
    names: Sequence[str],
    groups: ShardingGroups,
    offload: Mapping[str, OffloadFunction] = NO_OFFLOAD,
    selected: Sequence[str] = (),
) -> list[ShardedBlock]:
    """The parameters of these blocks of a model in parts, one for each rank; what a block shares with others, or with
    modules outside of all, stays whole. `keep` has blocks of which this rank's part is to lie elsewhere; `only` those
    of them that are cut now, if not all are."""
    first = groups.replicas.index == 0
    blocks = {name: model.get_submodule(name) for name in names}
    blocks_of: dict[nn.Module, set[str]] = {}
    for name, block in blocks.items():
        for module in block.modules():
            blocks_of.setdefault(module, set()).add(name)
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, key))
    found = []
    for name in selected or blocks:
        block = blocks[name]
        kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for parameter in block.parameters():
            if all(blocks_of.get(module) == {name} for module, _ in places[parameter]):
                kind = (parameter.dtype, parameter.device, parameter.requires_grad)
                kinds.setdefault(kind, []).append(parameter)
        with_places = ([(one, places[one]) for one in kind] for kind in kinds.values())
        made = [
            FlatParameter(kind, groups.all_gather, offload.get(name), first, groups.all_ranks) for kind in with_places
        ]
        if made:
            found.append(ShardedBlock(name, block, made))
    return found
