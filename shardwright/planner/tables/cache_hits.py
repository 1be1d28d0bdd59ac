"""Which share of a batch's distinct rows a cache has, by its number of lines.

If hits were recorded (`shardwright cache-sim --write`), they are interpolated. Otherwise ids are taken as drawn
independently from the popularity curve. A row's score is the number of its uses, which count half after every
`half_life` batches; a row that is copied in begins with 1, and loses its uses when it is evicted. As the lines with the
lowest scores are evicted, the rows in the cache are those above one score, at which they fill it; with scores above 1,
the most used rows. That training knows
the rows of the next batches is left out: with such ids it adds a point at most. So is set dueling: with such ids LRU
misses more, and is used in one of 32 sets.

Shape legend: A uses of a row, T lowest scores, S scores, V intervals of scores, I intervals of a popularity curve.
"""

from functools import lru_cache
from math import log

import numpy as np

from shardwright.planner.tables.sharding import TableLoad
from shardwright.spec.row_cache import COPIES_HALF_LIFE_BATCHES, HALF_LIFE_BATCHES

INTERVALS = 64  # of a popularity curve, between two of its points
BISECTIONS = 40
USES = (1e-3, 100.0)  # of a row in its life, of the table of hits
MOST_SCORE = 10.0  # beyond, a row's score does not matter
LOWEST = (2e-4, 12.0)  # log(1 / the lowest score), of the table of hits


def found_share(load: TableLoad, lines: int, num_ids: float) -> float:
    """The share of the distinct rows of a batch of `num_ids` ids that are on one of so many lines."""
    if lines >= load.table.rows:
        return 1.0
    if load.hits:
        points = np.array(((0, 0.0), *load.hits, (load.table.rows, 1.0)))
        return float(np.interp(lines, points[:, 0], points[:, 1]))
    return _expected_share(load, lines, num_ids)


def found_lookups_share(load: TableLoad, lines: int, num_ids: float) -> float | None:
    """The share of the ids of a batch whose row is on a line; None if only recorded hits of distinct rows are known.
    Too low for caches that hold the rows of few batches."""
    if load.hits and lines < load.table.rows:
        return None
    return float((_intervals(load)[1] * hits_by_interval(load, lines, num_ids)[2]).sum())


@lru_cache(maxsize=1 << 14)
def _expected_share(load: TableLoad, lines: int, num_ids: float) -> float:
    rows_I, uses_I, hits_I = hits_by_interval(load, lines, num_ids)
    return float((rows_I * uses_I * hits_I).sum() / max((rows_I * uses_I).sum(), 1e-300))


def hits_by_interval(
    load: TableLoad, lines: int, num_ids: float, half_life: int = HALF_LIFE_BATCHES
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of each interval of the popularity curve, the share of batches that use one of them, and the share of these
    uses that find it."""
    rows_I, uses_I = _uses_by_interval(load, num_ids)
    life = half_life / log(2)  # batches after which a use counts 1/e
    uses_of_life_I = np.maximum(life * uses_I, 1e-300)
    if lines >= load.table.rows:
        return rows_I, uses_I, np.ones_like(uses_I)
    low, high = log(1 / life), log(LOWEST[1])  # a row that is copied in stays for a batch at least
    hits_I = _hits(uses_of_life_I, low)
    if (rows_I * hits_I).sum() >= lines:  # too few lines for the rows that are used again and again: the most used stay
        filled_I = np.clip(lines - (rows_I.cumsum() - rows_I), 0, rows_I)
        return rows_I, uses_I, hits_I * filled_I / rows_I
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if (rows_I * _hits(uses_of_life_I, middle)).sum() < lines else (low, middle)
    return rows_I, uses_I, _hits(uses_of_life_I, high)


def exact_shares(
    load: TableLoad, copies: int, num_ranks: int, num_ids: float
) -> tuple[float, tuple[float, float, float]]:
    """If each of these ranks has copies that are validated in every batch: the distinct rows of a batch of `num_ids`
    ids, and the shares of them that are validated, that are sent, and whose updates are pushed.

    A copy is sent again if another rank has used its row since this rank's last use. A single rank validates only rows
    without a copy.
    """
    rows_I, uses_I, hits_I = hits_by_interval(load, copies, num_ids, COPIES_HALF_LIFE_BATCHES)
    unused_I = (1 - uses_I) ** (num_ranks - 1)  # by the other ranks, in a batch
    unchanged_I = uses_I * unused_I / np.maximum(1 - (1 - uses_I) * unused_I, 1e-300)
    num_rows = float((rows_I * uses_I).sum())
    sent = max(0.0, 1 - float((rows_I * uses_I * hits_I * unchanged_I).sum()) / max(num_rows, 1e-300))
    return num_rows, (1.0 if num_ranks > 1 else sent, sent, 1.0)


def _uses_by_interval(load: TableLoad, num_ids: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each interval of the popularity curve, and the share of batches that use one of them."""
    rows_I, id_shares_I = _intervals(load)
    return rows_I, -np.expm1(-id_shares_I * num_ids / rows_I)


def _intervals(load: TableLoad) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each interval of the popularity curve, and their share of all ids."""
    points = np.unique([0, load.table.rows, *(k for k, _ in load.popularity)])
    steps = np.arange(1, INTERVALS + 1)
    ends = np.unique(points[:-1, None] + np.diff(points)[:, None] * steps // INTERVALS)
    ends = ends[ends > 0]
    return np.diff(ends, prepend=0), np.diff(load.hot_id_share(ends), prepend=0.0)


def _hits(uses_I: np.ndarray, log_lowest: float) -> np.ndarray:
    """The share of a row's uses that find it, and of all batches in which it is there; by its uses in its life."""
    log_uses_A, log_lowest_T, hits_AT = _hit_table()
    hits_A = np.apply_along_axis(lambda hits_T: np.interp(log_lowest, log_lowest_T, hits_T), 1, hits_AT)
    return np.interp(np.log(uses_I), log_uses_A, hits_A) * np.minimum(uses_I / USES[0], 1.0)


@lru_cache(maxsize=1)
def _hit_table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hits by uses in a life and by log(1 / the lowest score), both as logarithms.

    A row with score s and a uses in a life has fallen to v < s at its next use with probability density
    a v^(a-1) / s^a, and then has v + 1; below the lowest score it was evicted. So the number M of uses from a score on,
    until the row is evicted, is M(s) = 1 + the integral of that density times M(v + 1) over v from the lowest score to
    s; of M(1) uses, all but one find the row.
    """
    uses_A, lowest_T = np.geomspace(*USES, 40), np.geomspace(*LOWEST, 40)
    scores_S = np.linspace(1, MOST_SCORE, 37)
    hits_AT = np.empty((len(uses_A), len(lowest_T)))
    for column, lowest in enumerate(np.exp(-lowest_T)):
        edges = np.linspace(float(lowest), MOST_SCORE, 145)
        positions_V = np.interp((edges[1:] + edges[:-1]) / 2 + 1, scores_S, np.arange(len(scores_S)))
        to_scores_VS = np.maximum(0, 1 - np.abs(positions_V[:, None] - np.arange(len(scores_S))))
        shares = np.minimum(edges, scores_S[:, None]) / scores_S[:, None]
        moved_ASV = np.diff(shares[None] ** uses_A[:, None, None], axis=2)
        expected_ASS = np.eye(len(scores_S)) - (1 - 1e-7) * moved_ASV @ to_scores_VS
        uses_until_evicted_AS = np.linalg.solve(expected_ASS, np.ones((len(uses_A), len(scores_S), 1)))[..., 0]
        hits_AT[:, column] = 1 - 1 / uses_until_evicted_AS[:, 0]
    return np.log(uses_A), np.log(lowest_T), hits_AT
