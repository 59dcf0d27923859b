"""What is kept of a weight: both of its second moments, w w^T and w^T w, and not the weight.

A matrix normal (Dutilleul 1999) has the same two, up to a factor, but its rows and columns are
independent of each other beyond them, which makes the two spectra disagree. Singular pairs whose
two sides have independent random signs have exactly both.
"""

from __future__ import annotations

import dataclasses

import torch

from loka_toolkit.recording.sketch import product_factors

SPECTRUM_RANK = 256
"""Singular pairs kept of a weight."""

_OVERSAMPLING = 8
_POWER_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """The singular pairs of a weight [O, I] and the mean squares of what they leave.

    Attributes:
        factors: float32 [r, O + I]: left and right vector, both times the root of the value.
        row_squares: float32 [O], of the rest.
        column_squares: float32 [I], of the rest.
    """

    factors: torch.Tensor
    row_squares: torch.Tensor
    column_squares: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, seed: int, rank: int = SPECTRUM_RANK) -> Spectrum:
        """Return the spectrum of a weight, float32 [O, I], finite.

        Args:
            weight: The weight.
            seed: Of the signs and of the range finder.
            rank: Singular pairs at most.
        """
        generator = torch.Generator().manual_seed(seed)
        left, values, right = _singular_pairs(weight, rank, generator)
        rest = (weight - left.mT @ (values.unsqueeze(1) * right)).square()
        root = values.sqrt().unsqueeze(1)
        signs = torch.randint(0, 2, (2, len(values), 1), generator=generator) * 2.0 - 1.0
        factors = torch.cat([signs[0] * root * left, signs[1] * root * right], dim=1)
        return cls(factors, rest.mean(1), rest.mean(0))


def _singular_pairs(
    weight: torch.Tensor, rank: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = rank + _OVERSAMPLING
    if min(weight.shape) <= 2 * wide:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        keep = max(1, int((s[:rank] > s[0] * torch.finfo(s.dtype).eps).sum()))
        return u[:, :keep].mT, s[:keep], vh[:keep]
    start = torch.randn(weight.shape[1], wide, generator=generator)
    basis = torch.linalg.qr(weight @ start).Q
    for _ in range(_POWER_STEPS):
        basis = torch.linalg.qr(weight @ torch.linalg.qr(weight.mT @ basis).Q).Q
    return product_factors(basis.mT, basis.mT @ weight, rank)
