"""The check at record time, itself checked: it must notice a wrong prediction."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ConfigurationError, UnknownNameError
from loka_toolkit.recording import Schedule, record, verify_impact


class Crossed(nn.Module):
    """Linear layers, a parameter on the left, attention, dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(13, 8)
        self.left = nn.Parameter(torch.randn(8, 8) / 3)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.inner(x))
        h = h + torch.softmax(h @ h.mT, -1) @ h
        flat = h.reshape(-1, 8)
        h = (self.left @ flat.T).T.reshape(h.shape)
        return self.head(self.drop(h).mean(1)).squeeze(-1)


def summed_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    regularizer = sum(p.square().sum() for p in model.parameters())
    return F.binary_cross_entropy_with_logits(model(x), y, reduction="sum") + 0.1 * regularizer


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, 5, 13, generator=generator)
    return x, (torch.rand(11, generator=generator) < 0.5).float()


def test_every_site_agrees(batch):
    model = Crossed()
    state = torch.get_rng_state()
    checks = verify_impact(model, summed_loss, batch)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert {c.site for c in checks} == {
        "inner#0:fwd",
        "(root)#0:fwd",
        "(root)#1:fwd",
        "(root)#2:fwd",
        "head#0:fwd",
    }
    assert {c.status for c in checks} == {"ok"}
    assert sum(c.is_resolved for c in checks) > len(checks) / 2
    assert max(c.deviation for c in checks if c.deviation is not None) < 0.01


def test_a_wrong_claim_is_noticed_and_an_event(tmp_path, batch):
    model = Crossed()
    said = {"examples": 11, "reduction": "mean", "recipes": ("e5m2/tensorwise/fp32",)}
    with (
        pytest.warns(UserWarning, match="predicted"),
        record(model, tmp_path / "run", schedule=Schedule.always()) as recorder,
    ):
        # The prediction is that of step(reduction="mean"): wrong for a summed loss; the difference
        # is taken of the loss per example, which does not depend on what is claimed.
        checks = recorder.verify(summed_loss, batch, **said)
        right = recorder.verify(summed_loss, batch, recipes=said["recipes"])
        summed_loss(model, *batch).backward()
        recorder.step()
    assert all(c.agrees for c in right)
    assert not all(c.agrees for c in checks)
    trace = Trace.open(tmp_path / "run")
    assert "impact-not-verified" in {e.kind for e in trace.manifest.events}
    assert trace.manifest.status.steps_recorded == 1


def test_wrong_arguments(batch):
    model = Crossed()
    with pytest.raises(UnknownNameError):
        verify_impact(model, summed_loss, batch, recipes=["e4m3"])
    with pytest.raises(ConfigurationError, match="earlier steps"):
        verify_impact(model, summed_loss, batch, recipes=["e4m3/static/fast"])
    with pytest.raises(ConfigurationError, match="width"):
        verify_impact(model, summed_loss, batch, width=0.0)
    with pytest.raises(ConfigurationError, match="reduction"):
        verify_impact(model, summed_loss, batch, reduction="median")
