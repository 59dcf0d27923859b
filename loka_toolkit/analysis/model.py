"""The hierarchical model in PyMC: cells integrated out, hyperparameters of all criteria at once.

For criterion j and a cell c of group g, the values y of its steps are

    y ~ Normal(m_c, v_c),  m_c ~ Normal(eta_jg, v_c / kappa_j),  v_c ~ InverseGamma(alpha_j, beta_j)
    eta_jg = grand_j + sum over factors of the effect of g's level; effects sum to zero
    effect ~ Normal(0, scale of criterion and factor)

with kappa = ratio^2 and beta = alpha within^2, where ratio = within / between and spread^2 =
within^2 + between^2: after one step per cell the spread is known and the ratio is not, so these are
what is sampled. Cells are integrated out, which leaves a function of the count, mean and sum of
squares of a cell: :func:`numerics.posterior.log_marginal`.

The priors, on scales where their reach can be read (95 % of the prior predictive):
    grand      Normal(center, 10 dB): formats and bad scaling lie 6 to 30 dB apart.
    scale      3 dB within a factor 4: E4M3 and E5M2 differ by 6 dB, roles by less.
    spread     3 dB within a factor 4: how far a step of a cell lies from its group, all told.
    ratio      1/6 within a factor 7: sites differ by dB; products of many terms vary by a few
               hundredths from step to step, narrow or heavy-tailed ones as much as sites do.
    shape      3 within a factor 2.7: below 1 some cells are much noisier than most, above 5 they
               are alike. Much smaller ones have a location per cluster of cells, hence many modes.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from loka_toolkit.analysis.design import Design
from loka_toolkit.errors import MissingDependencyError
from loka_toolkit.numerics.posterior import FloatArray

GRAND_SD_DB = 10.0
LOG_SCALE = (math.log(3.0), 0.7)
LOG_SPREAD = (math.log(3.0), 0.7)
LOG_RATIO = (math.log(1.0 / 6.0), 1.0)
LOG_SHAPE = (math.log(3.0), 0.5)


def require_sampler() -> tuple[Any, Any, Any]:
    """Return the modules pymc, nutpie and arviz.

    Raises:
        MissingDependencyError: If one is absent.
    """
    with warnings.catch_warnings():
        # ArviZ announces its next major version on import; nothing for the user to act on.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            import arviz
            import nutpie
            import pymc
        except ImportError as error:
            package = (error.name or "pymc").partition(".")[0]
            raise MissingDependencyError(package, "analyze", "analyze()") from None
    return pymc, nutpie, arviz


def within_between(log_spread: FloatArray, log_ratio: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the typical deviations over the steps of a cell and over cells, dB."""
    between = np.exp(log_spread) / np.sqrt(1.0 + np.exp(2.0 * log_ratio))
    return between * np.exp(log_ratio), between


def build_model(design: Design, *, exchangeable: bool = False) -> Any:
    """Return the PyMC model of a design.

    Args:
        design: The cells.
        exchangeable: Whether means and squares can be exchanged for others after compilation.
    """
    pm, _, _ = require_sampler()
    import pytensor.tensor as pt

    criteria, factors = len(design.criteria), len(design.factors)
    with pm.Model() as model:
        mean, squares = design.mean, design.squares
        if exchangeable:
            mean, squares = pm.Data("mean", mean), pm.Data("squares", squares)
        grand = pm.Normal("grand", design.centers, GRAND_SD_DB, shape=criteria)
        log_spread = pm.Normal("log_spread", *LOG_SPREAD, shape=criteria)
        log_ratio = pm.Normal("log_ratio", *LOG_RATIO, shape=criteria)
        log_shape = pm.Normal("log_shape", *LOG_SHAPE, shape=criteria)
        location = grand[:, None]
        if factors:
            log_scale = pm.Normal("log_scale", *LOG_SCALE, shape=(criteria, factors))
            effects = pm.Normal(
                "effects",
                0.0,
                pt.exp(log_scale)[:, design.blocks],
                shape=(criteria, len(design.blocks)),
            )
            location = location + effects @ design.contrasts.T
        # Terms that depend on a cell through its count alone are computed once per count.
        j, t, steps = design.entry_criterion, design.tally_criterion, design.tally_count
        alpha = pt.exp(log_shape)
        kappa = pt.exp(2.0 * log_ratio)
        beta = alpha * pt.exp(2.0 * log_spread) * kappa / (1.0 + kappa)
        entry = j * design.groups + design.entry_group if factors else j
        distance = mean - location.flatten()[entry]
        pull = kappa[j] * design.count / (kappa[j] + design.count)
        after = beta[j] + 0.5 * squares + 0.5 * pull * distance**2
        per_cell = (alpha[j] + 0.5 * design.count) * pt.log(after)
        per_count = design.tally_weight * (
            pt.gammaln(alpha[t] + 0.5 * steps)
            - pt.gammaln(alpha[t])
            + alpha[t] * pt.log(beta[t])
            + 0.5 * pt.log(kappa[t] / (kappa[t] + steps))
        )
        pm.Potential("log_marginal", per_count.sum() - per_cell.sum())
    return model
