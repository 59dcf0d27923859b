"""How the norms of samples are distributed: counts on a grid of 16 bins per octave, mergeable."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from loka_toolkit.artifacts.trace import NORM_LEVELS

_SHIFT = 48  # of the 52 mantissa bits of float64, four tell bins apart
_FIRST = (1023 - 200) << 4
_BINS = 400 << 4


class NormCounts:
    """Counts of norms between 2**-200 and 2**200, and their extremes.

    Args:
        norms: float64 [samples], finite and not negative.
    """

    def __init__(self, norms: torch.Tensor) -> None:
        place = ((norms.to(torch.float64).view(torch.int64) >> _SHIFT) - _FIRST).clamp_(
            0, _BINS - 1
        )
        self._counts = torch.bincount(place, minlength=_BINS).to(torch.float64).cpu()
        self._least = float(norms.min())
        self._largest = float(norms.max())

    def merge(self, other: NormCounts, decay: float) -> None:
        """Add the counts of a later step; those so far count ``decay`` times."""
        self._counts = self._counts * decay + other._counts
        self._least = min(self._least, other._least)
        self._largest = max(self._largest, other._largest)

    def quantiles(self) -> npt.NDArray[np.float64]:
        """Return the quantiles of the norms at ``NORM_LEVELS``.

        Linear in a bin, so within 1/16 of the true ones.
        """
        edges = (np.arange(_BINS + 1, dtype=np.int64) + _FIRST) << _SHIFT
        values = edges.view(np.float64).copy()
        values[0] = 0.0
        heights = np.concatenate([[0.0], np.cumsum(self._counts.numpy())])
        # Of equal heights the last edge below and the first above an occupied bin count.
        keep = np.flatnonzero(np.diff(heights) > 0)
        positions = np.stack([heights[keep], heights[keep + 1]], axis=1).reshape(-1)
        bounds = np.stack([values[keep], values[keep + 1]], axis=1).reshape(-1)
        bounds = np.clip(bounds, self._least, self._largest)
        levels = np.asarray(NORM_LEVELS) * heights[-1]
        found: npt.NDArray[np.float64] = np.interp(levels, positions, bounds)
        return found


NORM_BYTES = 8 * _BINS
"""Bytes of the counts."""
