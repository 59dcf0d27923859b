"""Error figures: analytic values, null rules, limits, and sizes on which torch.quantile fails."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.metrics import (
    RELATIVE_CEILING,
    SQNR_CEILING_DB,
    SQNR_FLOOR_DB,
    ProductError,
    product_error,
)

Draw = Callable[..., torch.Tensor]
NOTHING = ProductError(None, None, None, None, None)


def test_figures_against_numpy(heavy_tailed: Draw) -> None:
    reference, error = heavy_tailed(117, 39), heavy_tailed(117, 39) * 0.01
    r = reference.double().numpy()
    e = (reference.double() + error.double()).numpy() - r
    got = product_error(reference.double(), reference.double() + error.double())
    relative = np.linalg.norm(e) / np.linalg.norm(r)
    rows = -20 * np.log10(np.linalg.norm(e, axis=1) / np.linalg.norm(r, axis=1))
    assert got.relative_frobenius == pytest.approx(relative, rel=1e-12)
    assert got.sqnr_db == pytest.approx(-20 * math.log10(relative), rel=1e-12)
    assert got.row_sqnr_db_p05 == pytest.approx(np.percentile(rows, 5), rel=1e-12)
    assert got.element_error_median == pytest.approx(np.median(np.abs(e / r)), rel=1e-12)
    assert got.element_error_mean == pytest.approx(np.abs(e / r).mean(), rel=1e-12)


def test_ten_percent_is_twenty_decibels() -> None:
    got = product_error(torch.full((4, 5), 2.0), torch.full((4, 5), 2.2, dtype=torch.float64))
    assert got == ProductError(*(pytest.approx(v) for v in (0.1, 20.0, 20.0, 0.1, 0.1)))


def test_zero_over_zero_is_null() -> None:
    zeros = torch.zeros(3, 4)
    assert product_error(zeros, zeros) == NOTHING
    assert product_error(zeros, -zeros) == NOTHING


def test_an_exact_product_is_at_the_ceiling() -> None:
    ones = torch.ones(2, 2)
    assert product_error(ones, ones) == ProductError(
        0.0, SQNR_CEILING_DB, SQNR_CEILING_DB, 0.0, 0.0
    )
    nearly = product_error(ones.double(), ones.double() + 1e-12)
    assert nearly.sqnr_db == SQNR_CEILING_DB


def test_an_error_on_a_zero_reference_is_at_the_floor() -> None:
    got = product_error(torch.zeros(2, 3), torch.ones(2, 3))
    assert got == ProductError(RELATIVE_CEILING, SQNR_FLOOR_DB, SQNR_FLOOR_DB, None, None)


def test_rows_that_are_zero_and_exact_are_skipped_and_others_are_not() -> None:
    reference = torch.ones(4, 2)
    reference[:3] = 0.0
    approximation = reference * 1.1
    skipped = product_error(reference, approximation)
    assert skipped.row_sqnr_db_p05 == pytest.approx(20.0, abs=1e-5)
    approximation[0] = 1e-9  # a dead row that came alive
    floored = product_error(reference, approximation)
    # two rows are left, at -100 and 20 dB; the 5th percentile interpolates between them
    assert floored.row_sqnr_db_p05 == pytest.approx(-100 + 0.05 * 120, abs=1e-4)
    assert floored.sqnr_db == pytest.approx(20.0, abs=1e-5)


def test_a_bad_row_shows_in_the_percentile_and_not_in_the_tensor() -> None:
    reference = torch.ones(100, 64)
    reference[:10] *= 1e-3
    approximation = reference.clone()
    approximation[:10] = 0.0  # one example in ten is flushed
    got = product_error(reference, approximation)
    assert got.sqnr_db is not None and got.sqnr_db > 65
    assert got.row_sqnr_db_p05 == pytest.approx(0.0)


def test_elements_over_zero_references_do_not_count() -> None:
    reference = torch.tensor([[0.0, 2.0, -4.0]])
    got = product_error(reference, torch.tensor([[0.5, 2.5, -3.0]]))
    assert (got.element_error_median, got.element_error_mean) == (0.25, 0.25)


def test_a_nonfinite_reference_is_no_reference() -> None:
    reference = torch.tensor([[1.0, math.nan]])
    assert product_error(reference, torch.ones(1, 2)) == NOTHING
    assert product_error(torch.tensor([[math.inf]]), torch.tensor([[math.inf]])) == NOTHING


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_approximation_has_the_largest_error(poison: float) -> None:
    reference = torch.ones(2, 3, dtype=torch.float64)
    approximation = reference * 1.1
    approximation[0, 1] = poison
    got = product_error(reference, approximation)
    assert (got.relative_frobenius, got.sqnr_db) == (RELATIVE_CEILING, SQNR_FLOOR_DB)
    assert got.row_sqnr_db_p05 == pytest.approx(-100 + 0.05 * 120)
    assert got.element_error_median == pytest.approx(0.1)
    assert got.element_error_mean == pytest.approx((5 * 0.1 + RELATIVE_CEILING) / 6)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (2, 0, 3)])
def test_nothing_has_no_error(shape: tuple[int, ...]) -> None:
    assert product_error(torch.empty(shape), torch.empty(shape)) == NOTHING


@pytest.mark.parametrize("shape", [(1, 1), (13, 1), (1, 39), (2, 3, 4), (5,), ()])
def test_awkward_shapes(shape: tuple[int, ...]) -> None:
    got = product_error(torch.full(shape, 4.0), torch.full(shape, 5.0))
    assert got.relative_frobenius == pytest.approx(0.25)
    assert got.row_sqnr_db_p05 == pytest.approx(got.sqnr_db)


def test_extreme_magnitudes_neither_overflow_nor_vanish() -> None:
    for size in (1e-300, 1e300):
        reference = torch.full((2, 2), size, dtype=torch.float64)
        assert product_error(reference, reference * 1.1).sqnr_db == pytest.approx(20.0)
    subnormal = torch.tensor([[5e-324, 1.0]], dtype=torch.float64)
    mean = product_error(subnormal, subnormal + 0.5).element_error_mean
    assert mean is not None and math.isfinite(mean)


@given(power=st.integers(-60, 60), seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_figures_do_not_depend_on_a_common_scale(power: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    approximation = reference + torch.randn(6, 5, generator=generator, dtype=torch.float64) * 0.1
    factor = 2.0**power
    assert product_error(reference * factor, approximation * factor) == product_error(
        reference, approximation
    )


def test_more_elements_than_torch_quantile_takes() -> None:
    count = 2**24 + 5
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(torch.zeros(count), 0.5)
    reference = torch.ones(1, count)
    approximation = reference.clone()
    approximation[:, : count // 2] = 2.0
    got = product_error(reference, approximation)
    assert got.element_error_median == 0.0  # one exact element more than half
    assert got.element_error_mean == pytest.approx(0.5, abs=1e-6)
    rows = product_error(torch.ones(2**18, 1), torch.full((2**18, 1), 1.1, dtype=torch.float64))
    assert rows.row_sqnr_db_p05 == pytest.approx(20.0)


def test_float32_inputs_are_compared_in_float64() -> None:
    """In float32 the sum of squares of 2**24 equal errors would stall."""
    reference = torch.full((1, 2**22), 1.0)
    approximation = torch.full((1, 2**22), 1.0 + 2.0**-20)
    got = product_error(reference, approximation)
    assert got.relative_frobenius == pytest.approx(2.0**-20, rel=1e-12)


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\(2, 3\).*\(3, 2\)"):
        product_error(torch.ones(2, 3), torch.ones(3, 2))
