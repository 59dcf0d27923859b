"""Scales of a layer's operands, from the full tensors, computed once and shared by its sites."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from loka_toolkit.artifacts.sites import Operand
from loka_toolkit.numerics.blocks import Block, block_of, contraction_block, spread
from loka_toolkit.numerics.casting import CastEvents, cast_events
from loka_toolkit.numerics.formats import FloatFormat
from loka_toolkit.numerics.recipes import Recipe, Scaling
from loka_toolkit.numerics.scaling import (
    block_amax,
    decode_scale,
    finite_amax,
    mx_scale,
    saturation_limit,
)
from loka_toolkit.recording.products import Factors


@dataclasses.dataclass(frozen=True)
class Scales:
    """Decode scales of the two factors of a product, from the full tensors.

    Attributes:
        a: float32 [], [.., M, 1] or, for blocks along the contraction, [.., M, blocks].
        b: float32 [], [.., 1, N] or [.., blocks, N].
    """

    a: torch.Tensor
    b: torch.Tensor


class ScaleBook:
    """Scales and cast events of a layer's operands, computed once and shared by its sites.

    Args:
        static: Static amax per operand from earlier sampled steps, where there is one; that of g
            at loss scale 1.
        headroom: Factor of a static scale above that amax.

    Attributes:
        loss_scale: Loss scale of the step, known before g is.
    """

    def __init__(self, static: dict[str, float], headroom: float) -> None:
        self._static = static
        self._headroom = headroom
        self.loss_scale = 1.0
        self._amax: dict[tuple[str, int | Block | None], torch.Tensor] = {}
        self._events: dict[tuple[str, str, str], CastEvents] = {}

    def scale(
        self, operand: str, x: torch.Tensor, fmt: FloatFormat, scaling: Scaling, axis: int
    ) -> torch.Tensor | None:
        """Return the decode scale of an operand in its recorded orientation.

        Args:
            operand: Its name.
            x: [.., rows, width].
            fmt: Format.
            scaling: Grain.
            axis: Dimension of ``x``, -1 or -2, along which the product contracts.

        Returns:
            float32, [] (1 if unscaled) or of the shape of ``x`` with one entry per block along
            ``axis``, one block unless the grain has blocks; None for a static scale of which
            nothing is known yet.
        """
        if scaling is Scaling.UNSCALED:
            return torch.ones((), dtype=torch.float32, device=x.device)
        if scaling is Scaling.STATIC:
            amax = self._static.get(operand)
            if amax is None:
                return None
            amax *= abs(self.loss_scale) if operand == Operand.G else 1.0
            known = torch.tensor(amax, dtype=torch.float32, device=x.device)
            return decode_scale(known, fmt, headroom=self._headroom)
        block = block_of(scaling, _side(axis), parameter=operand == Operand.W)
        if block is not None:
            if (operand, block) not in self._amax:
                self._amax[operand, block] = block_amax(x, block)
            amaxes = self._amax[operand, block]
            grain = mx_scale if scaling is Scaling.MXFP8 else decode_scale
            across = -2 if axis == -1 else -1
            spans = grain(amaxes, fmt).repeat_interleave(block[across], dim=across)
            return spans.narrow(across, 0, x.shape[across])
        dim = axis if scaling is Scaling.ROWWISE else None
        if (operand, dim) not in self._amax:
            self._amax[operand, dim] = finite_amax(x, dim=dim, keepdim=dim is not None)
        return decode_scale(self._amax[operand, dim], fmt)

    def events(
        self,
        operand: str,
        x: torch.Tensor,
        fmt: FloatFormat,
        scaling: Scaling,
        axis: int,
        scale: torch.Tensor,
    ) -> CastEvents:
        """Return what the cast of the full operand loses."""
        grain = str(scaling) if scale.ndim == 0 else f"{scaling}{axis}"
        key = (operand, fmt.name, grain)
        if key not in self._events:
            block = contraction_block(scaling, _side(axis))
            by_element = scale if block is None else spread(scale, block, x.shape)
            limit = saturation_limit(fmt, scaling)
            self._events[key] = cast_events(x, fmt, by_element, saturated_from=limit)
        return self._events[key]


def full_scales(factors: Factors, recipe: Recipe, book: ScaleBook) -> Scales | None:
    """Return the scales of a product; None if a static one is not known yet."""
    format_a, format_b = recipe.formats
    left, right = (str(operand) for operand in factors.operands)
    axis_a, axis_b = contraction_axes(factors)
    a = book.scale(left, factors.left, format_a, recipe.scaling_a, axis_a)
    b = book.scale(right, factors.right, format_b, recipe.scaling_b, axis_b)
    if a is None or b is None:
        return None
    turn_a = factors.left_transposed and a.ndim > 0
    turn_b = factors.right_transposed and b.ndim > 0
    return Scales(a.mT if turn_a else a, b.mT if turn_b else b)


def _side(axis: int) -> Literal["a", "b"]:
    """Return which factor of a product contracts along that dimension."""
    return "a" if axis == -1 else "b"


def contraction_axes(factors: Factors) -> tuple[int, int]:
    """Return the dimensions of the recorded operands along which the product contracts."""
    return (-2 if factors.left_transposed else -1), (-1 if factors.right_transposed else -2)
