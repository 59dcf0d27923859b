"""What a script hangs into its graph runs as often under the recorder as without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.recording import Schedule, record

ROWS = 17
SITE = "second#0:dgrad"
RECIPE = "e4m3/tensorwise/fp32"


class Net(nn.Module):
    """Two products around a batch normalization, of which a block may be checkpointed."""

    def __init__(self, hang: Callable[[torch.Tensor], Any], is_checkpointed: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(13, 11), nn.BatchNorm1d(11)
        self.second, self.last = nn.Linear(11, 7), nn.Linear(7, 1)
        self.hang, self.is_checkpointed = hang, is_checkpointed
        self.blocks = 0

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        self.blocks += 1
        return F.dropout(self.second(self.norm(self.first(x)).relu()).relu(), 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            # Whose random numbers are not kept draws others for every time it is recomputed.
            h = checkpoint(self._block, x, use_reentrant=False, preserve_rng_state=False)
        else:
            h = self._block(x)
        self.hang(h)
        return self.last(h).squeeze(-1)


class Script:
    """A training script with one kind of hook, and all that it can notice."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind, self.count = kind, 0
        self.kept: list[torch.Tensor] = []
        self.packed: dict[int, torch.Tensor] = {}
        self.model = Net(self._hang, kind == "checkpoint")

    def _hang(self, h: torch.Tensor) -> None:
        if self.kind == "tensor":
            h.register_hook(self._grow)
        elif self.kind == "node":
            assert h.grad_fn is not None
            h.grad_fn.register_hook(self._note)
        elif self.kind == "tensors":
            register_multi_grad_hook([h], self._note)
        elif self.kind == "retain":
            h.retain_grad()
            self.kept.append(h)

    def _grow(self, gradient: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return gradient * (1 + 0.1 * self.count)

    def _note(self, *_: Any) -> None:
        self.count += 1

    def _pack(self, x: torch.Tensor) -> int:
        self.packed[len(self.packed)] = x
        return len(self.packed) - 1

    def _unpack(self, place: int) -> torch.Tensor:
        """Hand out once, as from a buffer that is freed."""
        self.count += 1
        x, self.packed[place] = self.packed[place], torch.empty(0)
        return x

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        if self.kind == "saved":
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        elif self.kind == "save_on_cpu":
            with save_on_cpu():
                yield
        else:
            yield

    def train(self, told: Callable[[], None]) -> list[torch.Tensor]:
        """Train for four steps and return all that there is afterwards."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(ROWS, 13, generator=generator) * 10
            clicks = (torch.rand(ROWS, generator=generator) < 0.3).float()
            optimizer.zero_grad()
            with self._saving():
                loss = F.binary_cross_entropy_with_logits(self.model(x), clicks)
            loss.backward()
            optimizer.step()
            told()
        counts = torch.tensor([self.count, self.model.blocks])
        retained = [h.grad for h in self.kept if h.grad is not None]
        return [*self.model.state_dict().values(), counts, torch.get_rng_state(), *retained]


KINDS = ["none", "tensor", "node", "tensors", "retain", "saved", "checkpoint", "save_on_cpu"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_notices_nothing(tmp_path, kind):
    alone = Script(kind).train(lambda: None)
    script = Script(kind)
    method = torch.Tensor.retain_grad
    options: dict[str, Any] = {"recipes": [RECIPE], "schedule": Schedule.always()}
    with record(script.model, tmp_path / "run", **options) as recorder:
        recorded = script.train(recorder.step)
    assert len(alone) == len(recorded)
    assert all(torch.equal(a, b) for a, b in zip(alone, recorded, strict=True))
    assert torch.Tensor.retain_grad is method


REASONS = {
    "tensor": "placed hooks",
    "node": "placed hooks",
    "tensors": "placed hooks",
    "retain": "retains gradients",
    "saved": "not unpacked twice",
    "checkpoint": "not unpacked twice",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_followed_says_why(record_run, kind):
    script = Script(kind)
    x, y = torch.ones(ROWS, 13).cumsum(0), torch.ones(ROWS)

    def loss(_: int) -> torch.Tensor:
        with script._saving():
            return F.binary_cross_entropy_with_logits(script.model(x), y)

    run = record_run(script.model, loss, recipes=[RECIPE])
    row = run.error(SITE, RECIPE)
    if kind in REASONS:
        assert REASONS[kind] in row.gradient_reason
    else:  # noise is not known behind a batch normalization, but bias is
        assert row.gradient_bias == row.gradient_bias
    assert run.steps.status.tolist() == ["recorded"]


def test_a_second_recorder_s_hooks_are_no_script_s(tmp_path):
    """Recorders that begin and end their steps in the midst of each other's follow all the same."""
    models = [nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1)) for _ in range(2)]
    options: dict[str, Any] = {"recipes": [RECIPE], "schedule": Schedule.always()}
    x, y = torch.ones(ROWS, 5).cumsum(0), torch.ones(ROWS)
    with (
        record(models[0], tmp_path / "a", **options) as first,
        record(models[1], tmp_path / "b", **options) as second,
    ):
        for _ in range(2):
            for model, recorder in zip(models, (first, second), strict=True):
                F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y).backward()
                recorder.step()
    for name in "ab":
        errors = Trace.open(tmp_path / name).errors.to_pandas()
        rows = errors[errors.site == "2#0:dgrad"]
        assert len(rows) == 2 and rows.gradient_bias.notna().all()
