"""Samples in which every feature is distributed as recorded, and the covariance is, too.

A Gaussian copula (Cario and Nelson's NORTA, 1997): feature i is ``h_i(z_i)`` with z normal and h_i
the recorded quantile function at the normal's probability. Zeros, one-sidedness and heavy tails
come out feature by feature. With the coefficients c_in of h_i in normalized Hermite polynomials,
the covariance of two features is ``sum over n of c_in c_jn rho^n``: inverted for rho, the
correlation of z.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import special

from loka_toolkit.artifacts.trace import MARGINAL_BINS, MARGINAL_OCTAVES, NORM_LEVELS
from loka_toolkit.harness.features import FeatureMoments, Vector
from loka_toolkit.harness.normal import tensor_of

_REACH = 5.0
_GRID = 401
_Z = np.linspace(-_REACH, _REACH, _GRID)
_CELL = np.diff(special.ndtr(np.concatenate([[-np.inf], (_Z[1:] + _Z[:-1]) / 2, [np.inf]])))
"""Probability of the part of the normal nearest to each grid point."""

_ORDER = 10
_BISECTIONS = 22
_LEAST_WEIGHT = 0.25
"""Counts below this, what decay left of early steps, are no part of the distribution."""
_CALIBRATION = 8192
_LEAST_LEVEL = 2.0**-9
_LEVELS = np.asarray(NORM_LEVELS)
_MOST_DRAWN = 1 << 24
"""Elements transformed at once, which bounds the temporaries."""


def bin_edges() -> Vector:
    """Return the MARGINAL_BINS + 1 edges of the bins, ascending; those beside zero are zero."""
    octaves = 2.0 ** np.arange(MARGINAL_OCTAVES[0], MARGINAL_OCTAVES[1])
    magnitudes = np.stack([octaves, 1.5 * octaves], axis=1).reshape(-1)[1:]
    upper = np.concatenate([[0.0], magnitudes, [2.0 ** MARGINAL_OCTAVES[1]]])
    edges = np.concatenate([-upper[::-1], upper])
    assert edges.size == MARGINAL_BINS + 1
    return edges


class QuantileTables:
    """The functions h_i on a grid of z.

    Args:
        moments: With marginals.

    Attributes:
        values: [features, grid].
    """

    def __init__(self, moments: FeatureMoments) -> None:
        counts, extremes = moments.marginal_counts, moments.marginal_extremes
        if counts is None or extremes is None:
            raise ValueError("moments without marginals have no quantile tables")
        edges = bin_edges()
        values = np.empty((moments.width, _GRID))
        for feature in range(moments.width):
            values[feature] = _quantile_function(
                counts[feature], edges, extremes[0, feature], extremes[1, feature]
            )
        # Interpolation within bins leaves the second moment off by a percent or so.
        have = values**2 @ _CELL
        want = moments.variance + moments.mean**2
        ratio = np.divide(want, have, out=np.ones_like(have), where=(have > 0) & (want > 0))
        self.values = values * np.clip(np.sqrt(ratio), 0.5, 2.0)[:, None]

    def coefficients(self) -> list[Vector]:
        """Return the normalized Hermite coefficients c_n, n from 0, each [features]."""
        weighted = self.values * _CELL
        polynomials = [np.ones_like(_Z), _Z]
        for n in range(1, _ORDER):
            higher = _Z * polynomials[n] - np.sqrt(n) * polynomials[n - 1]
            polynomials.append(higher / np.sqrt(n + 1))
        return [weighted @ polynomial for polynomial in polynomials]


def _quantile_function(counts: Vector, edges: Vector, least: float, largest: float) -> Vector:
    occupied = np.flatnonzero(counts >= _LEAST_WEIGHT)
    if not occupied.size:
        return np.full(_GRID, (least + largest) / 2)
    kept = counts[occupied]
    heights = np.concatenate([[0.0], np.cumsum(kept)]) / kept.sum()
    total = max(float(kept.sum()), 2.0)
    # Where the extremes of so many samples are expected (Blom 1958).
    heights = np.clip(heights, 0.625 / (total + 0.25), 1.0 - 0.625 / (total + 0.25))
    at = special.ndtri(heights)
    low = np.clip(edges[occupied], least, largest)
    high = np.clip(edges[occupied + 1], least, largest)
    if occupied[-1] == MARGINAL_BINS - 1:
        high[-1] = largest  # the outermost bins have no outer edge
    if occupied[0] == 0:
        low[0] = least
    positions = np.stack([at[:-1], at[1:]], axis=1).reshape(-1)
    values: Vector = np.interp(_Z, positions, np.stack([low, high], axis=1).reshape(-1))
    return values


def latent_correlation(covariance: Vector, coefficients: list[Vector]) -> Vector:
    """Return the correlation of z under which the features have this covariance.

    Where the series cannot reach it, the nearest of -1 and 1; 0 where a feature is constant.
    """
    constant = np.diag(covariance) <= 0
    scale = np.sqrt(np.where(constant, np.inf, np.diag(covariance)))
    terms = [(c / scale).astype(np.float32) for c in coefficients[1:]]
    target = (covariance / np.outer(scale, scale)).astype(np.float32)
    low, high = np.full_like(target, -1.0), np.ones_like(target)
    for _ in range(_BISECTIONS):
        rho = (low + high) / 2
        total = np.zeros_like(rho)
        for term in reversed(terms):
            total += np.outer(term, term)
            total *= rho
        below = total < target
        low, high = np.where(below, rho, low), np.where(below, high, rho)
    rho = ((low + high) / 2).astype(np.float64)
    rho[constant] = 0.0
    rho[:, constant] = 0.0
    np.fill_diagonal(rho, 1.0)
    symmetric: Vector = (rho + rho.T) / 2
    return symmetric


def unit_factor(correlation: Vector) -> Vector:
    """Return L [n, rank] with rows of length 1 and L L^T close to a correlation matrix."""
    values, vectors = np.linalg.eigh(correlation)
    kept = values > len(correlation) * np.finfo(np.float32).eps
    factor = vectors[:, kept] * np.sqrt(values[kept])
    lengths = np.linalg.norm(factor, axis=1, keepdims=True)
    unit: Vector = np.divide(factor, lengths, out=np.zeros_like(factor), where=lengths > 0)
    return unit


class CopulaSampler:
    """Draws samples of a Gaussian copula.

    Args:
        moments: With marginals; a full covariance, a sketch of it, or its diagonal.
        device: Where to draw.
    """

    def __init__(self, moments: FeatureMoments, device: torch.device) -> None:
        tables = QuantileTables(moments)
        coefficients = tables.coefficients()
        width = moments.width
        rest = np.zeros(width)
        if moments.covariance.ndim == 2:
            factor = unit_factor(latent_correlation(moments.covariance, coefficients))
            rest = np.sqrt(np.maximum(0.0, 1.0 - (factor**2).sum(axis=1)))
        else:
            # To first order rho_ij = cov_ij / (c_i1 c_j1), which keeps the sketch a sketch.
            slope = coefficients[1]
            loads = np.zeros((width, 0)) if moments.factors is None else moments.factors.T
            usable = np.abs(slope) > 1e-6 * np.sqrt(np.maximum(moments.variance, 1e-300))
            factor = np.where(usable[:, None], loads / np.where(usable, slope, 1.0)[:, None], 0.0)
            length = np.linalg.norm(factor, axis=1)
            factor /= np.maximum(length, 1.0)[:, None]
            rest = np.sqrt(np.maximum(0.0, 1.0 - np.minimum(length, 1.0) ** 2))
        self._factor = tensor_of(factor, device)
        self._rest = tensor_of(rest, device) if rest.max(initial=0.0) > 1e-3 else None
        self._values = tensor_of(tables.values, device).reshape(-1)
        self._width = width
        self._norm_maps: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        self._equal_rows: list[tuple[slice, torch.Tensor]] = []

    def with_norms(self, parts: Sequence[tuple[slice, Vector]]) -> CopulaSampler:
        """Restore the norms of parts of the samples, and return this sampler.

        Features that are large together make samples of large norm more often than a Gaussian
        copula, which has no dependence in the tails, lets them be. A sample's norm is replaced by
        the recorded quantile of the same probability.

        Args:
            parts: Features, and the quantiles of their norm at ``NORM_LEVELS``.
        """
        own = self._calibration()
        inner = np.flatnonzero((_LEVELS >= _LEAST_LEVEL) & (_LEVELS <= 1 - _LEAST_LEVEL))
        for features, wanted in parts:
            norms = np.quantile(own[:, features].norm(dim=1).cpu().numpy(), _LEVELS[inner])
            usable = (norms > 0) & (wanted[inner] > 0)
            if not usable.any():
                continue
            at, ratio = norms[usable], wanted[inner][usable] / norms[usable]
            at, first = np.unique(at, return_index=True)
            self._norm_maps.append(
                (features, tensor_of(at, own.device), tensor_of(ratio[first], own.device))
            )
        return self

    def with_equal_rows(self, parts: Sequence[tuple[slice, Vector]]) -> CopulaSampler:
        """Make rows of the samples constant as often as they were, and return this sampler.

        A row of equal elements, such as softmax of equal scores, has no error under a scale of its
        own, and no copula of continuous features draws one. Of each row of a sample the recorded
        share becomes its own mean: where the spread of its elements is least beside its size.

        Args:
            parts: Features, whole rows of equal length, and how often each of these rows is
                constant.
        """
        own = self._calibration()
        for features, shares in parts:
            if not shares.size or not shares.any():
                continue
            spread = _spread(own[:, features].view(len(own), shares.size, -1)).cpu().numpy()
            limits = [
                np.quantile(found, min(share, 1.0), method="lower") if share > 0 else -1.0
                for found, share in zip(spread.T, shares, strict=True)
            ]
            self._equal_rows.append((features, tensor_of(np.asarray(limits), own.device)))
        return self

    def _calibration(self) -> torch.Tensor:
        generator = torch.Generator(self._values.device)
        generator.manual_seed(0)
        return self.sample(_CALIBRATION, generator).double()

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return samples [count, features], float32."""
        step = max(1, _MOST_DRAWN // max(self._width, 1))
        parts = [self._part(min(step, count - start), generator) for start in range(0, count, step)]
        return torch.cat(parts) if parts else self._values.new_zeros(0, self._width)

    def _part(self, count: int, generator: torch.Generator) -> torch.Tensor:
        device = self._values.device
        rank = self._factor.shape[1]
        z = torch.randn(count, rank, generator=generator, device=device) @ self._factor.mT
        if self._rest is not None:
            z += self._rest * torch.randn(count, self._width, generator=generator, device=device)
        place = ((z + _REACH) * ((_GRID - 1) / (2 * _REACH))).clamp_(0.0, _GRID - 1.0 - 1e-3)
        index = place.to(torch.int64)
        share = place - index
        index += torch.arange(self._width, device=device) * _GRID
        low, high = self._values[index], self._values[index + 1]
        # No value lies between zero and the next one: zeros stay exact.
        beside_zero = (low == 0) | (high == 0)
        drawn = torch.where(
            beside_zero, torch.where(share < 0.5, low, high), low + share * (high - low)
        )
        for features, norms, ratios in self._norm_maps:
            part = drawn[:, features]
            part *= _interpolated(part.norm(dim=1), norms, ratios).unsqueeze(1)
        for features, limits in self._equal_rows:
            rows = drawn[:, features].view(count, len(limits), -1)
            constant = (_spread(rows) <= limits).unsqueeze(2)
            rows.copy_(torch.where(constant, rows.mean(2, keepdim=True), rows))
        return drawn


def _spread(rows: torch.Tensor) -> torch.Tensor:
    """Return the share of rows' squares [.., width] that is not their mean's; Inf for zeros."""
    deviation = (rows - rows.mean(-1, keepdim=True)).square().sum(-1)
    return torch.where(rows.any(-1), deviation / rows.square().sum(-1), math.inf)


def _interpolated(x: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return linear interpolation of values known at ascending places, constant beyond them."""
    if len(at) == 1:
        return values.expand_as(x)
    right = torch.bucketize(x, at).clamp(1, len(at) - 1)
    low, high = at[right - 1], at[right]
    share = ((x - low) / (high - low)).clamp(0.0, 1.0)
    return values[right - 1] + share * (values[right] - values[right - 1])
