"""Scales: the documented rules for zero, tiny, huge and non-finite amax, and the grains."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.casting import cast, fake_cast
from loka_toolkit.numerics.formats import E4M3, E5M2, FP8_FORMATS, FloatFormat
from loka_toolkit.numerics.recipes import Scaling
from loka_toolkit.numerics.scaling import (
    SMALLEST_SCALE,
    STATIC_HEADROOM,
    decode_scale,
    finite_amax,
    operand_scale,
)

FORMATS = pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=lambda f: f.name)


@FORMATS
@given(amax=st.floats(min_value=2.0**-149, max_value=2.0**127, width=32))
@settings(max_examples=200, deadline=None)
def test_any_positive_amax_gives_a_usable_scale(fmt: FloatFormat, amax: float) -> None:
    scale = decode_scale(torch.tensor(amax), fmt)
    assert SMALLEST_SCALE <= float(scale) < math.inf
    assert math.isfinite(float(scale.reciprocal()))
    stored = cast(torch.tensor([amax, -amax, 0.0]), fmt, scale).float()
    assert torch.isfinite(stored).all() and stored[2] == 0
    if amax / fmt.max >= SMALLEST_SCALE:
        assert stored[0] == fmt.max  # amax itself uses the whole range


def test_scale_is_the_correctly_rounded_quotient() -> None:
    amax = torch.tensor([1.0, 3.3, 1e-20, 6e4], dtype=torch.float32)
    expected = (amax.double().numpy() / 448.0).astype(np.float32)
    np.testing.assert_array_equal(decode_scale(amax, E4M3).numpy(), expected)
    wide = decode_scale(amax, E5M2, headroom=STATIC_HEADROOM)
    np.testing.assert_array_equal(
        wide.numpy(), (amax.double().numpy() * 8 / 57344).astype(np.float32)
    )


def test_zero_amax_gives_scale_one_and_a_zero_tensor_zeros() -> None:
    zeros = torch.tensor([[0.0, -0.0], [0.0, 0.0]])
    for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE):
        scale = operand_scale(zeros, E4M3, scaling, "a")
        assert (scale == 1).all()
        assert (cast(zeros, E4M3, scale).float() == 0).all()


@pytest.mark.parametrize("amax", [1e-40, 1e-45, 2.0**-126])
def test_a_tiny_amax_gives_neither_inf_nor_nan(amax: float) -> None:
    x = torch.tensor([amax, -amax, 0.0])
    scale = operand_scale(x, E4M3, Scaling.TENSORWISE, "a")
    assert float(scale) == SMALLEST_SCALE
    back = fake_cast(x, E4M3, scale)
    assert torch.isfinite(back).all()
    step = E4M3.smallest_subnormal * SMALLEST_SCALE
    assert float((back - x).abs().max()) <= max(step / 2, amax * 2.0**-4)


def test_a_huge_amax_with_headroom_stays_finite() -> None:
    scale = decode_scale(torch.tensor(3.4e38), E5M2, headroom=1e9)
    assert float(scale) == torch.finfo(torch.float32).max


def test_a_nonfinite_amax_is_not_hidden() -> None:
    scale = decode_scale(torch.tensor([math.nan, math.inf, 1.0]), E4M3)
    assert scale.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("headroom", [0.0, -1.0, math.inf, math.nan])
def test_a_senseless_headroom_is_refused(headroom: float) -> None:
    with pytest.raises(ConfigurationError, match="headroom"):
        decode_scale(torch.tensor(1.0), E4M3, headroom=headroom)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_amax_is_over_finite_elements(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -7.0, math.inf], [math.nan, -math.inf, 0.5]], dtype=dtype)
    assert finite_amax(x).dtype == torch.float32
    assert finite_amax(x).item() == 7.0
    assert finite_amax(x, dim=1).tolist() == [7.0, 0.5]
    assert finite_amax(x, dim=0, keepdim=True).tolist() == [[1.0, 7.0, 0.5]]
    assert finite_amax(x, dim=(0, -1)).item() == 7.0
    assert finite_amax(x.mT, dim=-2).tolist() == [7.0, 0.5]


def test_amax_of_nothing_is_zero() -> None:
    assert finite_amax(torch.empty(0, 5)).item() == 0.0
    assert finite_amax(torch.empty(0, 5), dim=0).tolist() == [0.0] * 5
    assert finite_amax(torch.empty(0, 5), dim=-1, keepdim=True).shape == (0, 1)
    assert finite_amax(torch.empty(3, 0), dim=1, keepdim=True).tolist() == [[0.0]] * 3
    assert finite_amax(torch.tensor([math.nan, math.inf])).item() == 0.0
    assert finite_amax(torch.tensor(-3.0)).item() == 3.0


def test_amax_of_float64_beyond_float32_is_the_largest_float32() -> None:
    huge = torch.tensor([1e300], dtype=torch.float64)
    assert finite_amax(huge).item() == torch.finfo(torch.float32).max


def test_scale_shapes() -> None:
    a, b = torch.randn(2, 13, 39), torch.randn(2, 39, 1)
    assert operand_scale(a, E4M3, Scaling.TENSORWISE, "a").shape == ()
    assert operand_scale(a, E4M3, Scaling.ROWWISE, "a").shape == (2, 13, 1)
    assert operand_scale(b, E4M3, Scaling.ROWWISE, "b").shape == (2, 1, 1)
    column = operand_scale(a, E4M3, Scaling.ROWWISE, "b")
    assert column.shape == (2, 1, 39)
    expected = a.abs().amax(1, keepdim=True) / 448
    torch.testing.assert_close(column, expected, rtol=2**-23, atol=0)  # one float32 rounding


def test_static_scaling_takes_the_scale_it_is_given() -> None:
    x, given_scale = torch.randn(3, 4), torch.tensor([[0.25]])
    assert operand_scale(x, E4M3, Scaling.STATIC, "b", given_scale).item() == 0.25
    assert operand_scale(x, E4M3, Scaling.STATIC, "b", given_scale).shape == ()
    with pytest.raises(ConfigurationError, match="static_scale"):
        operand_scale(x, E4M3, Scaling.STATIC, "a")
    with pytest.raises(ConfigurationError, match=r"one number.*\(3, 1\)"):
        operand_scale(x, E4M3, Scaling.STATIC, "a", torch.ones(3, 1))


def test_a_wrong_side_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'x'"):
        operand_scale(torch.ones(2, 2), E4M3, Scaling.ROWWISE, "x")  # type: ignore[arg-type]
