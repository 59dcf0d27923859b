"""Whether the error of a cell moves with training."""

from __future__ import annotations

import dataclasses

import numpy as np

from loka_toolkit.analysis.observations import BoolArray, IntArray
from loka_toolkit.numerics.posterior import FloatArray

STEPS_NEEDED = 5
DEVIATIONS = 4.0
"""Standard errors from zero at which a fall is believed: over 6,000 cells that do not drift, with
20 steps each, chance shows 2 of them."""


@dataclasses.dataclass(frozen=True)
class Drift:
    """Least-squares lines through the SQNR of C cells.

    Attributes:
        per_1000_steps: [C] slope, dB; NaN with fewer than ``STEPS_NEEDED`` steps.
        leaves: [C] whether a believed fall, going on for ``ahead`` steps, breaks the limit.
        ahead: The horizon, but no more steps than were observed: a line fitted to the first steps
            of a training says nothing about the next thousand.
    """

    per_1000_steps: FloatArray
    leaves: BoolArray
    ahead: int


def drift(values: FloatArray, steps: IntArray, limit: float, horizon: int) -> Drift:
    """Fit a line per cell.

    Args:
        values: [C, S] SQNR, dB; NaN where nothing was observed.
        steps: [S] optimizer steps.
        limit: Least SQNR, dB.
        horizon: Steps until the next probe.
    """
    present = ~np.isnan(values)
    count = present.sum(axis=1)
    safe_count = np.maximum(count, 1)
    at = np.where(present, steps.astype(np.float64), 0.0)
    level = np.where(present, values, 0.0)
    mean_at = at.sum(axis=1) / safe_count
    mean_level = level.sum(axis=1) / safe_count
    x = np.where(present, at - mean_at[:, None], 0.0)
    y = np.where(present, level - mean_level[:, None], 0.0)
    power = np.square(x).sum(axis=1)
    usable = (count >= STEPS_NEEDED) & (power > 0)
    slope = (x * y).sum(axis=1) / np.where(usable, power, 1.0)
    rest = np.square(y - slope[:, None] * x).sum(axis=1) / np.maximum(count - 2, 1)
    error = np.sqrt(rest / np.where(usable, power, 1.0))
    ahead = min(horizon, int(steps[-1] - steps[0]))
    level_ahead = mean_level + slope * (float(steps[-1]) + ahead - mean_at)
    leaves = usable & (slope < -DEVIATIONS * error) & (slope < 0) & (level_ahead < limit)
    return Drift(np.where(usable, 1000.0 * slope, np.nan), leaves, ahead)
