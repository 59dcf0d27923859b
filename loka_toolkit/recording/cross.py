"""The cross moment of g and x, which a wgrad product sums over rows: its norm and its direction."""

from __future__ import annotations

import dataclasses
import math

import torch

from loka_toolkit.recording.moments import flat_float32
from loka_toolkit.recording.sketch import product_factors, top_factors

CROSS_RANK = 16
"""Singular pairs kept of the mean of g x^T."""


@dataclasses.dataclass(frozen=True)
class CrossMoments:
    """What g [T, O] and x [T, I] have in common at one step.

    Attributes:
        left: float32 [r, O]; ``left^T right`` is close to the mean of g x^T over rows.
        right: float32 [r, I].
        product_square: |g^T x|^2 / T^2.
        norm_product: Mean of |g|^2 |x|^2 over rows.
        norm_correlation: Spearman's correlation of |g| and |x|; NaN if one of them is constant.
    """

    left: torch.Tensor
    right: torch.Tensor
    product_square: float
    norm_product: float
    norm_correlation: float

    @classmethod
    def of(cls, g: torch.Tensor, x: torch.Tensor) -> CrossMoments | None:
        """Return the cross moments of operands with the same rows; None if they overflow."""
        rows = g.shape[0]
        left, right = g.detach().to(torch.float32), x.detach().to(torch.float32)
        mean = left.mT @ right / rows
        if not bool(torch.isfinite(mean).all()):
            return None
        # F = S V^T of the mean; its left vectors follow as mean V.
        factors = top_factors(mean, CROSS_RANK)
        lengths = factors.norm(dim=1, keepdim=True)
        directions = factors / lengths
        norms_left, norms_right = (t.to(torch.float64).norm(dim=1) for t in (left, right))
        return cls(
            left=(mean @ directions.mT).mT.cpu(),
            right=directions.cpu(),
            product_square=float(mean.to(torch.float64).square().sum()),
            norm_product=float((norms_left * norms_right).square().mean()),
            norm_correlation=_spearman(norms_left, norms_right),
        )

    def divided_by(self, factor: float) -> CrossMoments:
        """Return the cross moments of g divided by ``factor``."""
        return dataclasses.replace(
            self,
            left=self.left / factor,
            product_square=self.product_square / factor**2,
            norm_product=self.norm_product / factor**2,
        )

    def mixed_with(self, later: CrossMoments, share: float) -> CrossMoments:
        """Return the weighted mean of these and later ones, which weigh ``share``.

        The gradient of a model that is nearly trained changes sign from step to step along much the
        same direction, so its plain mean is next to nothing: the later one is turned to the side of
        these before it is added.

        Raises:
            ValueError: If the operands have other widths.
        """
        if self.widths != later.widths:
            raise ValueError(f"widths {later.widths} do not merge with {self.widths}")
        agreement = ((self.left @ later.left.mT) * (self.right @ later.right.mT)).sum()
        side = -1.0 if float(agreement) < 0 else 1.0
        u, s, v = product_factors(
            torch.cat([self.left * (1 - share), later.left * (side * share)]),
            torch.cat([self.right, later.right]),
            CROSS_RANK,
        )

        def mean(name: str) -> float:
            before, after = float(getattr(self, name)), float(getattr(later, name))
            if math.isnan(before) or math.isnan(after):
                return after if math.isnan(before) else before
            return (1 - share) * before + share * after

        return CrossMoments(
            left=s.unsqueeze(1) * u,
            right=v,
            product_square=mean("product_square"),
            norm_product=mean("norm_product"),
            norm_correlation=mean("norm_correlation"),
        )

    @property
    def widths(self) -> tuple[int, int]:
        """O and I."""
        return int(self.left.shape[1]), int(self.right.shape[1])

    def as_row(self) -> dict[str, object]:
        """Return the columns of the table ``moments`` that speak of the cross moment."""
        length = self.left.norm(dim=1)
        root = length.sqrt().unsqueeze(1)
        safe = torch.where(root > 0, root, 1.0)
        correlation = self.norm_correlation
        return {
            "width": sum(self.widths),
            "kind": "cross",
            "mean": flat_float32(length),
            "covariance": [],
            "row_norm_quantiles": [],
            "zero_share": 0.0,
            "factors": flat_float32(torch.cat([self.left / safe, self.right * root], dim=1)),
            "product_square": self.product_square,
            "norm_product": self.norm_product,
            "norm_correlation": None if math.isnan(correlation) else correlation,
        }


def cross_bytes(outputs: int, inputs: int) -> int:
    """Return the bytes that the cross moment of g [T, O] and x [T, I] takes in memory, at most."""
    return 4 * CROSS_RANK * (outputs + inputs)


def _spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    ranks = torch.stack([v.argsort(stable=True).argsort(stable=True).double() for v in (a, b)])
    if len(a) < 2 or a.amin() == a.amax() or b.amin() == b.amax():
        return math.nan
    return float(torch.corrcoef(ranks)[0, 1])
