"""The plan: which rank holds which values, in which precision and memory tier, and the stages of a step.

A plan is data: the planner or a person writes it, `verify` checks it, and the runtime binds stage names to functions.
Checks of stages are in stage_checks.py, checks of tables in table_checks.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

from shardwright.spec import files, stage_checks, table_checks
from shardwright.spec.axes import ONE_RANK_AXES, SAMPLE_ROLES, Axis, axis_name, num_ranks
from shardwright.spec.checks import raise_if_any
from shardwright.spec.lanes import LANES
from shardwright.spec.workload import Dtype, Table, Workload, state_dtype, table_weight_dtype

ExchangeMode = Literal["vectors", "rows"]
RecomputePolicy = Literal["nothing", "products"]
CopyPolicy = Literal["none", "shadows", "even", "fastest"]
COPY_POLICIES: tuple[CopyPolicy, ...] = get_args(CopyPolicy)
ExpertRowOrderName = Literal["ranks", "balanced"]
ExpertExchangeMode = Literal["flat", "hosts"]
EXPERT_EXCHANGES: tuple[ExpertExchangeMode, ...] = get_args(ExpertExchangeMode)
# Operators whose outputs a recomputed block saves under RecomputePolicy "products".
SAVED_PRODUCT_OPS = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution", "grouped_linear"))


@dataclass(frozen=True, slots=True)
class Rect:
    """A table shard: a range of rows and columns (end excluded), replicated on every rank of `ranks`."""

    table: str
    rows: tuple[int, int]
    cols: tuple[int, int]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exact:
    """Synchronous: every read sees every earlier update."""

    kind: Literal["exact"] = "exact"


@dataclass(frozen=True, slots=True)
class Bounded:
    """Bounded staleness: a rank reads rows of other ranks from up to `copies` copies.

    Both numbers count uses of a row: of a batch that has its id 30 times, 30. `push` limits those in the updates that a
    rank holds back, `pull` those that a copy misses when it is validated plus what others can add during its lease. So
    a read misses at most `max_missed(num_ranks)` updates of other ranks, and none of its own; an update is the gradient
    of one rank for one batch.
    """

    pull: int
    push: int
    copies: int = 0
    kind: Literal["bounded"] = "bounded"

    @property
    def has_copies(self) -> bool:
        """Whether rows may be stale at all; if not, training is exact and there are no copies."""
        return self.pull > 0 or self.push > 0

    def max_missed(self, num_ranks: int) -> int:
        """How many updates of other ranks a read may miss."""
        return self.pull + max(0, num_ranks - 1) * self.push


@dataclass(frozen=True, slots=True)
class Async:
    """Unbounded staleness."""

    kind: Literal["async"] = "async"


Sync = Annotated[Exact | Bounded | Async, files.BY_KIND]


class Share(NamedTuple):
    """Number of rows of each table shard in a memory tier; None: all remaining rows."""

    tier: str
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Memory tiers, precision and synchronization of a table."""

    tiers: tuple[Share, ...]
    weight_dtype: Dtype = "float32"
    state_dtype: Dtype = "float32"
    sync: Sync = Exact()


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The shards of a table; row numbers are positions under `order`. `scheme` names the planner's sharding scheme.

    `travel` is what ranks exchange by all-to-all. "vectors": the owners of rows pool them and send the vectors to the
    ranks of the samples, which send back vector gradients. "rows" (row exchange): owners send each distinct row that a
    local batch needs, the receiving rank pools them and sends back the summed gradient of each row. Unpooled features
    always use the row exchange.
    """

    table: str
    order: str  # "id" | "load" | "hash:SEED"
    rects: tuple[Rect, ...]
    placement: Placement
    travel: ExchangeMode = "vectors"
    scheme: str = ""  # empty: placed by hand, or written by plan version 1


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the step: the slots it reads and writes, and how many micro-batches ahead it runs (`lead`).

    A slot belongs to one micro-batch; a slot "state.X" belongs to the run. A stage runs for each micro-batch, or, with
    `per` "step", once a step, after the stages of the last one; it then reads a list of the slot's values, one for each
    micro-batch. `body` lists the parts that the simulator models.
    """

    name: str
    lane: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    lead: int = 0
    body: "tuple[Stage, ...]" = ()
    per: Literal["micro", "step"] = "micro"


@dataclass(frozen=True, slots=True)
class Contract:
    """The slots that the function of a stage reads and writes; its Stage must declare exactly the same."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wire:
    """Precision of messages: vectors in forward, their gradients in backward, dense gradients."""

    vectors: Dtype = "float32"
    gradients: Dtype = "float32"
    dense: Dtype = "float32"


class Recompute(NamedTuple):
    """Activation checkpointing of a block: recompute it in backward; `kept` says which outputs are saved."""

    block: str
    kept: RecomputePolicy = "nothing"


@dataclass(frozen=True, slots=True)
class Dense:
    """Parallelism strategy of the dense model: only `replicate` is DDP, only `shard` FSDP, both HSDP.

    With sharding, the weights of a block are all-gathered before its forward and its backward; `ahead` more blocks are
    prefetched. For an offloaded block, this rank's shard of weights, gradients and optimizer state is in the next
    slower tier. `dtype`: precision of matrix products; `state`: of optimizer state; weights keep their precision.
    `shard_optimizer`: replicas along these axes shard the optimizer state (ZeRO-1). `offload_activations`: the share of
    the saved activations that each pipeline rank moves to host memory.
    """

    replicate: tuple[str, ...] = ()  # axes
    shard: tuple[str, ...] = ()  # axes
    recompute: tuple[Recompute, ...] = ()
    offload: tuple[str, ...] = ()  # blocks
    ahead: int = 1
    dtype: Dtype = "float32"
    state: Dtype = "float32"
    shard_optimizer: tuple[str, ...] = ()  # axes
    offload_activations: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Pipeline parallelism along the axes with role "pipe"; see spec/pipeline.py.

    `blocks`: the number of blocks of each chunk, in the order of the model; the embedding belongs to the first chunk,
    the head to the last. `micro_batches`: parts of each local batch. `schedule`: a key of `SCHEDULES`.
    """

    blocks: tuple[int, ...]
    micro_batches: int
    schedule: Literal["1f1b", "interleaved"] = "1f1b"


class SharedLink(NamedTuple):
    """A link that consecutive ranks share, such as a host's network card. Predicted seconds of a row, and of the
    weights of an expert, that pass it."""

    ranks: int
    send_row: float
    send_expert: float


@dataclass(frozen=True, slots=True)
class ExpertCosts:
    """Predicted seconds: to compute a row in forward; to send a row, or the weights of an expert, to another rank.

    `shared`: links that the messages of several ranks pass besides. `hand_on`: what each further rank adds to a chain
    of copies, to send on a part of its gradients. `slowdown`: computation lost while a rank sends and receives rows, as
    a share of that time.
    """

    compute_row: float
    send_row: float
    send_expert: float
    shared: tuple[SharedLink, ...] = ()
    hand_on: float = 0.0
    slowdown: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Expert parallelism of the mixture at a path of the model.

    Its experts are split over the ranks along `axes`, in order, as evenly as possible; other ranks with different
    samples have replicas. Rows are exchanged in `groups` steps, between as many groups of consecutive ranks.

    `copies`: which experts are copied to other ranks for a call, once its routing is known. "shadows": those that
    FasterMoE's Algorithm 1 selects, to all ranks; "even": as many as it takes that no rank computes more rows than the
    mean, rounded up; "fastest": what takes least time by `costs`, none included.

    `order`: of each expert's rows, see spec/expert_rows.py; results with and without copies are equal to the bit if it
    is the same.

    `exchange`: "flat", each row to the rank that computes it; "hosts", a token once to each group along the first axis
    that has one of its experts, and rows, steps and copies among the ranks along the other axes.
    """

    module: str
    axes: tuple[str, ...]
    groups: int = 1
    copies: CopyPolicy = "none"
    costs: ExpertCosts | None = None
    order: ExpertRowOrderName = "ranks"
    exchange: ExpertExchangeMode = "flat"

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Those along which rows are exchanged."""
        return self.axes[1:] if self.exchange == "hosts" else self.axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    version: Literal[1, 2, 3, 4]  # 1: without the scheme of tables; up to 3: with other stages
    workload_digest: str
    cluster_digest: str | None = None  # None: planned without a cluster
    allow: tuple[str, ...] = ()  # changes of the mathematics that the recipe permits
    axes: tuple[Axis, ...]  # outermost first; ranks are numbered along the last first
    lanes: tuple[str, ...]
    tables: tuple[TablePlan, ...]
    servers: int = 0  # processes that own rows of tables, numbered after the ranks
    dense: Dense = Dense()
    experts: tuple[ExpertPlan, ...] = ()
    wire: Wire = Wire()
    pipeline: Pipeline | None = None
    stages: tuple[Stage, ...]  # in issue order within a tick; a batch runs the stages with the largest lead first
    why: tuple[tuple[str, str], ...] = ()  # (subject, reason)

    def digest(self) -> str:
        return files.digest(self)

    @staticmethod
    def upgrade(data: dict[str, Any]) -> dict[str, Any]:
        """Plain data of a plan of version 1 or 2, whose axes were pairs of level and size, with today's axes."""
        axes = cast("list[Any]", data["axes"]) if isinstance(data.get("axes"), list) else []
        if not axes or not all(_is_level_axis(axis) for axis in axes):
            return data
        dense = cast("dict[str, Any]", data["dense"]) if isinstance(data.get("dense"), dict) else {}
        for key in ("replicate", "shard"):
            if isinstance(dense.get(key), list):
                dense = dense | {key: [axis_name("data", level) for level in cast("list[Any]", dense[key])]}
        return data | {"axes": [["data", *axis] for axis in axes]} | ({"dense": dense} if dense else {})

    @property
    def mesh_axes(self) -> tuple[tuple[str, int], ...]:
        """The axes of the plan's mesh: names and sizes."""
        return tuple((axis.name, axis.size) for axis in self.axes)

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """Names of the axes along which ranks have different samples."""
        return tuple(axis.name for axis in self.axes if axis.role in SAMPLE_ROLES)

    @property
    def pipeline_axes(self) -> tuple[str, ...]:
        """Names of the axes along which ranks have different chunks of the model."""
        return tuple(axis.name for axis in self.axes if axis.role == "pipe")

    @property
    def num_pipeline_ranks(self) -> int:
        return num_ranks(axis for axis in self.axes if axis.role == "pipe")

    def pipeline_rank(self, rank: int) -> int:
        """The index of a rank along the pipeline."""
        return self.position(rank, self.pipeline_axes)[0]

    def position(self, rank: int, axes: Sequence[str]) -> tuple[int, int]:
        """The index of a rank among those that differ from it only along these axes, and their number."""
        index, size, inner = 0, 1, self.num_ranks
        for axis in self.axes:
            inner //= axis.size
            if axis.name in axes:
                index, size = index * axis.size + rank // inner % axis.size, size * axis.size
        return index, size

    @property
    def num_ranks(self) -> int:
        return num_ranks(self.axes)

    def verify(self, workload: Workload | None = None, contracts: Mapping[str, Contract] | None = None) -> None:
        """Raise an error for an invalid plan, or one that does not match the given workload or contracts."""
        raise_if_any(message for check in CHECKS for message in check(self, workload, contracts))


def _is_level_axis(axis: Any) -> bool:
    return isinstance(axis, list) and len(cast("list[Any]", axis)) == 2


CHECKS = stage_checks.CHECKS + table_checks.CHECKS
TABLE_DTYPES = MappingProxyType[str, Dtype](
    {"tables.fp16": "float16", "tables.bf16": "bfloat16"}
)  # by entry of `allow`


def single_rank_plan(
    workload: Workload,
    *,
    stages: tuple[Stage, ...],
    lanes: tuple[str, ...] = LANES,
    allow: tuple[str, ...] = (),
    fast_bf16: bool = False,
) -> Plan:
    """The plan of a single process: one shard per table, in dram, with all precision reductions that `allow` permits.

    `fast_bf16`: the device is fast at bfloat16 matrix products; only then are they used.
    """
    wire_dtype = widest_dtype(workload.tables)
    reduced_dtype: Dtype | None = next((TABLE_DTYPES[entry] for entry in allow if entry in TABLE_DTYPES), None)
    tables = tuple(single_rank_table_plan(table, reduced_dtype) for table in workload.tables)
    optimizer_dtype = "bfloat16" if "optimizer.bf16" in allow and wire_dtype == "float32" else wire_dtype
    bf16_allowed = "dense.bf16" in allow
    bf16_used = bf16_allowed and fast_bf16
    matmul_dtype: Dtype = "bfloat16" if bf16_used else wire_dtype
    matmul_note = (
        "in bfloat16: allowed, and fast on this device" if bf16_used else "not in bfloat16: slow on this device"
    )
    return Plan(
        version=4,
        workload_digest=workload.digest(),
        allow=allow,
        axes=ONE_RANK_AXES,
        lanes=lanes,
        tables=tables,
        dense=Dense(tuple(axis.name for axis in ONE_RANK_AXES), dtype=matmul_dtype, state=optimizer_dtype),
        wire=Wire(wire_dtype, wire_dtype, wire_dtype),
        stages=stages,
        why=(
            *(
                (f"table {table.table}", f"one process holds the whole table, in dram{_weight_dtype_note(table)}")
                for table in tables
            ),
            *((("dense", f"matrix products {matmul_note}"),) if bf16_allowed else ()),
            *((("optimizer", "moments in bfloat16: allowed"),) if optimizer_dtype == "bfloat16" else ()),
            ("stages", "one process has nothing to exchange"),
        ),
    )


def _weight_dtype_note(table: TablePlan) -> str:
    dtype = table.placement.weight_dtype
    return f", its weights in {dtype}" if dtype in table_checks.DTYPE_SHORT_NAMES else ""


def widest_dtype(tables: Sequence[Table]) -> Dtype:
    """The dtype that holds the values of all tables exactly."""
    return "float64" if any(table.dtype == "float64" for table in tables) else "float32"


def single_rank_table_plan(table: Table, reduced_dtype: Dtype | None = None) -> TablePlan:
    """One shard on rank 0 in dram, in the table's dtype; float32 weights are stored as `reduced_dtype`, if given."""
    rect = Rect(table.name, (0, table.rows), (0, table.dim), (0,))
    placement = Placement((Share("dram"),), table_weight_dtype(table, reduced_dtype), state_dtype(table.dtype))
    order = "id" if table.growth is None else "hash:0"
    return TablePlan(table.name, order, (rect,), placement, scheme="table")
