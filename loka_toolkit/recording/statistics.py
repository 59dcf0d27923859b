"""Statistics of one operand, on the full tensor: moments, extremes, histogram, amax quantiles."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from loka_toolkit.artifacts.trace import (
    AMAX_QUANTILES,
    HISTOGRAM_BINS,
    HISTOGRAM_LOG2_MIN,
)

BLOCK_WIDTH = 128
_CHUNK_ELEMENTS = 1 << 22  # bounds the temporaries of a large operand to some 100 MiB

_SQRT2_MANTISSA = {torch.float32: 0x3504F3, torch.float64: 0x6A09E667F3BCC}
"""Mantissa bits of the largest value below the square root of two, per dtype."""


@dataclasses.dataclass(frozen=True)
class OperandStatistics:
    """Statistics of an operand; the columns of the table ``operands`` of the same names.

    Attributes:
        dtype: Dtype's name.
        numel: Elements.
        width: Length of the last dimension.
        mean: Mean of the finite elements, or None.
        variance: Population variance of the finite elements, or None.
        amax: Largest finite magnitude, or None.
        smallest_nonzero: Smallest non-zero finite magnitude, or None.
        zero_share: Share of zeros.
        nonfinite_count: Inf and NaN elements.
        histogram_log2: Half-octave bins of log2|x|.
        row_amax_quantiles: Amax over rows at AMAX_QUANTILES.
        column_amax_quantiles: Amax over columns.
        block128_amax_quantiles: Amax over 1x128 blocks, the last block of a row ragged.
    """

    dtype: str
    numel: int
    width: int
    mean: float | None
    variance: float | None
    amax: float | None
    smallest_nonzero: float | None
    zero_share: float
    nonfinite_count: int
    histogram_log2: list[int]
    row_amax_quantiles: list[float]
    column_amax_quantiles: list[float]
    block128_amax_quantiles: list[float]


def operand_statistics(x: torch.Tensor) -> OperandStatistics:
    """Return the statistics of an operand [.., width], any floating dtype, any strides, not empty.

    Rows are the vectors of the last dimension, columns its positions; leading dimensions count as
    rows. Sums are float64, so that bf16 and 2^24 and more elements do not matter.
    """
    width = x.shape[-1]
    rows = x.detach().reshape(-1, width)
    chunk_rows = max(1, _CHUNK_ELEMENTS // width)
    chunks = [_Chunk.of(part) for part in torch.split(rows, chunk_rows)]
    finite = sum(chunk.finite for chunk in chunks)
    mean = sum(chunk.total for chunk in chunks) / finite if finite else None
    variance = None
    if mean is not None:
        # Chan et al. 1979: pool the chunks' own sums of squared deviations.
        squares = sum(
            chunk.squares + chunk.finite * (chunk.total / chunk.finite - mean) ** 2
            for chunk in chunks
            if chunk.finite
        )
        variance = squares / finite
    histogram = torch.stack([chunk.histogram for chunk in chunks]).sum(0)
    smallest = min((c.smallest for c in chunks if c.smallest is not None), default=None)
    return OperandStatistics(
        dtype=str(x.dtype).removeprefix("torch."),
        numel=rows.numel(),
        width=width,
        mean=mean,
        variance=variance,
        amax=max(chunk.amax for chunk in chunks) if finite else None,
        smallest_nonzero=smallest,
        zero_share=sum(chunk.zeros for chunk in chunks) / rows.numel(),
        nonfinite_count=rows.numel() - finite,
        histogram_log2=histogram.tolist(),
        row_amax_quantiles=quantiles(torch.cat([chunk.row_amax for chunk in chunks])),
        column_amax_quantiles=quantiles(torch.stack([c.column_amax for c in chunks]).amax(0)),
        block128_amax_quantiles=quantiles(torch.cat([chunk.block_amax for chunk in chunks])),
    )


def quantiles(values: torch.Tensor) -> list[float]:
    """Return the AMAX_QUANTILES of a vector, linearly interpolated; any number of elements >= 1."""
    array = values.detach().to(torch.float64).cpu().numpy()
    return [float(q) for q in np.quantile(array, AMAX_QUANTILES)]


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """What one block of rows contributes."""

    finite: int
    zeros: int
    total: float
    squares: float
    amax: float
    smallest: float | None
    histogram: torch.Tensor
    row_amax: torch.Tensor
    column_amax: torch.Tensor
    block_amax: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor) -> _Chunk:
        wide = rows if rows.dtype == torch.float64 else rows.to(torch.float32)
        finite_mask = torch.isfinite(wide)
        clean = torch.where(finite_mask, wide, 0.0)
        magnitude = clean.abs()
        nonzero = magnitude > 0
        finite = int(finite_mask.sum())
        nonzeros = int(nonzero.sum())
        total = float(clean.sum(dtype=torch.float64))
        centered = clean.to(torch.float64) - (total / finite if finite else 0.0)
        squares = float(torch.where(finite_mask, centered, 0.0).square_().sum())
        smallest = float(torch.where(nonzero, magnitude, torch.inf).amin()) if nonzeros else None
        row_amax = magnitude.amax(-1)
        return cls(
            finite=finite,
            zeros=finite - nonzeros,
            total=total,
            squares=squares,
            amax=float(row_amax.amax()),
            smallest=smallest,
            histogram=_half_octaves(magnitude[nonzero]),
            row_amax=row_amax,
            column_amax=magnitude.amax(0),
            block_amax=_block_amax(magnitude),
        )


def _half_octaves(magnitude: torch.Tensor) -> torch.Tensor:
    """Count positive values in half-octave bins by their bits, so that bin edges are exact."""
    if magnitude.dtype == torch.float64:
        integers, mantissa_bits, bias = magnitude.view(torch.int64), 52, 1023
    else:
        integers, mantissa_bits, bias = magnitude.view(torch.int32), 23, 127
    exponent = (integers >> mantissa_bits) - bias  # subnormals fall far below the first bin
    mantissa = integers & ((1 << mantissa_bits) - 1)
    upper_half = mantissa > _SQRT2_MANTISSA[magnitude.dtype]
    bins = 2 * exponent + upper_half - int(2 * HISTOGRAM_LOG2_MIN)
    bins = bins.clamp_(0, HISTOGRAM_BINS - 1).to(torch.int64)
    return torch.bincount(bins, minlength=HISTOGRAM_BINS).cpu()


def _block_amax(magnitude: torch.Tensor) -> torch.Tensor:
    ragged = -magnitude.shape[-1] % BLOCK_WIDTH
    padded = torch.nn.functional.pad(magnitude, (0, ragged)) if ragged else magnitude
    return padded.reshape(magnitude.shape[0], -1, BLOCK_WIDTH).amax(-1).reshape(-1)
