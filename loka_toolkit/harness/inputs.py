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

REPRODUCED_ZERO_SHARE = 0.05
"""Zeros are drawn where at least one element in twenty was zero; fewer change no error visibly."""

FROM_MOMENTS = "moments"
"""What ``inputs`` of a row says if both factors were drawn from moments per feature."""

_KEPT_FACTORS = 4
_MOST_ZERO = 0.95
_LARGEST_POWER = 1e6

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
        zero_probability: [width], or None where zeros are not reproduced.
        norms: (norm quantiles, power of the last interval), or None.
        reason: Why this is not the recorded distribution, or None.
    """

    mean: torch.Tensor
    factor: torch.Tensor
    zero_probability: torch.Tensor | None
    norms: tuple[torch.Tensor, float] | None
    reason: str | None

    @classmethod
    def from_features(
        cls, moments: FeatureMoments, device: torch.device, *, with_norms: bool
    ) -> _RowSampler:
        mean, covariance = moments.mean, moments.covariance
        zeros = _zero_probabilities(moments)
        if zeros is not None:
            mean, covariance = _before_zeroing(mean, covariance, zeros)
        factor = covariance_factor(covariance, device)
        norms = None
        quantiles = moments.row_norm_quantiles
        if with_norms and quantiles.size and quantiles[-1] > 0:
            square = float(np.sum(moments.variance + moments.mean**2))
            norms = (_tensor(quantiles, device), last_interval_power(quantiles, square))
        return cls(
            mean=_tensor(mean, device),
            factor=factor,
            zero_probability=None if zeros is None else _tensor(zeros, device),
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
        rows += self.mean
        if self.zero_probability is not None:
            uniform = torch.rand(count, width, generator=generator, device=device)
            rows = torch.where(uniform < self.zero_probability, 0.0, rows)
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
    """Return row norms by inverse transform: linear between quantiles, a power in the last one.

    Args:
        quantiles: Norms at ``AMAX_QUANTILES``.
        power: Exponent of the last interval; see :func:`last_interval_power`.
        uniform: Uniform variates in [0, 1), any shape.
    """
    levels = torch.tensor(AMAX_QUANTILES, device=uniform.device, dtype=uniform.dtype)
    right = torch.bucketize(uniform, levels, right=True).clamp(1, len(AMAX_QUANTILES) - 1)
    low, high = quantiles[right - 1], quantiles[right]
    share = (uniform - levels[right - 1]) / (levels[right] - levels[right - 1])
    share = torch.where(right == len(AMAX_QUANTILES) - 1, share**power, share)
    return low + (high - low) * share


def last_interval_power(quantiles: _Float64, mean_square: float) -> float:
    """Return the exponent with which the norms' second moment is the recorded one.

    Seven quantiles leave the tail open: between 95 % and the maximum the norm is taken as
    ``low + (high - low) t**p``, whose second moment falls with p from high**2 to low**2.

    Args:
        quantiles: Norms at ``AMAX_QUANTILES``.
        mean_square: Mean squared norm, sum over features of variance + mean**2.
    """
    levels = np.asarray(AMAX_QUANTILES)
    low, high = quantiles[:-1], quantiles[1:]
    inner = np.diff(levels)[:-1] * ((low * low + low * high + high * high) / 3)[:-1]
    target = (mean_square - float(inner.sum())) / float(levels[-1] - levels[-2])
    start, gap = float(low[-1]), float(high[-1] - low[-1])
    if gap <= 0:
        return 1.0

    def second_moment(power: float) -> float:
        return start**2 + 2 * start * gap / (power + 1) + gap**2 / (2 * power + 1)

    small, large = 1 / _LARGEST_POWER, _LARGEST_POWER
    for _ in range(80):
        middle = math.sqrt(small * large)
        if second_moment(middle) > target:
            small = middle
        else:
            large = middle
    return math.sqrt(small * large)


def _zero_probabilities(moments: FeatureMoments) -> _Float64 | None:
    """Return the probability of a zero per feature, their mean the recorded share if it can be.

    A feature of mean m and variance v is zero at most with probability v / (v + m**2): whatever
    is left must carry the mean, and (E X)**2 <= P(X != 0) E X**2.
    """
    share = moments.zero_share
    if share < REPRODUCED_ZERO_SHARE:
        return None
    variance, square = moments.variance, moments.mean**2
    total = variance + square
    always = total == 0
    most = _MOST_ZERO * np.divide(variance, total, out=np.zeros_like(total), where=~always)
    most[always] = 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        level = (low + high) / 2
        low, high = (level, high) if np.minimum(most, level).mean() < share else (low, level)
    return np.where(always, 1.0, np.minimum(most, high))


def _before_zeroing(
    mean: _Float64, covariance: _Float64, zeros: _Float64
) -> tuple[_Float64, _Float64]:
    """Return moments of Y such that Y, zeroed independently per element, has the moments given.

    With q = 1 - P(zero): E X = q E Y; Cov(X_i, X_j) = q_i q_j Cov(Y_i, Y_j) for i != j; and
    E X_i**2 = q_i E Y_i**2.
    """
    kept = 1.0 - zeros
    inverse = np.divide(1.0, kept, out=np.zeros_like(kept), where=kept > 0)
    before = mean * inverse
    variance = np.diag(covariance) if covariance.ndim == 2 else covariance
    own = np.maximum((variance + mean**2) * inverse - before**2, 0.0)
    if covariance.ndim == 1:
        return before, own
    result = covariance * np.outer(inverse, inverse)
    np.fill_diagonal(result, own)
    return before, result


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
