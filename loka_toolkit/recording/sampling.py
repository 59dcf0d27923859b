"""Which output rows and columns an error is computed on; never part of the contraction."""

from __future__ import annotations

import dataclasses
import math
import zlib

import numpy as np
import torch
from numpy.typing import NDArray

GRADIENT_OUTPUTS = 1 << 14
"""Outputs of a gradient site on which errors are computed: an SQNR within 0.1 dB."""
_SQUARE = 128

EVEN_SHARE = 0.3
"""Share of the probability that does not depend on size."""

_CHEAP_OUTPUTS = 1 << 15
"""Outputs of a forward site up to which ``max_rows`` counts examples and not their rows."""
_LEAST_EXAMPLES = 8
"""Examples sampled at least, however many rows each of them has."""


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """How the rows of a forward product map to examples.

    A row is numbered outer * (examples * inner) + example * inner + inner index.

    Attributes:
        examples: Number of examples.
        outer: Rows of an example that lie ``examples * inner`` apart.
        inner: Consecutive rows of an example.
    """

    examples: int
    outer: int
    inner: int

    @property
    def rows(self) -> int:
        """All rows."""
        return self.examples * self.outer * self.inner

    def rows_of(self, examples: torch.Tensor) -> torch.Tensor:
        """Return the rows of some examples, int64 [len(examples), rows per example]."""
        outer = torch.arange(self.outer).reshape(1, -1, 1) * (self.examples * self.inner)
        inner = torch.arange(self.inner).reshape(1, 1, -1)
        return (outer + examples.reshape(-1, 1, 1) * self.inner + inner).reshape(len(examples), -1)


def find_layout(
    leading: tuple[int, ...], examples: int, *, assume_consecutive: bool
) -> RowLayout | str:
    """Find the examples among the sizes that the rows were flattened from.

    Args:
        leading: Sizes in front of the features, outermost first, for example (examples, tokens).
        examples: Number of examples.
        assume_consecutive: Whether the user said that rows come in equal consecutive blocks; used
            only where the rows have no known structure.

    Returns:
        The layout, or the reason why it is not known.
    """
    sizes = [size for size in leading if size != 1]
    rows = math.prod(leading)
    if examples < 1:
        return "the step has no examples"
    if rows == examples:
        return RowLayout(examples=examples, outer=1, inner=1)
    places = [axis for axis, size in enumerate(sizes) if size == examples]
    if len(places) > 1:
        return (
            f"rows were flattened from {tuple(sizes)}: more than one of these sizes equals the "
            f"number of examples, {examples}"
        )
    if places:
        axis = places[0]
        outer, inner = math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :])
        return RowLayout(examples=examples, outer=outer, inner=inner)
    if rows % examples:
        return f"{rows} rows do not divide into {examples} examples"
    if len(sizes) <= 1 and (assume_consecutive or examples == 1):
        return RowLayout(examples=examples, outer=1, inner=rows // examples)
    return (
        f"rows were flattened from {tuple(sizes)}, none of which is the number of examples, "
        f"{examples}; pass step(examples=) if they come in equal consecutive blocks"
    )


@dataclasses.dataclass(frozen=True)
class SampledRows:
    """The output rows on which an error is computed: some products of a batch x some rows of each.

    Attributes:
        batch: Indices of the products; None for all, and where there is no batch.
        rows: Indices of the rows of each; None for all.
        examples: The examples that they make up; None where all rows are taken or it is not known.
    """

    batch: torch.Tensor | None
    rows: torch.Tensor | None
    examples: torch.Tensor | None

    @property
    def is_complete(self) -> bool:
        """Whether all rows are taken."""
        return self.batch is None and self.rows is None

    def flat(self, products: int, m: int) -> torch.Tensor:
        """Return the numbers of the rows, product * m + row, int64."""
        across = self.batch if self.batch is not None else torch.arange(products)
        within = self.rows if self.rows is not None else torch.arange(m)
        return (across.reshape(-1, 1) * m + within).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws rows and columns, the same ones for the same seed, step and site.

    Attributes:
        seed: Seed of the recorder.
        max_rows: Rows at most, unless an example has more.
        max_columns: Columns at most.
    """

    seed: int
    max_rows: int
    max_columns: int

    def generator(self, step: int, name: str) -> np.random.Generator:
        """Return the generator of a site at a step."""
        return np.random.default_rng((self.seed, step, zlib.crc32(name.encode())))

    def forward(
        self, products: int, m: int, n: int, layout: RowLayout | None, step: int, name: str
    ) -> SampledRows:
        """Return rows of a forward product: whole examples where the layout is known."""
        if products * m <= self.max_rows:
            return SampledRows(None, None, None)
        if layout is None:
            return self.rows(products, m, self.max_rows, step, name)
        per_example = layout.outer * layout.inner
        affordable = min(self.max_rows, _CHEAP_OUTPUTS // (per_example * n))
        limit = max(_LEAST_EXAMPLES, self.max_rows // per_example, affordable)
        examples = _draw(self.generator(step, name), layout.examples, limit)
        if examples is None:
            return SampledRows(None, None, None)
        numbers = layout.rows_of(examples).reshape(-1)
        if layout.inner % m == 0:
            return SampledRows(torch.unique(numbers // m), None, examples)
        if layout.outer % products == 0:
            return SampledRows(None, torch.unique(numbers % m), examples)
        return SampledRows(None, None, None)

    def rows(self, products: int, m: int, limit: int, step: int, name: str) -> SampledRows:
        """Return rows of a product whose rows are not grouped, at most about ``limit``."""
        generator = self.generator(step, name)
        batch = _draw(generator, products, max(_LEAST_EXAMPLES, limit // m))
        kept = products if batch is None else len(batch)
        return SampledRows(batch, _draw(generator, m, max(1, limit // kept)), None)

    def gradient(
        self, products: int, m: int, n: int, step: int, name: str
    ) -> tuple[SampledRows, torch.Tensor | None]:
        """Return rows and columns of a gradient product, together at most GRADIENT_OUTPUTS."""
        limit = min(self.max_rows, GRADIENT_OUTPUTS // min(n, _SQUARE))
        rows = self.rows(products, m, limit, step, name)
        taken = min(limit, products * m)
        columns = min(self.max_columns, max(1, GRADIENT_OUTPUTS // taken))
        return rows, _draw(self.generator(step, name + "/columns"), n, columns)


def draw(count: int, limit: int, seed: int) -> torch.Tensor | None:
    """Return ``limit`` of ``count`` indices, sorted; None for all of them."""
    return _draw(np.random.default_rng(seed), count, limit)


def draw_by_size(
    generator: np.random.Generator, sizes: NDArray[np.float64], count: int
) -> tuple[torch.Tensor | None, NDArray[np.float64]]:
    """Draw indices with probabilities that grow with a size; the largest are taken surely.

    Args:
        generator: Random numbers.
        sizes: Non-negative, one per unit.
        count: How many to draw.

    Returns:
        Sorted indices, None for all, and the inverse probability of each.
    """
    if len(sizes) <= count:
        return None, np.ones(len(sizes))
    total = sizes.sum()
    even = np.full(len(sizes), 1.0 / len(sizes))
    usable = np.isfinite(total) and total > 0
    share = (1 - EVEN_SHARE) * sizes / total + EVEN_SHARE * even if usable else even
    probability, sure = count * share, np.zeros(len(sizes), dtype=bool)
    while (probability[~sure] > 1).any():
        sure |= probability > 1
        rest = count - sure.sum()
        probability = np.where(sure, 1.0, rest * share / share[~sure].sum())
    order = generator.permutation(len(sizes))
    ends = np.cumsum(probability[order])
    ends[-1] = count  # whatever was lost in rounding
    points = np.arange(count) + generator.uniform()
    chosen = np.unique(order[np.searchsorted(ends, points, side="right")])
    return torch.from_numpy(chosen.astype(np.int64)), 1.0 / probability[chosen]


def _draw(generator: np.random.Generator, count: int, limit: int) -> torch.Tensor | None:
    if count <= limit:
        return None
    chosen = np.sort(generator.choice(count, size=limit, replace=False))
    return torch.from_numpy(chosen.astype(np.int64))
