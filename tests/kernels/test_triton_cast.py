"""Own casts, bit for bit: every 16-bit input, every format, any strides, padding and specials.

Without a GPU these run under Triton's interpreter, started by ``test_under_the_interpreter.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.casting import cast
from loka_toolkit.numerics.formats import BF16, E4M3, E5M2
from loka_toolkit.numerics.recipes import Scaling
from loka_toolkit.numerics.scaling import operand_scale

pytest.importorskip("triton")

from loka_toolkit.kernels.triton_cast import (
    LONGEST_LINE,
    Layout,
    amax_bits,
    cast_by_line,
    cast_with_scale,
    interpreted,
)

INTERPRETED = interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

BOTH = (Layout.ROW, Layout.COLUMN)
SIXTEEN_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).reshape(256, 256)
SCALES = [1.0, 2.0**-5, 2.0**70, 0.037, 3.1e5, 1e-38, 2.0**-126, 1e-44, math.nan, math.inf]
CodesOf = Callable[[torch.Tensor], torch.Tensor]


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=DEVICE)


def spread(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of both signs over many binades, with zeros and what is no number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp(4 * torch.randn(shape, generator=generator))
    odd = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40]
    for index, value in enumerate(odd[: x.numel() // 20]):
        x.view(-1)[index * 17 % x.numel()] = value
    return x.to(dtype).to(DEVICE)


def raw(stored: torch.Tensor) -> torch.Tensor:
    return stored.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.bfloat16, s) for s in SCALES] + [(torch.float16, s) for s in (1.0, 0.037, 1e-6)],
)
def test_every_16_bit_value_in_both_layouts(
    opinion: Any, dtype: torch.dtype, scale: float, codes_of: CodesOf
) -> None:
    every = SIXTEEN_BITS.view(dtype).to(DEVICE)
    divisor = number(scale)
    found = cast_with_scale(every, opinion.fmt, divisor, BOTH)
    expected = opinion.codes(every, divisor)
    assert torch.equal(expected, codes_of(cast(every.cpu(), opinion.fmt, divisor.cpu())))
    for copy in (found.row, found.column):
        assert copy is not None and copy.dtype == opinion.fmt.torch_dtype
        assert torch.equal(raw(copy), expected)
    assert found.data(Layout.ROW).stride() == (256, 1)
    assert found.data(Layout.COLUMN).stride() == (1, 256)
    assert torch.equal(found.scale.cpu().view(torch.int32), divisor.cpu().view(torch.int32))


@given(
    patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    scale=st.floats(2.0**-120, 2.0**120, width=32),
)
@settings(max_examples=25)
def test_any_float32_pattern(opinion: Any, patterns: list[int], scale: float) -> None:
    x = torch.from_numpy(np.array([patterns], dtype=np.uint32).view(np.float32)).to(DEVICE)
    found = cast_with_scale(x, opinion.fmt, number(scale))
    expected = opinion.codes(x, number(scale))
    assert torch.equal(raw(found.data(Layout.ROW))[:, : x.shape[1]], expected)


@given(exponent=st.integers(-100, 100), steps=st.integers(-3, 3))
@settings(max_examples=15)
def test_midpoints_and_their_neighbours(opinion: Any, exponent: int, steps: int) -> None:
    """Ties go to the even code, one unit in the last place beside a tie does not."""
    bits = opinion.midpoints.view(np.int32) + steps
    x = torch.from_numpy(bits.view(np.float32))[None]
    x = (torch.cat([x, -x]) * 2.0**exponent).to(DEVICE)
    scale = number(2.0**exponent)
    found = cast_with_scale(x, opinion.fmt, scale)
    assert torch.equal(raw(found.data(Layout.ROW))[:, : x.shape[1]], opinion.codes(x, scale))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1), torch.float32),
        ((13, 39), torch.float16),
        ((17, 117), torch.float32),
        ((3, 2613), torch.bfloat16),
        ((1303, 3), torch.float32),
    ],
)
@pytest.mark.parametrize("dim", [-1, -2])
def test_a_scale_per_row_or_column_is_that_of_numerics(
    opinion: Any, shape: tuple[int, int], dtype: torch.dtype, dim: int
) -> None:
    x = spread(*shape, seed=shape[1], dtype=dtype)
    scale = operand_scale(x.cpu(), opinion.fmt, Scaling.ROWWISE, "a" if dim == -1 else "b")
    expected = opinion.codes(x, scale)
    for strided in (x, x.mT.contiguous().mT):
        for layout in Layout:
            found = cast_by_line(strided, opinion.fmt, dim, layout)
            rows, columns = shape
            assert torch.equal(found.scale.cpu()[:rows, :columns], scale)
            assert torch.equal(raw(found.data(layout))[:rows, :columns], expected)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1), torch.float16),
        ((13, 39), torch.float32),
        ((300, 117), torch.bfloat16),
        ((2, 2, 3, 70), torch.float32),
    ],
)
def test_one_scale_from_the_amax_is_that_of_numerics(
    opinion: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = spread(*shape, seed=7, dtype=dtype)
    scale = operand_scale(x.cpu(), opinion.fmt, Scaling.TENSORWISE, "a")
    found = cast_with_scale(x, opinion.fmt, None, BOTH)
    assert found.scale.shape == () and torch.equal(found.scale.cpu(), scale)
    for layout in BOTH:
        stored = raw(found.data(layout))[..., : shape[-2], : shape[-1]]
        assert torch.equal(stored, opinion.codes(x, scale))


@pytest.mark.parametrize("length", [LONGEST_LINE - 5, LONGEST_LINE + 5])
@pytest.mark.parametrize("contiguous", [True, False])
def test_lines_that_do_and_do_not_fit_a_program(
    length: int, contiguous: bool, codes_of: CodesOf
) -> None:
    x = spread(2, length, seed=length)
    x = x if contiguous else x.mT.contiguous().mT
    scale = operand_scale(x.cpu(), E5M2, Scaling.ROWWISE, "a")
    found = cast_by_line(x, E5M2, -1)
    assert torch.equal(found.scale.cpu(), scale)
    expected = codes_of(cast(x.cpu(), E5M2, scale))
    assert torch.equal(raw(found.data(Layout.ROW))[:, :length], expected)


@pytest.mark.parametrize("poison", [0.0, 1e-40, 2.0**-149, 3e38, math.inf, math.nan])
def test_odd_amax(opinion: Any, poison: float) -> None:
    """Zero, tiny, huge and no finite amax: the rules of numerics.scaling, never an Inf scale."""
    x = torch.full((4, 48), poison, device=DEVICE)
    scale = operand_scale(x.cpu(), opinion.fmt, Scaling.TENSORWISE, "a")
    assert torch.isfinite(scale)
    for found in (cast_with_scale(x, opinion.fmt), cast_by_line(x, opinion.fmt, -1)):
        assert (found.scale.cpu() == scale).all()
        assert torch.equal(raw(found.data(Layout.ROW)), opinion.codes(x, scale))


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("alignment", [(1, 1), (16, 16), (32, 1)])
def test_padding_is_zero_whatever_the_scale(layout: Layout, alignment: tuple[int, int]) -> None:
    x = spread(2, 13, 39, seed=3)
    for found in (
        cast_with_scale(x, E4M3, number(math.nan), (layout,), alignment=alignment),
        cast_with_scale(x, E4M3, None, (layout,), alignment=alignment),
        cast_by_line(x, E4M3, -1, layout, alignment=alignment),
        cast_by_line(x, E4M3, -2, layout, alignment=alignment),
    ):
        codes = raw(found.data(layout))
        rows, columns = codes.shape[1:]
        assert rows % alignment[0] == columns % alignment[1] == 0
        assert (columns if layout is Layout.ROW else rows) % 16 == 0
        assert rows < 13 + 32 and columns < 39 + 16
        assert codes[:, 13:].sum() == codes[:, :, 39:].sum() == 0
        scale = found.scale.cpu()
        if scale.ndim:
            assert scale.shape in {(2, rows, 1), (2, 1, columns)}
            assert (
                (scale[:, 13:] == 1).all() if scale.shape[1] > 1 else (scale[..., 39:] == 1).all()
            )


def test_any_strides() -> None:
    base = spread(3, 40, 50, seed=5)
    for x in (
        base[::2, 3:37:3, 1::2],
        base.permute(1, 0, 2)[5:8],
        base.permute(2, 1, 0)[::13],
        base[:, :1].expand(3, 7, 50),
        base[..., :1].expand(3, 40, 33),
        base[0].mT[:37],
    ):
        row, column = (operand_scale(x.cpu(), E5M2, Scaling.ROWWISE, side) for side in ("a", "b"))
        for dim, scale in ((-1, row), (-2, column)):
            got = cast_by_line(x, E5M2, dim, Layout.COLUMN).data(Layout.COLUMN)
            tight = cast_by_line(x.contiguous(), E5M2, dim, Layout.COLUMN).data(Layout.COLUMN)
            assert torch.equal(raw(got), raw(tight))
            part = got[..., : x.shape[-2], : x.shape[-1]].cpu().float()
            expected = cast(x.cpu(), E5M2, scale).float()
            torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 39), (39, 0), (0, 0), (3, 0, 5), (0, 4, 4)])
def test_nothing_to_cast(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=DEVICE)
    for found in (
        cast_with_scale(x, E4M3, None, BOTH),
        cast_by_line(x, E4M3, -1),
        cast_by_line(x, E4M3, -2),
    ):
        assert (found.scale == 1).all()
        assert found.row is not None and found.row.shape[:-1] == shape[:-1]
        assert (raw(found.row) == 0).all()
    assert int(amax_bits(x)) == 0


def test_the_operand_stays_as_it_was_and_repetitions_agree() -> None:
    x = spread(65, 300, seed=11, dtype=torch.bfloat16)
    before = x.clone()
    first = cast_with_scale(x, E4M3, None, BOTH)
    for _ in range(3 if INTERPRETED else 50):
        again = cast_with_scale(x, E4M3, None, BOTH)
        assert torch.equal(again.scale, first.scale)
        for layout in BOTH:
            assert torch.equal(raw(again.data(layout)), raw(first.data(layout)))
    assert torch.equal(x.view(torch.int16), before.view(torch.int16))


def test_what_cannot_be_cast_is_refused() -> None:
    x = torch.ones(4, 4, device=DEVICE)
    with pytest.raises(ConfigurationError, match=r"float64 tensor of shape \(4, 4\)"):
        cast_with_scale(x.double(), E4M3)
    with pytest.raises(ConfigurationError, match="at least two dimensions"):
        cast_by_line(x[0], E4M3, -1)
    with pytest.raises(ConfigurationError, match="bf16 has 16 bits"):
        cast_with_scale(x, BF16)
    with pytest.raises(ConfigurationError, match=r"one scale is wanted.*\(4, 1\)"):
        cast_with_scale(x, E4M3, torch.ones(4, 1, device=DEVICE))
    with pytest.raises(ConfigurationError, match="writes nothing"):
        cast_with_scale(x, E4M3, None, ())
    with pytest.raises(ConfigurationError, match="dim = 0"):
        cast_by_line(x, E4M3, 0)
    with pytest.raises(ConfigurationError, match="no column-major copy"):
        cast_with_scale(x, E4M3).data(Layout.COLUMN)
