"""Operands of which many elements are exactly zero, as behind a ReLU: censored normals.

Feature i is ``intercept_i + slope_i z_i`` where ``z_i > threshold_i`` and zero elsewhere, z
standard normal and correlated between features. Threshold, intercept and slope follow in closed
form from the probability of a zero, the mean and the variance (moments of the truncated normal).
The correlation of z is the one under which the features have the recorded covariance: that is the
Hermite series ``sum over n of c_in c_jn rho**n``, cut after n = 3, and inverted for rho.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from scipy import special

from loka_toolkit.harness.features import FeatureMoments

REPRODUCED_ZERO_SHARE = 0.05
"""Zeros are drawn where at least one element in twenty was zero; fewer change no error visibly."""

_MOST_ZERO = 0.95
_Float64 = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Censored:
    """A distribution of rows with zeros.

    Attributes:
        threshold: [width]; z above it is not zeroed.
        intercept: [width].
        slope: [width].
        correlation: Of z: [width, width], or None where features are independent.
    """

    threshold: _Float64
    intercept: _Float64
    slope: _Float64
    correlation: _Float64 | None


def censored(moments: FeatureMoments) -> Censored | None:
    """Return the distribution with these moments, or None if too few elements are zero."""
    if moments.zero_share < REPRODUCED_ZERO_SHARE:
        return None
    zero = zero_probabilities(moments)
    kept = 1.0 - zero
    threshold = special.ndtri(np.clip(zero, 1e-15, 1.0 - 1e-15))
    density = np.exp(-(threshold**2) / 2) / math.sqrt(2 * math.pi)
    inverse = np.divide(1.0, kept, out=np.zeros_like(kept), where=kept > 0)
    mean = moments.mean * inverse
    variance = np.maximum((moments.variance + moments.mean**2) * inverse - mean**2, 0.0)
    truncated_mean = density * inverse
    truncated_variance = 1.0 + threshold * truncated_mean - truncated_mean**2
    slope = np.sqrt(variance / np.maximum(truncated_variance, 1e-12)) * (kept > 0)
    intercept = mean - slope * truncated_mean
    correlation = None
    if moments.covariance.ndim == 2:
        coefficients = _hermite(threshold, density, kept, intercept, slope)
        correlation = _latent_correlation(moments.covariance, coefficients)
    return Censored(threshold, intercept, slope, correlation)


def zero_probabilities(moments: FeatureMoments) -> _Float64:
    """Return the probability of a zero per feature, their mean the recorded share if it can be.

    A feature of mean m and variance v is zero at most with probability v / (v + m**2), because
    what is left must carry the mean and (E X)**2 <= P(X != 0) E X**2. The share recorded is one
    number for all features, so it is spread evenly, as far as each can take it.
    """
    square = moments.mean**2
    total = moments.variance + square
    always = total == 0
    most = _MOST_ZERO * np.divide(moments.variance, total, out=np.zeros_like(total), where=~always)
    most[always] = 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        level = (low + high) / 2
        enough = np.minimum(most, level).mean() >= moments.zero_share
        low, high = (low, level) if enough else (level, high)
    return np.where(always, 1.0, np.minimum(most, high))


def _hermite(
    threshold: _Float64,
    density: _Float64,
    kept: _Float64,
    intercept: _Float64,
    slope: _Float64,
) -> list[_Float64]:
    """Return E[h He_n] / sqrt(n!) for n = 1, 2, 3, with h the censored linear function.

    The integrals of He_n and z He_n times the normal density from t upward are, in this order,
    phi and t phi + Q; t phi and (t**2 + 1) phi; (t**2 - 1) phi and t**3 phi.
    """
    t = threshold
    first = intercept * density + slope * (t * density + kept)
    second = (intercept * t + slope * (t**2 + 1)) * density
    third = (intercept * (t**2 - 1) + slope * t**3) * density
    return [first, second / math.sqrt(2), third / math.sqrt(6)]


def _latent_correlation(covariance: _Float64, coefficients: list[_Float64]) -> _Float64:
    terms = [np.outer(c, c) for c in coefficients]
    low = np.full_like(covariance, -1.0)
    high = np.ones_like(covariance)
    # Bisection keeps to [-1, 1] where the cut series cannot reach the covariance.
    for _ in range(40):
        rho = (low + high) / 2
        below = rho * (terms[0] + rho * (terms[1] + rho * terms[2])) < covariance
        low, high = np.where(below, rho, low), np.where(below, high, rho)
    rho = (low + high) / 2
    rho[np.abs(terms[0]) == 0] = 0.0
    np.fill_diagonal(rho, 1.0)
    return rho
