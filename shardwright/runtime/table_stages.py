"""The functions of stages that only some plans with tables have: of rows in slower memory, and of a host reduce.

The first argument of each is the rank's `StepBindings`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from shardwright.comm.pending import ready
from shardwright.planner.step.stages import REDUCED_SLOTS, has_servers
from shardwright.spec.plan import Stage
from shardwright.step.slots import Slots, accesses

TableFunction = Callable[[Any, Slots], None]


class PrefetchedRows:
    """The batches whose rows were copied to memory, and whose step has not ended."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._batches: list[Any] = []
        self.expects = False  # whether batches were announced to caches since the last `clear`

    def add(self, ids: Any) -> None:
        self._batches.append(ids)

    def release(self, batches: Sequence[Any], *, written: bool = False) -> None:
        """End the use of these batches' rows; `written`: the update has done so."""
        for ids in batches:
            if any(other is ids for other in self._batches):
                self._batches = [other for other in self._batches if other is not ids]
                if not written:
                    self._model.sparse.exchange.release(ids, written=False)

    def clear(self) -> None:
        self.release(tuple(self._batches))
        if self.expects:
            self._model.sparse.exchange.forget()
        self.expects = False


def disk_functions() -> Mapping[str, TableFunction]:
    """Of plans with rows in slower memory: on disk, or in host memory."""
    return {"expect": _expect, "prefetch": _prefetch, "lookup": _lookup, "update": _update}


def copy_functions(stages: Sequence[Stage]) -> Mapping[str, TableFunction]:
    """Of plans with bounded staleness, or with tables on servers."""
    if has_servers(stages):
        functions = {"fetch": _fetch_rows, "lookup": _lookup_with_fetched}
        return {"copies": _find_copies, "update": _update_served, **functions}
    return {
        "copies": _find_copies,
        "counts": _exchange_counts,
        "validate": _validate_copies,
        "renew": _renew_leases,
        "lookup": _lookup_with_copies,
        "update": _update_copies,
    }


def host_batch_functions() -> Mapping[str, TableFunction]:
    """Of plans whose stage "request" reads the ids from host memory."""
    return {"request": _request_from_host}


def host_functions() -> Mapping[str, TableFunction]:
    """Of plans with a host reduce."""
    return {
        "meet": _reduce_in_host,
        "vectors": _exchange_host_sums,
        "backward": _backward_to_host_sums,
        "spread": _broadcast_in_host,
    }


@accesses(reads=("host_batch", "weight"), writes=("request",))
def _request_from_host(step: Any, slots: Slots) -> None:
    step.request(slots, slots["host_batch"])


@accesses(reads=("ids", "state.uses"), writes=("expected", "state.uses"))
def _expect(step: Any, slots: Slots) -> None:
    slots["expected"] = step.training
    if step.training:
        step.prefetched.expects = True
        step.model.sparse.exchange.expect(slots["ids"])


@accesses(reads=("ids", "expected", "state.lines"), writes=("near", "state.lines", "state.tables.idle"))
def _prefetch(step: Any, slots: Slots) -> None:
    _ = slots["expected"]
    step.prefetched.add(slots["ids"])
    slots.issue("near", step.model.sparse.exchange.prefetch(slots["ids"]))


@accesses(reads=("ids", "near", "state.tables"), writes=("looked",))
def _lookup(step: Any, slots: Slots) -> None:
    _ = slots["near"]  # waits until the rows are copied
    step.lookup_rows(slots)
    if not (step.training and step.model.sparse.trained):
        step.prefetched.release([slots["ids"]])


@accesses(reads=("ids", "near", "gradients.tables"), writes=("state.tables",))
def _update(step: Any, slots: Slots) -> None:
    step.update_tables(slots)


@accesses(reads=("looked",), writes=("met",))
def _reduce_in_host(step: Any, slots: Slots) -> None:
    slots.issue("met", step.model.sparse.exchange.reduce_in_host(slots["looked"]))


@accesses(reads=("met",), writes=("vectors",))
def _exchange_host_sums(step: Any, slots: Slots) -> None:
    step.issue_vectors(slots, slots["met"])


@accesses(reads=("ids", "lengths", "loss", "vectors"), writes=("gradients.met", *REDUCED_SLOTS))
def _backward_to_host_sums(step: Any, slots: Slots) -> None:
    slots["gradients.met"] = step.backward_with(slots, slots["ids"], slots["vectors"])


@accesses(reads=("ids", "gradients.met"), writes=("gradients.tables",))
def _broadcast_in_host(step: Any, slots: Slots) -> None:
    gradients, exchange = slots["gradients.met"], step.model.sparse.exchange
    pending = ready(None) if gradients is None else exchange.broadcast_in_host(slots["ids"], gradients)
    slots.issue("gradients.tables", pending)


@accesses(reads=("ids", "state.copies"), writes=("copies", "state.copies"))
def _find_copies(step: Any, slots: Slots) -> None:
    routed, exchange = slots["ids"], step.model.sparse.exchange
    distinct = routed.outgoing.distinct_rows
    routed.copied[:] = exchange.bounded.find_copies(distinct, training=step.training)
    routed.served[:] = exchange.served.find_copies(distinct, training=step.training)
    slots["copies"] = routed


@accesses(reads=("copies",), writes=("counts",))
def _exchange_counts(step: Any, slots: Slots) -> None:
    slots.issue("counts", step.model.sparse.exchange.bounded.exchange_counts(slots["copies"].copied))


@accesses(reads=("copies", "counts"), writes=("expired",))
def _validate_copies(step: Any, slots: Slots) -> None:
    _ = slots["counts"]
    slots.issue("expired", step.model.sparse.exchange.bounded.validate(slots["copies"].copied))


@accesses(reads=("copies", "expired", "state.tables"), writes=("renewed",))
def _renew_leases(step: Any, slots: Slots) -> None:
    _ = slots["expired"]
    slots.issue("renewed", step.model.sparse.exchange.bounded.renew(slots["copies"].copied))


@accesses(reads=("copies", "state.served"), writes=("fetched",))
def _fetch_rows(step: Any, slots: Slots) -> None:
    slots.issue("fetched", step.model.sparse.exchange.served.fetch(slots["copies"].served))


@accesses(reads=("ids", "state.tables", "fetched", "state.copies"), writes=("looked",))
def _lookup_with_fetched(step: Any, slots: Slots) -> None:
    _ = slots["fetched"]
    step.lookup_rows(slots)


@accesses(reads=("ids", "state.tables", "renewed", "state.copies"), writes=("looked",))
def _lookup_with_copies(step: Any, slots: Slots) -> None:
    _ = slots["renewed"]
    step.lookup_rows(slots)


@accesses(reads=("ids", "gradients.tables", "state.copies"), writes=("state.tables", "state.copies"))
def _update_copies(step: Any, slots: Slots) -> None:
    step.update_tables(slots)


@accesses(reads=("ids", "gradients.tables", "state.copies"), writes=("state.tables", "state.copies", "state.served"))
def _update_served(step: Any, slots: Slots) -> None:
    step.update_tables(slots)
