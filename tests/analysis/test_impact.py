"""Impact: noise is not selected, what is systematic is found, null stays null."""

from __future__ import annotations

import numpy as np
import pytest

from loka_toolkit.analysis.impact import (
    gradient_bias,
    gradient_noise,
    loss_impact,
    relative_spread,
    shrunk_mean,
)
from loka_toolkit.numerics.posterior import Statistics


def simulated(
    cells: int, steps: int, effect: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return systematic first orders [C], and first and second orders [C, S], relative."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-7, -4, cells)  # second order
    sd = 5.0 * size
    truth = effect * sd * rng.normal(size=cells)
    first = truth[:, None] + sd[:, None] * rng.normal(size=(cells, steps))
    return truth, first, size[:, None] * rng.gamma(4.0, 0.25, (cells, steps))


def test_pure_noise_is_shrunk_away() -> None:
    _, first, second = simulated(300, 12, effect=0.0)
    found = loss_impact(first, second, np.full(300, 1.0), seed=0)
    naive = np.maximum(first.mean(axis=1), 0.0)
    kept = found.mean - second.mean(axis=1)
    assert kept.sum() < 0.1 * naive.sum()
    assert (found.mean >= second.mean(axis=1)).all()


def test_what_is_systematic_is_kept() -> None:
    truth, first, second = simulated(300, 30, effect=2.0)
    found = loss_impact(first, second, np.full(300, 1.0), seed=0)
    expected = np.maximum(truth, 0.0) + second.mean(axis=1)
    assert np.corrcoef(np.log(found.mean), np.log(expected))[0, 1] > 0.98


def test_intervals_cover_the_truth() -> None:
    inside = []
    for seed in range(20):
        truth, first, second = simulated(100, 10, effect=0.7, seed=seed)
        size = second.mean(axis=1)  # close to the truth; its own error is checked below
        found = loss_impact(first, second, np.full(100, 1.0), seed=0)
        total = np.maximum(truth, 0.0) + size
        inside.append((found.lo <= total) & (total <= found.hi))
    assert 0.85 < np.mean(inside) <= 0.97


def test_second_order_has_an_interval_of_its_own() -> None:
    rng = np.random.default_rng(0)
    second = 1e-5 * rng.gamma(4.0, 0.25, (2000, 10))
    found = loss_impact(np.zeros_like(second), second, np.full(2000, 1.0), seed=0)
    inside = (found.lo <= 1e-5) & (1e-5 <= found.hi)
    assert 0.85 < inside.mean() < 0.95


def test_unknown_impact_is_null_and_partial_impact_uses_what_is_there() -> None:
    first = np.array([[np.nan, np.nan, np.nan], [1e-6, np.nan, 2e-6], [1e-6, 1e-6, 1e-6]])
    second = np.where(np.isnan(first), np.nan, 1e-6)
    found = loss_impact(first, second, np.full(3, 1e-5), seed=0)
    assert np.isnan([found.mean[0], found.lo[0], found.hi[0], found.p_above[0]]).all()
    np.testing.assert_array_equal(found.steps, [0, 2, 3])
    assert (found.lo[1:] <= found.mean[1:]).all() and (found.mean[1:] <= found.hi[1:]).all()


def test_everything_unknown_is_no_error() -> None:
    nothing = np.full((4, 6), np.nan)
    assert np.isnan(loss_impact(nothing, nothing, np.zeros(4), seed=0).mean).all()
    assert np.isnan(gradient_bias(nothing, 0.02)).all()
    assert np.isnan(gradient_noise(nothing, 0.05)).all()


def test_probability_of_exceeding_the_allotment() -> None:
    second = np.full((2, 20), 1e-5) * np.random.default_rng(0).gamma(4.0, 0.25, (2, 20))
    found = loss_impact(np.zeros((2, 20)), second, np.array([1e-6, 1e-4]), seed=0)
    assert found.p_above[0] == 1.0 and found.p_above[1] == 0.0


def test_a_single_step_is_possible() -> None:
    found = loss_impact(np.full((3, 1), 1e-6), np.full((3, 1), 1e-6), np.full(3, 1.0), seed=0)
    assert np.isfinite(found.mean).all() and np.isfinite(found.hi).all()


def test_exact_products_cost_nothing() -> None:
    found = loss_impact(np.zeros((3, 5)), np.zeros((3, 5)), np.full(3, 1e-9), seed=0)
    assert (found.mean == 0).all() and (found.p_above == 0).all()


@pytest.mark.parametrize(("bias", "above"), [(0.0, 0.0), (-0.3, 1.0), (0.3, 1.0)])
def test_bias_counts_in_both_directions(bias: float, above: float) -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([np.full((1, 20), bias), np.zeros((30, 20))])
    values += 1e-3 * rng.normal(size=values.shape)
    mean, p_above = gradient_bias(values, 0.02)
    assert mean[0] == pytest.approx(bias, abs=0.005)  # far from the noise: hardly shrunk
    assert p_above[0] == pytest.approx(above, abs=0.01)


def test_noise_near_its_limit_is_not_sure() -> None:
    rng = np.random.default_rng(0)
    values = np.array([[0.05], [0.5], [0.005]]) * rng.gamma(4.0, 0.25, (3, 15))
    mean, p_above = gradient_noise(values, 0.05)
    np.testing.assert_allclose(mean, values.mean(axis=1))
    assert 0.02 < p_above[0] < 0.98 and p_above[1] > 0.999 and p_above[2] < 0.001


def test_shrinkage_needs_no_positive_scale() -> None:
    values = np.random.default_rng(0).normal(size=(10, 8))
    found = shrunk_mean(Statistics.of(values), scale=np.zeros(10))
    assert (np.abs(found.mean) < np.abs(values.mean(axis=1))).all()


def test_relative_spread_is_pooled_for_short_series() -> None:
    rng = np.random.default_rng(0)
    long = Statistics.of(rng.gamma(4.0, 0.25, (50, 30)))
    short = Statistics.of(rng.gamma(4.0, 0.25, (1, 2)))
    both = Statistics(
        *(
            np.concatenate([getattr(long, f), getattr(short, f)])
            for f in ("count", "mean", "squares")
        )
    )
    assert relative_spread(both)[-1] == pytest.approx(0.5, abs=0.05)
