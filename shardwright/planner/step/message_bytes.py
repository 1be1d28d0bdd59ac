"""Bytes of a predicted step by kind of message and by link, over all ranks; in the precision of the wire.

Shape legend: R ranks (RR: from, to).
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shardwright.planner.problem import PlacedTables, Problem
from shardwright.planner.step import copy_tasks, pipeline_step, served_tasks, traffic
from shardwright.planner.step.tasks import RankLoads
from shardwright.planner.tables.sharding import TableLoad
from shardwright.spec import traffic as kinds
from shardwright.spec.optimizer import num_squares
from shardwright.spec.row_cache import SERVERS
from shardwright.spec.traffic import BETWEEN_HOSTS, IN_HOST, TO_SERVERS, KindBytes
from shardwright.spec.wire import REQUEST_HEADER_BYTES

HOST_LEVEL = "host"  # the level that joins hosts


def bytes_by_kind(problem: Problem, placed: PlacedTables, loads: RankLoads) -> tuple[KindBytes, ...]:
    """Without what is below half a byte."""
    cluster, ranks = problem.cluster, np.arange(problem.cluster.num_ranks)
    has_one_each = bool(cluster.levels) and cluster.levels[0].name == HOST_LEVEL  # no level inside of hosts
    hosts = ranks if has_one_each else ranks // cluster.ranks_per_host
    same_host_RR = hosts[:, None] == hosts
    sizes: list[tuple[str, str, float]] = []
    for kind, bytes_RR in _rank_traffic(problem, placed):
        between_RR = bytes_RR * ~np.eye(len(bytes_RR), dtype=bool)
        sizes.append((kind, IN_HOST, float(between_RR[same_host_RR].sum())))
        sizes.append((kind, BETWEEN_HOSTS, float(between_RR[~same_host_RR].sum())))
    sizes += ((kind, TO_SERVERS, bytes_) for kind, bytes_ in _server_traffic(problem, placed, loads))
    return tuple(KindBytes(kind, link, round(bytes_)) for kind, link, bytes_ in sizes if bytes_ >= 0.5)


def _rank_traffic(problem: Problem, placed: PlacedTables) -> Iterator[tuple[str, np.ndarray]]:
    """By kind, bytes from rank to rank."""
    num = problem.cluster.num_ranks
    if num == 1:
        return
    headers_RR = np.full((num, num), float(REQUEST_HEADER_BYTES))
    if problem.pipeline is not None:
        yield kinds.IDS, headers_RR
        yield kinds.DENSE, pipeline_step.gradient_traffic(problem)
        yield kinds.PIPELINE, pipeline_step.message_traffic(problem)
        return
    precision = problem.precision
    experts_RR, dense_RR = traffic.expert_traffic(problem), traffic.dense_traffic(problem)
    replicated = traffic.data_parallel_gradient_bytes(problem, placed)
    forward = traffic.vector_hops(_in_direction(problem, "sent"), placed, precision.vectors, backward=False)
    backward = traffic.vector_hops(_in_direction(problem, "pushed"), placed, precision.gradients, backward=True)
    exchanged_RR = sum(traffic.replica_traffic(problem, placed)) + traffic.dense_traffic(problem, replicated) - dense_RR
    yield kinds.IDS, headers_RR + traffic.id_traffic(problem, _without_copies(problem, placed))
    yield kinds.VECTORS, forward[0] + forward[1]
    yield kinds.GRADIENTS, backward[0] + backward[1] + exchanged_RR
    if copied := copy_tasks.copied_loads(problem, placed):
        yield kinds.VERSIONS, np.full((num, num), sum(copy_tasks.copy_bytes(problem, copied).values()) / (num - 1))
    yield kinds.DENSE, dense_RR - experts_RR
    yield kinds.EXPERTS, experts_RR


def _without_copies(problem: Problem, placed: PlacedTables) -> PlacedTables:
    """The tables whose rows are not read from copies, which need no ids besides those of versions."""
    pairs = [(unit, ranks) for unit, ranks in placed.pairs if problem.unit_load(unit).copied is None]
    return PlacedTables.from_pairs(pairs, placed.data_parallel_tables, placed.served_tables)


def _in_direction(problem: Problem, share: str) -> Problem:
    """The problem in which the rows of copies that are exchanged are those sent, or those with updates pushed."""
    rows = tuple(_directed_load(problem, load, share) for load in problem.row_exchange_loads)
    return replace(problem, row_exchange_loads=rows)


def _directed_load(problem: Problem, load: TableLoad, share: str) -> TableLoad:
    """The load's vectors count rows of both directions by half; those of one direction have their own size."""
    copied, optimizer, dim = load.copied, problem.workload.optimizer, load.table.dim
    if copied is None or copied.is_served or optimizer is None or not load.ids_per_sample:
        return load
    values = load.row_bytes(dim) / load.weight_bytes if share == "sent" else dim + num_squares(optimizer, dim)
    exact = load.unpooled_vectors * copied.rows_per_sample / load.ids_per_sample
    return replace(load, unpooled_vectors=exact * getattr(copied, share) * values / dim)


def _server_traffic(problem: Problem, placed: PlacedTables, loads: RankLoads) -> Iterator[tuple[str, float]]:
    """By kind, bytes between all ranks and all servers."""
    num = problem.cluster.num_ranks
    if placed.served_tables:
        served = [problem.row_exchange_loads[number] for number in placed.served_tables]
        sizes = served_tasks.served_bytes(problem, served)
        yield from zip((kinds.FETCHES, kinds.ANSWERS, kinds.PUSHES), (num * size for size in sizes), strict=True)
    elif problem.cluster.device.tiers[-1].name == SERVERS:
        yield from ((kind, float(loads.moved_bytes_R.sum())) for kind in (kinds.SWAPS, kinds.SWAPPED))
