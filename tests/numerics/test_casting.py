"""Casts against ml_dtypes, exhaustively where that is possible, and by their laws elsewhere."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.casting import cast, cast_events, fake_cast, rounded
from loka_toolkit.numerics.formats import (
    BF16,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FP8_FORMATS,
    FP16,
    FloatFormat,
    Specials,
)

FORMATS = pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=lambda f: f.name)
ONE = torch.tensor(1.0)
PEERS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e3m4": ml_dtypes.float8_e3m4,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
E3M4 = FloatFormat("e3m4", 3, 4, 3, Specials.IEEE, torch.float32)  # torch cannot store it
BEYOND_FP8 = [BF16, FP16, E4M3FNUZ, E5M2FNUZ, E3M4]


def saturating_peer(values: npt.NDArray[np.floating], fmt: FloatFormat) -> npt.NDArray[np.float64]:
    """ml_dtypes' conversion of the values clipped beforehand; Inf as the rules say."""
    if not fmt.is_fp8:  # IEEE 754: overflow is Inf
        with np.errstate(over="ignore"):
            return values.astype(PEERS[fmt.name]).astype(np.float64)
    clipped = np.clip(values, -fmt.max, fmt.max)
    clipped = np.where(np.isinf(values), values if fmt.has_infinity else np.nan, clipped)
    with np.errstate(invalid="ignore"):
        return clipped.astype(values.dtype).astype(PEERS[fmt.name]).astype(np.float64)


def assert_same(ours: torch.Tensor, theirs: npt.NDArray[np.float64], *, signs: bool = True) -> None:
    mine = ours.to(torch.float64).numpy()
    np.testing.assert_array_equal(mine, theirs)
    if signs:
        numbers = ~np.isnan(theirs)
        np.testing.assert_array_equal(np.signbit(mine)[numbers], np.signbit(theirs)[numbers])


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def every_fp16() -> torch.Tensor:
    return every_bf16().view(torch.float16)


def finite_codes(fmt: FloatFormat) -> npt.NDArray[np.float64]:
    values = np.arange(256, dtype=np.uint8).view(PEERS[fmt.name]).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


@FORMATS
def test_every_bf16_and_fp16_value_casts_as_in_ml_dtypes(fmt: FloatFormat) -> None:
    for values in (every_bf16(), every_fp16()):
        assert_same(cast(values, fmt, ONE), saturating_peer(values.float().numpy(), fmt))


@FORMATS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_midpoints_and_their_neighbours(fmt: FloatFormat, dtype: type) -> None:
    codes = finite_codes(fmt)
    midpoints = ((codes[:-1] + codes[1:]) / 2).astype(dtype)
    up, down = np.nextafter(midpoints, dtype(np.inf)), np.nextafter(midpoints, dtype(-np.inf))
    for values in (codes.astype(dtype), midpoints, up, down):
        expected = saturating_peer(values, fmt)
        if dtype is np.float64:  # ml_dtypes converts float64 through float32, rounding twice
            nearest = np.array([_nearest_even(v, codes, fmt) for v in values])
            expected = nearest
        assert_same(cast(torch.from_numpy(values), fmt, ONE), expected, signs=False)


def _nearest_even(value: float, codes: npt.NDArray[np.float64], fmt: FloatFormat) -> float:
    """The slow truth: the closest code; on a tie the one whose significand is even."""
    distance = np.abs(codes - value)
    closest = codes[distance == distance.min()]
    if len(closest) == 1:
        return float(closest[0])
    bits = closest.astype(PEERS[fmt.name]).view(np.uint8)
    return float(closest[bits % 2 == 0][0])


@FORMATS
def test_random_float32_bit_patterns(fmt: FloatFormat) -> None:
    rng = np.random.default_rng(20240607)
    patterns = rng.integers(0, 2**32, 400_000, dtype=np.uint32)
    narrow = (patterns & 0x807FFFFF) | (rng.integers(96, 160, 400_000, dtype=np.uint32) << 23)
    values = np.concatenate([patterns, narrow]).view(np.float32)
    assert_same(cast(torch.from_numpy(values), fmt, ONE), saturating_peer(values, fmt))


@pytest.mark.parametrize("fmt", [E4M3, E5M2, *BEYOND_FP8], ids=lambda f: f.name)
def test_the_arithmetic_path_serves_any_format_as_data(fmt: FloatFormat) -> None:
    rng = np.random.default_rng(7)
    exponent = rng.integers(127 - 30, 127 + 20, 200_000, dtype=np.uint32) << 23
    values = (rng.integers(0, 2**32, 200_000, dtype=np.uint32) & 0x807FFFFF | exponent).view(
        np.float32
    )
    values = np.concatenate([values, np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 1e38])])
    for wide in (values, values.astype(np.float64)):
        ours = rounded(torch.from_numpy(wide), fmt)
        assert ours.dtype == torch.from_numpy(wide).dtype
        assert_same(ours, saturating_peer(values, fmt), signs=fmt.specials is Specials.IEEE)


@pytest.mark.parametrize("fmt", [E4M3FNUZ, E5M2FNUZ], ids=lambda f: f.name)
def test_zero_has_no_sign_where_its_code_is_nan(fmt: FloatFormat) -> None:
    stored = cast(torch.tensor([-0.0, -1e-30, math.inf, 1e9]), fmt, ONE).float()
    assert stored[:2].tolist() == [0.0, 0.0]
    assert math.isnan(stored[2]) and stored[3] == fmt.max


def test_special_values_of_e4m3() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, -0.0, 464.0, 465.0])
    stored = cast(x, E4M3, ONE).float()
    assert stored[:3].isnan().all()  # Inf is not hidden behind 448
    assert stored[3:5].tolist() == [448.0, -448.0]
    assert stored[5] == 0.0 and torch.signbit(stored[5])
    assert stored[6:].tolist() == [448.0, 448.0]


def test_special_values_of_e5m2() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, -0.0, 61440.0])
    stored = cast(x, E5M2, ONE).float()
    assert stored[:2].tolist() == [math.inf, -math.inf]
    assert stored[2].isnan()
    assert stored[3:5].tolist() == [57344.0, -57344.0]  # finite values never become infinite
    assert torch.signbit(stored[5]) and stored[6] == 57344.0


def test_fake_cast_scales_back_in_the_precision_of_its_input() -> None:
    x = torch.tensor([3.3, -0.7, 0.0], dtype=torch.float64)
    scale = torch.tensor(0.1)
    wide = fake_cast(x, E4M3, scale)
    assert wide.dtype == torch.float64
    stored = saturating_peer((x.numpy() / float(scale)).astype(np.float32), E4M3)
    np.testing.assert_array_equal(wide.numpy(), stored * float(scale))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert fake_cast(x.to(dtype), E4M3, scale).dtype == torch.float32


def test_strides_and_empty_tensors() -> None:
    x = torch.randn(13, 39, generator=torch.Generator().manual_seed(1)) * 50
    columns = x.abs().amax(0, keepdim=True) / E4M3.max
    straight = cast(x, E4M3, columns).float()
    torch.testing.assert_close(cast(x.mT, E4M3, columns.mT).float(), straight.mT, rtol=0, atol=0)
    strided = torch.stack([x, -x], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    torch.testing.assert_close(cast(strided, E4M3, columns).float(), straight, rtol=0, atol=0)
    assert cast(x[:0], E4M3, ONE).shape == (0, 39)
    x_grad = x.clone().requires_grad_()
    assert not cast(x_grad, E4M3, ONE).requires_grad


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@FORMATS
@given(values=st.lists(FLOATS, min_size=2, max_size=64))
@settings(max_examples=60, deadline=None)
def test_casting_is_monotone_odd_and_idempotent(fmt: FloatFormat, values: list[float]) -> None:
    x = torch.tensor(sorted(values), dtype=torch.float32)
    once = cast(x, fmt, ONE).float()
    assert (once.diff() >= 0).all()
    torch.testing.assert_close(cast(once, fmt, ONE).float(), once, rtol=0, atol=0)
    torch.testing.assert_close(cast(-x, fmt, ONE).float(), -once, rtol=0, atol=0)
    assert once.abs().max() <= fmt.max


@FORMATS
@given(value=FLOATS, power=st.integers(-20, 20))
@settings(max_examples=100, deadline=None)
def test_error_is_at_most_half_a_step(fmt: FloatFormat, value: float, power: int) -> None:
    x = torch.tensor(value, dtype=torch.float64).clamp(-fmt.max, fmt.max)
    magnitude = max(abs(float(x)), fmt.smallest_normal)
    step = 2.0 ** (math.floor(math.log2(magnitude)) - fmt.mantissa_bits)
    assert abs(float(fake_cast(x, fmt, ONE)) - float(x)) <= step / 2
    scale = torch.tensor(2.0**power)  # powers of two only move the exponent
    assert float(fake_cast(x * 2.0**power, fmt, scale)) == float(fake_cast(x, fmt, ONE)) * 2**power


@FORMATS
def test_events_against_a_count_over_every_bf16_value(fmt: FloatFormat) -> None:
    x = every_bf16().reshape(-1, 128)
    values = x.float().numpy()
    with np.errstate(invalid="ignore"):
        stored = np.clip(values, -fmt.max, fmt.max).astype(PEERS[fmt.name]).astype(np.float64)
        unbounded = values.astype(PEERS[fmt.name]).astype(np.float64)
    nonzero = np.isfinite(values) & (values != 0)
    events = cast_events(x, fmt, ONE)
    assert events.nonzero == nonzero.sum()
    assert events.underflowed == (nonzero & (stored == 0)).sum() > 0
    assert events.saturated == (nonzero & ~np.isfinite(unbounded)).sum() > 0
    assert events.nonfinite == (~np.isfinite(values)).sum() == 256
    assert events.underflow_share == events.underflowed / events.nonzero
    assert events.saturation_share == events.saturated / events.nonzero


def test_subnormal_results_and_negative_zero_are_no_underflow() -> None:
    tiny = E4M3.smallest_subnormal
    x = torch.tensor([[tiny, -tiny, tiny * 0.5000001, -0.0, 0.0]])
    events = cast_events(x, E4M3, ONE)
    assert (events.nonzero, events.underflowed, events.worst_group) == (3, 0, None)
    tie = cast_events(torch.tensor([[tiny / 2]]), E4M3, ONE)  # a tie goes to the even code, 0
    assert (tie.underflowed, tie.worst_group_share) == (1, 1.0)


def test_rounding_down_to_the_largest_value_is_no_saturation() -> None:
    x = torch.tensor([[448.0, 463.0, 464.0, 464.5, math.inf, math.nan]])
    events = cast_events(x, E4M3, ONE)
    assert (events.saturated, events.nonzero, events.nonfinite) == (1, 4, 2)


def test_the_worst_group_is_found_beside_a_healthy_majority() -> None:
    """Raw counts beside an embedding: tensorwise, the embedding's 16 columns vanish."""
    x = torch.full((8, 39), 300.0)
    x[:, 16:32] = 1e-4
    x[:, 36] = 1e-4
    events = cast_events(x, E4M3, ONE)
    assert events.worst_group == slice(16, 32) and events.worst_group_share == 1.0
    assert events.underflow_share == pytest.approx(17 / 39)
    ragged = cast_events(x[:, 16:], E4M3, ONE, groups=[slice(18, None), slice(0, 4)])
    assert ragged.worst_group == slice(0, 4)
    last = cast_events(x[:, 16:], E4M3, ONE, groups=[slice(18, None)])
    assert last.worst_group == slice(18, 23) and last.worst_group_share == 1 / 5


def test_events_use_the_scale_of_each_row() -> None:
    x = torch.tensor([[1e-6, 1.0], [1e-6, 1e-6]])
    rows = x.abs().amax(1, keepdim=True) / E4M3.max
    assert cast_events(x, E4M3, rows).underflowed == 1
    assert cast_events(x, E4M3, rows.max()).underflowed == 3


def test_events_of_nothing() -> None:
    for x in (torch.zeros(0, 39), torch.zeros(3, 17), torch.zeros(2, 0), torch.tensor(0.0)):
        events = cast_events(x, E4M3, ONE)
        assert (events.nonzero, events.underflow_share, events.saturation_share) == (0, 0.0, 0.0)


@pytest.mark.parametrize("group", [slice(3, 3), slice(0, 40), slice(-2, 4), slice(0, 8, 2)])
def test_a_wrong_group_is_named(group: slice) -> None:
    with pytest.raises(ConfigurationError, match="column group"):
        cast_events(torch.ones(2, 39), E4M3, ONE, groups=[group])
