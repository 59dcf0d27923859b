"""From hyperparameters to every cell: its posterior, and the share of steps that will break."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from scipy import special

from loka_toolkit.analysis.design import Design
from loka_toolkit.analysis.events import pool
from loka_toolkit.analysis.evidence import RESOLUTION_DB, Evidence
from loka_toolkit.analysis.fit import HyperDraws
from loka_toolkit.analysis.model import LOG_SHAPE
from loka_toolkit.artifacts.safety_map import Criterion
from loka_toolkit.numerics.posterior import (
    FloatArray,
    NormalInverseGamma,
    Statistics,
    cell_prior,
    sample,
    update,
)

DRAWS = 2000
"""Draws per cell: the 95 % quantile of a rate near 5 % then has an error of about 0.1 %."""

_CHUNK = 250


@dataclasses.dataclass(frozen=True)
class Exceedance:
    """The exceedance rate pi of C cells: the share of future steps that break the tolerance.

    Attributes:
        mean: [C] E[pi].
        lo: [C] 5 % quantile.
        hi: [C] 95 % quantile.
        lo_mcse: [C] Monte Carlo standard error of ``lo``.
        hi_mcse: [C] Monte Carlo standard error of ``hi``.
        p_unsafe: [C] P(pi > the tolerance's exceedance rate).
        by_criterion: Criterion -> [C] mean share of steps that break it.
        by_events: [C] mean share of steps that break as outliers.
        posteriors: Criterion -> parameters [C], averaged over the hyperparameters.
    """

    mean: FloatArray
    lo: FloatArray
    hi: FloatArray
    lo_mcse: FloatArray
    hi_mcse: FloatArray
    p_unsafe: FloatArray
    by_criterion: dict[Criterion, FloatArray]
    by_events: FloatArray
    posteriors: dict[Criterion, NormalInverseGamma]


def constant_draws(value: float, groups: int) -> HyperDraws:
    """Return hyperparameters for a criterion that is the same in every cell at every step.

    There is nothing to sample: cells lie within the resolution of the one value that was seen.
    """
    return HyperDraws(
        location=np.full((1, groups), value),
        within=np.array([RESOLUTION_DB]),
        between=np.array([RESOLUTION_DB]),
        shape=np.array([np.exp(LOG_SHAPE[0])]),
    )


def exceedance(
    design: Design,
    hyper: Mapping[Criterion, HyperDraws],
    evidence: Evidence,
    limits: Mapping[Criterion, float],
    rate: float,
    *,
    seed: int,
    effective_draws: float = DRAWS,
) -> Exceedance:
    """Draw pi for every cell; criteria and events are joined by the union bound.

    Args:
        design: For the group of every cell.
        hyper: Draws per criterion: of the sampler, or of :func:`constant_draws`.
        evidence: Statistics and event counts.
        limits: Limit per criterion, dB.
        rate: The tolerance's exceedance rate.
        seed: Seed of the draws.
        effective_draws: Independent draws that the hyperparameters are worth; Monte Carlo errors
            are computed from the smaller of this and ``DRAWS``.
    """
    rng = np.random.default_rng([seed, 1])
    cells = len(evidence.trials)
    chosen = {criterion: _thinned(draws) for criterion, draws in hyper.items()}
    prior_rate = pool(evidence.events, evidence.trials, DRAWS, rng)
    summaries: list[dict[str, FloatArray]] = []
    averages: dict[Criterion, list[NormalInverseGamma]] = {criterion: [] for criterion in hyper}
    shares: dict[Criterion, list[FloatArray]] = {criterion: [] for criterion in hyper}
    for start in range(0, cells, _CHUNK):
        part = slice(start, min(start + _CHUNK, cells))
        k, n = evidence.events[part], evidence.trials[part]
        by_events = rng.beta(
            prior_rate.breaking[:, None] + k, prior_rate.keeping[:, None] + (n - k)
        )
        total = by_events.copy()
        for criterion, draws in chosen.items():
            after = cell_posterior(draws, design, evidence.statistics[criterion], part)
            mean, sd = sample(after, rng)
            breaking = special.ndtr((limits[criterion] - mean) / sd)
            total += breaking
            averages[criterion].append(average(after))
            shares[criterion].append(breaking.mean(axis=0))
        worth = min(effective_draws, DRAWS)
        summaries.append(_summary(np.minimum(total, 1.0), by_events, rate, worth))
    joined = {name: np.concatenate([s[name] for s in summaries]) for name in summaries[0]}
    return Exceedance(
        **joined,
        by_criterion={criterion: np.concatenate(parts) for criterion, parts in shares.items()},
        posteriors={criterion: _joined(parts) for criterion, parts in averages.items()},
    )


def cell_posterior(
    draws: HyperDraws, design: Design, statistics: Statistics, part: slice
) -> NormalInverseGamma:
    """Return the posterior [D, c] of some cells under every draw of the hyperparameters."""
    prior = cell_prior(
        draws.location[:, design.group_of_cell[part]],
        draws.within[:, None],
        draws.between[:, None],
        draws.shape[:, None],
    )
    rows = Statistics(statistics.count[part], statistics.mean[part], statistics.squares[part])
    after = update(prior, rows)
    return NormalInverseGamma(*np.broadcast_arrays(after.mu, after.kappa, after.alpha, after.beta))


def average(posterior: NormalInverseGamma) -> NormalInverseGamma:
    """Average the parameters over the draws, so that location and precision keep their means."""
    precision = (posterior.alpha / posterior.beta).mean(axis=0)
    alpha = posterior.alpha.mean(axis=0)
    return NormalInverseGamma(
        mu=posterior.mu.mean(axis=0),
        kappa=posterior.kappa.mean(axis=0),
        alpha=alpha,
        beta=alpha / precision,
    )


def quantile_error(ordered: FloatArray, probability: float, worth: float) -> FloatArray:
    """Return the Monte Carlo standard error of a quantile of sorted draws [D, C].

    Half the distance between the order statistics one standard error of the rank to either side.
    """
    count = len(ordered)
    step = np.sqrt(probability * (1.0 - probability) / worth)
    low = int(np.floor(np.clip(probability - step, 0.0, 1.0) * (count - 1)))
    high = int(np.ceil(np.clip(probability + step, 0.0, 1.0) * (count - 1)))
    return np.asarray(0.5 * (ordered[high] - ordered[low]))


def _summary(
    total: FloatArray, by_events: FloatArray, rate: float, worth: float
) -> dict[str, FloatArray]:
    ordered = np.sort(total, axis=0)
    lo, hi = np.quantile(ordered, (0.05, 0.95), axis=0)
    return {
        "mean": total.mean(axis=0),
        "lo": lo,
        "hi": hi,
        "lo_mcse": quantile_error(ordered, 0.05, worth),
        "hi_mcse": quantile_error(ordered, 0.95, worth),
        "p_unsafe": (total > rate).mean(axis=0),
        "by_events": by_events.mean(axis=0),
    }


def _thinned(draws: HyperDraws) -> HyperDraws:
    """Return exactly ``DRAWS`` draws, evenly spaced, repeated where there are fewer."""
    at = np.linspace(0, len(draws.within) - 1, DRAWS).round().astype(np.int64)
    return HyperDraws(draws.location[at], draws.within[at], draws.between[at], draws.shape[at])


def _joined(parts: list[NormalInverseGamma]) -> NormalInverseGamma:
    fields = ("mu", "kappa", "alpha", "beta")
    return NormalInverseGamma(*(np.concatenate([getattr(p, f) for p in parts]) for f in fields))
