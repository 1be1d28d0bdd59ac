"""The stages of a training step in issue order, with lanes and slots; for one rank or many, with or without tables.

Numbers are leads, with several ranks: `i+2` runs two batches ahead of batch i, whose forward and backward run in this
step. One rank has no communication to overlap, so its leads are 0, except copies to a GPU and with caches.

lane read   read i+3
lane host   copy to the device i+2; with caches (rows in slower memory tiers): prefetch i+1, expect i+4. Then read, the
            copy to the device, request, lengths and ids run four batches earlier, so that expect does not wait
main        request i+2; lookup i; forward i: bottom, then top; backward i: top, then bottom; update; optimizer step
lane ids    lengths i+2 and ids i+1 (all-to-all): before batch i, or after batch i's vectors or gradients
lane wire   vectors i (all-to-all), overlapped with the bottom's forward; gradients i, overlapped with its backward.
            Row-wise tables of a host: partial sums are reduced inside the host before vectors, and gradients are
            broadcast inside it before the update
lane dense  all-reduce of the top's gradients, overlapped with the bottom's backward; then of the bottom's gradients
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from shardwright.spec.calls import without_leads
from shardwright.spec.lanes import DENSE, HOST, IDS, MAIN, READ, WIRE
from shardwright.spec.plan import Stage
from shardwright.spec.row_cache import KNOWN_BATCHES
from shardwright.spec.stage_checks import ORDERING_SLOT, is_persistent, sort_by_lead

Bodies = tuple[tuple[Stage, ...], tuple[Stage, ...]]  # the stages inside the forward and inside the backward stage
# Leads by stage, other stages have 0: of several ranks, of one rank on a CPU and on a GPU.
OVERLAPPED = MappingProxyType({"read": 3, "to_device": 2, "request": 2, "lengths": 2, "ids": 1})
# With caches, ids are exchanged one step before `expect` needs them, so that it does not wait.
CACHED = MappingProxyType(
    {name: lead + 2 + KNOWN_BATCHES for name, lead in OVERLAPPED.items()} | {"prefetch": 1, "expect": 2 + KNOWN_BATCHES}
)
# Of a pipeline: batches of the next step are announced while this step runs.
PIPELINED = MappingProxyType({"read": 1, "to_device": 1, "request": 1, "lengths": 1})
ONE_RANK = MappingProxyType[str, int]({})
ONE_RANK_GPU = MappingProxyType({"read": 2, "to_device": 1})
# Setting `ids_after` to the stage of batch i after which the ids of batch i+1 are issued.
IDS_AFTER = MappingProxyType({"read": "to_device", "vectors": "vectors", "gradients": "backward"})
REDUCED_SLOTS = ("reduced.top", "reduced.bottom")
FORWARD_BODY = (
    Stage("bottom", MAIN, ("batch", "state.dense"), ("low",)),
    Stage("top", MAIN, ("batch", "low", "vectors", "state.dense"), ("logits", "loss")),
)
BACKWARD_BODY = (
    Stage("top.backward", MAIN, ("loss",), ("gradients.vectors", "gradients.low", "gradients.top")),
    Stage("gradients", WIRE, ("ids", "gradients.vectors"), ("gradients.tables",)),
    Stage("reduce", DENSE, ("gradients.top",), ("reduced.top",), per="step"),
    Stage("bottom.backward", MAIN, ("gradients.low",), ("gradients.bottom",)),
    Stage("reduce.bottom", DENSE, ("gradients.bottom",), ("reduced.bottom",), per="step"),
)


# Of a model without tables.
DENSE_FORWARD_BODY = (Stage("top", MAIN, ("batch", "state.dense"), ("logits", "loss")),)
DENSE_BACKWARD_BODY = (
    Stage("top.backward", MAIN, ("loss",), ("gradients.top",)),
    Stage("reduce", DENSE, ("gradients.top",), REDUCED_SLOTS, per="step"),
)
NO_BODIES: Bodies = ((), ())
# Tells the caches which rows a batch will use. Listed after `prefetch`, so that placing an earlier batch does not wait.
EXPECT = Stage("expect", HOST, ("ids", "state.uses"), ("expected", "state.uses"))
# Holds the lines of a batch in "near" until its update; evicts and fills lines that no batch holds.
PREFETCH = Stage("prefetch", HOST, ("ids", "expected", "state.lines"), ("near", "state.lines", "state.tables.idle"))

# Of tables with bounded staleness, after "ids": finds copies of the batch's rows, and validates those whose lease
# has expired.
COPY_STAGES = (
    Stage("copies", MAIN, ("ids", "state.copies"), ("copies", "state.copies")),
    Stage("counts", IDS, ("copies",), ("counts",)),
    Stage("validate", IDS, ("copies", "counts"), ("expired",)),
    Stage("renew", IDS, ("copies", "expired", "state.tables"), ("renewed",)),
)
# Of tables on servers, in place of those: a call to each server.
FETCH_STAGES = (COPY_STAGES[0], Stage("fetch", HOST, ("copies", "state.served"), ("fetched",)))
# The update then sends gradients to servers, which nobody waits for but the next fetch, and updates copies meanwhile.
SERVED_UPDATE_BODY = (
    Stage("push", HOST, ("gradients.tables",), ("state.served",), per="step"),
    Stage("update", MAIN, ("ids", "gradients.tables", "state.copies"), ("state.tables", "state.copies"), per="step"),
)


def pipeline_stages() -> tuple[Stage, ...]:
    """The stages of a step of a pipeline; `rank_stages` (spec/pipeline.py) makes those of a rank from them."""
    stages = list(step_stages(has_tables=False, leads=PIPELINED, bodies=NO_BODIES))
    position = [stage.name for stage in stages].index("forward")
    weight = ("step_weight",)
    stages[position] = replace(stages[position], reads=("batch", *weight, "state.dense"))
    stages[position + 1] = replace(stages[position + 1], reads=("weight", *weight, "loss"))
    stages.insert(position, Stage("weigh", MAIN, ("lengths",), weight, per="step"))
    announced = {"request": ("weight",), "lengths": ("request",)}  # of all micro-batches of a step at once
    return tuple(
        replace(stage, reads=announced[stage.name], per="step") if stage.name in announced else stage
        for stage in stages
    )


def step_stages(
    *,
    has_tables: bool = True,
    leads: Mapping[str, int] | None = None,
    prefetch: bool = False,
    ids_after: str = "read",
    host_reduce: bool = False,
    bodies: Bodies = (FORWARD_BODY, BACKWARD_BODY),
) -> tuple[Stage, ...]:
    """The stages of a step in issue order.

    `has_tables`: whether the model has embedding tables. `prefetch`: copy rows from a slower memory tier one batch
    ahead. `ids_after`: a key of `IDS_AFTER`; the ordering slot makes the ids of batch i+1 wait for that stage even
    where streams would allow them to start earlier. `host_reduce`: add partial sums inside a host before they cross
    hosts. `bodies`: the parts of the forward and backward stage that the simulator models.
    """
    ordering = (ORDERING_SLOT,) if ids_after != "read" else ()
    leads = (CACHED if prefetch else OVERLAPPED) if leads is None else leads
    # Without tables, forward waits until all ranks have announced the batch; with tables, the exchange of ids does.
    vectors, ids, announced = (("vectors",), ("ids",), ()) if has_tables else ((), (), ("lengths",))
    gradients = ("gradients.met" if host_reduce else "gradients.tables",) if has_tables else ()
    stages = [
        Stage("read", READ, (), ("host_batch", "weight")),
        Stage("to_device", HOST, ("host_batch",), ("batch",)),
        *(_lookup_stages(prefetch, host_reduce) if has_tables else ()),
        Stage("forward", MAIN, ("batch", *announced, *vectors, "state.dense"), ("logits", "loss"), body=bodies[0]),
        Stage(
            "backward",
            MAIN,
            (*ids, "lengths", "loss", *vectors),
            (*gradients, *REDUCED_SLOTS),
            body=_rename_gradients(bodies[1], gradients),
        ),
        *(_update_stages(prefetch, host_reduce) if has_tables else ()),
        Stage("step", MAIN, REDUCED_SLOTS, ("state.dense",), per="step"),
        Stage("emit", MAIN, ("batch", "logits", "loss"), ()),
    ]
    position = [stage.name for stage in stages].index(IDS_AFTER[ids_after])
    stages[position] = _write_ordering_slot(stages[position], ids_after, ordering)
    stages[position + 1 : position + 1] = _announcing_stages(has_tables, prefetch, ordering)
    return tuple(replace(stage, lead=leads.get(stage.name, 0)) for stage in stages)


def _announcing_stages(has_tables: bool, prefetch: bool, ordering: tuple[str, ...]) -> list[Stage]:
    """Ranks announce their batches to each other, then exchange ids."""
    stages = [
        Stage("request", MAIN, ("batch", "weight"), ("request",)),
        Stage("lengths", IDS, ("request",), ("lengths",)),
    ]
    if has_tables:
        stages.append(Stage("ids", IDS, ("lengths", *ordering), ("ids",)))
    if prefetch:
        stages += [PREFETCH, EXPECT]
    return stages


def _lookup_stages(prefetch: bool, host_reduce: bool) -> list[Stage]:
    """From rows to the vectors of the local batch."""
    near = ("near",) if prefetch else ()
    lookup = Stage("lookup", MAIN, ("ids", *near, "state.tables"), ("looked",))
    if not host_reduce:
        return [lookup, Stage("vectors", WIRE, ("looked",), ("vectors",))]
    return [
        lookup,
        Stage("meet", WIRE, ("looked",), ("met",)),
        Stage("vectors", WIRE, ("met",), ("vectors",)),
    ]


def _update_stages(prefetch: bool, host_reduce: bool) -> list[Stage]:
    """From the received gradients to the tables."""
    near = ("near",) if prefetch else ()
    update = Stage("update", MAIN, ("ids", *near, "gradients.tables"), ("state.tables",), per="step")
    broadcast = Stage("spread", WIRE, ("ids", "gradients.met"), ("gradients.tables",))
    return [broadcast, update] if host_reduce else [update]


def _rename_gradients(body: Sequence[Stage], slots: tuple[str, ...]) -> tuple[Stage, ...]:
    """The body of backward, whose stage "gradients" writes these slots."""
    return tuple(replace(stage, writes=slots) if stage.name == "gradients" else stage for stage in body)


def _write_ordering_slot(stage: Stage, ids_after: str, ordering: tuple[str, ...]) -> Stage:
    """The stage that the ids of the next batch wait for; inside a body, that is the stage `ids_after`."""
    body = (
        replace(inner, writes=(*inner.writes, *ordering)) if inner.name == ids_after else inner for inner in stage.body
    )
    return replace(stage, writes=(*stage.writes, *ordering), body=tuple(body))


def evaluation_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages that `emit` needs, and those in which ranks announce their batches."""
    needed = {"emit", "lengths"}
    slots: set[str] = set()
    for stage in reversed(sort_by_lead(stages)):
        if stage.name in needed or any(slot in slots and not is_persistent(slot) for slot in stage.writes):
            needed.add(stage.name)
            slots.update(stage.reads)
    return without_leads([stage for stage in stages if stage.name in needed])


def with_prefetch(stages: Sequence[Stage], *, from_host: bool = False) -> tuple[Stage, ...]:
    """The stages with "prefetch" and "expect", ahead of others; `from_host`: "request" reads ids from host memory."""
    if has_prefetch(stages):
        return tuple(stages)
    all_stages: list[Stage] = []
    for stage in stages:
        if stage.name in ("lookup", "update"):
            stage = replace(stage, reads=("ids", "near", *stage.reads[1:]))
        if stage.name == "request" and from_host:
            stage = replace(stage, reads=("host_batch", "weight"))
        keeps_lead = from_host and stage.name == "to_device"
        all_stages.append(stage if keeps_lead else replace(stage, lead=max(stage.lead, CACHED.get(stage.name, 0))))
        if stage.name == "ids":
            all_stages += [replace(each, lead=CACHED[each.name]) for each in (PREFETCH, EXPECT)]
    return tuple(all_stages)


def with_gpu(stages: Sequence[Stage], *, num_ranks: int = 1) -> tuple[Stage, ...]:
    """The stages of a rank with a GPU: a batch is read, checked and pinned while the one before is computed.

    With several ranks, requests are built from the ids in host memory.
    """
    from_host = num_ranks > 1 and any(stage.name == "lookup" for stage in stages)
    changed: list[Stage] = []
    for stage in stages:
        if stage.name == "read":
            stage = replace(stage, lead=max(stage.lead, 1))
        if stage.name == "request" and from_host:
            stage = replace(stage, reads=("host_batch", "weight"))
        changed.append(stage)
    return tuple(changed)


def with_copies(stages: Sequence[Stage], *, of_servers: bool = False) -> tuple[Stage, ...]:
    """The stages with those of tables with bounded staleness, or of tables on servers."""
    if has_copies(stages):
        return tuple(stages)
    added = FETCH_STAGES if of_servers else COPY_STAGES
    all_stages: list[Stage] = []
    for stage in stages:
        if stage.name == "lookup":
            all_stages += added
            stage = replace(stage, reads=(*stage.reads, *added[-1].writes, "state.copies"))
        if stage.name == "update":
            stage = replace(stage, reads=(*stage.reads, "state.copies"), writes=(*stage.writes, "state.copies"))
            if of_servers:
                stage = replace(stage, writes=(*stage.writes, "state.served"), body=SERVED_UPDATE_BODY)
        all_stages.append(stage)
    return tuple(all_stages)


def has_copies(stages: Sequence[Stage]) -> bool:
    """Whether rows of other ranks, or of servers, are read from copies."""
    return any(stage.name == "copies" for stage in stages)


def has_servers(stages: Sequence[Stage]) -> bool:
    """Whether tables are on servers."""
    return any(stage.name == "fetch" for stage in stages)


def has_prefetch(stages: Sequence[Stage]) -> bool:
    """Whether rows are copied from a slower memory tier before their lookup."""
    return any(stage.name == "prefetch" for stage in stages)


def requests_from_host(stages: Sequence[Stage]) -> bool:
    """Whether stage "request" reads the ids from host memory."""
    return any(stage.name == "request" and "host_batch" in stage.reads for stage in stages)


def has_host_reduce(stages: Sequence[Stage]) -> bool:
    """Whether partial sums of vectors are added inside each host."""
    return any(stage.name == "meet" for stage in stages)
