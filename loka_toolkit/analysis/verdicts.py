"""Verdicts: what follows from the posterior of a cell. Pure functions of numbers."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from scipy import special

from loka_toolkit.artifacts.safety_map import Verdict
from loka_toolkit.numerics.tolerance import Tolerance

MINIMUM_STEPS = 3
"""A safe verdict speaks of future steps; fewer sampled ones than this do not show how they vary."""

MONTE_CARLO_ERRORS = 2.0
"""No verdict rests on a quantile that lies within this many Monte Carlo errors of its limit."""

SURELY = 0.95
"""An impact surely exceeds its allotment with at least this probability."""

FALSE_DISCOVERY_RATE = 0.05
"""Largest expected share of wrong ``safe`` verdicts over the map."""


class Ground(enum.Enum):
    """What decided a verdict; the reason is written from it."""

    HOLDS = "all that is known lies within the tolerance"
    RATE_ABOVE = "steps break the tolerance too often"
    BEYOND_VALIDITY = "the change of the logits is beyond what an expansion can judge"
    IMPACT_ABOVE = "the loss surely changes by more than the allotment"
    UPDATE_ABOVE = "the gradient surely changes by more than the tolerance"
    NO_ERRORS = "no error was recorded"
    FEW_STEPS = "too few steps"
    RATE_UNCERTAIN = "the share of breaking steps may lie on either side of the limit"
    STEPS_BROKE = "sampled steps broke the tolerance, and their count alone does not clear the rest"
    RATE_TOO_CLOSE = "the share of breaking steps lies within Monte Carlo error of the limit"
    SOME_BEYOND_VALIDITY = "some steps are beyond validity"
    IMPACT_UNCERTAIN = "the impact is above the allotment, but not surely"
    UPDATE_UNCERTAIN = "the change of the gradient is above the tolerance, but not surely"
    DRIFTING = "the error drifts towards the limit"
    UNHEALTHY_FIT = "the fit cannot be trusted"
    WITHDRAWN = "withdrawn to keep the expected share of wrong verdicts"


_UNSAFE = (
    Ground.RATE_ABOVE,
    Ground.BEYOND_VALIDITY,
    Ground.IMPACT_ABOVE,
    Ground.UPDATE_ABOVE,
)


@dataclasses.dataclass(frozen=True)
class CellFacts:
    """What a verdict rests on. A null figure neither passes nor fails.

    Attributes:
        steps: Sampled steps with an error of the product.
        rate_lo: 5 % quantile of the exceedance rate pi.
        rate_hi: 95 % quantile.
        rate_lo_mcse: Monte Carlo error of the first.
        rate_hi_mcse: Monte Carlo error of the second.
        p_unsafe: P(pi > the tolerance's exceedance rate).
        violations: Sampled steps that broke the tolerance.
        beyond_validity: Steps at which the impact left its range of validity.
        impact: Posterior mean impact, relative to the loss.
        p_impact_above: Probability that it exceeds the allotment, less two Monte Carlo errors.
        allotment: What the site may cost.
        bias: Posterior mean of the gradient's bias.
        p_bias_above: Probability that its magnitude exceeds the limit.
        noise: Mean noise ratio of the gradient.
        p_noise_above: Probability that it exceeds the limit.
        drifts_out: Whether the SQNR, if it goes on as it did, breaks its limit within the horizon.
    """

    steps: int
    rate_lo: float
    rate_hi: float
    rate_lo_mcse: float
    rate_hi_mcse: float
    p_unsafe: float
    violations: int = 0
    beyond_validity: int = 0
    impact: float | None = None
    p_impact_above: float | None = None
    allotment: float = 0.0
    bias: float | None = None
    p_bias_above: float | None = None
    noise: float | None = None
    p_noise_above: float | None = None
    drifts_out: bool = False


def verdict_of(ground: Ground) -> Verdict:
    """Return the verdict that a ground stands for."""
    if ground is Ground.HOLDS:
        return Verdict.SAFE
    return Verdict.UNSAFE if ground in _UNSAFE else Verdict.INSUFFICIENT


def decide(facts: CellFacts, tolerance: Tolerance) -> Ground:
    """Return the ground of a cell's verdict: what fails it, else what is missing, else HOLDS."""
    if facts.steps == 0:
        return Ground.NO_ERRORS
    limit, margin = tolerance.exceedance_rate, MONTE_CARLO_ERRORS
    if facts.rate_lo - margin * facts.rate_lo_mcse > limit:
        return Ground.RATE_ABOVE
    if facts.beyond_validity > limit * facts.steps:
        return Ground.BEYOND_VALIDITY
    if facts.p_impact_above is not None and facts.p_impact_above >= SURELY:
        return Ground.IMPACT_ABOVE
    if max(facts.p_bias_above or 0.0, facts.p_noise_above or 0.0) >= SURELY:
        return Ground.UPDATE_ABOVE
    if facts.steps < MINIMUM_STEPS:
        return Ground.FEW_STEPS
    for quantile, error in (
        (facts.rate_lo, facts.rate_lo_mcse),
        (facts.rate_hi, facts.rate_hi_mcse),
    ):
        if error > 0 and abs(quantile - limit) <= margin * error:
            return Ground.RATE_TOO_CLOSE
    if facts.rate_hi > limit:
        return Ground.RATE_UNCERTAIN
    if facts.violations and rate_by_count(facts) > limit:
        return Ground.STEPS_BROKE
    if facts.beyond_validity:
        return Ground.SOME_BEYOND_VALIDITY
    if facts.impact is not None and facts.impact > facts.allotment:
        return Ground.IMPACT_UNCERTAIN
    if facts.bias is not None and abs(facts.bias) > tolerance.gradient_bias:
        return Ground.UPDATE_UNCERTAIN
    if facts.noise is not None and facts.noise > tolerance.gradient_noise_ratio:
        return Ground.UPDATE_UNCERTAIN
    if facts.drifts_out:
        return Ground.DRIFTING
    return Ground.HOLDS


def rate_by_count(facts: CellFacts) -> float:
    """Return the 95 % quantile of the rate that the count of broken steps alone allows.

    The posterior is Beta(k + 1/2, n - k + 1/2) (Jeffreys' prior). A normal model of the error in dB
    reads a long lower tail as a small variance; where a step did break the tolerance, its word is
    not enough for ``safe``.
    """
    kept = facts.steps - facts.violations
    return float(special.betaincinv(facts.violations + 0.5, kept + 0.5, SURELY))


def distrust(grounds: Sequence[Ground]) -> list[Ground]:
    """Return the grounds when the fit is unhealthy: nothing stays safe."""
    return [Ground.UNHEALTHY_FIT if g is Ground.HOLDS else g for g in grounds]


def control_false_discoveries(
    grounds: Sequence[Ground], p_unsafe: Sequence[float]
) -> tuple[list[Ground], float]:
    """Withdraw the least certain ``safe`` verdicts until the expected share of wrong ones holds.

    A ``safe`` verdict is wrong if pi exceeds the tolerance's rate; the expected share is the mean
    of ``p_unsafe`` over them (Bayesian false discovery rate; Mueller, Parmigiani and Rice, 2006).

    Returns:
        The grounds and the share that is left; 0 where nothing is safe.
    """
    safe = sorted(
        (i for i, ground in enumerate(grounds) if ground is Ground.HOLDS),
        key=lambda i: (p_unsafe[i], i),
    )
    total = sum(p_unsafe[i] for i in safe)
    kept = list(grounds)
    while safe and total > FALSE_DISCOVERY_RATE * len(safe):
        least_certain = safe.pop()
        total -= p_unsafe[least_certain]
        kept[least_certain] = Ground.WITHDRAWN
    return kept, max(total, 0.0) / len(safe) if safe else 0.0
