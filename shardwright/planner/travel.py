"""What of a table travels: pooled vectors to the ranks of their samples, or each distinct row that a rank's samples
have, to be pooled there.

Of distinct rows a table is asked as if by features that are not pooled, less often. How often, `describe` counts at
halves of a batch, as a rank's samples are a part of the global one; between and beyond these sizes, and where only one
is known, their number goes with a power of the number of ids (Heaps' law, with one id as its first point).
"""

from dataclasses import replace
from math import prod

import numpy as np

from shardwright.planner.tables import ID_BYTES, LENGTH_BYTES, Cut, Demand
from shardwright.spec.cluster import Cluster
from shardwright.spec.workload import FeatureStatistics, Workload


def by_row(workload: Workload, demand: Demand, batch_size: int, num_ranks: int) -> Demand:
    """What ranks ask of a table when its distinct rows travel."""
    own = batch_size / num_ranks
    asked, touched = (_of_table(workload, demand, num) for num in (own, float(batch_size)))
    asked = max(asked, touched / num_ranks)
    if not asked:
        return replace(demand, home=demand)
    return replace(
        demand,
        ids=asked / own,
        pooled=0.0,
        sequences=asked / own,
        distinct=min(1.0, touched / (asked * num_ranks)),
        hottest=_flatter(demand, own * demand.ids),
        home=demand,
    )


def _of_table(workload: Workload, demand: Demand, samples: float) -> float:
    """Distinct rows of so many samples; of features that share a table as if no row were asked by two of them."""
    known = {one.feature: one for one in workload.statistics}
    names = [one.name for one in workload.features if one.table == demand.table.name]
    entries = (known.get(name, FeatureStatistics(name, 1.0, 1.0)) for name in names)
    found = (distinct(one, workload.batch_size, demand.table.rows, samples) for one in entries)
    return float(min(demand.table.rows, sum(found)))


def distinct(one: FeatureStatistics, batch_size: int, rows: int, samples: float) -> float:
    """Expected distinct ids of a feature in so many samples; without a curve `distinct_share` is that of a batch."""
    ids = samples * one.ids_per_sample
    sizes = one.distinct or ((batch_size, one.distinct_share),)
    counted = ((num * one.ids_per_sample, share * num * one.ids_per_sample) for num, share in sizes)
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


def _flatter(demand: Demand, ids: float) -> tuple[tuple[int, float], ...]:
    """The popularity of rows where a rank asks each at most once of so many ids: rows between two points as likely as
    each other."""
    if not demand.hottest:
        return ()
    points = np.array(((0, 0.0), *demand.hottest, (demand.table.rows, 1.0)))
    num, share = np.diff(points[:, 0]), np.diff(points[:, 1])
    asked = -num * np.expm1(-ids * share / np.maximum(num, 1))
    shares = np.cumsum(asked) / max(asked.sum(), 1e-300)
    return tuple((k, float(part)) for (k, _), part in zip(demand.hottest, shares[:-1], strict=True))


def fewer_bytes(vectors: Demand, rows: Demand, cut: Cut, cluster: Cluster, wire: int) -> float:
    """Bytes that a sample makes travel when rows do, over those of vectors; `wire` bytes of a number there and back."""
    dim = vectors.table.dim
    group = prod(level.num for level in cluster.levels[: cut.reach])
    parts = max(1, group // cluster.levels[0].num) if len(cluster.levels) > 1 else group
    asked = vectors.ids * ID_BYTES + vectors.pooled * LENGTH_BYTES * group
    there = asked * cut.columns + vectors.vectors * dim * wire * parts
    return rows.ids * (ID_BYTES * cut.columns + dim * wire) / there if there else 1.0
