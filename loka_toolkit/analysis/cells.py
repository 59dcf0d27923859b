"""Put together what is known of every cell, decide, and write it down."""

from __future__ import annotations

import dataclasses

import numpy as np

from loka_toolkit.analysis.drift import Drift, drift
from loka_toolkit.analysis.evidence import Evidence
from loka_toolkit.analysis.exceedance import Exceedance
from loka_toolkit.analysis.impact import DRAWS as IMPACT_DRAWS
from loka_toolkit.analysis.impact import Impact, gradient_bias, gradient_noise, loss_impact
from loka_toolkit.analysis.observations import Observations
from loka_toolkit.analysis.reasons import Figures, reason
from loka_toolkit.analysis.speed import SpeedBook
from loka_toolkit.analysis.verdicts import (
    MONTE_CARLO_ERRORS,
    CellFacts,
    Ground,
    control_false_discoveries,
    decide,
    distrust,
    verdict_of,
)
from loka_toolkit.artifacts.map_facts import FitHealth
from loka_toolkit.artifacts.safety_map import Cell, Criterion, Posterior, SpeedEvidence, Verdict
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.numerics.posterior import (
    FloatArray,
    NormalInverseGamma,
    predictive,
    sqnr_window,
)
from loka_toolkit.numerics.tolerance import Tolerance


@dataclasses.dataclass(frozen=True)
class Costs:
    """What cells cost besides their error; NaN where it is unknown.

    Attributes:
        impact: Relative to the loss.
        allotment: [C] budget x share of forward FLOPs.
        bias: [C] posterior mean of the gradient's bias.
        p_bias_above: [C] P(its magnitude is above the limit).
        noise: [C] mean noise ratio.
        p_noise_above: [C] P(it is above the limit).
        drift: SQNR over steps.
    """

    impact: Impact
    allotment: FloatArray
    bias: FloatArray
    p_bias_above: FloatArray
    noise: FloatArray
    p_noise_above: FloatArray
    drift: Drift


def costs(
    observed: Observations, tolerance: Tolerance, baseline_loss: float | None, *, seed: int
) -> Costs:
    """Return what cells cost."""
    loss = np.nan if baseline_loss is None else baseline_loss
    forward = np.array([s.flops if s.key.role is Role.FWD else 0.0 for s in observed.sites])
    total = forward.sum()
    allotment = tolerance.relative_log_loss * (forward / total if total else forward)
    per_cell = allotment[observed.site_of]
    bias, p_bias = gradient_bias(observed.gradient_bias, tolerance.gradient_bias)
    noise, p_noise = gradient_noise(observed.gradient_noise, tolerance.gradient_noise_ratio)
    return Costs(
        impact=loss_impact(
            observed.first_order / loss, observed.second_order / loss, per_cell, seed=seed
        ),
        allotment=per_cell,
        bias=bias,
        p_bias_above=p_bias,
        noise=noise,
        p_noise_above=p_noise,
        drift=drift(
            observed.sqnr_shown,
            observed.steps,
            tolerance.sqnr_db,
            tolerance.horizon_steps,
        ),
    )


@dataclasses.dataclass(frozen=True)
class Judge:
    """Everything that is known of the cells of a map.

    Attributes:
        observed: What was observed.
        evidence: Statistics and counts.
        rates: Exceedance rates and posteriors.
        costs: Impact, gradients, drift.
        speeds: Speed-ups.
        tolerance: The limits.
        health: The fit's.
        step_flops: GEMM FLOPs of a step, unseen ones included.
        loss_known: Whether impact could be related to a loss.
    """

    observed: Observations
    evidence: Evidence
    rates: Exceedance
    costs: Costs
    speeds: SpeedBook
    tolerance: Tolerance
    health: FitHealth
    step_flops: float
    loss_known: bool

    def cells(self) -> tuple[tuple[Cell, ...], float]:
        """Return the cells with their verdicts, and the expected share of wrong ``safe`` ones."""
        facts = [self._facts(c) for c in range(self.observed.cells)]
        grounds = [decide(f, self.tolerance) for f in facts]
        if not self.health.healthy:
            grounds = distrust(grounds)
        grounds, share = control_false_discoveries(grounds, [f.p_unsafe for f in facts])
        binding = self._binding()
        return tuple(
            self._cell(c, facts[c], grounds[c], binding[c]) for c in range(len(facts))
        ), share

    def _facts(self, c: int) -> CellFacts:
        rates, costs = self.rates, self.costs
        error = self.observed.values[Criterion.SQNR][c]
        p_above = _known(costs.impact.p_above[c])
        if p_above is not None:
            error_of_p = float(np.sqrt(p_above * (1.0 - p_above) / IMPACT_DRAWS))
            p_above -= MONTE_CARLO_ERRORS * error_of_p
        return CellFacts(
            steps=int((~np.isnan(error) | self.observed.destroyed[c]).sum()),
            rate_lo=float(rates.lo[c]),
            rate_hi=float(rates.hi[c]),
            rate_lo_mcse=float(rates.lo_mcse[c]),
            rate_hi_mcse=float(rates.hi_mcse[c]),
            p_unsafe=float(rates.p_unsafe[c]),
            violations=int(self.evidence.violations[c]),
            beyond_validity=int(self.observed.beyond_validity[c]),
            impact=_known(costs.impact.mean[c]),
            p_impact_above=p_above,
            allotment=float(costs.allotment[c]),
            bias=_known(costs.bias[c]),
            p_bias_above=_known(costs.p_bias_above[c]),
            noise=_known(costs.noise[c]),
            p_noise_above=_known(costs.p_noise_above[c]),
            drifts_out=bool(costs.drift.leaves[c]),
        )

    def _binding(self) -> list[Criterion]:
        """Return the criterion exceeded most often; among equals the one closest to its limit."""
        criteria = list(self.rates.by_criterion)
        if not criteria:
            return [Criterion.SQNR] * self.observed.cells
        often = np.stack([self.rates.by_criterion[c] for c in criteria])
        futures = [predictive(self.rates.posteriors[c]) for c in criteria]
        margin = np.stack(
            [
                (future.loc - self.observed.limits[c]) / future.scale
                for c, future in zip(criteria, futures, strict=True)
            ]
        )
        order = np.lexsort((margin, -often.round(6)), axis=0)
        return [criteria[i] for i in order[0]]

    def _cell(self, c: int, facts: CellFacts, ground: Ground, binding: Criterion) -> Cell:
        observed, rates, costs = self.observed, self.rates, self.costs
        site = observed.sites[observed.site_of[c]]
        recipe = observed.recipes[observed.recipe_of[c]]
        known = facts.steps > 0
        posteriors = self._posteriors(c)
        sqnr, lo, hi = self._sqnr(c)
        figures = Figures(
            facts=facts,
            sqnr_db=sqnr,
            row_sqnr_db=_mean(observed.row_sqnr_shown[c]),
            underflow_share=float(observed.underflow_share[c]),
            underflow_group=observed.underflow_group[c],
            saturation_share=float(observed.saturation_share[c]),
            breaking={k: float(v[c]) for k, v in rates.by_criterion.items()},
            breaking_as_outliers=float(rates.by_events[c]),
            events=int(self.evidence.events[c]),
            binding=binding,
            is_gradient=site.key.role.is_gradient,
            impact_reason=self._impact_reason(c, site.key.role),
            drift=_known(costs.drift.per_1000_steps[c]),
            ahead=costs.drift.ahead,
        )
        verdict = verdict_of(ground)
        speed = self.speeds.speed(site, recipe)
        return Cell(
            site=str(site.key),
            fqn=site.key.fqn,
            call=site.key.call,
            role=site.key.role.value,
            recipe=recipe,
            module_type=site.module_type,
            weight=site.weight,
            dispatchable=site.dispatchable,
            batch=site.batch,
            m=site.m,
            n=site.n,
            k=site.k,
            dtype=site.dtype,
            flops_share=site.flops / self.step_flops if self.step_flops else 0.0,
            evidence_steps=int(self.evidence.trials[c]),
            evidence_effective=float(self.evidence.effective[c]),
            sqnr_db=figures.sqnr_db if known else None,
            sqnr_db_lo=lo if known else None,
            sqnr_db_hi=hi if known else None,
            row_sqnr_db=figures.row_sqnr_db if known else None,
            underflow_share_worst_group=figures.underflow_share,
            underflow_worst_group=figures.underflow_group,
            saturation_share=figures.saturation_share,
            p_exceed=float(rates.mean[c]) if known else None,
            p_exceed_lo=facts.rate_lo if known else None,
            p_exceed_hi=facts.rate_hi if known else None,
            p_exceed_mcse=facts.rate_hi_mcse if known else None,
            p_unsafe=facts.p_unsafe if known else None,
            binding_criterion=binding.value if known else None,
            impact=facts.impact,
            impact_lo=_known(costs.impact.lo[c]),
            impact_hi=_known(costs.impact.hi[c]),
            impact_allotment=facts.allotment,
            impact_reason=figures.impact_reason,
            gradient_bias=facts.bias,
            gradient_noise_ratio=facts.noise,
            drift_db_per_1000_steps=figures.drift,
            verdict=verdict,
            reason=reason(ground, figures, self.tolerance, "; ".join(self.health.problems)),
            fast=verdict is Verdict.SAFE and speed.fast,
            speedup=speed.speedup,
            speedup_evidence=SpeedEvidence(speed.evidence),
            posteriors=posteriors,
        )

    def _impact_reason(self, c: int, role: Role) -> str | None:
        if role.is_gradient:
            return "a gradient changes the update and not the loss"
        recorded = self.observed.impact_reason[c]
        if self.observed.beyond_validity[c] or recorded is not None:
            return recorded
        if not self.loss_known:
            return "the mean loss of the run is not known"
        return None if self.costs.impact.steps[c] else "no impact was recorded"

    def _posteriors(self, c: int) -> dict[str, Posterior]:
        return {
            criterion.value: Posterior(
                mu=float(parameters.mu[c]),
                kappa=float(parameters.kappa[c]),
                alpha=float(parameters.alpha[c]),
                beta=float(parameters.beta[c]),
                steps=float(self.evidence.statistics[criterion].count[c]),
                outlying_steps=int(self.evidence.outlying[criterion][c]),
                limit=self.observed.limits[criterion],
            )
            for criterion, parameters in self.rates.posteriors.items()
        }

    def _sqnr(self, c: int) -> tuple[float | None, float | None, float | None]:
        """Return the SQNR's posterior mean and the 5 and 95 % quantiles of a future step, dB.

        Where steps lie above what is modelled, mean and upper quantile are those of the steps.
        """
        posteriors, shown = self.rates.posteriors, self.observed.sqnr_shown[c]
        if Criterion.SQNR not in posteriors or np.isnan(shown).all():
            return None, None, None
        p = posteriors[Criterion.SQNR]
        future = predictive(NormalInverseGamma(p.mu[c], p.kappa[c], p.alpha[c], p.beta[c]))
        mean, lo, hi = float(p.mu[c]), float(future.quantile(0.05)), float(future.quantile(0.95))
        if np.nanmax(shown) > sqnr_window(self.tolerance.sqnr_db)[1]:
            mean = max(mean, float(np.nanmean(shown)))
            hi = max(hi, float(np.nanquantile(shown, 0.95)))
        return mean, lo, hi


def _mean(values: FloatArray) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmean(values))


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
