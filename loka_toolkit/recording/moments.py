"""Moments of operands, accumulated over sampled steps: what realistic inputs are drawn from.

Batches are merged by the pairwise update of Chan, Golub and LeVeque (1979) in float64.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from loka_toolkit.recording.statistics import quantiles

_NORMS_KEPT_PER_STEP = 1024
_NORMS_KEPT = 16384
_FLOAT64_WORK = 1 << 28
"""Multiplications up to which a batch's covariance is computed in float64; beyond, the centered
rows are multiplied in float32, whose relative error of some 1e-6 no sampling can see."""


@dataclasses.dataclass(frozen=True)
class BatchMoments:
    """Moments of the rows of one operand at one step.

    Attributes:
        count: Rows.
        mean: float64 [width].
        scatter: Sum of outer products of the centered rows, float64 [width, width], or its
            diagonal [width].
        norms: Euclidean norms of at most 1024 rows, evenly spaced.
        zeros: Elements equal to zero.
        elements: Elements.
    """

    count: int
    mean: torch.Tensor
    scatter: torch.Tensor
    norms: torch.Tensor
    zeros: int
    elements: int

    @property
    def width(self) -> int:
        """Length of the rows."""
        return int(self.mean.shape[0])

    @classmethod
    def of(cls, x: torch.Tensor, full_width: int) -> BatchMoments:
        """Return the moments of an operand [.., width]; leading dimensions count as rows."""
        width = x.shape[-1]
        rows = x.detach().reshape(-1, width).to(torch.float64)
        mean = rows.mean(0)
        centered = rows - mean
        if width > full_width:
            scatter = centered.square().sum(0)
        elif rows.shape[0] * width * width > _FLOAT64_WORK:
            narrow = centered.to(torch.float32)
            scatter = (narrow.mT @ narrow).to(torch.float64)
        else:
            scatter = centered.mT @ centered
        stride = max(1, rows.shape[0] // _NORMS_KEPT_PER_STEP)
        return cls(
            count=rows.shape[0],
            mean=mean.cpu(),
            scatter=scatter.cpu(),
            norms=rows[::stride].norm(dim=1).cpu(),
            zeros=int((rows == 0).sum()),
            elements=rows.numel(),
        )

    def divided_by(self, factor: float) -> BatchMoments:
        """Return the moments of the rows divided by ``factor``."""
        return dataclasses.replace(
            self,
            mean=self.mean / factor,
            scatter=self.scatter / factor**2,
            norms=self.norms / abs(factor),
        )


class RunningMoments:
    """Moments of an operand over the sampled steps so far.

    Args:
        first: The moments of the first step.
    """

    def __init__(self, first: BatchMoments) -> None:
        self.count = first.count
        self.steps = 1
        self.mean = first.mean
        self.scatter = first.scatter.clone()
        self._norms = [first.norms]
        self._zeros = first.zeros
        self._elements = first.elements

    @property
    def width(self) -> int:
        """Length of the rows."""
        return int(self.mean.shape[0])

    @property
    def is_full(self) -> bool:
        """Whether the whole covariance is kept, and not its diagonal."""
        return self.scatter.ndim == 2

    @property
    def covariance(self) -> torch.Tensor:
        """Population covariance, float64 [width, width], or its diagonal [width]."""
        return self.scatter / self.count

    @property
    def zero_share(self) -> float:
        """Share of elements equal to zero."""
        return self._zeros / self._elements

    def row_norm_quantiles(self) -> list[float]:
        """Return the quantiles of the row norms kept."""
        return quantiles(torch.cat(self._norms))

    def merge(self, batch: BatchMoments) -> None:
        """Add the moments of another step.

        Raises:
            ValueError: If its rows have another length.
        """
        if batch.mean.shape != self.mean.shape:
            raise ValueError(f"rows of {batch.mean.shape[0]} do not merge with {self.width}")
        total = self.count + batch.count
        delta = batch.mean - self.mean
        weight = self.count * batch.count / total
        self.scatter += batch.scatter
        self.scatter += weight * (torch.outer(delta, delta) if self.is_full else delta.square())
        self.mean = self.mean + delta * (batch.count / total)
        self.count = total
        self.steps += 1
        self._zeros += batch.zeros
        self._elements += batch.elements
        self._norms.append(batch.norms)
        if sum(len(norms) for norms in self._norms) > _NORMS_KEPT:
            self._norms = [torch.cat(self._norms)[::2]]

    def as_row(self, rank: int, site: str, operand: str) -> dict[str, object]:
        """Return the row of the table ``moments``."""
        return {
            "rank": rank,
            "site": site,
            "operand": operand,
            "count": self.count,
            "steps": self.steps,
            "width": self.width,
            "kind": "full" if self.is_full else "diagonal",
            "mean": _float32(self.mean),
            "covariance": _float32(self.covariance),
            "row_norm_quantiles": self.row_norm_quantiles(),
            "zero_share": self.zero_share,
        }


def _float32(values: torch.Tensor) -> np.ndarray:
    return values.reshape(-1).to(torch.float32).numpy()
