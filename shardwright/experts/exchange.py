"""Expert parallelism: each rank owns some experts of a mixture, and rows travel to the ranks that compute them.

Phases: counts   all-gather how many rows each rank has for each expert; every rank then makes the same dispatch
        forward  in steps between groups of ranks: send rows, compute experts on those received, return their outputs
        backward the same steps with gradients in place of rows: send, compute gradients of inputs, return; the
                 gradients of weights are computed last, while returned gradients are in flight

All sends of a call are issued at once, and each step's outputs are returned as soon as they are computed; a rank's
exchanges take turns on lane `experts`, all sends before all returns, so that no two ranks wait for each other. A rank
without rows, or without experts, takes part in every step.

Shape legend: N tokens; C, H channels; E experts; R ranks; K experts per token. Rows of tensors are written as R, too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count, pairwise, product
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending, ready
from shardwright.comm.point_to_point import exchange_in_turn
from shardwright.experts.copies import Copies
from shardwright.experts.dispatch import Dispatch, Step, make_dispatch
from shardwright.experts.weights import CallWeights
from shardwright.layers.gates import Routing
from shardwright.layers.moe import combine_rows, gather_rows, order_by_expert
from shardwright.spec.expert_rows import IntArray
from shardwright.spec.lanes import MAIN
from shardwright.step.inner import InnerStage, InnerStages
from shardwright.step.slots import Slots, accesses, issues
from shardwright.step.tracer import Tracer

Ranges = Sequence[tuple[int, slice]]  # of rows, by rank
Decide = Callable[[IntArray], IntArray | None]
Compute = Callable[[int, Step, Tensor], Tensor]  # the rows to return, of a step's number, the step and rows received


def _nothing() -> None:
    pass


def _identity(x: Tensor) -> Tensor:
    return x


class ParallelExperts:
    """The exchange of a mixture whose experts are split over the ranks of `group`; `name`: of the mixture, in events.

    `num_groups`: steps of an exchange. `decide`: from the rows of each expert by the rank that has them, the rows that
    each rank computes; None: no copies. `copies`: the same ranks, on the lane of copies. `tracer`: of the stage inside
    which the model runs.
    """

    def __init__(self, name: str, group: Group, num_groups: int = 1) -> None:
        self.name, self.group, self.num_groups = name, group, num_groups
        self.decide: Decide | None = None
        self.copies: Group | None = None
        self.tracer: Tracer | None = None
        self._calls = _CallsByNumber()

    def forward(self, experts: nn.Module, tokens_NC: Tensor, routing: Routing, num_experts: int) -> Tensor:
        order, sizes_E = order_by_expert(routing.experts_NK.flatten(), num_experts)
        counts = collective.all_gather(sizes_E.unsqueeze(0), [1] * self.group.size, self.group)
        chosen_RE = counts.wait().numpy()
        computed_RE = self.decide(chosen_RE) if self.decide is not None else None
        dispatch = make_dispatch(chosen_RE, self.group.index, self.num_groups, computed_RE)
        order = order[torch.from_numpy(dispatch.order)]
        rows = gather_rows(tokens_NC, order, routing.experts_NK.shape[1])
        call = _Call(self, experts, dispatch)
        out = _Exchange.apply(self._calls, call, rows, *experts.parameters())
        return combine_rows(out, order, routing)  # pyright: ignore[reportArgumentType]


class _CallsByNumber:
    """Calls whose backward may run: each as long as the tensor lives that autograd saves in its place.

    Activation checkpointing drops that tensor, and so the call with its activations; run again, it saves another.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._numbers = count()

    def add(self, call: "_Call") -> Tensor:
        number = next(self._numbers)
        memory = np.array([number])
        self._calls[number] = call
        finalize(memory, self._calls.pop, number)
        return torch.from_numpy(memory)

    def __getitem__(self, saved: Tensor) -> "_Call":
        return self._calls[int(saved)]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, calls, call, rows, *weights):
        ctx.calls = calls
        ctx.save_for_backward(calls.add(call))
        with saved_tensors_hooks(_identity, _identity):  # not those of checkpointing, which this replaces
            return call.forward(rows, weights, trains=any(ctx.needs_input_grad))

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        gradients, weight_gradients = ctx.calls[saved].backward(gradient.contiguous())
        return None, None, gradients, *weight_gradients


class _Call:
    """One call of the experts, forward and backward."""

    def __init__(self, owner: ParallelExperts, experts: nn.Module, dispatch: Dispatch) -> None:
        self._owner, self._experts, self._dispatch = owner, experts, dispatch
        self._stages = InnerStages()
        self._trains = False
        self._graphs: dict[int, tuple[GradientEdge, GradientEdge]] = {}  # by step: of the experts' inputs and outputs
        self._own, self._copies = CallWeights({}, dispatch.sizes(is_copy=False)), None

    def forward(self, rows: Tensor, weights: Sequence[Tensor], *, trains: bool) -> Tensor:
        self._trains = trains
        names = (name for name, _ in self._experts.named_parameters())
        own = {name: weight.detach() for name, weight in zip(names, weights, strict=True)}
        self._own = CallWeights(own, self._dispatch.sizes(is_copy=False))
        if self._dispatch.chains:
            assert self._owner.copies is not None
            self._copies = Copies(self._dispatch, own, self._owner.copies)
        return self._exchange(rows, self._run_experts, self._send_weights)

    def backward(self, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradients of the rows and of the weights."""
        gradients: list[Tensor] = []
        begin = self._copies.receive_gradients if self._copies is not None else _nothing
        rows = self._exchange(gradient, self._run_backward, begin, lambda: gradients.extend(self._weight_gradients()))
        return rows, gradients

    def _send_weights(self) -> None:
        if self._copies is not None:
            self._weights_sent = self._copies.send_weights()

    def _run_experts(self, number: int, step: Step, rows: Tensor) -> Tensor:
        weights = self._weights_of(step)
        if step.is_copy:
            self._weights_sent.wait()
        with torch.set_grad_enabled(self._trains):
            inputs = rows.detach().requires_grad_(self._trains)
            outputs = functional_call(self._experts, weights.aliases, (inputs, torch.from_numpy(step.sizes)))
        if self._trains:
            self._graphs[number] = get_gradient_edge(inputs), get_gradient_edge(outputs)
        return outputs.detach()

    def _run_backward(self, number: int, step: Step, gradient: Tensor) -> Tensor:
        inputs, outputs = self._graphs.pop(number)
        return self._weights_of(step).backward(step, outputs, inputs, gradient)

    def _weights_of(self, step: Step) -> CallWeights:
        if not step.is_copy:
            return self._own
        assert self._copies is not None
        return self._copies.weights

    def _weight_gradients(self) -> list[Tensor]:
        """By weight. First of experts without copies, then those of copies, then those that other ranks continued."""
        own, copied_out = self._dispatch.own, self._copies.copied_out if self._copies is not None else []
        totals = {name: torch.zeros_like(alias) for name, alias in self._own.aliases.items()}
        bounds = [own.start - 1, *copied_out, own.stop]
        for before, after in pairwise(bounds):
            experts = range(before + 1 - own.start, after - own.start)
            for name, total in totals.items() if experts else ():
                self._own.add_gradient(name, experts, total[experts.start : experts.stop])
        if self._copies is not None:
            self._copies.continue_gradients()
            for expert, name in product(copied_out, totals):
                index = own.index(expert)
                total = totals[name][index : index + 1].copy_(self._copies.received_gradient(expert, name))
                self._own.add_gradient(name, range(index, index + 1), total)
        return [*totals.values()]

    def _exchange(
        self, rows: Tensor, compute: Compute, begin: Callable[[], None], finish: Callable[[], None] = _nothing
    ) -> Tensor:
        """Send rows, compute, return. `begin`: run while the first rows are in flight; `finish`: the last results."""
        results, steps = _Results(len(rows)), self._dispatch.steps
        calls = [self._bind_step(number, step, rows, compute, results) for number, step in enumerate(steps)]
        self._stages.tracer = self._owner.tracer
        self._stages.run(*(send for send, _, _ in calls))
        begin()
        for _, run, back in calls:
            self._stages.run(run, back)
        finish()
        for stage in chain.from_iterable(calls):
            stage.wait_for_value()
            stage.release()
        return results.rows

    def _bind_step(
        self, number: int, step: Step, rows: Tensor, compute: Compute, results: "_Results"
    ) -> tuple[InnerStage, InnerStage, InnerStage]:
        """The stages of a step: send, compute, return."""
        bind, name, lane = self._stages.bind, self._owner.name, self._owner.group.lane
        received, computed = f"received.{number}", f"computed.{number}"

        @accesses(reads=(received,), writes=(computed,))
        def run(slots: Slots) -> None:
            slots[computed] = _in_order_received(step, compute(number, step, _by_expert(step, slots[received])))

        send = issues(received, partial(_send, step, rows, self._owner.group))
        back = issues(f"returned.{number}", partial(_return, step, results, self._owner.group), (computed,))
        return bind(f"send {name}", lane, send), bind(f"experts {name}", MAIN, run), bind(f"return {name}", lane, back)


class _Results:
    """The rows that an exchange returns, in the order in which rows were sent."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows: Tensor | None = None

    def like(self, outputs: Tensor) -> Tensor:
        """The rows, with the width and dtype of these outputs."""
        if self._rows is None:
            self._rows = outputs.new_empty(self._num_rows, outputs.shape[1])
        return self._rows

    @property
    def rows(self) -> Tensor:
        assert self._rows is not None
        return self._rows


def _send(step: Step, rows: Tensor, group: Group) -> Pending[Tensor]:
    """Issue the exchange of a step's rows; `wait()` returns those received."""
    received = rows.new_empty(step.num_received, *rows.shape[1:])
    return _transfer(rows, step.sends, received, step.receives, group).then(lambda _: received)


def _return(step: Step, results: _Results, group: Group, outputs: Tensor) -> Pending[None]:
    """Issue the return of a step's outputs, into the results of the ranks that sent the rows."""
    return _transfer(outputs, step.receives, results.like(outputs), step.sends, group)


def _transfer(rows: Tensor, parts: Ranges, into: Tensor, into_parts: Ranges, group: Group) -> Pending[None]:
    """Send ranges of rows to ranks, and receive into ranges from ranks; this rank's are copied."""
    own = {rank: part for rank, part in into_parts if rank == group.index}
    for rank, part in parts:
        if rank == group.index:
            into[own[rank]].copy_(rows[part])
    inputs = [(rank, rows[part]) for rank, part in parts if rank != group.index]
    outputs = [(rank, into[part]) for rank, part in into_parts if rank != group.index]
    if not any(len(x) for _, x in (*inputs, *outputs)):
        return ready(None)
    return exchange_in_turn(inputs, outputs, group)


def _by_expert(step: Step, rows: Tensor) -> Tensor:
    return rows if step.by_expert is None else rows.index_select(0, torch.from_numpy(step.by_expert))


def _in_order_received(step: Step, rows: Tensor) -> Tensor:
    if step.by_expert is None:
        return rows.contiguous()
    return torch.empty_like(rows).index_copy_(0, torch.from_numpy(step.by_expert), rows)
