"""The demo's model: a two-tower click model on raw counts and categories.

The user tower multiplies raw counts and embeddings in one product, as many models in production do:
that product really is unsafe in FP8. The item tower takes logarithms of its counts first.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import nn

from loka_toolkit.datasets.click_log import ClickBatch, ClickLogSpec


@dataclasses.dataclass(frozen=True)
class TensorBatch:
    """A click batch as tensors.

    Attributes:
        user_counts: float32 [rows, user counts], raw.
        item_counts: float32 [rows, item counts], raw.
        user_categories: int64 [rows, user vocabularies].
        item_categories: int64 [rows, item vocabularies].
        clicks: float32 [rows].
    """

    user_counts: torch.Tensor
    item_counts: torch.Tensor
    user_categories: torch.Tensor
    item_categories: torch.Tensor
    clicks: torch.Tensor

    @classmethod
    def of(cls, batch: ClickBatch) -> TensorBatch:
        """Return the batch as tensors."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: torch.from_numpy(np.array(getattr(batch, name))) for name in names})


class Tower(nn.Module):
    """Embeddings and counts through two normalized layers to a vector.

    Args:
        counts: Number of dense columns.
        cardinalities: Sizes of the vocabularies.
        embedding: Width of each embedding.
        hidden: Width of the hidden layers.
        width: Width of the tower's vector.
        log_counts: Whether the counts' logarithms are taken first.
    """

    def __init__(
        self,
        counts: int,
        cardinalities: tuple[int, ...],
        embedding: int,
        hidden: int,
        width: int,
        log_counts: bool,
    ) -> None:
        super().__init__()
        self.log_counts = log_counts
        self.embeddings = nn.ModuleList(nn.Embedding(size, embedding) for size in cardinalities)
        for table in self.embeddings:
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=0.1)
        self.input = nn.Linear(counts + embedding * len(cardinalities), hidden)
        self.input_norm = nn.LayerNorm(hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.middle_norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, width)

    def forward(self, counts: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """Return vectors [rows, width]."""
        if self.log_counts:
            counts = torch.log1p(counts)
        embedded = [table(categories[:, i]) for i, table in enumerate(self.embeddings)]
        x = torch.cat([*embedded, counts], dim=1)
        x = torch.relu(self.input_norm(self.input(x)))
        x = torch.relu(self.middle_norm(self.middle(x)))
        out: torch.Tensor = self.output(x)
        return out


class TwoTower(nn.Module):
    """Two towers, their product, and a small head that gives one logit per row.

    Args:
        spec: Shape of the click log.
        embedding: Width of each embedding.
        hidden: Width of the towers' hidden layers.
        width: Width of the towers' vectors.
    """

    def __init__(
        self, spec: ClickLogSpec, embedding: int = 16, hidden: int = 128, width: int = 32
    ) -> None:
        super().__init__()
        self.user = Tower(
            spec.user_counts, spec.user_cardinalities, embedding, hidden, width, log_counts=False
        )
        self.item = Tower(
            spec.item_counts, spec.item_cardinalities, embedding, hidden, width, log_counts=True
        )
        self.head = nn.Sequential(nn.Linear(3 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: TensorBatch) -> torch.Tensor:
        """Return logits [rows]."""
        user = self.user(batch.user_counts, batch.user_categories)
        item = self.item(batch.item_counts, batch.item_categories)
        logits: torch.Tensor = self.head(torch.cat([user, item, user * item], dim=1))
        return logits.squeeze(1)
