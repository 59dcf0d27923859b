"""The exceedance rate against numerical integration, and the rate of outlying events."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import integrate, special, stats

from loka_toolkit.analysis.design import Factor, build
from loka_toolkit.analysis.events import LOG_CONCENTRATION, LOGIT_MEAN, pool
from loka_toolkit.analysis.evidence import Evidence
from loka_toolkit.analysis.exceedance import (
    average,
    constant_draws,
    exceedance,
    quantile_error,
)
from loka_toolkit.analysis.fit import HyperDraws
from loka_toolkit.artifacts.safety_map import Criterion
from loka_toolkit.numerics.posterior import (
    NormalInverseGamma,
    Statistics,
    cell_prior,
    predictive,
    update,
)

SQNR, ROW = Criterion.SQNR, Criterion.ROW_SQNR


def one_cell(values: np.ndarray, events: int = 0, quiet_steps: int = 10**6) -> tuple:
    """A cell whose outlying events are known not to happen, unless told otherwise."""
    statistics = {SQNR: Statistics.of(values[None])}
    evidence = Evidence(
        statistics=statistics,
        outlying={SQNR: np.array([0])},
        events=np.array([events]),
        violations=np.array([events]),
        trials=np.array([quiet_steps + events]),
        effective=np.array([float(values.size)]),
        autocorrelation=0.0,
    )
    design = build(statistics, {SQNR: 25.0}, [Factor.of("role", ["fwd"])])
    hyper = HyperDraws(np.full((1, 1), 25.0), np.array([0.5]), np.array([3.0]), np.array([2.0]))
    return design, {SQNR: hyper}, evidence


def test_rate_matches_the_distribution_of_pi() -> None:
    """Without events, P(pi <= r) = P(m - z_r s >= limit), a one-dimensional integral over s."""
    values, limit = np.array([22.0, 20.9, 21.6, 21.9]), 20.0
    found = exceedance(*one_cell(values), {SQNR: limit}, 0.05, seed=0)
    posterior = update(cell_prior(25.0, 0.5, 3.0, 2.0), Statistics.of(values))

    def pi_below(rate: float) -> float:
        z = special.ndtri(rate)

        def integrand(log_v: float) -> float:
            v = np.exp(log_v)
            density = stats.invgamma.pdf(v, posterior.alpha, scale=posterior.beta)
            below = special.ndtr(
                (posterior.mu - limit + z * np.sqrt(v)) / np.sqrt(v / posterior.kappa)
            )
            return float(density * below * v)

        return float(integrate.quad(integrand, -6, 6, limit=200)[0])

    # 2,000 draws: a probability of 5 % is known to 0.5 %, three of which are allowed.
    assert found.mean[0] == pytest.approx(predictive(posterior).cdf(limit), abs=0.01)
    assert 1.0 - found.p_unsafe[0] == pytest.approx(pi_below(0.05), abs=0.03)
    assert pi_below(found.lo[0]) == pytest.approx(0.05, abs=0.015)
    assert pi_below(found.hi[0]) == pytest.approx(0.95, abs=0.015)
    assert found.by_criterion[SQNR][0] == pytest.approx(predictive(posterior).cdf(limit), abs=0.01)


def test_criteria_are_added_and_capped() -> None:
    values = np.full(10, 15.0) + np.linspace(-0.3, 0.3, 10)
    design, hyper, evidence = one_cell(values)
    both = Evidence(
        statistics={SQNR: evidence.statistics[SQNR], ROW: evidence.statistics[SQNR]},
        outlying=evidence.outlying,
        events=evidence.events,
        violations=evidence.events,
        trials=evidence.trials,
        effective=evidence.effective,
        autocorrelation=0.0,
    )
    hyper = {SQNR: hyper[SQNR], ROW: hyper[SQNR]}
    half = exceedance(design, hyper, both, {SQNR: 15.0, ROW: 15.0}, 0.05, seed=0)
    assert half.by_criterion[SQNR][0] == pytest.approx(0.5, abs=0.02)
    assert 0.8 < half.mean[0] <= 1.0
    worse = exceedance(design, hyper, both, {SQNR: 20.0, ROW: 20.0}, 0.05, seed=0)
    assert worse.hi[0] == 1.0 and worse.lo[0] > 0.99 and worse.p_unsafe[0] == 1.0


def test_a_cell_without_steps_has_the_prior_of_its_group() -> None:
    design, hyper, evidence = one_cell(np.array([]))
    found = exceedance(design, hyper, evidence, {SQNR: 20.0}, 0.05, seed=0)
    prior = cell_prior(25.0, 0.5, 3.0, 2.0)
    for name in ("mu", "kappa", "alpha", "beta"):
        assert getattr(found.posteriors[SQNR], name)[0] == pytest.approx(getattr(prior, name))
    assert found.by_criterion[SQNR][0] == pytest.approx(predictive(prior).cdf(20.0), abs=0.02)
    assert found.lo[0] < 0.05 < found.hi[0]


def test_a_constant_criterion_is_known() -> None:
    design, _, evidence = one_cell(np.full(8, 36.0))
    hyper = {SQNR: constant_draws(36.0, 1, 0.5)}
    assert exceedance(design, hyper, evidence, {SQNR: 6.0}, 0.05, seed=0).by_criterion[SQNR] < 1e-9
    assert (
        exceedance(design, hyper, evidence, {SQNR: 40.0}, 0.05, seed=0).by_criterion[SQNR] > 0.999
    )


def test_same_seed_same_numbers_and_another_seed_within_error() -> None:
    cell = one_cell(np.array([22.0, 20.9, 21.6, 21.9]))
    first, again, other = (exceedance(*cell, {SQNR: 20.0}, 0.05, seed=seed) for seed in (0, 0, 1))
    assert first.hi[0] == again.hi[0]
    assert first.hi[0] != other.hi[0]
    assert abs(first.hi[0] - other.hi[0]) < 4 * np.hypot(first.hi_mcse[0], other.hi_mcse[0])


def test_error_of_a_quantile_is_that_of_repeated_draws() -> None:
    rng = np.random.default_rng(0)
    many = np.sort(rng.beta(2, 60, size=(2000, 300)), axis=0)
    spread = np.quantile(many, 0.95, axis=0).std()
    assert quantile_error(many, 0.95, 2000).mean() == pytest.approx(spread, rel=0.2)


def test_averaging_keeps_location_and_precision() -> None:
    rng = np.random.default_rng(0)
    posterior = NormalInverseGamma(*rng.uniform(1, 2, size=(4, 50, 3)))
    found = average(posterior)
    np.testing.assert_allclose(found.mu, posterior.mu.mean(axis=0))
    np.testing.assert_allclose(
        found.alpha / found.beta, (posterior.alpha / posterior.beta).mean(axis=0)
    )


def rates(events: list[int], trials: list[int], seed: int = 0) -> np.ndarray:
    """Draws of the rate of every cell."""
    k, n = np.array(events), np.array(trials)
    rng = np.random.default_rng(seed)
    prior = pool(k, n, 20_000, rng)
    return rng.beta(prior.breaking[:, None] + k, prior.keeping[:, None] + n - k)


def test_event_rates_without_evidence_are_the_prior() -> None:
    found = rates([], [])
    prior = pool(np.array([], int), np.array([], int), 50_000, np.random.default_rng(0))
    mean = prior.breaking / (prior.breaking + prior.keeping)
    assert found.size == 0
    logit = special.logit(mean)
    assert logit.mean() == pytest.approx(LOGIT_MEAN[0], abs=0.03)
    assert logit.std() == pytest.approx(LOGIT_MEAN[1], abs=0.03)
    log_s = np.log(prior.breaking + prior.keeping)
    assert log_s.mean() == pytest.approx(LOG_CONCENTRATION[0], abs=0.03)


def test_one_event_is_no_pass_and_many_are_a_failure() -> None:
    quiet, once, often = rates([0] * 100 + [1, 8], [15] * 102)[:, [0, 100, 101]].T
    assert np.quantile(quiet, 0.95) < 0.05
    assert np.quantile(once, 0.05) < 0.05 < np.quantile(once, 0.95)
    assert np.quantile(often, 0.05) > 0.05


def test_event_rates_cover_the_truth() -> None:
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(30):
        truth = rng.beta(0.4, 8.0, size=60)
        trials = np.full(60, 25)
        events = rng.binomial(trials, truth)
        prior = pool(events, trials, 500, rng)
        drawn = rng.beta(prior.breaking[:, None] + events, prior.keeping[:, None] + trials - events)
        lo, hi = np.quantile(drawn, (0.05, 0.95), axis=0)
        inside.append((lo <= truth) & (truth <= hi))
    assert 0.85 < np.mean(inside) < 0.95
