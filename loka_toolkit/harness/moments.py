"""What a trace says of an operand: the distribution from which replay draws it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loka_toolkit.artifacts.sites import Operand, SiteKey
from loka_toolkit.artifacts.trace import AMAX_QUANTILES, Trace
from loka_toolkit.errors import ArtifactCorruptError, ReplayError

if TYPE_CHECKING:
    import pyarrow as pa

Vector = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class FeatureMoments:
    """Moments over the last logical dimension: a row of the operand is one sample.

    Attributes:
        count: Rows that they were accumulated over.
        mean: [width].
        covariance: [width, width], or [width] where only the diagonal was recorded.
        row_norm_quantiles: Euclidean norms of the rows at ``AMAX_QUANTILES``.
        zero_share: Share of elements equal to zero.
    """

    count: int
    mean: Vector
    covariance: Vector
    row_norm_quantiles: Vector
    zero_share: float

    @property
    def width(self) -> int:
        """Length of the last logical dimension."""
        return int(self.mean.shape[0])

    @property
    def is_finite(self) -> bool:
        """Whether every number is finite."""
        return all(
            bool(np.isfinite(values).all())
            for values in (self.mean, self.covariance, self.row_norm_quantiles)
        )

    @property
    def variance(self) -> Vector:
        """Variance of each feature, [width]."""
        return np.diag(self.covariance).copy() if self.covariance.ndim == 2 else self.covariance

    def times(self, factor: float) -> FeatureMoments:
        """Return the moments of the samples multiplied by ``factor``."""
        return dataclasses.replace(
            self,
            mean=self.mean * factor,
            covariance=self.covariance * factor**2,
            row_norm_quantiles=self.row_norm_quantiles * abs(factor),
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


class MomentsOfTrace:
    """The moments of every operand of a trace, decoded when asked for.

    Moments of ``g`` are recorded relative to the loss scale, its statistics per step are not; both
    are brought to the loss scale of the last step, at which training would go on.

    Args:
        trace: The trace.

    Raises:
        ReplayError: If the trace holds no moments.
    """

    def __init__(self, trace: Trace) -> None:
        self._table = trace.moments
        if not self._table.num_rows:
            raise ReplayError(
                f"trace {trace.path} holds no moments, so no realistic inputs can be drawn; "
                "record again with moments=True and at least one sampled step"
            )
        self._rows = _latest_rows(self._table)
        steps = trace.steps
        scales = zip(
            *(steps.column(name).to_pylist() for name in ("step", "rank", "loss_scale")),
            strict=True,
        )
        self._loss_scales = {(step, rank): scale for step, rank, scale in scales if scale}
        last = max(self._loss_scales, default=None)
        self._loss_scale = 1.0 if last is None else self._loss_scales[last]
        self._amax: dict[tuple[str, str], float] = {}
        self._tensor: dict[tuple[str, str], TensorMoments] = {}
        self._read_operands(trace.operands)

    def features(self, layer: str, operand: Operand, width: int) -> FeatureMoments | None:
        """Return the moments of a layer's operand of that width, ranks pooled, or None.

        Raises:
            ArtifactCorruptError: If a row's lists have not the length that its width asks for.
        """
        rows = self._rows.get((layer, operand.value, width), [])
        found = [self._decode(row) for row in rows]
        if not found:
            return None
        return pooled(found).times(self._loss_scale if operand is Operand.G else 1.0)

    def widths(self, layer: str, operand: Operand) -> tuple[int, ...]:
        """Return the widths in which moments of a layer's operand were recorded."""
        return tuple(
            sorted(
                width
                for (of_layer, name, width), rows in self._rows.items()
                if (of_layer, name) == (layer, operand.value) and rows
            )
        )

    def tensor(self, layer: str, operand: Operand) -> TensorMoments | None:
        """Return mean and variance of a layer's operand over all steps; None if unrecorded."""
        return self._tensor.get((layer, operand.value))

    def amax(self, layer: str, operand: Operand) -> float | None:
        """Return the largest finite magnitude recorded of a layer's operand, or None."""
        return self._amax.get((layer, operand.value))

    def _decode(self, row: int) -> FeatureMoments:
        values = {name: self._table.column(name)[row] for name in self._table.column_names}
        width = int(values["width"].as_py())
        mean, covariance, norms = (
            np.asarray(values[name].values.to_numpy(zero_copy_only=False), dtype=np.float64)
            for name in ("mean", "covariance", "row_norm_quantiles")
        )
        kind = values["kind"].as_py()
        expected = width * width if kind == "full" else width
        named = f"moments of {values['operand'].as_py()} at {values['site'].as_py()}"
        if mean.shape != (width,) or covariance.shape != (expected,):
            raise ArtifactCorruptError(
                f"{named}: mean of length {mean.size} and {kind} covariance of {covariance.size} "
                f"entries, expected {width} and {expected}"
            )
        if norms.size not in (0, len(AMAX_QUANTILES)):
            raise ArtifactCorruptError(
                f"{named}: {norms.size} row norm quantiles, expected {len(AMAX_QUANTILES)}"
            )
        return FeatureMoments(
            count=int(values["count"].as_py()),
            mean=mean,
            covariance=covariance.reshape(width, width) if kind == "full" else covariance,
            row_norm_quantiles=norms,
            zero_share=float(values["zero_share"].as_py()),
        )

    def _read_operands(self, table: pa.Table) -> None:
        columns = ("step", "rank", "site", "operand", "mean", "variance", "amax", "zero_share")
        grouped: dict[tuple[str, str], list[tuple[Any, ...]]] = defaultdict(list)
        for step, rank, site, operand, mean, variance, amax, zeros in zip(
            *(table.column(name).to_pylist() for name in columns), strict=True
        ):
            factor = 1.0
            if operand == Operand.G:
                factor = self._loss_scale / self._loss_scales.get((step, rank), 1.0)
            grouped[SiteKey.parse(site).layer, operand].append(
                (
                    None if mean is None else mean * factor,
                    None if variance is None else variance * factor**2,
                    None if amax is None else amax * abs(factor),
                    zeros,
                )
            )
        for key, found in grouped.items():
            largest = [row[2] for row in found if row[2] is not None]
            if largest:
                self._amax[key] = max(largest)
            known = [row for row in found if row[0] is not None and row[1] is not None]
            if known:
                center = float(np.mean([row[0] for row in known]))
                square = float(np.mean([row[1] + row[0] ** 2 for row in known]))
                share = float(np.mean([row[3] for row in known]))
                self._tensor[key] = TensorMoments(center, max(0.0, square - center**2), share)


def pooled(parts: list[FeatureMoments]) -> FeatureMoments:
    """Return the moments of the union of samples (Chan, Golub and LeVeque 1979, pairwise merge).

    Quantiles of row norms are averaged, weighted by rows; a full covariance pooled with a diagonal
    one leaves a diagonal one.
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
    for weight, part in zip(weights, parts, strict=True):
        shift = part.mean - mean
        between = np.outer(shift, shift) if full else shift**2
        covariance += weight * ((part.covariance if full else part.variance) + between)
    norms = [part.row_norm_quantiles for part in parts]
    return FeatureMoments(
        count=total,
        mean=mean,
        covariance=covariance,
        row_norm_quantiles=np.average(norms, axis=0, weights=weights)
        if all(n.size for n in norms)
        else np.zeros(0),
        zero_share=float(np.average([part.zero_share for part in parts], weights=weights)),
    )


def _latest_rows(table: pa.Table) -> dict[tuple[str, str, int], list[int]]:
    """Moments accumulate, so of each rank, operand and width the row of most samples counts."""
    names = ("rank", "site", "operand", "width", "count")
    best: dict[tuple[str, str, int], dict[int, tuple[int, int]]] = defaultdict(dict)
    columns = (table.column(name).to_pylist() for name in names)
    for row, (rank, site, operand, width, count) in enumerate(zip(*columns, strict=True)):
        ranks = best[SiteKey.parse(site).layer, operand, width]
        if rank not in ranks or count >= ranks[rank][0]:
            ranks[rank] = (count, row)
    return {key: [row for count, row in ranks.values() if count] for key, ranks in best.items()}
