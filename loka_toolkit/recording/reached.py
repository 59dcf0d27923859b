"""Parameter gradients that a backward pass reaches: of multiplied weights and of embedding tables.

Each is computed from the gradient of the output of the operation that used the parameter, on some
rows and columns of large ones, so that nothing has to be accumulated into the parameters. Tables
are taken at the rows that were looked up: nothing else of their gradient differs from zero.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Role
from loka_toolkit.recording.gradients import example_gradient_squares
from loka_toolkit.recording.layers import GradientColumns, Layer
from loka_toolkit.recording.products import Factors
from loka_toolkit.recording.sampling import RowLayout, draw
from loka_toolkit.recording.whatif import Sample

TABLE_NODES = frozenset({"EmbeddingBackward0", "EmbeddingBagBackward0"})

_SAVED_FACTORS: dict[str, tuple[str, str, int]] = {
    "MmBackward0": ("_saved_self", "_saved_mat2", 0),
    "BmmBackward0": ("_saved_self", "_saved_mat2", 0),
    "AddmmBackward0": ("_saved_mat1", "_saved_mat2", 1),
    "BaddbmmBackward0": ("_saved_batch1", "_saved_batch2", 1),
}
"""Attributes of a product's node that hold its factors, and the place of the first among inputs."""

_SIDE = 128
"""Rows and columns of a parameter gradient that are looked at."""
_SUMMED, _AVERAGED = 0, 1
"""Modes of embedding_bag."""


def saved_factor(node: Any, side: str) -> torch.Tensor:
    """Return factor ``"a"`` or ``"b"`` of a product, as its node keeps it for backward."""
    first, second, _ = _SAVED_FACTORS[node.name()]
    factor: torch.Tensor = getattr(node, first if side == "a" else second)
    return factor.detach()


def input_of(node: Any, side: str) -> tuple[Any, int]:
    """Return node and output number to which the gradient of a factor flows; None if to none."""
    place = _SAVED_FACTORS[node.name()][2] + (side == "b")
    following: tuple[Any, int] = node.next_functions[place]
    return following


def is_followed(node: Any) -> bool:
    """Whether a product's node is of a kind known here."""
    return node.name() in _SAVED_FACTORS


@dataclasses.dataclass(frozen=True)
class ReachedWeight:
    """The weight of a recorded product.

    Attributes:
        factors: g^T [O, T] and x [T, I], of which only the gradient changes.
        rows: Rows of the gradient that are looked at; None for all.
        columns: Columns likewise.
        is_transposed: Whether aten's output is [O, T].
        layout: Where the examples are among the tokens, or why that is not known.
        share: Whole elements per element looked at, times the square of the product's factor.
    """

    x: torch.Tensor
    rows: torch.Tensor | None
    columns: torch.Tensor | None
    is_transposed: bool
    layout: RowLayout | str
    share: float

    @classmethod
    def of(cls, layer: Layer, node: Any, layout: RowLayout | str, seed: int) -> ReachedWeight:
        """Describe the weight of a layer."""
        is_transposed = layer.forward.parameter_side == "a"
        x = saved_factor(node, "b").mT if is_transposed else saved_factor(node, "a")
        outputs = layer.forward.m if is_transposed else layer.forward.n
        rows, columns = draw(outputs, _SIDE, seed), draw(x.shape[-1], _SIDE, seed + 1)
        x = x if columns is None else x[..., columns.to(x.device)]
        whole = outputs * layer.forward.k
        taken = min(outputs, _SIDE) * x.shape[-1]
        return cls(x, rows, columns, is_transposed, layout, layer.alpha**2 * whole / taken)

    def _tokens(self, gradient: torch.Tensor) -> torch.Tensor:
        tokens = gradient.mT if self.is_transposed else gradient
        return tokens if self.rows is None else tokens[..., self.rows.to(tokens.device)]

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the parameter's gradient, given that of the output as aten has it."""
        return (self._tokens(gradient).float().mT @ self.x.float()).to(torch.float64)

    def example_squares(self, gradient: torch.Tensor) -> tuple[float, RowLayout] | str:
        """Return the sum over examples of their squared gradients, or why it is not known."""
        factors = Factors(
            Role.WGRAD,
            GEMM_OPERANDS[Role.WGRAD, True],
            self._tokens(gradient).mT,
            self.x,
            left_transposed=True,
        )
        sample = Sample(factors.a, factors.b, torch.empty(0), None, None, None)
        columns = GradientColumns()
        example_gradient_squares(columns, factors, sample, self.layout)
        if columns.example_squares is None or columns.layout is None:
            return columns.reason or "the examples' gradients are not known"
        return columns.example_squares, columns.layout


@dataclasses.dataclass(frozen=True)
class ReachedTable:
    """The rows of an embedding table that were looked up.

    Attributes:
        output_row: Row of the flattened output that each lookup went into.
        factor: Factor of each lookup in it, float32 [lookups]; None for 1.
        slot: Row of the compact gradient of each lookup, int64.
        slots: Number of these.
        layout: Where the examples are among the rows of the output, or why that is not known.
        columns: Columns that are looked at; None for all.
        share: Whole columns per column looked at.
    """

    output_row: torch.Tensor
    factor: torch.Tensor | None
    slot: torch.Tensor
    slots: int
    layout: RowLayout | str
    columns: torch.Tensor | None
    share: float

    def _lookups(self, gradient: torch.Tensor) -> torch.Tensor:
        flat = gradient.reshape(-1, gradient.shape[-1])
        flat = flat if self.columns is None else flat[:, self.columns.to(flat.device)]
        rows = flat[self.output_row].to(torch.float64)
        return rows if self.factor is None else rows * self.factor.unsqueeze(1)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the parameter's gradient at the rows looked up, given that of the output."""
        rows = self._lookups(gradient)
        return rows.new_zeros(self.slots, rows.shape[1]).index_add_(0, self.slot, rows)

    def example_squares(self, gradient: torch.Tensor) -> tuple[float, RowLayout] | str:
        """Return the sum over examples of their squared gradients, or why it is not known."""
        if isinstance(self.layout, str):
            return self.layout
        if self.layout.examples < 2:
            return "a minibatch of one example has no covariance"
        rows = self._lookups(gradient)
        example = (self.output_row // self.layout.inner) % self.layout.examples
        pairs, place = torch.unique(example * self.slots + self.slot, return_inverse=True)
        summed = rows.new_zeros(len(pairs), rows.shape[1]).index_add_(0, place, rows)
        return float(summed.square().sum()), self.layout


def reached_table(node: Any, layout_of: Any, width: int, seed: int) -> ReachedTable | None:
    """Describe the lookups of an embedding's node; None if it works in a way not known here.

    Args:
        node: Of :data:`TABLE_NODES`.
        layout_of: Returns the layout of rows flattened from given sizes.
        width: Columns of the table.
        seed: Seed of the choice of columns.
    """
    if node._saved_scale_grad_by_freq:
        return None
    indices = node._saved_indices
    factor = None
    if node.name() == "EmbeddingBackward0":
        leading: tuple[int, ...] = tuple(indices.shape)
        output_row = torch.arange(indices.numel(), device=indices.device)
    else:
        starts = node._saved_offsets
        numbers = torch.arange(indices.numel(), device=indices.device, dtype=starts.dtype)
        output_row = torch.searchsorted(starts, numbers, right=True).to(torch.int64) - 1
        bags = int(node._saved_result2.numel()) or int(starts.numel())
        leading = (bags,)
        if node._saved_mode == _AVERAGED:
            counts = torch.bincount(output_row, minlength=bags).clamp(min=1)
            factor = 1.0 / counts[output_row].to(torch.float64)
        elif node._saved_mode == _SUMMED and node._saved_per_sample_weights is not None:
            factor = node._saved_per_sample_weights.detach().to(torch.float64)
        elif node._saved_mode != _SUMMED:
            return None
    flat = indices.reshape(-1).to(torch.int64)
    padding = int(node._saved_padding_idx)
    if padding >= 0:
        kept = flat != padding
        flat, output_row = flat[kept], output_row[kept]
        factor = None if factor is None else factor[kept]
    used, slot = torch.unique(flat, return_inverse=True)
    columns = draw(width, _SIDE, seed)
    share = width / min(width, _SIDE)
    layout = layout_of(leading)
    return ReachedTable(output_row, factor, slot, len(used), layout, columns, share)
