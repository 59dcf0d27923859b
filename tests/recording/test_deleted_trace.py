"""A trace that is deleted or moved in mid-run stops recording, loudly, and never training."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.recording import Schedule, record
from loka_toolkit.recording.writer import FLUSH_STEPS


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 1))


def train(model: nn.Module, recorder, steps: int) -> None:
    x, y = torch.randn(8, 13), torch.ones(8)
    for _ in range(steps):
        F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y).backward()
        recorder.step()


def kinds(recorder) -> dict[str, int]:
    return {e.kind: e.count for e in recorder._events.snapshot()}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("after", [3, 3 * FLUSH_STEPS])
@pytest.mark.parametrize("later", [0, 1, 3 * FLUSH_STEPS])
def test_a_deleted_directory_is_a_write_failure(tmp_path, model, rank, after, later):
    path = tmp_path / "run"
    with (
        pytest.warns(UserWarning, match="deleted or moved") as shown,
        record(model, path, schedule=Schedule.always(), rank=rank, world_size=2) as recorder,
    ):
        train(model, recorder, after)
        recorded = recorder.steps_recorded
        shutil.rmtree(path)
        train(model, recorder, later)
    assert len(shown) == 1 and str(path) in str(shown[0].message)
    assert not path.exists(), "a partial trace is not made anew"
    assert kinds(recorder) == {"write-failed": 1}
    assert recorder.steps_seen == after + later
    assert recorded <= recorder.steps_recorded <= recorded + FLUSH_STEPS, "recording stopped"
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_deletion_while_the_schedule_rests_is_noticed_at_close(tmp_path, model):
    path = tmp_path / "run"
    with (
        pytest.warns(UserWarning, match="recording stopped"),
        record(model, path, schedule=Schedule(warm_steps=2, every=None)) as recorder,
    ):
        train(model, recorder, 4)
        shutil.rmtree(path)
        train(model, recorder, 4)
    assert kinds(recorder) == {"write-failed": 1} and not path.exists()


def test_a_moved_directory_keeps_what_it_had_and_an_emptied_one_stays_empty(tmp_path, model):
    for name in ("moved", "emptied"):
        path = tmp_path / name
        with (
            pytest.warns(UserWarning, match="deleted or moved"),
            record(model, path, schedule=Schedule.always()) as recorder,
        ):
            train(model, recorder, 1 + FLUSH_STEPS)
            shutil.move(path, tmp_path / f"{name}-elsewhere")
            if name == "emptied":
                path.mkdir()
            train(model, recorder, 2 * FLUSH_STEPS)
        trace = Trace.open(tmp_path / f"{name}-elsewhere")
        assert not trace.manifest.status.closed
        assert trace.steps["step"].to_pylist() == list(range(1 + FLUSH_STEPS))
        assert list(path.rglob("*")) == []


def test_warnings_as_errors_still_do_not_stop_training(tmp_path, model, caplog):
    path = tmp_path / "run"
    with record(model, path, schedule=Schedule.always()) as recorder:
        train(model, recorder, 2)
        shutil.rmtree(path)
        train(model, recorder, 2 * FLUSH_STEPS)
    assert caplog.text.count("deleted or moved") == 1
    assert recorder.steps_seen == 2 + 2 * FLUSH_STEPS
