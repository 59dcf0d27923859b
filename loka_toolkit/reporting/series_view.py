"""The error of a cell over the steps, against what is predicted and what is tolerated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scipy import stats

from loka_toolkit.artifacts.safety_map import Cell, Criterion, Posterior
from loka_toolkit.reporting import formatting as fmt
from loka_toolkit.reporting.formatting import Quantity

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


@dataclasses.dataclass(frozen=True)
class Series:
    """A criterion over the sampled steps.

    Attributes:
        criterion: Which.
        title: What it measures.
        is_share: Whether the values are shares, where less is better, and not dB, where more is.
        steps: Steps of the points.
        values: Values of the points, dB or share.
        band: 5 %, 50 % and 95 % quantile of a future step (Student-t predictive), same unit.
        limit: The tolerance's limit, same unit.
        caption: What is to be seen, in sentences.
        alt: The figure in words.
    """

    criterion: Criterion
    title: str
    is_share: bool
    steps: tuple[int, ...]
    values: tuple[float, ...]
    band: tuple[float, float, float]
    limit: float
    caption: str
    alt: str


def predictive_quantile(posterior: Posterior, probability: float) -> float:
    """Return a quantile of the next step's value, dB.

    The predictive of a normal-inverse-gamma posterior is Student-t with 2 alpha degrees of freedom,
    location mu and squared scale beta (kappa + 1) / (alpha kappa) (Murphy, "Conjugate Bayesian
    analysis of the Gaussian distribution", 2007, section 3.4).
    """
    scale = math.sqrt(
        posterior.beta * (posterior.kappa + 1.0) / (posterior.alpha * posterior.kappa)
    )
    return float(stats.t.ppf(probability, 2.0 * posterior.alpha, posterior.mu, scale))


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
    values = [(row["step"], fmt.known(row[_COLUMNS[criterion]])) for row in rows]
    points = sorted((int(step), value) for step, value in values if value is not None)
    if not points:
        return f"No figure of the {title}: it is null at every sampled step (0/0)."
    quantiles = [predictive_quantile(posterior, q) for q in (0.05, 0.5, 0.95)]
    low, middle, high = (_share(q) for q in reversed(quantiles)) if is_share else quantiles
    limit = _share(posterior.limit) if is_share else posterior.limit
    breaking = sum(value > limit if is_share else value < limit for _, value in points)
    write = fmt.share if is_share else fmt.decibel
    drawn = _thinned(points, worst=max if is_share else min)
    caption = _caption(
        title, len(points), breaking, write(limit), write(low), write(high), posterior
    )
    if len(values) > len(points):
        caption += f" {fmt.plural(len(values) - len(points), 'more row')} had no value (0/0)."
    if len(drawn) < len(points):
        caption += f" The worst of each group of points is drawn: {len(drawn)} of {len(points)}."
    return Series(
        criterion=criterion,
        title=title,
        is_share=is_share,
        steps=tuple(step for step, _ in drawn),
        values=tuple(float(f"{value:.6g}") for _, value in drawn),
        band=(low, middle, high),
        limit=limit,
        caption=caption,
        alt=f"Points over steps: {caption}",
    )


def _share(decibel: float) -> float:
    return float(min(1.0, 10.0 ** (-decibel / 10.0)))


def _thinned(
    points: list[tuple[int, float]], *, worst: Callable[..., tuple[int, float]]
) -> list[tuple[int, float]]:
    group = math.ceil(len(points) / MOST_POINTS)
    return [
        worst(points[i : i + group], key=lambda point: point[1])
        for i in range(0, len(points), group)
    ]


def _caption(
    title: str,
    points: int,
    breaking: int,
    limit: Quantity,
    low: Quantity,
    high: Quantity,
    posterior: Posterior,
) -> str:
    text = (
        f"{title[:1].upper()}{title[1:]}: {breaking} of {fmt.plural(points, 'sampled value')} "
        f"broke the limit of {limit.text}. Nine in ten future steps are predicted between "
        f"{low.text} and {high.text}."
    )
    if posterior.outlying_steps:
        text += f" {fmt.plural(posterior.outlying_steps, 'outlying step')} counted as events."
    return text
