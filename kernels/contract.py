"""What a candidate kernel is: the contract that replay, dispatch and the runtime share.

A candidate computes out[M,N] = A[M,K] B[K,N], or a batch of such products. Whoever casts owns the
padding: ``prepare`` may pad, ``run`` returns the unpadded product.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol, runtime_checkable

import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.numerics.blocks import Block, spread


class Side(enum.Enum):
    """Which factor of the product an operand is."""

    A = "a"
    B = "b"


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product to compute.

    Attributes:
        role: What the product does in the step.
        batch: Number of products.
        m: Rows of the output.
        n: Columns of the output.
        k: Contraction length.
        dtype: Dtype of the operands and of the output.
        parameter: Whether B is a parameter of the model, which block scales depend on; None where
            the role must do: fwd and dgrad multiply by one.
    """

    role: Role
    batch: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    parameter: bool | None = None

    @property
    def flops(self) -> float:
        """Floating-point operations: a multiplication and an addition per product term."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def multiplies_parameter(self) -> bool:
        """Whether B is taken for a parameter."""
        return self.role in (Role.FWD, Role.DGRAD) if self.parameter is None else self.parameter


@dataclasses.dataclass(frozen=True)
class Chip:
    """Where a candidate would run, as far as constraints care.

    Attributes:
        name: ``cpu``, ``H200``, ...
        capability: CUDA compute capability, or None on a CPU.
    """

    name: str
    capability: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Prepared:
    """An operand as a candidate wants it.

    Attributes:
        data: The cast tensor, possibly padded: [.., M, K] for A, [.., K, N] for B.
        scale: Decode scale: broadcastable against ``data`` along the uncontracted dimension or,
            where there are blocks, one number per block; None where nothing was scaled. Its dtype
            may be one of scales only (e8m0).
        shape: Logical shape before padding.
        side: Which factor it is.
        block: Rows and columns of ``data`` that share a scale: (1, 128) for A, (128, 128) for a
            parameter as B; the last block of a dimension may be ragged. None if the scale is
            broadcast.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    shape: torch.Size
    side: Side
    block: Block | None = None

    def dequantized(self) -> torch.Tensor:
        """Return the operand that the kernel sees, float64, unpadded."""
        value = self.data[..., : self.shape[-2], : self.shape[-1]].to(torch.float64)
        if self.scale is None:
            return value
        scale = self.scale.to(torch.float64)
        if self.block is not None:
            return value * spread(scale, self.block, self.shape)
        if scale.ndim >= 2:  # a padded column has a scale too
            scale = scale[..., : self.shape[-2], : self.shape[-1]]
        return value * scale


@runtime_checkable
class Candidate(Protocol):
    """A kernel that implements a recipe.

    Attributes:
        name: Unique name, ``LIBRARY.FUNCTION/RECIPE``.
        library: Distribution that holds the kernel.
        recipe: Recipe name, or a baseline such as ``bf16``.
        roles: Roles it can serve.
        emulated: Whether its arithmetic is emulated; such a candidate never enters a table.
        abi: Raised when it changes what it computes or how it is called.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def library(self) -> str: ...  # noqa: D102
    @property
    def recipe(self) -> str: ...  # noqa: D102
    @property
    def roles(self) -> frozenset[Role]: ...  # noqa: D102
    @property
    def emulated(self) -> bool: ...  # noqa: D102
    @property
    def abi(self) -> int: ...  # noqa: D102

    def version(self) -> str | None:
        """Return the library's version, or None if it is not installed."""
        ...

    def supports(self, problem: Problem, chip: Chip) -> str | None:
        """Return None if it can compute ``problem`` on ``chip``, else the reason why not."""
        ...

    def prepare(
        self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
    ) -> Prepared:
        """Cast, lay out and pad one factor.

        Args:
            operand: [M, K] for side A, [K, N] for side B, with leading batch dimensions if any.
            side: Which factor.
            scale: Decode scale, float32 scalar, for static scaling; None to compute it.
        """
        ...

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        """Return the product [.., M, N] in ``out_dtype``, unpadded."""
        ...
