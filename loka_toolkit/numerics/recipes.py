"""Recipes: how a GEMM is computed, as a value with a name such as ``e4m3/rowwise/fast``.

A name is FORMATS/SCALINGS/ACCUMULATION. Formats and scalings are given once where both operands
share them and as A-B where they differ; an operand that is not scaled has no part in SCALINGS; a
baseline is its format alone:

    e4m3/rowwise/fast               both operands in E4M3, a scale per row of A and column of B
    e5m2-e4m3/tensorwise/fast       A in E5M2, B in E4M3
    e4m3/static-rowwise/fast        A with one scale known beforehand, B with one per column
    bf16-e4m3/tensorwise/fp32       A in BF16, B in E4M3
    bf16                            both in BF16
"""

from __future__ import annotations

import enum
import functools
import itertools

import msgspec

from loka_toolkit.errors import UnknownNameError
from loka_toolkit.numerics.formats import (
    BF16,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FORMATS,
    FP8_FORMATS,
    FP16,
    WIDE_FORMATS,
    FloatFormat,
)


class Scaling(enum.StrEnum):
    """At which grain a scale is computed.

    ``tensorwise``: one scale per tensor from its amax. ``rowwise``: one scale per row of A and per
    column of B (along the contraction). ``static``: tensorwise with a scale known beforehand.
    ``blockwise``: one scale per 128 consecutive entries along the contraction, shared by 128
    outputs if the operand is a parameter (1x128 and 128x128: DeepSeek-V3, arXiv 2412.19437).
    ``mxfp8``: one scale per 32 consecutive entries along the contraction, a power of two in e8m0
    (OCP MX specification 1.0). ``unscaled``: none, for operands of 16 or 32 bits.
    """

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    STATIC = "static"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"
    UNSCALED = "unscaled"

    @property
    def block_length(self) -> int | None:
        """Entries along the contraction that share a scale; None if all of them do."""
        return {Scaling.BLOCKWISE: 128, Scaling.MXFP8: 32}.get(self)

    @property
    def is_per_tensor(self) -> bool:
        """Whether the scale is one number."""
        return self in (Scaling.TENSORWISE, Scaling.STATIC)


class Accumulation(enum.StrEnum):
    """How the partial products are summed, least exact first.

    ``fast``: in the tensor core's own accumulator (about 14 bits of significand on Hopper);
    ``promoted-128``: the same, promoted to float32 every 128 products; ``fp32``: float32.
    """

    FAST = "fast"
    PROMOTED_128 = "promoted-128"
    FP32 = "fp32"

    @property
    def exactness(self) -> int:
        """Rank: a larger number is at least as exact."""
        return list(Accumulation).index(self)


class Recipe(msgspec.Struct, frozen=True, order=True):
    """How a GEMM out[M,N] = A[M,K] B[K,N] is computed.

    Attributes:
        format_a: Name of the format of A.
        format_b: Name of the format of B.
        scaling_a: Grain of the scale of A.
        scaling_b: Grain of the scale of B.
        accumulation: How the partial products are summed.
    """

    format_a: str
    format_b: str
    scaling_a: Scaling
    scaling_b: Scaling
    accumulation: Accumulation

    @property
    def name(self) -> str:
        """The recipe's name, by the grammar of this module."""
        formats = _once(self.format_a, self.format_b)
        if self.is_baseline:
            return formats
        scalings = [s for s in self.scalings if s is not Scaling.UNSCALED]
        return f"{formats}/{_once(scalings[0], scalings[-1])}/{self.accumulation}"

    def __str__(self) -> str:
        """Return the name."""
        return self.name

    @property
    def formats(self) -> tuple[FloatFormat, FloatFormat]:
        """The formats of A and B."""
        return FORMATS[self.format_a], FORMATS[self.format_b]

    @property
    def scalings(self) -> tuple[Scaling, Scaling]:
        """The grains of the scales of A and B."""
        return self.scaling_a, self.scaling_b

    @property
    def scaling(self) -> Scaling | None:
        """The grain of both scales; None where they differ, so ask ``scalings``."""
        return self.scaling_a if self.scaling_a is self.scaling_b else None

    @property
    def is_baseline(self) -> bool:
        """Whether nothing is scaled: a precision that a model may have anyway."""
        return self.scalings == (Scaling.UNSCALED, Scaling.UNSCALED)

    @property
    def is_hybrid(self) -> bool:
        """Whether one operand is in FP8 and the other is not."""
        return (self.format_a in FP8_FORMATS) is not (self.format_b in FP8_FORMATS)

    @property
    def has_static_scale(self) -> bool:
        """Whether a scale of either operand must be known beforehand."""
        return Scaling.STATIC in self.scalings

    @property
    def block_length(self) -> int | None:
        """Entries along the contraction that share a scale; None if all of them do."""
        return self.scaling_a.block_length or self.scaling_b.block_length

    def is_covered_by(self, other: Recipe) -> bool:
        """Whether a verdict on this recipe holds for ``other``: same casts, no less exact sums."""
        return (
            (self.format_a, self.format_b, self.scalings)
            == (other.format_a, other.format_b, other.scalings)
        ) and other.accumulation.exactness >= self.accumulation.exactness


_FAMILIES: tuple[frozenset[str], ...] = (
    frozenset({E4M3.name, E5M2.name}),
    frozenset({E4M3FNUZ.name, E5M2FNUZ.name}),
)
"""Formats that one instruction multiplies with each other."""

_HYBRID_FORMATS = (BF16.name, FP16.name)
_WHOLE_SCALINGS = (Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.STATIC)


def _refusal(recipe: Recipe) -> str | None:
    """Return why a combination is no recipe: no kernel computes it, or it means nothing."""
    for name, scaling in zip((recipe.format_a, recipe.format_b), recipe.scalings, strict=True):
        if (name in WIDE_FORMATS) is not (scaling is Scaling.UNSCALED):
            return f"{name} operands are {'not ' if name in WIDE_FORMATS else ''}scaled"
    exact = recipe.accumulation is Accumulation.FP32
    if recipe.is_baseline:
        if recipe.format_a != recipe.format_b:
            return f"{recipe.format_a} and {recipe.format_b} are not multiplied with each other"
        return None if exact else f"{recipe.format_a} products are summed in fp32"
    if recipe.is_hybrid:
        wide, scaling = recipe.format_a, recipe.scaling_b
        if wide in FP8_FORMATS:
            wide, scaling = recipe.format_b, recipe.scaling_a
        if wide not in _HYBRID_FORMATS:
            return f"FP8 is widened to one of {', '.join(_HYBRID_FORMATS)}, not to {wide}"
        if scaling is Scaling.MXFP8:
            return "mxfp8 is the scaling of both operands"
        return None if exact else "a hybrid multiplies in 16 bits and sums in fp32"
    family = next(f for f in _FAMILIES if recipe.format_a in f)
    if recipe.format_b not in family:
        return f"{recipe.format_a} and {recipe.format_b} are formats of different makers' chips"
    fnuz = E4M3FNUZ.name in family
    if recipe.scaling is None and not set(recipe.scalings) <= set(_WHOLE_SCALINGS):
        blocks = next(s for s in recipe.scalings if s not in _WHOLE_SCALINGS)
        return f"{blocks} is the scaling of both operands"
    if recipe.scaling is Scaling.MXFP8:
        if fnuz:
            return "the MX specification knows the OCP formats e4m3 and e5m2 only"
        return None if exact else "tensor cores that scale mxfp8 blocks themselves sum in fp32"
    if fnuz:
        return None if exact else "the matrix cores with fnuz formats sum in fp32"
    if recipe.scaling is Scaling.BLOCKWISE and recipe.accumulation is Accumulation.FAST:
        return "every block's sum is scaled and promoted by itself: promoted-128, or fp32"
    return None


@functools.cache
def _known() -> dict[str, Recipe]:
    combinations = itertools.product(FORMATS, FORMATS, Scaling, Scaling, Accumulation)
    recipes = (Recipe(a, b, sa, sb, acc) for a, b, sa, sb, acc in combinations)
    found = [recipe for recipe in recipes if _refusal(recipe) is None]
    return {recipe.name: recipe for recipe in sorted(found, key=_order)}


def _order(recipe: Recipe) -> tuple[bool, bool, int, int, int, int]:
    """Sort FP8 recipes with equal scalings first, as far as there were only those; hybrids last."""
    formats, scalings = list(FORMATS), list(Scaling)
    return (
        recipe.is_hybrid or recipe.is_baseline,
        recipe.is_baseline,
        formats.index(recipe.format_a) * len(formats) + formats.index(recipe.format_b),
        int(recipe.scaling is None),
        scalings.index(recipe.scaling_a) * len(scalings) + scalings.index(recipe.scaling_b),
        recipe.accumulation.exactness,
    )


def all_recipes() -> dict[str, Recipe]:
    """Return every recipe by name: FP8 recipes, then hybrids, then baselines."""
    return dict(_known())


DEFAULT_RECIPE_NAMES: tuple[str, ...] = (
    "e4m3/tensorwise/fast",
    "e4m3/rowwise/fast",
    "e4m3/static/fast",
    "e5m2/tensorwise/fast",
    "e5m2/rowwise/fast",
    "e5m2-e4m3/tensorwise/fast",
)
"""Considered unless told otherwise: E5M2 times E5M2 is measured for comparison; no scaled_mm of
PyTorch on CUDA accepts it, so tables use the mixed recipe for gradients."""

BASELINE_RECIPES: tuple[str, ...] = ("fp32", "tf32", "bf16", "fp16")
"""Recipes that scale nothing: they name the fallback and the candidates it competes with. Recorded,
they say what a lower precision than the model's own would do."""

DEFAULT_RECIPES: dict[str, tuple[str, ...]] = {
    "float32": ("tf32", "fp32"),
    "bfloat16": ("bf16",),
    "float16": ("fp16",),
}
"""Baselines that are a model's own precision, by the dtype of its products; the fastest is to beat.
Whether float32 products may run in TF32 is the training script's setting."""


def parse_recipe(name: str) -> Recipe:
    """Return the recipe of that name.

    Raises:
        UnknownNameError: If there is none; near misses are listed and, where the name is well
            formed but means nothing, the reason is said.
    """
    known = _known()
    if name not in known:
        raise UnknownNameError("recipe", name, known, _why_refused(name))
    return known[name]


def _why_refused(name: str) -> str | None:
    """Return why a well-formed name is no recipe; None if it is not well formed."""
    parts = name.split("/")
    if len(parts) != 3:
        return None
    formats = parts[0].split("-")
    if not (set(formats) <= set(FORMATS) and len(formats) <= 2):
        return None
    try:
        scalings = [Scaling(part) for part in parts[1].split("-")]
        accumulation = Accumulation(parts[2])
    except ValueError:
        return None
    a, b = formats[0], formats[-1]
    scaled = [f in FP8_FORMATS for f in (a, b)]
    if len(scalings) > 2 or (len(scalings) == 2 and scaled != [True, True]):
        return "give one scaling per operand that is scaled"
    first = scalings[0] if scaled[0] or not any(scaled) else Scaling.UNSCALED
    second = scalings[-1] if scaled[1] or not any(scaled) else Scaling.UNSCALED
    return _refusal(Recipe(a, b, first, second, accumulation))


def _once(a: str, b: str) -> str:
    return str(a) if a == b else f"{a}-{b}"
