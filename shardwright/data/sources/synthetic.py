"""An endless click stream with a planted truth, so that a model is judged against the best one possible.

Every draw is a hash of (seed, stream, slot, sample index): any sample can be made alone, in any group and in
any process, with the same result. Frozen at VERSION: quality claims rest on these samples, none may change.
No torch here, for worker processes import this file; and no sum whose last bit depends on the group's size.

An id has a weight w and a latent v of K numbers, of mean 0 and variance 1 under its feature's popularity.
Features are independent, so the orders of the logit are uncorrelated and SHARES are shares of its variance:

    logit = BIAS + SPREAD * sum over orders of sqrt(SHARES[order]) * part, each part scaled to variance 1:
    first    sum of w_f                       second   sum over PAIRS of v_f . v_g
    linear   a . x of the dense inputs x      third    sum over TRIPLES of v_f . v_g . v_h
    square   b . (x^2 - 1)                    cross    sum over CROSSES of (A x) . v_f

w and v drift: sqrt(1 - DRIFT) fixed + sqrt(DRIFT) (cos t one + sin t other); t turns once per drift period.

Shapes: N numbers of an id (w, v), K latents, D dense inputs, S slots of a feature, B samples, R rows.
"""

import math
from dataclasses import dataclass
from functools import cache, reduce
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from shardwright.data.sources.source import NumpyBatch, draw_bits, stream_keys
from shardwright.errors import UserError

VERSION = 1
K = 4
MAX_IDS = 6  # a multi-hot feature has 0 to MAX_IDS ids, all lengths equally often
BIAS = -1.6
SPREAD = 1.65  # standard deviation of the logit
VARIANCE_SHARES = MappingProxyType(
    {"first": 0.26, "linear": 0.05, "square": 0.03, "second": 0.45, "third": 0.11, "cross": 0.10}
)
SQUARE_DEVIATION = np.float32(math.sqrt(1.7))  # of x^2 for the dense x of `_normal`
DRIFT = 0.05  # share of the variance of w and v that turns
CHUNK = 4096  # samples at a time, to stay in the processor's cache
SAMPLES, WORLD = 1, 2  # the first word of every hash key, so that equal seeds of the two kinds stay unrelated
NUMERIC, CLICK = 1001, 1002  # streams beside those of the features, 0, 1, 2, ...


class CategoricalFeature(NamedTuple):
    """A feature whose id of popularity rank r is drawn in proportion to about r ** -exponent."""

    name: str
    rows: int
    exponent: float
    multi_hot: bool = False


FEATURES = (
    CategoricalFeature("user", 50_000, 1.10),
    CategoricalFeature("page", 30_000, 1.10),
    CategoricalFeature("query", 20_000, 1.15),
    CategoricalFeature("ad", 10_000, 1.20),
    CategoricalFeature("city", 5_000, 1.20),
    CategoricalFeature("publisher", 3_000, 1.25),
    CategoricalFeature("campaign", 2_000, 1.25),
    CategoricalFeature("advertiser", 1_000, 1.25),
    CategoricalFeature("device", 500, 1.30),
    CategoricalFeature("carrier", 300, 1.30),
    CategoricalFeature("placement", 200, 1.25),
    CategoricalFeature("browser", 150, 1.30),
    CategoricalFeature("language", 100, 1.30),
    CategoricalFeature("history", 20_000, 1.15, multi_hot=True),
    CategoricalFeature("keywords", 5_000, 1.20, multi_hot=True),
    CategoricalFeature("interests", 400, 1.25, multi_hot=True),
)
PAIRS = (
    ("ad", "language"),
    ("advertiser", "device"),
    ("campaign", "placement"),
    ("city", "carrier"),
    ("interests", "device"),
    ("publisher", "browser"),
)
TRIPLES = (
    ("advertiser", "browser", "carrier"),
    ("campaign", "device", "browser"),
    ("device", "placement", "language"),
)
CROSSES = ("advertiser", "browser", "device", "placement")


@dataclass(frozen=True, slots=True)
class BestScores:
    """The best any model can reach on a range of samples: the scores of the true probability."""

    ne: float  # normalized entropy: log loss over the entropy of the base rate
    log_loss: float
    base_rate: float


class Inputs(NamedTuple):
    """What a model may know of some samples."""

    numeric_DB: np.ndarray  # float32
    popularity_ranks: tuple[np.ndarray, ...]  # per feature (S, B): popularity ranks; `rows` marks an unused slot


@dataclass(frozen=True, slots=True)
class ClickStream:
    """Clicks without end: `world` seeds the truth, `seed` the samples drawn under it."""

    seed: int = 0
    world: int = 1
    num_dense: int = 8
    drift_period: int = 4_000_000  # samples until the drifting part of the truth has turned once

    def __post_init__(self) -> None:
        for name in ("seed", "world", "num_dense", "drift_period"):
            if not isinstance(getattr(self, name), int):
                raise UserError(f"click stream: {name} = {getattr(self, name)!r}; wanted a whole number")
        for name in ("num_dense", "drift_period"):
            if getattr(self, name) < 1:
                raise UserError(f"click stream: {name} = {getattr(self, name)}; wanted at least 1")

    @property
    def size(self) -> None:
        return None

    @property
    def features(self) -> tuple[tuple[str, int, bool], ...]:
        """(name, rows, multi_hot) of every categorical feature."""
        return tuple((feature.name, feature.rows, feature.multi_hot) for feature in FEATURES)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """The samples at `indices`."""
        inputs = self._inputs(indices)
        click_B = self._clicks(indices, _sigmoid(self._logit(indices, inputs)))
        bags = [_bags(feature, ranks_SB) for feature, ranks_SB in zip(FEATURES, inputs.popularity_ranks, strict=True)]
        return NumpyBatch(
            features=tuple(feature.name for feature in FEATURES),
            values=np.concatenate([ids for ids, _ in bags]),
            lengths=np.stack([length_B for _, length_B in bags]),
            dense=np.ascontiguousarray(inputs.numeric_DB.T),
            labels={"click": click_B.astype(np.float32)},
        )

    def probability(self, indices: np.ndarray) -> np.ndarray:
        """The true probability of a click (B,), float64."""
        return _sigmoid(self._logit(indices, self._inputs(indices)))

    def bound(self, lo: int, hi: int) -> BestScores:
        """The best reachable scores on samples lo to hi, given the labels they have."""
        clicks, loss = 0, 0.0
        for start in range(lo, hi, CHUNK):
            indices = np.arange(start, min(start + CHUNK, hi))
            p_B = self.probability(indices)
            click_B = self._clicks(indices, p_B)
            clicks += int(click_B.sum())
            loss -= float(np.log(np.where(click_B, p_B, 1 - p_B)).sum())
        if not 0 < clicks < hi - lo:
            raise UserError(f"click stream: samples {lo}..{hi} lack a label, so no bound; give a longer range")
        rate, loss = clicks / (hi - lo), loss / (hi - lo)
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        return BestScores(ne=loss / entropy, log_loss=loss, base_rate=rate)

    def orders(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The logit (B,) less BIAS, taken apart by order."""
        return self._orders(indices, self._inputs(indices))

    def _inputs(self, indices: np.ndarray) -> Inputs:
        dense_DB = _normal(draw_bits(stream_keys(SAMPLES, self.seed, NUMERIC, num=self.num_dense), indices))
        ranks = (_ranks(feature, draw_bits(_id_keys(self.seed, feature), indices)) for feature in FEATURES)
        return Inputs(dense_DB.astype(np.float32), tuple(ranks))

    def _clicks(self, indices: np.ndarray, p_B: np.ndarray) -> np.ndarray:
        return _uniform(draw_bits(stream_keys(SAMPLES, self.seed, CLICK, num=1), indices)[0]) < p_B

    def _logit(self, indices: np.ndarray, inputs: Inputs) -> np.ndarray:
        return np.float32(BIAS) + reduce(np.add, self._orders(indices, inputs).values())

    def _orders(self, indices: np.ndarray, inputs: Inputs) -> dict[str, np.ndarray]:
        angle_B = indices * (2 * math.pi / self.drift_period)
        turn_B = np.cos(angle_B).astype(np.float32), np.sin(angle_B).astype(np.float32)
        numbers = {
            feature.name: _numbers(feature, _id_truth(self.world, feature), ranks_SB, turn_B)
            for feature, ranks_SB in zip(FEATURES, inputs.popularity_ranks, strict=True)
        }
        v = {name: number_NB[1:] for name, number_NB in numbers.items()}
        x_DB, (a_D, b_D, a_KD) = inputs.numeric_DB, _dense_truth(self.world, self.num_dense)
        ax_KB = np.stack([_weighted(row_D, x_DB) for row_D in a_KD])
        parts = {
            "first": [number_NB[:1] for number_NB in numbers.values()],
            "linear": [_weighted(a_D, x_DB)[None]],
            "square": [_weighted(b_D, (x_DB * x_DB - 1) / SQUARE_DEVIATION)[None]],
            "second": [v[f] * v[g] for f, g in PAIRS],
            "third": [v[f] * v[g] * v[h] for f, g, h in TRIPLES],
            "cross": [ax_KB * v[f] for f in CROSSES],
        }
        return {
            order: np.float32(SPREAD * math.sqrt(VARIANCE_SHARES[order])) * _unit(parts[order])
            for order in VARIANCE_SHARES
        }


@cache
def _id_keys(seed: int, feature: CategoricalFeature) -> np.ndarray:
    """The keys of a feature's draws: its ids, then for a multi-hot feature the number of them."""
    return stream_keys(SAMPLES, seed, FEATURES.index(feature), num=MAX_IDS + 1 if feature.multi_hot else 1)


@cache
def _id_truth(world: int, feature: CategoricalFeature) -> np.ndarray:
    """(3, N, R + 1): the fixed, one and other numbers of each rank; row R, an unused slot, is zero."""
    hashes_NR = draw_bits(stream_keys(WORLD, world, FEATURES.index(feature), num=3 * (1 + K)), np.arange(feature.rows))
    edges = _mass(feature, np.arange(1.0, feature.rows + 2))
    popularity_R = np.diff(edges) / edges[-1]
    truth_NR = _normal(hashes_NR)
    truth_NR -= (truth_NR @ popularity_R)[:, None]
    truth_NR /= np.sqrt(truth_NR**2 @ popularity_R)[:, None]
    if feature.multi_hot:  # the mean of n ids has a variance of 1 / n
        truth_NR /= math.sqrt(sum(1 / n for n in range(1, MAX_IDS + 1)) / (MAX_IDS + 1))
    parts = truth_NR.reshape(3, 1 + K, feature.rows) * np.sqrt([1 - DRIFT, DRIFT, DRIFT])[:, None, None]
    return np.pad(parts, ((0, 0), (0, 0), (0, 1))).astype(np.float32)


@cache
def _dense_truth(world: int, num_dense: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The unit vectors a (D,) and b (D,) and the rows of A (K, D)."""
    unit = _normal(draw_bits(stream_keys(WORLD, world, NUMERIC, num=2 + K), np.arange(num_dense)))
    unit = (unit / np.sqrt((unit**2).sum(1, keepdims=True))).astype(np.float32)
    return unit[0], unit[1], unit[2:]


def _numbers(feature: CategoricalFeature, truth: np.ndarray, ranks_SB: np.ndarray, turn: tuple) -> np.ndarray:
    """The numbers (N, B) of a feature at each sample's time; of several ids their mean."""
    if feature.multi_hot:
        num_ids_B = np.maximum((ranks_SB < feature.rows).sum(0), 1).astype(np.float32)
        fixed, one, other = truth.take(ranks_SB, axis=2).sum(2) / num_ids_B
    else:
        fixed, one, other = truth.take(ranks_SB[0], axis=2)
    cos_B, sin_B = turn
    return fixed + cos_B * one + sin_B * other


def _mass(feature: CategoricalFeature, x: np.ndarray) -> np.ndarray:
    """The integral of x ** -exponent from 1 on, up to a factor."""
    return 1 - x ** (1 - feature.exponent)


def _ranks(feature: CategoricalFeature, hashes_SB: np.ndarray) -> np.ndarray:
    """Popularity ranks by the inverse of `_mass`; a multi-hot feature's last hash says how many count."""
    mass_SB = _uniform(hashes_SB[:MAX_IDS]) * _mass(feature, np.array([feature.rows + 1.0]))
    x_SB = (1 - mass_SB) ** (1 / (1 - feature.exponent))
    ranks_SB = np.minimum(x_SB.astype(np.int64) - 1, feature.rows - 1)
    if feature.multi_hot:
        num_ids_B = (hashes_SB[MAX_IDS] % np.uint64(MAX_IDS + 1)).astype(np.int64)
        ranks_SB[np.arange(MAX_IDS)[:, None] >= num_ids_B] = feature.rows
    return ranks_SB


def _bags(feature: CategoricalFeature, ranks_SB: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids, sample by sample, and how many each has; an affine bijection scatters ranks over the ids."""
    stride = round(feature.rows * 0.618)
    while math.gcd(stride, feature.rows) > 1:
        stride += 1
    ranks_BS = ranks_SB.T
    used_BS = ranks_BS < feature.rows
    return (ranks_BS[used_BS] * stride + feature.rows // 3) % feature.rows, used_BS.sum(1)


def _uniform(hashes: np.ndarray) -> np.ndarray:
    """Draws from [0, 1), all 53 bits of a float64."""
    return (hashes >> 11) * 2.0**-53


def _normal(hashes: np.ndarray) -> np.ndarray:
    """Nearly normal draws, float64: four 16-bit uniforms added up, in integers, so equal on every machine."""
    total = reduce(np.add, ((hashes >> shift) & 0xFFFF for shift in (0, 16, 32, 48)))
    return (total.astype(np.int64) - 2 * 0xFFFF) * (math.sqrt(3) / 2**16)


def _weighted(weights_D: np.ndarray, x_DB: np.ndarray) -> np.ndarray:
    """weights . x, term by term: a matrix product may round by the group's size."""
    return reduce(np.add, (weight * x_B for weight, x_B in zip(weights_D, x_DB, strict=True)))


def _unit(terms: list[np.ndarray]) -> np.ndarray:
    """The sum (B,) of terms (any, B) of variance 1, over its standard deviation."""
    return reduce(np.add, terms).sum(0) / np.float32(math.sqrt(len(terms) * len(terms[0])))


def _sigmoid(logit_B: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit_B.astype(np.float64)))
