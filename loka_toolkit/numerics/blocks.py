"""Blocks: the parts of an operand that share a scale, and the geometry of such scales.

A block is (rows, columns) of a factor of out[M,N] = A[M,K] B[K,N]. Blocks start at the first row
and column; the last one of a dimension may be ragged.
"""

from __future__ import annotations

from typing import Literal

import torch

from loka_toolkit.numerics.recipes import Scaling

Block = tuple[int, int]


def block_of(scaling: Scaling, side: Literal["a", "b"], *, parameter: bool) -> Block | None:
    """Return which entries of a factor share a scale; None if the grain is no block.

    Blockwise: 1x128 along the contraction, and 128x128 for a parameter. mxfp8: 1x32 along the
    contraction, whatever the operand.

    Args:
        scaling: The grain.
        side: Which factor; A contracts along its columns, B along its rows.
        parameter: Whether the factor is a parameter of the model.
    """
    length = scaling.block_length
    if length is None:
        return None
    across = length if parameter and scaling is Scaling.BLOCKWISE else 1
    return (across, length) if side == "a" else (length, across)


def contraction_block(scaling: Scaling, side: Literal["a", "b"]) -> Block | None:
    """Return the block of one row of A (one column of B); None if the grain is no block.

    The grain of scales as :func:`loka_toolkit.numerics.scaling.operand_scale` returns them.
    """
    return block_of(scaling, side, parameter=False)


def block_count(length: int, block: int) -> int:
    """Return how many blocks cover a dimension."""
    return -(-length // block)


def spread(scale: torch.Tensor, block: Block, shape: torch.Size) -> torch.Tensor:
    """Return the scale of every element: [.., rows, columns] of ``shape``.

    Args:
        scale: One number per block, [.., ceil(rows / block rows), ceil(columns / block columns)]
            or more, of padding.
        block: Rows and columns of a block.
        shape: Of the factor.
    """
    for dim, size in ((-2, block[0]), (-1, block[1])):
        if size > 1:
            scale = scale.repeat_interleave(size, dim=dim)
        scale = scale.narrow(dim, 0, shape[dim])
    return scale
