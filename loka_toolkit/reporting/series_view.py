"""The error of a cell over the steps, against what is predicted and what is tolerated."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from loka_toolkit.artifacts.safety_map import Cell, Criterion, Posterior
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.numerics.posterior import (
    SHARE_START,
    NormalInverseGamma,
    predictive,
    sqnr_window,
)
from loka_toolkit.reporting import formatting as fmt

MOST_POINTS = 300
LEAST_SHARE = 1e-5
"""Shares are drawn on a logarithmic axis that ends here; smaller ones and zeros stand on it."""

_COLUMNS = {
    Criterion.SQNR: "sqnr_db",
    Criterion.ROW_SQNR: "row_sqnr_db_p05",
    Criterion.UNDERFLOW: "underflow_share_worst_group",
    Criterion.SATURATION: "saturation_share",
}
_TITLES = {
    Criterion.SQNR: "SQNR of the product",
    Criterion.ROW_SQNR: "SQNR of the 5th-percentile row",
    Criterion.UNDERFLOW: "underflow share of the worst column group",
    Criterion.SATURATION: "saturation share",
}


class Unit(enum.Enum):
    """What a series is measured in."""

    DECIBEL = "dB; more is better"
    SHARE = "share in [0, 1]; less is better"
    LOSS = "change relative to the loss; less is better"


@dataclasses.dataclass(frozen=True)
class Series:
    """A quantity over the sampled steps.

    Attributes:
        title: What it measures.
        unit: Its unit.
        steps: Steps of the points.
        values: Values of the points.
        band: Of a criterion the 5 %, 50 % and 95 % quantile of a future step (Student-t
            predictive); of the impact the 5 % quantile, mean and 95 % quantile of its mean.
        limit: What the tolerance allows.
        caption: What is to be seen, in sentences.
        alt: The figure in words.
    """

    title: str
    unit: Unit
    steps: tuple[int, ...]
    values: tuple[float, ...]
    band: tuple[float, float, float]
    limit: float
    caption: str
    alt: str


def predictive_quantile(posterior: Posterior, probability: float) -> float:
    """Return a quantile of the next step's value, dB."""
    parameters = NormalInverseGamma(
        *(np.array(getattr(posterior, name)) for name in ("mu", "kappa", "alpha", "beta"))
    )
    return float(predictive(parameters).quantile(probability))


def criteria_shown(cell: Cell) -> tuple[Criterion, ...]:
    """Return the SQNR and, where another criterion binds, that one."""
    binding = cell.binding_criterion
    if binding is None or binding not in {c.value for c in Criterion} or binding == Criterion.SQNR:
        return (Criterion.SQNR,)
    return (Criterion.SQNR, Criterion(binding))


def series(cell: Cell, criterion: Criterion, rows: Sequence[Mapping[str, Any]]) -> Series | str:
    """Return a criterion over the steps, or a sentence saying why there is no figure.

    Args:
        cell: The site under the recipe shown.
        criterion: Which criterion.
        rows: The cell's rows of the trace's table ``errors``.
    """
    title = _TITLES[criterion]
    if not rows:
        return f"No figure of the {title}: the trace holds no errors of this site and recipe."
    posterior = cell.posteriors.get(criterion.value)
    if posterior is None:
        return f"No figure of the {title}: the map holds no posterior of it."
    is_share = criterion in (Criterion.UNDERFLOW, Criterion.SATURATION)
    beyond, low, high = 0, -math.inf, math.inf
    per_step, lost, absent = _worst_per_step(rows, criterion, worst=max if is_share else min)
    points = sorted(per_step.items())
    if not points:
        why = "it is not a number" if lost else "it is null (0/0)"
        return f"No figure of the {title}: {why} at every sampled step."
    if is_share and not lost and not any(value for _, value in points):
        return f"No figure of the {title}: it is 0 at every sampled step."
    limit = _share(posterior.limit, posterior) if is_share else posterior.limit
    if not is_share:
        low, high = sqnr_window(limit)
        beyond = sum(not low <= value <= high for _, value in points)
        points = [(step, min(max(value, low), high)) for step, value in points]
    quantiles = [predictive_quantile(posterior, q) for q in (0.05, 0.5, 0.95)]
    if is_share:
        quantiles = [_share(q, posterior) for q in reversed(quantiles)]
    breaking = sum(value > limit if is_share else value < limit for _, value in points)
    write = fmt.share if is_share else fmt.decibel
    caption = (
        f"{title[:1].upper()}{title[1:]}: {breaking + lost} of "
        f"{fmt.plural(len(points) + lost, 'sampled step')} broke the limit of "
        f"{write(limit).text}. Nine in ten future steps are predicted between "
        f"{write(quantiles[0]).text} and {write(quantiles[2]).text}."
    )
    if not is_share and beyond:
        caption += (
            f" {fmt.plural(beyond, 'step')} outside of {low:g} to {high:g} dB are drawn at the "
            "nearer end: further from the limit, the model does not tell them apart."
        )
    if posterior.outlying_steps:
        outlying = fmt.plural(posterior.outlying_steps, "outlying step")
        caption += f" The prediction leaves out {outlying}, counted as events."
    if lost:
        caption += f" {fmt.plural(lost, 'step')} held Inf or NaN and cannot be drawn."
    if absent:
        caption += f" {fmt.plural(absent, 'step')} had no value (0/0)."
    drawn = _thinned(points, worst=max if is_share else min)
    if len(drawn) < len(points):
        caption += f" The worst of each group of points is drawn: {len(drawn)} of {len(points)}."
    return Series(
        title=title,
        unit=Unit.SHARE if is_share else Unit.DECIBEL,
        steps=tuple(step for step, _ in drawn),
        values=tuple(float(f"{value:.6g}") for _, value in drawn),
        band=(quantiles[0], quantiles[1], quantiles[2]),
        limit=limit,
        caption=caption,
        alt=f"Points over steps: {caption}",
    )


def impact_series(
    cell: Cell, rows: Sequence[Mapping[str, Any]], baseline_loss: float | None
) -> Series | str | None:
    """Return the impact of a forward site over the steps, or a sentence saying why there is none.

    None for a gradient site: its effect is on the update, not on the loss.

    Args:
        cell: The site under the recipe shown.
        rows: The cell's rows of the trace's table ``errors``.
        baseline_loss: Mean loss, in mean-loss units.
    """
    if cell.role != Role.FWD or not rows:
        return None
    title = "impact on the loss"
    mean, low, high = (fmt.known(v) for v in (cell.impact, cell.impact_lo, cell.impact_hi))
    if mean is None or low is None or high is None or baseline_loss is None:
        why = cell.impact_reason or "it is not known"
        return f"No figure of the {title}: {why}."
    seen: dict[int, list[float]] = {}
    for row in rows:
        orders = (row["impact_first_order"], row["impact_second_order"])
        known = [order for order in orders if order is not None and math.isfinite(order)]
        if len(known) == 2:
            seen.setdefault(int(row["step"]), []).append(sum(known) / baseline_loss)
    points = sorted((step, math.fsum(values) / len(values)) for step, values in seen.items())
    if not points:
        return f"No figure of the {title}: it is not known at any sampled step."
    drawn = _thinned(points, worst=max)
    limit = cell.impact_allotment
    caption = (
        f"Predicted relative change of the loss over {fmt.plural(len(points), 'step')}. Single "
        f"steps are signed and noisy; the verdict rests on their mean, "
        f"{fmt.relative(mean).text} "
        f"{fmt.interval(fmt.relative(low), fmt.relative(high))}, floored at zero, against the "
        f"allotment of {fmt.relative(limit).text}."
    )
    if len(drawn) < len(points):
        caption += f" The worst of each group of points is drawn: {len(drawn)} of {len(points)}."
    return Series(
        title=title,
        unit=Unit.LOSS,
        steps=tuple(step for step, _ in drawn),
        values=tuple(float(f"{value:.6g}") for _, value in drawn),
        band=(low, mean, high),
        limit=limit,
        caption=caption,
        alt=f"Points over steps: {caption}",
    )


def _worst_per_step(
    rows: Sequence[Mapping[str, Any]], criterion: Criterion, *, worst: Callable[..., float]
) -> tuple[dict[int, float], int, int]:
    """Return the worst value over ranks per step; steps with NaN; steps with null only."""
    seen: dict[int, list[float]] = {}
    for row in rows:
        values = seen.setdefault(int(row["step"]), [])
        if row[_COLUMNS[criterion]] is not None:
            values.append(float(row[_COLUMNS[criterion]]))
    lost = {step for step, values in seen.items() if any(map(math.isnan, values))}
    found = {step: worst(values) for step, values in seen.items() if values and step not in lost}
    return found, len(lost), len(seen) - len(lost) - len(found)


def _share(decibel: float, posterior: Posterior) -> float:
    """Return the share that a modelled value in dB stands for; see ``share_to_db``."""
    start = 10.0 ** (-posterior.limit / 10.0) * SHARE_START / (1.0 + SHARE_START)
    return float(min(max(10.0 ** (-decibel / 10.0) - start, 0.0), 1.0))


def _thinned(
    points: list[tuple[int, float]], *, worst: Callable[..., tuple[int, float]]
) -> list[tuple[int, float]]:
    group = math.ceil(len(points) / MOST_POINTS)
    return [
        worst(points[i : i + group], key=lambda point: point[1])
        for i in range(0, len(points), group)
    ]
