"""Casts into a format, round to nearest even, with every special case spelled out.

A value is divided by the decode scale in float32 (float64 for float64 input) and rounded once.
Finite values beyond the largest finite value of an FP8 format saturate to it; in a format of 16 or
32 bits they become Inf, as in IEEE 754 and in torch's own conversions. NaN stays NaN. Inf
propagates: as Inf where the format has one (e5m2), as NaN where it has none (e4m3, fnuz), so that a
gradient scaler still sees it. -0 stays -0, except in fnuz formats, which have none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.formats import TF32, FloatFormat

GROUP_WIDTH = 16
"""Consecutive entries of the last logical dimension that form a group of columns."""


def cast(x: torch.Tensor, fmt: FloatFormat, scale: torch.Tensor) -> torch.Tensor:
    """Return x / scale in ``fmt``, dtype ``fmt.torch_dtype``, same shape.

    Args:
        x: Any shape, strides and floating dtype.
        fmt: The target format.
        scale: Decode scale, broadcastable against ``x``; for scales of blocks see
            :func:`loka_toolkit.numerics.blocks.spread`.
    """
    return _stored(_scaled(x, scale), fmt)


def _stored(y: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    # torch's own conversion of float32 rounds to nearest even; it is wrong only about what is dealt
    # with here (Inf and overflow to FP8, differently by version). From float64 it rounds twice.
    if y.dtype == torch.float32 and fmt is not TF32:
        return (_saturated(y, fmt) if fmt.is_fp8 else y).to(fmt.torch_dtype)
    return rounded(y, fmt).to(fmt.torch_dtype)


def cast_values(x: torch.Tensor, fmt: FloatFormat, scale: torch.Tensor) -> torch.Tensor:
    """Return the values of :func:`cast`, unscaled, in float32 (float64 for float64).

    Computed and not stored: on a CPU torch reads float8 more slowly than it rounds.
    """
    y = _scaled(x, scale)
    return (
        rounded(y, fmt) if fmt.is_fp8 or y.dtype == torch.float64 else _stored(y, fmt).to(y.dtype)
    )


def fake_cast(x: torch.Tensor, fmt: FloatFormat, scale: torch.Tensor) -> torch.Tensor:
    """Return what the cast of ``x`` stands for: stored * scale, float32 (float64 for float64)."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return cast(x, fmt, scale).to(dtype).mul_(scale.to(dtype))


def rounded(y: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Return the values of ``fmt`` nearest to ``y``, in the dtype of ``y`` (float32 or float64).

    Arithmetic only, so it serves formats that torch does not store: any :class:`FloatFormat` of
    fewer exponent and mantissa bits than the dtype. Special cases are those of :func:`cast`.
    """
    if fmt.is_fp8:
        return _rounded(_saturated(y.detach(), fmt), fmt)
    nearest = _rounded(y.detach(), fmt)
    return torch.where(nearest.abs() > fmt.max, y.sign() * math.inf, nearest)


def _saturated(y: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    bounded = y.clamp(-fmt.max, fmt.max)
    if y.device.type == "cpu" and y.numel() and bool(torch.isfinite(y.abs().amax())):
        return bounded  # where to ask costs nothing; on a GPU it would wait for the stream
    infinite = torch.isinf(y)
    if fmt.has_infinity:
        return torch.where(infinite, y, bounded)
    return bounded.masked_fill_(infinite, math.nan)


def _rounded(y: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Round to nearest even: quanta are powers of two, so only ``torch.round`` rounds."""
    binade = power_of_two(y).clamp_(fmt.smallest_normal, 2.0**fmt.max_exponent)
    quantum = binade.mul_(2.0**-fmt.mantissa_bits)
    return y.div(quantum).round_().mul_(quantum)


def power_of_two(y: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two not above |y|; 0 where y is subnormal, Inf for Inf or NaN.

    Args:
        y: float32 or float64, any shape; the result is like it.
    """
    if y.dtype == torch.float64:
        return (y.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return (y.view(torch.int32) & 0x7F800000).view(torch.float32)


@dataclasses.dataclass(frozen=True)
class CastEvents:
    """What a cast loses.

    Attributes:
        nonzero: Finite elements other than 0 and -0.
        underflowed: Of these, how many become zero. Results that are subnormal are no underflow.
        saturated: Of these, how many are clipped: those that rounding with an unbounded exponent
            would carry beyond the largest finite value.
        nonfinite: Inf and NaN elements.
        underflow_share: underflowed / nonzero; 0 if nothing is non-zero.
        saturation_share: saturated / nonzero; 0 if nothing is non-zero.
        worst_group_share: Largest underflow share of a group of columns.
        worst_group: The columns of that group (the first, if several); None if nothing underflows.
    """

    nonzero: int
    underflowed: int
    saturated: int
    nonfinite: int
    underflow_share: float
    saturation_share: float
    worst_group_share: float
    worst_group: slice | None


def cast_events(
    x: torch.Tensor,
    fmt: FloatFormat,
    scale: torch.Tensor,
    groups: Sequence[slice] | None = None,
    *,
    saturated_from: float | None = None,
) -> CastEvents:
    """Count what the cast of ``x`` loses.

    Args:
        x: [.., columns]; the last dimension is the last logical one.
        fmt: The target format.
        scale: Decode scale, broadcastable against ``x``; 1 if it is not scaled.
        groups: Groups of columns; by default 16 consecutive ones, the last group ragged.
        saturated_from: Magnitude after scaling from which an element counts as saturated; by
            default where rounding with an unbounded exponent leaves the format. See
            :func:`loka_toolkit.numerics.scaling.saturation_limit`.

    Raises:
        ConfigurationError: If a group is empty, has a stride or lies outside of the columns.
    """
    columns = x.shape[-1] if x.ndim else 1
    slices = _groups_of(columns) if groups is None else _checked(groups, columns)
    magnitude = _scaled(x, scale).abs_()
    zeros = _column_counts(x == 0, columns)
    # What becomes zero includes what is zero; a comparison with NaN is false.
    small = _column_counts(magnitude <= fmt.smallest_subnormal / 2, columns)
    nonzero, nonfinite, infinite = x.numel() - int(zeros.sum()), 0, 0
    by_column = (x.numel() // max(columns, 1)) - zeros
    largest = float(magnitude.amax()) if x.numel() else 0.0
    if not math.isfinite(largest):
        by_column = by_column - _column_counts(torch.isfinite(x).logical_not_(), columns)
        nonfinite = nonzero - int(by_column.sum())
        nonzero -= nonfinite
        infinite = int(torch.count_nonzero(torch.isinf(x)))
    saturated = 0
    threshold = fmt.saturation_threshold if saturated_from is None else saturated_from
    if not largest < threshold:  # NaN hides what is beside it
        at_threshold = fmt.saturates_at_threshold or saturated_from is not None
        clipped = magnitude >= threshold if at_threshold else magnitude > threshold
        saturated = int(torch.count_nonzero(clipped)) - infinite
    counts = torch.stack([by_column, (small - zeros).clamp_(min=0)]).tolist()
    worst_share, worst_group = 0.0, None
    for group in slices:
        share = _share(sum(counts[1][group]), sum(counts[0][group]))
        if share > worst_share:
            worst_share, worst_group = share, group
    lost = sum(counts[1])
    return CastEvents(
        nonzero=nonzero,
        underflowed=lost,
        saturated=saturated,
        nonfinite=nonfinite,
        underflow_share=_share(lost, nonzero),
        saturation_share=_share(saturated, nonzero),
        worst_group_share=worst_share,
        worst_group=worst_group,
    )


def _column_counts(flags: torch.Tensor, columns: int) -> torch.Tensor:
    # 32 bits hold the rows of a tensor, and torch sums them five times as fast as 64.
    return flags.reshape(math.prod(flags.shape[:-1]), columns).sum(0, dtype=torch.int32)


def _scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.detach().to(dtype) / scale.to(dtype)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _groups_of(columns: int) -> list[slice]:
    starts = range(0, columns, GROUP_WIDTH)
    return [slice(start, min(start + GROUP_WIDTH, columns)) for start in starts]


def _checked(groups: Sequence[slice], columns: int) -> list[slice]:
    for group in groups:
        start = group.start or 0
        stop = columns if group.stop is None else group.stop
        if group.step not in (None, 1) or not 0 <= start < stop <= columns:
            raise ConfigurationError(
                f"column group {group!r} is empty, has a stride or leaves the {columns} columns; "
                f"give slice(start, stop) with 0 <= start < stop <= {columns}"
            )
    return [slice(g.start or 0, columns if g.stop is None else g.stop) for g in groups]
