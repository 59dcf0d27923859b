"""The conjugate posterior of a cell: normal values in dB with a normal-inverse-gamma prior.

Given the variance v, the mean is Normal(mu, v / kappa); v is InverseGamma(alpha, beta). Updates,
marginal likelihood and predictive are those of Murphy, "Conjugate Bayesian analysis of the Gaussian
distribution" (2007), section 3 in its inverse-gamma form. Needs NumPy and SciPy only, so that a
training job can update what the analysis found.

Everything broadcasts: a field is a float64 array of any shape, one entry per cell.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from scipy import special

FloatArray = npt.NDArray[np.float64]

SQNR_WINDOW_DB = (-40.0, 15.0)
"""SQNR is clipped to this window around its limit before it is modelled. An error 5 times smaller
than allowed is as good as one 100 times smaller: how far a step lies above that says nothing about
those below the limit, and a normal model would take it for a sign that they occur."""

SHARE_START = 1e-2
"""Shares are started at this fraction of their limit before the logarithm, so that zero events and
one event in a million read nearly alike: at most 20 dB above the limit."""

SMALLEST_SHARE_LIMIT = 1e-6
"""A limit below this, also 0, is read as this: one element in a million."""


@dataclasses.dataclass(frozen=True)
class NormalInverseGamma:
    """Parameters of the distribution of a cell's mean and variance.

    Attributes:
        mu: Location of the mean, dB.
        kappa: Weight of the location, in steps.
        alpha: Shape of the variance.
        beta: Scale of the variance, dB^2.
    """

    mu: FloatArray
    kappa: FloatArray
    alpha: FloatArray
    beta: FloatArray


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Sufficient statistics of a cell's values.

    Attributes:
        count: Number of values; 0 where there are none.
        mean: Their mean; any finite number where there are none.
        squares: Sum of squared deviations from the mean.
    """

    count: FloatArray
    mean: FloatArray
    squares: FloatArray

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Statistics:
        """Return the statistics of ``values`` along the last axis; NaN entries are left out."""
        array = np.asarray(values, dtype=np.float64)
        present = ~np.isnan(array)
        count = present.sum(axis=-1).astype(np.float64)
        total = np.where(present, array, 0.0).sum(axis=-1)
        mean = total / np.maximum(count, 1.0)
        deviation = np.where(present, array - mean[..., None], 0.0)
        return cls(count=count, mean=mean, squares=np.square(deviation).sum(axis=-1))


@dataclasses.dataclass(frozen=True)
class StudentT:
    """A predictive distribution.

    Attributes:
        df: Degrees of freedom.
        loc: Location, dB.
        scale: Scale, dB.
    """

    df: FloatArray
    loc: FloatArray
    scale: FloatArray

    def cdf(self, value: npt.ArrayLike) -> FloatArray:
        """Return P(a future value is below ``value``)."""
        return np.asarray(special.stdtr(self.df, (np.asarray(value) - self.loc) / self.scale))

    def quantile(self, probability: float) -> FloatArray:
        """Return the value below which a future value falls with ``probability``."""
        return np.asarray(self.loc + self.scale * special.stdtrit(self.df, probability))


def cell_prior(
    location: npt.ArrayLike,
    within_sd: npt.ArrayLike,
    between_sd: npt.ArrayLike,
    shape: npt.ArrayLike,
) -> NormalInverseGamma:
    """Return the prior that the map's hyperparameters give a cell.

    Args:
        location: Mean of the cell's group, dB.
        within_sd: Typical standard deviation over the steps of a cell, dB: the expected precision
            is ``within_sd ** -2``.
        between_sd: Typical standard deviation of cells around their group, dB.
        shape: Shape of the inverse gamma: large if the cells are alike in their variance.
    """
    within, alpha = np.asarray(within_sd, np.float64), np.asarray(shape, np.float64)
    return NormalInverseGamma(
        mu=np.asarray(location, np.float64),
        kappa=np.square(within / np.asarray(between_sd, np.float64)),
        alpha=alpha,
        beta=alpha * np.square(within),
    )


def merge(first: Statistics, second: Statistics) -> Statistics:
    """Return the statistics of both samples together (Chan's formula)."""
    count = first.count + second.count
    share = second.count / np.maximum(count, 1.0)
    step = second.mean - first.mean
    return Statistics(
        count=count,
        mean=first.mean + share * step,
        squares=first.squares + second.squares + first.count * share * np.square(step),
    )


def update(prior: NormalInverseGamma, statistics: Statistics) -> NormalInverseGamma:
    """Return the posterior after the values behind ``statistics``; batch and sequential agree."""
    count, kappa = statistics.count, prior.kappa + statistics.count
    distance = np.square(statistics.mean - prior.mu)
    return NormalInverseGamma(
        mu=(prior.kappa * prior.mu + count * statistics.mean) / kappa,
        kappa=kappa,
        alpha=prior.alpha + 0.5 * count,
        beta=prior.beta + 0.5 * statistics.squares + 0.5 * prior.kappa * count / kappa * distance,
    )


def log_marginal(prior: NormalInverseGamma, statistics: Statistics) -> FloatArray:
    """Return the log density of the values, mean and variance integrated out."""
    after = update(prior, statistics)
    return np.asarray(
        special.gammaln(after.alpha)
        - special.gammaln(prior.alpha)
        + prior.alpha * np.log(prior.beta)
        - after.alpha * np.log(after.beta)
        + 0.5 * np.log(prior.kappa / after.kappa)
        - 0.5 * statistics.count * np.log(2.0 * np.pi)
    )


def predictive(posterior: NormalInverseGamma) -> StudentT:
    """Return the distribution of a future step's value."""
    spread = posterior.beta * (posterior.kappa + 1.0) / (posterior.alpha * posterior.kappa)
    return StudentT(df=2.0 * posterior.alpha, loc=posterior.mu, scale=np.sqrt(spread))


def exceedance(posterior: NormalInverseGamma, limit: npt.ArrayLike) -> FloatArray:
    """Return P(a future step's value is below ``limit``): it breaks the criterion."""
    return predictive(posterior).cdf(limit)


def sample(
    posterior: NormalInverseGamma, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Draw a mean and a standard deviation per entry of ``posterior``, in dB."""
    precision = rng.standard_gamma(posterior.alpha) / posterior.beta
    sd = 1.0 / np.sqrt(np.maximum(precision, np.finfo(np.float64).tiny))
    return posterior.mu + sd / np.sqrt(posterior.kappa) * rng.standard_normal(sd.shape), sd


def sqnr_window(limit_db: float) -> tuple[float, float]:
    """Return the range to which SQNR is clipped before it is modelled; see ``SQNR_WINDOW_DB``."""
    low, high = SQNR_WINDOW_DB
    return limit_db + low, limit_db + high


def clip_sqnr(sqnr_db: npt.ArrayLike, limit_db: float) -> FloatArray:
    """Return SQNR as it is modelled, dB."""
    return np.clip(np.asarray(sqnr_db, np.float64), *sqnr_window(limit_db))


def share_to_db(share: npt.ArrayLike, limit: float) -> FloatArray:
    """Return a share of events as it is modelled: -10 log10 of the started share, dB.

    Args:
        share: Shares in [0, 1].
        limit: The limit that the tolerance sets; the start is ``SHARE_START`` times it. The limit
            itself maps to ``share_to_db(limit, limit)``.
    """
    start = SHARE_START * max(limit, SMALLEST_SHARE_LIMIT)
    started = np.asarray(share, np.float64) + start
    return np.asarray(-10.0 * np.log10(started))


def share_limit_db(limit: float) -> float:
    """Return the limit of a share on the scale of :func:`share_to_db`, dB."""
    return float(share_to_db(max(limit, SMALLEST_SHARE_LIMIT), limit))
