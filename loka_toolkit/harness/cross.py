"""What g and x have in common, for the product that sums g x^T over rows.

Drawn apart, g and x give a wgrad product that is nothing but noise. The recorded cross moment C is
put back by a regression: ``g + x B^T`` with ``B = C S^-1`` and S the second moment of x has it in
expectation. From step to step the gradient changes sign and size along C, so C is drawn with a
normal factor whose mean square gives the product its recorded norm. The norms of the rows of g and
x are drawn with the dependence under which the product's noise, E |g|^2 |x|^2, is the recorded one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import special

from loka_toolkit.artifacts.trace import NORM_LEVELS
from loka_toolkit.errors import ArtifactCorruptError
from loka_toolkit.harness.directions import DirectionSampler, scaled_norms
from loka_toolkit.harness.features import FeatureMoments, Vector, vector
from loka_toolkit.harness.normal import tensor_of

_RIDGE = 1e-3
_MOST_RHO = 0.999
_DRAWS = 1 << 15
_MOST_EXPLAINED = 0.9
"""Share of g that the regression may explain at most: a sampled C explains a little too much."""


@dataclasses.dataclass(frozen=True)
class CrossMoments:
    """The mean of g x^T over rows and what goes with it.

    Attributes:
        left: [r, O]: ``left^T right`` is the mean.
        right: [r, I].
        product_square: Mean over steps of |g^T x|^2 / rows^2.
        norm_product: Mean of |g|^2 |x|^2.
        norm_correlation: Rank correlation of |g| and |x|, 0 where it is not known.
    """

    left: Vector
    right: Vector
    product_square: float
    norm_product: float
    norm_correlation: float

    @property
    def is_finite(self) -> bool:
        """Whether every number is finite."""
        numbers = (self.product_square, self.norm_product, self.norm_correlation)
        return all(map(math.isfinite, numbers)) and all(
            bool(np.isfinite(v).all()) for v in (self.left, self.right)
        )

    @property
    def square(self) -> float:
        """Squared Frobenius norm of the mean."""
        return float(np.sum((self.left @ self.left.T) * (self.right @ self.right.T)))

    def times(self, factor: float) -> CrossMoments:
        """Return the cross moments of g multiplied by ``factor``."""
        return dataclasses.replace(
            self,
            left=self.left * factor,
            product_square=self.product_square * factor**2,
            norm_product=self.norm_product * factor**2,
        )

    @classmethod
    def decode(cls, values: dict[str, Any], outputs: int) -> CrossMoments:
        """Return the cross moment of a row of the table, whose g is ``outputs`` wide.

        Raises:
            ArtifactCorruptError: If its factors do not fit its width.
        """
        width, factors = int(values["width"]), vector(values, "factors")
        if factors.size % width:
            raise ArtifactCorruptError(
                f"cross moment at {values['site']}: factors of {factors.size} entries do not fit "
                f"a width of {width}"
            )
        pairs = factors.reshape(-1, width)
        correlation = values["norm_correlation"]
        return cls(
            pairs[:, :outputs],
            pairs[:, outputs:],
            float(values["product_square"]),
            float(values["norm_product"]),
            0.0 if correlation is None else float(correlation),
        )

    @classmethod
    def pooled(cls, parts: Sequence[CrossMoments]) -> CrossMoments:
        """Return the mean over ranks, each on the side of the first; see the recorder's."""
        first, share = parts[0], 1 / len(parts)
        sides = [
            -share
            if np.sum((first.left @ part.left.T) * (first.right @ part.right.T)) < 0
            else share
            for part in parts
        ]
        return cls(
            np.concatenate([part.left * side for part, side in zip(parts, sides, strict=True)]),
            np.concatenate([part.right for part in parts]),
            float(np.mean([part.product_square for part in parts])),
            float(np.mean([part.norm_product for part in parts])),
            float(np.mean([part.norm_correlation for part in parts])),
        )


class CrossSampler:
    """Draws g for a drawn x.

    Args:
        cross: What they have in common.
        x: Moments of x.
        g: Moments of g.
        directions: Draws g apart from x.
        device: Where to draw.
    """

    def __init__(
        self,
        cross: CrossMoments,
        x: FeatureMoments,
        g: FeatureMoments,
        directions: DirectionSampler,
        device: torch.device,
    ) -> None:
        self._directions = directions
        self._rho = norm_dependence(cross, x, scaled_norms(g))
        solved = inverse_second_moment(x, cross.right.T)
        regression = cross.left.T @ solved.T
        explained = float(np.einsum("or,ri,oi->", cross.left.T, cross.right, regression))
        whole = float(np.sum(g.variance + g.mean**2))
        self._share = explained / whole if whole > 0 else 0.0
        self._solved = tensor_of(solved, device)
        self._left = tensor_of(cross.left, device)
        self._size = amplitude(cross, rows=x.count / max(x.steps, 1))

    def sample(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return g [rows, O], float32, for x [rows, I]."""
        rows, device = x.shape[0], x.device
        noise = torch.randn(rows, generator=generator, device=device, dtype=torch.float64)
        ranks = x.to(torch.float64).norm(dim=1).argsort(stable=True).argsort(stable=True)
        score = torch.special.ndtri((ranks.to(torch.float64) + 0.5) / max(rows, 1))
        scores = self._rho * score + math.sqrt(1 - self._rho**2) * noise
        g = self._directions.sample(rows, generator, scores)
        size = self._size * float(torch.randn((), generator=generator, device=device))
        explained = min(_MOST_EXPLAINED, size**2 * self._share)
        if self._share <= 0 or explained <= 0:
            return g
        size = math.copysign(math.sqrt(explained / self._share), size)
        return g * math.sqrt(1 - explained) + size * ((x @ self._solved) @ self._left)


def amplitude(cross: CrossMoments, rows: float) -> float:
    """Return the root mean square of the factor of the mean of g x^T.

    The square of a product over T independent rows is, divided by T^2, ``|C|^2 (T - 1) / T`` and
    the noise ``E |g|^2 |x|^2 / T``.
    """
    have = cross.square
    if have <= 0 or rows <= 1:
        return 0.0
    want = max(0.0, (cross.product_square - cross.norm_product / rows) * rows / (rows - 1))
    return math.sqrt(want / have)


def norm_dependence(cross: CrossMoments, x: FeatureMoments, norms: Vector) -> float:
    """Return the correlation of the normal scores of |g| and |x|.

    That with which E |g|^2 |x|^2 is the recorded one; where the norms of x are not known, that of
    the recorded rank correlation (Spearman's is 6/pi asin(rho/2); Pearson 1907).

    Args:
        cross: What was recorded of both.
        x: Moments of x.
        norms: Norms of g at ``NORM_LEVELS``.
    """
    by_rank = max(-_MOST_RHO, min(_MOST_RHO, 2 * math.sin(math.pi * cross.norm_correlation / 6)))
    if not x.norm_quantiles.size:
        return by_rank
    first, second = np.random.default_rng(0).standard_normal((2, _DRAWS))
    squares = np.interp(special.ndtr(first), NORM_LEVELS, scaled_norms(x)) ** 2

    def product(rho: float) -> float:
        scores = rho * first + math.sqrt(1 - rho**2) * second
        return float(np.mean(squares * np.interp(special.ndtr(scores), NORM_LEVELS, norms) ** 2))

    low, high = -_MOST_RHO, _MOST_RHO
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if product(middle) < cross.norm_product else (low, middle)
    return (low + high) / 2


def inverse_second_moment(x: FeatureMoments, columns: Vector) -> Vector:
    """Return S^-1 times columns [features, r], S = E x x^T with a ridge of a thousandth."""
    scale = np.sqrt(np.maximum(x.variance + x.mean**2, 0.0))
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = columns * inverse[:, None]
    if x.covariance.ndim == 2:
        second = (x.covariance + np.outer(x.mean, x.mean)) * np.outer(inverse, inverse)
        solution = np.linalg.solve(second + _RIDGE * np.eye(x.width), scaled)
    else:
        loads = np.zeros((0, x.width)) if x.factors is None else x.factors
        loads = np.concatenate([loads, x.mean[None]]) * inverse
        rest = np.maximum(1.0 - (loads**2).sum(axis=0), 0.0) + _RIDGE
        # Woodbury: the sketch has few factors.
        inner = np.eye(len(loads)) + (loads / rest) @ loads.T
        solution = scaled / rest[:, None]
        solution = solution - (loads.T / rest[:, None]) @ np.linalg.solve(inner, loads @ solution)
    result: Vector = solution * inverse[:, None]
    return result
