"""A GEMM under a recipe, emulated: cast, multiply as the recipe accumulates, scale back."""

from __future__ import annotations

import torch

from loka_toolkit.numerics.accumulation import accumulate
from loka_toolkit.numerics.blocks import Block, contraction_block, spread
from loka_toolkit.numerics.casting import cast
from loka_toolkit.numerics.recipes import Accumulation, Recipe
from loka_toolkit.numerics.scaling import operand_scale


def emulate(
    a: torch.Tensor,
    b: torch.Tensor,
    recipe: Recipe,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    parameter: bool = False,
) -> torch.Tensor:
    """Return the product that a kernel of the recipe would compute, float32, [.., M, N].

    Scales that are given come from the full tensors, so ``a`` and ``b`` may hold only some rows of
    A and some columns of B: the result is exactly that part of the full product. Never sub-sample
    the contraction.

    Args:
        a: [.., M, K], any floating dtype.
        b: [.., K, N], same leading dimensions.
        recipe: The recipe.
        scale_a: Decode scale of A as :func:`loka_toolkit.numerics.scaling.operand_scale` returns
            it, rows selected with those of ``a``; computed from ``a`` if None.
        scale_b: Decode scale of B, likewise along the columns of ``b``.
        parameter: Whether B is a parameter of the model; used only to compute ``scale_b``.

    Raises:
        ConfigurationError: If a static recipe lacks a scale or the shapes do not multiply.
    """
    format_a, format_b = recipe.formats
    if scale_a is None:
        scale_a = operand_scale(a, format_a, recipe.scaling_a, "a")
    if scale_b is None:
        scale_b = operand_scale(b, format_b, recipe.scaling_b, "b", parameter=parameter)
    block_a = contraction_block(recipe.scaling_a, "a")
    block_b = contraction_block(recipe.scaling_b, "b")
    stored_a = cast(a, format_a, scale_a if block_a is None else spread(scale_a, block_a, a.shape))
    stored_b = cast(b, format_b, scale_b if block_b is None else spread(scale_b, block_b, b.shape))
    return multiply(stored_a, stored_b, scale_a, scale_b, recipe)


def multiply(
    stored_a: torch.Tensor,
    stored_b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    recipe: Recipe,
) -> torch.Tensor:
    """Return the product of operands that are cast already, float32, [.., M, N].

    Where blocks along the contraction have scales, ``fp32`` sums the scaled products in float64 and
    rounds once. ``promoted-128`` is the kernel of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2,
    and its library DeepGEMM): the sum of a block leaves the tensor core, is multiplied by the
    product of its two scales and added to a float32 accumulator.

    Args:
        stored_a: [.., M, K], values of A's format.
        stored_b: [.., K, N], values of B's format.
        scale_a: Decode scale of A as ``operand_scale`` returns it.
        scale_b: Decode scale of B.
        recipe: The recipe.

    Raises:
        ConfigurationError: If the shapes do not multiply.
    """
    length = recipe.block_length
    if length is None:
        return scaled_back(accumulate(stored_a, stored_b, recipe.accumulation), scale_a, scale_b)
    if recipe.accumulation is Accumulation.FP32:
        return accumulate(
            _dequantized(stored_a, scale_a, contraction_block(recipe.scaling_a, "a")),
            _dequantized(stored_b, scale_b, contraction_block(recipe.scaling_b, "b")),
            Accumulation.FP32,
        )
    shape = (*stored_a.shape[:-1], stored_b.shape[-1])
    total = torch.zeros(shape, dtype=torch.float32, device=stored_a.device)
    for index, start in enumerate(range(0, stored_a.shape[-1], length)):
        part = accumulate(
            stored_a[..., start : start + length],
            stored_b[..., start : start + length, :],
            Accumulation.FAST,
        )
        scale = scale_a[..., index, None] * scale_b[..., None, index, :]
        # Fused in the kernel: rounded to float32 once.
        total = (total.to(torch.float64) + part.to(torch.float64) * scale).to(torch.float32)
    return total


def _dequantized(stored: torch.Tensor, scale: torch.Tensor, block: Block | None) -> torch.Tensor:
    wide = scale.to(torch.float64)
    wide = wide if block is None else spread(wide, block, stored.shape)
    return stored.to(torch.float64) * wide


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
