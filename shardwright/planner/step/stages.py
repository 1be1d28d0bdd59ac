"""A recommendation step as a list of stages, in the order they are issued.

lane read   read i+3
lane host   to the device i+2; prefetch i+1, where rows lie in slower tiers
main        request i+2; lookup i, forward i: bottom, then top; backward i: top, then bottom; update, step
lane ids    lengths i+2, ids i+1: before anything of batch i, behind its vectors, or behind their gradients
lane wire   vectors i beside the bottom, gradients i beside its backward; where rows of a table are over the ranks of a
            host, parts meet there before vectors, and gradients spread there before the update
lane dense  all-reduce of the top's gradients beside that backward, of the bottom's after it
"""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from shardwright.spec.plan import Stage

LANES = ("read", "main", "ids", "host", "wire", "dense")
# What of batch i the ids of batch i+1 may be issued behind, and the stage that does it.
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
    """In the order they are issued. Through "state.wire" ids of batch i+1 wait for what they are issued behind, also
    where streams would let them go at once. Forward and backward are one call each; `bodies` are what is inside."""
    inside, body = bodies
    near = ("near",) if prefetch else ()
    turn = ("state.wire",) if ids_after != "read" else ()
    given = [
        Stage("request", "main", ("batch",), ("request",), 2),
        Stage("lengths", "ids", ("request",), ("lengths",), 2),
        Stage("ids", "ids", ("lengths", *turn), ("ids",), 1),
    ]
    if prefetch:
        given.append(Stage("prefetch", "host", ("ids",), ("near",), 1))
    there = [Stage("vectors", "wire", ("looked",), ("vectors",))]
    back: list[Stage] = []
    if host_reduce:
        there = [Stage("meet", "wire", ("looked",), ("met",)), Stage("vectors", "wire", ("met",), ("vectors",))]
        body = tuple(replace(one, writes=("gradients.met",)) if one.name == "gradients" else one for one in body)
        back = [Stage("spread", "wire", ("ids", "gradients.met"), ("gradients.tables",))]
    gradients = next(one.writes for one in body if one.name == "gradients")
    found = [
        Stage("read", "read", (), ("host_batch",), 3),
        Stage("to_device", "host", ("host_batch",), ("batch",), 2),
        Stage("lookup", "main", ("ids", *near, "state.tables"), ("looked",)),
        *there,
        Stage("forward", "main", ("batch", "vectors", "state.dense"), ("logits", "loss"), body=inside),
        Stage("backward", "main", ("ids", "loss", "vectors"), (*gradients, *REDUCED_SLOTS), body=body),
        *back,
        Stage("update", "main", ("ids", "gradients.tables"), ("state.tables",)),
        Stage("step", "main", REDUCED_SLOTS, ("state.dense",)),
        Stage("emit", "main", ("batch", "logits", "loss"), ()),
    ]
    place = [one.name for one in found].index(IDS_AFTER[ids_after])
    before = replace(found[place], writes=(*found[place].writes, *turn))
    if before.body and turn:
        body = (replace(one, writes=(*one.writes, *turn)) if one.name == ids_after else one for one in before.body)
        before = replace(before, body=tuple(body))
    return (*found[:place], before, *given, *found[place + 1 :])


def has_host_reduce(stages: Sequence[Stage]) -> bool:
    """Whether parts of vectors meet inside each host."""
    return any(stage.name == "meet" for stage in stages)
