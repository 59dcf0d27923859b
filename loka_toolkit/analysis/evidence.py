"""Sufficient statistics per cell: outlying steps set aside, autocorrelation discounted."""

from __future__ import annotations

import dataclasses

import numpy as np

from loka_toolkit.analysis.observations import BoolArray, IntArray, Observations
from loka_toolkit.artifacts.safety_map import Criterion
from loka_toolkit.numerics.posterior import FloatArray, Statistics

RESOLUTION_DB = {
    Criterion.SQNR: 0.1,
    Criterion.ROW_SQNR: 0.1,
    Criterion.UNDERFLOW: 0.5,
    Criterion.SATURATION: 0.5,
}
"""No cell is taken to vary less than this from step to step: an error is computed on a sample of
rows and columns, and a variance of exactly zero has no likelihood. It is 1 % of an error, 12 % of a
share. Of shares, where most cells often show none at all, a finer resolution makes those cells a
spike to which every group is drawn, with as many modes as there are groups."""

OUTLYING_DB = 3.0
"""A step is never set aside for deviating less than this: half or double the error's power."""

OUTLYING_DEVIATIONS = 6.0
"""... nor for deviating less than this many robust standard deviations; of 1e9 normal steps, 2."""

OUTLYING_STEPS_NEEDED = 5
"""With fewer steps a median absolute deviation says nothing, and no step is set aside."""

OUTLYING_SHARE = 0.2
"""Where more steps than this lie apart, they are the cell's nature and stay in its variance."""

_MAD_TO_SD = 1.4826
_SHRINK_STEPS = 20.0
_SERIES_NEEDED = 8


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What the model is fitted to, C cells.

    Attributes:
        statistics: Criterion -> statistics [C] of the steps kept; counts are whole numbers,
            discounted for autocorrelation.
        outlying: Criterion -> [C] steps set aside.
        events: [C] steps that broke the tolerance as outliers or came out non-finite.
        violations: [C] steps at which any criterion was broken, outlying or not.
        trials: [C] steps seen.
        effective: [C] steps seen, discounted for autocorrelation.
        autocorrelation: Lag-one autocorrelation of a typical site.
    """

    statistics: dict[Criterion, Statistics]
    outlying: dict[Criterion, IntArray]
    events: IntArray
    violations: IntArray
    trials: IntArray
    effective: FloatArray
    autocorrelation: float


def gather(observed: Observations) -> Evidence:
    """Return the evidence of all cells."""
    discount, typical = _discount(observed)
    statistics, outlying = {}, {}
    broken = observed.destroyed.copy()
    violated = observed.destroyed.copy()
    for criterion, values in observed.values.items():
        apart, breaking = outlying_steps(values, observed.limits[criterion])
        broken |= breaking
        violated |= values < observed.limits[criterion]  # NaN compares false
        outlying[criterion] = apart.sum(axis=1)
        kept = Statistics.of(np.where(apart, np.nan, values))
        statistics[criterion] = discounted(kept, discount, RESOLUTION_DB[criterion])
    trials = observed.seen.sum(axis=1)
    return Evidence(
        statistics=statistics,
        outlying=outlying,
        events=broken.sum(axis=1),
        violations=violated.sum(axis=1),
        trials=trials,
        effective=trials * discount,
        autocorrelation=typical,
    )


def outlying_steps(values: FloatArray, limit: float) -> tuple[BoolArray, BoolArray]:
    """Return which steps lie apart from the rest of their cell, and which of them break.

    An outlying step breaks the tolerance if it used up more than half of the way from the cell's
    median to the limit: the next one may go further.

    Args:
        values: [C, S] dB, NaN where nothing was observed.
        limit: The criterion's limit, dB.

    Returns:
        Two [C, S] masks.
    """
    apart = np.zeros(values.shape, dtype=bool)
    breaking = np.zeros(values.shape, dtype=bool)
    count = (~np.isnan(values)).sum(axis=1)
    rows = np.flatnonzero(count >= OUTLYING_STEPS_NEEDED)
    if not rows.size:
        return apart, breaking
    chosen = values[rows]
    median = np.nanmedian(chosen, axis=1, keepdims=True)
    deviation = np.abs(chosen - median)
    spread = _MAD_TO_SD * np.nanmedian(deviation, axis=1, keepdims=True)
    far = deviation > np.maximum(OUTLYING_DB, OUTLYING_DEVIATIONS * spread)
    far &= (far.sum(axis=1) <= OUTLYING_SHARE * count[rows])[:, None]
    half_way = np.minimum(median, 0.5 * (median + limit))
    apart[rows] = far
    breaking[rows] = far & (chosen < half_way)
    return apart, breaking


def discounted(statistics: Statistics, discount: FloatArray, resolution_db: float) -> Statistics:
    """Scale counts to whole effective steps and floor squares at the resolution.

    The floor is one ``resolution_db ** 2`` per step, also of the only one: values are known no
    better than that, and a likelihood without it grows beyond bounds where many cells coincide.
    """
    count = statistics.count
    effective = np.where(count > 0, np.maximum(np.rint(count * discount), 1.0), 0.0)
    free = np.maximum(effective - 1.0, 0.0) / np.maximum(count - 1.0, 1.0)
    squares = np.maximum(statistics.squares * free, effective * resolution_db**2)
    return Statistics(count=effective, mean=statistics.mean, squares=squares)


def varies(statistics: Statistics, resolution_db: float) -> bool:
    """Whether any cell varies from step to step by more than the resolution."""
    floor = resolution_db**2 * statistics.count
    return bool((statistics.squares > floor * (1.0 + 1e-9)).any())


def _discount(observed: Observations) -> tuple[FloatArray, float]:
    """Return the share of each cell's steps that counts [C], and a typical autocorrelation.

    Lag-one autocorrelation of the SQNR, corrected for its bias in short series (Kendall 1954), is
    taken per site as the median over recipes and shrunk to the median over sites: a single short
    series says little. A first-order autoregression leaves n (1 - r) / (1 + r) effective steps.
    """
    values = observed.values[Criterion.SQNR]
    order = np.argsort(np.isnan(values), axis=1, kind="stable")
    series = np.take_along_axis(values, order, axis=1)
    count = (~np.isnan(series)).sum(axis=1)
    usable = count >= _SERIES_NEEDED
    mean = np.where(usable, np.nansum(series, axis=1) / np.maximum(count, 1), 0.0)
    centered = np.nan_to_num(series - mean[:, None], nan=0.0)
    power = np.square(centered).sum(axis=1)
    usable &= power > count * RESOLUTION_DB[Criterion.SQNR] ** 2
    if not usable.any():
        return np.ones(observed.cells), 0.0
    lagged = (centered[:, 1:] * centered[:, :-1]).sum(axis=1)
    raw = lagged / np.where(usable, power, 1.0)
    unbiased = np.where(usable, (raw * count + 1.0) / np.maximum(count - 4.0, 1.0), np.nan)
    per_site = unbiased.reshape(len(observed.sites), len(observed.recipes))
    informative = usable.reshape(per_site.shape).any(axis=1)
    own = np.zeros(len(observed.sites))
    own[informative] = np.nanmedian(per_site[informative], axis=1)
    typical = float(np.median(own[informative]))
    steps = count.reshape(per_site.shape).max(axis=1) * informative
    shrunk = (steps * own + _SHRINK_STEPS * typical) / (steps + _SHRINK_STEPS)
    r = np.clip(shrunk, 0.0, 0.95)
    return np.repeat((1.0 - r) / (1.0 + r), len(observed.recipes)), typical
