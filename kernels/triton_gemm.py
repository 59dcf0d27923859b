"""FP8 products with one scale per tensor, row or column, as an own Triton kernel.

out[..,M,N] = (A[..,M,K] B[..,K,N]) * scale_a * scale_b. Any M, N and K (masks, no padding needed),
any strides, batches, every pair of 8-bit formats.

What the accumulations of the recipes mean here, on Hopper (compute capability 9.0), where Triton
turns ``tl.dot`` of FP8 tiles into ``wgmma ... .f32.e4m3.e4m3`` and its mixed forms:

- ``fast``: sums stay in the tensor core's accumulator (about 14 bits) over all of K.
- ``promoted-128``: ``max_num_imprecise_acc=128`` with tiles of 128 along K: every ``tl.dot`` starts
  the tensor core's accumulator at zero, and what it returns is added to float32 registers.

Under the interpreter, and for the fnuz formats, which NVIDIA's tensor cores do not multiply, codes
are decoded by integers to float32 (exact) and multiplied there: that proves indexing, masks, scales
and output, and nothing about tensor cores, which only a GPU can.

Tiles come from a table by shape, not from a search: a search compiles and times dozens of variants
inside a training process and may choose differently from run to run. Pointers are used, not tensor
descriptors; TMA loads, warp specialization, split K for small outputs with long K, and a search
ahead of time are what could still make it faster.

Importing this module imports Triton.
"""

# Triton's decorator and its kernels' arguments have no types that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.kernels.triton_bits import Encoding, decode
from loka_toolkit.kernels.triton_cast import interpreted, launching_on, strides_of
from loka_toolkit.numerics.formats import FP8_FORMATS, FloatFormat, Specials
from loka_toolkit.numerics.recipes import Accumulation

OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

PROMOTION_INTERVAL = 128
"""Products after which ``promoted-128`` adds to float32; the tile's length along K."""

_GROUP_OF_ROWS = 8
"""Tiles of M that run next to each other and share the tiles of B in the L2 cache."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the output is cut.

    Attributes:
        m: Rows of a tile.
        n: Columns of a tile.
        k: Contraction per step.
        warps: Warps per program.
        stages: Tiles in flight.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int


def tile_for(m: int, n: int, k: int, batch: int = 1) -> Tile:
    """Return the tile of a product; the same shape gives the same tile, always.

    Large tiles where they fill a GPU of some 130 processors, smaller ones where they do not; 64
    rows are the least that ``wgmma`` takes, and narrower operands are masked. The contraction is
    cut at 128 always, so that ``fast`` and ``promoted-128`` differ in nothing but the accumulator.
    """
    for tile in _TILES:
        if tile.m <= max(m, 64) and tile.n <= max(n, 64):
            if batch * -(-m // tile.m) * -(-n // tile.n) >= _FILLS_A_GPU:
                return tile
    return _TILES[-1]


_TILES = (
    Tile(128, 256, PROMOTION_INTERVAL, warps=8, stages=3),
    Tile(128, 128, PROMOTION_INTERVAL, warps=8, stages=4),
    Tile(64, 128, PROMOTION_INTERVAL, warps=4, stages=4),
    Tile(64, 64, PROMOTION_INTERVAL, warps=4, stages=4),
)
_FILLS_A_GPU = 120

_DECODING_TILE = Tile(64, 64, 32, warps=4, stages=2)
"""Of float32 values, which take four times the memory, and no tensor core."""


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    accumulation: Accumulation,
    out_dtype: torch.dtype,
    *,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (a b) * scale_a * scale_b, [.., M, N] in ``out_dtype``.

    Args:
        a: [.., M, K] of an FP8 dtype, any strides.
        b: [.., K, N] of an FP8 dtype, same leading dimensions, any strides.
        scale_a: float32, one element or [.., M, 1].
        scale_b: float32, one element or [.., 1, N].
        accumulation: ``fast`` or ``promoted-128``.
        out_dtype: One of ``OUTPUT_DTYPES``.
        tile: How to cut the output; by default :func:`tile_for` decides.
        out: Memory for the result, [.., M, N] contiguous, which is overwritten.

    Raises:
        ConfigurationError: If shapes, dtypes, scales or the accumulation are none of these.
    """
    _check(a, b, accumulation, out_dtype)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    shape = (*a.shape[:-2], m, n)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=a.device)
    elif out.shape != shape or out.dtype != out_dtype or not out.is_contiguous():
        raise ConfigurationError(
            f"out must be a contiguous {out_dtype} tensor of shape {shape}, not {out.dtype} "
            f"{tuple(out.shape)} with strides {out.stride()}"
        )
    if out.numel() == 0:
        return out
    if k == 0:
        return out.zero_()
    batch = math.prod(a.shape[:-2])
    left, right = (x.reshape(batch, *x.shape[-2:]) for x in (a, b))
    decoded = interpreted() or any(
        _format_of(x).specials is Specials.NEGATIVE_ZERO_NAN for x in (a, b)
    )
    if decoded:
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    # The interpreter rounds float32 to 16 bits in its own way; torch does it there.
    written = out if not interpreted() else out.to(torch.float32)
    if tile is None:
        tile = _DECODING_TILE if decoded and not interpreted() else tile_for(m, n, k, batch)
    scales = [_scale(s, x, d) for s, x, d in ((scale_a, left, 1), (scale_b, right, 2))]
    with launching_on(a.device):
        _product[(batch * triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)](
            left,
            right,
            written,
            scales[0][0],
            scales[1][0],
            m,
            n,
            k,
            *strides_of(left),
            *strides_of(right),
            *scales[0][1],
            *scales[1][1],
            **_encoding(a, "A"),
            **_encoding(b, "B"),
            DECODED=decoded,
            PROMOTED=accumulation is Accumulation.PROMOTED_128,
            STEPS=triton.cdiv(k, tile.k) if interpreted() else -1,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            GROUP=_GROUP_OF_ROWS,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
    return out if written is out else out.copy_(written)


def _check(
    a: torch.Tensor, b: torch.Tensor, accumulation: Accumulation, out_dtype: torch.dtype
) -> None:
    if a.ndim < 2 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ConfigurationError(
            f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}: give [.., M, K] and [.., K, N] "
            "with equal leading dimensions"
        )
    if accumulation is Accumulation.FP32:
        raise ConfigurationError(
            "tensor cores do not sum FP8 products in float32 throughout; see promoted-128"
        )
    if out_dtype not in OUTPUT_DTYPES:
        raise ConfigurationError(
            f"cannot write {out_dtype}: choose from {', '.join(str(d) for d in OUTPUT_DTYPES)}"
        )


def _format_of(x: torch.Tensor) -> FloatFormat:
    for fmt in FP8_FORMATS.values():
        if fmt.torch_dtype == x.dtype:
            return fmt
    raise ConfigurationError(
        f"operands are FP8 tensors, not {x.dtype}: cast them, for example with triton_cast"
    )


def _encoding(x: torch.Tensor, side: str) -> dict[str, int]:
    encoding = Encoding.of(_format_of(x))
    return {
        f"EXPONENT_{side}": encoding.exponent_bits,
        f"MANTISSA_{side}": encoding.mantissa_bits,
        f"BIAS_{side}": encoding.bias,
        f"SPECIALS_{side}": encoding.specials,
    }


def _scale(scale: torch.Tensor, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return a scale and its strides along batch and ``dim``: 0 where one number serves all."""
    scale = scale.detach()
    if scale.dtype != torch.float32:
        raise ConfigurationError(f"scales are float32, not {scale.dtype}")
    if scale.numel() == 1:
        return scale, (0, 0)
    wanted = [x.shape[0], 1, 1]
    wanted[dim] = x.shape[dim]
    flat = scale.reshape(-1, *scale.shape[-2:]) if scale.ndim >= 2 else scale
    if list(flat.shape) != wanted:
        raise ConfigurationError(
            f"a scale of shape {tuple(scale.shape)} does not fit: one element, or one along the "
            f"uncontracted dimension, {wanted}, is wanted"
        )
    return flat, (flat.stride(0), flat.stride(dim))


@triton.jit
def _halved(scale):
    """Return a power of two of about the root of |scale|, and scale over it.

    The product of two scales may leave the range of float32; those of their halves do not, and
    what lies between sum and result is in range wherever the result is.
    """
    exponent = ((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    power = (((exponent >> 1) + 127) << 23).to(tl.float32, bitcast=True)
    return power, scale / power


@triton.jit(
    do_not_specialize=["m", "scale_a_b", "scale_a_m", "scale_b_b", "scale_b_n"],
)
def _product(
    a,
    b,
    out,
    scale_a,
    scale_b,
    m,
    n,
    k,
    a_b,
    a_m,
    a_k,
    b_b,
    b_k,
    b_n,
    scale_a_b,
    scale_a_m,
    scale_b_b,
    scale_b_n,
    EXPONENT_A: tl.constexpr,
    MANTISSA_A: tl.constexpr,
    BIAS_A: tl.constexpr,
    SPECIALS_A: tl.constexpr,
    EXPONENT_B: tl.constexpr,
    MANTISSA_B: tl.constexpr,
    BIAS_B: tl.constexpr,
    SPECIALS_B: tl.constexpr,
    DECODED: tl.constexpr,
    PROMOTED: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile of the output.

    STEPS is the number of steps along K where the compiler may know it, -1 where it should not:
    the interpreter of Triton 3.6 cannot loop up to an argument with NumPy 2.4.
    """
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    batch = (program // (tiles_m * tiles_n)).to(tl.int64)
    tile = program % (tiles_m * tiles_n)
    first = (tile // (GROUP * tiles_n)) * GROUP
    group = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + (tile % (GROUP * tiles_n)) % group
    tile_n = (tile % (GROUP * tiles_n)) // group

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    wide_step = step.to(tl.int64)
    advance = tl.full((), BLOCK_K, tl.int64)
    # Rows and columns outside wrap around: they are read, and not written.
    left = a + batch * a_b + (row % m).to(tl.int64)[:, None] * a_m + wide_step[None, :] * a_k
    right = b + batch * b_b + wide_step[:, None] * b_k + (column % n).to(tl.int64)[None, :] * b_n
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for index in range(0, STEPS if STEPS >= 0 else tl.cdiv(k, BLOCK_K)):
        inside_k = step < k - index * BLOCK_K
        x = tl.load(left, mask=inside_k[None, :], other=0.0)
        y = tl.load(right, mask=inside_k[:, None], other=0.0)
        if DECODED:
            x = decode(x, EXPONENT_A, MANTISSA_A, BIAS_A, SPECIALS_A)
            y = decode(y, EXPONENT_B, MANTISSA_B, BIAS_B, SPECIALS_B)
            total = tl.dot(x, y, total, input_precision="ieee")
        elif PROMOTED:
            total = tl.dot(x, y, total, max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(x, y, total)
        left += advance * a_k
        right += advance * b_k

    inside_m, inside_n = row < m, column < n
    of_rows = tl.load(scale_a + batch * scale_a_b + row * scale_a_m, mask=inside_m, other=1.0)
    of_columns = tl.load(scale_b + batch * scale_b_b + column * scale_b_n, mask=inside_n, other=1.0)
    root_m, rest_m = _halved(of_rows)
    root_n, rest_n = _halved(of_columns)
    total = total * (root_m[:, None] * root_n[None, :]) * (rest_m[:, None] * rest_n[None, :])
    target = out + batch * m * n + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside_m[:, None] & inside_n[None, :])
