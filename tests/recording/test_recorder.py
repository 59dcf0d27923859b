"""The recorder's edges: arguments, schedules, failures, kills, full disks."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import (
    ArtifactExistsError,
    ConfigurationError,
    NoEvidenceError,
    NoMatchError,
    UnknownNameError,
)
from loka_toolkit.recording import Schedule, record
from loka_toolkit.recording.observer import Observer

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 1))


def train(model: nn.Module, recorder, steps: int, said=None) -> None:
    x, y = torch.randn(8, 13), torch.ones(8)
    for _ in range(steps):
        loss = F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)
        loss.backward()
        recorder.step(**(said or {}))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"recipes": ["e4m3/tensorwize/fast"]}, UnknownNameError, "e4m3/tensorwise/fast"),
        ({"recipes": []}, ConfigurationError, "at least one"),
        ({"recipes": "e4m3/tensorwise/fast"}, ConfigurationError, "sequence"),
        ({"include": ["O"]}, NoMatchError, "known: '?"),
        ({"exclude": ["(rooot)"]}, NoMatchError, "(root)"),
        ({"max_rows": 0}, ConfigurationError, "max_rows = 0"),
        ({"max_columns": 2.5}, ConfigurationError, "max_columns"),
        ({"headroom": 0.5}, ConfigurationError, "headroom"),
        ({"moments_width": -1}, ConfigurationError, "moments_width"),
        ({"seed": -1}, ConfigurationError, "seed"),
        ({"rank": 2, "world_size": 2}, ConfigurationError, "rank = 2"),
        ({"schedule": 5}, ConfigurationError, "Schedule"),
    ],
)
def test_wrong_arguments_are_errors_when_the_recorder_opens(tmp_path, model, options, error, text):
    with pytest.raises(error) as caught:
        record(model, tmp_path / "run", **options)
    assert text.strip("?'") in str(caught.value) or text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_models_without_parameters_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no parameters"):
        record(nn.ReLU(), tmp_path)
    with pytest.raises(ConfigurationError, match="function"):
        record(lambda x: x, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"start": -1},
        {"warm_steps": True},
        {"warm_every": 0},
        {"every": 0},
        {"start": 5, "stop": 5},
        {"warm_steps": 0, "every": None},
    ],
)
def test_schedules_that_make_no_sense(options):
    with pytest.raises(ConfigurationError, match="schedule"):
        Schedule(**options)


def test_schedule_reads_these_first_then_every():
    schedule = Schedule(start=2, warm_steps=3, every=10, stop=30)
    assert [s for s in range(40) if schedule.is_active(s)] == [2, 3, 4, 5, 15, 25]
    sparse = Schedule(warm_steps=6, warm_every=3, every=None)
    assert [s for s in range(40) if sparse.is_active(s)] == [0, 3]
    assert all(Schedule.always().is_active(s) for s in range(5))


def test_existing_paths(tmp_path, model):
    stranger = tmp_path / "mine.txt"
    stranger.write_text("keep me")
    with pytest.raises(ArtifactExistsError, match="force=True"), record(model, tmp_path):
        pass
    with pytest.raises(ArtifactExistsError, match="is a file"), record(model, stranger):
        pass
    for _ in range(2):
        with record(model, tmp_path, force=True, schedule=Schedule.always()) as recorder:
            train(model, recorder, 2)
    trace = Trace.open(tmp_path)
    assert trace.steps.num_rows == 2
    assert stranger.read_text() == "keep me"
    with pytest.raises(ArtifactExistsError), record(model, tmp_path):
        pass


def test_only_active_steps_leave_rows(tmp_path, model):
    with record(model, tmp_path / "run", schedule=Schedule(warm_steps=2, every=3)) as recorder:
        train(model, recorder, 9)
    trace = Trace.open(tmp_path / "run")
    assert trace.steps["step"].to_pylist() == [0, 1, 2, 5, 8]
    status = trace.manifest.status
    assert (status.closed, status.steps_seen, status.steps_recorded) == (True, 9, 5)
    for table in ("errors", "operands", "steps"):
        parts = list((tmp_path / "run" / table).glob("*.parquet"))
        assert len(parts) == 1, "parts are compacted at close"


def test_static_scales_come_from_earlier_steps(tmp_path, model):
    x, y = torch.randn(8, 13), torch.ones(8)
    with record(model, tmp_path / "run", schedule=Schedule.always()) as recorder:
        for factor in (1.0, 2.0, 1.0):
            loss = 512 * F.binary_cross_entropy_with_logits(model(x * factor).squeeze(-1), y)
            loss.backward()
            recorder.step()
    rows = [r for r in Trace.open(tmp_path / "run").errors.to_pylist() if "static" in r["recipe"]]
    assert {r["step"] for r in rows} == {1, 2}
    first = {r["step"]: r for r in rows if r["site"] == "0#0:fwd"}
    amax = float(x.abs().max())
    assert first[1]["scale_a"] == pytest.approx(amax * 8 / 448)
    assert first[2]["scale_a"] == pytest.approx(2 * amax * 8 / 448)


def test_static_scale_of_g_follows_the_loss_scale(tmp_path, model):
    x, y = torch.randn(8, 13), torch.ones(8)
    with record(model, tmp_path / "run", schedule=Schedule.always()) as recorder:
        for loss_scale in (1.0, 1024.0):
            loss = loss_scale * F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)
            loss.backward()
            recorder.step()
    trace = Trace.open(tmp_path / "run")
    g = {r["step"]: r for r in trace.operands.to_pylist() if r["operand"] == "g"}
    row = next(
        r for r in trace.errors.to_pylist() if r["site"] == "2#0:wgrad" and "static" in r["recipe"]
    )
    site = [r for r in trace.operands.to_pylist() if r["operand"] == "g" and "2#0" in r["site"]]
    assert row["scale_a"] == pytest.approx(1024 * site[0]["amax"] * 8 / 448, rel=1e-5)
    assert row["saturation_share"] == 0 and len(g) == 2


def test_a_nonfinite_step_is_skipped_and_counted(tmp_path, model):
    x, y = torch.randn(8, 13), torch.ones(8)
    with (
        pytest.warns(UserWarning, match="Inf or NaN"),
        record(model, tmp_path / "run", schedule=Schedule.always()) as recorder,
    ):
        for poison in (0.0, float("nan"), 0.0, float("inf")):
            part = x.clone()
            part[3, 5] += poison
            loss = F.binary_cross_entropy_with_logits(model(part).squeeze(-1), y)
            model.zero_grad()
            loss.backward()
            recorder.step()
    trace = Trace.open(tmp_path / "run")
    assert trace.steps["status"].to_pylist() == ["recorded", "nonfinite", "recorded", "nonfinite"]
    assert set(trace.errors["step"].to_pylist()) == {0, 2}
    assert set(trace.operands["nonfinite_count"].to_pylist()) == {0}
    event = next(e for e in trace.manifest.events if e.kind == "nonfinite-step")
    assert event.count == 2 and event.step == 1
    assert all(all(v == v for v in r["mean"]) for r in trace.moments.to_pylist()), (
        "moments are not poisoned"
    )


def test_schedule_that_was_never_active_and_no_step_at_all(tmp_path, model):
    with (
        pytest.warns(UserWarning, match="never active in 3 steps"),
        record(model, tmp_path / "never", schedule=Schedule(start=50)) as recorder,
    ):
        train(model, recorder, 3)
    with pytest.warns(UserWarning, match=r"step\(\) was never called"):
        with record(model, tmp_path / "none"):
            pass
    for name, kind in (("never", "schedule-never-active"), ("none", "no-step")):
        trace = Trace.open(tmp_path / name)
        assert kind in {e.kind for e in trace.manifest.events}
        with pytest.raises(NoEvidenceError):
            trace.require_evidence()


def test_exceptions_of_the_training_script_pass_through(tmp_path, model):
    with (
        pytest.raises(ZeroDivisionError),
        record(model, tmp_path / "run", schedule=Schedule.always()) as recorder,
    ):
        train(model, recorder, 1)
        model(torch.randn(2, 13))
        raise ZeroDivisionError
    assert Trace.open(tmp_path / "run").manifest.status.steps_recorded == 1
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_an_operator_that_fails_fails_as_ever(tmp_path, model):
    with (
        record(model, tmp_path / "run", schedule=Schedule.always()) as recorder,
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
    ):
        try:
            model(torch.randn(2, 12))
        finally:
            train(model, recorder, 1)


def test_internal_failures_are_counted_and_never_raised(tmp_path, model, monkeypatch):
    def fail(*_args, **_options):
        raise LookupError("no such thing")

    monkeypatch.setattr(Observer, "forward", fail)
    with (
        pytest.warns(UserWarning, match="no such thing"),
        record(model, tmp_path / "run", schedule=Schedule.always()) as recorder,
    ):
        train(model, recorder, 2)
    trace = Trace.open(tmp_path / "run")
    assert trace.steps["status"].to_pylist() == ["failed", "failed"]
    assert "no such thing" in trace.steps["reason"].to_pylist()[0]
    event = next(e for e in trace.manifest.events if e.kind == "internal-failure")
    assert event.count == 4


def test_warnings_as_errors_do_not_stop_training(tmp_path, model, caplog):
    """The suite turns warnings into errors; the recorder logs them then."""
    with record(model, tmp_path / "run", schedule=Schedule(start=9)) as recorder:
        train(model, recorder, 2)
    assert "never active" in caplog.text


def test_bad_arguments_of_step_are_events(tmp_path, model):
    bad = {"examples": torch.tensor([0.5]), "reduction": "median", "loss_scale": 0.0, "loss": "x"}
    with (
        pytest.warns(UserWarning, match="is left out"),
        record(model, tmp_path / "run", schedule=Schedule.always()) as recorder,
    ):
        train(model, recorder, 1, bad)
    trace = Trace.open(tmp_path / "run")
    assert trace.steps["status"].to_pylist() == ["recorded"]
    assert sum(e.kind == "bad-argument" for e in trace.manifest.events) == 4


def test_a_full_disk_stops_recording_and_not_training(tmp_path, model, monkeypatch):
    real = storage.write_table
    written = []

    def full(path, *args, **options):
        if path.parent.name == "errors" and "errors" in written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path.parent.name)
        real(path, *args, **options)

    monkeypatch.setattr(storage, "write_table", full)
    with (
        pytest.warns(UserWarning, match="No space left"),
        record(model, tmp_path / "run", schedule=Schedule.always()) as recorder,
    ):
        train(model, recorder, 20)
    assert recorder.steps_seen == 20
    trace = Trace.open(tmp_path / "run")
    assert trace.steps.num_rows == 1
    event = next(e for e in trace.manifest.events if e.kind == "write-failed")
    assert "recording stopped" in event.message and event.step == 8


SCRIPT = textwrap.dedent(
    """
    import sys, torch
    from torch import nn
    from torch.nn import functional as F
    from loka_toolkit.recording import Schedule, record
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 13), torch.ones(8)
    with record(model, sys.argv[1], schedule=Schedule.always()) as recorder:
        while True:
            F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y).backward()
            optimizer.step()
            recorder.step()
    """
)


def test_a_killed_run_leaves_every_flushed_step(tmp_path):
    path = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], env=environment)
    try:
        deadline = time.monotonic() + 60
        flushed = 0
        while flushed < 9 and time.monotonic() < deadline:
            time.sleep(0.05)
            manifest = path / "manifest.json"
            if manifest.exists():
                flushed = json.loads(manifest.read_text())["status"]["steps_recorded"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    trace = Trace.open(path)
    assert not trace.manifest.status.closed
    recorded = trace.manifest.status.steps_recorded
    assert recorded >= 9
    steps = trace.steps["step"].to_pylist()
    assert steps == list(range(len(steps))) and len(steps) >= recorded
    assert set(trace.errors["step"].to_pylist()) >= set(range(recorded))
    assert trace.moments.num_rows == 8 and trace.sites.num_rows == 5
    trace.require_evidence()


def test_every_rank_writes_its_own_files(tmp_path, model):
    for rank in (1, 0):
        with record(
            model, tmp_path / "run", schedule=Schedule.always(), rank=rank, world_size=2
        ) as recorder:
            train(model, recorder, 2)
    trace = Trace.open(tmp_path / "run")
    assert [m.rank for m in trace.manifests] == [0, 1]
    assert trace.steps["rank"].to_pylist() == [0, 0, 1, 1]
    with pytest.raises(ArtifactExistsError):
        record(model, tmp_path / "run", rank=1, world_size=2).__enter__()


def test_memory_does_not_grow_with_steps(tmp_path, model):
    with record(model, tmp_path / "run", schedule=Schedule.always()) as recorder:
        sizes = []
        for _ in range(6):
            train(model, recorder, 8)
            sizes.append(sum(len(rows) for rows in recorder._writer._rows.values()))
    assert max(sizes[1:]) <= sizes[0] + 8 * 5 * 6 * 2
    assert sizes[-1] <= max(sizes[:-1])


def test_another_mode_that_stays_is_an_event(tmp_path, model):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Stays(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    other = Stays()
    with (
        pytest.warns(UserWarning, match="another TorchDispatchMode"),
        record(model, tmp_path / "run", schedule=Schedule(warm_steps=1, every=None)) as recorder,
    ):
        other.__enter__()
        train(model, recorder, 1)
        other.__exit__(None, None, None)
        train(model, recorder, 2)
    assert Trace.open(tmp_path / "run").steps.num_rows == 1
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
