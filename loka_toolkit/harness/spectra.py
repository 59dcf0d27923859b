"""Weights with the recorded second moments along rows and along columns.

``sum over pairs of e_p l_p r_p^T`` with signs e_p at random has w w^T and w^T w exactly as
recorded: both decide how large x w^T and g w are, and no draw of independent rows has both. What
the pairs leave is drawn as a matrix normal with diagonal covariances.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from loka_toolkit.errors import ArtifactCorruptError
from loka_toolkit.harness.features import Vector, vector
from loka_toolkit.harness.normal import tensor_of


@dataclasses.dataclass(frozen=True)
class SpectrumMoments:
    """The singular pairs of a weight [O, I] and the mean squares of the rest.

    Attributes:
        left: [r, O].
        right: [r, I].
        row_squares: [O], of the rest.
        column_squares: [I], of the rest.
    """

    left: Vector
    right: Vector
    row_squares: Vector
    column_squares: Vector

    @property
    def outputs(self) -> int:
        """O."""
        return int(self.left.shape[1])

    @property
    def is_finite(self) -> bool:
        """Whether every number is finite."""
        return all(
            bool(np.isfinite(v).all())
            for v in (self.left, self.right, self.row_squares, self.column_squares)
        )

    @classmethod
    def decode(cls, values: dict[str, Any]) -> SpectrumMoments:
        """Return the spectrum of a row of the table.

        Raises:
            ArtifactCorruptError: If its lists do not fit its widths.
        """
        outputs, inputs = int(values["count"]), int(values["width"])
        factors, rows, columns = (
            vector(values, name) for name in ("factors", "row_squares", "covariance")
        )
        if factors.size % (outputs + inputs) or (rows.size, columns.size) != (outputs, inputs):
            raise ArtifactCorruptError(
                f"spectrum of {values['operand']} at {values['site']}: factors of {factors.size}, "
                f"rows of {rows.size} and columns of {columns.size} entries do not fit a weight "
                f"[{outputs}, {inputs}]"
            )
        pairs = factors.reshape(-1, outputs + inputs)
        return cls(pairs[:, :outputs], pairs[:, outputs:], rows, columns)


class SpectrumSampler:
    """Draws weights.

    Args:
        moments: What was recorded.
        device: Where to draw.
    """

    def __init__(self, moments: SpectrumMoments, device: torch.device) -> None:
        self._left = tensor_of(moments.left, device)
        self._right = tensor_of(moments.right, device)
        whole = float(moments.row_squares.mean())
        self._rows = self._columns = None
        if whole > 0:
            self._rows = tensor_of(np.sqrt(moments.row_squares / whole), device).unsqueeze(1)
            self._columns = tensor_of(np.sqrt(moments.column_squares), device)

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return a weight [O, I], float32.

        Args:
            count: O, as recorded.
            generator: Source of chance.
        """
        device = self._left.device
        pairs, outputs = self._left.shape
        if count != outputs:
            raise ValueError(f"{count} rows of a weight that has {outputs}")
        signs = torch.randint(0, 2, (pairs, 1), generator=generator, device=device) * 2.0 - 1.0
        weight = (self._left * signs).mT @ self._right
        if self._rows is not None and self._columns is not None:
            noise = torch.randn(weight.shape, generator=generator, device=device)
            weight += noise * self._rows * self._columns
        return weight
