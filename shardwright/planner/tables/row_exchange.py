"""What of a table travels: pooled vectors to the ranks of their samples, or each distinct row that a rank's samples
have, to be pooled there.

Of distinct rows a table is asked as if by features that are not pooled, less often. How often, `describe` counts at
halves of a batch, as a rank's samples are a part of the global one; between and beyond these sizes, and where only one
is known, their number goes with a power of the number of ids (Heaps' law, with one id as its first point).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from shardwright.planner.tables.sharding import Sharding, TableLoad
from shardwright.spec.cluster import Cluster
from shardwright.spec.wire import ID_BYTES, LENGTH_BYTES
from shardwright.spec.workload import FeatureStatistics, Workload


def exchange_loads(
    workload: Workload, table_loads: Sequence[TableLoad], batch_size: int, cluster: Cluster
) -> Iterator[tuple[TableLoad, TableLoad]]:
    """What ranks ask of each table when its vectors travel, and when its distinct rows do; with the rows that samples
    touch: those of a rank, of the groups that each level joins, and all."""
    nums = [level.num for level in cluster.levels]
    groups = [prod(nums[at:]) for at in range(len(nums) + 1)]
    known = {one.feature: one for one in workload.statistics}
    entries: dict[str, list[FeatureStatistics]] = {table.name: [] for table in workload.tables}
    for one in workload.features:
        entries[one.table].append(known.get(one.name, FeatureStatistics(one.name, 1.0, 1.0)))
    for demand in table_loads:
        rows = demand.table.rows
        parts = (
            sum(
                expected_distinct_ids(one, workload.batch_size, rows, batch_size / num)
                for one in entries[demand.table.name]
            )
            for num in groups
        )
        known = replace(
            demand, group_distinct_rows=tuple((num, min(rows, part)) for num, part in zip(groups, parts, strict=True))
        )
        by_row = _by_row(known, batch_size, cluster.num_ranks)
        yield by_row if demand.unpooled_vectors else known, by_row


def _by_row(demand: TableLoad, batch_size: int, num_ranks: int) -> TableLoad:
    """As if no row were asked by two features."""
    own, whole, samples = (
        demand.distinct_rows_per_group(num_ranks),
        demand.distinct_rows_per_group(1),
        batch_size / num_ranks,
    )
    found = max(own, whole / num_ranks)
    if not found:
        return replace(demand, local_pooling=demand)
    return replace(
        demand,
        ids_per_sample=found / samples,
        pooled_vectors=0.0,
        unpooled_vectors=found / samples,
        distinct_share=min(1.0, whole / (found * num_ranks)),
        popularity=_flatter(demand, samples * demand.ids_per_sample),
        local_pooling=demand,
    )


def expected_distinct_ids(statistics: FeatureStatistics, batch_size: int, rows: int, samples: float) -> float:
    """Expected distinct ids of a feature in so many samples; without a curve `distinct_share` is that of a batch."""
    ids = samples * statistics.ids_per_sample
    sizes = statistics.distinct or ((batch_size, statistics.distinct_share),)
    counted = ((num * statistics.ids_per_sample, share * num * statistics.ids_per_sample) for num, share in sizes)
    points = np.array([(1.0, 1.0), *((num, max(1.0, found)) for num, found in counted if num > 1)])
    if ids <= 1 or len(points) < 2:
        return min(ids, float(rows))
    at, counts = np.log(points).T
    return float(min(ids, rows, np.exp(_along(at, counts, float(np.log(ids))))))


def _along(at: np.ndarray, values: np.ndarray, where: float) -> float:
    """Between points, and beyond the last as from the one before."""
    if where <= at[-1]:
        return float(np.interp(where, at, values))
    slope = (values[-1] - values[-2]) / (at[-1] - at[-2])
    return float(values[-1] + slope * (where - at[-1]))


def _flatter(demand: TableLoad, ids: float) -> tuple[tuple[int, float], ...]:
    """The popularity of rows where a rank asks each at most once of so many ids: rows between two points as likely as
    each other."""
    if not demand.popularity:
        return ()
    points = np.array(((0, 0.0), *demand.popularity, (demand.table.rows, 1.0)))
    num, share = np.diff(points[:, 0]), np.diff(points[:, 1])
    asked = -num * np.expm1(-ids * share / np.maximum(num, 1))
    shares = np.cumsum(asked) / max(asked.sum(), 1e-300)
    return tuple((k, float(part)) for (k, _), part in zip(demand.popularity, shares[:-1], strict=True))


def row_to_vector_bytes(
    vector_load: TableLoad, row_load: TableLoad, sharding: Sharding, cluster: Cluster, wire_bytes: int
) -> float:
    """Bytes that a sample makes travel when rows do, over those of vectors; `wire` bytes of a number there and back."""
    dim = vector_load.table.dim
    group = sharding.num_row_shards(cluster)
    parts = group
    if len(cluster.levels) > 1 and sharding.num_replicas == 1:
        parts = sharding.num_row_hosts(cluster)
    asked = vector_load.ids_per_sample * ID_BYTES + vector_load.pooled_vectors * LENGTH_BYTES * group
    there = asked * sharding.column_shards + vector_load.vectors * dim * wire_bytes * parts
    return row_load.ids_per_sample * (ID_BYTES * sharding.column_shards + dim * wire_bytes) / there if there else 1.0
