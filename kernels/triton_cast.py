"""Casts into FP8 as own Triton kernels: scale, round, lay out and pad in one pass over the operand.

Bit for bit what :func:`loka_toolkit.numerics.casting.cast` returns with the scales of
:mod:`loka_toolkit.numerics.scaling`, on a GPU and, where ``TRITON_INTERPRET=1`` was set before
Triton was imported, under its interpreter; a NaN is always the same code (see
:mod:`loka_toolkit.kernels.triton_bits`). Values are divided by the scale with correct rounding
(``div_rn``): multiplying by the reciprocal, and Triton's plain ``/``, which is approximate, give
other codes next to midpoints.

How often the operand is read:

- static scale: once;
- scale per line, lines of at most 8,192 elements: once, the line stays in registers;
- any other: twice, once for the amax (maxima of bits by atomics, so in any order the same result).

Scales stay on the device; nothing waits for it. Importing this module imports Triton.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.kernels.triton_bits import Encoding
from loka_toolkit.kernels.triton_cast_kernels import amax_tiles, cast_lines, cast_tiles
from loka_toolkit.numerics.formats import FloatFormat

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What is cast; float64 would have to be divided in float64."""

ALIGNMENT = 16
"""Lengths along the contiguous dimension become multiples of it: FP8 tensor cores and loads of 16
bytes need that."""

LONGEST_LINE = 8192
"""Elements of a line that one program keeps in registers."""

_TILE_ELEMENTS = LONGEST_LINE
_LONG_SIDE = 256
_MOST_LINES = 256
_FEWEST_ELEMENTS = 2048
_FILLS_A_GPU = 256


class Layout(enum.Enum):
    """Which of the last two dimensions is contiguous."""

    ROW = "row"
    COLUMN = "column"


@dataclasses.dataclass(frozen=True)
class ScaledCast:
    """A tensor in FP8.

    Attributes:
        row: [.., R', C'] row-major, or None if not asked for.
        column: [.., R', C'] column-major, or None if not asked for.
        scale: Decode scale, float32: [] for one scale per tensor, [.., R', 1] or [.., 1, C'] for
            one per row or column, 1 for those that padding added.
    """

    row: torch.Tensor | None
    column: torch.Tensor | None
    scale: torch.Tensor

    def data(self, layout: Layout) -> torch.Tensor:
        """Return the copy in a layout.

        Raises:
            ConfigurationError: If it was not written.
        """
        found = self.row if layout is Layout.ROW else self.column
        if found is None:
            raise ConfigurationError(f"the cast wrote no {layout.value}-major copy; ask for one")
        return found


def cast_with_scale(
    x: torch.Tensor,
    fmt: FloatFormat,
    scale: torch.Tensor | None = None,
    layouts: tuple[Layout, ...] = (Layout.ROW,),
    *,
    alignment: tuple[int, int] = (1, 1),
) -> ScaledCast:
    """Cast with one scale for the whole tensor, into one layout or both in the same pass.

    Args:
        x: [.., R, C], any strides, one of ``INPUT_DTYPES``.
        fmt: A format of 8 bits.
        scale: Decode scale, one element, on the device of ``x``; None takes it from the amax.
        layouts: Layouts to write.
        alignment: R and C are padded with zeros to multiples of these, and beyond that the
            contiguous one of each layout to a multiple of 16.

    Raises:
        ConfigurationError: If the dtype is not one of these, ``x`` has fewer than two dimensions,
            the scale is not one number, or no layout is asked for.
    """
    lines = _checked(x, fmt)
    if not layouts:
        raise ConfigurationError("layouts = () writes nothing; ask for Layout.ROW or Layout.COLUMN")
    if scale is not None and scale.numel() != 1:
        raise ConfigurationError(
            f"one scale is wanted, not a tensor of shape {tuple(scale.shape)}; scales per row or "
            "column are computed by cast_by_line"
        )
    row, column = (
        _Target.of(x, fmt, layout, alignment) if layout in layouts else None
        for layout in (Layout.ROW, Layout.COLUMN)
    )
    out = torch.ones((), dtype=torch.float32, device=x.device)
    if scale is not None:
        out = scale.detach().to(device=x.device, dtype=torch.float32).reshape(())
    if x.numel() > 0:
        amax = None if scale is not None else _amax_bits(lines, per_line=False)
        _launch_tiles(lines, fmt, out, amax, (0, 0), row, column)
    return ScaledCast(_data(row), _data(column), out)


def cast_by_line(
    x: torch.Tensor,
    fmt: FloatFormat,
    dim: int,
    layout: Layout = Layout.ROW,
    *,
    alignment: tuple[int, int] = (1, 1),
) -> ScaledCast:
    """Cast with one scale per row or per column, computed on the way.

    Args:
        x: [.., R, C], any strides, one of ``INPUT_DTYPES``.
        fmt: A format of 8 bits.
        dim: The dimension reduced, -1 for one scale per row and -2 for one per column.
        layout: Layout to write.
        alignment: As for :func:`cast_with_scale`.

    Raises:
        ConfigurationError: If the dtype is not one of these, ``x`` has fewer than two dimensions,
            or ``dim`` is neither.
    """
    if dim not in (-1, -2):
        raise ConfigurationError(f"dim = {dim} must be -1 (scale per row) or -2 (per column)")
    by_row = dim == -1
    lines = _checked(x if by_row else x.mT, fmt)
    target = _Target.of(x, fmt, layout, alignment)
    count = target.rows if by_row else target.columns
    shape = (*x.shape[:-2], count, 1) if by_row else (*x.shape[:-2], 1, count)
    scale = torch.ones(shape, dtype=torch.float32, device=x.device)
    if x.numel() > 0:
        seen = target if by_row else target.transposed()
        block = _whole_lines(lines, seen)
        if block is not None:
            _launch_lines(lines, fmt, scale, seen, block)
        else:
            amax = _amax_bits(lines, per_line=True)
            _launch_tiles(lines, fmt, scale, amax, (count, 1), seen, None)
    if layout is Layout.ROW:
        return ScaledCast(target.data, None, scale)
    return ScaledCast(None, target.data, scale)


def amax_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits, int32 [1], of the largest finite magnitude of ``x``, [.., R, C]."""
    return _amax_bits(_checked(x, None), per_line=False)


def interpreted() -> bool:
    """Return whether the kernels run under Triton's interpreter in this process."""
    kernel: object = cast_tiles
    return isinstance(kernel, InterpretedFunction)


@contextlib.contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    """Make a GPU current, where Triton launches; keep NumPy quiet, which interprets kernels."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
        return
    with np.errstate(all="ignore"):
        yield


def strides_of(x: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of a [batch, .., ..] tensor, 0 along a batch of one.

    Triton compiles anew for strides that are multiples of 16 and those that are not; the stride of
    a batch of one means nothing and should not count.
    """
    batch, first, second = x.stride()
    return (0 if x.shape[0] == 1 else batch), first, second


@dataclasses.dataclass(frozen=True)
class _Target:
    """Memory for a copy in one layout, as uint8: what is stored are codes.

    Attributes:
        stored: [batch, R', C'] of codes, of either stride order.
        data: The same memory as the caller sees it.
    """

    stored: torch.Tensor
    data: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows, padding included."""
        return self.stored.shape[1]

    @property
    def columns(self) -> int:
        """Columns, padding included."""
        return self.stored.shape[2]

    def transposed(self) -> _Target:
        """Return the target with rows and columns swapped, for one scale per column."""
        return _Target(self.stored.mT, self.data.mT)

    @classmethod
    def of(
        cls, x: torch.Tensor, fmt: FloatFormat, layout: Layout, alignment: tuple[int, int]
    ) -> _Target:
        """Return memory for ``x`` in a format and layout; zeros if there is nothing to cast."""
        multiples = list(alignment)
        contiguous = 1 if layout is Layout.ROW else 0
        multiples[contiguous] = max(multiples[contiguous], ALIGNMENT)
        r, c = (-(-n // m) * m for n, m in zip(x.shape[-2:], multiples, strict=True))
        shape = (*x.shape[:-2], r, c) if contiguous else (*x.shape[:-2], c, r)
        make = torch.empty if x.numel() else torch.zeros
        stored = make(shape, dtype=torch.uint8, device=x.device)
        flat = stored.view(_product(shape[:-2]), *shape[-2:])
        data = stored.view(fmt.torch_dtype)
        return cls(flat, data) if contiguous else cls(flat.mT, data.mT)


def _data(target: _Target | None) -> torch.Tensor | None:
    return None if target is None else target.data


def _checked(x: torch.Tensor, fmt: FloatFormat | None) -> torch.Tensor:
    """Return ``x`` as [batch, lines, length], bfloat16 by its bits."""
    if x.ndim < 2 or x.dtype not in INPUT_DTYPES:
        raise ConfigurationError(
            f"cannot cast a {x.dtype} tensor of shape {tuple(x.shape)}: give at least two "
            f"dimensions of {', '.join(str(d) for d in INPUT_DTYPES)}"
        )
    if fmt is not None and fmt.bits != 8:
        raise ConfigurationError(f"{fmt.name} has {fmt.bits} bits; these kernels write 8")
    x = x.detach()
    if x.dtype == torch.bfloat16:
        x = x.view(torch.int16)
    return x.unsqueeze(0) if x.ndim == 2 else x.reshape(_product(x.shape[:-2]), *x.shape[-2:])


def _product(sizes: tuple[int, ...] | torch.Size) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _whole_lines(lines: torch.Tensor, target: _Target) -> tuple[int, int] | None:
    """Return lines and elements, powers of two, of a program that takes whole lines, if any can.

    Where neighbours in memory belong to different lines, at least 16 of them are read together.
    Many short lines go to one program, unless programs are then too few to fill a GPU.
    """
    length = triton.next_power_of_2(max(lines.shape[2], target.columns))
    least = 1 if lines.stride(2) == 1 else 16
    if least * length > _TILE_ELEMENTS:
        return None
    count = max(least, min(_MOST_LINES, _TILE_ELEMENTS // length))
    programs = lines.shape[0] * target.rows
    while count > least and count * length > _FEWEST_ELEMENTS and programs < _FILLS_A_GPU * count:
        count //= 2
    return count, length


def _tile(lines: torch.Tensor) -> tuple[int, int]:
    """Return a tile, longer where memory is contiguous, and no larger than the operand needs."""
    count, length = (max(16, triton.next_power_of_2(n)) for n in lines.shape[1:])
    if lines.stride(1) == 1 and lines.stride(2) != 1:
        block = min(_LONG_SIDE, count)
        return block, min(_TILE_ELEMENTS // block, length)
    block = min(_LONG_SIDE, length)
    return min(_TILE_ELEMENTS // block, count), block


def _launch_lines(
    lines: torch.Tensor,
    fmt: FloatFormat,
    scale: torch.Tensor,
    target: _Target,
    block: tuple[int, int],
) -> None:
    block_l, block_k = block
    tiles = triton.cdiv(target.rows, block_l)
    stored = target.stored
    with launching_on(lines.device):
        cast_lines[(lines.shape[0] * tiles,)](
            lines,
            stored,
            scale,
            lines.shape[1],
            lines.shape[2],
            target.rows,
            target.columns,
            *strides_of(lines),
            *strides_of(stored),
            tiles,
            **_constants(fmt),
            BLOCK_L=block_l,
            BLOCK_K=block_k,
            **_options(block_l * block_k),
        )


def _launch_tiles(
    lines: torch.Tensor,
    fmt: FloatFormat,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    scale_strides: tuple[int, int],
    first: _Target | None,
    second: _Target | None,
) -> None:
    """Cast tile by tile, with known scales or known amax; scales are written in the latter case."""
    targets = [t for t in (first, second) if t is not None]
    rows, columns = max(t.rows for t in targets), max(t.columns for t in targets)
    block_l, block_k = _tile(lines)
    tiles_l, tiles_k = triton.cdiv(rows, block_l), triton.cdiv(columns, block_k)
    amax_strides = (0, 0) if scale_strides == (0, 0) else (lines.shape[1], 1)

    def arguments(target: _Target | None) -> tuple[Any, ...]:
        if target is None:
            return (targets[0].stored, 0, 0, 0, 0, 0)
        return (target.stored, target.rows, target.columns, *strides_of(target.stored))

    with launching_on(lines.device):
        cast_tiles[(lines.shape[0] * tiles_l * tiles_k,)](
            lines,
            scale if amax is None else amax,
            scale,
            *arguments(first),
            *arguments(second),
            lines.shape[1],
            lines.shape[2],
            *strides_of(lines),
            *scale_strides,
            *amax_strides,
            tiles_l,
            tiles_k,
            **_constants(fmt),
            FROM_AMAX=amax is not None,
            WRITE_FIRST=first is not None,
            WRITE_SECOND=second is not None,
            BLOCK_L=block_l,
            BLOCK_K=block_k,
            **_options(block_l * block_k),
        )


def _amax_bits(lines: torch.Tensor, *, per_line: bool) -> torch.Tensor:
    """Return the bits of the largest finite magnitudes, int32: [batch, lines] or [1]."""
    shape = tuple(lines.shape[:2]) if per_line else (1,)
    out = torch.zeros(shape, dtype=torch.int32, device=lines.device)
    if lines.numel() == 0:
        return out
    block_l, block_k = _tile(lines)
    tiles_l, tiles_k = (triton.cdiv(lines.shape[1], block_l), triton.cdiv(lines.shape[2], block_k))
    with launching_on(lines.device):
        amax_tiles[(lines.shape[0] * tiles_l * tiles_k,)](
            lines,
            out,
            lines.shape[1],
            lines.shape[2],
            *strides_of(lines),
            tiles_l,
            tiles_k,
            PER_LINE=per_line,
            BLOCK_L=block_l,
            BLOCK_K=block_k,
            **_options(block_l * block_k),
        )
    return out


def _constants(fmt: FloatFormat) -> dict[str, int]:
    encoding = Encoding.of(fmt)
    return {
        "EXPONENT_BITS": encoding.exponent_bits,
        "MANTISSA_BITS": encoding.mantissa_bits,
        "BIAS": encoding.bias,
        "SPECIALS": encoding.specials,
        "PER_MAX_BITS": encoding.per_max_bits,
    }


def _options(elements: int) -> dict[str, int | bool]:
    """Return the compiler's options; nothing is fused, by choice and not by a version's default."""
    return {"num_warps": 8 if elements >= 8192 else 4, "enable_fp_fusion": False}
