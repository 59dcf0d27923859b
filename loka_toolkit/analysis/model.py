"""The hierarchical model in PyMC: cells integrated out, hyperparameters of all criteria at once.

For criterion j and a cell c of group g, the values y of its steps are

    y ~ Normal(m_c, v_c),  m_c ~ Normal(eta_jg, v_c / kappa_j),  v_c ~ InverseGamma(alpha_j, beta_j)
    eta_jg = grand_j + sum over factors of the effect of g's level; effects sum to zero
    effect ~ Normal(0, scale of criterion and factor)

with kappa = (within / between)^2 and beta = alpha within^2. Cells are integrated out, which leaves
a function of the count, mean and sum of squares of a cell: :func:`numerics.posterior.log_marginal`.

The priors, on scales where their reach can be read (95 % of the prior predictive):
    grand      Normal(center, 10 dB): formats and bad scaling lie 6 to 30 dB apart.
    scale      3 dB within a factor 4: E4M3 and E5M2 differ by 6 dB, roles by less.
    within     0.5 dB within a factor 7: products of many terms vary by a few hundredths from step
               to step, narrow or heavy-tailed ones by several dB.
    between    3 dB within a factor 4: how far a site's distribution sets it apart from its group.
    shape      2 within a factor 5: below 1 some cells are much noisier than most; above 5 they are
               alike.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from loka_toolkit.analysis.design import Design
from loka_toolkit.errors import MissingDependencyError

GRAND_SD_DB = 10.0
LOG_SCALE = (math.log(3.0), 0.7)
LOG_WITHIN = (math.log(0.5), 1.0)
LOG_BETWEEN = (math.log(3.0), 0.7)
LOG_SHAPE = (math.log(2.0), 0.8)


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
        log_within = pm.Normal("log_within", *LOG_WITHIN, shape=criteria)
        log_between = pm.Normal("log_between", *LOG_BETWEEN, shape=criteria)
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
        kappa = pt.exp(2.0 * (log_within - log_between))
        beta = alpha * pt.exp(2.0 * log_within)
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
