"""The sentence beside every verdict, with the numbers that decided it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from loka_toolkit.analysis.verdicts import MINIMUM_STEPS, CellFacts, Ground, rate_by_count
from loka_toolkit.artifacts.safety_map import Criterion
from loka_toolkit.numerics.tolerance import Tolerance


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a reason may mention besides the facts of the verdict.

    Attributes:
        facts: What was decided on.
        sqnr_db: Posterior mean of the SQNR.
        row_sqnr_db: The same of the 5th-percentile row.
        underflow_share: Mean share of the worst group.
        underflow_group: That group, or None.
        saturation_share: Mean share.
        breaking: Criterion -> mean share of steps that break it.
        breaking_as_outliers: Mean share of steps that break as outliers.
        events: Steps that did.
        binding: The criterion exceeded most often.
        is_gradient: Whether the product changes the update and not the loss.
        impact_reason: Why there is no impact, or None.
        drift: SQNR slope, dB per 1,000 steps, or None.
        ahead: Steps over which the slope is followed.
    """

    facts: CellFacts
    sqnr_db: float | None
    row_sqnr_db: float | None
    underflow_share: float
    underflow_group: str | None
    saturation_share: float
    breaking: Mapping[Criterion, float]
    breaking_as_outliers: float
    events: int
    binding: Criterion
    is_gradient: bool
    impact_reason: str | None
    drift: float | None
    ahead: int


def reason(ground: Ground, figures: Figures, tolerance: Tolerance, health: str | None) -> str:
    """Return the reason of a verdict.

    Args:
        ground: What decided.
        figures: The cell's numbers.
        tolerance: The limits.
        health: What is wrong with the fit, or None.
    """
    facts, limit = figures.facts, percent(tolerance.exceedance_rate)
    interval = f"{percent(facts.rate_lo)} to {percent(facts.rate_hi)} of steps"
    match ground:
        case Ground.NO_ERRORS:
            return "no error of this product was recorded: record more steps, or it was zero"
        case Ground.RATE_ABOVE:
            return _break(figures, tolerance)
        case Ground.BEYOND_VALIDITY:
            why = figures.impact_reason or "a logit changes by more than 1"
            return f"beyond validity at {facts.beyond_validity} of {facts.steps} steps: {why}"
        case Ground.IMPACT_ABOVE:
            return (
                f"the loss changes by {percent(facts.impact)}, surely more than the allotment of "
                f"{percent(facts.allotment)}; {_passing(figures)} would have passed"
            )
        case Ground.UPDATE_ABOVE:
            return f"{_update(facts, tolerance)}, surely"
        case Ground.FEW_STEPS:
            return (
                f"{_steps(facts.steps)} with an error where {MINIMUM_STEPS} are needed; so far "
                f"{_closest(figures, tolerance)}"
            )
        case Ground.RATE_UNCERTAIN | Ground.RATE_TOO_CLOSE:
            close = ", too close to tell" if ground is Ground.RATE_TOO_CLOSE else ""
            return (
                f"{interval} may break the tolerance, limit {limit}{close}: "
                f"{_closest(figures, tolerance)} over {_steps(facts.steps)}"
            )
        case Ground.STEPS_BROKE:
            return (
                f"{facts.violations} of {_steps(facts.steps)} broke the tolerance: by their count "
                f"alone up to {percent(rate_by_count(facts))} of steps may, limit {limit}; "
                f"closest: {_closest(figures, tolerance)}"
            )
        case Ground.SOME_BEYOND_VALIDITY:
            return (
                f"{facts.beyond_validity} of {facts.steps} steps are beyond validity; "
                f"{_closest(figures, tolerance)} would have passed"
            )
        case Ground.IMPACT_UNCERTAIN:
            return (
                f"the loss changes by {percent(facts.impact)} on average, above the allotment of "
                f"{percent(facts.allotment)} but not surely; {_passing(figures)} would have passed"
            )
        case Ground.UPDATE_UNCERTAIN:
            return f"{_update(facts, tolerance)}, but not surely"
        case Ground.DRIFTING:
            return (
                f"SQNR {_db(figures.sqnr_db)} falls by {-(figures.drift or 0.0):.2g} dB per 1,000 "
                f"steps and would break {_db(tolerance.sqnr_db)} within "
                f"{figures.ahead:,} steps"
            )
        case Ground.UNHEALTHY_FIT:
            return f"the fit cannot be trusted ({health}); nothing is called safe"
        case Ground.WITHDRAWN:
            return (
                f"withdrawn: with probability {percent(facts.p_unsafe)} more than {limit} of steps "
                "break the tolerance, too much for the share of wrong verdicts over the map"
            )
        case Ground.HOLDS:
            return (
                f"at most {percent(facts.rate_hi)} of steps break the tolerance, limit {limit}; "
                f"closest: {_closest(figures, tolerance)}; {_cost(figures, tolerance)}"
            )


def percent(share: float | None) -> str:
    """Return a share as a percentage with three significant digits."""
    if share is None:
        return "an unknown share"
    value = 100.0 * share
    return f"{value:.3g} %" if abs(value) >= 1e-4 or value == 0 else f"{value:.1e} %"


def _break(figures: Figures, tolerance: Tolerance) -> str:
    """Say what breaks the tolerance, and what would have hidden it."""
    facts = figures.facts
    if _as_outliers(figures):
        return (
            f"{figures.events} of {facts.steps} steps broke the tolerance as outliers or came out "
            f"non-finite, limit {percent(tolerance.exceedance_rate)} of steps"
        )
    share = percent(min(figures.breaking.get(figures.binding, 1.0), 1.0))
    sqnr_passes = figures.breaking.get(Criterion.SQNR, 1.0) <= tolerance.exceedance_rate
    hidden = f"; SQNR {_db(figures.sqnr_db)} would have passed" if sqnr_passes else ""
    match figures.binding:
        case Criterion.UNDERFLOW:
            group = figures.underflow_group or "the worst column group"
            allowed = tolerance.underflow_share_worst_group
            return (
                f"underflow: {percent(figures.underflow_share)} of the elements of {group} are "
                f"flushed to zero, limit {percent(allowed)}"
                f"{_at(share, figures.underflow_share, allowed)}{hidden}"
            )
        case Criterion.SATURATION:
            return (
                f"saturation: {percent(figures.saturation_share)} of the elements are clipped, "
                f"limit {percent(tolerance.saturation_share)}"
                f"{_at(share, figures.saturation_share, tolerance.saturation_share)}{hidden}"
            )
        case Criterion.ROW_SQNR:
            return (
                f"row SQNR: the 5th-percentile row has {_db(figures.row_sqnr_db)}, limit "
                f"{_db(tolerance.row_sqnr_db_p05)}, broken at {share} of steps{hidden}"
            )
        case Criterion.SQNR:
            return (
                f"SQNR {_db(figures.sqnr_db)}, limit {_db(tolerance.sqnr_db)}, "
                f"broken at {share} of steps"
            )


def _at(share: str, mean: float, limit: float) -> str:
    """Say at how many steps a share breaks its limit where its mean does not show it."""
    return "" if mean > limit else f" on average, broken at {share} of steps"


def _closest(figures: Figures, tolerance: Tolerance) -> str:
    """Return what comes closest to breaking the tolerance, with its limit."""
    if figures.events and _as_outliers(figures):
        return (
            f"{figures.events} of {figures.facts.steps} steps broke it as outliers or came out "
            "non-finite"
        )
    match figures.binding:
        case Criterion.UNDERFLOW:
            group = figures.underflow_group or "the worst column group"
            return (
                f"{percent(figures.underflow_share)} of {group} flushed to zero, limit "
                f"{percent(tolerance.underflow_share_worst_group)}"
            )
        case Criterion.SATURATION:
            return (
                f"{percent(figures.saturation_share)} of the elements clipped, limit "
                f"{percent(tolerance.saturation_share)}"
            )
        case Criterion.ROW_SQNR:
            return (
                f"5th-percentile row SQNR {_db(figures.row_sqnr_db)}, limit "
                f"{_db(tolerance.row_sqnr_db_p05)}"
            )
        case Criterion.SQNR:
            return f"SQNR {_db(figures.sqnr_db)}, limit {_db(tolerance.sqnr_db)}"


def _as_outliers(figures: Figures) -> bool:
    return figures.breaking_as_outliers > max(figures.breaking.values(), default=0.0)


def _passing(figures: Figures) -> str:
    return f"SQNR {_db(figures.sqnr_db)}"


def _cost(figures: Figures, tolerance: Tolerance) -> str:
    facts = figures.facts
    if facts.impact is not None:
        return f"loss +{percent(facts.impact)} within its allotment of {percent(facts.allotment)}"
    if facts.bias is not None or facts.noise is not None:
        return _update(facts, tolerance)
    if figures.is_gradient:
        return "its effect on parameter gradients was not recorded, which decides nothing"
    return f"impact unknown ({figures.impact_reason or 'not recorded'}), which decides nothing"


def _update(facts: CellFacts, tolerance: Tolerance) -> str:
    parts = []
    if facts.bias is not None:
        parts.append(
            f"gradient bias {percent(facts.bias)}, limit {percent(tolerance.gradient_bias)}"
        )
    if facts.noise is not None:
        parts.append(
            f"gradient noise {percent(facts.noise)} of the minibatch's, limit "
            f"{percent(tolerance.gradient_noise_ratio)}"
        )
    return " and ".join(parts)


def _steps(count: int) -> str:
    return f"{count} sampled step{'' if count == 1 else 's'}"


def _db(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} dB"
