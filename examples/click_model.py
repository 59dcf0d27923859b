"""The small click model and its rows that the numbered examples share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional


def make_model() -> nn.Module:
    """Return a click model with two normalized layers and a head; the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(39, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 1),
    )


def rows(steps: int, batch: int = 256) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield features [batch, 39] and clicks [batch] for some steps."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(batch, 39, generator=generator)
        noise = torch.randn(batch, generator=generator)
        yield x, (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] + noise > 0.5).float()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, clicks: torch.Tensor
) -> torch.Tensor:
    """Take one step on the mean log loss and return the loss."""
    optimizer.zero_grad()
    loss = functional.binary_cross_entropy_with_logits(model(x).squeeze(-1), clicks)
    loss.backward()
    optimizer.step()
    return loss.detach()
