"""Moments of operands, accumulated over sampled steps: what realistic inputs are drawn from.

Batches are merged by the pairwise update of Chan, Golub and LeVeque (1979) in float64. The weights
of earlier steps may decay, so that moments speak of the model as it is and not as it began.

Memory of an operand whose samples have n features, in bytes, whatever the number of steps:

- covariance, mean and counts of constant rows: 8 n (n + 2) up to ``moments_width`` features;
  beyond, 24 n and factors of 4 * 64 n (:func:`moments_bytes`);
- marginals, not of gradients: 4 * 321 n + 8 n;
- norms: 50 KiB of counts and at most 136 KiB of norms.

Nothing kept is a sample: means, covariances, counts per feature, quantiles of norms.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from loka_toolkit.artifacts.trace import MARGINAL_BINS
from loka_toolkit.recording.marginals import Marginals
from loka_toolkit.recording.norms import NORM_BYTES, NormCounts
from loka_toolkit.recording.sketch import SKETCH_RANK, merged_factors, top_factors
from loka_toolkit.recording.statistics import quantiles

_NORMS_KEPT_PER_STEP = 1024
_NORMS_KEPT = 16384
_FLOAT64_WORK = 1 << 28
"""Multiplications up to which a batch's covariance is computed in float64; beyond, the centered
rows are multiplied in float32, whose relative error of some 1e-6 no sampling can see."""


def moments_bytes(features: int, full_width: int, *, with_marginals: bool) -> int:
    """Return the bytes that the moments of one operand take in memory, at most.

    Args:
        features: Length of its samples.
        full_width: Longest samples whose full covariance is kept (``moments_width``).
        with_marginals: Whether values are counted per feature: not for gradients.
    """
    if features <= full_width:
        second = 8 * features * features
    else:
        second = 8 * features + 4 * SKETCH_RANK * features
    marginal = (4 * MARGINAL_BINS + 8) * features if with_marginals else 0
    norms = NORM_BYTES + 8 * (_NORMS_KEPT + _NORMS_KEPT_PER_STEP)
    return second + 16 * features + marginal + norms


@dataclasses.dataclass(frozen=True)
class BatchMoments:
    """Moments of the samples of one operand at one step.

    Attributes:
        count: Samples.
        mean: float64 [features].
        scatter: Sum of outer products of the centered samples, float64 [features, features], or its
            diagonal [features].
        factors: Where only the diagonal is kept, float32 [at most 64, features]: a sketch of the
            whole.
        norms: Euclidean norms of the samples, float64.
        zeros: Elements equal to zero.
        elements: Elements.
        equal_rows: Of every row of a sample, in how many samples its elements are all equal and not
            zero: float64 [rows of a sample].
        marginals: Distribution of every feature, or None.
    """

    count: int
    mean: torch.Tensor
    scatter: torch.Tensor
    factors: torch.Tensor | None
    norms: torch.Tensor
    zeros: int
    elements: int
    equal_rows: torch.Tensor
    marginals: Marginals | None = None

    @property
    def width(self) -> int:
        """Length of the samples."""
        return int(self.mean.shape[0])

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        full_width: int,
        *,
        with_marginals: bool = False,
        sample_rows: int = 1,
    ) -> BatchMoments:
        """Return the moments of samples [.., features], finite; leading dimensions count samples.

        Args:
            x: The samples, at least one.
            full_width: Longest samples whose full covariance is kept.
            with_marginals: Whether to count the values of every feature.
            sample_rows: Rows that a sample consists of; divides the features.
        """
        width = x.shape[-1]
        narrow = x.detach().reshape(-1, width)
        rows = narrow.to(torch.float64)
        mean = rows.mean(0)
        centered = rows - mean
        factors = None
        if width > full_width:
            scatter = centered.square().sum(0)
            factors = top_factors(centered.to(torch.float32)).cpu() if full_width else None
        elif rows.shape[0] * width * width > _FLOAT64_WORK:
            single = centered.to(torch.float32)
            scatter = (single.mT @ single).to(torch.float64)
        else:
            scatter = centered.mT @ centered
        return cls(
            count=rows.shape[0],
            mean=mean.cpu(),
            scatter=scatter.cpu(),
            factors=factors,
            norms=rows.norm(dim=1).cpu(),
            zeros=int((narrow == 0).sum()),
            elements=rows.numel(),
            equal_rows=_equal_rows(narrow.reshape(-1, sample_rows, width // sample_rows)),
            marginals=Marginals.of(narrow) if with_marginals else None,
        )

    def divided_by(self, factor: float) -> BatchMoments:
        """Return the moments of the samples divided by ``factor``; marginals are dropped."""
        if factor == 1.0:
            return self
        return dataclasses.replace(
            self,
            mean=self.mean / factor,
            scatter=self.scatter / factor**2,
            factors=None if self.factors is None else self.factors / factor,
            norms=self.norms / abs(factor),
            marginals=None,
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
        self.factors = first.factors
        self._weight = float(first.count)
        self._norms = [_thinned(first.norms)]
        self._norm_counts = NormCounts(first.norms)
        self._zeros = float(first.zeros)
        self._elements = float(first.elements)
        self._equal_rows = first.equal_rows
        self._marginals = first.marginals

    @property
    def width(self) -> int:
        """Length of the samples."""
        return int(self.mean.shape[0])

    @property
    def is_full(self) -> bool:
        """Whether the whole covariance is kept, and not its diagonal."""
        return self.scatter.ndim == 2

    @property
    def covariance(self) -> torch.Tensor:
        """Population covariance, float64 [features, features], or its diagonal [features]."""
        return self.scatter / self._weight

    @property
    def covariance_factors(self) -> torch.Tensor | None:
        """F with F^T F close to the covariance where only its diagonal is kept, else None."""
        return None if self.factors is None else self.factors / self._weight**0.5

    @property
    def zero_share(self) -> float:
        """Share of elements equal to zero."""
        return self._zeros / self._elements

    @property
    def equal_row_shares(self) -> torch.Tensor:
        """Share of samples in which a row is constant and not zero, float64 [rows of a sample]."""
        return self._equal_rows / self._weight

    def row_norm_quantiles(self) -> list[float]:
        """Return the quantiles of the norms kept."""
        return quantiles(torch.cat(self._norms))

    def merge(self, batch: BatchMoments, decay: float = 1.0) -> None:
        """Add the moments of a later step.

        Args:
            batch: The moments.
            decay: Weight of what was added before, relative to this step; in (0, 1].

        Raises:
            ValueError: If its samples have another length.
        """
        if batch.mean.shape != self.mean.shape:
            raise ValueError(f"samples of {batch.mean.shape[0]} do not merge with {self.width}")
        before = self._weight * decay
        total = before + batch.count
        delta = batch.mean - self.mean
        between = before * batch.count / total
        self.scatter *= decay
        self.scatter += batch.scatter
        self.scatter += between * (torch.outer(delta, delta) if self.is_full else delta.square())
        if self.factors is not None and batch.factors is not None:
            shift = (between**0.5 * delta).to(torch.float32).unsqueeze(0)
            self.factors = merged_factors(self.factors * decay**0.5, batch.factors, shift)
        self.mean = self.mean + delta * (batch.count / total)
        self._weight = total
        self.count += batch.count
        self.steps += 1
        self._zeros = self._zeros * decay + batch.zeros
        self._elements = self._elements * decay + batch.elements
        self._equal_rows = self._equal_rows * decay + batch.equal_rows
        if self._marginals is not None and batch.marginals is not None:
            self._marginals.merge(batch.marginals, decay)
        self._norm_counts.merge(NormCounts(batch.norms), decay)
        self._norms.append(_thinned(batch.norms))
        if sum(len(norms) for norms in self._norms) > _NORMS_KEPT:
            self._norms = [torch.cat(self._norms)[::2].clone()]

    def as_row(self) -> dict[str, object]:
        """Return the columns of the table ``moments`` that speak of the distribution."""
        kind = "full" if self.is_full else "diagonal" if self.factors is None else "low-rank"
        factors = self.covariance_factors
        marginals = self._marginals
        return {
            "count": self.count,
            "steps": self.steps,
            "width": self.width,
            "kind": kind,
            "mean": flat_float32(self.mean),
            "covariance": flat_float32(self.covariance),
            "row_norm_quantiles": self.row_norm_quantiles(),
            "zero_share": self.zero_share,
            "factors": None if factors is None else flat_float32(factors),
            "equal_row_shares": flat_float32(self.equal_row_shares),
            "norm_quantiles": self._norm_counts.quantiles().astype(np.float32),
            "marginal_counts": None if marginals is None else flat_float32(marginals.counts),
            "marginal_extremes": None
            if marginals is None
            else flat_float32(torch.cat([marginals.least, marginals.largest])),
        }


def _equal_rows(samples: torch.Tensor) -> torch.Tensor:
    """Return how often each row of samples [count, rows, width] is constant and not zero."""
    if samples.shape[-1] < 2:  # a single element says nothing
        return torch.zeros(samples.shape[1], dtype=torch.float64)
    first = samples[..., :1]
    equal = (samples == first).all(-1) & (first[..., 0] != 0)
    return equal.sum(0).to("cpu", torch.float64)


def _thinned(norms: torch.Tensor) -> torch.Tensor:
    return norms[:: -(-len(norms) // _NORMS_KEPT_PER_STEP)].clone()


def flat_float32(values: torch.Tensor) -> np.ndarray:
    """Return a tensor's values as a float32 vector for a table."""
    return values.detach().reshape(-1).to(torch.float32).cpu().numpy()
