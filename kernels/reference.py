"""The float64 product: what every other candidate is judged against."""

from __future__ import annotations

import dataclasses

import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.kernels.contract import Chip, Prepared, Problem, Side

PRODUCT_ROLES: frozenset[Role] = frozenset(Role) - {Role.NORM}
"""Every role that is a product."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """out = A B in float64, rounded once to the output's dtype. It enters no table."""

    name: str = "reference/fp64"
    library: str = "torch"
    recipe: str = "fp64"
    roles: frozenset[Role] = PRODUCT_ROLES
    emulated: bool = True
    abi: int = 1
    operator: str = "aten::matmul on float64"

    def version(self) -> str | None:
        """Return the version of torch."""
        return str(torch.__version__)

    def supports(self, problem: Problem, chip: Chip) -> str | None:
        """Return None for every product; a norm is none."""
        if problem.role not in self.roles:
            return f"role {problem.role} is no product"
        return None

    def prepare(
        self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
    ) -> Prepared:
        """Widen to float64, which is exact; there is nothing to scale."""
        refuse_scale(self.name, scale)
        return Prepared(operand.detach().to(torch.float64), None, operand.shape, side)

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        """Return the product."""
        return (a.data @ b.data).to(out_dtype)


def refuse_scale(candidate: str, scale: torch.Tensor | None) -> None:
    """Check that no scale is given to a candidate that does not scale.

    Raises:
        ConfigurationError: If one is.
    """
    if scale is not None:
        raise ConfigurationError(f"{candidate} does not scale its operands; give scale=None")
