"""The non-negative combination of features that is nearest to what was measured, in relative terms."""

from itertools import combinations
from typing import Any, cast

import numpy as np

NUM_ITERATIONS = 8
MIN_RESIDUAL = 0.02  # below it a deviation counts as noise, and all samples alike


def fit_non_negative(features_NF: np.ndarray, values_N: np.ndarray, weights_N: np.ndarray | None = None) -> np.ndarray:
    """A coefficient for each feature, 0 or more: the sum of (absolute) relative deviations is about least."""
    relative_NF = features_NF / values_N[:, None]
    weights = np.ones(len(values_N)) if weights_N is None else weights_N
    found = np.zeros(features_NF.shape[1])
    steady = weights
    for _ in range(NUM_ITERATIONS):
        found = _nearest(relative_NF, steady)
        steady = weights / np.maximum(np.abs(relative_NF @ found - 1), MIN_RESIDUAL)
    return found


def mean_relative_error(features_NF: np.ndarray, values_N: np.ndarray, coefficients_F: np.ndarray) -> float:
    """The mean of |combination / value - 1|."""
    return float(np.abs(features_NF @ coefficients_F / values_N - 1).mean())


def fit_line(sizes: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> tuple[float, float]:
    """(fixed, each): values are about fixed + each * size."""
    fixed, each = fit_non_negative(np.stack([np.ones(len(sizes)), sizes], 1), values, weights)
    return float(fixed), float(each)


def _nearest(relative_NF: np.ndarray, weights_N: np.ndarray) -> np.ndarray:
    """Least squares with 1 as the aim; features are few, so that every set of them is tried."""
    num = relative_NF.shape[1]
    root = np.sqrt(weights_N)
    best, least = np.zeros(num), np.inf
    for chosen in (list(some) for size in range(1, num + 1) for some in combinations(range(num), size)):
        scale = np.maximum(np.abs(relative_NF[:, chosen]).max(0), 1e-300)
        part = _least_squares(relative_NF[:, chosen] / scale * root[:, None], root) / scale
        residual = float((weights_N * (relative_NF[:, chosen] @ part - 1) ** 2).sum())
        if (part >= 0).all() and residual < least:
            best, least = np.zeros(num), residual
            best[chosen] = part
    return best


def _least_squares(matrix: np.ndarray, aims: np.ndarray) -> np.ndarray:
    return cast("Any", np.linalg.lstsq)(matrix, aims, rcond=None)[0]
