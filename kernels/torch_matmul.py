"""Products without FP8, through torch.matmul: what every FP8 candidate must beat."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.kernels.contract import Chip, Prepared, Problem, Side
from loka_toolkit.kernels.reference import PRODUCT_ROLES, refuse_scale

TF32_CAPABILITY = (8, 0)
"""The first compute capability with TF32 and BF16 tensor cores."""

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def missing_precision(recipe: str, chip: Chip) -> str | None:
    """Return why a chip does not multiply in a baseline's precision; None if it does.

    Args:
        recipe: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        chip: The chip.
    """
    if recipe == "tf32" and chip.capability is None:
        return "tf32 is an arithmetic of CUDA tensor cores; a CPU has none"
    if chip.capability is None or recipe not in ("tf32", "bf16"):
        return None
    if chip.capability < TF32_CAPABILITY:
        have = f"{chip.capability[0]}.{chip.capability[1]}"
        return f"{recipe} needs compute capability 8.0 and {chip.name} has {have}"
    return None


@dataclasses.dataclass(frozen=True)
class TorchMatmul:
    """torch.matmul in one of the baseline precisions.

    Attributes:
        recipe: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
    """

    recipe: str
    library: str = "torch"
    roles: frozenset[Role] = PRODUCT_ROLES
    emulated: bool = False
    abi: int = 1

    @property
    def name(self) -> str:
        """Name of the candidate."""
        return f"torch.matmul/{self.recipe}"

    @property
    def operator(self) -> str:
        """What is called."""
        tf32 = " with TF32 allowed" if self.recipe == "tf32" else ""
        return f"aten::matmul on {_DTYPES[self.recipe]}{tf32}"

    def version(self) -> str | None:
        """Return the version of torch."""
        return str(torch.__version__)

    def supports(self, problem: Problem, chip: Chip) -> str | None:
        """Return None, or why the chip lacks the arithmetic."""
        if problem.role not in self.roles:
            return f"role {problem.role} is no product"
        return missing_precision(self.recipe, chip)

    def prepare(
        self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
    ) -> Prepared:
        """Cast one factor to the baseline's dtype; its strides stay.

        Raises:
            ConfigurationError: If a scale is given.
        """
        refuse_scale(self.name, scale)
        return Prepared(operand.detach().to(_DTYPES[self.recipe]), None, operand.shape, side)

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        """Return the product; autocast is off inside, so that the dtype is the one named."""
        precision = _fp32_precision("tf32" if self.recipe == "tf32" else "ieee")
        with torch.autocast(a.data.device.type, enabled=False), precision:
            return torch.matmul(a.data, b.data).to(out_dtype)


@contextlib.contextmanager
def _fp32_precision(cuda: str) -> Iterator[None]:
    """Say how float32 products are computed, on a CPU exactly, and undo it whatever happens.

    Without it the user's own choice, for example ``torch.set_float32_matmul_precision``, would
    decide what a candidate named fp32 computes.
    """
    mkldnn: Any = torch.backends.mkldnn  # its stub lacks ``matmul``
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend, precision in zip(backends, (cuda, "ieee"), strict=True):
            backend.fp32_precision = precision
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def candidates() -> tuple[TorchMatmul, ...]:
    """Return one candidate per baseline."""
    return tuple(TorchMatmul(recipe) for recipe in _DTYPES)
