"""Table servers: what a plan that uses them must observe, and why it uses them."""

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

from shardwright.errors import UserError
from shardwright.planner.memory.budget import RESERVED_SHARE, bytes_text
from shardwright.planner.problem import Precision, Problem, ServerRequest
from shardwright.planner.search import Candidate
from shardwright.planner.step import server_calls
from shardwright.spec.cluster import Tier
from shardwright.spec.plan import Bounded, Rect, Share, TablePlan
from shardwright.spec.row_cache import DISK, HOST, SERVERS, STORE_SPACE
from shardwright.spec.workload import Workload

SERVED_ORDER = "hash:0"  # of tables on several servers: each gets its share of popular rows


def check_request(workload: Workload, request: ServerRequest, pins: Collection[str]) -> None:
    """Raise a UserError for a workload whose tables cannot be on servers."""
    if not workload.tables:
        raise UserError("[servers] is for embedding tables, and this model has none: drop the section")
    if workload.optimizer is None:
        raise UserError("the tables are frozen, and table servers have rows that are trained: drop [servers]")
    if request.own and pins:
        raise UserError(
            f'table "{next(iter(pins))}" is pinned, and table servers own all rows: drop plan.pins, or set '
            "servers.own=false"
        )


def with_servers(problem: Problem, request: ServerRequest | None) -> Problem:
    """The problem with these table servers in place of the disk; None: with the disk again, if there was one."""
    cluster = problem.cluster
    tiers = [tier for tier in cluster.device.tiers if tier.name != SERVERS] + [*problem.replaced]
    replaced: tuple[Tier, ...] = ()
    if request is not None:
        replaced = tuple(tier for tier in tiers if tier.name == DISK)
        tiers = [tier for tier in tiers if tier.name != DISK]
        tiers += [] if request.own else [_server_tier(problem, request)]
    device = replace(cluster.device, tiers=tuple(tiers))
    return replace(problem, cluster=replace(cluster, device=device), servers=request, replaced=replaced)


def _server_tier(problem: Problem, request: ServerRequest) -> Tier:
    """A rank's share of the servers' memory, or room for all rows."""
    total = sum(load.table_bytes for load in problem.table_loads)
    enough = total * STORE_SPACE / (1 - RESERVED_SHARE) + 1
    bytes_ = request.num * request.bytes_ / problem.cluster.num_ranks if request.bytes_ else enough
    rate = server_calls.server_link(problem.cluster).bytes_per_second
    return Tier(SERVERS, round(bytes_) + 1, rate, rate)


def supported_precision(lowest: Precision, exact: Precision, request: ServerRequest | None) -> Precision:
    """The lowest precision with table servers, whose rows are not rounded."""
    if request is None:
        return lowest
    if request.own:
        lowest = replace(lowest, vectors=exact.vectors, gradients=exact.gradients)
    return replace(lowest, tables=exact.tables)


def on_servers(planned: TablePlan, sync: Bounded, num_ranks: int, num_servers: int) -> TablePlan:
    """The table on servers that own its rows, in equal parts. They have the numbers after those of the ranks."""
    rows, cols = max(rect.rows[1] for rect in planned.rects), max(rect.cols[1] for rect in planned.rects)
    ends = [rows * server // num_servers for server in range(num_servers + 1)]
    rects = tuple(
        Rect(planned.table, span, (0, cols), (num_ranks + server,))
        for server, span in enumerate(pairwise(ends))
        if span[0] < span[1]
    )
    placement = replace(planned.placement, sync=sync, tiers=(Share(HOST),))
    order = SERVED_ORDER if num_servers > 1 else planned.order
    return replace(planned, rects=rects, order=order, placement=placement, travel="rows", scheme="")


def num_servers(candidate: Candidate) -> int:
    """The number of table servers that a plan uses."""
    request = candidate.problem.servers
    return request.num if request is not None and _num_tables(candidate) else 0


def _num_tables(candidate: Candidate) -> int:
    """Tables with rows on servers."""
    on_tier = sum(tables.shares[-1].tier == SERVERS for tables in candidate.tiers)
    return on_tier + len(candidate.placed.served_tables)


def describe_use(candidate: Candidate) -> str:
    """The plan's reason, if ranks own the rows."""
    request, link = candidate.problem.servers, server_calls.server_link(candidate.problem.cluster)
    if request is None:
        return ""
    if not (num := _num_tables(candidate)):
        return (
            "table servers are not used: the ranks' memory holds all rows; to leave less for them, set plan.memory, or "
            "servers.own=true"
        )
    moved = bytes_text(2 * float(candidate.loads.moved_bytes_R.max()))
    milliseconds = 1e3 * float(candidate.loads.prefetch_R.max())
    is_known = bool(candidate.problem.cluster.levels)
    source = f'links of level "{link.name}"' if is_known else "links inside a host, which were not measured"
    return (
        f"table servers ({request.num}) have rows of {num} table{'s' * (num > 1)}; in a step a rank exchanges up to "
        f"{moved} with them, in {milliseconds:.3g} ms beside other work ({source}, "
        f"{bytes_text(link.bytes_per_second)}/s)"
    )
