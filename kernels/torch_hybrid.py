"""Hybrids through torch.matmul: one factor kept in FP8, widened to 16 bits and multiplied there.

Widening is exact: both FP8 formats are subsets of bfloat16 and of float16. Sums are float32 (on
CUDA by ``out_dtype=torch.float32``, on a CPU by widening once more), and the scale of the FP8
factor multiplies the sum, so that no product leaves the range of 16 bits before it is scaled.
Scales of blocks along the contraction cannot wait for the sum: there the factor is scaled when it
is prepared, which rounds it once more.
"""

from __future__ import annotations

import dataclasses

import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.kernels.contract import Chip, Prepared, Problem, Side
from loka_toolkit.kernels.emulated import parameter_mismatch
from loka_toolkit.kernels.reference import PRODUCT_ROLES, refuse_scale
from loka_toolkit.kernels.torch_matmul import missing_precision
from loka_toolkit.numerics.blocks import contraction_block, spread
from loka_toolkit.numerics.casting import cast, fake_cast
from loka_toolkit.numerics.formats import FNUZ_FORMATS
from loka_toolkit.numerics.recipes import Recipe, Scaling, all_recipes
from loka_toolkit.numerics.scaling import operand_scale


@dataclasses.dataclass(frozen=True)
class TorchHybrid:
    """A hybrid recipe computed by torch's matrix product.

    Attributes:
        hybrid: The recipe.
        parameter: Whether B is a parameter of the model; None where the recipe does not ask.
    """

    hybrid: Recipe
    parameter: bool | None = None
    library: str = "torch"
    roles: frozenset[Role] = PRODUCT_ROLES
    emulated: bool = False
    abi: int = 1

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return self.hybrid.name

    @property
    def name(self) -> str:
        """Name of the candidate; the second one of blockwise recipes takes two activations."""
        return f"torch.hybrid{'-1x128' if self.parameter is False else ''}/{self.hybrid.name}"

    @property
    def operator(self) -> str:
        """What is called."""
        return f"aten::matmul on {self._wide}, summed in torch.float32"

    def version(self) -> str | None:
        """Return the version of torch."""
        return str(torch.__version__)

    def supports(self, problem: Problem, chip: Chip) -> str | None:
        """Return None, or why the chip lacks the arithmetic."""
        if problem.role not in self.roles:
            return f"role {problem.role} is no product"
        if self.parameter not in (None, problem.multiplies_parameter):
            return parameter_mismatch(problem)
        return missing_precision("bf16" if self._wide is torch.bfloat16 else "fp16", chip)

    def prepare(
        self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
    ) -> Prepared:
        """Cast one factor: to 16 bits, or to FP8 with its scale.

        Raises:
            ConfigurationError: If a scale is given to the factor that has none, or static scaling
                lacks its scale.
        """
        which = 0 if side is Side.A else 1
        fmt, scaling = self.hybrid.formats[which], self.hybrid.scalings[which]
        if scaling is Scaling.UNSCALED:
            refuse_scale(f"the {fmt.name} factor of {self.name}", scale)
            return Prepared(operand.detach().to(self._wide), None, operand.shape, side)
        if scale is None:
            parameter = side is Side.B and bool(self.parameter)
            scale = operand_scale(operand, fmt, scaling, side.value, parameter=parameter)
        block = contraction_block(scaling, side.value)
        if block is None:
            return Prepared(cast(operand, fmt, scale), scale, operand.shape, side)
        values = fake_cast(operand, fmt, spread(scale, block, operand.shape))
        return Prepared(values.to(self._wide), None, operand.shape, side)

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        """Return the product; autocast is off inside, so that the dtypes are those named."""
        left, right = a.data.to(self._wide), b.data.to(self._wide)
        with torch.autocast(left.device.type, enabled=False):
            product = _float32_product(left, right)
        for scale in (a.scale, b.scale):
            if scale is not None:
                product = product * scale
        return product.to(out_dtype)

    @property
    def _wide(self) -> torch.dtype:
        return next(f for f in self.hybrid.formats if not f.is_fp8).torch_dtype


def _float32_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply 16-bit tensors [.., M, K] and [.., K, N] with float32 sums and output."""
    if left.device.type != "cuda" or 0 in (*left.shape, right.shape[-1]):
        return torch.matmul(left.to(torch.float32), right.to(torch.float32))
    if left.ndim == 2:
        return torch.mm(left, right, out_dtype=torch.float32)
    product = torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=torch.float32)
    return product.reshape(*left.shape[:-1], right.shape[-1])


def candidates() -> tuple[TorchHybrid, ...]:
    """Return the candidates of hybrids with OCP formats, whose 16-bit values torch multiplies."""
    found = []
    for recipe in all_recipes().values():
        fnuz = not {f.name for f in recipe.formats}.isdisjoint(FNUZ_FORMATS)
        if recipe.is_hybrid and not fnuz:
            asks = Scaling.BLOCKWISE in recipe.scalings
            found += [TorchHybrid(recipe, p) for p in ((True, False) if asks else (None,))]
    return tuple(found)
