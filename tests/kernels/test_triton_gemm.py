"""Own products against float64 on the operands they see, for every awkward shape.

Without a GPU these run under Triton's interpreter, started by ``test_under_the_interpreter.py``;
what tensor cores do is in ``test_triton_gpu.py``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.formats import FP8_FORMATS, FloatFormat
from loka_toolkit.numerics.recipes import Accumulation

pytest.importorskip("triton")

from loka_toolkit.kernels.triton_bits import Encoding
from loka_toolkit.kernels.triton_cast import Layout, cast_by_line, cast_with_scale, interpreted
from loka_toolkit.kernels.triton_gemm import Tile, scaled_product, tile_for

INTERPRETED = interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

SHAPES = [
    (1, 13, 1),
    (17, 13, 1),
    (17, 39, 65),
    (1, 117, 33),
    (65, 117, 1),
    (17, 2613, 5),
    (70, 200, 130),
    (64, 128, 64),
]
EMPTY = [(0, 39, 5), (5, 39, 0), (5, 0, 7), (0, 0, 0)]
E4M3, E5M2 = FP8_FORMATS["e4m3"], FP8_FORMATS["e5m2"]
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

ERRORS = {Accumulation.FAST: 2.0**-8, Accumulation.PROMOTED_128: 2.0**-10}
"""Largest error of a tensor core's sum over sum |a||b|: each of K / 32 additions truncates 13 bits
below the largest exponent (numerics.accumulation); promotion ends that every 128 products."""


def operand(*shape: int, seed: int, heavy: bool = True) -> torch.Tensor:
    """Rows of very different size, heavy tails, both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if heavy:
        x = x * torch.exp(torch.randn(shape, generator=generator))
        x = x * torch.exp(3 * torch.randn(*shape[:-1], 1, generator=generator))
    return x.to(DEVICE)


def bound(
    a: torch.Tensor, b: torch.Tensor, accumulation: Accumulation, dtype: torch.dtype
) -> torch.Tensor:
    """Largest difference from float64 that sums and output explain, elementwise."""
    size = a.abs() @ b.abs()
    sums = a.shape[-1] * 2.0**-24 if INTERPRETED else ERRORS[accumulation] + 2.0**-22
    info = torch.finfo(dtype)
    return (sums + 2.0**-22 + info.eps) * size + info.smallest_normal * info.eps


def dequantized(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return data.to(torch.float64) * scale.to(torch.float64)


@pytest.mark.parametrize("accumulation", [Accumulation.FAST] if INTERPRETED else list(ERRORS))
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_awkward_shapes(
    shape: tuple[int, int, int], rowwise: bool, accumulation: Accumulation
) -> None:
    """Every format pair and output dtype in turn, into memory full of NaN, several times."""
    m, k, n = shape
    a, b = operand(m, k, seed=m + k), operand(n, k, seed=n + k + 1).mT
    for turn, (format_a, format_b) in enumerate(PAIRS):
        if INTERPRETED and turn % 2 != rowwise:  # slow there; a GPU takes every combination
            continue
        dtype = DTYPES[turn % 3]
        if rowwise:
            left, right = (
                cast_by_line(a, format_a, -1),
                cast_by_line(b, format_b, -2, Layout.COLUMN),
            )
        else:
            left = cast_with_scale(a, format_a)
            right = cast_with_scale(b, format_b, None, (Layout.COLUMN,))
        x, y = left.data(Layout.ROW), right.data(Layout.COLUMN)
        exact = dequantized(x, left.scale) @ dequantized(y, right.scale)
        if dtype is torch.float16:  # heavy tails overflow it; that is not what is tested here
            left_scale = left.scale * (1e3 / exact.abs().max().clamp(min=1e-30)).float()
            exact = dequantized(x, left_scale) @ dequantized(y, right.scale)
        else:
            left_scale = left.scale
        limit = bound(dequantized(x, left_scale), dequantized(y, right.scale), accumulation, dtype)
        first = None
        for _ in range(1 if INTERPRETED else 10):
            out = torch.full((m, n), math.nan, dtype=dtype, device=DEVICE)
            found = scaled_product(x, y, left_scale, right.scale, accumulation, dtype, out=out)
            assert found is out
            assert ((found.double() - exact).abs() <= limit).all()
            assert first is None or torch.equal(found, first)
            first = found


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_products_are_zero(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x = torch.empty(m, k, device=DEVICE).to(torch.float8_e4m3fn)
    y = torch.empty(k, n, device=DEVICE).to(torch.float8_e5m2)
    one = torch.ones((), device=DEVICE)
    out = torch.full((m, n), math.nan, dtype=torch.bfloat16, device=DEVICE)
    assert (scaled_product(x, y, one, one, Accumulation.FAST, torch.bfloat16, out=out) == 0).all()
    assert (scaled_product(x, y, one, one, Accumulation.FAST, torch.float32) == 0).all()


@pytest.mark.parametrize("batch", [(3,), (2, 2)])
def test_batches_and_any_strides(batch: tuple[int, ...]) -> None:
    """Slices, transposes and broadcasts of FP8 tensors, with scales per row and batch."""
    a = operand(*batch, 40, 100, seed=1).clamp(-400, 400).to(torch.float8_e4m3fn)
    b = operand(*batch, 90, 100, seed=2).clamp(-400, 400).to(torch.float8_e5m2)
    scale_a = operand(*batch, 40, 1, seed=3).abs()
    scale_b = operand(*batch, 1, 45, seed=4).abs()
    views = [
        (a[..., 1::2, 3:97], b[..., ::2, 3:97].mT, scale_a[..., 1::2, :], scale_b),
        (a.mT.contiguous().mT[..., :13], b.mT.contiguous()[..., :13, :], scale_a, scale_b.mean()),
        (
            a[..., :1, ::3].expand(*batch, 17, 34),
            b[..., :45, ::3].mT,
            scale_a[..., :17, :],
            scale_b,
        ),
    ]
    for x, y, of_rows, of_columns in views:
        exact = dequantized(x, of_rows) @ dequantized(y, of_columns)
        found = scaled_product(x, y, of_rows, of_columns, Accumulation.FAST, torch.float32)
        limit = bound(
            dequantized(x, of_rows), dequantized(y, of_columns), Accumulation.FAST, torch.float32
        )
        assert found.shape == exact.shape
        assert ((found.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=lambda f: f.name)
def test_every_code_is_multiplied_as_what_it_means(fmt: FloatFormat) -> None:
    """Each code times one: the product is the code's value, exactly, and NaN and Inf stay."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(fmt.torch_dtype)
    one = torch.ones(1, 1).to(fmt.torch_dtype).to(DEVICE)
    scale = torch.ones((), device=DEVICE)
    found = scaled_product(
        codes[:, None].to(DEVICE), one, scale, scale, Accumulation.FAST, torch.float32
    )
    expected = codes.float()[:, None]
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("scale_a", "scale_b"),
    [(2.0**-126, 2.0**126), (3e38, 1e-37), (2.0**-100, 2.0**-40), (2.0**120, 2.0**-14)],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_scales_at_the_ends_of_float32(scale_a: float, scale_b: float, swapped: bool) -> None:
    """Nothing between product and result over- or underflows where the result does not."""
    a, b = operand(20, 64, seed=5, heavy=False), operand(64, 20, seed=6, heavy=False)
    x, y = (cast_with_scale(v, E4M3, None, (Layout.ROW,)).data(Layout.ROW) for v in (a, b))
    y = y[:, :20]
    scales = [torch.tensor(s, device=DEVICE) for s in (scale_a, scale_b)]
    scales = scales[::-1] if swapped else scales
    exact = dequantized(x, scales[0]) @ dequantized(y, scales[1])
    found = scaled_product(x, y, *scales, Accumulation.PROMOTED_128, torch.float32)
    limit = bound(
        dequantized(x, scales[0]),
        dequantized(y, scales[1]),
        Accumulation.PROMOTED_128,
        torch.float32,
    )
    assert exact.float().isfinite().all() and (exact.float() != 0).all()
    assert ((found.double() - exact).abs() <= limit).all()


def test_poison_stays_where_it_belongs() -> None:
    a, b = operand(20, 64, seed=5), operand(64, 9, seed=6)
    a[2, 3], b[5, 7] = math.nan, math.inf
    left, right = cast_by_line(a, E4M3, -1), cast_by_line(b, E5M2, -2, Layout.COLUMN)
    out = scaled_product(
        left.data(Layout.ROW),
        right.data(Layout.COLUMN),
        left.scale,
        right.scale,
        Accumulation.FAST,
        torch.bfloat16,
    )
    poisoned = torch.zeros(20, 9, dtype=torch.bool)
    poisoned[2], poisoned[:, 7] = True, True
    assert torch.equal(~torch.isfinite(out.cpu()), poisoned)


@pytest.mark.parametrize("tile", [Tile(128, 128, 128, 8, 3), Tile(128, 256, 128, 8, 3)], ids=str)
def test_every_tile_gives_the_same_product(tile: Tile) -> None:
    """Tiles cut outputs, not sums: only what a program computes beside others changes."""
    a, b = operand(140, 200, seed=7), operand(200, 270, seed=8)
    left = cast_with_scale(a, E4M3).data(Layout.ROW)
    right = cast_with_scale(b, E4M3, None, (Layout.COLUMN,)).data(Layout.COLUMN)
    one = torch.ones((), device=DEVICE)
    left = left[:, :200]
    arguments: tuple[Any, ...] = (left, right[:200], one, one, Accumulation.FAST, torch.float32)
    default = scaled_product(*arguments)
    assert tile != tile_for(140, 270, 200)
    other = scaled_product(*arguments, tile=tile)
    limit = bound(left.double(), right[:200].double(), Accumulation.FAST, torch.float32)
    assert ((other.double() - default.double()).abs() <= limit).all()
    assert other.isfinite().all()


def test_tiles_are_chosen_by_shape_alone() -> None:
    for shape in ((1, 1, 13), (8192, 1024, 1024), (256, 8192, 64), (16384, 4096, 4096)):
        tile = tile_for(*shape)
        assert tile == tile_for(*shape)
        assert tile.k == 128 and tile.m >= 64 and tile.n >= 64
    assert tile_for(1, 1, 13) == Tile(64, 64, 128, 4, 4)
    assert tile_for(16384, 4096, 4096).n == 256


def test_an_encoding_is_that_of_the_format() -> None:
    assert Encoding.of(E4M3) == Encoding(4, 3, 7, 1, Encoding.of(E4M3).per_max_bits)
    per_max = torch.tensor(Encoding.of(E4M3).per_max_bits).view(torch.float64)
    assert float(per_max) == 1 / 448


def test_what_cannot_be_multiplied_is_refused() -> None:
    x = torch.ones(16, 16, device=DEVICE).to(torch.float8_e4m3fn)
    one = torch.ones((), device=DEVICE)
    fast, fp32 = Accumulation.FAST, torch.float32
    with pytest.raises(ConfigurationError, match=r"cannot multiply \(16, 16\) by \(8, 16\)"):
        scaled_product(x, x[:8], one, one, fast, fp32)
    with pytest.raises(ConfigurationError, match="see promoted-128"):
        scaled_product(x, x, one, one, Accumulation.FP32, fp32)
    with pytest.raises(ConfigurationError, match=r"cannot write torch\.float64"):
        scaled_product(x, x, one, one, fast, torch.float64)
    with pytest.raises(ConfigurationError, match=r"not torch\.float32"):
        scaled_product(x.float(), x, one, one, fast, fp32)
    with pytest.raises(ConfigurationError, match="scales are float32"):
        scaled_product(x, x, one.double(), one, fast, fp32)
    with pytest.raises(ConfigurationError, match=r"scale of shape \(16, 1\) does not fit"):
        scaled_product(x[:8], x, torch.ones(16, 1, device=DEVICE), one, fast, fp32)
    with pytest.raises(ConfigurationError, match="out must be a contiguous"):
        scaled_product(x, x, one, one, fast, fp32, out=torch.empty(16, 8, device=DEVICE))
