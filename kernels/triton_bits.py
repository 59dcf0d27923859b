"""FP8 by integer arithmetic, in Triton: encode, decode and scale, the same code everywhere.

A format is four compile-time numbers: bits of exponent and mantissa, bias, and what its special
codes are. Nothing here depends on how a compiler or the interpreter converts to FP8: Triton's
interpreter rounds ``.to(float8)`` wrongly (19 % of values; NaN becomes 384), and GPUs below compute
capability 8.9 lack the conversion. Semantics are those of :mod:`loka_toolkit.numerics.casting`;
NaN is written as one code, positive where the format has signs for it, since division on a GPU
drops the sign of a NaN.

Importing this module imports Triton.
"""

# Triton's decorator and its kernels' arguments have no types that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import dataclasses
import struct

import triton
import triton.language as tl

from loka_toolkit.numerics.formats import FloatFormat, Specials

_SPECIALS = {Specials.IEEE: 0, Specials.FINITE_NAN: 1, Specials.NEGATIVE_ZERO_NAN: 2}

_IEEE = tl.constexpr(_SPECIALS[Specials.IEEE])
_FINITE_NAN = tl.constexpr(_SPECIALS[Specials.FINITE_NAN])

_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_LARGEST_FLOAT32 = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)


@dataclasses.dataclass(frozen=True)
class Encoding:
    """A format as a kernel takes it: names and values of compile-time arguments.

    Attributes:
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the trailing significand field.
        bias: Exponent bias.
        specials: 0 for IEEE, 1 for one NaN per sign and no Inf, 2 for the code of -0 as NaN.
        per_max_bits: 1 / (largest finite value) as float64, its bits: a Python float would reach
            the kernel as float32.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: int
    per_max_bits: int

    @classmethod
    def of(cls, fmt: FloatFormat) -> Encoding:
        """Return the encoding of a format of 8 bits."""
        return cls(
            fmt.exponent_bits,
            fmt.mantissa_bits,
            fmt.bias,
            _SPECIALS[fmt.specials],
            struct.unpack("<q", struct.pack("<d", 1.0 / fmt.max))[0],
        )


@triton.jit
def encode(
    y,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    SPECIALS: tl.constexpr,
):
    """Return the codes, uint8, of float32 values: nearest even, finite values saturate.

    The significand with its leading one is shifted right until its last bit is worth the format's
    quantum, half a quantum less one plus the parity added before: that rounds to nearest even, and
    a carry runs into the exponent field by itself. A shift of 25 leaves nothing of 24 bits.
    """
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | tl.where(exponent > 0, 0x800000, 0)
    field = exponent - (127 - BIAS)
    shift = tl.minimum(23 - MANTISSA_BITS + tl.maximum(1 - field, 0), 25)
    half = (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)
    code = ((significand + half) >> shift) + ((tl.maximum(field, 1) - 1) << MANTISSA_BITS)

    sign = (bits >> 24) & 0x80
    # The code of all ones is 0x7F; IEEE formats spend the whole largest exponent on specials.
    if SPECIALS == _IEEE:
        infinity: tl.constexpr = ((1 << EXPONENT_BITS) - 1) << MANTISSA_BITS
        code = tl.minimum(code, infinity - 1)
        code = tl.where(magnitude == 0x7F800000, infinity, code) | sign
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    elif SPECIALS == _FINITE_NAN:
        code = tl.minimum(code, 0x7E) | sign
        code = tl.where(magnitude >= 0x7F800000, 0x7F, code)
    else:
        code = tl.minimum(code, 0x7F)
        code |= tl.where(code == 0, 0, sign)
        code = tl.where(magnitude >= 0x7F800000, 0x80, code)
    return code.to(tl.uint8)


@triton.jit
def decode(
    code,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    SPECIALS: tl.constexpr,
):
    """Return the values, float32, of codes, uint8; exact."""
    wide = code.to(tl.int32)
    magnitude = wide & 0x7F
    normal = (magnitude << (23 - MANTISSA_BITS)) + ((127 - BIAS) << 23)
    quantum: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA_BITS)
    subnormal = magnitude.to(tl.float32) * quantum
    value = tl.where(
        (magnitude >> MANTISSA_BITS) > 0, normal.to(tl.float32, bitcast=True), subnormal
    )
    top: tl.constexpr = ((1 << EXPONENT_BITS) - 1) << MANTISSA_BITS
    if SPECIALS == _IEEE:
        value = tl.where(magnitude == top, float("inf"), value)
        value = tl.where(magnitude > top, float("nan"), value)
    elif SPECIALS == _FINITE_NAN:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    else:
        value = tl.where(wide == 0x80, float("nan"), value)
    return tl.where(wide >= 0x80, -value, value)


@triton.jit
def widen(x):
    """Return float32 values of float32, float16, or of bfloat16 given by its bits, int16.

    Triton's interpreter widens subnormal bfloat16 values wrongly; a shift widens all of them.
    """
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def finite_magnitude_bits(x):
    """Return the bits of |x|, int32, of float32 values; 0 for Inf and NaN.

    Non-negative floats are ordered like their bits, so a maximum of these is that of magnitudes.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits >= 0x7F800000, 0, bits)


@triton.jit
def scale_of(amax_bits, PER_MAX_BITS: tl.constexpr):
    """Return the decode scale, float32, of an amax given by its bits, int32.

    The rules of :func:`loka_toolkit.numerics.scaling.decode_scale`, in float64 like there.
    """
    amax = amax_bits.to(tl.float32, bitcast=True).to(tl.float64)
    per_max = tl.full(amax.shape, PER_MAX_BITS, tl.int64).to(tl.float64, bitcast=True)
    scale = tl.minimum(tl.maximum(amax * per_max, _SMALLEST_SCALE), _LARGEST_FLOAT32)
    return tl.where(amax == 0.0, 1.0, scale).to(tl.float32)
