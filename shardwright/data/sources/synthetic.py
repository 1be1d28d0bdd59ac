"""Synthetic endless click stream with known click probabilities, which bound the quality of any model.

Every draw is a hash of (seed, stream, slot, sample index): a sample is the same in any batch and in any process.
Frozen at VERSION: published quality results use these samples, so no sample may change.
Must not import torch (worker processes import this file) nor use sums whose last bit depends on the batch size.

Each id has a weight w and a latent vector v of K values, with mean 0 and variance 1 under its feature's popularity.
Features are independent, so the terms of the logit are uncorrelated and VARIANCE_SHARES are shares of its variance:

    logit = BIAS + SPREAD * sum over terms of sqrt(VARIANCE_SHARES[term]) * value, each value scaled to variance 1:
    first    sum of w_f                          second   sum over PAIRS of v_f . v_g
    linear   a . x of the numeric features x     third    sum over TRIPLES of v_f . v_g . v_h
    square   b . (x^2 - 1)                       cross    sum over CROSSES of (A x) . v_f

w and v drift: sqrt(1 - DRIFT) c0 + sqrt(DRIFT) (cos t c1 + sin t c2), where t turns once per drift period.

Shape legend: N values of an id (w, v), K latent values, D numeric features, S slots of a feature, B samples, R rows.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, reduce
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from shardwright.data.sources.source import NumpyBatch, draw_bits, stream_keys
from shardwright.errors import UserError

VERSION = 1
K = 4
MAX_IDS = 6  # a multi-hot feature has 0 to MAX_IDS ids per sample, all lengths equally likely
BIAS = -1.6
SPREAD = 1.65  # standard deviation of the logit
VARIANCE_SHARES = MappingProxyType(
    {"first": 0.26, "linear": 0.05, "square": 0.03, "second": 0.45, "third": 0.11, "cross": 0.10}
)
SQUARE_DEVIATION = np.float32(math.sqrt(1.7))  # standard deviation of x^2 for x drawn by `_to_normal`
DRIFT = 0.05  # share of the variance of w and v that drifts
CHUNK = 4096  # samples per chunk, so that it fits the processor's cache
SAMPLES, WORLD = 1, 2  # first word of every hash key, so that equal values of `seed` and `world` stay unrelated
# numbers of the streams that belong to no categorical feature; those have 0, 1, 2, ...
NUMERIC, CLICK, BUY, KNOWN = 1001, 1002, 1003, 1004
BUY_BIAS = -2.6


class CategoricalFeature(NamedTuple):
    """A feature whose id of popularity rank r has a probability of about r ** -exponent, up to a factor."""

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
    """Best scores that a model can reach on a range of samples: the scores of the true probabilities."""

    ne: float  # normalized entropy: log loss over the entropy of the base rate
    log_loss: float
    base_rate: float


class Inputs(NamedTuple):
    """Features of some samples."""

    numeric_DB: np.ndarray  # float32
    popularity_ranks: tuple[np.ndarray, ...]  # (S, B) per feature; an unused slot has the value `rows`


@dataclass(frozen=True, slots=True)
class ClickStream:
    """Endless synthetic clicks: `world` seeds the true probabilities, `seed` the samples drawn from them."""

    seed: int = 0
    world: int = 1
    num_dense: int = 8
    drift_period: int = 4_000_000  # samples until w and v have returned to their first values

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
        """(name, rows, is_multi_hot) of every categorical feature."""
        return tuple((feature.name, feature.rows, feature.multi_hot) for feature in FEATURES)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """Generate the samples at `indices`."""
        inputs = self._inputs(indices)
        click_B = self._clicks(indices, _sigmoid(self._logit(indices, inputs)))
        bags = [_to_ids(feature, ranks_SB) for feature, ranks_SB in zip(FEATURES, inputs.popularity_ranks, strict=True)]
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
        """Best reachable scores on samples lo to hi - 1, given their labels."""
        clicks, loss = 0, 0.0
        for start in range(lo, hi, CHUNK):
            indices = np.arange(start, min(start + CHUNK, hi))
            p_B = self.probability(indices)
            click_B = self._clicks(indices, p_B)
            clicks += int(click_B.sum())
            loss -= float(np.log(np.where(click_B, p_B, 1 - p_B)).sum())
        if not 0 < clicks < hi - lo:
            raise UserError(f"click stream: samples {lo}..{hi} all have the same label; give a longer range")
        rate, loss = clicks / (hi - lo), loss / (hi - lo)
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        return BestScores(ne=loss / entropy, log_loss=loss, base_rate=rate)

    def orders(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Terms (B,) of the logit by name; their sum is the logit - BIAS."""
        return self._orders(indices, self._inputs(indices))

    def _inputs(self, indices: np.ndarray) -> Inputs:
        numeric_DB = _to_normal(draw_bits(stream_keys(SAMPLES, self.seed, NUMERIC, num=self.num_dense), indices))
        ranks = (_to_ranks(feature, draw_bits(_id_keys(self.seed, feature), indices)) for feature in FEATURES)
        return Inputs(numeric_DB.astype(np.float32), tuple(ranks))

    def _clicks(self, indices: np.ndarray, p_B: np.ndarray) -> np.ndarray:
        return _to_uniform(draw_bits(stream_keys(SAMPLES, self.seed, CLICK, num=1), indices)[0]) < p_B

    def _logit(self, indices: np.ndarray, inputs: Inputs) -> np.ndarray:
        return np.float32(BIAS) + reduce(np.add, self._orders(indices, inputs).values())

    def _orders(self, indices: np.ndarray, inputs: Inputs) -> dict[str, np.ndarray]:
        angle_B = indices * (2 * math.pi / self.drift_period)
        cos_sin_B = np.cos(angle_B).astype(np.float32), np.sin(angle_B).astype(np.float32)
        w_and_v = {
            feature.name: _id_values(feature, _true_id_values(self.world, feature), ranks_SB, cos_sin_B)
            for feature, ranks_SB in zip(FEATURES, inputs.popularity_ranks, strict=True)
        }
        v = {name: values_NB[1:] for name, values_NB in w_and_v.items()}
        x_DB, (a_D, b_D, a_KD) = inputs.numeric_DB, _true_numeric_weights(self.world, self.num_dense)
        ax_KB = np.stack([_dot(row_D, x_DB) for row_D in a_KD])
        summands = {
            "first": [values_NB[:1] for values_NB in w_and_v.values()],
            "linear": [_dot(a_D, x_DB)[None]],
            "square": [_dot(b_D, (x_DB * x_DB - 1) / SQUARE_DEVIATION)[None]],
            "second": [v[f] * v[g] for f, g in PAIRS],
            "third": [v[f] * v[g] * v[h] for f, g, h in TRIPLES],
            "cross": [ax_KB * v[f] for f in CROSSES],
        }
        return {
            term: np.float32(SPREAD * math.sqrt(VARIANCE_SHARES[term])) * _sum_to_unit_variance(summands[term])
            for term in VARIANCE_SHARES
        }


@dataclass(frozen=True, slots=True)
class TaskStream:
    """The samples of a `ClickStream` with a second label, "buy", whose true probabilities are known too.

    The logit of buy is BUY_BIAS + SPREAD * (c z + sqrt(1 - c^2) y), with c = `correlation`: z is the click's logit,
    scaled to mean 0 and variance 1, and y the same of another world; c is the correlation of the logits of click and
    buy.
    """

    seed: int = 0
    world: int = 1
    num_dense: int = 8
    drift_period: int = 4_000_000
    correlation: float = 0.5
    missing: float = 0.0  # share of the samples, drawn at random, whose label "buy" is not known (NaN)

    def __post_init__(self) -> None:
        self.clicks()
        for name, low, high in (("correlation", -1, 1), ("missing", 0, 0.99)):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"task stream: {name} = {getattr(self, name)}; wanted {low} to {high}")

    @property
    def size(self) -> None:
        return None

    @property
    def features(self) -> tuple[tuple[str, int, bool], ...]:
        """(name, rows, is_multi_hot) of every categorical feature."""
        return self.clicks().features

    def clicks(self) -> ClickStream:
        """The stream of the same samples with clicks only."""
        return ClickStream(self.seed, self.world, self.num_dense, self.drift_period)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        """Generate the samples at `indices`."""
        buy_B = self._buys(indices, self._buy_probability(indices))
        samples = self.clicks().take(indices)
        return replace(samples, labels={**samples.labels, "buy": buy_B})

    def probabilities(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The true probabilities (B,) of click and buy, float64."""
        return {"click": self.clicks().probability(indices), "buy": self._buy_probability(indices)}

    def bound(self, lo: int, hi: int, label: str) -> BestScores:
        """Best reachable scores of a label on the samples lo to hi - 1 that have it."""
        if label == "click":
            return self.clicks().bound(lo, hi)
        scored: list[tuple[np.ndarray, np.ndarray]] = []
        for start in range(lo, hi, CHUNK):
            indices = np.arange(start, min(start + CHUNK, hi))
            p_B = self._buy_probability(indices)
            buy_B = self._buys(indices, p_B)
            scored.append((p_B[~np.isnan(buy_B)], buy_B[~np.isnan(buy_B)]))
        p, buy = (np.concatenate(columns) for columns in zip(*scored, strict=True))
        if not 0 < buy.sum() < len(buy):
            raise UserError(f"task stream: samples {lo}..{hi} all have the same label; give a longer range")
        rate, loss = float(buy.mean(dtype=np.float64)), -float(np.log(np.where(buy > 0, p, 1 - p)).mean())
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        return BestScores(loss / entropy, loss, rate)

    def _buy_probability(self, indices: np.ndarray) -> np.ndarray:
        clicks = self.clicks()
        worlds = (clicks, replace(clicks, world=~self.world))
        z_B, y_B = (reduce(np.add, stream.orders(indices).values()) for stream in worlds)  # each times SPREAD
        rest = math.sqrt(1 - self.correlation**2)
        return _sigmoid(np.float32(BUY_BIAS) + np.float32(self.correlation) * z_B + np.float32(rest) * y_B)

    def _buys(self, indices: np.ndarray, p_B: np.ndarray) -> np.ndarray:
        """Draw the label "buy" (B,), float32; NaN where it is missing."""
        draws = _to_uniform(draw_bits(stream_keys(SAMPLES, self.seed, BUY, num=1), indices)[0])
        known = _to_uniform(draw_bits(stream_keys(SAMPLES, self.seed, KNOWN, num=1), indices)[0])
        return np.where(known < self.missing, np.nan, draws < p_B).astype(np.float32)


@cache
def _id_keys(seed: int, feature: CategoricalFeature) -> np.ndarray:
    """Hash keys of a feature: one per id slot; a multi-hot feature has another for the number of its ids."""
    return stream_keys(SAMPLES, seed, FEATURES.index(feature), num=MAX_IDS + 1 if feature.multi_hot else 1)


@cache
def _true_id_values(world: int, feature: CategoricalFeature) -> np.ndarray:
    """c0, c1, c2 of w and v by popularity rank (3, N, R + 1); rank R, an unused slot, has zeros."""
    hashes_NR = draw_bits(stream_keys(WORLD, world, FEATURES.index(feature), num=3 * (1 + K)), np.arange(feature.rows))
    edges = _integral(feature, np.arange(1.0, feature.rows + 2))
    popularity_R = np.diff(edges) / edges[-1]
    values_NR = _to_normal(hashes_NR)
    values_NR -= (values_NR @ popularity_R)[:, None]
    values_NR /= np.sqrt(values_NR**2 @ popularity_R)[:, None]
    if feature.multi_hot:  # the mean of n ids has a variance of 1 / n
        values_NR /= math.sqrt(sum(1 / n for n in range(1, MAX_IDS + 1)) / (MAX_IDS + 1))
    components = values_NR.reshape(3, 1 + K, feature.rows) * np.sqrt([1 - DRIFT, DRIFT, DRIFT])[:, None, None]
    return np.pad(components, ((0, 0), (0, 0), (0, 1))).astype(np.float32)


@cache
def _true_numeric_weights(world: int, num_dense: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit vectors a (D,) and b (D,), and the matrix A (K, D), whose rows are unit vectors."""
    unit = _to_normal(draw_bits(stream_keys(WORLD, world, NUMERIC, num=2 + K), np.arange(num_dense)))
    unit = (unit / np.sqrt((unit**2).sum(1, keepdims=True))).astype(np.float32)
    return unit[0], unit[1], unit[2:]


def _id_values(feature: CategoricalFeature, table: np.ndarray, ranks_SB: np.ndarray, cos_sin_B: tuple) -> np.ndarray:
    """w and v (N, B) of a feature at each sample's time; of several ids the mean."""
    if feature.multi_hot:
        num_ids_B = np.maximum((ranks_SB < feature.rows).sum(0), 1).astype(np.float32)
        c0_NB, c1_NB, c2_NB = table.take(ranks_SB, axis=2).sum(2) / num_ids_B
    else:
        c0_NB, c1_NB, c2_NB = table.take(ranks_SB[0], axis=2)
    cos_B, sin_B = cos_sin_B
    return c0_NB + cos_B * c1_NB + sin_B * c2_NB


def _integral(feature: CategoricalFeature, x: np.ndarray) -> np.ndarray:
    """The integral of t ** -exponent from 1 to x, up to a factor."""
    return 1 - x ** (1 - feature.exponent)


def _to_ranks(feature: CategoricalFeature, hashes_SB: np.ndarray) -> np.ndarray:
    """Hashes to popularity ranks by inverting `_integral`; a last hash draws a multi-hot feature's length."""
    mass_SB = _to_uniform(hashes_SB[:MAX_IDS]) * _integral(feature, np.array([feature.rows + 1.0]))
    x_SB = (1 - mass_SB) ** (1 / (1 - feature.exponent))
    ranks_SB = np.minimum(x_SB.astype(np.int64) - 1, feature.rows - 1)
    if feature.multi_hot:
        num_ids_B = (hashes_SB[MAX_IDS] % np.uint64(MAX_IDS + 1)).astype(np.int64)
        ranks_SB[np.arange(MAX_IDS)[:, None] >= num_ids_B] = feature.rows
    return ranks_SB


def _to_ids(feature: CategoricalFeature, ranks_SB: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids, sample by sample, and lengths (B,); an affine bijection scatters popularity ranks over the ids."""
    stride = round(feature.rows * 0.618)
    while math.gcd(stride, feature.rows) > 1:
        stride += 1
    ranks_BS = ranks_SB.T
    is_used_BS = ranks_BS < feature.rows
    return (ranks_BS[is_used_BS] * stride + feature.rows // 3) % feature.rows, is_used_BS.sum(1)


def _to_uniform(hashes: np.ndarray) -> np.ndarray:
    """Hashes to uniform draws from [0, 1), float64 with all 53 bits random."""
    return (hashes >> 11) * 2.0**-53


def _to_normal(hashes: np.ndarray) -> np.ndarray:
    """Hashes to nearly normal draws, float64: an integer sum of four uniforms, equal on every machine."""
    total = reduce(np.add, ((hashes >> shift) & 0xFFFF for shift in (0, 16, 32, 48)))
    return (total.astype(np.int64) - 2 * 0xFFFF) * (math.sqrt(3) / 2**16)


def _dot(weights_D: np.ndarray, x_DB: np.ndarray) -> np.ndarray:
    """weights . x (B,), added term by term: the rounding of a matrix product may depend on the batch size."""
    return reduce(np.add, (weight * x_B for weight, x_B in zip(weights_D, x_DB, strict=True)))


def _sum_to_unit_variance(summands: list[np.ndarray]) -> np.ndarray:
    """The sum (B,) of arrays (any, B) whose values have variance 1, divided by its standard deviation."""
    return reduce(np.add, summands).sum(0) / np.float32(math.sqrt(len(summands) * len(summands[0])))


def _sigmoid(logit_B: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit_B.astype(np.float64)))
