"""Outlying steps, autocorrelation and drift."""

from __future__ import annotations

import numpy as np
import pytest

from loka_toolkit.analysis import analyze
from loka_toolkit.analysis.drift import drift
from loka_toolkit.analysis.evidence import (
    RESOLUTION_DB,
    discounted,
    gather,
    outlying_steps,
    varies,
)
from loka_toolkit.analysis.observations import Observations, observe
from loka_toolkit.artifacts.safety_map import Criterion, Verdict
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.numerics.posterior import Statistics
from loka_toolkit.numerics.tolerance import Tolerance

RECIPE = "e4m3/tensorwise/fast"


def steady(count: int = 20, level: float = 28.0) -> np.ndarray:
    return level + 0.1 * np.random.default_rng(0).normal(size=count)


@pytest.mark.parametrize(
    ("value", "apart", "breaks"),
    [
        (27.5, False, False),  # 15 robust deviations, but less than 3 dB
        (24.2, True, False),  # apart, not half way to the limit of 20 dB
        (23.5, True, True),  # more than half way
        (5.0, True, True),
        (40.0, True, False),  # apart on the good side
    ],
)
def test_an_outlying_step_is_set_aside_and_breaks_past_half_way(
    value: float, apart: bool, breaks: bool
) -> None:
    series = steady()
    series[7] = value
    found, breaking = outlying_steps(series[None], 20.0)
    assert found[0, 7] == apart and found.sum() == apart
    assert breaking[0, 7] == breaks and breaking.sum() == breaks


def test_a_cell_below_its_limit_breaks_further_below_only() -> None:
    series = steady(level=15.0)
    series[3], series[4] = 2.0, 28.0
    found, breaking = outlying_steps(series[None], 20.0)
    assert found[0, [3, 4]].all()
    assert breaking[0].nonzero()[0].tolist() == [3]


def test_two_modes_are_the_nature_of_a_cell() -> None:
    series = steady()
    series[:5] = 10.0
    assert not outlying_steps(series[None], 20.0)[0].any()


def test_few_steps_show_no_outlier() -> None:
    assert not outlying_steps(np.array([[28.0, 28.0, 28.1, 1.0]]), 20.0)[0].any()


def test_normal_steps_are_not_set_aside() -> None:
    series = 25.0 + 2.0 * np.random.default_rng(1).normal(size=(2000, 15))
    # 6 robust deviations of 15 steps: well under one in a thousand.
    assert outlying_steps(series, 20.0)[0].mean() < 1e-3


def test_a_constant_cell_keeps_a_proper_likelihood() -> None:
    fine, coarse = RESOLUTION_DB[Criterion.SQNR], RESOLUTION_DB[Criterion.UNDERFLOW]
    for count in (1, 10):
        constant = discounted(Statistics.of(np.full((1, count), 28.0)), np.ones(1), coarse)
        assert constant.squares == pytest.approx(count * coarse**2)
        assert not varies(constant, coarse)
    lively = 28.0 + 5.0 * (steady() - 28.0)
    noisy = discounted(Statistics.of(lively[None]), np.ones(1), fine)
    assert noisy.squares == pytest.approx(lively.var() * 20)
    assert varies(noisy, fine)


def observed(write_cells, values: np.ndarray) -> Observations:
    cells = {(f"layer{i}#0:fwd", RECIPE): {"sqnr_db": row} for i, row in enumerate(values)}
    trace = Trace.open(write_cells(cells, count=values.shape[1]))
    return observe(trace, Tolerance(), (RECIPE,))


def test_independent_steps_count_in_full(write_cells) -> None:
    values = 28.0 + np.random.default_rng(2).normal(size=(60, 40))
    evidence = gather(observed(write_cells, values))
    # A positive lag-one correlation of noise is shrunk, not believed: a few per cent are lost.
    assert 0.9 < evidence.effective.mean() / 40 <= 1.0


def test_autocorrelated_steps_count_less(write_cells) -> None:
    rng, rho = np.random.default_rng(3), 0.6
    values = np.zeros((60, 60))
    for t in range(1, 60):
        values[:, t] = rho * values[:, t - 1] + rng.normal(size=60)
    evidence = gather(observed(write_cells, 28.0 + values))
    # One series of 60 knows rho to sqrt((1 - rho^2) / 60) = 0.10, the median of 60 series to 0.017;
    # 0.08 leaves room for what is left of the bias of short series. The share of steps that counts
    # changes by 2 / (1 - rho^2) = 3.1 times as much, relative to itself.
    assert evidence.autocorrelation == pytest.approx(rho, abs=0.08)
    assert evidence.effective.mean() / 60 == pytest.approx((1 - rho) / (1 + rho), rel=0.25)
    assert np.median(evidence.statistics[Criterion.SQNR].count) < 20


def test_a_fall_is_followed_no_further_than_it_was_observed() -> None:
    steps = np.arange(20) * 100
    falling = 25.0 - 0.002 * steps + 0.01 * np.random.default_rng(4).normal(size=20)
    found = drift(falling[None], steps, limit=20.0, horizon=1000)
    assert found.per_1000_steps[0] == pytest.approx(-2.0, abs=0.02)
    assert found.leaves[0]  # 21.2 dB at the last step, 19.2 dB after 1,000 more
    assert not drift(falling[None], steps, limit=19.0, horizon=1000).leaves[0]
    early = drift(falling[None, :6], steps[:6], limit=20.0, horizon=100_000)
    assert early.ahead == 500 and not early.leaves[0]


def test_noise_does_not_drift() -> None:
    values = 21.0 + np.random.default_rng(5).normal(size=(3000, 20))
    assert drift(values, np.arange(20) * 100, limit=20.0, horizon=1000).leaves.mean() < 2e-3


def test_few_or_simultaneous_steps_have_no_slope() -> None:
    found = drift(np.full((2, 4), 28.0), np.arange(4), 20.0, 1000)
    assert np.isnan(found.per_1000_steps).all() and not found.leaves.any()


def test_steps_far_above_the_limit_do_not_count_as_spread(assumed_fit, write_cells) -> None:
    """A young model: two steps at 46 dB, then 23 to 36 dB, none of which comes near 20 dB."""
    later = np.random.default_rng(6).normal(30.0, 3.0, 28).clip(23.0, 36.0)
    cells = {("a#0:wgrad", RECIPE): {"sqnr_db": np.concatenate([[47.0, 46.0], later])}}
    (cell,) = analyze(write_cells(cells, count=30)).cells
    assert cell.verdict is Verdict.SAFE
    assert cell.sqnr_db == pytest.approx(np.mean([47.0, 46.0, *later]))
    assert cell.sqnr_db_lo < cell.sqnr_db < cell.sqnr_db_hi
    assert cell.posteriors["sqnr"].mu < cell.sqnr_db
