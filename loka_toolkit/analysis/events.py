"""The rate at which steps break the tolerance as outliers: beta-binomial, pooled over the map.

A normal model cannot speak of the rare step at which a batch overflows a static scale. Such steps
are counted: k of n in a cell, with rate rho ~ Beta(m s, (1 - m) s). The map's mean rate m and its
concentration s have a prior and a posterior on a grid, which is exact and needs no sampler.

Priors: logit m ~ Normal(-6, 1.5), a median of one step in 400, 95 % between one in 7,600 and one in
22; log s ~ Normal(log 20, 1), worth between 3 and 140 steps.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy import special

from loka_toolkit.analysis.observations import IntArray
from loka_toolkit.numerics.posterior import FloatArray

LOGIT_MEAN = (-6.0, 1.5)
LOG_CONCENTRATION = (float(np.log(20.0)), 1.0)
_GRID = (121, 81)
_REACH_SD = 5.0


@dataclasses.dataclass(frozen=True)
class EventPrior:
    """Draws of the prior that the map gives a cell's rate, D of them.

    Attributes:
        breaking: [D] pseudo-steps that broke.
        keeping: [D] pseudo-steps that did not.
    """

    breaking: FloatArray
    keeping: FloatArray


def pool(events: IntArray, trials: IntArray, draws: int, rng: np.random.Generator) -> EventPrior:
    """Draw from the posterior of the map's mean rate and concentration.

    Args:
        events: [C] steps that broke the tolerance as outliers.
        trials: [C] steps seen.
        draws: Number of draws.
        rng: Source of randomness.
    """
    logit, log_s = (
        np.linspace(mean - _REACH_SD * sd, mean + _REACH_SD * sd, size)
        for (mean, sd), size in zip((LOGIT_MEAN, LOG_CONCENTRATION), _GRID, strict=True)
    )
    share, concentration = special.expit(logit)[:, None], np.exp(log_s)[None, :]
    a, b = share * concentration, (1.0 - share) * concentration
    density = (
        -0.5 * np.square((logit - LOGIT_MEAN[0]) / LOGIT_MEAN[1])[:, None]
        - 0.5 * np.square((log_s - LOG_CONCENTRATION[0]) / LOG_CONCENTRATION[1])[None, :]
    )
    kinds, weights = np.unique(np.stack([events, trials], axis=1), axis=0, return_counts=True)
    for (k, n), weight in zip(kinds, weights, strict=True):
        density = density + weight * (special.betaln(a + k, b + n - k) - special.betaln(a, b))
    mass = np.exp(density - density.max()).ravel()
    chosen = rng.choice(mass.size, size=draws, p=mass / mass.sum())
    return EventPrior(breaking=a.ravel()[chosen], keeping=b.ravel()[chosen])
