"""Non-negative least squares (NNLS) in relative error: fits costs per call, row and byte to measured times.

Shape legend: N samples, F features.
"""

from itertools import combinations
from typing import Any, cast

import numpy as np

NUM_ITERATIONS = 8
MIN_RESIDUAL = 0.02  # smaller relative deviations count as noise: such samples have equal weight


def fit_non_negative(features_NF: np.ndarray, values_N: np.ndarray, weights_N: np.ndarray | None = None) -> np.ndarray:
    """Fit one coefficient >= 0 per feature, minimizing the sum of absolute relative deviations approximately.

    Iteratively reweighted least squares.
    """
    relative_NF = features_NF / values_N[:, None]
    weights = np.ones(len(values_N)) if weights_N is None else weights_N
    coefficients = np.zeros(features_NF.shape[1])
    robust_weights = weights
    for _ in range(NUM_ITERATIONS):
        coefficients = _solve_non_negative(relative_NF, robust_weights)
        robust_weights = weights / np.maximum(np.abs(relative_NF @ coefficients - 1), MIN_RESIDUAL)
    return coefficients


def mean_relative_error(features_NF: np.ndarray, values_N: np.ndarray, coefficients_F: np.ndarray) -> float:
    """The mean of |predicted / value - 1|."""
    return float(np.abs(features_NF @ coefficients_F / values_N - 1).mean())


def fit_line(sizes: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> tuple[float, float]:
    """Fit values = fixed + per_size * size; returns (fixed, per_size)."""
    fixed, per_size = fit_non_negative(np.stack([np.ones(len(sizes)), sizes], 1), values, weights)
    return float(fixed), float(per_size)


def _solve_non_negative(relative_NF: np.ndarray, weights_N: np.ndarray) -> np.ndarray:
    """Weighted NNLS with target 1 for every sample; tries every subset of the few features."""
    num = relative_NF.shape[1]
    root_weights = np.sqrt(weights_N)
    best, best_residual = np.zeros(num), np.inf
    for columns in (list(subset) for size in range(1, num + 1) for subset in combinations(range(num), size)):
        scale = np.maximum(np.abs(relative_NF[:, columns]).max(0), 1e-300)
        solution = _least_squares(relative_NF[:, columns] / scale * root_weights[:, None], root_weights) / scale
        residual = float((weights_N * (relative_NF[:, columns] @ solution - 1) ** 2).sum())
        if (solution >= 0).all() and residual < best_residual:
            best, best_residual = np.zeros(num), residual
            best[columns] = solution
    return best


def _least_squares(matrix: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return cast("Any", np.linalg.lstsq)(matrix, targets, rcond=None)[0]
