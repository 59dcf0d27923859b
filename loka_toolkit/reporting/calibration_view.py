"""Whether the steps fell where the fit says that steps fall: a posterior predictive check."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from loka_toolkit.artifacts.safety_map import Criterion, SafetyMap
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.numerics.posterior import NormalInverseGamma, predictive, sqnr_window
from loka_toolkit.reporting import formatting as fmt

BINS = 20


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Where the sampled steps fell in their own cell's predictive distribution.

    Attributes:
        shares: Share of the steps per bin of predicted probability, ``BINS`` equal bins of [0, 1];
            all alike if the fit has the right shape.
        inside_half: Share within the central 50 %.
        inside_most: Share within the central 90 %.
        values: Number of steps and cells counted.
        caption: What is to be seen, in sentences.
        alt: The figure in words.
    """

    shares: tuple[float, ...]
    inside_half: float
    inside_most: float
    values: int
    caption: str
    alt: str


def calibration(safety: SafetyMap, trace: Trace | None) -> Calibration | str:
    """Return the check over all cells' SQNR, or a sentence saying why there is none."""
    if trace is None:
        return "No check against the sampled steps: they are in the trace, and none was given."
    found = _probabilities(safety, trace)
    if not found.size:
        return "No check against the sampled steps: the trace holds none of the map's cells."
    counts, _ = np.histogram(found, bins=np.linspace(0.0, 1.0, BINS + 1))
    half = float(np.mean((found > 0.25) & (found < 0.75)))
    most = float(np.mean((found > 0.05) & (found < 0.95)))
    caption = (
        f"{fmt.count(found.size).text} sampled values of the SQNR against the predictive "
        f"distribution of their own cell: {fmt.share(half).text} lie within its central 50 % and "
        f"{fmt.share(most).text} within its central 90 %. Bars of one height, at the dashed line, "
        "mean that it has the right shape; a hill, that it is too wide; a valley, too narrow; tall "
        "ends, outlying steps. The same steps made the fit, so a check on other steps is harsher."
    )
    return Calibration(
        shares=tuple(float(f"{n / found.size:.6g}") for n in counts),
        inside_half=half,
        inside_most=most,
        values=int(found.size),
        caption=caption,
        alt=f"Histogram of predicted probabilities. {caption}",
    )


def _probabilities(safety: SafetyMap, trace: Trace) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return P(a future step is below the value seen), per cell and step; worst rank per step."""
    import pyarrow.compute as pc

    table = trace.errors.select(["site", "recipe", "step", "sqnr_db"])
    table = table.filter(pc.is_finite(table["sqnr_db"]))
    table = table.group_by(["site", "recipe", "step"]).aggregate([("sqnr_db", "min")])
    posteriors = {
        (cell.site, cell.recipe): cell.posteriors[Criterion.SQNR.value]
        for cell in safety.cells
        if Criterion.SQNR.value in cell.posteriors
    }
    names = zip(table["site"].to_pylist(), table["recipe"].to_pylist(), strict=True)
    chosen = [posteriors.get(name) for name in names]
    known = np.array([p is not None for p in chosen], dtype=bool)
    if not known.any():
        return np.zeros(0)
    mu, kappa, alpha, beta, limit = np.array(
        [(p.mu, p.kappa, p.alpha, p.beta, p.limit) for p in chosen if p is not None]
    ).T
    value = table["sqnr_db_min"].to_numpy()[known]
    low, high = np.array([sqnr_window(one) for one in limit]).T
    inside = (value > low) & (value < high)
    probability = predictive(NormalInverseGamma(mu, kappa, alpha, beta)).cdf(value)
    return np.asarray(probability[inside])
