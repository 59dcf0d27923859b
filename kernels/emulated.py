"""Recipes with emulated arithmetic: the yardstick on machines without FP8. Never in a table."""

from __future__ import annotations

import dataclasses
import math

import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.kernels.contract import Chip, Prepared, Problem, Side
from loka_toolkit.kernels.reference import PRODUCT_ROLES, refuse_scale
from loka_toolkit.numerics.blocks import contraction_block, spread
from loka_toolkit.numerics.casting import cast
from loka_toolkit.numerics.emulation import multiply
from loka_toolkit.numerics.recipes import Accumulation, Recipe, Scaling, all_recipes
from loka_toolkit.numerics.scaling import operand_scale

LARGEST_CPU_PRODUCTS = 2.0**34
"""Products that a CPU may emulate one by one: half a minute at 1.5 ns each."""


@dataclasses.dataclass(frozen=True)
class Emulated:
    """A recipe computed by :mod:`loka_toolkit.numerics`.

    Attributes:
        fp8: The recipe.
        parameter: Whether B is a parameter of the model; None where the recipe does not ask.
    """

    fp8: Recipe
    parameter: bool | None = None
    library: str = "loka-toolkit"
    roles: frozenset[Role] = PRODUCT_ROLES
    emulated: bool = True
    abi: int = 1
    operator: str = "loka_toolkit.numerics.accumulation.accumulate"

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return self.fp8.name

    @property
    def name(self) -> str:
        """Name of the candidate; the second one of blockwise recipes takes two activations."""
        return f"emulated{'-1x128' if self.parameter is False else ''}/{self.fp8.name}"

    def version(self) -> str | None:
        """Return the version of this package."""
        from loka_toolkit._version import __version__

        return __version__

    def supports(self, problem: Problem, chip: Chip) -> str | None:
        """Return None unless the role is no product or the emulation would take minutes."""
        if problem.role not in self.roles:
            return f"role {problem.role} is no product"
        if self.parameter not in (None, problem.multiplies_parameter):
            return parameter_mismatch(problem)
        products = problem.flops / 2
        exact = self.fp8.accumulation is Accumulation.FP32
        if chip.capability is None and not exact and products > LARGEST_CPU_PRODUCTS:
            return (
                f"emulating {products:.1e} products one by one takes minutes on a CPU "
                f"(limit 2**{int(math.log2(LARGEST_CPU_PRODUCTS))}); sub-sample rows and columns"
            )
        return None

    def prepare(
        self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
    ) -> Prepared:
        """Cast one factor.

        Raises:
            ConfigurationError: If the recipe is static and no scale is given.
        """
        which = 0 if side is Side.A else 1
        fmt, scaling = self.fp8.formats[which], self.fp8.scalings[which]
        if scaling is Scaling.UNSCALED:
            refuse_scale(self.name, scale)
        if scale is None:
            parameter = side is Side.B and bool(self.parameter)
            scale = operand_scale(operand, fmt, scaling, side.value, parameter=parameter)
        block = contraction_block(scaling, side.value)
        by_element = scale if block is None else spread(scale, block, operand.shape)
        return Prepared(cast(operand, fmt, by_element), scale, operand.shape, side, block)

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        """Return the product under the recipe's accumulator.

        Raises:
            ConfigurationError: If an operand was prepared by another candidate.
        """
        if a.scale is None or b.scale is None:
            raise ConfigurationError(f"{self.name} needs scaled operands; use its own prepare()")
        return multiply(a.data, b.data, a.scale, b.scale, self.fp8).to(out_dtype)


def candidates() -> tuple[Emulated, ...]:
    """Return one candidate per recipe, and a second one of blockwise ones for two activations."""
    found = []
    for recipe in all_recipes().values():
        asks = Scaling.BLOCKWISE in recipe.scalings
        found += [Emulated(recipe, p) for p in ((True, False) if asks else (None,))]
    return tuple(found)


def parameter_mismatch(problem: Problem) -> str:
    """Return why a candidate of blockwise scaling does not take a problem."""
    if problem.multiplies_parameter:
        return "B is a parameter, which has scales of 128x128 blocks; this one has 1x128 for both"
    return "B is no parameter, so both factors have scales of 1x128 blocks; see the one named 1x128"
