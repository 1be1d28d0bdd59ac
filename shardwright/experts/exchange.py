"""Expert parallelism: each rank owns some experts of a mixture, and rows travel to the ranks that compute them.

Phases: counts   all-gather how many rows each rank has for each expert; every rank then makes the same dispatch
        forward  in steps between groups of ranks: send rows, compute experts on those received, return their outputs
        backward the same steps with gradients in place of rows: send, compute gradients of inputs, return; the
                 gradients of weights are computed last, while returned gradients are in flight

All rows of a call are issued at once and leave one message after the other, on lane `experts`, so that the first step's
arrive first; each step's outputs follow as soon as they are computed. Receives are posted early, so that no rank waits
for another to send. A rank without rows, or without experts, takes part in every step.

Shape legend: N tokens; C, H channels; E experts; R ranks; K experts per token. Rows of tensors are written as R, too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count, product
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending
from shardwright.comm.point_to_point import receive_into, send_in_turn
from shardwright.experts.copies import Copies
from shardwright.experts.dispatch import Dispatch, Step, make_dispatch
from shardwright.experts.prefetch import CopyHistory, PrefetchedCopies
from shardwright.experts.weights import CallWeights
from shardwright.layers.gates import Routing
from shardwright.layers.moe import combine_rows, gather_rows, order_by_expert
from shardwright.spec.expert_rows import BoolArray, ExpertRowOrder, IntArray, owners_of, rank_order
from shardwright.spec.lanes import MAIN
from shardwright.step.inner import InnerStage, InnerStages
from shardwright.step.slots import Slots, accesses, issues
from shardwright.step.tracer import Tracer

Ranges = Sequence[tuple[int, slice]]  # of rows, by rank
Decide = Callable[[ExpertRowOrder, BoolArray | None], IntArray | None]
Compute = Callable[[int, Step, Tensor], Tensor]  # the rows to return, of a step's number, the step and rows received


def _nothing() -> None:
    pass


def _identity(x: Tensor) -> Tensor:
    return x


class ParallelExperts:
    """The exchange of a mixture whose experts are split over the ranks of `group`; `name`: of the mixture, in events.

    `num_groups`: steps of an exchange. `decide`: from the rows of each expert by the rank that has them, and the copies
    that were prefetched, the rows that each rank computes; None: no copies. `copies`: the same ranks, on the lane of
    copies. `tracer`: of the stage inside which the model runs. `computed_E`: rows that this rank computed in the last
    call.
    """

    def __init__(self, name: str, group: Group, num_groups: int = 1) -> None:
        self.name, self.group, self.num_groups = name, group, num_groups
        self.decide: Decide | None = None
        self.order_rows: Callable[[IntArray, IntArray], ExpertRowOrder] = rank_order
        self.copies: Group | None = None
        self.tracer: Tracer | None = None
        self.computed_E: IntArray = np.zeros(0, np.int64)
        self._calls = _CallsByNumber()
        self._history = CopyHistory()
        self._prefetched: PrefetchedCopies | None = None

    def prefetch(self, experts: nn.Module) -> None:
        """Relay the copies of the last call before the gate has chosen; `end_prefetch` follows the call."""
        self.end_prefetch()  # after an exception the one before may be left
        if self.copies is not None and self._history.is_steady:
            with _disable_current_modes():
                own = {name: weight.detach() for name, weight in experts.named_parameters()}
                self._prefetched = self._history.prefetch(own, self.copies)

    def end_prefetch(self) -> None:
        """Wait for prefetched copies that no call has used; the weights may change afterwards."""
        if self._prefetched is not None:
            self._prefetched.finish()
            self._prefetched = None

    def forward(self, experts: nn.Module, tokens_NC: Tensor, routing: Routing, num_experts: int) -> Tensor:
        by_expert, sizes_E = order_by_expert(routing.experts_NK.flatten(), num_experts)
        counts = collective.all_gather(sizes_E.unsqueeze(0), [1] * self.group.size, self.group)
        chosen_RE = counts.wait().numpy()
        order = self.order_rows(chosen_RE, owners_of(num_experts, self.group.size))
        prefetched, self._prefetched = self._prefetched, None
        prefetched_RE = prefetched.mark_pairs(*chosen_RE.shape) if prefetched is not None else None
        computed_RE = self.decide(order, prefetched_RE) if self.decide is not None else None
        dispatch = make_dispatch(order, self.group.index, self.num_groups, computed_RE)
        self.computed_E = dispatch.computed(num_experts)
        sent = by_expert[torch.from_numpy(dispatch.order)]
        rows = gather_rows(tokens_NC, sent, routing.experts_NK.shape[1])
        self._history.add(dispatch)
        call = _Call(self, experts, dispatch, prefetched)
        # Selective checkpointing would match operators by their number, which depends on the copies.
        with _disable_current_modes():
            out = _Exchange.apply(self._calls, call, rows, *experts.parameters())
        return combine_rows(out, sent, routing)  # pyright: ignore[reportArgumentType]


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

    def __init__(
        self, owner: ParallelExperts, experts: nn.Module, dispatch: Dispatch, prefetched: PrefetchedCopies | None
    ) -> None:
        self._owner, self._experts, self._dispatch, self._prefetched = owner, experts, dispatch, prefetched
        self._stages = InnerStages()
        self._trains = False
        self._weights_sent: Pending[None] | None = None
        self._graphs: dict[int, tuple[GradientEdge, GradientEdge]] = {}  # by step: of the experts' inputs and outputs
        self._own, self._copies = CallWeights({}, dispatch.sizes(is_copy=False)), None

    def forward(self, rows: Tensor, weights: Sequence[Tensor], *, trains: bool) -> Tensor:
        self._trains = trains
        names = (name for name, _ in self._experts.named_parameters())
        own = {name: weight.detach() for name, weight in zip(names, weights, strict=True)}
        self._own = CallWeights(own, self._dispatch.sizes(is_copy=False))
        if self._dispatch.chains:
            assert self._owner.copies is not None
            self._copies = Copies(self._dispatch, own, self._owner.copies, self._prefetched)
        own, copies = self._step_numbers(is_copy=False), self._step_numbers(is_copy=True)
        # The copies' step inside this rank's own group last: until it is computed, the results of all others travel.
        out = self._exchange(rows, self._run_experts, [*own, *copies[1:], *copies[:1]], self._send_weights)
        if self._weights_sent is not None:
            self._weights_sent.wait()
        if self._prefetched is not None:
            self._prefetched.finish()
        return out

    def backward(self, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradients of the rows and of the weights."""
        gradients: list[Tensor] = []
        begin = self._copies.receive_gradients if self._copies is not None else _nothing
        # Copies first, so that their weight gradients travel while own rows are computed.
        order = [*self._step_numbers(is_copy=True), *self._step_numbers(is_copy=False)]
        rows = self._exchange(
            gradient, self._run_backward, order, begin, lambda: gradients.extend(self._weight_gradients())
        )
        return rows, gradients

    def _step_numbers(self, *, is_copy: bool) -> list[int]:
        return [number for number, step in enumerate(self._dispatch.steps) if step.is_copy == is_copy]

    def _send_weights(self) -> None:
        if self._copies is not None:
            self._weights_sent = self._copies.send_weights()

    def _run_experts(self, number: int, step: Step, rows: Tensor) -> Tensor:
        weights = self._weights_of(step)
        if step.is_copy and self._weights_sent is not None:
            self._weights_sent.wait()
        with torch.set_grad_enabled(self._trains):
            inputs = rows.detach().requires_grad_(self._trains)
            outputs = functional_call(self._experts, weights.aliases, (inputs, torch.from_numpy(step.sizes)))
        if self._trains:
            self._graphs[number] = get_gradient_edge(inputs), get_gradient_edge(outputs)
        return outputs.detach()

    def _run_backward(self, number: int, step: Step, gradient: Tensor) -> Tensor:
        if self._copies is not None and not step.is_copy:
            self._copies.continue_gradients(only_ready=True)
        inputs, outputs = self._graphs.pop(number)
        return self._weights_of(step).backward(step, outputs, inputs, gradient)

    def _weights_of(self, step: Step) -> CallWeights:
        if not step.is_copy:
            return self._own
        assert self._copies is not None
        return self._copies.weights

    def _weight_gradients(self) -> list[Tensor]:
        """By weight: of experts without copies, in between those of copies as partial gradients arrive, then of experts
        that other ranks have copies of."""
        own, copies = self._dispatch.own, self._copies
        copied_out = copies.copied_out if copies is not None else []
        totals = {name: torch.zeros_like(alias) for name, alias in self._own.aliases.items()}
        for expert, name in product((expert for expert in own if expert not in copied_out), totals):
            if copies is not None:
                copies.continue_gradients(only_ready=True)
            self._own.add_gradient(name, own.index(expert), totals[name][own.index(expert)])
        if copies is not None:
            copies.continue_gradients()
            for expert in copied_out:
                for name, outputs, partial in copies.received_gradients(expert):
                    total = totals[name][own.index(expert)][outputs].copy_(partial)
                    self._own.add_gradient(name, own.index(expert), total, outputs)
            copies.wait_until_sent()
        return [*totals.values()]

    def _exchange(
        self,
        rows: Tensor,
        compute: Compute,
        order: Sequence[int],
        begin: Callable[[], None],
        finish: Callable[[], None] | None = None,
    ) -> Tensor:
        """Send rows, compute, return, in this order of steps. `begin`: run while the first rows are in flight;
        `finish`: the last results."""
        transfers = _Transfers(rows, self._owner.group)
        calls = [self._bind_step(number, self._dispatch.steps[number], transfers, compute) for number in order]
        self._stages.tracer = self._owner.tracer
        self._stages.run(*(send for send, _, _ in calls))
        begin()
        self._stages.run(calls[0][1], *(back for _, _, back in calls), *(run for _, run, _ in calls[1:]))
        finishing = [self._bind_finish(f"computed.{order[-1]}", finish)] if finish is not None else []
        self._stages.run(*finishing)
        for stage in (*chain.from_iterable(calls), *finishing):
            stage.wait_for_value()
            stage.release()
        return transfers.finish()

    def _bind_finish(self, computed: str, finish: Callable[[], None]) -> InnerStage:
        @accesses(reads=(computed,), writes=("weights",))
        def run(slots: Slots) -> None:
            slots["weights"] = slots[computed]
            finish()

        return self._stages.bind(f"weights {self._owner.name}", MAIN, run)

    def _bind_step(
        self, number: int, step: Step, transfers: "_Transfers", compute: Compute
    ) -> tuple[InnerStage, InnerStage, InnerStage]:
        """The stages of a step: exchange rows, compute and send outputs, receive outputs. The last knows the width of
        outputs once the first step has been computed."""
        bind, name, lane = self._stages.bind, self._owner.name, self._owner.group.lane
        received, computed = f"received.{number}", f"computed.{number}"

        @accesses(reads=(received,), writes=(computed,))
        def run(slots: Slots) -> None:
            outputs = compute(number, step, _by_expert(step, slots[received]))
            transfers.send_back(step, _in_order_received(step, outputs))
            slots[computed] = True

        send = issues(received, partial(transfers.exchange_rows, step))
        back = issues(f"returned.{number}", partial(transfers.receive_results, step))
        return bind(f"send {name}", lane, send), bind(f"experts {name}", MAIN, run), bind(f"return {name}", lane, back)


class _Transfers:
    """The messages of an exchange: `rows` out, and results back, in the order in which the rows were sent."""

    def __init__(self, rows: Tensor, group: Group) -> None:
        self._rows, self._group = rows, group
        self._results: Tensor | None = None
        self._sent: list[Pending[None]] = []

    def exchange_rows(self, step: Step) -> Pending[Tensor]:
        """Issue the exchange of a step's rows; `wait()` returns those received."""
        received = self._rows.new_empty(step.num_received, *self._rows.shape[1:])
        self._copy_own(self._rows, step.sends, received, step.receives)
        pending = receive_into(self._others(received, step.receives), self._group)
        self._sent.append(send_in_turn(self._others(self._rows, step.sends), self._group))
        return pending.then(lambda _: received)

    def send_back(self, step: Step, outputs: Tensor) -> None:
        """Issue the sending of a step's outputs to the ranks of its rows."""
        if self._results is None:
            self._results = outputs.new_empty(len(self._rows), outputs.shape[1])
        self._copy_own(outputs, step.receives, self._results, step.sends)
        self._sent.append(send_in_turn(self._others(outputs, step.receives), self._group))

    def receive_results(self, step: Step) -> Pending[None]:
        """Issue the receiving of the results of a step's rows."""
        assert self._results is not None
        return receive_into(self._others(self._results, step.sends), self._group)

    def finish(self) -> Tensor:
        """The results, once all that this rank sends has left."""
        for pending in self._sent:
            pending.wait()
        assert self._results is not None
        return self._results

    def _copy_own(self, rows: Tensor, parts: Ranges, into: Tensor, into_parts: Ranges) -> None:
        own = self._group.index
        if own in (mine := dict(parts)):
            into[dict(into_parts)[own]].copy_(rows[mine[own]])

    def _others(self, rows: Tensor, parts: Ranges) -> list[tuple[int, Tensor]]:
        return [(rank, rows[part]) for rank, part in parts if rank != self._group.index]


def _by_expert(step: Step, rows: Tensor) -> Tensor:
    return rows if step.by_expert is None else rows.index_select(0, torch.from_numpy(step.by_expert))


def _in_order_received(step: Step, rows: Tensor) -> Tensor:
    if step.by_expert is None:
        return rows.contiguous()
    return torch.empty_like(rows).index_copy_(0, torch.from_numpy(step.by_expert), rows)
