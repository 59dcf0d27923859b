"""FP8 recipes with emulated arithmetic: the yardstick on machines without FP8. Never in a table."""

from __future__ import annotations

import dataclasses
import math

import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.kernels.contract import Chip, Prepared, Problem, Side
from loka_toolkit.kernels.reference import PRODUCT_ROLES
from loka_toolkit.numerics.accumulation import accumulate
from loka_toolkit.numerics.casting import cast
from loka_toolkit.numerics.emulation import scaled_back
from loka_toolkit.numerics.recipes import Accumulation, Recipe, all_recipes
from loka_toolkit.numerics.scaling import operand_scale

LARGEST_CPU_PRODUCTS = 2.0**34
"""Products that a CPU may emulate one by one: half a minute at 1.5 ns each."""


@dataclasses.dataclass(frozen=True)
class Emulated:
    """A recipe computed by :mod:`loka_toolkit.numerics`.

    Attributes:
        fp8: The recipe.
    """

    fp8: Recipe
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
        """Name of the candidate."""
        return f"emulated/{self.fp8.name}"

    def version(self) -> str | None:
        """Return the version of this package."""
        from loka_toolkit._version import __version__

        return __version__

    def supports(self, problem: Problem, chip: Chip) -> str | None:
        """Return None unless the role is no product or the emulation would take minutes."""
        if problem.role not in self.roles:
            return f"role {problem.role} is no product"
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
        fmt = self.fp8.formats[0 if side is Side.A else 1]
        if scale is None:
            scale = operand_scale(operand, fmt, self.fp8.scaling, side.value)
        return Prepared(cast(operand, fmt, scale), scale, operand.shape, side)

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        """Return the product under the recipe's accumulator."""
        product = accumulate(a.data, b.data, self.fp8.accumulation)
        return scaled_back(product, a.scale, b.scale).to(out_dtype)


def candidates() -> tuple[Emulated, ...]:
    """Return one candidate per FP8 recipe."""
    return tuple(Emulated(recipe) for recipe in all_recipes().values())
