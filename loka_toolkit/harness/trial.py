"""One draw of a workload and everything that is known about its product before a kernel runs."""

from __future__ import annotations

import dataclasses

import torch

from loka_toolkit.harness.sampling import OutputSample
from loka_toolkit.kernels.contract import Candidate, Prepared, Side
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.metrics import product_error
from loka_toolkit.numerics.recipes import BASELINE_RECIPES, Recipe, Scaling, parse_recipe
from loka_toolkit.numerics.scaling import STATIC_HEADROOM, decode_scale, finite_amax, operand_scale

UNQUANTIZED = ("fp64", *BASELINE_RECIPES)
"""Recipes without FP8: there is nothing to emulate but the rounding of operands and output."""

_ROUNDED_TO = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

TF32_MANTISSA_BITS = 10


@dataclasses.dataclass(frozen=True)
class Emulation:
    """How a recipe fares on a draw, by emulation.

    Attributes:
        relative_error: Against the originals; None if 0/0.
        square_error: Squared error of each sampled output element, float64.
    """

    relative_error: float | None
    square_error: torch.Tensor


def recipe_of(candidate: Candidate) -> Recipe | None:
    """Return the candidate's FP8 recipe, or None if its recipe is a baseline such as ``bf16``.

    Raises:
        UnknownNameError: If its recipe is neither.
    """
    return None if candidate.recipe in UNQUANTIZED else parse_recipe(candidate.recipe)


class Trial:
    """One draw and what is known about its product, shared by all candidates that are judged on it.

    Args:
        a: [.., M, K], as the training job would multiply it.
        b: [.., K, N].
        out_dtype: Dtype of the output.
        amax: Largest magnitudes recorded of A and B, for static scales.
        parameter: Whether B is a parameter of the model, which block scales depend on.
    """

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out_dtype: torch.dtype,
        amax: tuple[float | None, float | None] = (None, None),
        *,
        parameter: bool = False,
    ) -> None:
        self.a = a
        self.b = b
        self.out_dtype = out_dtype
        self.sample = OutputSample.of(a, b)
        self.parameter = parameter
        self._amax = amax
        self._emulations: dict[str, Emulation] = {}
        part_a, part_b = self.sample.rows(a), self.sample.columns(b)
        self.reference = part_a.to(torch.float64) @ part_b.to(torch.float64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the product."""
        return (*self.a.shape[:-1], self.b.shape[-1])

    def static_scales(self, recipe: Recipe | None) -> tuple[torch.Tensor | None, ...]:
        """Return the scales of A and B known beforehand, scalars; None where it is not static.

        The draw's own amax counts beside the recorded one: saturation under a stale scale is a
        property of the training run and judged there, not one of the kernel.
        """
        if recipe is None or not recipe.has_static_scale:
            return None, None
        sides = zip((self.a, self.b), self._amax, recipe.formats, recipe.scalings, strict=True)
        return tuple(
            decode_scale(
                torch.clamp(finite_amax(x), min=recorded or 0.0), fmt, headroom=STATIC_HEADROOM
            )
            if scaling is Scaling.STATIC
            else None
            for x, recorded, fmt, scaling in sides
        )

    def emulation(self, recipe_name: str) -> Emulation | None:
        """Return how a recipe's emulation fares against the originals.

        None for recipes that leave operands as they are: nothing is to be emulated.
        """
        if recipe_name in ("fp64", "fp32"):
            return None
        if recipe_name not in self._emulations:
            value = self._emulate(recipe_name).to(narrower(recipe_name, self.out_dtype))
            wide = value.to(torch.float64)
            self._emulations[recipe_name] = Emulation(
                product_error(self.reference, wide).relative_frobenius,
                (wide - self.reference).square(),
            )
        return self._emulations[recipe_name]

    def _emulate(self, recipe_name: str) -> torch.Tensor:
        """Return the recipe's product on the sample, scales taken from the full operands.

        A baseline's is the float64 product of operands rounded to its format.
        """
        part_a, part_b = self.sample.rows(self.a), self.sample.columns(self.b)
        if recipe_name in UNQUANTIZED:
            return _rounded(part_a, recipe_name) @ _rounded(part_b, recipe_name)
        recipe = parse_recipe(recipe_name)
        static_a, static_b = self.static_scales(recipe)
        format_a, format_b = recipe.formats
        scale_a = operand_scale(self.a, format_a, recipe.scaling_a, "a", static_a)
        scale_b = operand_scale(
            self.b, format_b, recipe.scaling_b, "b", static_b, parameter=self.parameter
        )
        return emulate(
            part_a,
            part_b,
            recipe,
            scale_a=self.sample.rows(scale_a) if scale_a.ndim else scale_a,
            scale_b=self.sample.columns(scale_b) if scale_b.ndim else scale_b,
        )


def prepare(candidate: Candidate, trial: Trial) -> tuple[Prepared, Prepared]:
    """Let a candidate cast both factors of a draw."""
    scale_a, scale_b = trial.static_scales(recipe_of(candidate))
    return (
        candidate.prepare(trial.a, Side.A, scale_a),
        candidate.prepare(trial.b, Side.B, scale_b),
    )


def narrower(recipe_name: str, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that limits the output: a bf16 product is bf16 before it is widened."""
    own = _ROUNDED_TO.get(recipe_name, out_dtype)
    return own if torch.finfo(own).eps > torch.finfo(out_dtype).eps else out_dtype


def _rounded(value: torch.Tensor, baseline: str) -> torch.Tensor:
    if baseline == "tf32":
        bits = value.to(torch.float32).contiguous().view(torch.int32)
        dropped = 23 - TF32_MANTISSA_BITS
        kept = (bits + (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)) & -(1 << dropped)
        return kept.view(torch.float32).to(torch.float64)
    return value.to(_ROUNDED_TO[baseline]).to(torch.float64)
