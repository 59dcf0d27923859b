"""The derived numbers of every format against ml_dtypes, torch and each other."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from loka_toolkit.numerics.formats import (
    BF16,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP8_FORMATS,
    FP16,
    FP32,
    TF32,
    FloatFormat,
)

PEERS: list[tuple[FloatFormat, type]] = [
    (E4M3, ml_dtypes.float8_e4m3fn),
    (E5M2, ml_dtypes.float8_e5m2),
    (E4M3FNUZ, ml_dtypes.float8_e4m3fnuz),
    (E5M2FNUZ, ml_dtypes.float8_e5m2fnuz),
    (BF16, ml_dtypes.bfloat16),
    (FP16, np.float16),
]
FP8_PEERS = [(fmt, peer) for fmt, peer in PEERS if fmt.is_fp8]


@pytest.mark.parametrize(("fmt", "peer"), PEERS, ids=lambda v: getattr(v, "name", None))
def test_limits_are_those_of_an_independent_implementation(fmt: FloatFormat, peer: type) -> None:
    info = ml_dtypes.finfo(peer)
    assert fmt.bits == info.bits
    assert fmt.max == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.max_exponent == info.maxexp - 1
    assert fmt.min_exponent == info.minexp


def test_float32_limits_are_those_of_torch() -> None:
    info = torch.finfo(torch.float32)
    assert (FP32.max, FP32.smallest_normal, FP32.bits) == (info.max, info.tiny, info.bits)


@pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=lambda f: f.name)
def test_every_code_decodes_as_in_ml_dtypes(fmt: FloatFormat) -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(dict(FP8_PEERS)[fmt]).astype(np.float64)
    ours = torch.from_numpy(codes).view(fmt.torch_dtype).to(torch.float64).numpy()
    np.testing.assert_array_equal(ours, theirs)  # NaN equals NaN, and
    numbers = ~np.isnan(theirs)  # the sign of a NaN means nothing
    np.testing.assert_array_equal(np.signbit(ours)[numbers], np.signbit(theirs)[numbers])


@pytest.mark.parametrize(("fmt", "peer"), FP8_PEERS)
def test_derived_numbers_are_those_of_all_256_codes(fmt: FloatFormat, peer: type) -> None:
    values = np.arange(256, dtype=np.uint8).view(peer).astype(np.float64)
    finite = values[np.isfinite(values)]
    positive = np.unique(finite[finite > 0])
    assert (fmt.bits, fmt.is_fp8) == (8, True)
    assert fmt.max == positive[-1]
    assert fmt.smallest_subnormal == positive[0]
    # From the smallest normal on, spacing is relative: below it is that of the subnormals.
    assert fmt.smallest_normal == positive[2**fmt.mantissa_bits - 1]
    assert 2.0**fmt.max_exponent <= fmt.max < 2.0 ** (fmt.max_exponent + 1)
    assert fmt.has_infinity == bool(np.isinf(values).any())
    assert fmt.has_negative_zero == (np.signbit(values) & (values == 0)).any()
    assert fmt.saturation_threshold == (positive[-1] + _next_step(positive)) / 2


def _next_step(positive: np.ndarray) -> float:  # type: ignore[type-arg]
    return float(2 * positive[-1] - positive[-2])


def test_every_code_of_a_scale_decodes_as_in_ml_dtypes_and_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    ours = np.array([2.0 ** (int(c) - E8M0.bias) for c in codes])
    ours[E8M0.nan_code] = math.nan
    np.testing.assert_array_equal(ours, theirs)
    torchs = torch.from_numpy(codes).view(E8M0.torch_dtype).to(torch.float64).numpy()
    np.testing.assert_array_equal(torchs, theirs)
    assert (E8M0.min, E8M0.max) == (np.nanmin(theirs), np.nanmax(theirs))
    info = ml_dtypes.finfo(ml_dtypes.float8_e8m0fnu)
    assert (E8M0.exponent_bits, E8M0.max) == (info.bits, float(info.max))


def test_tf32_is_the_exponent_of_float32_and_the_significand_of_float16() -> None:
    assert (TF32.max_exponent, TF32.min_exponent) == (FP32.max_exponent, FP32.min_exponent)
    assert (TF32.mantissa_bits, TF32.bits) == (FP16.mantissa_bits, 19)
    assert TF32.torch_dtype is torch.float32


def test_formats_are_named_after_themselves() -> None:
    assert all(name == fmt.name for name, fmt in FORMATS.items())
    assert {f.name for f in FORMATS.values() if f.is_fp8} == set(FP8_FORMATS)


@pytest.mark.parametrize(("fmt", "peer"), FP8_PEERS, ids=lambda v: getattr(v, "name", None))
def test_saturation_starts_where_rounding_leaves_the_format(fmt: FloatFormat, peer: type) -> None:
    at = np.float32(fmt.saturation_threshold)
    below, above = np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf))
    rounded = np.array([below, at, above]).astype(peer).astype(np.float64)  # does not saturate
    leaves = ~np.isfinite(rounded)
    assert leaves.tolist() == [False, fmt.saturates_at_threshold, True]


def test_infinity_exists_in_ieee_formats_only() -> None:
    assert E5M2.has_infinity
    assert not E4M3.has_infinity
    assert math.isinf(float(torch.tensor(math.inf).to(E5M2.torch_dtype)))
