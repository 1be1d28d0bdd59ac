"""The stages of one recommendation step, in issue order, with their lanes and slots.

Numbers are leads: `i+2` runs two batches ahead of batch i, whose forward and backward run in this step.

lane read   read i+3
lane host   copy to the device i+2; prefetch i+1, where a table has rows in a slower memory tier
main        request i+2; lookup i; forward i: bottom, then top; backward i: top, then bottom; update; optimizer step
lane ids    lengths i+2 and ids i+1 (all-to-all): before batch i, or after batch i's vectors or gradients
lane wire   vectors i (all-to-all), overlapped with the bottom's forward; gradients i, overlapped with its backward.
            Row-wise tables of a host: partial sums are reduced inside the host before vectors, and gradients are
            broadcast inside it before the update
lane dense  all-reduce of the top's gradients, overlapped with the bottom's backward; then of the bottom's gradients
"""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from shardwright.spec.plan import Stage

LANES = ("read", "main", "ids", "host", "wire", "dense")
# Setting `ids_after` to the stage of batch i after which the ids of batch i+1 are issued.
IDS_AFTER = MappingProxyType({"read": "to_device", "vectors": "vectors", "gradients": "backward"})
REDUCED_SLOTS = ("reduced.top", "reduced.bottom")
FORWARD_BODY = (
    Stage("bottom", "main", ("batch", "state.dense"), ("low",)),
    Stage("top", "main", ("batch", "low", "vectors", "state.dense"), ("logits", "loss")),
)
BACKWARD_BODY = (
    Stage("top.backward", "main", ("loss",), ("gradients.vectors", "gradients.low", "gradients.top")),
    Stage("gradients", "wire", ("ids", "gradients.vectors"), ("gradients.tables",)),
    Stage("reduce", "dense", ("gradients.top",), ("reduced.top",)),
    Stage("bottom.backward", "main", ("gradients.low",), ("gradients.bottom",)),
    Stage("reduce.bottom", "dense", ("gradients.bottom",), ("reduced.bottom",)),
)


def recommendation_stages(
    prefetch: bool,
    ids_after: str = "read",
    host_reduce: bool = False,
    bodies: tuple[tuple[Stage, ...], tuple[Stage, ...]] = (FORWARD_BODY, BACKWARD_BODY),
) -> tuple[Stage, ...]:
    """The stages of a step in issue order.

    `prefetch`: copy rows from a slower memory tier one batch ahead. `ids_after`: a key of `IDS_AFTER`; slot
    "state.wire" makes the ids of batch i+1 wait for that stage even where streams would allow them to start earlier.
    `host_reduce`: add partial sums inside a host before they cross hosts. `bodies`: the stages inside the forward and
    the backward stage.
    """
    forward_body, backward_body = bodies
    prefetched = ("near",) if prefetch else ()
    order_slots = ("state.wire",) if ids_after != "read" else ()
    id_stages = [
        Stage("request", "main", ("batch",), ("request",), 2),
        Stage("lengths", "ids", ("request",), ("lengths",), 2),
        Stage("ids", "ids", ("lengths", *order_slots), ("ids",), 1),
    ]
    if prefetch:
        id_stages.append(Stage("prefetch", "host", ("ids",), ("near",), 1))
    vector_stages = [Stage("vectors", "wire", ("looked",), ("vectors",))]
    broadcast_stages: list[Stage] = []
    if host_reduce:
        vector_stages = [Stage("meet", "wire", ("looked",), ("met",)), Stage("vectors", "wire", ("met",), ("vectors",))]
        backward_body = tuple(
            replace(stage, writes=("gradients.met",)) if stage.name == "gradients" else stage for stage in backward_body
        )
        broadcast_stages = [Stage("spread", "wire", ("ids", "gradients.met"), ("gradients.tables",))]
    gradient_slots = next(stage.writes for stage in backward_body if stage.name == "gradients")
    stages = [
        Stage("read", "read", (), ("host_batch",), 3),
        Stage("to_device", "host", ("host_batch",), ("batch",), 2),
        Stage("lookup", "main", ("ids", *prefetched, "state.tables"), ("looked",)),
        *vector_stages,
        Stage("forward", "main", ("batch", "vectors", "state.dense"), ("logits", "loss"), body=forward_body),
        Stage("backward", "main", ("ids", "loss", "vectors"), (*gradient_slots, *REDUCED_SLOTS), body=backward_body),
        *broadcast_stages,
        Stage("update", "main", ("ids", "gradients.tables"), ("state.tables",)),
        Stage("step", "main", REDUCED_SLOTS, ("state.dense",)),
        Stage("emit", "main", ("batch", "logits", "loss"), ()),
    ]
    position = [stage.name for stage in stages].index(IDS_AFTER[ids_after])
    previous = replace(stages[position], writes=(*stages[position].writes, *order_slots))
    if previous.body and order_slots:
        backward_body = (
            replace(stage, writes=(*stage.writes, *order_slots)) if stage.name == ids_after else stage
            for stage in previous.body
        )
        previous = replace(previous, body=tuple(backward_body))
    return (*stages[:position], previous, *id_stages, *stages[position + 1 :])


def has_sharded_tables(stages: Sequence[Stage]) -> bool:
    """Whether ranks exchange ids and vectors: the stages are those of several ranks."""
    return any(stage.name == "lengths" for stage in stages)


def has_host_reduce(stages: Sequence[Stage]) -> bool:
    """Whether partial sums of vectors are added inside each host."""
    return any(stage.name == "meet" for stage in stages)
