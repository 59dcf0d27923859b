"""Static scales: where the largest magnitude of an operand will lie, and how often it will not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from loka_toolkit.artifacts.map_facts import OperandScale
from loka_toolkit.artifacts.sites import Operand, Role, SiteKey
from loka_toolkit.errors import ArtifactCorruptError, ConfigurationError
from loka_toolkit.numerics.formats import FP8_FORMATS
from loka_toolkit.numerics.posterior import FloatArray, NormalInverseGamma, predictive
from loka_toolkit.numerics.scaling import SMALLEST_SCALE, STATIC_HEADROOM

if TYPE_CHECKING:
    import pyarrow as pa

HEADROOMS = (STATIC_HEADROOM, 16.0, 32.0, 64.0)
"""Powers of two above the predicted amax. E4M3's error hardly changes over 16x of headroom, so the
first one is taken that overflows no more often than ``RARE``, else the last: beyond it small values
are lost, and an operand that swings so widely is better scaled as it comes."""

RARE = 1e-3

RESOLUTION_LOG2 = 0.05
"""No operand's log2 amax is taken to vary by less than this: 3.5 %."""

_POOLED_STEPS = 2.0
"""Pseudo-steps that the spread of operands of the same kind is worth."""


@dataclasses.dataclass(frozen=True)
class AmaxSeries:
    """The largest magnitude of an operand over the sampled steps.

    Attributes:
        layer: Layer name.
        operand: Which one.
        step: [n] sampled steps, ascending.
        log2_amax: [n] the largest over ranks; for g per unit of loss scale.
    """

    layer: str
    operand: Operand
    step: FloatArray
    log2_amax: FloatArray

    @property
    def per_step(self) -> float:
        """Least-squares slope of log2 amax."""
        return _slope(self.step, self.log2_amax)[0]

    @property
    def slope_deviations(self) -> float:
        """The slope in standard errors; 0 where there are fewer than five steps."""
        slope, error = _slope(self.step, self.log2_amax)
        return slope / error if error > 0 else 0.0


def amax_series(
    operands: pa.Table, loss_scales: dict[tuple[int, int], float], layers: set[str]
) -> tuple[AmaxSeries, ...]:
    """Return the series of every operand of some layers; all-zero steps are left out.

    Args:
        operands: The trace's table.
        loss_scales: (step, rank) -> factor by which the loss was scaled before backward.
        layers: Layers to consider.
    """
    found: dict[tuple[str, Operand], dict[int, float]] = {}
    columns = operands.select(["step", "rank", "site", "operand", "amax"]).to_pydict()
    for step, rank, site, name, amax in zip(*columns.values(), strict=True):
        try:
            key, operand = SiteKey.parse(site), Operand(name)
        except (ConfigurationError, ValueError) as error:
            raise ArtifactCorruptError(f"the operands of the trace are damaged: {error}") from None
        if key.role is Role.NORM or key.layer not in layers or not amax:
            continue
        if operand is Operand.G:
            amax /= loss_scales.get((step, rank), 1.0)
        series = found.setdefault((key.layer, operand), {})
        series[step] = max(series.get(step, -np.inf), float(np.log2(amax)))
    return tuple(
        AmaxSeries(layer, operand, np.array(sorted(s), float), np.array([s[t] for t in sorted(s)]))
        for (layer, operand), s in found.items()
    )


def static_scales(series: tuple[AmaxSeries, ...]) -> tuple[OperandScale, ...]:
    """Choose a static scale per operand, with its overflow probability per format.

    The log2 amax of a future step is Student-t: flat prior on its location, the variance shrunk to
    that of operands of the same kind. A decode scale is amax * headroom / format.max.
    """
    pooled: dict[Operand, float] = {}
    for operand in {s.operand for s in series}:
        variances = [
            s.log2_amax.var(ddof=1)
            for s in series
            if s.operand is operand and len(s.log2_amax) >= 3
        ]
        typical = float(np.median(variances)) if variances else 1.0
        pooled[operand] = max(typical, RESOLUTION_LOG2**2)
    return tuple(_scale(s, pooled[s.operand]) for s in series)


def _scale(series: AmaxSeries, pooled: float) -> OperandScale:
    values = series.log2_amax
    count = float(len(values))
    location = float(values.mean())
    squares = max(float(np.square(values - location).sum()), (count - 1.0) * RESOLUTION_LOG2**2)
    shape = 0.5 * (_POOLED_STEPS + count - 1.0)
    posterior = NormalInverseGamma(
        mu=np.asarray(location),
        kappa=np.asarray(count),
        alpha=np.asarray(shape),
        beta=np.asarray(0.5 * (_POOLED_STEPS * pooled + squares)),
    )
    future = predictive(posterior)

    def overflow(headroom: float) -> float:
        return float(1.0 - future.cdf(location + np.log2(headroom)))

    headroom = next((h for h in HEADROOMS if overflow(h) <= RARE), HEADROOMS[-1])
    df = float(future.df)
    sd = float(future.scale) * float(np.sqrt(df / (df - 2.0))) if df > 2.0 else float(future.scale)
    amax = float(2.0**location)
    return OperandScale(
        layer=series.layer,
        operand=series.operand.value,
        amax=amax,
        log2_amax_sd=sd,
        headroom=headroom,
        scale={
            name: max(amax * headroom / fmt.max, SMALLEST_SCALE)
            for name, fmt in FP8_FORMATS.items()
        },
        overflow_probability={name: overflow(headroom) for name in FP8_FORMATS},
        steps=len(values),
    )


def _slope(step: FloatArray, value: FloatArray) -> tuple[float, float]:
    """Return the least-squares slope and its standard error (0 if it has none)."""
    n = len(step)
    centered = step - step.mean()
    power = float(np.square(centered).sum())
    if n < 5 or power == 0.0:
        return 0.0, 0.0
    slope = float((centered * value).sum()) / power
    rest = value - value.mean() - slope * centered
    return slope, float(np.sqrt(np.square(rest).sum() / (n - 2) / power))
