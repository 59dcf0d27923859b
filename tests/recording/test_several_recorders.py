"""Recorders of disjoint models, open at once: each sees what it would see alone."""

from __future__ import annotations

import itertools
import os
import warnings

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.recording import Schedule, record
from loka_toolkit.recording.switchboard import OUTSIDE, SWITCHBOARD


@pytest.fixture(autouse=True)
def untouched():
    original = torch.autograd.backward
    yield
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert torch.autograd.backward is original
    assert not SWITCHBOARD._fences and not SWITCHBOARD._listeners and not SWITCHBOARD._announced


class Towers:
    """Two small towers, heavy-tailed inputs, and the loss of each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.user = nn.Sequential(nn.Linear(13, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 5))
        self.item = nn.Sequential(nn.Linear(39, 11), nn.SiLU(), nn.Linear(11, 5))
        self.x = torch.distributions.StudentT(2.0).sample((17, 13))
        self.z = torch.distributions.StudentT(2.0).sample((19, 39))

    def user_loss(self) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(self.user(self.x)[:, 0], torch.ones(17))

    def item_loss(self) -> torch.Tensor:
        return F.mse_loss(self.item(self.z), torch.zeros(19, 5), reduction="sum")


def frame(path, table: str) -> pd.DataFrame:
    rows = getattr(Trace.open(path), table).to_pandas()
    return rows.drop(columns=[c for c in rows if c.startswith("seconds")])


def assert_same_trace(one, two) -> None:
    for table in ("sites", "errors", "operands", "steps", "moments"):
        pd.testing.assert_frame_equal(frame(one, table), frame(two, table), obj=table)


def train(towers: Towers, user=None, item=None, steps: int = 3) -> None:
    for _ in range(steps):
        if user is not None:
            towers.user_loss().backward()
            user.step()
        if item is not None:
            towers.item_loss().backward()
            item.step()


def test_alternating_models_leave_the_traces_that_each_leaves_alone(tmp_path):
    always = Schedule.always()
    for name in ("user", "item"):
        towers = Towers()
        with record(getattr(towers, name), tmp_path / f"{name}1", schedule=always) as recorder:
            train(towers, **{name: recorder})
    towers = Towers()
    with (
        record(towers.user, tmp_path / "user2", schedule=always) as user,
        record(towers.item, tmp_path / "item2", schedule=always) as item,
    ):
        train(towers, user, item)
    assert frame(tmp_path / "item2", "sites").fqn.str.match(r"^[02]$").all()
    for name in ("user", "item"):
        assert_same_trace(tmp_path / f"{name}1", tmp_path / f"{name}2")


def test_a_model_off_its_schedule_still_keeps_its_products(tmp_path):
    towers = Towers()
    with record(towers.item, tmp_path / "alone", schedule=Schedule.always()) as item:
        train(towers, None, item)
    towers = Towers()
    with (
        record(towers.user, tmp_path / "user", schedule=Schedule(start=50)) as user,
        record(towers.item, tmp_path / "item", schedule=Schedule.always()) as item,
    ):
        train(towers, user, item)
    assert_same_trace(tmp_path / "alone", tmp_path / "item")


def test_a_joint_loss_reaches_both_and_their_product_is_unseen_by_both(tmp_path):
    towers = Towers()
    with (
        record(towers.user, tmp_path / "user", schedule=Schedule.always()) as user,
        record(towers.item, tmp_path / "item", schedule=Schedule.always()) as item,
    ):
        scores = towers.user(towers.x) @ towers.item(towers.z).T
        loss = F.binary_cross_entropy_with_logits(scores, torch.zeros(17, 19))
        loss.backward()
        user.step()
        item.step()
    for name in ("user", "item"):
        trace = Trace.open(tmp_path / name)
        step = trace.steps.to_pylist()[0]
        assert step["loss"] == pytest.approx(float(loss.detach()))
        # One product and its two gradients, 2 M N K each.
        assert step["unseen_reason"] == f'{{"{OUTSIDE}": {3 * 2.0 * 17 * 19 * 5}}}'
        roles = trace.sites.to_pandas().groupby("fqn").role.apply(set)
        last = "3" if name == "user" else "2"
        assert roles[last] == {"fwd", "dgrad", "wgrad"}


def test_the_loss_of_another_model_is_not_taken(tmp_path):
    towers = Towers()
    with (
        record(towers.user, tmp_path / "user", schedule=Schedule.always()) as user,
        record(towers.item, tmp_path / "item", schedule=Schedule.always()) as item,
    ):
        (theirs := towers.item_loss()).backward()
        item.step()
        (mine := towers.user_loss()).backward()
        user.step()
    assert Trace.open(tmp_path / "user").steps["loss"].to_pylist() == [float(mine.detach())]
    assert Trace.open(tmp_path / "item").steps["loss"].to_pylist() == [float(theirs.detach())]


def test_a_parameter_decides_before_the_module_that_runs(tmp_path):
    class Borrows(nn.Module):
        def __init__(self, lender: nn.Linear) -> None:
            super().__init__()
            self.own = nn.Linear(13, 13)
            self.lender = [lender]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.own(x), self.lender[0].weight)

    lender = nn.Linear(13, 7)
    model = Borrows(lender)
    with (
        record(model, tmp_path / "model", schedule=Schedule.always()) as recorder,
        record(lender, tmp_path / "lender", schedule=Schedule.always()) as other,
    ):
        model(torch.randn(8, 13)).square().mean().backward()
        recorder.step()
        other.step()
    assert set(frame(tmp_path / "model", "sites").fqn) == {"own"}
    found = frame(tmp_path / "lender", "sites")
    assert set(found.role) == {"fwd", "dgrad", "wgrad"}
    assert set(found.weight) == {"weight"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_they_close_in_any_order(tmp_path, order):
    models = [nn.Linear(5, 3) for _ in range(3)]
    recorders = []
    for index, model in enumerate(models):
        recorder = record(model, tmp_path / str(index), schedule=Schedule.always())
        recorders.append(recorder.__enter__())
    for index in order:
        for model, recorder in zip(models, recorders, strict=True):
            if recorder._is_open:
                model(torch.randn(4, 5)).square().mean().backward()
                recorder.step()
        recorders[index].__exit__(None, None, None)
    for place, index in enumerate(order):
        trace = Trace.open(tmp_path / str(index))
        assert trace.steps["status"].to_pylist() == ["recorded"] * (place + 1)
        assert trace.sites.num_rows == 2, "fwd and wgrad of its own layer, nothing else"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform cannot fork")
def test_a_fork_in_the_middle_of_a_step_records_nothing(tmp_path):
    towers = Towers()
    with record(towers.user, tmp_path / "user", schedule=Schedule.always()) as recorder:
        out = towers.user_loss()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
            child = os.fork()
        if child == 0:
            listening = bool(SWITCHBOARD._listeners)
            os._exit(1 if listening else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        out.backward()
        recorder.step()
    assert set(frame(tmp_path / "user", "sites").role) >= {"fwd", "dgrad", "wgrad"}
