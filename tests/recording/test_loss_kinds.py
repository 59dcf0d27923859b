"""Losses of every kind in their units: tasks, tokens, residuals, scalers, micro-batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.recipes import parse_recipe
from loka_toolkit.recording import Schedule, record

RECIPE = "e5m2/tensorwise/fp32"
ROWS, WIDTH = 1500, 13


def rows_of(seed: int, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([4.0] + [0.6] * (WIDTH - 1))
    return torch.randn(rows, WIDTH, generator=generator) * spread


class Trunk(nn.Module):
    """A hidden layer that several outputs share."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(41)
        self.inner, self.head = nn.Linear(WIDTH, 24), nn.Linear(24, outputs)
        with torch.no_grad():
            self.head.weight.mul_(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(x)))


def moved_outputs(model: nn.Module, layer: str, x: torch.Tensor) -> torch.Tensor:
    """Return the derivative of the outputs along a layer's error, by float64 differences."""
    linear = model.get_submodule(layer)
    seen: list[torch.Tensor] = []
    handle = linear.register_forward_hook(lambda _m, args, _o: seen.append(args[0].detach()))
    with torch.no_grad():
        model(x)
    handle.remove()
    a, w = seen[0].reshape(-1, seen[0].shape[-1]), linear.weight.detach()
    error = emulate(a, w.t(), parse_recipe(RECIPE)).double() - a.double() @ w.double().t()
    double = copy.deepcopy(model).double()

    def outputs(t: float) -> torch.Tensor:
        target = double.get_submodule(layer)
        hook = target.register_forward_hook(lambda _m, _a, o: o + t * error.reshape(o.shape))
        with torch.no_grad():
            found = double(x.double() if x.is_floating_point() else x)
        hook.remove()
        return found

    return (outputs(1e-4) - outputs(-1e-4)) / 2e-4


def coins(p: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(p.shape, generator=generator, dtype=torch.float64) < p).float()


@pytest.mark.parametrize("reduction", ["mean", "sum", "summed tasks", "averaged tasks"])
def test_tasks_add_up(record_run, linear_effect, reduction):
    """Labels follow the model, so the squared slopes of the terms estimate their curvature."""
    model, x = Trunk(3), rows_of(1)
    with torch.no_grad():
        p = torch.sigmoid(model(x).double())
    y = coins(p, 2)
    each = F.binary_cross_entropy_with_logits

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x)
        y = y.to(z.dtype)
        if reduction == "mean":
            return each(z, y)
        if reduction == "sum":
            return each(z, y, reduction="sum")
        total = sum(each(z[:, k], y[:, k]) for k in range(3))
        return total / 3 if reduction == "averaged tasks" else total

    run = record_run(model, lambda _: loss(model, x, y), recipes=(RECIPE,), max_rows=ROWS)
    step = run.steps.iloc[0]
    assert step.examples == ROWS
    # A mean over all terms is the mean loss; sums count a row once, with all of its tasks.
    divisor = {"mean": 1.0, "sum": ROWS, "summed tasks": 1.0, "averaged tasks": 1 / 3}[reduction]
    counted = 1 if reduction == "mean" else 3
    value = loss(copy.deepcopy(model).double(), x.double(), y).item()
    assert step.mean_loss == pytest.approx(value / divisor, rel=1e-5)
    for layer in ("inner", "head"):
        row = run.error(f"{layer}#0:fwd", RECIPE)
        slope = linear_effect(model, layer, (x, y), loss, RECIPE) / divisor
        assert row.impact_first_order == pytest.approx(slope, rel=1e-3, abs=1e-8)
        moved = moved_outputs(model, layer, x)
        exact = float((0.5 * p * (1 - p) * moved.square()).mean()) * counted
        # 1,500 rows whose squares are sampled: some 5 %.
        assert row.impact_second_order == pytest.approx(exact, rel=0.2), layer


def test_several_outputs_of_a_residual_have_a_scale_of_their_own(record_run):
    model, x = Trunk(3), rows_of(3)
    noise = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        y = model(x) + 5.0 * noise
    for name, loss in {
        "squared": lambda: F.mse_loss(model(x), y),
        "huber": lambda: F.huber_loss(model(x), y, delta=4.0),
        "smooth": lambda: F.smooth_l1_loss(model(x), y, beta=3.0),
    }.items():
        run = record_run(model, lambda _, f=loss: f(), recipes=(RECIPE,), max_rows=ROWS, name=name)
        row = run.error("inner#0:fwd", RECIPE)
        moved = moved_outputs(model, "inner", x)
        r = (5.0 * noise).abs()
        inside = {"squared": 2.0, "huber": (r < 4).double(), "smooth": (r < 3).double() / 3}[name]
        exact = float((0.5 * inside * moved.square()).mean())
        assert row.impact_second_order == pytest.approx(exact, rel=0.2), name
        assert row.impact_status == "ok"


@pytest.mark.parametrize("kind", ["huber", "smooth", "margin"])
def test_one_output_has_its_exact_second_order(record_run, linear_effect, kind):
    model, x = Trunk(1), rows_of(5, 117)
    y = torch.randn(117, generator=torch.Generator().manual_seed(6)) * 3

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x).squeeze(-1)
        if kind == "huber":
            return F.huber_loss(z, y, delta=1.5)
        if kind == "smooth":
            return F.smooth_l1_loss(z, y, beta=0.7)
        return F.soft_margin_loss(z, y.sign())

    run = record_run(model, lambda _: loss(model, x, y), recipes=(RECIPE,))
    row = run.error("head#0:fwd", RECIPE)
    replaced = linear_effect(model, "head", (x, y), loss, RECIPE, whole=True)
    first = row.impact_first_order
    # Kinks of the residual's losses, and the third order of the logarithm, are left.
    assert row.impact_second_order > 0
    assert abs(replaced - first - row.impact_second_order) < 0.25 * row.impact_second_order + 1e-7


class NextToken(nn.Module):
    """Tokens that see their predecessors, and a softmax over items for each."""

    def __init__(self, items: int = 29) -> None:
        super().__init__()
        torch.manual_seed(43)
        self.table, self.inner = nn.Embedding(items, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, items)
        with torch.no_grad():
            self.inner.weight.mul_(3)
            self.head.weight.mul_(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.inner(self.table(ids)))
        causal = torch.ones(ids.shape[1], ids.shape[1]).tril().to(h.dtype)
        return self.head((causal / causal.sum(1, keepdim=True)) @ h)


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_with_losses_of_their_own_are_grouped_by_sequence(record_run, linear_effect, padded):
    generator = torch.Generator().manual_seed(7)
    model = NextToken()
    ids = torch.randint(0, 29, (400, 6), generator=generator)
    with torch.no_grad():
        p = torch.softmax(model(ids).double(), -1)
    targets = torch.multinomial(p.reshape(-1, 29), 1, generator=generator).reshape(400, 6)
    if padded:
        kept = torch.arange(6) < torch.randint(1, 7, (400, 1), generator=generator)
        targets = torch.where(kept, targets, -100)

    def loss(m: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(ids).reshape(-1, 29), targets.reshape(-1))

    run = record_run(model, lambda _: loss(model, ids, targets), recipes=(RECIPE,), max_rows=9999)
    assert run.steps.examples[0] == 400
    assert run.steps.mean_loss[0] == pytest.approx(loss(model, ids, targets).item(), rel=1e-5)
    row = run.error("inner#0:fwd", RECIPE)
    slope = linear_effect(model, "inner", (ids, targets), loss, RECIPE)
    assert row.impact_first_order == pytest.approx(slope, rel=2e-3, abs=1e-8)
    moved = moved_outputs(model, "inner", ids)
    spread = (p * moved.square()).sum(-1) - (p * moved).sum(-1).square()
    exact = 0.5 * float(spread[targets >= 0].mean())
    assert row.impact_second_order == pytest.approx(exact, rel=0.2)


def test_losses_of_different_weight_need_the_scale(record_run, linear_effect):
    model, x = Trunk(2), rows_of(8, 39)
    y = coins(torch.full((39, 2), 0.3), 9)

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z, y = m(x), y.to(x.dtype)
        each = F.binary_cross_entropy_with_logits
        return each(z[:, 0], y[:, 0]) + 0.2 * each(z[:, 1], y[:, 1])

    run = record_run(model, lambda _: 8 * loss(model, x, y), recipes=(RECIPE,), name="unknown")
    row = run.error("inner#0:fwd", RECIPE)
    assert row.impact_status == "unknown" and "loss_scale" in row.impact_reason
    said = {"loss_scale": 8.0}
    run = record_run(model, lambda _: 8 * loss(model, x, y), said=said, recipes=(RECIPE,))
    row = run.error("inner#0:fwd", RECIPE)
    slope = linear_effect(model, "inner", (x, y), loss, RECIPE)
    assert row.impact_first_order == pytest.approx(slope, rel=1e-3, abs=1e-8)


@pytest.fixture
def train_step() -> Callable[..., None]:
    """Return a function that makes one optimizer step of micro-batches under a scaler."""

    def run(recorder, model, optimizer, batches, *, scale: float | None, **said) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        optimizer.zero_grad()
        for x, y in batches:
            z = model(x).squeeze(-1)
            loss = F.binary_cross_entropy_with_logits(z, y) / len(batches)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        recorder.step(**said)

    return run


@pytest.mark.parametrize("scale", [None, 2.0**13])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_scaler_and_micro_batches_change_no_unit(
    tmp_path, train_step, linear_effect, scale, micro_batches
):
    """Nothing is said but the examples of the whole step, as scripts count them."""
    model = Trunk(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = [(rows_of(50 + i, 39), coins(torch.full((39,), 0.3), i)) for i in range(4)]
    batches = batches[:micro_batches]
    with record(model, tmp_path / "run", schedule=Schedule.always(), recipes=(RECIPE,)) as recorder:
        for _ in range(2):
            train_step(
                recorder, model, optimizer, batches, scale=scale, examples=39 * micro_batches
            )
    trace = Trace.open(tmp_path / "run")
    assert not {e.kind for e in trace.manifest.events} & {"contradiction", "bad-argument"}

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(m(x).squeeze(-1), y.to(x.dtype))

    for step in trace.steps.to_pylist():
        assert step["examples"] == 39
        assert step["loss_scale"] == pytest.approx((scale or 1.0) / micro_batches)
        assert step["mean_loss"] == pytest.approx(loss(model, *batches[0]).item(), rel=1e-5)
    slope = linear_effect(model, "inner", batches[0], loss, RECIPE)
    for row in trace.errors.to_pylist():
        if row["site"] == "inner#0:fwd":
            assert row["impact_first_order"] == pytest.approx(slope, rel=2e-3, abs=1e-8)
        elif not row["site"].endswith(":fwd"):
            assert row["gradient_noise_ratio"] is not None, (row["site"], row["gradient_reason"])


def test_a_loss_that_was_not_differentiated_is_told(record_run):
    model, x = Trunk(1), rows_of(10, 39)
    y = coins(torch.full((39,), 0.3), 11)

    def loss(_: int) -> torch.Tensor:
        return 16 * F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)

    value = loss(0).item()
    for name, said in {"scaled": value, "mean": value / 16, "sum": 39 * value / 16}.items():
        run = record_run(model, loss, said={"loss": said}, recipes=(RECIPE,), name=name)
        assert "contradiction" not in run.events
        assert run.steps.loss[0] == pytest.approx(said)
    with pytest.warns(UserWarning, match=r"step\(loss=\) says"):
        run = record_run(model, loss, said={"loss": 3 * value}, recipes=(RECIPE,), name="other")
    assert "contradiction" in run.events
    assert run.steps.loss[0] == pytest.approx(3 * value)
    assert run.steps.mean_loss[0] == pytest.approx(value / 16, rel=1e-5)


def test_a_loss_of_ones_own_has_a_baseline_once_its_units_are_said(record_run):
    model, x = Trunk(1), rows_of(12, 39)
    y = coins(torch.full((39,), 0.3), 13)

    def own(_: int) -> torch.Tensor:
        z = model(x).squeeze(-1)
        return 4 * (F.softplus(z) - y * z).sum()

    run = record_run(model, own, recipes=(RECIPE,), name="unknown")
    assert pd.isna(run.steps.mean_loss[0])
    said = {"examples": 39, "reduction": "sum", "loss_scale": 4.0}
    run = record_run(model, own, said=said, recipes=(RECIPE,))
    assert run.steps.mean_loss[0] == pytest.approx(own(0).item() / (4 * 39), rel=1e-5)


def test_inputs_in_a_dataclass_tell_the_number_of_examples(record_run):
    """Rows of tokens are sampled as whole examples at the first step already."""

    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        y: torch.Tensor

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(44)
            self.inner, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

        def forward(self, batch: Batch) -> torch.Tensor:
            return self.head(torch.tanh(self.inner(batch.x)).mean(1)).squeeze(-1)

    model = Tokens()
    batch = Batch(rows_of(14, 2400).reshape(400, 6, WIDTH), coins(torch.full((400,), 0.5), 15))
    run = record_run(
        model,
        lambda _: F.binary_cross_entropy_with_logits(model(batch), batch.y),
        recipes=(RECIPE,),
        max_rows=120,
    )
    row = run.error("inner#0:fwd", RECIPE)
    assert row.sampled_rows == 6 * 120 and row.impact_status == "ok"
    assert row.impact_standard_error > 0
