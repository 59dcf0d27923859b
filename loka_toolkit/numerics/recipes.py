"""Recipes: how a GEMM is computed, as a value with a name such as ``e4m3/rowwise/fast``."""

from __future__ import annotations

import enum

import msgspec

from loka_toolkit.errors import UnknownNameError
from loka_toolkit.numerics.formats import FP8_FORMATS, FloatFormat


class Scaling(enum.StrEnum):
    """At which grain a scale is computed.

    ``tensorwise``: one scale per tensor from its amax. ``rowwise``: one scale per row of A and per
    column of B (along the contraction). ``static``: tensorwise with a scale known beforehand.
    """

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    STATIC = "static"


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
    """How a GEMM out[M,N] = A[M,K] B[K,N] is computed in FP8.

    Attributes:
        format_a: Name of the format of A.
        format_b: Name of the format of B.
        scaling: Grain of the scales of both operands.
        accumulation: How the partial products are summed.
    """

    format_a: str
    format_b: str
    scaling: Scaling
    accumulation: Accumulation

    @property
    def name(self) -> str:
        """The recipe's name, for example ``e4m3/rowwise/fast``; mixed ``e5m2-e4m3/...``."""
        same = self.format_a == self.format_b
        formats = self.format_a if same else f"{self.format_a}-{self.format_b}"
        return f"{formats}/{self.scaling}/{self.accumulation}"

    def __str__(self) -> str:
        """Return the name."""
        return self.name

    @property
    def formats(self) -> tuple[FloatFormat, FloatFormat]:
        """The formats of A and B."""
        return FP8_FORMATS[self.format_a], FP8_FORMATS[self.format_b]

    def is_covered_by(self, other: Recipe) -> bool:
        """Whether a verdict on this recipe holds for ``other``: same casts, no less exact sums."""
        return (
            (self.format_a, self.format_b, self.scaling)
            == (other.format_a, other.format_b, other.scaling)
        ) and other.accumulation.exactness >= self.accumulation.exactness


def all_recipes() -> dict[str, Recipe]:
    """Return every FP8 recipe by name."""
    found = (
        Recipe(a, b, scaling, accumulation)
        for a in FP8_FORMATS
        for b in FP8_FORMATS
        for scaling in Scaling
        for accumulation in Accumulation
    )
    return {recipe.name: recipe for recipe in found}


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
"""Recipes that are no FP8 recipe: they name the fallback and the candidates it competes with."""

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
        UnknownNameError: If there is none; near misses are listed.
    """
    known = all_recipes()
    if name not in known:
        raise UnknownNameError("recipe", name, known)
    return known[name]
