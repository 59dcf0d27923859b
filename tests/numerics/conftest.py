"""Draws that the room's tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

Draw = Callable[..., torch.Tensor]


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator seeded by the test's own name, so that no two tests share draws."""
    seed = sum(ord(c) * (i + 1) for i, c in enumerate(request.node.name))
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def normal(generator: torch.Generator) -> Draw:
    """Draw unit normals of a shape."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return draw


@pytest.fixture
def heavy_tailed(generator: torch.Generator) -> Draw:
    """Draw log-normal magnitudes with random signs: counts beside small activations."""

    def draw(*shape: int) -> torch.Tensor:
        magnitude = torch.exp(2.0 * torch.randn(*shape, generator=generator))
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return magnitude * sign

    return draw
