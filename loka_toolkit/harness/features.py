"""The distribution of one operand, as the table ``moments`` has it: decoded, pooled, scaled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_toolkit.artifacts.trace import AMAX_QUANTILES, MARGINAL_BINS, NORM_LEVELS
from loka_toolkit.errors import ArtifactCorruptError

Vector = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class FeatureMoments:
    """Moments over the features of a sample: a row of the operand, or a whole matrix of a batch.

    Attributes:
        count: Samples that they were accumulated over.
        mean: [features].
        covariance: [features, features], or [features] where only the diagonal was recorded.
        row_norm_quantiles: Euclidean norms of the samples at ``AMAX_QUANTILES``.
        zero_share: Share of elements equal to zero.
        factors: [r, features]: where only the diagonal was recorded, F with F^T F close to the
            covariance; None in older traces.
        norm_quantiles: Norms at ``NORM_LEVELS``; empty in older traces.
        marginal_counts: [features, MARGINAL_BINS]; None in older traces and for gradients.
        marginal_extremes: [2, features]: least and largest values; None likewise.
        steps: Sampled steps.
        equal_row_shares: [rows of a sample]: share of samples in which a row's elements are all
            equal and not zero; empty in older traces.
    """

    count: int
    mean: Vector
    covariance: Vector
    row_norm_quantiles: Vector
    zero_share: float
    factors: Vector | None = None
    norm_quantiles: Vector = dataclasses.field(default_factory=lambda: np.zeros(0))
    marginal_counts: Vector | None = None
    marginal_extremes: Vector | None = None
    steps: int = 1
    equal_row_shares: Vector = dataclasses.field(default_factory=lambda: np.zeros(0))

    @property
    def width(self) -> int:
        """Number of features."""
        return int(self.mean.shape[0])

    @property
    def is_finite(self) -> bool:
        """Whether every number is finite."""
        found = (
            self.mean,
            self.covariance,
            self.row_norm_quantiles,
            self.factors,
            self.norm_quantiles,
            self.marginal_counts,
            self.marginal_extremes,
            self.equal_row_shares,
        )
        return all(values is None or bool(np.isfinite(values).all()) for values in found)

    @property
    def variance(self) -> Vector:
        """Variance of each feature."""
        return np.diag(self.covariance).copy() if self.covariance.ndim == 2 else self.covariance

    def times(self, factor: float) -> FeatureMoments:
        """Return the moments of the samples times ``factor``, without marginals if not 1."""
        if factor == 1.0:
            return self
        return dataclasses.replace(
            self,
            mean=self.mean * factor,
            covariance=self.covariance * factor**2,
            row_norm_quantiles=self.row_norm_quantiles * abs(factor),
            factors=None if self.factors is None else self.factors * factor,
            norm_quantiles=self.norm_quantiles * abs(factor),
            marginal_counts=None,
            marginal_extremes=None,
        )

    def part(self, features: slice) -> FeatureMoments:
        """Return the moments of some of the features; norms are those of the whole sample."""
        full = self.covariance.ndim == 2
        counts, extremes = self.marginal_counts, self.marginal_extremes
        return dataclasses.replace(
            self,
            mean=self.mean[features],
            covariance=self.covariance[features, features] if full else self.covariance[features],
            factors=None if self.factors is None else self.factors[:, features],
            marginal_counts=None if counts is None else counts[features],
            marginal_extremes=None if extremes is None else extremes[:, features],
        )


@dataclasses.dataclass(frozen=True)
class TensorMoments:
    """Two numbers for a whole operand, where no moments per feature exist.

    Attributes:
        mean: Mean over all elements and steps.
        variance: Variance over the same.
        zero_share: Share of elements equal to zero.
    """

    mean: float
    variance: float
    zero_share: float


def decode(values: dict[str, Any]) -> FeatureMoments:
    """Return the moments of a row of the table, of kind full, diagonal or low-rank.

    Raises:
        ArtifactCorruptError: If a list has not the length that the row's width asks for.
    """
    rows = int(values["sample_rows"])
    features = int(values["width"]) * rows
    kind = values["kind"]
    mean, covariance, norms = (
        vector(values, name) for name in ("mean", "covariance", "row_norm_quantiles")
    )
    expected = features * features if kind == "full" else features
    named = f"moments of {values['operand']} at {values['site']}"
    if mean.shape != (features,) or covariance.shape != (expected,):
        raise ArtifactCorruptError(
            f"{named}: mean of length {mean.size} and {kind} covariance of {covariance.size} "
            f"entries, expected {features} and {expected}"
        )
    fine, counts, extremes, factors, equal = (
        vector(values, name)
        for name in (
            "norm_quantiles",
            "marginal_counts",
            "marginal_extremes",
            "factors",
            "equal_row_shares",
        )
    )
    lengths = (
        ("row norm quantiles", norms.size, len(AMAX_QUANTILES)),
        ("norm quantiles", fine.size, len(NORM_LEVELS)),
        ("marginal counts", counts.size, features * MARGINAL_BINS),
        ("marginal extremes", extremes.size, 2 * features),
        ("equal row shares", equal.size, rows),
        ("entries of factors", factors.size % max(features, 1), 0),
    )
    for what, found, wanted in lengths:
        if found not in (0, wanted):
            raise ArtifactCorruptError(f"{named}: {found} {what}, expected {wanted}")
    return FeatureMoments(
        count=int(values["count"]),
        mean=mean,
        covariance=covariance.reshape(features, features) if kind == "full" else covariance,
        row_norm_quantiles=norms,
        zero_share=float(values["zero_share"]),
        factors=factors.reshape(-1, features) if kind == "low-rank" else None,
        norm_quantiles=fine,
        marginal_counts=counts.reshape(features, -1) if counts.size else None,
        marginal_extremes=extremes.reshape(2, -1) if extremes.size else None,
        steps=int(values["steps"]),
        equal_row_shares=equal,
    )


def vector(values: dict[str, Any], name: str) -> Vector:
    """Return a list of a row as float64; empty for null."""
    return np.asarray([] if values[name] is None else values[name], dtype=np.float64)


def pooled(parts: Sequence[FeatureMoments]) -> FeatureMoments:
    """Return the moments of the union of samples (Chan, Golub and LeVeque 1979, pairwise merge).

    Quantiles of norms are averaged, weighted by samples; a full covariance pooled with a diagonal
    one leaves a diagonal one; what one part lacks is left out.
    """
    total = sum(part.count for part in parts)
    if len(parts) == 1 or total == 0:
        return parts[0]
    weights = [part.count / total for part in parts]
    full = all(part.covariance.ndim == 2 for part in parts)
    mean = np.zeros_like(parts[0].mean)
    for weight, part in zip(weights, parts, strict=True):
        mean += weight * part.mean
    covariance = np.zeros_like(parts[0].covariance if full else parts[0].variance)
    factors = []
    for weight, part in zip(weights, parts, strict=True):
        shift = part.mean - mean
        between = np.outer(shift, shift) if full else shift**2
        covariance += weight * ((part.covariance if full else part.variance) + between)
        if part.factors is not None:
            factors += [np.sqrt(weight) * part.factors, np.sqrt(weight) * shift[None]]

    def averaged(found: list[Vector]) -> Vector:
        return np.average(found, axis=0, weights=weights) if all(v.size for v in found) else _NONE

    counts = [part.marginal_counts for part in parts if part.marginal_counts is not None]
    extremes = [part.marginal_extremes for part in parts if part.marginal_extremes is not None]
    counted = len(counts) == len(extremes) == len(parts)
    return FeatureMoments(
        count=total,
        mean=mean,
        covariance=covariance,
        row_norm_quantiles=averaged([part.row_norm_quantiles for part in parts]),
        zero_share=float(np.average([part.zero_share for part in parts], weights=weights)),
        factors=np.concatenate(factors) if len(factors) == 2 * len(parts) else None,
        norm_quantiles=averaged([part.norm_quantiles for part in parts]),
        marginal_counts=np.sum(counts, axis=0) if counted else None,
        marginal_extremes=np.stack(
            [np.min([e[0] for e in extremes], axis=0), np.max([e[1] for e in extremes], axis=0)]
        )
        if counted
        else None,
        steps=max(part.steps for part in parts),
        equal_row_shares=averaged([part.equal_row_shares for part in parts]),
    )


_NONE = np.zeros(0)
