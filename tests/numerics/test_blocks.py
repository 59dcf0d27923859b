"""Block scales: 1x128, 128x128 and mxfp8's 1x32, against loops over blocks in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_toolkit.numerics.accumulation import accumulate
from loka_toolkit.numerics.blocks import block_of, contraction_block, spread
from loka_toolkit.numerics.casting import cast, cast_events
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.formats import E4M3, E5M2, E8M0, FP8_FORMATS, FloatFormat
from loka_toolkit.numerics.metrics import product_error
from loka_toolkit.numerics.recipes import Accumulation, Scaling, all_recipes, parse_recipe
from loka_toolkit.numerics.scaling import (
    SMALLEST_SCALE,
    block_amax,
    block_scale,
    mx_scale,
    operand_scale,
    saturation_limit,
)

Draw = Callable[..., torch.Tensor]
Array = npt.NDArray[np.float64]
PEERS: dict[str, type] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
OCP = [E4M3, E5M2]
BLOCK_RECIPES = [n for n, r in all_recipes().items() if r.block_length and not r.is_hybrid]
SHAPES = [(13, 39, 5), (3, 128, 130), (5, 300, 17), (2, 129, 1), (1, 31, 257)]


def peer_cast(values: Array, fmt: str) -> Array:
    limit = float(ml_dtypes.finfo(PEERS[fmt]).max)
    clipped = np.clip(values, -limit, limit).astype(np.float32)
    return clipped.astype(PEERS[fmt]).astype(np.float64)


def looped(x: torch.Tensor, fmt: str, rows: int, columns: int, *, mx: bool) -> tuple[Array, Array]:
    """Return stored values and the scale of every element, one block after the other."""
    wide = x.double().numpy()
    stored, scales = np.zeros_like(wide), np.ones_like(wide)
    largest = float(ml_dtypes.finfo(PEERS[fmt]).max)
    for i in range(0, wide.shape[0], rows):
        for j in range(0, wide.shape[1], columns):
            part = wide[i : i + rows, j : j + columns]
            amax = np.abs(part).max()
            if mx:
                scale = 2.0 ** (math.floor(math.log2(amax)) - math.floor(math.log2(largest)))
            else:
                scale = float(np.float32(amax / largest))
            quotient = (part.astype(np.float32) / np.float32(scale)).astype(np.float64)
            stored[i : i + rows, j : j + columns] = peer_cast(quotient, fmt)
            scales[i : i + rows, j : j + columns] = scale
    return stored, scales


@pytest.mark.parametrize("name", BLOCK_RECIPES)
@pytest.mark.parametrize("parameter", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_a_loop_over_blocks(
    name: str, parameter: bool, shape: tuple[int, int, int], heavy_tailed: Draw
) -> None:
    """With float32 sums: rounded once. With promoted-128: a 14-bit sum in each block of 128."""
    m, k, n = shape
    recipe = parse_recipe(name)
    mx = recipe.scaling is Scaling.MXFP8
    length = 32 if mx else 128
    across = 128 if parameter and not mx else 1
    a, b = heavy_tailed(m, k), heavy_tailed(k, n) * 1e-3
    left, scale_a = looped(a, recipe.format_a, 1, length, mx=mx)
    right, scale_b = looped(b, recipe.format_b, length, across, mx=mx)
    theirs = (left * scale_a) @ (right * scale_b)
    ours = emulate(a, b, recipe, parameter=parameter).double().numpy()
    size = np.abs(left * scale_a) @ np.abs(right * scale_b)
    exact = recipe.accumulation is Accumulation.FP32
    # Truncation of 4 steps of 32 products at 13 bits below the largest: 5 * 32 * 2**-13 at worst,
    # of the largest product and not of the sum of all, which bounds it from above.
    bound = 2.0**-23 if exact else 2.0**-6
    assert (np.abs(ours - theirs) <= bound * size).all()
    if not exact:
        assert np.abs(ours - theirs).sum() <= 2.0**-10 * size.sum()


@pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128), (1, 32), (16, 48)])
def test_scales_and_casts_of_ragged_blocks(
    fmt: FloatFormat, block: tuple[int, int], heavy_tailed: Draw
) -> None:
    x = heavy_tailed(131, 300)
    stored, scales = looped(x, fmt.name, *block, mx=False)
    found = block_scale(x, fmt, Scaling.BLOCKWISE, block)
    assert found.shape == (math.ceil(131 / block[0]), math.ceil(300 / block[1]))
    by_element = spread(found, block, x.shape)
    np.testing.assert_array_equal(by_element.double().numpy(), scales)
    np.testing.assert_array_equal(cast(x, fmt, by_element).double().numpy(), stored)


def test_batches_strides_and_dtypes(heavy_tailed: Draw) -> None:
    x = heavy_tailed(3, 40, 70).bfloat16()
    whole = block_amax(x, (1, 32))
    assert whole.shape == (3, 40, 3) and whole.dtype == torch.float32
    for i in range(3):
        torch.testing.assert_close(block_amax(x[i].mT, (32, 1)).mT, whole[i], rtol=0, atol=0)
    spaced = torch.stack([x, -2 * x], dim=-1)[..., 0]
    torch.testing.assert_close(block_amax(spaced, (1, 32)), whole, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 40), (5, 0), (0, 0)])
def test_nothing_has_no_scales(shape: tuple[int, int]) -> None:
    x = torch.empty(shape)
    for scaling in (Scaling.BLOCKWISE, Scaling.MXFP8):
        scale = operand_scale(x, E4M3, scaling, "a")
        length = scaling.block_length
        assert length is not None
        assert scale.shape == (shape[0], math.ceil(shape[1] / length))
        by_element = spread(scale, (1, length), x.shape)
        assert cast(x, E4M3, by_element).shape == shape
    recipe = parse_recipe("e4m3/blockwise/promoted-128")
    product = emulate(x, torch.ones(shape[1], 3), recipe)
    assert product.shape == (shape[0], 3) and (product == 0).all()


def test_which_entries_share_a_scale() -> None:
    """DeepSeek-V3: activations and gradients 1x128 along the contraction, weights 128x128."""
    assert block_of(Scaling.BLOCKWISE, "a", parameter=False) == (1, 128)
    assert block_of(Scaling.BLOCKWISE, "b", parameter=False) == (128, 1)
    assert block_of(Scaling.BLOCKWISE, "b", parameter=True) == (128, 128)
    for parameter in (False, True):
        assert block_of(Scaling.MXFP8, "a", parameter=parameter) == (1, 32)
        assert block_of(Scaling.MXFP8, "b", parameter=parameter) == (32, 1)
        assert block_of(Scaling.ROWWISE, "b", parameter=parameter) is None
    assert contraction_block(Scaling.BLOCKWISE, "b") == (128, 1)


@pytest.mark.parametrize("scaling", [Scaling.BLOCKWISE, Scaling.MXFP8])
def test_zero_tiny_and_poisoned_blocks(scaling: Scaling) -> None:
    """Each block by itself: zeros get 1, tiny ones the smallest scale, poison does not spread."""
    length = scaling.block_length
    assert length is not None
    x = torch.zeros(1, 5 * length)
    x[0, length] = 1e-40
    x[0, 2 * length : 2 * length + 2] = torch.tensor([math.inf, 3.0])
    x[0, 3 * length : 3 * length + 2] = torch.tensor([math.nan, -5.0])
    x[0, 4 * length] = 2.0
    scale = operand_scale(x, E4M3, scaling, "a")
    smallest = SMALLEST_SCALE if scaling is Scaling.BLOCKWISE else E8M0.min
    assert scale[0, 0] == 1.0 and scale[0, 1] == smallest
    stored = cast(x, E4M3, spread(scale, (1, length), x.shape)).float().reshape(5, length)
    assert (stored[0] == 0).all()
    assert torch.isfinite(stored[1]).all()
    assert stored[2, 0].isnan() and torch.isfinite(stored[2, 1:]).all() and stored[2, 1] > 0
    assert stored[3, 0].isnan() and torch.isfinite(stored[3, 1:]).all() and stored[3, 1] < 0
    assert stored[4, 0] == (448 if scaling is Scaling.BLOCKWISE else 256)
    poisoned = scale.new_tensor([[math.inf, math.nan]])
    assert mx_scale(poisoned, E4M3).isnan().all()


@pytest.mark.parametrize("fmt", OCP, ids=lambda f: f.name)
@given(amax=st.floats(min_value=2.0**-149, max_value=2.0**127, width=32))
@settings(max_examples=200, deadline=None)
def test_mx_scales_are_those_of_the_specification(fmt: FloatFormat, amax: float) -> None:
    """OCP MX 1.0, section 6.3: X = 2**(floor(log2 amax) - emax), here in exact arithmetic."""
    numerator, denominator = amax.as_integer_ratio()
    floor = numerator.bit_length() - denominator.bit_length()
    floor -= numerator << max(-floor, 0) < denominator << max(floor, 0)
    emax = {"e4m3": 8, "e5m2": 15}[fmt.name]
    expected = 2.0 ** max(floor - emax, -127)
    scale = mx_scale(torch.tensor(amax), fmt)
    assert float(scale) == expected
    # e8m0 stores it exactly, in torch as in ml_dtypes.
    assert float(scale.to(E8M0.torch_dtype).double()) == expected
    assert float(np.float32(expected).astype(ml_dtypes.float8_e8m0fnu)) == expected


def test_every_e8m0_scale_survives_its_code() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    scales = torch.ldexp(torch.ones(255, dtype=torch.float64), codes.to(torch.int32) - E8M0.bias)
    stored = scales.to(torch.float32).to(E8M0.torch_dtype)
    assert torch.equal(stored.view(torch.uint8), codes)
    nan = torch.tensor([math.nan]).to(E8M0.torch_dtype)
    assert nan.view(torch.uint8).item() == E8M0.nan_code


@pytest.mark.parametrize("fmt", OCP, ids=lambda f: f.name)
def test_mx_clips_the_last_quarter_of_the_largest_binade(fmt: FloatFormat) -> None:
    """Elements above 1.75 * 2**emax saturate and lose an eighth at most; it is no saturation."""
    x = torch.tensor([[1.0, 1.75, 1.8, 1.9, 2.0 - 2.0**-20, -1.99]])
    scale = operand_scale(x, fmt, Scaling.MXFP8, "a")
    assert scale.item() == 2.0**-fmt.max_exponent
    back = cast(x, fmt, scale).float() * scale
    assert back.tolist() == [[1.0, 1.75, 1.75, 1.75, 1.75, -1.75]]
    limit = saturation_limit(fmt, Scaling.MXFP8)
    assert cast_events(x, fmt, scale, saturated_from=limit).saturated == 0
    assert cast_events(x, fmt, scale / 2, saturated_from=limit).saturated == 6
    threshold = 1.8125 if fmt is E4M3 else 1.875
    assert cast_events(x, fmt, scale).saturated == int((x.abs() >= threshold).sum())
    assert saturation_limit(fmt, Scaling.STATIC) is None


@pytest.mark.parametrize("name", [n for n in BLOCK_RECIPES if "mxfp8" in n])
def test_mx_products_against_microscaling_formulas(name: str, heavy_tailed: Draw) -> None:
    """The formulas of Microsoft's microxcaling (mx_ops.py), written with ml_dtypes' formats."""
    recipe = parse_recipe(name)
    a, b = heavy_tailed(21, 117), heavy_tailed(117, 9) * 1e4

    def quantized(x: Array, fmt: FloatFormat) -> Array:
        padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).astype(np.float32)
        blocks = padded.reshape(x.shape[0], -1, 32)
        shared = np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True)))
        scale = np.exp2(shared - fmt.max_exponent).astype(ml_dtypes.float8_e8m0fnu)
        wide = scale.astype(np.float64)
        element = peer_cast(blocks / wide, fmt.name)
        return np.asarray((element * wide).reshape(x.shape[0], -1)[:, : x.shape[1]])

    left = quantized(a.numpy(), recipe.formats[0])
    right = quantized(b.numpy().T, recipe.formats[1]).T
    ours = emulate(a, b, recipe).double().numpy()
    np.testing.assert_allclose(ours, left @ right, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize(
    ("name", "floor"),
    [
        ("e4m3/blockwise/fp32", 28.6),
        ("e4m3/blockwise/promoted-128", 28.6),
        ("e5m2/blockwise/fp32", 22.6),
        ("e4m3fnuz/rowwise/fp32", 28.6),
        ("e5m2fnuz/tensorwise/fp32", 22.6),
        ("bf16-e4m3/tensorwise/fp32", 31.6),
        ("e5m2-fp16/rowwise/fp32", 25.6),
        ("e4m3/mxfp8/fp32", 27.7),
        ("e5m2/mxfp8/fp32", 22.3),
    ],
)
def test_floors_of_normal_operands(name: str, floor: float, normal: Draw) -> None:
    """28.6 and 22.6 dB with two FP8 operands, 3 dB more with one, 0.3 to 0.9 less where MX clips.

    120 x 96 outputs scatter by less than 0.2 dB; a block of 128 normals casts its amax exactly,
    which is worth up to 0.3 dB.
    """
    a, b = normal(120, 512), normal(512, 96)
    error = product_error(a.double() @ b.double(), emulate(a, b, parse_recipe(name)))
    assert error.sqnr_db == pytest.approx(floor, abs=0.5)


def test_blocks_hold_what_a_tensor_scale_loses(normal: Draw) -> None:
    """Raw counts in the first 128 columns, an embedding 1e6 smaller in the others."""
    a, b = normal(64, 256), normal(256, 48)
    a[:, 128:] *= 1e-6
    b[:128] *= 1e-6
    exact = a.double() @ b.double()
    found = {}
    for name in ("e4m3/tensorwise/fp32", "e4m3/rowwise/fp32", "e4m3/blockwise/fp32"):
        found[name] = product_error(exact, emulate(a, b, parse_recipe(name))).sqnr_db
    assert found["e4m3/blockwise/fp32"] == pytest.approx(28.8, abs=0.6)
    assert found["e4m3/rowwise/fp32"] < 10  # type: ignore[operator]


def test_selected_columns_of_a_parameter_keep_the_scales_of_whole_blocks(
    heavy_tailed: Draw,
) -> None:
    """A block spans 128 columns; a sample of some of them must not compute its own amax."""
    a, b = heavy_tailed(7, 300), heavy_tailed(300, 260)
    recipe = parse_recipe("e4m3/blockwise/promoted-128")
    full = emulate(a, b, recipe, parameter=True)
    columns = [1, 130, 255, 259]
    scale_b = operand_scale(b, E4M3, Scaling.BLOCKWISE, "b", parameter=True)
    part = emulate(a[2:4], b[:, columns], recipe, scale_b=scale_b[:, columns])
    torch.testing.assert_close(part, full[2:4][:, columns], rtol=0, atol=0)
    own = emulate(a[2:4], b[:, columns], recipe, parameter=True)
    assert not torch.equal(own, part)


def test_a_block_sum_is_promoted_by_itself(normal: Draw) -> None:
    """One block of 128 is the plain 14-bit sum; two are added in float32 after scaling."""
    a, b = normal(4, 256), normal(256, 3)
    recipe = parse_recipe("e4m3/blockwise/promoted-128")
    total = torch.zeros(4, 3)
    for span in (slice(0, 128), slice(128, 256)):
        left, right = a[:, span], b[span]
        scale_a = left.abs().amax(1, keepdim=True) / 448
        scale_b = right.abs().amax(0, keepdim=True) / 448
        part = accumulate(cast(left, E4M3, scale_a), cast(right, E4M3, scale_b), Accumulation.FAST)
        total += part * scale_a * scale_b
    # three float32 roundings of the loop against one of the fused kernel
    torch.testing.assert_close(emulate(a, b, recipe), total, rtol=2e-6, atol=2e-6)
