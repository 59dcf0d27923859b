"""Own Triton kernels as candidates: FP8 products with tensor-wise, row-wise and static scales.

What they take that torch's scaled_mm does not: E5M2 times E5M2, batches, and another grain of
scales for each factor. Casts are one kernel (row-wise with short rows, static) or two (see
:mod:`loka_toolkit.kernels.triton_cast`); products are :mod:`loka_toolkit.kernels.triton_gemm`.

Triton is imported when a candidate first casts or multiplies, so that this package works without
it. Where ``TRITON_INTERPRET=1`` is set, its interpreter runs the kernels on any device: then they
are emulated, are not timed, and enter no table.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import sys
from typing import Any

import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.kernels.contract import Chip, Prepared, Problem, Side
from loka_toolkit.kernels.reference import PRODUCT_ROLES
from loka_toolkit.numerics.formats import E4M3, E5M2
from loka_toolkit.numerics.recipes import Accumulation, Recipe, Scaling, all_recipes

FP8_CAPABILITY = (8, 9)
PROMOTING_CAPABILITY = (9, 0)
OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (E4M3, E5M2)
"""NVIDIA's tensor cores multiply no others; the kernels themselves know fnuz formats too."""
SCALINGS = (Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.STATIC)
ACCUMULATIONS = (Accumulation.FAST, Accumulation.PROMOTED_128)

LARGEST_INTERPRETED_PRODUCTS = 2.0**30
"""Products that the interpreter may compute: some ten seconds at 10 ns each."""

_ON = ("1", "true", "yes", "on", "y")


@dataclasses.dataclass(frozen=True)
class TritonScaledMM:
    """A recipe computed by own Triton kernels.

    Attributes:
        fp8: The recipe.
    """

    fp8: Recipe
    library: str = "triton"
    roles: frozenset[Role] = PRODUCT_ROLES
    abi: int = 1
    operator: str = "loka_toolkit.kernels.triton_gemm.scaled_product"

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return self.fp8.name

    @property
    def name(self) -> str:
        """Name of the candidate."""
        return f"triton.scaled_mm/{self.fp8.name}"

    @property
    def emulated(self) -> bool:
        """Whether Triton's interpreter runs the kernels in this process."""
        return interpreting()

    def version(self) -> str | None:
        """Return the version of Triton, or None if it is not installed."""
        try:
            return importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            return None

    def supports(self, problem: Problem, chip: Chip) -> str | None:
        """Return None, or the constraint that is not met."""
        if problem.role not in self.roles:
            return f"role {problem.role} is no product"
        if problem.dtype not in OUTPUT_DTYPES:
            return f"the kernels cast and write float32, bfloat16 and float16, not {problem.dtype}"
        if chip.capability is None:
            return self._cpu_constraint(problem)
        have = f"{chip.name} has {chip.capability[0]}.{chip.capability[1]}"
        if chip.capability < FP8_CAPABILITY:
            return f"FP8 tensor cores need compute capability 8.9 and {have}"
        promoted = self.fp8.accumulation is Accumulation.PROMOTED_128
        if promoted and chip.capability != PROMOTING_CAPABILITY:
            return (
                f"Triton promotes sums to float32 at compute capability 9.0 only and {have}; "
                "see fast"
            )
        return None

    def _cpu_constraint(self, problem: Problem) -> str | None:
        if not interpreting():
            return (
                "Triton has no CPU backend: on a CPU its kernels run under the interpreter only "
                "(TRITON_INTERPRET=1, set before Triton is imported), for tests and never in a "
                "table"
            )
        products = problem.flops / 2
        if products > LARGEST_INTERPRETED_PRODUCTS:
            return f"interpreting {products:.1e} products takes minutes (limit 2**30)"
        return None

    def prepare(
        self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
    ) -> Prepared:
        """Cast one factor and lay it out along the contraction, which is padded with zeros.

        A becomes [.., M, K'] row-major, B becomes [.., K', N] column-major; K' is a multiple of 16.

        Raises:
            ConfigurationError: If the dtype is not one the kernels cast, or static scaling lacks
                its scale.
        """
        from loka_toolkit.kernels.triton_cast import Layout, cast_by_line, cast_with_scale

        which = 0 if side is Side.A else 1
        fmt, scaling = self.fp8.formats[which], self.fp8.scalings[which]
        layout = Layout.ROW if side is Side.A else Layout.COLUMN
        if scale is None and scaling is Scaling.ROWWISE:
            found = cast_by_line(operand, fmt, -1 if side is Side.A else -2, layout)
        elif scale is None and scaling is Scaling.STATIC:
            raise ConfigurationError(
                f"{self.name}: static scaling needs the scale from earlier steps; pass scale"
            )
        else:
            found = cast_with_scale(operand, fmt, scale, (layout,))
        return Prepared(found.data(layout), found.scale, operand.shape, side)

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        """Return the product [.., M, N].

        Raises:
            ConfigurationError: If an operand was not scaled.
        """
        from loka_toolkit.kernels.triton_gemm import scaled_product

        if a.scale is None or b.scale is None:
            raise ConfigurationError(f"{self.name} needs scaled operands; use its own prepare()")
        return scaled_product(a.data, b.data, a.scale, b.scale, self.fp8.accumulation, out_dtype)


def candidates() -> tuple[TritonScaledMM, ...]:
    """Return one candidate per FP8 recipe that the kernels compute."""
    return tuple(
        TritonScaledMM(recipe)
        for recipe in all_recipes().values()
        if {*recipe.formats} <= {*FORMATS}
        and {*recipe.scalings} <= {*SCALINGS}
        and recipe.accumulation in ACCUMULATIONS
    )


def interpreting() -> bool:
    """Return whether Triton's interpreter runs, or would run, the kernels in this process.

    Triton reads the variable when a kernel is defined; later changes of it change nothing.
    """
    loaded: Any = sys.modules.get("loka_toolkit.kernels.triton_cast")
    if loaded is not None:
        return bool(loaded.interpreted())
    return os.environ.get("TRITON_INTERPRET", "").lower() in _ON
