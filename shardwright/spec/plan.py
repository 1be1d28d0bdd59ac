"""Who holds what, in which precision and tier, and the stages of a step: the one value the runtime obeys.

A plan is data: the planner or a person makes it, `verify` proves it legal, the runtime binds stage names to
functions. What may be wrong with the stages is in hazards.py, with who holds what in layout.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from shardwright.spec import files, stage_checks, table_checks
from shardwright.spec.checks import raise_if_any
from shardwright.spec.workload import Dtype, Table, Workload, state_dtype, table_weight_dtype

ExchangeMode = Literal["vectors", "rows"]
RecomputePolicy = Literal["nothing", "products"]
# Of aten; what they give stays where products of a recomputed block are kept.
SAVED_PRODUCT_OPS = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution"))


@dataclass(frozen=True, slots=True)
class Rect:
    """Rows lo..hi and columns lo..hi of a table, hi excluded, held alike by every rank of `ranks`."""

    table: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exact:
    """Every read sees every earlier update."""

    kind: Literal["exact"] = "exact"


@dataclass(frozen=True, slots=True)
class Bounded:
    """A row read may miss the last `pull` updates of others; own updates wait for at most `push` steps."""

    pull: int
    push: int
    kind: Literal["bounded"] = "bounded"


@dataclass(frozen=True, slots=True)
class Async:
    """No bound at all."""

    kind: Literal["async"] = "async"


Sync = Annotated[Exact | Bounded | Async, files.BY_KIND]


class Share(NamedTuple):
    """So many rows of each rectangle lie in a tier; None: all that are left."""

    tier: str
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    tiers: tuple[Share, ...]
    weight_dtype: Dtype = "float32"
    state_dtype: Dtype = "float32"
    sync: Sync = Exact()


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The rectangles of a table; their rows are positions under `order`.

    `travel`: pooled vectors to the ranks of their samples, and their gradients back; or each distinct row that a rank's
    samples have, to be pooled there, and the sum of its gradients back. Where a feature is not pooled rows travel
    whatever it says.
    """

    table: str
    order: str  # "id" | "load" | "hash:SEED"
    rects: tuple[Rect, ...]
    placement: Placement
    travel: ExchangeMode = "vectors"


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the step: the slots it reads and writes, and how many batches ahead it may run.

    A slot belongs to a batch, or, named "state.X", to the run. `body` is what the simulator sees inside.
    """

    name: str
    lane: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    lead: int = 0
    body: "tuple[Stage, ...]" = ()


@dataclass(frozen=True, slots=True)
class Contract:
    """The slots the function of a stage reads and writes: what its Stage must declare."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wire:
    """What travels in which precision: vectors forward, their gradients back, dense gradients."""

    vectors: Dtype = "float32"
    gradients: Dtype = "float32"
    dense: Dtype = "float32"


class Recompute(NamedTuple):
    """A block that runs again in its backward pass, in place of keeping what it computed; `kept` is what stays."""

    block: str
    kept: RecomputePolicy = "nothing"


@dataclass(frozen=True, slots=True)
class Dense:
    """DDP is `replicate` alone, FSDP `shard` alone, HSDP both; then the blocks that trade time for memory.

    Where axes shard, the weights of a block are gathered before its turn, forward and backward, those of `ahead` more
    blocks beside it. Of a block that is offloaded this rank's part of weights, gradients and optimizer state lies in
    the next slower tier. `dtype` is that of matrix products, `state` of what the optimizer keeps of weights; these stay
    as the model has them.
    """

    replicate: tuple[str, ...] = ()  # axes
    shard: tuple[str, ...] = ()  # axes
    recompute: tuple[Recompute, ...] = ()
    offload: tuple[str, ...] = ()  # blocks
    ahead: int = 1
    dtype: Dtype = "float32"
    state: Dtype = "float32"


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """For every expert of a block, the ranks that hold it."""

    block: str
    ranks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    version: Literal[1]
    workload_digest: str
    cluster_digest: str | None = None  # None: made without a cluster
    allow: tuple[str, ...] = ()  # what the recipe lets change the mathematics
    axes: tuple[tuple[str, int], ...]
    lanes: tuple[str, ...]
    tables: tuple[TablePlan, ...]
    dense: Dense = Dense()
    experts: tuple[ExpertPlan, ...] = ()
    wire: Wire = Wire()
    stages: tuple[Stage, ...]  # in the order they are issued, tick by tick; the largest lead meets a batch first
    why: tuple[tuple[str, str], ...] = ()  # (subject, reason)

    def digest(self) -> str:
        return files.digest(self)

    def verify(self, workload: Workload | None = None, contracts: Mapping[str, Contract] | None = None) -> None:
        """Refuse an illegal plan; and one that does not fit the workload, or the contracts, where given."""
        raise_if_any(message for check in CHECKS for message in check(self, workload, contracts))


CHECKS = stage_checks.CHECKS + table_checks.CHECKS
TABLE_DTYPES = MappingProxyType[str, Dtype]({"tables.fp16": "float16", "tables.bf16": "bfloat16"})  # what allow names


def single_rank_plan(
    workload: Workload,
    *,
    stages: tuple[Stage, ...],
    lanes: tuple[str, ...] = ("main",),
    allow: tuple[str, ...] = (),
    fast_bf16: bool = False,
) -> Plan:
    """The plan of a single process: every table one rectangle in its memory, and what `allow` lets be rounded, rounded.

    `fast_bf16`: the device multiplies bfloat16; only then is it used.
    """
    wire = widest_dtype(workload.tables)
    shorter: Dtype | None = next((TABLE_DTYPES[entry] for entry in allow if entry in TABLE_DTYPES), None)
    tables = tuple(single_rank_table_plan(table, shorter) for table in workload.tables)
    state = "bfloat16" if "optimizer.bf16" in allow and wire == "float32" else wire
    permitted = "dense.bf16" in allow
    rounded = permitted and fast_bf16
    products = "in bfloat16: allowed, and fast on this device" if rounded else "not in bfloat16: slow on this device"
    return Plan(
        version=1,
        workload_digest=workload.digest(),
        allow=allow,
        axes=(("data", 1),),
        lanes=lanes,
        tables=tables,
        dense=Dense(replicate=("data",), dtype="bfloat16" if rounded else wire, state=state),
        wire=Wire(wire, wire, wire),
        stages=stages,
        why=(
            *(
                (f"table {table.table}", f"one process holds the whole table, in dram{_told(table)}")
                for table in tables
            ),
            *((("dense", f"matrix products {products}"),) if permitted else ()),
            *((("optimizer", "moments in bfloat16: allowed"),) if state == "bfloat16" else ()),
            ("stages", "one process has nothing to exchange"),
        ),
    )


def _told(table: TablePlan) -> str:
    dtype = table.placement.weight_dtype
    return f", its weights in {dtype}" if dtype in table_checks.DTYPE_SHORT_NAMES else ""


def widest_dtype(tables: Sequence[Table]) -> Dtype:
    """The dtype in which nothing of these tables is rounded."""
    return "float64" if any(table.dtype == "float64" for table in tables) else "float32"


def single_rank_table_plan(table: Table, rounded: Dtype | None = None) -> TablePlan:
    """One rectangle, on rank 0, in memory, in its own precision; or its weights `rounded`, if they are of float32."""
    rect = Rect(table.name, (0, table.rows), (0, table.dim), (0,))
    placement = Placement((Share("dram"),), table_weight_dtype(table, rounded), state_dtype(table.dtype))
    return TablePlan(table.name, "id", (rect,), placement)
