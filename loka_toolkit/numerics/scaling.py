"""Scales: one number per tensor, row, column or block that moves an operand into a format's range.

All scales are decode scales, original ~= stored * scale, computed in float64 and stored as float32.
The rules for odd inputs:

- an amax of 0 (zero tensor, no finite element, no element at all) gives scale 1;
- a scale below 2**-126, the smallest normal float32, becomes 2**-126, whose reciprocal 2**126 is
  finite; so amax = 1e-40 quantizes coarsely or to zeros, and never to Inf or NaN;
- a scale above the largest float32 becomes the largest float32;
- an amax that is itself Inf or NaN gives a NaN scale, so that the mistake propagates and is seen;
  :func:`finite_amax` never returns one.

The scales of mxfp8 are powers of two by the OCP MX specification, see :func:`mx_scale`; the rules
for zero and non-finite amax are the same, the limits are those of e8m0, 2**-127 and 2**127.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.blocks import Block, block_count, block_of
from loka_toolkit.numerics.formats import E8M0, FloatFormat
from loka_toolkit.numerics.recipes import Scaling

SMALLEST_SCALE = 2.0**-126
"""Smallest normal float32: every scale at least as large has a finite float32 reciprocal."""

STATIC_HEADROOM = 8.0
"""Headroom of a static scale over the largest amax seen: E4M3's error hardly changes over 16x of
headroom, so a static scale is chosen for rare overflow and not for tightness."""

_LARGEST_FLOAT32 = float(torch.finfo(torch.float32).max)


def finite_amax(
    x: torch.Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False
) -> torch.Tensor:
    """Return the largest finite magnitude, float32; 0 where no element is finite.

    Args:
        x: Any shape, any floating dtype, any strides; may be empty.
        dim: Dimensions to reduce; None reduces all of them.
        keepdim: Whether reduced dimensions stay, with length 1.
    """
    dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = tuple(d % x.ndim for d in dims)
    if any(x.shape[d] == 0 for d in dims):
        kept = [1 if d in dims else n for d, n in enumerate(x.shape)]
        shape = kept if keepdim else [n for d, n in enumerate(x.shape) if d not in dims]
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    magnitude = x.detach().abs()
    finite = magnitude.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    amax = finite.amax(dim=dims, keepdim=keepdim) if dims else finite
    if amax.dtype == torch.float64:
        amax = amax.clamp(max=_LARGEST_FLOAT32)
    return amax.to(torch.float32)


def decode_scale(amax: torch.Tensor, fmt: FloatFormat, *, headroom: float = 1.0) -> torch.Tensor:
    """Return amax * headroom / fmt.max, float32, of the shape of ``amax``, by the module's rules.

    Args:
        amax: Largest finite magnitudes, any shape, non-negative.
        fmt: The format of the stored values.
        headroom: Factor by which later values may exceed ``amax`` before they saturate.

    Raises:
        ConfigurationError: If ``headroom`` is not finite and positive.
    """
    if not (math.isfinite(headroom) and headroom > 0):
        raise ConfigurationError(
            f"headroom = {headroom!r} must be finite and positive; 1 leaves none, "
            f"{STATIC_HEADROOM:g} is the default of static scales"
        )
    wide = amax.to(torch.float64)
    scale = (wide * (headroom / fmt.max)).clamp(SMALLEST_SCALE, _LARGEST_FLOAT32)
    scale = torch.where(wide == 0, torch.ones_like(scale), scale)
    scale = torch.where(torch.isfinite(wide), scale, torch.full_like(scale, math.nan))
    return scale.to(torch.float32)


def mx_scale(amax: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return the shared scale of MX blocks, 2**(floor(log2 amax) - emax), float32, like ``amax``.

    OCP Microscaling Formats specification 1.0, section 6.3; emax is the exponent of the largest
    finite value of ``fmt``. Amax lands in the largest binade of the format, whose last quarter
    E4M3 and E5M2 lack: elements there saturate when cast and lose up to an eighth of their size
    (of independent normal elements 0.57 % in E4M3, 0.35 % in E5M2).

    Args:
        amax: Largest finite magnitudes, any shape, non-negative.
        fmt: The format of the elements.
    """
    wide = amax.to(torch.float64)
    exponent = torch.frexp(wide)[1] - 1 - fmt.max_exponent
    scale = torch.ldexp(torch.ones_like(wide), exponent.clamp(E8M0.min_exponent, E8M0.max_exponent))
    scale = torch.where(wide == 0, torch.ones_like(scale), scale)
    scale = torch.where(torch.isfinite(wide), scale, torch.full_like(scale, math.nan))
    return scale.to(torch.float32)


def saturation_limit(fmt: FloatFormat, scaling: Scaling) -> float | None:
    """Return from which scaled magnitude an element counts as saturated, if not by rounding.

    What :func:`mx_scale` clips by design, at most an eighth of an element, is part of the recipe's
    rounding and shows in its SQNR; counted as saturation, which bounds what stale scales destroy,
    it would fail every mxfp8 product that there is. Elements beyond the whole binade count.
    """
    return 2.0 ** (fmt.max_exponent + 1) if scaling is Scaling.MXFP8 else None


def block_amax(x: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the largest finite magnitude of every block, float32.

    Args:
        x: [.., rows, columns]; may be empty.
        block: Rows and columns of a block; the last ones may be ragged.

    Returns:
        [.., ceil(rows / block rows), ceil(columns / block columns)].
    """
    rows, columns = (block_count(n, b) for n, b in zip(x.shape[-2:], block, strict=True))
    ragged = (0, columns * block[1] - x.shape[-1], 0, rows * block[0] - x.shape[-2])
    whole = torch.nn.functional.pad(x.detach(), ragged) if any(ragged) else x.detach()
    split = whole.reshape(*x.shape[:-2], rows, block[0], columns, block[1])
    return finite_amax(split, dim=(-3, -1))


def block_scale(x: torch.Tensor, fmt: FloatFormat, scaling: Scaling, block: Block) -> torch.Tensor:
    """Return the decode scale of every block of an operand, float32, of :func:`block_amax`'s shape.

    Args:
        x: [.., rows, columns].
        fmt: Its format.
        scaling: ``mxfp8`` for powers of two, else amax / fmt.max.
        block: Rows and columns of a block.
    """
    amax = block_amax(x, block)
    return mx_scale(amax, fmt) if scaling is Scaling.MXFP8 else decode_scale(amax, fmt)


def operand_scale(
    x: torch.Tensor,
    fmt: FloatFormat,
    scaling: Scaling,
    side: Literal["a", "b"],
    static_scale: torch.Tensor | None = None,
    *,
    parameter: bool = False,
) -> torch.Tensor:
    """Return the decode scale of one factor of a product A[..,M,K] B[..,K,N].

    Args:
        x: The factor, [.., M, K] for side ``a`` and [.., K, N] for side ``b``.
        fmt: Its format.
        scaling: Grain of the scale.
        side: Which factor it is; rowwise scales reduce over the contraction.
        static_scale: The scale known beforehand, one element; used by static scaling only.
        parameter: Whether the factor is a parameter of the model; blockwise scaling of one shares
            scales among 128 rows of A, or columns of B.

    Returns:
        float32: shape [] for tensorwise, static and unscaled (1), [.., M, 1] or [.., 1, N] for
        rowwise; with blocks of L entries along the contraction [.., M, ceil(K / L)] or
        [.., ceil(K / L), N], where blocks that span rows of A (columns of B) repeat their scale, so
        that a selection of rows (columns) takes its scales with it.

    Raises:
        ConfigurationError: If scaling is static and no scale, or more than one, is given.
    """
    if side not in ("a", "b"):
        raise ConfigurationError(f"side {side!r} of a product must be 'a' or 'b'")
    if scaling is Scaling.STATIC:
        if static_scale is None:
            raise ConfigurationError(
                "static scaling needs the scale from earlier steps; pass static_scale, or use a "
                "tensorwise recipe until one is known"
            )
        if static_scale.numel() != 1:
            raise ConfigurationError(
                f"a static scale is one number, not a tensor of shape {tuple(static_scale.shape)}"
            )
        return static_scale.reshape(()).to(device=x.device, dtype=torch.float32)
    if scaling is Scaling.UNSCALED:
        return torch.ones((), dtype=torch.float32, device=x.device)
    if scaling is Scaling.TENSORWISE:
        return decode_scale(finite_amax(x), fmt)
    block = block_of(scaling, side, parameter=parameter)
    if block is not None:
        scale = block_scale(x, fmt, scaling, block)
        dim = -2 if side == "a" else -1
        return scale.repeat_interleave(block[dim], dim=dim).narrow(dim, 0, x.shape[dim])
    return decode_scale(finite_amax(x, dim=-1 if side == "a" else -2, keepdim=True), fmt)
