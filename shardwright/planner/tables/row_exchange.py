"""The loads of a table under vector exchange and under row exchange, and the bytes of both.

With vector exchange, pooled vectors are sent to the ranks of their samples. With row exchange, each distinct row of a
rank's samples is sent to that rank once and pooled there: the table has the load of unpooled features with fewer ids.
`describe` counts distinct ids in halves of a batch, since a rank's samples are a part of the global batch. Between and
beyond these sizes, and if only one was counted, distinct ids are a power of the number of ids (Heaps' law, with one id
as its first point).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwright.planner.tables.sharding import Sharding, TableLoad
from shardwright.spec.cluster import Cluster
from shardwright.spec.wire import ID_BYTES, LENGTH_BYTES
from shardwright.spec.workload import FeatureStatistics, Workload


def exchange_loads(
    workload: Workload, table_loads: Sequence[TableLoad], batch_size: int, cluster: Cluster
) -> Iterator[tuple[TableLoad, TableLoad]]:
    """Each table's load with vector exchange and with row exchange, with the distinct rows in the samples of a rank, of
    a group of each level, and of all ranks (`group_distinct_rows`)."""
    group_counts = [cluster.num_ranks // cluster.group_size(size) for size in range(len(cluster.levels) + 1)]
    statistics = {entry.feature: entry for entry in workload.statistics}
    entries: dict[str, list[FeatureStatistics]] = {table.name: [] for table in workload.tables}
    for feature in workload.features:
        entries[feature.table].append(statistics.get(feature.name, FeatureStatistics(feature.name, 1.0, 1.0)))
    for table_load in table_loads:
        rows, table_entries = table_load.table.rows, entries[table_load.table.name]
        sums = (
            sum(expected_distinct_ids(entry, workload.batch_size, rows, batch_size / num) for entry in table_entries)
            for num in group_counts
        )
        distinct_rows = tuple((num, min(rows, distinct)) for num, distinct in zip(group_counts, sums, strict=True))
        load = replace(table_load, group_distinct_rows=distinct_rows)
        row_load = _row_exchange_load(load, batch_size, cluster.num_ranks)
        yield row_load if load.unpooled_vectors else load, row_load


def _row_exchange_load(load: TableLoad, batch_size: int, num_ranks: int) -> TableLoad:
    """The table's load with row exchange, as if no two features shared a row."""
    of_rank, of_all = load.distinct_rows_per_group(num_ranks), load.distinct_rows_per_group(1)
    samples = batch_size / num_ranks
    num_rows = max(of_rank, of_all / num_ranks)
    if not num_rows:
        return replace(load, local_pooling=load)
    return replace(
        load,
        ids_per_sample=num_rows / samples,
        pooled_vectors=0.0,
        unpooled_vectors=num_rows / samples,
        distinct_share=min(1.0, of_all / (num_rows * num_ranks)),
        popularity=_distinct_popularity(load, samples * load.ids_per_sample),
        local_pooling=load,
    )


def expected_distinct_ids(statistics: FeatureStatistics, batch_size: int, rows: int, samples: float) -> float:
    """Expected distinct ids of a feature in `samples` samples; without a curve, from `distinct_share` of a batch."""
    ids = samples * statistics.ids_per_sample
    sizes = statistics.distinct or ((batch_size, statistics.distinct_share),)
    counts = ((num * statistics.ids_per_sample, share * num * statistics.ids_per_sample) for num, share in sizes)
    points = np.array([(1.0, 1.0), *((num, max(1.0, distinct)) for num, distinct in counts if num > 1)])
    if ids <= 1 or len(points) < 2:
        return min(ids, float(rows))
    log_ids, log_distinct = np.log(points).T
    return float(min(ids, rows, np.exp(_interpolate(log_ids, log_distinct, float(np.log(ids))))))


def _interpolate(x: np.ndarray, values: np.ndarray, position: float) -> float:
    """Interpolate linearly; beyond the last point the last slope continues."""
    if position <= x[-1]:
        return float(np.interp(position, x, values))
    slope = (values[-1] - values[-2]) / (x[-1] - x[-2])
    return float(values[-1] + slope * (position - x[-1]))


def _distinct_popularity(load: TableLoad, num_ids: float) -> tuple[tuple[int, float], ...]:
    """The popularity of rows among the distinct rows of `num_ids` ids, which is flatter than among all ids.
    Rows between two points of the curve count as equally popular."""
    if not load.popularity:
        return ()
    points = np.array(((0, 0.0), *load.popularity, (load.table.rows, 1.0)))
    num_rows, share = np.diff(points[:, 0]), np.diff(points[:, 1])
    distinct = -num_rows * np.expm1(-num_ids * share / np.maximum(num_rows, 1))
    shares = np.cumsum(distinct) / max(distinct.sum(), 1e-300)
    return tuple((k, float(part)) for (k, _), part in zip(load.popularity, shares[:-1], strict=True))


def row_to_vector_bytes(
    vector_load: TableLoad, row_load: TableLoad, sharding: Sharding, cluster: Cluster, wire_bytes: int
) -> float:
    """Bytes per sample of row exchange over those of vector exchange. `wire_bytes`: of a value and of its gradient."""
    dim = vector_load.table.dim
    num_sums = num_row_shards = sharding.num_row_shards(cluster)
    if len(cluster.levels) > 1 and sharding.num_replicas == 1:
        num_sums = sharding.num_row_hosts(cluster)
    request_bytes = vector_load.ids_per_sample * ID_BYTES + vector_load.pooled_vectors * LENGTH_BYTES * num_row_shards
    vector_bytes = request_bytes * sharding.column_shards + vector_load.vectors * dim * wire_bytes * num_sums
    row_bytes = row_load.ids_per_sample * (ID_BYTES * sharding.column_shards + dim * wire_bytes)
    return row_bytes / vector_bytes if vector_bytes else 1.0
