"""A GEMM under an FP8 recipe, emulated: cast, multiply as the recipe accumulates, scale back."""

from __future__ import annotations

import torch

from loka_toolkit.numerics.accumulation import accumulate
from loka_toolkit.numerics.casting import cast
from loka_toolkit.numerics.recipes import Recipe
from loka_toolkit.numerics.scaling import operand_scale


def emulate(
    a: torch.Tensor,
    b: torch.Tensor,
    recipe: Recipe,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product that a kernel of the recipe would compute, float32, [.., M, N].

    Scales that are given come from the full tensors, so ``a`` and ``b`` may hold only some rows of
    A and some columns of B: the result is exactly that part of the full product. Never sub-sample
    the contraction.

    Args:
        a: [.., M, K], any floating dtype.
        b: [.., K, N], same leading dimensions.
        recipe: The recipe.
        scale_a: Decode scale of A, broadcastable against ``a`` with length 1 along K; computed
            from ``a`` if None.
        scale_b: Decode scale of B, likewise along K of ``b``.

    Raises:
        ConfigurationError: If a static recipe lacks a scale or the shapes do not multiply.
    """
    format_a, format_b = recipe.formats
    if scale_a is None:
        scale_a = operand_scale(a, format_a, recipe.scaling, "a")
    if scale_b is None:
        scale_b = operand_scale(b, format_b, recipe.scaling, "b")
    product = accumulate(
        cast(a, format_a, scale_a), cast(b, format_b, scale_b), recipe.accumulation
    )
    return scaled_back(product, scale_a, scale_b)


def scaled_back(
    product: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None
) -> torch.Tensor:
    """Return product * scale_a * scale_b, float32.

    Computed in float64, because the product of two scales may leave the range of float32.
    """
    wide = product.to(torch.float64)
    for scale in (scale_a, scale_b):
        if scale is not None:
            wide = wide * scale.to(torch.float64)
    return wide.to(torch.float32)
