"""The kernels behind :mod:`loka_toolkit.kernels.triton_cast`: amax, scale, round, store.

Operands are [batch, lines, length] of any strides; a scale belongs to a line, or by strides of 0 to
all. Outputs hold codes, uint8, and may be longer than the operand: what lies beyond it is zero.

Importing this module imports Triton.
"""

# Triton's decorator and its kernels' arguments have no types that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from loka_toolkit.kernels.triton_bits import encode, finite_magnitude_bits, scale_of, widen


@triton.jit(do_not_specialize=["tiles"])
def cast_lines(
    x,
    out,
    scales,
    lines,
    length,
    out_lines,
    out_length,
    x_b,
    x_l,
    x_k,
    out_b,
    out_l,
    out_k,
    tiles,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    SPECIALS: tl.constexpr,
    PER_MAX_BITS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Cast whole lines: amax, scale and codes from one read."""
    program = tl.program_id(0)
    batch = (program // tiles).to(tl.int64)
    line = (program % tiles) * BLOCK_L + tl.arange(0, BLOCK_L)
    k = tl.arange(0, BLOCK_K)
    wide_line, wide_k = line.to(tl.int64), k.to(tl.int64)
    inside = (line < lines)[:, None] & (k < length)[None, :]
    source = x + batch * x_b + wide_line[:, None] * x_l + wide_k[None, :] * x_k
    value = widen(tl.load(source, mask=inside, other=0))
    scale = scale_of(tl.max(finite_magnitude_bits(value), axis=1), PER_MAX_BITS)
    code = encode(
        tl.div_rn(value, tl.broadcast_to(scale[:, None], (BLOCK_L, BLOCK_K))),
        EXPONENT_BITS,
        MANTISSA_BITS,
        BIAS,
        SPECIALS,
    )
    target = out + batch * out_b + wide_line[:, None] * out_l + wide_k[None, :] * out_k
    within = (line < out_lines)[:, None] & (k < out_length)[None, :]
    tl.store(target, tl.where(inside, code, 0).to(tl.uint8), mask=within)
    tl.store(scales + batch * out_lines + wide_line, scale, mask=line < out_lines)


@triton.jit(
    do_not_specialize=["tiles_l", "tiles_k", "scale_b", "scale_l", "amax_b", "amax_l"],
)
def cast_tiles(
    x,
    known,
    scales,
    first,
    first_lines,
    first_length,
    first_b,
    first_l,
    first_k,
    second,
    second_lines,
    second_length,
    second_b,
    second_l,
    second_k,
    lines,
    length,
    x_b,
    x_l,
    x_k,
    scale_b,
    scale_l,
    amax_b,
    amax_l,
    tiles_l,
    tiles_k,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    SPECIALS: tl.constexpr,
    PER_MAX_BITS: tl.constexpr,
    FROM_AMAX: tl.constexpr,
    WRITE_FIRST: tl.constexpr,
    WRITE_SECOND: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Cast one tile into one or two layouts, with scales per line or, by strides of 0, one."""
    program = tl.program_id(0)
    batch = (program // (tiles_l * tiles_k)).to(tl.int64)
    tile = program % (tiles_l * tiles_k)
    line = (tile // tiles_k) * BLOCK_L + tl.arange(0, BLOCK_L)
    k = (tile % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    wide_line, wide_k = line.to(tl.int64), k.to(tl.int64)
    inside = (line < lines)[:, None] & (k < length)[None, :]
    source = x + batch * x_b + wide_line[:, None] * x_l + wide_k[None, :] * x_k
    value = widen(tl.load(source, mask=inside, other=0))
    if FROM_AMAX:
        amax = tl.load(known + batch * amax_b + wide_line * amax_l, mask=line < lines, other=0)
        scale = scale_of(amax, PER_MAX_BITS)
        if tile % tiles_k == 0:
            tl.store(scales + batch * scale_b + wide_line * scale_l, scale, mask=line < lines)
    else:
        scale = tl.load(known + batch * scale_b + wide_line * scale_l, mask=line < lines, other=1.0)
    code = encode(
        tl.div_rn(value, tl.broadcast_to(scale[:, None], (BLOCK_L, BLOCK_K))),
        EXPONENT_BITS,
        MANTISSA_BITS,
        BIAS,
        SPECIALS,
    )
    code = tl.where(inside, code, 0).to(tl.uint8)
    if WRITE_FIRST:
        target = first + batch * first_b + wide_line[:, None] * first_l + wide_k[None, :] * first_k
        within = (line < first_lines)[:, None] & (k < first_length)[None, :]
        tl.store(target, code, mask=within)
    if WRITE_SECOND:
        target = (
            second + batch * second_b + wide_line[:, None] * second_l + wide_k[None, :] * second_k
        )
        within = (line < second_lines)[:, None] & (k < second_length)[None, :]
        tl.store(target, code, mask=within)


@triton.jit(do_not_specialize=["tiles_l", "tiles_k"])
def amax_tiles(
    x,
    out,
    lines,
    length,
    x_b,
    x_l,
    x_k,
    tiles_l,
    tiles_k,
    PER_LINE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Merge one tile's largest finite magnitudes, as bits, into those of lines or tensor."""
    program = tl.program_id(0)
    batch = (program // (tiles_l * tiles_k)).to(tl.int64)
    tile = program % (tiles_l * tiles_k)
    line = (tile // tiles_k) * BLOCK_L + tl.arange(0, BLOCK_L)
    k = (tile % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    wide_line, wide_k = line.to(tl.int64), k.to(tl.int64)
    inside = (line < lines)[:, None] & (k < length)[None, :]
    source = x + batch * x_b + wide_line[:, None] * x_l + wide_k[None, :] * x_k
    value = widen(tl.load(source, mask=inside, other=0))
    largest = tl.max(finite_magnitude_bits(value), axis=1)
    if PER_LINE:
        tl.atomic_max(out + batch * lines + wide_line, largest, mask=line < lines)
    else:
        tl.atomic_max(out, tl.max(largest, axis=0))
