"""A model and a directory have one open recorder, which leaves PyTorch as it found it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ArtifactExistsError, ConfigurationError
from loka_toolkit.recording import Schedule, record
from loka_toolkit.recording.modules import ModelNames
from loka_toolkit.recording.recorder import Recorder


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 1))


@pytest.fixture(autouse=True)
def untouched():
    """Check after every test that no mode stands and that backward is PyTorch's own."""
    original = torch.autograd.backward
    yield
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert torch.autograd.backward is original


def train(model: nn.Module, recorder, steps: int = 1) -> None:
    x, y = torch.randn(8, 13), torch.ones(8)
    for _ in range(steps):
        F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y).backward()
        recorder.step()


def opens_again(model: nn.Module, path) -> bool:
    with record(model, path, schedule=Schedule.always()) as recorder:
        train(model, recorder)
    return Trace.open(path).steps.num_rows == 1


def test_a_second_recorder_of_the_model_is_refused_and_the_first_goes_on(tmp_path, model):
    with record(model, tmp_path / "a", schedule=Schedule.always()) as first:
        train(model, first)
        with (
            pytest.raises(ConfigurationError, match=r"close it first.*one recorder") as caught,
            record(model, tmp_path / "b"),
        ):
            pass
        assert str(tmp_path / "a") in str(caught.value)
        train(model, first, 2)
    assert Trace.open(tmp_path / "a").steps["status"].to_pylist() == ["recorded"] * 3
    assert not (tmp_path / "b").exists(), "a refused recorder claims no directory"
    assert opens_again(model, tmp_path / "b")


def test_a_part_of_an_open_model_is_refused_and_so_is_its_directory(tmp_path, model):
    with record(model, tmp_path / "a", schedule=Schedule.always()) as first:
        with pytest.raises(ConfigurationError, match=r"shares parameter 0.weight .*\(weight\)"):
            record(model[0], tmp_path / "b").__enter__()
        with pytest.raises(ConfigurationError, match="one directory"):
            record(nn.Linear(5, 3), tmp_path / "sub" / ".." / "a", force=True).__enter__()
        train(model, first)
    assert Trace.open(tmp_path / "a").steps.num_rows == 1


def test_two_recorders_of_one_model_in_one_with_statement(tmp_path, model):
    with (
        pytest.raises(ConfigurationError, match="still open"),
        record(model, tmp_path / "a", schedule=Schedule.always()) as first,
        record(model, tmp_path / "b", schedule=Schedule.always()) as second,
    ):
        for recorder in (first, second):
            train(model, recorder)
    assert opens_again(model, tmp_path / "c")


def test_the_claim_holds_across_threads(tmp_path, model):
    caught: list[Exception] = []

    def work() -> None:
        try:
            with record(nn.Linear(5, 3), tmp_path / "b"):
                pass
        except ConfigurationError as error:
            caught.append(error)

    with record(model, tmp_path / "a", schedule=Schedule.always()) as first:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        train(model, first)
    assert len(caught) == 1


def test_opening_the_open_recorder_again_does_not_give_up_its_claim(tmp_path, model):
    with record(model, tmp_path / "a", schedule=Schedule.always()) as first:
        with pytest.raises(ConfigurationError, match="opened once"):
            first.__enter__()
        with pytest.raises(ConfigurationError, match="still open"):
            record(model, tmp_path / "b").__enter__()
        train(model, first)


def test_an_exception_in_the_body_gives_the_claim_back(tmp_path, model):
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with (
            pytest.raises(error),
            record(model, tmp_path / error.__name__, schedule=Schedule.always()) as recorder,
        ):
            train(model, recorder)
            raise error
    assert opens_again(model, tmp_path / "b")


def test_a_recorder_that_cannot_open_gives_the_claim_back(tmp_path, model, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep me")
    with pytest.raises(ArtifactExistsError):
        record(model, tmp_path / "full").__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(ModelNames, "caveats", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            record(model, tmp_path / "a").__enter__()
    assert opens_again(model, tmp_path / "b")


def test_an_interrupt_right_after_the_first_step_began_undoes_it(tmp_path, model, monkeypatch):
    begin = Recorder._begin_step

    def interrupted(self) -> None:
        begin(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "_begin_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            record(model, tmp_path / "a", schedule=Schedule.always()).__enter__()
    assert opens_again(model, tmp_path / "b")


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_a_close_that_fails_gives_the_claim_back(tmp_path, model, monkeypatch, caplog, error):
    def fail(_self) -> None:
        raise error("at close")

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "_close", fail)
        recorder = record(model, tmp_path / "a", schedule=Schedule.always()).__enter__()
        train(model, recorder)
        if error is LookupError:
            recorder.__exit__(None, None, None)
            assert "at close" in caplog.text
        else:
            with pytest.raises(KeyboardInterrupt):
                recorder.__exit__(None, None, None)
    assert opens_again(model, tmp_path / "b")
