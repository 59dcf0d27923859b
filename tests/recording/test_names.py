"""Names of sites and parameters where hooks and storages alone do not tell."""

from __future__ import annotations

import json

import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.recording import Schedule, record


def squares(model, *inputs):
    return lambda _: model(*inputs).square().mean()


class Scores(nn.Module):
    """Multiplies activations only."""

    def forward(self, a, b):
        return torch.bmm(a, b.transpose(1, 2))


class Direct(nn.Module):
    """Calls ``forward`` of its parts directly, two deep."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.linear = Scores(), nn.Linear(7, 7)

        def forward(self, *, h):
            return self.scores.forward(b=self.linear.forward(h), a=h)

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.called = nn.Linear(13, 7), self.Inner(), Scores()

    def forward(self, x):
        h = self.first.forward(x)
        scores = self.inner.forward(h=h)
        return self.called(scores, scores) + torch.bmm(scores, scores)


def test_forward_called_directly_is_named_after_the_module(record_run):
    model = Direct()
    run = record_run(model, squares(model, torch.randn(3, 5, 13)))
    assert run.site_names("fwd") == [
        "first#0:fwd",
        "inner.linear#0:fwd",
        "inner.scores#0:fwd",
        "called#0:fwd",
        "(root)#0:fwd",
    ]
    run = record_run(
        model, lambda _: model.forward(torch.randn(3, 5, 13)).square().mean(), name="root"
    )
    assert "(root)#0:fwd" in run.site_names("fwd") and "first#0:fwd" in run.site_names("fwd")
    types = dict(zip(run.sites.site, run.sites.module_type, strict=True))
    assert types["inner.scores#0:fwd"] == "Scores"


def test_a_module_of_somebody_else_is_passed_over(record_run):
    """A helper that is no part of the model gives its products no name."""
    helper = Scores()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(13, 7)

        def forward(self, x):
            h = self.first(x)
            return helper(h, h) + helper.forward(h, h)

    model = Model()
    run = record_run(model, squares(model, torch.randn(3, 5, 13)))
    assert set(run.sites.fqn) == {"first", "(root)"}


def test_a_cast_that_autocast_cached_before_the_step_is_still_the_parameter(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 1))
    x, y = torch.randn(5, 13), torch.ones(5, 1)
    with record(model, tmp_path / "run", schedule=Schedule(start=1, warm_steps=1)) as recorder:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):  # one region around both steps: the second finds cached casts
                loss = F.binary_cross_entropy_with_logits(model(x).float(), y)
                loss.backward(retain_graph=True)
                recorder.step()
    trace = Trace.open(tmp_path / "run")
    sites = {row["site"]: row for row in trace.sites.to_pylist()}
    assert {name for name in sites if name.endswith("wgrad")} == {"0#0:wgrad", "2#0:wgrad"}
    assert {row["weight"] for row in sites.values()} == {"0.weight", "2.weight"}
    assert {row["dtype_a"] for row in sites.values()} == {"bfloat16"}
    assert trace.steps["step"].to_pylist() == [1]


def test_slices_of_a_three_dimensional_parameter_and_of_a_fused_one(record_run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cross = nn.Module()
            self.cross.kernels = nn.Parameter(torch.randn(3, 7, 7) / 3)
            self.fused = nn.Parameter(torch.randn(14, 7) / 3)

        def forward(self, x):
            for kernel in self.cross.kernels:
                x = x * torch.matmul(kernel, x.unsqueeze(-1)).squeeze(-1) + x
            left, right = self.fused.chunk(2)
            return F.linear(x, left) + F.linear(x, right.t().contiguous().t())

    model = Model()
    run = record_run(model, squares(model, torch.randn(5, 7)))
    weights = dict(zip(run.sites.site, run.sites.weight, strict=True))
    assert [weights[f"cross#{i}:fwd"] for i in range(3)] == ["cross.kernels"] * 3
    assert weights["(root)#0:fwd"] == weights["(root)#1:fwd"] == "fused"
    assert run.steps.gemm_flops_unseen[0] == 0


def test_excluded_modules_stay_excluded_in_recompute_and_micro_batches(record_run):
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept, self.left_out = nn.Linear(13, 7), nn.Linear(7, 7)

        def forward(self, x):
            return checkpoint(self.left_out, self.kept(x).tanh(), use_reentrant=True)

    model = Model()
    x = torch.randn(5, 13)

    def accumulated(_):
        model(x).square().mean().backward()
        return model(x).square().mean()

    run = record_run(model, accumulated, exclude=("left_out",))
    assert set(run.sites.fqn) == {"kept"}
    # Forward, the same again, dgrad and wgrad, in two micro-batches.
    unseen = json.loads(run.steps.unseen_reason[0])
    assert unseen == {"excluded by include/exclude": 2 * 4 * 2.0 * 5 * 7 * 7}
    assert json.loads(run.steps.repeated_reason[0]) == {"micro-batch": 2 * 2.0 * 5 * 13 * 7}
