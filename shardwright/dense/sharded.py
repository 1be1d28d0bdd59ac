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
from shardwright.dense.flat_parameter import Unit
from shardwright.dense.replicated import Issued, Replicated
from shardwright.errors import UserError

Keep = Callable[[Tensor], Tensor]
PLAIN = (Tensor, int, float, str, type(None))  # what a block may give, or hold in what it gives
NOWHERE: Mapping[str, Keep] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Ways:
    """Who a rank's pieces are gathered from and added up with, who has the same pieces, and who trains along."""

    gather: Group
    scatter: Group
    replicas: Group
    everyone: Group


class Block:
    """A module whose parameters are cut, by dtype and by whether they are trained."""

    def __init__(self, name: str, module: nn.Module, units: Sequence[Unit]) -> None:
        self.name, self.module, self.units = name, module, units
        self.trained = [unit for unit in units if unit.trained]
        self.passed = False  # backwards

    @property
    def shards(self) -> list[nn.Parameter]:
        """This rank's rows of the parameters that are trained."""
        return [shard for unit in self.trained for shard in unit.shards]

    @property
    def whole(self) -> bool:
        """Whether all its gradients are there."""
        return all(not unit.missing for unit in self.trained)

    def gather(self) -> list[Pending[Tensor]]:
        return [work for unit in self.units if (work := unit.gather()) is not None]

    def wait(self) -> None:
        for unit in self.units:
            unit.wait()

    def release(self) -> None:
        for unit in self.units:
            unit.release()


class Shards:
    """The dense part of a job whose blocks are cut; `rest` has what is not."""

    def __init__(
        self, blocks: Sequence[Block], ways: Ways, rest: Replicated | None, *, ahead: int = 1, rounded: bool = False
    ) -> None:
        """`rounded`: sums over replicas travel in bf16, what rounding takes is added later."""
        self._blocks, self._ways, self.rest, self._ahead = list(blocks), ways, rest, ahead
        self._order = list(self._blocks)  # in which they have their turns
        self._seen: list[Block] = []
        self._under_way: list[tuple[Block, list[Pending[Tensor]]]] = []  # sums, in the order of issue
        self._halves: list[list[Pending[Any]]] = []  # of these, over replicas
        self._running = self._back = self._beside = False
        self._last = True
        self._share = 1.0
        self._issued: list[Issued] = []
        self.waiting: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        if rounded and ways.replicas.size > 1:
            for unit in (unit for block in blocks for unit in block.trained):
                unit.kept = torch.zeros_like(unit.own)
        for block in self._blocks:
            block.module.register_forward_pre_hook(partial(self._before, block))
            block.module.register_forward_hook(partial(self._after, block))
            for unit in block.trained:
                for at, leaf in enumerate(unit.leaves):
                    leaf.register_post_accumulate_grad_hook(partial(self._ready, block, unit, at))

    @property
    def running(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._running

    @property
    def leaves(self) -> list[nn.Parameter]:
        """What autograd sees of the parameters."""
        own = [leaf for block in self._blocks for unit in block.trained for leaf in unit.leaves]
        return own + (self.rest.leaves if self.rest is not None else [])

    @property
    def kept(self) -> list[Tensor]:
        """What rounding took, to be added to the next sums."""
        own = [unit.kept for block in self._blocks for unit in block.trained if unit.kept is not None]
        return own + (self.rest.kept if self.rest is not None else [])

    def begin(self, *, beside: bool, share: float = 1.0, last: bool = True) -> None:
        """Before a backward pass; `beside`: sum what is whole while it runs; what it makes counts times `share`. Where
        it is not the `last` of a step, nothing is summed over replicas yet."""
        self._under_way, self._halves, self._issued = [], [], []
        self._running, self._beside, self._share, self._last = True, beside, share, last
        self._back = False
        self._order = [block for block in self._order if block not in self._seen] + self._seen
        self._seen = []
        for block in self._blocks:
            block.passed = False
            for unit in block.trained:
                unit.clear()
        if self.rest is not None:
            self.rest.begin(beside=beside, share=share, last=last)

    def end(self) -> Pending[None]:
        """After it. Each rank's pieces have their gradients when this has been waited for."""
        self._running = self._back = False
        for block in self._blocks:
            block.release()
        self._sum(whole_only=False)
        rest = self.rest.end() if self.rest is not None else None
        given = torch.tensor([float(one) for block in self._blocks for unit in block.trained for one in unit.so_far])
        told = collective.all_reduce(given, self._ways.everyone) if len(given) else None

        def summed() -> None:
            self.go_on()
            if rest is not None:
                rest.wait()
            found = told.wait().gt(0.5).tolist() if told is not None else []
            for (block, _), halves in zip(self._under_way, self._halves, strict=True):
                for unit, half in zip(block.trained, halves, strict=True):
                    unit.sum = half.wait()
            for unit in (unit for block in self._blocks for unit in block.trained):
                unit.hand_out(found[: len(unit.leaves)])
                del found[: len(unit.leaves)]
            self._under_way, self._halves = [], []  # they keep the sums, which are gradients now

        return Pending(summed)

    def go_on(self) -> None:
        """The sums over replicas of what is added up among those who hold the pieces."""
        self._replicate(len(self._under_way))
        if self.rest is not None:
            self.rest.go_on()

    def let_go(self) -> None:
        """Have modules hold this rank's rows: a block that nothing went back through has stayed whole."""
        for block in self._blocks:
            block.release()

    def issued(self) -> list[Issued]:
        """Since this was asked last."""
        found, self._issued = self._issued, []
        return found + (self.rest.issued() if self.rest is not None else [])

    def _before(self, block: Block, *_: Any) -> None:
        if self._back:  # it runs again, in its backward pass
            self._arrive(block)
            return
        if torch.is_grad_enabled() and block not in self._seen:
            self._seen.append(block)
        self._arrive(block, self._next(self._order, block))

    def _after(self, block: Block, _: nn.Module, __: Any, output: Any) -> None:
        if self._back:
            return
        given = tree_leaves(output)
        tensors = [one for one in given if isinstance(one, Tensor) and one.requires_grad]
        if torch.is_grad_enabled() and (odd := [one for one in given if not isinstance(one, PLAIN)]):
            raise UserError(
                f'block "{block.name}", whose weights are whole only in its turn, gave a {type(odd[0]).__name__}, in '
                "which its backward pass is not found: give tensors, or tuples, lists or dicts of them"
            )
        if not tensors or block is not self._order[-1]:
            block.release()
        for tensor in tensors:
            tensor.register_hook(partial(self._backwards, block))

    def _backwards(self, block: Block, _: Tensor) -> None:
        """A gradient of what the block gave is there."""
        self._back = True
        if not block.passed:
            block.passed = True
            self._arrive(block, self._next(self._order[::-1], block))

    def _next(self, order: Sequence[Block], block: Block) -> Sequence[Block]:
        at = order.index(block) + 1
        return order[at : at + self._ahead]

    def _arrive(self, block: Block, ahead: Sequence[Block] = ()) -> None:
        for one in (block, *ahead):
            works = one.gather()
            self._issued += [("gather", self._ways.gather.lane, work) for work in works]
        with self.waiting("gather"):
            block.wait()

    def _ready(self, block: Block, unit: Unit, at: int, _: Tensor) -> None:
        if not self._running:
            raise UserError(
                f'block "{block.name}" is cut among ranks, and this backward pass is not one of job.run, or of a loop '
                "over job.loader: take batches from these"
            )
        unit.put(at, self._share)
        if block.whole:
            block.release()
            if self._beside:
                self._sum(whole_only=True)

    def _sum(self, *, whole_only: bool) -> None:
        """Those of all blocks, in the order in which a backward pass comes to them, while they are whole."""
        for block in self._order[::-1][len(self._under_way) :]:
            if whole_only and not block.whole:
                return
            self._replicate(len(self._under_way))
            works = [unit.add_up() for unit in block.trained]
            self._issued += [("scatter", self._ways.scatter.lane, work) for work in works]
            self._under_way.append((block, works))

    def _replicate(self, num: int) -> None:
        """Sums over replicas of the first so many blocks."""
        group = self._ways.replicas
        for block, works in self._under_way[len(self._halves) : num]:
            halves: list[Pending[Any]] = []
            for unit, work in zip(block.trained, works, strict=True):
                if not self._last:
                    halves.append(work)
                    continue
                with self.waiting("scatter"):
                    total = unit.with_earlier(work.wait())
                halves.append(self._over_replicas(total, unit.kept, group))
            self._halves.append(halves)
            self._issued += [("reduce", group.lane, half) for half in halves if group.size > 1 and self._last]

    def _over_replicas(self, total: Tensor, kept: Tensor | None, group: Group) -> Pending[Any]:
        if kept is None:
            return collective.all_reduce(total, group)
        return collective.all_reduce_bf16(total, group, kept)


def cut(
    model: nn.Module, names: Sequence[str], ways: Ways, keep: Mapping[str, Keep] = NOWHERE, only: Sequence[str] = ()
) -> list[Block]:
    """The parameters of these blocks of a model in parts, one for each rank; what a block shares with others, or with
    modules outside of all, stays whole. `keep` has blocks of which this rank's part is to lie elsewhere; `only` those
    of them that are cut now, if not all are."""
    first = ways.replicas.index == 0
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
    for name in only or blocks:
        block = blocks[name]
        kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for parameter in block.parameters():
            if all(blocks_of.get(module) == {name} for module, _ in places[parameter]):
                kind = (parameter.dtype, parameter.device, parameter.requires_grad)
                kinds.setdefault(kind, []).append(parameter)
        with_places = ([(one, places[one]) for one in kind] for kind in kinds.values())
        made = [Unit(kind, ways.gather, keep.get(name), first, ways.everyone) for kind in with_places]
        if made:
            found.append(Block(name, block, made))
    return found
