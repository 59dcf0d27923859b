"""What follows from the posterior of a cell, as a table."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from loka_toolkit.analysis.verdicts import (
    FALSE_DISCOVERY_RATE,
    CellFacts,
    Ground,
    control_false_discoveries,
    decide,
    distrust,
    rate_by_count,
    verdict_of,
)
from loka_toolkit.artifacts.safety_map import Verdict
from loka_toolkit.numerics.tolerance import Tolerance

GOOD = CellFacts(
    steps=15,
    rate_lo=0.0,
    rate_hi=0.01,
    rate_lo_mcse=0.0,
    rate_hi_mcse=0.001,
    p_unsafe=0.001,
    impact=1e-6,
    p_impact_above=0.0,
    allotment=1e-5,
)
TABLE = [
    ("all holds", {}, Ground.HOLDS),
    ("null impact does not fail", {"impact": None, "p_impact_above": None}, Ground.HOLDS),
    ("null impact does not pass", {"impact": None, "rate_hi": 0.2}, Ground.RATE_UNCERTAIN),
    ("no steps", {"steps": 0}, Ground.NO_ERRORS),
    ("too few steps to call it safe", {"steps": 2}, Ground.FEW_STEPS),
    ("few steps suffice to fail", {"steps": 1, "rate_lo": 0.4, "rate_hi": 0.9}, Ground.RATE_ABOVE),
    ("q95 above the rate", {"rate_hi": 0.06}, Ground.RATE_UNCERTAIN),
    ("q95 just below, within 2 errors", {"rate_hi": 0.0485}, Ground.RATE_TOO_CLOSE),
    ("q95 just above, within 2 errors", {"rate_hi": 0.0515}, Ground.RATE_TOO_CLOSE),
    ("q95 below by more than 2 errors", {"rate_hi": 0.0475}, Ground.HOLDS),
    ("q05 above the rate", {"rate_lo": 0.06, "rate_hi": 0.3}, Ground.RATE_ABOVE),
    (
        "q05 above, within 2 errors",
        {"rate_lo": 0.055, "rate_lo_mcse": 0.004, "rate_hi": 0.3},
        Ground.RATE_TOO_CLOSE,
    ),
    ("1 of 15 steps broke it", {"violations": 1}, Ground.STEPS_BROKE),
    ("1 of 100 steps broke it", {"violations": 1, "steps": 100}, Ground.HOLDS),
    ("mean impact above", {"impact": 2e-5, "p_impact_above": 0.7}, Ground.IMPACT_UNCERTAIN),
    ("surely above", {"impact": 2e-5, "p_impact_above": 0.96}, Ground.IMPACT_ABOVE),
    ("beyond validity at all steps", {"beyond_validity": 15}, Ground.BEYOND_VALIDITY),
    (
        "beyond validity at 1 step of 50",
        {"steps": 50, "beyond_validity": 1},
        Ground.SOME_BEYOND_VALIDITY,
    ),
    ("bias within", {"bias": -0.01, "p_bias_above": 0.0}, Ground.HOLDS),
    ("bias above", {"bias": -0.03, "p_bias_above": 0.8}, Ground.UPDATE_UNCERTAIN),
    ("bias surely above", {"bias": -0.5, "p_bias_above": 1.0}, Ground.UPDATE_ABOVE),
    ("noise above", {"noise": 0.06, "p_noise_above": 0.6}, Ground.UPDATE_UNCERTAIN),
    ("noise surely above", {"noise": 0.2, "p_noise_above": 0.99}, Ground.UPDATE_ABOVE),
    ("drifting", {"drifts_out": True}, Ground.DRIFTING),
]


@pytest.mark.parametrize(("case", "change", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_ground(case: str, change: dict[str, float], expected: Ground) -> None:
    assert decide(dataclasses.replace(GOOD, **change), Tolerance()) is expected


def test_only_one_ground_is_safe_and_beyond_validity_never_is() -> None:
    safe = {ground for ground in Ground if verdict_of(ground) is Verdict.SAFE}
    assert safe == {Ground.HOLDS}
    assert verdict_of(Ground.BEYOND_VALIDITY) is Verdict.UNSAFE
    assert verdict_of(Ground.SOME_BEYOND_VALIDITY) is Verdict.INSUFFICIENT


def test_a_stricter_rate_is_used() -> None:
    strict = Tolerance(exceedance_rate=0.001)
    assert decide(GOOD, strict) is Ground.RATE_UNCERTAIN


def test_an_unhealthy_fit_leaves_nothing_safe_and_keeps_the_rest() -> None:
    grounds = distrust([Ground.HOLDS, Ground.RATE_ABOVE, Ground.FEW_STEPS])
    assert grounds == [Ground.UNHEALTHY_FIT, Ground.RATE_ABOVE, Ground.FEW_STEPS]
    assert verdict_of(Ground.UNHEALTHY_FIT) is Verdict.INSUFFICIENT


def test_the_least_certain_are_withdrawn_first() -> None:
    grounds = [Ground.HOLDS] * 4 + [Ground.RATE_ABOVE]
    kept, share = control_false_discoveries(grounds, [0.01, 0.3, 0.02, 0.14, 1.0])
    assert kept == [
        Ground.HOLDS,
        Ground.WITHDRAWN,
        Ground.HOLDS,
        Ground.WITHDRAWN,
        Ground.RATE_ABOVE,
    ]
    assert share == pytest.approx(0.015)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=40))
def test_the_share_of_wrong_verdicts_is_held_and_no_more_withdrawn_than_needed(
    cells: list[tuple[bool, float]],
) -> None:
    grounds = [Ground.HOLDS if holds else Ground.RATE_UNCERTAIN for holds, _ in cells]
    p = [value for _, value in cells]
    kept, share = control_false_discoveries(grounds, p)
    safe = [value for value, ground in zip(p, kept, strict=True) if ground is Ground.HOLDS]
    assert share <= FALSE_DISCOVERY_RATE + 1e-12
    assert share == pytest.approx(sum(safe) / len(safe) if safe else 0.0, abs=1e-9)
    withdrawn = [v for v, g in zip(p, kept, strict=True) if g is Ground.WITHDRAWN]
    if withdrawn:
        one_more = [*safe, min(withdrawn)]
        assert sum(one_more) > FALSE_DISCOVERY_RATE * len(one_more) - 1e-9


@pytest.mark.parametrize(("broken", "steps"), [(0, 20), (1, 20), (1, 100), (7, 13), (13, 13)])
def test_the_rate_by_count_is_the_quantile_of_the_beta_posterior(broken, steps):
    facts = dataclasses.replace(GOOD, steps=steps, violations=broken)
    expected = stats.beta.ppf(0.95, broken + 0.5, steps - broken + 0.5)
    assert rate_by_count(facts) == pytest.approx(expected, rel=1e-9)
