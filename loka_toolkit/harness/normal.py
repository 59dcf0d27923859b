"""Samples from a mean and a covariance: what older traces recorded, and where counts are missing.

A sample is ``mean + L z`` with z standard normal and L L^T the covariance; zeros as of
:mod:`loka_toolkit.harness.zeros`. For a gradient the direction comes from there and the norm from
the recorded quantiles.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch

from loka_toolkit.artifacts.trace import AMAX_QUANTILES
from loka_toolkit.harness.features import FeatureMoments, TensorMoments
from loka_toolkit.harness.zeros import censored

_LARGEST_POWER = 1e4
_GRID = 4096

_Float64 = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class NormalSampler:
    """Draws normals, with zeros or norms restored where there are any.

    Attributes:
        mean: [width], float32.
        factor: [width, rank] or, uncorrelated, [width]; float32.
        threshold: [width]: where the standardized normal is not above it, the element is zero;
            None where zeros are not reproduced. ``mean`` and ``slope`` then make the rest.
        slope: [width], or None.
        norms: (norm quantiles, power of the last interval), or None.
    """

    mean: torch.Tensor
    factor: torch.Tensor
    threshold: torch.Tensor | None
    slope: torch.Tensor | None
    norms: tuple[torch.Tensor, float] | None

    @classmethod
    def from_features(
        cls, moments: FeatureMoments, device: torch.device, *, with_norms: bool
    ) -> NormalSampler:
        """Return the sampler of these moments; ``with_norms`` restores the norms recorded."""
        mean, covariance = moments.mean, moments.covariance
        threshold = slope = None
        with_zeros = censored(moments)
        if with_zeros is not None:
            mean = with_zeros.intercept
            independent = np.ones_like(mean)
            covariance = independent if with_zeros.correlation is None else with_zeros.correlation
            threshold = tensor_of(with_zeros.threshold, device)
            slope = tensor_of(with_zeros.slope, device)
        factor = covariance_factor(covariance, device)
        norms = None
        quantiles = moments.row_norm_quantiles
        if with_norms and quantiles.size and quantiles[-1] > 0:
            square = float(np.sum(moments.variance + moments.mean**2))
            norms = (tensor_of(quantiles, device), last_interval_power(quantiles, square))
        return cls(
            mean=tensor_of(mean, device),
            factor=factor,
            threshold=threshold,
            slope=slope,
            norms=norms,
        )

    @classmethod
    def from_tensor(cls, moments: TensorMoments, width: int, device: torch.device) -> NormalSampler:
        """Return the sampler of independent elements, all alike."""
        spread = FeatureMoments(
            count=1,
            mean=np.full(width, moments.mean),
            covariance=np.full(width, moments.variance),
            row_norm_quantiles=np.zeros(0),
            zero_share=moments.zero_share,
        )
        return cls.from_features(spread, device, with_norms=False)

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return samples [count, features], float32."""
        device = self.mean.device
        width = self.mean.shape[0]
        rank = self.factor.shape[-1] if self.factor.ndim == 2 else width
        normal = torch.randn(count, rank, generator=generator, device=device)
        rows = normal @ self.factor.mT if self.factor.ndim == 2 else normal * self.factor
        if self.threshold is None or self.slope is None:
            rows += self.mean
        else:
            rows = torch.where(rows > self.threshold, self.mean + self.slope * rows, 0.0)
        if self.norms is not None:
            uniform = torch.rand(count, generator=generator, device=device)
            norm = norm_at(*self.norms, uniform)
            lengths = rows.norm(dim=1)
            # A row that came out all zero has no direction and stays zero.
            rows *= torch.where(lengths > 0, norm / lengths, 0.0).unsqueeze(1)
        return rows


def covariance_factor(covariance: _Float64, device: torch.device) -> torch.Tensor:
    """Return L with L L^T equal to the covariance; float32, [width, rank] or [width].

    The eigenvalues of the *correlation* matrix are used, so that features of unlike magnitude (raw
    counts beside embeddings) keep their digits. Negative ones, which rounding to float32 leaves in
    a recorded matrix of low rank, are clipped; rows are rescaled so that variances stay exact.
    """
    if covariance.ndim == 1:
        return tensor_of(np.sqrt(np.maximum(covariance, 0.0)), device)
    deviation = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    inverse = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=deviation > 0)
    correlation = torch.from_numpy(covariance * np.outer(inverse, inverse)).to(device)
    values, vectors = torch.linalg.eigh((correlation + correlation.mT) / 2)
    floor = correlation.shape[0] * float(np.finfo(np.float32).eps)
    kept = values > floor
    factor = vectors[:, kept] * values[kept].sqrt()
    lengths = factor.norm(dim=1, keepdim=True)
    factor = torch.where(lengths > 0, factor / lengths, 0.0)
    scale = torch.from_numpy(deviation).to(device).unsqueeze(1)
    return (factor * scale).to(torch.float32)


def norm_at(quantiles: torch.Tensor, power: float, uniform: torch.Tensor) -> torch.Tensor:
    """Return row norms by inverse transform: linear between quantiles, but for the last interval.

    There the norm is ``low * (high / low)**(t**power)``, t uniform in [0, 1): heavy tails are
    geometric (linear from a low of 0).

    Args:
        quantiles: Norms at ``AMAX_QUANTILES``.
        power: Exponent of the last interval; see :func:`last_interval_power`.
        uniform: Uniform variates in [0, 1), any shape.
    """
    levels = torch.tensor(AMAX_QUANTILES, device=uniform.device, dtype=uniform.dtype)
    last = len(AMAX_QUANTILES) - 1
    right = torch.bucketize(uniform, levels, right=True).clamp(1, last)
    low, high = quantiles[right - 1], quantiles[right]
    share = (uniform - levels[right - 1]) / (levels[right] - levels[right - 1])
    linear = low + (high - low) * share
    return torch.where(right == last, _tail(low, high, share**power), linear)


def last_interval_power(quantiles: _Float64, mean_square: float) -> float:
    """Return the exponent with which the norms' second moment is the recorded one.

    Seven quantiles leave the tail open: the second moment of the last interval falls from high**2
    to low**2 as the exponent grows. A target beyond these ends gives the nearer end.

    Args:
        quantiles: Norms at ``AMAX_QUANTILES``.
        mean_square: Mean squared norm, sum over features of variance + mean**2.
    """
    levels = np.asarray(AMAX_QUANTILES)
    low, high = quantiles[:-1], quantiles[1:]
    inner = np.diff(levels)[:-1] * ((low * low + low * high + high * high) / 3)[:-1]
    target = (mean_square - float(inner.sum())) / float(levels[-1] - levels[-2])
    if high[-1] <= low[-1]:
        return 1.0
    ends = torch.from_numpy(np.stack([low[-1:], high[-1:]]))
    grid = (torch.arange(_GRID, dtype=torch.float64) + 0.5) / _GRID
    small, large = 1 / _LARGEST_POWER, _LARGEST_POWER
    for _ in range(60):
        middle = math.sqrt(small * large)
        if float(_tail(ends[0], ends[1], grid**middle).square().mean()) > target:
            small = middle
        else:
            large = middle
    return math.sqrt(small * large)


def _tail(low: torch.Tensor, high: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Interpolate geometrically, or linearly where ``low`` is 0."""
    positive = low > 0
    ratio = torch.where(positive, high / torch.where(positive, low, 1.0), 1.0)
    return torch.where(positive, low * ratio**share, high * share)


def tensor_of(values: _Float64, device: torch.device) -> torch.Tensor:
    """Return float64 values as float32 on a device."""
    return torch.from_numpy(values.astype(np.float32)).to(device)
