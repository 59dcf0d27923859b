"""Operands drawn from the distribution that a trace recorded, deterministic per site and draw.

Samples are rows over features: a row is ``mean + L z`` with z standard normal and L L^T the
recorded covariance. For a gradient ``g`` the direction comes from there and the row's norm from the
recorded quantiles, because norms of gradient rows vary by orders of magnitude and no normal does.
Forward products of such draws reproduce the true FP8 error within 1-5 %. A wgrad product depends on
the cross moment of x and g, which is not recorded: its *excess* is meaningful, its SQNR is not that
of the training run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch

from loka_toolkit.artifacts.sites import Operand
from loka_toolkit.artifacts.trace import AMAX_QUANTILES
from loka_toolkit.harness.moments import FeatureMoments, MomentsOfTrace, TensorMoments
from loka_toolkit.harness.workloads import Factor, Workload
from loka_toolkit.harness.zeros import censored

FROM_MOMENTS = "moments"
"""What ``inputs`` of a row says if both factors were drawn from moments per feature."""

_KEPT_FACTORS = 4
_LARGEST_POWER = 1e4
_GRID = 4096

_Float64 = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Draw:
    """Both factors of one workload, and how they came about.

    Attributes:
        a: [.., M, K] in the dtype and layout recorded.
        b: [.., K, N].
        amax_a: Largest magnitude recorded of the left operand, or None.
        amax_b: The same of the right one.
        inputs: ``moments``, or the reason for anything else.
    """

    a: torch.Tensor
    b: torch.Tensor
    amax_a: float | None
    amax_b: float | None
    inputs: str


class InputDrawer:
    """Draws operands; keeps the last few covariance factors, which a layer's sites share.

    Args:
        moments: What the trace recorded.
        device: Where to draw: the numbers depend on the kind of device.
        seed: Draws with another seed are independent.
    """

    def __init__(self, moments: MomentsOfTrace, device: torch.device, seed: int) -> None:
        self._moments = moments
        self._device = device
        self._seed = seed
        self._factors: dict[tuple[str, Operand, int], _RowSampler] = {}

    def draw(self, workload: Workload, index: int) -> Draw:
        """Return the factors of draw number ``index``."""
        reasons: list[str] = []
        a, b = (
            self._factor(workload, factor, index, reasons) for factor in (workload.a, workload.b)
        )
        layer = workload.site.layer
        return Draw(
            a=a,
            b=b,
            amax_a=self._moments.amax(layer, workload.a.operand),
            amax_b=self._moments.amax(layer, workload.b.operand),
            inputs="; ".join(reasons) or FROM_MOMENTS,
        )

    def _factor(
        self, workload: Workload, factor: Factor, index: int, reasons: list[str]
    ) -> torch.Tensor:
        sampler = self._sampler(workload, factor)
        if sampler.reason is not None:
            reasons.append(sampler.reason)
        generator = torch.Generator(self._device)
        generator.manual_seed(_seed_of(self._seed, workload, factor, index))
        batch = workload.problem.batch
        rows = sampler.sample(batch * factor.rows, generator).to(factor.dtype)
        operand = rows.reshape(batch, factor.rows, factor.width)
        if factor.transposed:
            operand = operand.mT
        return _laid_out(operand if workload.batched else operand[0], factor.layout)

    def _sampler(self, workload: Workload, factor: Factor) -> _RowSampler:
        key = (workload.site.layer, factor.operand, factor.width)
        if key not in self._factors:
            while len(self._factors) >= _KEPT_FACTORS:
                self._factors.pop(next(iter(self._factors)))
            self._factors[key] = self._new_sampler(workload.site.layer, factor)
        return self._factors[key]

    def _new_sampler(self, layer: str, factor: Factor) -> _RowSampler:
        name = factor.operand.value
        features = self._moments.features(layer, factor.operand, factor.width)
        if features is not None and features.is_finite:
            with_norms = factor.operand is Operand.G
            return _RowSampler.from_features(features, self._device, with_norms=with_norms)
        widths = self._moments.widths(layer, factor.operand)
        if features is not None:
            why = f"moments of {name} hold Inf or NaN"
        elif widths:
            known = ", ".join(map(str, widths))
            why = f"moments of {name} recorded for width {known}, not {factor.width}"
        else:
            why = f"moments missing for {name}"
        tensor = self._moments.tensor(layer, factor.operand)
        if tensor is not None:
            reason = f"{why}: normal with recorded mean and variance"
            return _RowSampler.from_tensor(tensor, factor.width, self._device, reason)
        reason = f"{why} and nothing else recorded of it: unit normal"
        unit = TensorMoments(0.0, 1.0, 0.0)
        return _RowSampler.from_tensor(unit, factor.width, self._device, reason)


@dataclasses.dataclass(frozen=True)
class _RowSampler:
    """Ready to sample rows [count, width], float32.

    Attributes:
        mean: [width], float32.
        factor: [width, rank] or, uncorrelated, [width]; float32.
        threshold: [width]: where the standardized normal is not above it, the element is zero;
            None where zeros are not reproduced. ``mean`` and ``slope`` then make the rest.
        slope: [width], or None.
        norms: (norm quantiles, power of the last interval), or None.
        reason: Why this is not the recorded distribution, or None.
    """

    mean: torch.Tensor
    factor: torch.Tensor
    threshold: torch.Tensor | None
    slope: torch.Tensor | None
    norms: tuple[torch.Tensor, float] | None
    reason: str | None

    @classmethod
    def from_features(
        cls, moments: FeatureMoments, device: torch.device, *, with_norms: bool
    ) -> _RowSampler:
        mean, covariance = moments.mean, moments.covariance
        threshold = slope = None
        with_zeros = censored(moments)
        if with_zeros is not None:
            mean = with_zeros.intercept
            independent = np.ones_like(mean)
            covariance = independent if with_zeros.correlation is None else with_zeros.correlation
            threshold = _tensor(with_zeros.threshold, device)
            slope = _tensor(with_zeros.slope, device)
        factor = covariance_factor(covariance, device)
        norms = None
        quantiles = moments.row_norm_quantiles
        if with_norms and quantiles.size and quantiles[-1] > 0:
            square = float(np.sum(moments.variance + moments.mean**2))
            norms = (_tensor(quantiles, device), last_interval_power(quantiles, square))
        return cls(
            mean=_tensor(mean, device),
            factor=factor,
            threshold=threshold,
            slope=slope,
            norms=norms,
            reason=None,
        )

    @classmethod
    def from_tensor(
        cls, moments: TensorMoments, width: int, device: torch.device, reason: str
    ) -> _RowSampler:
        spread = FeatureMoments(
            count=1,
            mean=np.full(width, moments.mean),
            covariance=np.full(width, moments.variance),
            row_norm_quantiles=np.zeros(0),
            zero_share=moments.zero_share,
        )
        sampler = cls.from_features(spread, device, with_norms=False)
        return dataclasses.replace(sampler, reason=reason)

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
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
        return _tensor(np.sqrt(np.maximum(covariance, 0.0)), device)
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


def _laid_out(factor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the factor in the layout recorded; a strided one is left as drawn."""
    if layout == "row":
        return factor.contiguous()
    if layout == "column":
        return factor.mT.contiguous().mT
    return factor


def _seed_of(seed: int, workload: Workload, factor: Factor, index: int) -> int:
    text = f"{seed}/{workload.site}/{workload.identity['dims']}/{factor.operand}/{index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _tensor(values: _Float64, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(device)
