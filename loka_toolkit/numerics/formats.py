"""Floating-point formats as data: everything else is derived from five numbers.

Sources: OCP 8-bit Floating Point Specification (OFP8) revision 1.0, table 1, for e4m3 (e4m3fn) and
e5m2; "8-bit Numerical Formats for Deep Neural Networks" (arXiv 2206.02915) for the twins e4m3fnuz
and e5m2fnuz of AMD's CDNA 3, whose exponent bias is one more and whose code of -0 is the only NaN;
OCP Microscaling Formats (MX) specification version 1.0, section 5.4.1, for e8m0; IEEE 754-2019 for
fp16 and fp32; NVIDIA's A100 white paper for tf32: float32's exponent and fp16's significand.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import torch


class Specials(enum.Enum):
    """What the largest exponent field of a format encodes."""

    IEEE = "infinities and NaNs, as in IEEE 754"
    FINITE_NAN = "finite values; only the all-ones code of each sign is NaN"
    NEGATIVE_ZERO_NAN = "finite values; only the code of -0 is NaN, so that zero has no sign"


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    Attributes:
        name: The name in recipes.
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the trailing significand field.
        bias: Exponent bias.
        specials: What the largest exponent field encodes.
        torch_dtype: The storage type; wider than the format for tf32, which has none of its own.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    torch_dtype: torch.dtype

    @property
    def bits(self) -> int:
        """Storage width, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @functools.cached_property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value."""
        top = (1 << self.exponent_bits) - 1
        return (top - 1 if self.specials is Specials.IEEE else top) - self.bias

    @functools.cached_property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias

    @functools.cached_property
    def max(self) -> float:
        """Largest finite value."""
        steps = (2 << self.mantissa_bits) - (2 if self.specials is Specials.FINITE_NAN else 1)
        return float(steps) * 2.0 ** (self.max_exponent - self.mantissa_bits)

    @functools.cached_property
    def smallest_normal(self) -> float:
        """Smallest positive normal value."""
        return float(2.0**self.min_exponent)

    @functools.cached_property
    def smallest_subnormal(self) -> float:
        """Smallest positive value."""
        return float(2.0 ** (self.min_exponent - self.mantissa_bits))

    @functools.cached_property
    def saturation_threshold(self) -> float:
        """Midpoint of the largest finite value and the next one an unbounded exponent would give.

        Finite values beyond it are clipped by more than rounding.
        """
        return self.max + 2.0 ** (self.max_exponent - self.mantissa_bits - 1)

    @property
    def saturates_at_threshold(self) -> bool:
        """Whether the threshold itself would round up: ties go to the even significand."""
        return self.specials is not Specials.FINITE_NAN

    @property
    def has_infinity(self) -> bool:
        """Whether the format encodes infinities."""
        return self.specials is Specials.IEEE

    @property
    def has_negative_zero(self) -> bool:
        """Whether zero has a sign."""
        return self.specials is not Specials.NEGATIVE_ZERO_NAN

    @property
    def is_fp8(self) -> bool:
        """Whether values take 8 bits; only such formats are scaled, and saturate when cast to."""
        return self.bits == 8


@dataclasses.dataclass(frozen=True)
class ScaleFormat:
    """A format of scales: powers of two, no sign, no zero, no infinity.

    Attributes:
        name: Its name.
        exponent_bits: Width of the exponent field, which is the whole code.
        bias: Exponent bias.
        nan_code: The only code that is no number.
        torch_dtype: The storage type.
    """

    name: str
    exponent_bits: int
    bias: int
    nan_code: int
    torch_dtype: torch.dtype

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest scale."""
        return -self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest scale."""
        return (1 << self.exponent_bits) - 2 - self.bias

    @property
    def min(self) -> float:
        """Smallest scale."""
        return float(2.0**self.min_exponent)

    @property
    def max(self) -> float:
        """Largest scale."""
        return float(2.0**self.max_exponent)


E4M3 = FloatFormat("e4m3", 4, 3, 7, Specials.FINITE_NAN, torch.float8_e4m3fn)
E5M2 = FloatFormat("e5m2", 5, 2, 15, Specials.IEEE, torch.float8_e5m2)
E4M3FNUZ = FloatFormat("e4m3fnuz", 4, 3, 8, Specials.NEGATIVE_ZERO_NAN, torch.float8_e4m3fnuz)
E5M2FNUZ = FloatFormat("e5m2fnuz", 5, 2, 16, Specials.NEGATIVE_ZERO_NAN, torch.float8_e5m2fnuz)
FP16 = FloatFormat("fp16", 5, 10, 15, Specials.IEEE, torch.float16)
BF16 = FloatFormat("bf16", 8, 7, 127, Specials.IEEE, torch.bfloat16)
TF32 = FloatFormat("tf32", 8, 10, 127, Specials.IEEE, torch.float32)
FP32 = FloatFormat("fp32", 8, 23, 127, Specials.IEEE, torch.float32)

E8M0 = ScaleFormat("e8m0", 8, 127, 0xFF, torch.float8_e8m0fnu)

FP8_FORMATS: dict[str, FloatFormat] = {f.name: f for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)}
"""Formats of scaled operands."""

FNUZ_FORMATS: dict[str, FloatFormat] = {f.name: f for f in (E4M3FNUZ, E5M2FNUZ)}
"""Those of AMD's CDNA 3 (gfx942)."""

WIDE_FORMATS: dict[str, FloatFormat] = {f.name: f for f in (BF16, FP16, TF32, FP32)}
"""Formats of operands that are not scaled."""

FORMATS: dict[str, FloatFormat] = FP8_FORMATS | WIDE_FORMATS
"""Every format of an operand."""
