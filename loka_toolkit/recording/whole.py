"""The relative error of a whole product, from rows and columns drawn in proportion to their size.

Examples and features of recommendation models are of very unequal size: a few rows hold most of a
product's energy, and which of them a uniform sample meets decides what error it shows (up to 50 %
off on a model with raw counts). So rows and columns are drawn with probabilities proportional to an
estimate of their share of the energy, the largest surely, and weighted by the inverse (Hansen and
Hurwitz, 1943; Horvitz and Thompson, 1952; drawn systematically after Madow, 1949). Some of the
probability is spread evenly, for rows whose error is large beside their size, such as flushed ones.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from loka_toolkit.numerics.scaling import finite_amax
from loka_toolkit.recording.products import Factors
from loka_toolkit.recording.samples import Sample
from loka_toolkit.recording.sampling import draw_by_size

Sizes = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Extent:
    """How much of a product may be drawn.

    Attributes:
        products: Multiplications, also those up to which nothing is drawn.
        rows: Least and most rows.
        columns: Least columns, and those up to which they come before rows.
    """

    products: int
    rows: tuple[int, int]
    columns: tuple[int, int]


CASTS = Extent(products=1 << 26, rows=(32, 2048), columns=(64, 256))
"""For the error of casts, per recipe and site: about 4 ms on one CPU core."""
ACCUMULATORS = Extent(products=1 << 20, rows=(16, 256), columns=(16, 16))
"""For the error of an accumulator, emulated product by product: about 4 ms likewise."""
LEAST_PRODUCTS = 8


@dataclasses.dataclass(frozen=True)
class Shares:
    """An error of a product in units of the product's energy.

    Attributes:
        square: |error|^2 / |product|^2; None if 0/0.
        bias: <error, product> / |product|^2.
    """

    square: float | None
    bias: float

    @classmethod
    def of(
        cls, exact: torch.Tensor, error: torch.Tensor, weights: torch.Tensor | None = None
    ) -> Self:
        """Compare an error with a product, float64, outputs weighted if weights are given."""
        weighted = exact if weights is None else exact * weights
        energy = float((weighted * exact).sum())
        found = float((error.square() if weights is None else error.square() * weights).sum())
        if energy > 0:
            return cls(found / energy, float((weighted * error).sum()) / energy)
        return cls(None if found == 0 else math.inf, 0.0)

    def plus(self, other: Shares, correlation: float = 0.0) -> Shares:
        """Add an error that was measured on fewer outputs.

        Args:
            other: Its shares.
            correlation: <this error, other> / |product|^2 beyond what both have of the product, as
                far as it is known, see :func:`chance_correlation`.
        """
        if self.square is None or other.square is None:
            return self
        square = self.square + other.square + 2 * (self.bias * other.bias + correlation)
        return Shares(max(0.0, square), self.bias + other.bias)


def chance_correlation(
    exact: torch.Tensor,
    one: torch.Tensor,
    other: torch.Tensor,
    outputs: int,
    weights: torch.Tensor | None = None,
) -> float:
    """Estimate the correlation of two errors over a product from some of its outputs.

    Unrelated errors correlate by chance, over N outputs with a variance of 1 / N, and over n of
    these with a further (1 - n / N) / n; so what is found there is shrunk by n / N, the best linear
    estimate: all of it if the outputs are all there are, and nothing if they are few.

    Args:
        exact: The product on these outputs, float64.
        one: An error there.
        other: Another one.
        outputs: Outputs of the whole product.
        weights: Of the outputs.
    """
    weighted = exact if weights is None else exact * weights
    energy = float((weighted * exact).sum())
    if energy == 0:
        return 0.0
    product = float(((one * other) if weights is None else one * other * weights).sum()) / energy
    slopes = [float((weighted * error).sum()) / energy for error in (one, other)]
    return (product - slopes[0] * slopes[1]) * exact.numel() / outputs


@dataclasses.dataclass(frozen=True)
class WholeSample:
    """Rows, columns and products of a batch that stand for all of them.

    Attributes:
        sample: The part of the product.
        weights: Inverse probability of each output, float64, broadcastable; None for 1.
        probe: A smaller one on which accumulators are emulated; None if the product is small.
    """

    sample: Sample
    weights: torch.Tensor | None
    probe: WholeSample | None = None

    @classmethod
    def of(cls, factors: Factors, generator: np.random.Generator, complete: Sample | None) -> Self:
        """Draw from a product.

        Args:
            factors: The product.
            generator: Random numbers.
            complete: All of it, if that is at hand.
        """
        products, (m, n, k) = factors.batch, factors.dims
        everything = products * m * n * max(k, 1)
        sizes = _sizes(factors) if everything > ACCUMULATORS.products else None
        probe = None
        if sizes is not None:
            probe = cls(*_drawn(factors, sizes, generator, ACCUMULATORS))
        if complete is None and sizes is not None and everything > CASTS.products:
            return cls(*_drawn(factors, sizes, generator, CASTS), probe)
        if complete is None:
            complete = Sample.of(factors, rows=None, columns=None, batch=None)
        return cls(complete, None, probe)

    def shares(self, error: torch.Tensor) -> Shares:
        """Estimate how an error compares with the product over all outputs.

        Args:
            error: On the sample, float64.
        """
        return Shares.of(self.sample.exact, error, self.weights)


def _drawn(
    factors: Factors,
    sizes: tuple[Sizes, Sizes],
    generator: np.random.Generator,
    extent: Extent,
) -> tuple[Sample, torch.Tensor]:
    """Draw products of a batch, then the same rows and columns of each."""
    products, (m, n, k) = factors.batch, factors.dims
    row_sizes, column_sizes = sizes
    batch, batch_weights = None, np.ones(1)
    if factors.a.ndim == 3:
        limit = max(LEAST_PRODUCTS, extent.products // (m * n * max(k, 1)))
        batch, batch_weights = draw_by_size(generator, row_sizes.sum(-1), limit)
        if batch is not None:
            row_sizes, column_sizes = row_sizes[batch], column_sizes[batch]
        row_sizes, column_sizes = row_sizes.sum(0), column_sizes.sum(0)
        products = products if batch is None else len(batch)
    outputs = extent.products // (max(k, 1) * products)
    columns = min(n, extent.columns[1], max(extent.columns[0], math.isqrt(outputs)))
    rows = min(m, extent.rows[1], max(extent.rows[0], outputs // columns))
    columns = min(n, max(columns, outputs // rows))
    chosen_rows, row_weights = draw_by_size(generator, row_sizes, rows)
    chosen_columns, column_weights = draw_by_size(generator, column_sizes, columns)
    weights = torch.from_numpy(np.multiply.outer(row_weights, column_weights))
    if factors.a.ndim == 3:
        weights = torch.from_numpy(batch_weights).reshape(-1, 1, 1) * weights
    sample = Sample.of(factors, rows=chosen_rows, columns=chosen_columns, batch=batch)
    return sample, weights.to(sample.exact.device)


def _sizes(factors: Factors) -> tuple[Sizes, Sizes]:
    """Return what rows [.., M] and columns [.., N] would hold if terms did not correlate."""
    a, b = _squares(factors.a), _squares(factors.b)
    rows = (a @ b.sum(-1, keepdim=True)).squeeze(-1)
    columns = (a.sum(-2, keepdim=True) @ b).squeeze(-2)
    return rows.double().cpu().numpy(), columns.double().cpu().numpy()


def _squares(x: torch.Tensor) -> torch.Tensor:
    """Return squares in units of the largest, so that float32 holds them."""
    unit = finite_amax(x)
    return (x.to(torch.float32) / torch.where(unit == 0, torch.ones_like(unit), unit)).square_()
