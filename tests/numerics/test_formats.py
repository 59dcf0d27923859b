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
    E5M2,
    FP8_FORMATS,
    FP16,
    FP32,
    FloatFormat,
    Specials,
)

PEERS: list[tuple[FloatFormat, type]] = [
    (E4M3, ml_dtypes.float8_e4m3fn),
    (E5M2, ml_dtypes.float8_e5m2),
    (BF16, ml_dtypes.bfloat16),
    (FP16, np.float16),
]


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
    peer = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fmt.name]
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(peer).astype(np.float64)
    ours = torch.from_numpy(codes).view(fmt.torch_dtype).to(torch.float64).numpy()
    np.testing.assert_array_equal(ours, theirs)  # NaN equals NaN, and
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs))  # -0 is not 0


@pytest.mark.parametrize(("fmt", "peer"), PEERS[:2], ids=lambda v: getattr(v, "name", None))
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


def test_a_format_without_negative_zero_is_data() -> None:
    fnuz = FloatFormat("x", 4, 3, 8, Specials.NEGATIVE_ZERO_NAN, torch.float8_e4m3fnuz)
    info = ml_dtypes.finfo(ml_dtypes.float8_e4m3fnuz)
    assert (fnuz.max, fnuz.smallest_subnormal) == (240.0, float(info.smallest_subnormal))
