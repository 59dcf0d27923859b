"""What a site costs: the change of the loss (forward) or of the update (gradients), per cell.

First orders are signed and noisy from step to step: they are shrunk over steps with a normal model
whose scale is pooled over the map, and floored at zero, so that nothing selects the noise. Second
orders are positive: their mean over steps is Gamma distributed with a pooled relative spread.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy import optimize, special

from loka_toolkit.numerics.posterior import (
    FloatArray,
    NormalInverseGamma,
    Statistics,
    log_marginal,
    update,
)

DRAWS = 2000
"""Draws per cell from which the interval of an impact is read."""

_PRIOR_STEPS = 4.0
_LOG_WEIGHT = (0.0, 2.0)
_LOG_WEIGHT_BOUNDS = (-7.0, 7.0)
_LOG_RELATIVE_SPREAD = 1.0
_SMALLEST = 1e-30
_CHUNK = 500


@dataclasses.dataclass(frozen=True)
class Impact:
    """Impact of C cells, in the units of what was passed; NaN where there is none.

    Attributes:
        mean: [C] posterior mean, first order floored at zero.
        lo: [C] 5 % quantile.
        hi: [C] 95 % quantile.
        p_above: [C] probability of exceeding the allotment.
        steps: [C] steps it rests on.
    """

    mean: FloatArray
    lo: FloatArray
    hi: FloatArray
    p_above: FloatArray
    steps: FloatArray


def loss_impact(
    first_order: FloatArray, second_order: FloatArray, allotment: FloatArray, *, seed: int
) -> Impact:
    """Combine first and second orders of forward sites.

    Args:
        first_order: [C, S] signed, relative to the baseline loss; NaN where unknown.
        second_order: [C, S] non-negative, same units.
        allotment: [C] what a cell may cost.
        seed: Seed of the draws behind the interval.
    """
    known = ~(np.isnan(first_order) | np.isnan(second_order))
    first = shrunk_mean(
        Statistics.of(np.where(known, first_order, np.nan)),
        scale=np.where(known, np.maximum(second_order, 0.0), 0.0).sum(axis=1),
    )
    second = Statistics.of(np.where(known, np.maximum(second_order, 0.0), np.nan))
    spread = relative_spread(second)
    rng = np.random.default_rng([seed, 2])
    steps = known.sum(axis=1).astype(np.float64)
    shape = (3, len(steps))
    lo, hi, p_above = np.full(shape, np.nan)
    for start in range(0, len(steps), _CHUNK):
        part = slice(start, min(start + _CHUNK, len(steps)))
        df = 2.0 * first.alpha[part]
        sd = np.sqrt(first.beta[part] / (first.alpha[part] * first.kappa[part]))
        theta = first.mu[part] + sd * rng.standard_t(df, (DRAWS, len(df)))
        worth = np.maximum(steps[part], 1.0) / np.square(spread[part])
        gamma = rng.standard_gamma(worth, (DRAWS, len(df))) / worth * second.mean[part]
        total = np.maximum(theta, 0.0) + gamma
        lo[part], hi[part] = np.quantile(total, (0.05, 0.95), axis=0)
        p_above[part] = (total > allotment[part]).mean(axis=0)
    none = steps == 0
    mean = np.maximum(first.mu, 0.0) + second.mean
    mean, lo, hi, p_above = (np.where(none, np.nan, x) for x in (mean, lo, hi, p_above))
    return Impact(mean, lo, hi, p_above, steps)


def gradient_bias(values: FloatArray, limit: float) -> tuple[FloatArray, FloatArray]:
    """Return the posterior mean of a gradient's bias [C] and P(its magnitude is above ``limit``).

    Args:
        values: [C, S] bias per step; NaN where unknown.
        limit: Largest magnitude that the tolerance allows.
    """
    after = shrunk_mean(Statistics.of(values))
    df = 2.0 * after.alpha
    sd = np.sqrt(after.beta / (after.alpha * after.kappa))
    above = special.stdtr(df, (after.mu - limit) / sd) + special.stdtr(df, (-limit - after.mu) / sd)
    none = np.isnan(values).all(axis=1)
    return np.where(none, np.nan, after.mu), np.where(none, np.nan, above)


def gradient_noise(values: FloatArray, limit: float) -> tuple[FloatArray, FloatArray]:
    """Return the mean noise ratio [C] and P(it is above ``limit``); the same for noise."""
    statistics = Statistics.of(np.maximum(values, 0.0))
    worth = np.maximum(statistics.count, 1.0) / np.square(relative_spread(statistics))
    scaled = limit * worth / np.maximum(statistics.mean, _SMALLEST)
    none = statistics.count == 0
    mean = np.where(none, np.nan, statistics.mean)
    return mean, np.where(none, np.nan, special.gammaincc(worth, scaled))


def shrunk_mean(statistics: Statistics, scale: FloatArray | None = None) -> NormalInverseGamma:
    """Return the posterior of every cell's mean, shrunk to zero by a weight fitted to the map.

    The mean is Normal(0, v / kappa) given the variance v of a step, the variance InverseGamma with
    ``_PRIOR_STEPS`` pseudo-steps at a pooled level; kappa maximizes its marginal likelihood times a
    wide log-normal prior.

    Args:
        statistics: [C] of signed values.
        scale: [C] a positive figure, up to a common factor and the count, to which the variance of
            a step is proportional: for first orders the second order (both grow with the square of
            the error). None: the variance is alike in all cells, up to its own evidence.
    """
    several = statistics.count >= 3
    sample = statistics.squares / np.maximum(statistics.count - 1.0, 1.0)
    fallback = sample + np.square(statistics.mean)
    if scale is not None and (scale > 0).any():
        level = scale / np.maximum(statistics.count, 1.0)
        level = np.maximum(level, _SMALLEST + 1e-6 * level[scale > 0].min())
    else:
        level = np.ones_like(sample)
    useful = several & (sample > 0)
    pool, at = (sample, useful) if useful.any() else (fallback, statistics.count > 0)
    ratio = float(np.median(pool[at] / level[at])) if at.any() else 0.0
    variance = np.maximum(ratio * level, _SMALLEST)
    half = 0.5 * _PRIOR_STEPS

    def prior(log_weight: float) -> NormalInverseGamma:
        weight = np.full_like(variance, np.exp(log_weight))
        shape = np.full_like(variance, half)
        return NormalInverseGamma(np.zeros_like(variance), weight, shape, half * variance)

    def loss(log_weight: float) -> float:
        evidence = float(log_marginal(prior(log_weight), statistics).sum())
        return 0.5 * ((log_weight - _LOG_WEIGHT[0]) / _LOG_WEIGHT[1]) ** 2 - evidence

    best = optimize.minimize_scalar(loss, bounds=_LOG_WEIGHT_BOUNDS, method="bounded")
    return update(prior(float(best.x)), statistics)


def relative_spread(statistics: Statistics) -> FloatArray:
    """Return every cell's standard deviation over its mean, shrunk to the map's median [C]."""
    variance = statistics.squares / np.maximum(statistics.count - 1.0, 1.0)
    own = np.sqrt(variance) / np.maximum(statistics.mean, _SMALLEST)
    useful = (statistics.count >= 3) & (statistics.mean > 0)
    pooled = float(np.median(own[useful])) if useful.any() else _LOG_RELATIVE_SPREAD
    free = np.where(useful, statistics.count - 1.0, 0.0)
    squared = (free * np.square(own) + _PRIOR_STEPS * pooled**2) / (free + _PRIOR_STEPS)
    return np.asarray(np.maximum(np.sqrt(squared), 1e-3))
