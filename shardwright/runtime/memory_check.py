"""Check that a run fits the memory of this host before allocating it, and report a failed allocation in one line."""

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path

import torch
from torch import nn

from shardwright.comm.mesh import host_id, host_topology, world_size
from shardwright.config import TrainSettings
from shardwright.errors import UserError
from shardwright.measure.describe import sparse_of
from shardwright.runtime.supported import cached_rows
from shardwright.spec import optimizer
from shardwright.spec.plan import Bounded, Plan
from shardwright.spec.row_cache import (
    FLOAT32_LINES,
    LINE_BYTES,
    OWNER_BYTES,
    ROW_INDEX_BYTES,
    SAVED_ROW_BYTES,
    SERVERS,
    STORE_SPACE,
    copy_bytes,
    id_map_bytes,
)
from shardwright.spec.workload import DTYPE_BYTES, Workload, state_dtype

# How torch's CPU and CUDA allocators and numpy report the requested size.
REQUESTED_SIZE = (
    r"you tried to allocate (\d+ bytes)",
    r"Tried to allocate ([\d.]+ \w+)",
    r"Unable to allocate ([\d.]+ \w+)",
)
ALLOCATION_FAILURE = re.compile(
    "|".join((*REQUESTED_SIZE, "std::bad_alloc", "Cannot allocate memory", "CUDA out of memory"))
)
GPU_PURPOSES = ("weights", "optimizer state")  # of what tables need, the part on a GPU
CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def available_bytes() -> int:
    """Bytes that processes of this host can still allocate, with swap, within the container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = {name: int(words.split()[0]) for name, _, words in (line.partition(":") for line in lines)}
    free = kilobytes.get("MemAvailable", kilobytes["MemFree"])
    host_bytes = 1024 * (free + kilobytes.get("SwapFree", 0))
    return min([host_bytes, *_container_bytes()])


def check_fits(
    workload: Workload,
    plan: Plan,
    model: nn.Module,
    rank: int,
    train: TrainSettings,
    *,
    starts_servers: bool = False,
    device: torch.device | None = None,
) -> None:
    """Raise an error if the plan's tables do not fit this host, or this rank's GPU. `device`: None: the CPU.

    All ranks call it before any rank allocates its tables; the first rank of each host checks for the whole host, that
    of the first host also for the plan's table servers, if the run starts them.
    """
    is_on_gpu = device is not None and device.type == "cuda"
    if is_on_gpu:
        own = table_bytes_by_purpose(workload, plan, model, [rank], train)
        _check_gpu(sum(own.get(purpose, 0) for purpose in GPU_PURPOSES), rank)
    if rank != host_id(rank):
        return
    ranks = range(rank, rank + host_topology()[1])
    available, needs = available_bytes(), table_bytes_by_purpose(workload, plan, model, ranks, train)
    needs = {purpose: 0 if is_on_gpu and purpose in GPU_PURPOSES else bytes_ for purpose, bytes_ in needs.items()}
    if starts_servers and rank == 0 and plan.servers:
        needs["the table servers that the run starts"] = server_bytes(workload, plan)
    if (need := sum(needs.values())) <= available:
        return
    purposes = ", ".join(f"{format_bytes(bytes_)} for {purpose}" for purpose, bytes_ in needs.items())
    total = workload.table_bytes + workload.state_bytes
    largest = max(workload.tables, key=lambda table: table.rows * table.dim * DTYPE_BYTES[table.dtype])
    fitting = [name for name, saved in _savings(workload, needs) if need - saved <= available]
    remedies = [*fitting, f"{-(-2 * total // max(1, available))} hosts like this one"]
    if all(cached_rows(table) is None for table in plan.tables):
        remedies.append(f'plan.memory="{format_bytes(available / 2 / len(ranks))}" (other rows on disk)')
    remedies.append("fewer rows or columns")
    raise UserError(
        f"the tables need {format_bytes(need)} of this host's memory ({purposes}), and "
        f"{format_bytes(available)} are available; "
        f'the largest is "{largest.name}" with {largest.rows:,} rows of {largest.dim}; '
        f"they fit with {' or '.join(remedies)}"
    )


def _check_gpu(need: int, rank: int) -> None:
    """Raise an error if the tables of the ranks that share this rank's GPU, with `need` bytes each, do not fit it."""
    free, total = torch.cuda.mem_get_info()
    num_ranks = -(-host_topology()[1] // torch.cuda.device_count())
    if num_ranks * need > free:
        shared = f" on each of {num_ranks} ranks that share the GPU" if num_ranks > 1 else ""
        raise UserError(
            f"the tables of rank {rank} need {format_bytes(need)} of GPU memory{shared}, and {format_bytes(free)} of "
            f"{format_bytes(total)} are available; set run.device=cpu, use more GPUs, or make tables smaller"
        )


def _copies_bytes(workload: Workload, plan: Plan, ranks: Sequence[int]) -> int:
    """Bytes of copies of rows of other ranks or of servers on these ranks, and of versions of their own rows."""
    tables, total = {table.name: table for table in workload.tables}, 0
    for planned in plan.tables:
        sync = planned.placement.sync
        is_served = min(planned.rects[0].ranks) >= plan.num_ranks
        if isinstance(sync, Bounded) and (sync.has_copies or is_served):
            total += len(ranks) * sync.copies * copy_bytes(tables[planned.table], workload.optimizer)
            own = (rect for rect in planned.rects if set(rect.ranks) & set(ranks))
            total += OWNER_BYTES * sum(rect.rows[1] - rect.rows[0] for rect in own)
    return total


def server_bytes(workload: Workload, plan: Plan) -> int:
    """Bytes of the rows on table servers, with the copy that a checkpoint is written from."""
    shapes, bytes_ = {table.name: table for table in workload.tables}, 0
    for planned in plan.tables:
        table, tiers = shapes[planned.table], planned.placement.tiers
        has_tier = bool(tiers) and tiers[-1].tier == SERVERS
        owns = min(planned.rects[0].ranks) >= plan.num_ranks
        if not (has_tier or owns):
            continue
        state_shapes = optimizer.state_shapes(workload.optimizer, table.rows, table.dim) if workload.optimizer else {}
        state = sum(map(prod, state_shapes.values())) * DTYPE_BYTES[state_dtype(table.dtype)]
        bytes_ += round(STORE_SPACE * (table.rows * table.dim * DTYPE_BYTES[planned.placement.weight_dtype] + state))
        bytes_ += OWNER_BYTES * table.rows * owns
    return bytes_


def table_bytes_by_purpose(
    workload: Workload, plan: Plan, model: nn.Module, ranks: Sequence[int], train: TrainSettings
) -> dict[str, int]:
    """Bytes that these ranks together still have to allocate for tables, by purpose; existing weights do not count."""
    shapes = {table.name: table for table in workload.tables}
    weights = state = index = ids = copied_weights = copied_state = 0
    for planned in plan.tables:
        table, lines = shapes[planned.table], cached_rows(planned)
        for rect in planned.rects:
            replicas = len(set(rect.ranks) & set(ranks))
            rows, dim = rect.rows[1] - rect.rows[0], rect.cols[1] - rect.cols[0]
            dtype = planned.placement.weight_dtype
            if lines is not None:
                dtype = state_dtype(table.dtype) if FLOAT32_LINES in plan.allow else dtype
                index += replicas * (min(rows, lines) * LINE_BYTES + rows * (ROW_INDEX_BYTES + SAVED_ROW_BYTES))
                rows = min(rows, lines)
            ids += replicas * rows * id_map_bytes(table.growth)
            weight_bytes = replicas * rows * dim * DTYPE_BYTES[dtype]
            shapes_of_state = optimizer.state_shapes(workload.optimizer, rows, dim) if workload.optimizer else {}
            state_bytes = replicas * sum(map(prod, shapes_of_state.values())) * DTYPE_BYTES[state_dtype(table.dtype)]
            weights, state = weights + weight_bytes, state + state_bytes
            if lines is None:  # rows on disk are copied in chunks
                copied_weights, copied_state = copied_weights + weight_bytes, copied_state + state_bytes
    sparse = sparse_of(model)
    has_weights = sparse is not None and not any(parameter.is_meta for parameter in sparse.parameters())
    is_allocated = has_weights and world_size() == 1  # over several ranks, each copies its shards out of the tables
    needs = {} if is_allocated else {"weights": weights, "optimizer state": state}
    if index:
        needs["the index of rows on disk"] = index
    if copies := _copies_bytes(workload, plan, ranks):
        needs["copies of rows of other ranks"] = copies
    if ids:
        needs["the ids of tables that grow"] = ids
    needs |= {"the copy that a checkpoint is written from": copied_weights + copied_state}
    if train.keeps_best:
        needs["the copy that the best state is written from"] = copied_weights + copied_state
    if train.publish_every:
        needs["the copy that is published"] = copied_weights
    return needs


@contextmanager
def explain_out_of_memory(workload: Workload | None = None) -> Iterator[None]:
    """Turn a failed allocation into a UserError with the memory requested and the memory available."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if (line := out_of_memory_message(error, workload)) is None:
            raise
        raise UserError(line) from error


def out_of_memory_message(error: BaseException, workload: Workload | None = None) -> str | None:
    """The error line for a failed allocation; None for any other error."""
    if (requested := _requested_size(error)) is None:
        return None
    needs = ""
    if workload is not None:
        bytes_ = 2 * (workload.table_bytes + workload.state_bytes)
        needs = (
            f"; tables, their optimizer state and the copy for checkpoints are {format_bytes(bytes_)} over all ranks"
        )
    return (
        f"out of memory: {requested} requested, {_describe_available(error)}{needs}; "
        "lower train.batch_size, data.prefetch or data.workers, make tables smaller, or use more hosts"
    )


def format_bytes(bytes_: float) -> str:
    """A size in decimal units, with three digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if bytes_ >= size:
            return f"{bytes_ / size:,.3g} {unit}"
    return f"{bytes_ / 1e3:,.3g} kB"


def _requested_size(error: BaseException) -> str | None:
    """The requested size if this is a failed allocation, else None."""
    text = str(error)
    match = ALLOCATION_FAILURE.search(text)
    is_memory_error = isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno == errno.ENOMEM
    if match is None and not is_memory_error and not isinstance(error, torch.OutOfMemoryError):
        return None
    size = next(filter(None, match.groups()), "") if match else ""
    if size.endswith(" bytes"):
        return format_bytes(int(size.split()[0]))
    return size or "an unknown amount was"


def _describe_available(error: BaseException) -> str:
    """The memory available on the device whose allocation failed, as part of an error line."""
    if isinstance(error, torch.OutOfMemoryError):
        free, total = torch.cuda.mem_get_info()
        return f"{format_bytes(free)} of the {format_bytes(total)} of this GPU are available"
    return f"{format_bytes(available_bytes())} of this host's memory are available"


def _savings(workload: Workload, needs: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Settings that need less memory, and the bytes that each saves on this host."""
    table_needs = [needs.get("weights", 0), needs.get("optimizer state", 0)]
    copies = 2 if table_needs[0] else 1
    copy = needs["the copy that a checkpoint is written from"]
    total = workload.table_bytes + workload.state_bytes
    weights = copy * workload.table_bytes // total if total else 0
    if all(table.dtype == "float32" for table in workload.tables):
        yield 'allow=["tables.fp16"]', copies * weights // 2
    if workload.optimizer is not None and not isinstance(workload.optimizer, optimizer.RowWiseAdaGrad):
        rows = sum(table.rows for table in workload.tables)
        yield "tables.kind=rowwise_adagrad", copies * (copy - weights - 4 * rows)


def _container_bytes() -> Iterator[int]:
    """Bytes left by the memory limits of this process's cgroup and its parents; empty if there are no limits."""
    cgroups = Path("/proc/self/cgroup")
    for line in cgroups.read_text().splitlines() if cgroups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            group = Path("/sys/fs/cgroup", controllers, path.lstrip("/"))
            for ancestor in (group, *group.parents):
                with suppress(OSError):  # a sandbox may show only some of the files
                    if (free := cgroup_free_bytes(ancestor)) is not None:
                        yield free


def cgroup_free_bytes(group: Path) -> int | None:
    """Bytes that the memory limit of one cgroup leaves; None if it has no limit.

    The page cache counts as free: the kernel drops it when memory is needed.
    """
    for limit_file, usage_file in CGROUP_FILES:
        limit = (group / limit_file).read_text().strip() if (group / limit_file).is_file() else "max"
        if limit != "max":
            lines = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
            cached = sum(int(value) for name, value in lines if name in ("active_file", "inactive_file"))
            return max(0, int(limit) - int((group / usage_file).read_text()) + cached)
    return None
