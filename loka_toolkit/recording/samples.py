"""Parts of a product on which errors are computed: some outputs, all of the contraction."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from loka_toolkit.numerics.blocks import Block, contraction_block, spread
from loka_toolkit.numerics.casting import cast_values
from loka_toolkit.numerics.emulation import multiply
from loka_toolkit.numerics.formats import FloatFormat
from loka_toolkit.numerics.recipes import Accumulation, Recipe, Scaling
from loka_toolkit.recording.products import Factors
from loka_toolkit.recording.scalebook import Scales


@dataclasses.dataclass(frozen=True)
class Sample:
    """The part of a product on which errors are computed.

    Attributes:
        a: Sampled rows, [.., m, K].
        b: Sampled columns, [.., K, n].
        exact: The product of these, float64 [.., m, n].
        rows: Indices of the sampled rows; None for all.
        columns: Indices of the sampled columns; None for all.
        batch: Indices of the sampled products of a batch; None for all.
    """

    a: torch.Tensor
    b: torch.Tensor
    exact: torch.Tensor
    rows: torch.Tensor | None
    columns: torch.Tensor | None
    batch: torch.Tensor | None

    @classmethod
    def of(
        cls,
        factors: Factors,
        *,
        rows: torch.Tensor | None,
        columns: torch.Tensor | None,
        batch: torch.Tensor | None,
    ) -> Sample:
        """Select rows, columns and products of a batch, and multiply them in float64."""
        a = select(select(factors.a, batch, 0), rows, -2)
        b = select(select(factors.b, batch, 0), columns, -1)
        return cls(a, b, a.to(torch.float64) @ b.to(torch.float64), rows, columns, batch)

    @property
    def row_count(self) -> int:
        """Sampled output rows, over all sampled products of a batch."""
        return int(self.exact.shape[:-1].numel())

    def scales(self, full: Scales) -> Scales:
        """Return the scales of the sampled rows and columns."""
        a = full.a if full.a.ndim == 0 else select(select(full.a, self.batch, 0), self.rows, -2)
        b = full.b if full.b.ndim == 0 else select(select(full.b, self.batch, 0), self.columns, -1)
        return Scales(a, b)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some products of a batch and some rows of each, evenly spaced.

    Attributes:
        batch: Indices of the products; None for all.
        rows: Indices of the rows of each; None for all.
        flat: Numbers of the rows among all sampled ones.
    """

    batch: torch.Tensor | None
    rows: torch.Tensor | None
    flat: torch.Tensor


def evenly_spaced_rows(
    sample: Sample, elements: int, least: int, per_row: int | None = None
) -> Rows:
    """Return rows of a sample, about ``elements / per_row`` of them and at least ``least``.

    Args:
        sample: The sample.
        elements: How many elements the rows may have.
        least: How many rows at least, if there are so many.
        per_row: Elements that a row counts for; by default those of the output.
    """
    m = sample.exact.shape[-2]
    width = sample.exact.shape[-1] if per_row is None else per_row
    limit = max(least, elements // max(1, width))
    products = sample.exact.shape[0] if sample.exact.ndim == 3 else 1
    rows = _evenly(m, limit)
    batch = _evenly(products, max(1, limit // m))
    within = rows if rows is not None else torch.arange(m)
    across = batch if batch is not None else torch.arange(products)
    flat = (across.reshape(-1, 1) * m + within).reshape(-1).to(sample.exact.device)
    return Rows(batch, rows, flat)


class SampleCasts:
    """The sampled operands, cast once per format and grain."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._casts: dict[tuple[str, str, Scaling], tuple[torch.Tensor, torch.Tensor]] = {}

    def error(self, recipe: Recipe, scales: Scales, part: Rows | None) -> torch.Tensor:
        """Return emulated minus exact, float64, on the sample or on a part of its rows.

        The same as :func:`loka_toolkit.numerics.emulation.emulate`, whose casts are shared here.
        """
        narrow = self._sample.scales(scales)
        format_a, format_b = recipe.formats
        a, scale_a = self._cast("a", self._sample.a, format_a, recipe.scaling_a, narrow.a)
        b, scale_b = self._cast("b", self._sample.b, format_b, recipe.scaling_b, narrow.b)
        exact = self._sample.exact
        if part is not None:
            a = select(select(a, part.batch, 0), part.rows, -2)
            if scale_a.ndim:
                scale_a = select(select(scale_a, part.batch, 0), part.rows, -2)
            b = select(b, part.batch, 0)
            scale_b = select(scale_b, part.batch, 0) if scale_b.ndim else scale_b
            exact = select(select(exact, part.batch, 0), part.rows, -2)
        # Products of FP8 and 16-bit values are exact in float32 (nearly, where their blocks have
        # scales); summing them is off by K * 2**-24 at most.
        if recipe.accumulation is not Accumulation.FP32:
            product = multiply(a, b, scale_a, scale_b, recipe).to(torch.float64)
        elif recipe.block_length is None:
            product = (a @ b).to(torch.float64) * scale_a * scale_b
        else:
            left = _descaled(a, scale_a, contraction_block(recipe.scaling_a, "a"))
            right = _descaled(b, scale_b, contraction_block(recipe.scaling_b, "b"))
            product = (left @ right).to(torch.float64)
        # A kernel's output leaves the range of float32 where the product does.
        return product.to(torch.float32).to(torch.float64) - exact

    def _cast(
        self,
        side: Literal["a", "b"],
        x: torch.Tensor,
        fmt: FloatFormat,
        scaling: Scaling,
        scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = (side, fmt.name, scaling)
        if key not in self._casts:
            block = contraction_block(scaling, side)
            by_element = scale if block is None else spread(scale, block, x.shape)
            stored = cast_values(x, fmt, by_element).to(torch.float32)
            self._casts[key] = (stored, scale.to(torch.float64))
        return self._casts[key]


def _descaled(stored: torch.Tensor, scale: torch.Tensor, block: Block | None) -> torch.Tensor:
    by_element = scale if block is None else spread(scale, block, stored.shape)
    return stored * by_element.to(torch.float32)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a product with the rows of all products of a batch below each other."""
    return x.reshape(-1, x.shape[-1])


def select(x: torch.Tensor, indices: torch.Tensor | None, dim: int) -> torch.Tensor:
    """Return the entries of a dimension; all of them for None."""
    return x if indices is None else x.index_select(dim, indices.to(x.device))


def _evenly(count: int, limit: int) -> torch.Tensor | None:
    if count <= limit:
        return None
    return torch.linspace(0, count - 1, limit, dtype=torch.float64).round().to(torch.int64)
