"""What a site costs: the change of the loss (forward) or of the update (gradients), per cell.

First orders are signed and noisy from step to step: they are shrunk over steps with normal models
whose scales are pooled over the map, and floored at zero, so that nothing selects the noise. Second
orders are positive: their mean over steps is Gamma distributed with a pooled relative spread.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy import special

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
_WEIGHTS = np.logspace(-6.0, 4.0, 21)
_EM_ROUNDS = 200
_PSEUDO_CELLS = 1.0
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
        theta = first.sample(DRAWS, part, rng)
        worth = np.maximum(steps[part], 1.0) / np.square(spread[part])
        gamma = rng.standard_gamma(worth, theta.shape) / worth * second.mean[part]
        total = np.maximum(theta, 0.0) + gamma
        lo[part], hi[part] = np.quantile(total, (0.05, 0.95), axis=0)
        p_above[part] = (total > allotment[part]).mean(axis=0)
    none = steps == 0
    mean = np.maximum(first.mean, 0.0) + second.mean
    mean, lo, hi, p_above = (np.where(none, np.nan, x) for x in (mean, lo, hi, p_above))
    return Impact(mean, lo, hi, p_above, steps)


def gradient_bias(values: FloatArray, limit: float) -> tuple[FloatArray, FloatArray]:
    """Return the posterior mean of a gradient's bias [C] and P(its magnitude is above ``limit``).

    Args:
        values: [C, S] bias per step; NaN where unknown.
        limit: Largest magnitude that the tolerance allows.
    """
    after = shrunk_mean(Statistics.of(values))
    above = after.above(limit) + 1.0 - after.above(-limit)
    none = np.isnan(values).all(axis=1)
    return np.where(none, np.nan, after.mean), np.where(none, np.nan, above)


def gradient_noise(values: FloatArray, limit: float) -> tuple[FloatArray, FloatArray]:
    """Return the mean noise ratio [C] and P(it is above ``limit``); the same for noise."""
    statistics = Statistics.of(np.maximum(values, 0.0))
    worth = np.maximum(statistics.count, 1.0) / np.square(relative_spread(statistics))
    scaled = limit * worth / np.maximum(statistics.mean, _SMALLEST)
    none = statistics.count == 0
    mean = np.where(none, np.nan, statistics.mean)
    return mean, np.where(none, np.nan, special.gammaincc(worth, scaled))


@dataclasses.dataclass(frozen=True)
class ShrunkMean:
    """Posterior of the mean of C cells: a mixture over K weights of the pull towards zero.

    Attributes:
        share: [K, C] posterior probability of a weight.
        given: [K, C] the posterior under it.
    """

    share: FloatArray
    given: NormalInverseGamma

    @property
    def mean(self) -> FloatArray:
        """Posterior mean [C]."""
        return np.asarray((self.share * self.given.mu).sum(axis=0))

    @property
    def _scale(self) -> FloatArray:
        return np.sqrt(self.given.beta / (self.given.alpha * self.given.kappa))

    def above(self, value: float) -> FloatArray:
        """Return P(the mean is above ``value``) [C]."""
        tail = special.stdtr(2.0 * self.given.alpha, (self.given.mu - value) / self._scale)
        return np.asarray((self.share * tail).sum(axis=0))

    def sample(self, draws: int, part: slice, rng: np.random.Generator) -> FloatArray:
        """Draw means [draws, c] of some cells."""
        edges = self.share[:, part].cumsum(axis=0)
        pick = rng.random((draws, edges.shape[1]))
        chosen = np.minimum((pick[:, None, :] > edges).sum(axis=1), len(edges) - 1)
        mu, scale, alpha = (
            np.take_along_axis(x[:, part], chosen, axis=0)
            for x in (self.given.mu, self._scale, self.given.alpha)
        )
        return np.asarray(mu + scale * rng.standard_t(2.0 * alpha))


def shrunk_mean(statistics: Statistics, scale: FloatArray | None = None) -> ShrunkMean:
    """Return the posterior of every cell's mean, shrunk to zero as far as the map suggests.

    The mean is Normal(0, v / kappa) given the variance v of a step, the variance InverseGamma with
    ``_PRIOR_STEPS`` pseudo-steps at a pooled level. kappa is one of ``_WEIGHTS``, with shares that
    maximize the marginal likelihood over all cells (adaptive shrinkage; Stephens, "False discovery
    rates: a new deal", 2017): where most cells show noise, noise is pulled to zero and the few that
    stand out are not.

    Args:
        statistics: [C] of signed values.
        scale: [C] a positive figure, up to a common factor and the count, to which the variance of
            a step is proportional: for first orders the second order (both grow with the square of
            the error). None: the variance is alike in all cells, up to its own evidence.
    """
    variance = _pooled_variance(statistics, scale)
    shape = (len(_WEIGHTS), len(variance))
    prior = NormalInverseGamma(
        mu=np.zeros(shape),
        kappa=np.broadcast_to(_WEIGHTS[:, None], shape),
        alpha=np.full(shape, 0.5 * _PRIOR_STEPS),
        beta=np.broadcast_to(0.5 * _PRIOR_STEPS * variance, shape),
    )
    evidence = log_marginal(prior, statistics)
    likelihood = np.exp(evidence - evidence.max(axis=0))
    weights = np.full(len(_WEIGHTS), 1.0 / len(_WEIGHTS))
    for _ in range(_EM_ROUNDS):
        share = weights[:, None] * likelihood
        share /= share.sum(axis=0)
        weights = share[:, statistics.count > 0].sum(axis=1) + _PSEUDO_CELLS / len(_WEIGHTS)
        weights /= weights.sum()
    share = weights[:, None] * likelihood
    return ShrunkMean(share / share.sum(axis=0), update(prior, statistics))


def _pooled_variance(statistics: Statistics, scale: FloatArray | None) -> FloatArray:
    several = statistics.count >= 3
    sample = statistics.squares / np.maximum(statistics.count - 1.0, 1.0)
    if scale is not None and (scale > 0).any():
        level = scale / np.maximum(statistics.count, 1.0)
        level = np.maximum(level, _SMALLEST + 1e-6 * level[scale > 0].min())
    else:
        level = np.ones_like(sample)
    useful = several & (sample > 0)
    if not useful.any():
        sample, useful = sample + np.square(statistics.mean), statistics.count > 0
    ratio = float(np.median(sample[useful] / level[useful])) if useful.any() else 0.0
    return np.maximum(ratio * level, _SMALLEST)


def relative_spread(statistics: Statistics) -> FloatArray:
    """Return every cell's standard deviation over its mean, shrunk to the map's median [C]."""
    variance = statistics.squares / np.maximum(statistics.count - 1.0, 1.0)
    own = np.sqrt(variance) / np.maximum(statistics.mean, _SMALLEST)
    useful = (statistics.count >= 3) & (statistics.mean > 0)
    pooled = float(np.median(own[useful])) if useful.any() else _LOG_RELATIVE_SPREAD
    free = np.where(useful, statistics.count - 1.0, 0.0)
    squared = (free * np.square(own) + _PRIOR_STEPS * pooled**2) / (free + _PRIOR_STEPS)
    return np.asarray(np.maximum(np.sqrt(squared), 1e-3))
