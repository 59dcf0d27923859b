"""Which output elements are judged: spread over the whole output, the contraction always whole."""

from __future__ import annotations

import dataclasses
import math

import torch

from loka_toolkit.kernels.contract import Prepared

MOST_PRODUCTS = {"cpu": 2**26, "cuda": 2**32}
"""Multiplications per reference and per device: the emulated accumulator takes about a second for
them on one CPU core."""

MOST_ROWS = 256
"""Output rows (and columns) judged at most: with one in each of 256 equal strata, every tile of 64
rows, the smallest common one, of an output of 16,384 rows is hit."""

MOST_ELEMENTS = 2**20
"""Output elements judged at most, over all batches."""

_FEWEST = 32


@dataclasses.dataclass(frozen=True)
class OutputSample:
    """Indices of the output elements judged.

    Attributes:
        batch: Indices into the leading dimension; None where the operands have none.
        row: Output rows.
        column: Output columns.
    """

    batch: torch.Tensor | None
    row: torch.Tensor
    column: torch.Tensor

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor) -> OutputSample:
        """Return the sample for A [.., M, K] times B [.., K, N]; the edges are always in it."""
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        most_products = MOST_PRODUCTS.get(a.device.type, MOST_PRODUCTS["cpu"])
        budget = max(_FEWEST**2, min(MOST_ELEMENTS, most_products // max(k, 1)))
        side = max(_FEWEST, min(MOST_ROWS, math.isqrt(budget)))
        rows, columns = min(m, side), min(n, side)
        # A narrow output leaves room for more of its long side.
        rows = min(m, MOST_ROWS, max(rows, budget // max(columns, 1)))
        columns = min(n, MOST_ROWS, max(columns, budget // max(rows, 1)))
        batch = None
        if a.ndim == 3:
            most_batches = max(1, budget // max(rows * columns, 1))
            batch = _strata(a.shape[0], min(a.shape[0], most_batches), a.device)
        return cls(batch, _strata(m, rows, a.device), _strata(n, columns, a.device))

    def rows(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sampled rows of A, or of a scale with one entry per row."""
        return self._batch(value).index_select(-2, self.row)

    def columns(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sampled columns of B, or of a scale with one entry per column."""
        return self._batch(value).index_select(-1, self.column)

    def output(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sampled elements of the output."""
        return self.columns(value).index_select(-2, self.row)

    def seen(self, a: Prepared, b: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sampled rows of A and columns of B as the kernel sees them, float64."""
        return (
            self._part(a, -2).dequantized() if type(a) is Prepared else self.rows(a.dequantized()),
            self._part(b, -1).dequantized()
            if type(b) is Prepared
            else self.columns(b.dequantized()),
        )

    def _part(self, prepared: Prepared, dim: int) -> Prepared:
        index = self.row if dim == -2 else self.column

        shape = list(prepared.shape)
        shape[dim] = index.numel()
        if self.batch is not None:
            shape[0] = self.batch.numel()
        scale, block = prepared.scale, prepared.block
        if scale is not None and scale.ndim >= 2:
            scale = self._batch(scale)
            if block is not None:
                # From here on every row (column) has a scale of its own.
                scale = _bytes_selected(scale, dim, index // block[dim])
                block = (1, block[1]) if dim == -2 else (block[0], 1)
            elif scale.shape[dim] > 1:
                scale = scale.index_select(dim, index)
        data = _bytes_selected(self._batch(prepared.data), dim, index)
        return Prepared(data, scale, torch.Size(shape), prepared.side, block)

    def _batch(self, value: torch.Tensor) -> torch.Tensor:
        if self.batch is None or value.ndim < 3 or value.shape[0] == 1:
            return value
        return _bytes_selected(value, 0, self.batch)


def _bytes_selected(value: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Select along a dimension; indexing of float8 is not implemented everywhere, bytes are."""
    if value.element_size() > 1:
        return value.index_select(dim, index)
    return value.view(torch.uint8).index_select(dim, index).view(value.dtype)


def _strata(length: int, count: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` indices below ``length``, first and last included, evenly spread.

    The step is not a whole number in general, so that no residue of a tile size is missed.
    """
    if count >= length:
        return torch.arange(length, device=device)
    if count == 1:
        return torch.zeros(1, dtype=torch.int64, device=device)
    positions = torch.linspace(0, length - 1, count, dtype=torch.float64)
    return positions.round().to(torch.int64).to(device)
