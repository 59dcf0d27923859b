"""Gradients as norm times direction: rows whose norms vary by orders of magnitude.

A product g w is as large as the second moment of g lets it be along the weight's strong directions,
so that moment must be met exactly: the direction d / |d| of a normal d has another one than d, and
the covariance of d is chosen so that the *direction* has the recorded one (the angular central
Gaussian of Tyler, 1987, fitted by fixed-point iteration). Norms weight the recorded moment, so rows
of large norm, which make the product, count as much as they do there.
"""

from __future__ import annotations

import numpy as np
import torch

from loka_toolkit.artifacts.trace import NORM_LEVELS
from loka_toolkit.harness.features import FeatureMoments, Vector
from loka_toolkit.harness.normal import tensor_of

_DRAWS = 8192
_ITERATIONS = 50
_MOST_LEADING = 128
_SMALLEST = 1e-10


class DirectionSampler:
    """Draws gradients.

    Args:
        moments: With quantiles of norms.
        device: Where to draw.
    """

    def __init__(self, moments: FeatureMoments, device: torch.device) -> None:
        values, vectors, rest = principal_moments(moments)
        scales, rest_scale = direction_scales(values, float(rest.sum()))
        self._factor = tensor_of(vectors * np.sqrt(scales)[:, None], device)
        self._rest = None
        if rest_scale > 0:
            self._rest = tensor_of(np.sqrt(rest * rest_scale), device)
        self._levels = torch.tensor(NORM_LEVELS, dtype=torch.float64, device=device)
        self._norms = torch.from_numpy(scaled_norms(moments)).to(device)

    def sample(
        self, count: int, generator: torch.Generator, scores: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return samples [count, features], float32.

        Args:
            count: Samples.
            generator: Source of chance.
            scores: Normal scores of the norms, float64 [count]; drawn if None.
        """
        device = self._factor.device
        rank, width = self._factor.shape
        rows = torch.randn(count, rank, generator=generator, device=device) @ self._factor
        if self._rest is not None:
            rows += self._rest * torch.randn(count, width, generator=generator, device=device)
        if scores is None:
            uniform = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
        else:
            uniform = torch.special.ndtr(scores)
        norms = self._norm_at(uniform)
        lengths = rows.norm(dim=1).to(torch.float64)
        factor = torch.where(lengths > 0, norms / lengths, 0.0)
        return (rows * factor.unsqueeze(1)).to(torch.float32)

    def _norm_at(self, uniform: torch.Tensor) -> torch.Tensor:
        right = torch.bucketize(uniform, self._levels, right=True).clamp(1, len(NORM_LEVELS) - 1)
        low, high = self._norms[right - 1], self._norms[right]
        first = self._levels[right - 1]
        return low + (high - low) * (uniform - first) / (self._levels[right] - first)


def scaled_norms(moments: FeatureMoments) -> Vector:
    """Return the quantiles of norms, scaled so that their mean square is the recorded trace."""
    norms, levels = moments.norm_quantiles, np.asarray(NORM_LEVELS)
    low, high = norms[:-1], norms[1:]
    have = float((np.diff(levels) * (low * low + low * high + high * high) / 3).sum())
    want = float(np.sum(moments.variance + moments.mean**2))
    if have <= 0 or want <= 0:
        return norms
    scaled: Vector = norms * np.clip(np.sqrt(want / have), 0.5, 2.0)
    return scaled


def principal_moments(moments: FeatureMoments) -> tuple[Vector, Vector, Vector]:
    """Split the second moment, brought to trace 1, into principal directions and a diagonal.

    Returns:
        Eigenvalues [r], descending; eigenvectors [r, features]; the rest's diagonal [features].
    """
    mean, variance = moments.mean, moments.variance
    total = float(np.sum(variance + mean**2))
    if total <= 0:
        return np.zeros(0), np.zeros((0, moments.width)), np.full(moments.width, 1 / moments.width)
    if moments.covariance.ndim == 2:
        second = (moments.covariance + np.outer(mean, mean)) / total
        values, vectors = np.linalg.eigh((second + second.T) / 2)
        kept = values > _SMALLEST
        values, vectors = values[kept][::-1], vectors[:, kept].T[::-1]
        return values / values.sum(), vectors, np.zeros(moments.width)
    loads = np.zeros((0, moments.width)) if moments.factors is None else moments.factors
    stacked = np.concatenate([loads, mean[None]]) / np.sqrt(total)
    _, singular, vectors = np.linalg.svd(stacked, full_matrices=False)
    kept = singular**2 > _SMALLEST
    values, vectors = singular[kept] ** 2, vectors[kept]
    rest = np.maximum((variance + mean**2) / total - values @ vectors**2, 0.0)
    whole = values.sum() + rest.sum()
    return values / whole, vectors, rest / whole


def direction_scales(values: Vector, rest: float, seed: int = 0) -> tuple[Vector, float]:
    """Return variances under which the direction of a normal has the given second moment.

    Args:
        values: Wanted second moments along orthogonal directions, descending.
        rest: Wanted second moment in all other directions, of which there are many.
        seed: Of the fixed draws over which the moments are taken.

    Returns:
        Variances of the directions, and the factor of what is left.
    """
    if len(values) == 0 or (len(values) == 1 and rest == 0):
        return values, 1.0 if rest > 0 else 0.0
    leading = min(len(values), _MOST_LEADING)
    # Of many small directions the sum hardly varies: it is taken as its mean.
    lump = float(values[leading:].sum()) + rest
    squares = np.random.default_rng(seed).standard_normal((_DRAWS, leading)) ** 2
    scales, factor = values[:leading].copy(), 1.0
    for _ in range(_ITERATIONS):
        parts = squares * scales
        whole = parts.sum(axis=1) + factor * lump
        found = (parts / whole[:, None]).mean(axis=0)
        change = np.clip(values[:leading] / np.maximum(found, 1e-300), 0.1, 10.0)
        scales = scales * change
        if lump > 0:
            factor *= lump / max(float((factor * lump / whole).mean()), 1e-300)
        norm = scales.sum() + factor * lump
        scales, factor = scales / norm, factor / norm
        if np.abs(change - 1).max() < 1e-4:
            break
    return np.concatenate([scales, values[leading:] * factor]), factor if rest > 0 else 0.0
