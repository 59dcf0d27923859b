"""Low-rank factors of a sum of squares, merged step by step.

Every operation keeps F^T F <= A^T A in the order of positive semidefinite matrices, because it
projects rows or drops singular values. So the exact diagonal of A^T A, kept beside F, bounds what
F lacks: its spectral norm is at most the difference of the traces. If A^T A has at most ``rank``
non-zero eigenvalues, F^T F equals it. (Ghashami et al., Frequent Directions, 2016, shrink where
this truncates; the randomized range finder is that of Halko, Martinsson and Tropp, 2011.)
"""

from __future__ import annotations

import torch

SKETCH_RANK = 64
"""Factors kept of a covariance that is too wide to keep whole."""

_OVERSAMPLING = 8
_POWER_STEPS = 2


def top_factors(rows: torch.Tensor, rank: int = SKETCH_RANK) -> torch.Tensor:
    """Return F [at most rank, width] with F^T F close to, and at most, rows^T rows.

    Args:
        rows: [count, width], floating point.
        rank: Factors at most.

    Returns:
        In the dtype and on the device of ``rows``, largest first; rows of zeros are left out.
    """
    wide = rank + _OVERSAMPLING
    if min(rows.shape) > 2 * wide:
        # Projecting samples, and not features, keeps the order.
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(rows.shape[1], wide, generator=generator).to(rows)
        basis = torch.linalg.qr(rows @ start).Q
        for _ in range(_POWER_STEPS):
            basis = torch.linalg.qr(rows @ torch.linalg.qr(rows.mT @ basis).Q).Q
        rows = basis.mT @ rows
    if not rows.shape[0]:
        return rows
    _, values, directions = torch.linalg.svd(rows, full_matrices=False)
    keep = values[:rank] > values[0] * torch.finfo(rows.dtype).eps
    factors: torch.Tensor = values[:rank][keep].unsqueeze(1) * directions[:rank][keep]
    return factors


def merged_factors(*parts: torch.Tensor, rank: int = SKETCH_RANK) -> torch.Tensor:
    """Return the factors of the sum of F^T F over the parts, each [some, width]."""
    return top_factors(torch.cat(parts), rank)


def product_factors(
    left: torch.Tensor, right: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest singular triples of left^T right: U [r, O], s [r], V [r, I].

    Args:
        left: [terms, O].
        right: [terms, I], the same number of terms.
        rank: Triples at most.
    """
    basis_left, triangle_left = torch.linalg.qr(left.mT)
    basis_right, triangle_right = torch.linalg.qr(right.mT)
    u, s, vh = torch.linalg.svd(triangle_left @ triangle_right.mT, full_matrices=False)
    keep = min(rank, len(s))
    return (basis_left @ u[:, :keep]).mT, s[:keep], vh[:keep] @ basis_right.mT
