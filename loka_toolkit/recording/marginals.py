"""How the values of every feature are distributed: counts on a logarithmic grid, mergeable.

Rounding to FP8 sees magnitudes relative to the largest one, so what a normal with the same mean and
variance gets wrong is what a logarithmic histogram shows: zeros, heavy tails, one-sidedness.
"""

from __future__ import annotations

import dataclasses

import torch

from loka_toolkit.artifacts.trace import MARGINAL_BINS, MARGINAL_OCTAVES

_HALF = MARGINAL_BINS // 2
_MOST_ELEMENTS = 1 << 22
"""Elements counted per step; of larger operands, evenly spaced rows are. Extremes are exact."""


@dataclasses.dataclass
class Marginals:
    """Counts and extremes of every feature.

    Attributes:
        counts: float32 [features, MARGINAL_BINS].
        least: float32 [features].
        largest: float32 [features].
    """

    counts: torch.Tensor
    least: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor) -> Marginals:
        """Count the values of rows [count, features], all finite, at least one row."""
        count, width = rows.shape
        stride = -(-rows.numel() // _MOST_ELEMENTS)
        part = rows[::stride].to(torch.float32)
        bins = bins_of(part)
        bins += torch.arange(width, device=rows.device) * MARGINAL_BINS
        flat = torch.bincount(bins.reshape(-1), minlength=width * MARGINAL_BINS)
        counts = flat.reshape(width, MARGINAL_BINS).to(torch.float32)
        if stride > 1:
            counts *= count / part.shape[0]
        # Beyond the range of float32 an infinity would poison every draw.
        limit = torch.finfo(torch.float32).max
        least, largest = (
            extreme.to(torch.float64).clamp(-limit, limit).to(torch.float32).cpu()
            for extreme in (rows.amin(0), rows.amax(0))
        )
        return cls(counts.cpu(), least, largest)

    def merge(self, other: Marginals, decay: float) -> None:
        """Add the counts of a later step; those so far count ``decay`` times."""
        self.counts *= decay
        self.counts += other.counts
        self.least = torch.minimum(self.least, other.least)
        self.largest = torch.maximum(self.largest, other.largest)


def bins_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bin of each float32 value, int64; see ``artifacts.trace.MARGINAL_BINS``."""
    # The exponent and the first bit of the mantissa: half octaves, split at 1.5.
    bits = values.contiguous().view(torch.int32)
    place = ((bits & 0x7FFFFFFF) >> 22) - 2 * (127 + MARGINAL_OCTAVES[0]) + 1
    place.clamp_(0, _HALF)
    return (_HALF + torch.where(bits < 0, -place, place)).to(torch.int64)
