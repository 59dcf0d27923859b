"""Impact against central differences in float64 that know nothing of the recorder."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

RECIPES = ("e4m3/tensorwise/fast", "e5m2/rowwise/fast", "e4m3/rowwise/fp32")
LAYERS = ("0", "2", "4")


def click_model(width: int = 13) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(width, 39), nn.ReLU(inplace=True), nn.Linear(39, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def clicks(rows: int, width: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, width, generator=generator) * torch.tensor([3.0] + [0.5] * (width - 1))
    y = (torch.rand(rows, generator=generator) < 0.3).float()
    return x, y


def mean_log_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)


def test_first_order_is_the_directional_derivative(record_run, linear_effect):
    model, (x, y) = click_model(), clicks(117)
    run = record_run(model, lambda _: mean_log_loss(model, x, y), recipes=RECIPES)
    for layer in LAYERS:
        for recipe in RECIPES:
            row = run.error(f"{layer}#0:fwd", recipe)
            measured = linear_effect(model, layer, (x, y), mean_log_loss, recipe)
            # float32 gradients against float64 ones: some 1e-6 of the largest term
            assert row.impact_first_order == pytest.approx(measured, rel=1e-3, abs=1e-8)
            assert row.impact_standard_error == 0
            assert row.impact_status == "ok"


def test_second_order_closes_the_gap_to_the_replacement(record_run, linear_effect):
    model, (x, y) = click_model(), clicks(117)
    with torch.no_grad():
        model[4].weight.mul_(6)
    run = record_run(model, lambda _: mean_log_loss(model, x, y), recipes=("e5m2/tensorwise/fp32",))
    row = run.error("4#0:fwd", "e5m2/tensorwise/fp32")
    replaced = linear_effect(model, "4", (x, y), mean_log_loss, "e5m2/tensorwise/fp32", whole=True)
    first = row.impact_first_order
    # The output layer's logits are linear in the error, so only third order is left.
    assert abs(replaced - first - row.impact_second_order) < 0.2 * abs(replaced - first)


@pytest.mark.parametrize("from_logits", [True, False])
def test_sum_reduction_regularizer_and_loss_scale_change_nothing(record_run, from_logits):
    x, y = clicks(39)

    def loss(model: nn.Module, reduction: str) -> torch.Tensor:
        z = model(x).squeeze(-1)
        if from_logits:
            return F.binary_cross_entropy_with_logits(z, y, reduction=reduction)
        return F.binary_cross_entropy(torch.sigmoid(z), y, reduction=reduction)

    def regularizer(model: nn.Module) -> torch.Tensor:
        return sum(0.1 * p.square().sum() for p in model.parameters())

    variants = {
        "mean": lambda m: loss(m, "mean"),
        "sum": lambda m: loss(m, "sum") + regularizer(m),
        "scaled": lambda m: 1024.0 * loss(m, "mean"),
        "accumulated": lambda m: loss(m, "sum") / 4 + regularizer(m),
        "unreduced": lambda m: loss(m, "none").mean() * 3.0,
    }
    found = {}
    for name, make in variants.items():
        model = click_model()
        run = record_run(model, lambda _, f=make, m=model: f(m), name=name, recipes=RECIPES)
        forward = run.errors[run.errors.site.str.endswith("fwd")]
        assert set(forward.impact_status) == {"ok"}
        found[name] = forward.impact_first_order.tolist() + forward.impact_second_order.tolist()
        mean_loss = float(loss(click_model(), "mean").detach())
        assert run.steps.mean_loss[0] == pytest.approx(mean_loss, rel=1e-5)
        assert run.steps.examples[0] == 39
    for name in variants:
        # Gradients of other scales round otherwise, by some 2^-24 each.
        assert found[name] == pytest.approx(found["mean"], rel=1e-3, abs=1e-9), name


def test_explicit_units_of_a_loss_of_unknown_kind(record_run, linear_effect):
    model, (x, y) = click_model(), clicks(39)

    def own_loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x).squeeze(-1)
        return (F.softplus(z) - y * z).mean()

    said = {"examples": 39, "reduction": "sum", "loss_scale": 8.0}
    known = record_run(
        model, lambda _: own_loss(model, x, y) * 39 * 8, said=said, recipes=RECIPES, name="known"
    )
    row = known.error("2#0:fwd")
    measured = linear_effect(model, "2", (x, y), own_loss)
    assert row.impact_first_order == pytest.approx(measured, rel=1e-3, abs=1e-8)
    unknown = record_run(model, lambda _: own_loss(model, x, y), recipes=RECIPES, name="unknown")
    row = unknown.error("2#0:fwd")
    assert row.impact_status == "unknown"
    assert "step(examples=, reduction=)" in row.impact_reason
    assert row.isna()[["impact_first_order", "impact_second_order"]].all()


class Tokens(nn.Module):
    """Several tokens per example, flattened by F.linear, or transposed as in attention."""

    def __init__(self, *, transpose: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.head = nn.Linear(13, 8), nn.Linear(8, 1)
        self.transpose = transpose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.transpose:
            x = x.transpose(0, 1).contiguous()
        h = torch.tanh(self.inner(x)).mean(0 if self.transpose else 1)
        return self.head(h)


@pytest.mark.parametrize("transpose", [False, True])
def test_tokens_are_grouped_by_example(record_run, linear_effect, transpose):
    model = Tokens(transpose=transpose)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(11, 5, 13, generator=generator)
    y = (torch.rand(11, generator=generator) < 0.5).float()
    with torch.no_grad():
        model.head.weight.mul_(4)
    recipe = "e5m2/tensorwise/fp32"
    run = record_run(model, lambda _: mean_log_loss(model, x, y), recipes=(recipe,))
    row = run.error("inner#0:fwd", recipe)
    slope = linear_effect(model, "inner", (x, y), mean_log_loss, recipe)
    assert row.impact_first_order == pytest.approx(slope, rel=1e-3, abs=1e-8)

    # The Gauss-Newton term from the logits' own derivative, by float64 differences.
    double = copy.deepcopy(model).double()
    wide = x.double()
    rows = wide.transpose(0, 1).reshape(-1, 13) if transpose else wide.reshape(-1, 13)
    from loka_toolkit.numerics.emulation import emulate
    from loka_toolkit.numerics.recipes import parse_recipe

    w = model.inner.weight.detach()
    error = emulate(rows.float(), w.T, parse_recipe(recipe)).double() - rows @ w.double().T

    def logits(t: float) -> torch.Tensor:
        hook = double.inner.register_forward_hook(lambda _m, _a, o: o + t * error.reshape(o.shape))
        with torch.no_grad():
            z = double(wide).squeeze(-1)
        hook.remove()
        return z

    change = (logits(1e-4) - logits(-1e-4)) / 2e-4
    p = torch.sigmoid(logits(0.0))
    expected = float((0.5 * p * (1 - p) * change.square()).mean())
    assert row.impact_second_order == pytest.approx(expected, rel=1e-3)


def test_ragged_examples(record_run):
    """Rows of examples of unequal length; the loss is a mean over examples."""
    torch.manual_seed(5)
    model = nn.Linear(13, 1)
    of_row = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4])
    x, y = torch.randn(11, 13), torch.tensor([0.0, 1, 1, 0, 1])

    def loss(_: int) -> torch.Tensor:
        z = torch.zeros(5).index_add(0, of_row, model(x).squeeze(-1))
        return F.binary_cross_entropy_with_logits(z, y)

    recipe = "e4m3/tensorwise/fp32"
    run = record_run(model, loss, said={"examples": of_row}, recipes=(recipe,))
    row = run.error("(root)#0:fwd", recipe)
    from loka_toolkit.numerics.emulation import emulate
    from loka_toolkit.numerics.recipes import parse_recipe

    w = model.weight.detach()
    error = emulate(x, w.T, parse_recipe(recipe)).double() - x.double() @ w.double().T
    moved = torch.zeros(5, dtype=torch.double).index_add(0, of_row, error.squeeze(-1))
    z = torch.zeros(5).index_add(0, of_row, model(x).squeeze(-1)).detach().double()
    p = torch.sigmoid(z)
    assert row.impact_first_order == pytest.approx(float(((p - y) * moved).mean()), rel=1e-4)
    second = float((0.5 * p * (1 - p) * moved.square()).mean())
    assert row.impact_second_order == pytest.approx(second, rel=1e-4)


def test_sampled_examples_scale_up_within_their_standard_error(record_run, linear_effect):
    model, (x, y) = click_model(), clicks(2048)
    recipe = "e5m2/tensorwise/fp32"
    measured = linear_effect(model, "2", (x, y), mean_log_loss, recipe)
    estimates, errors = [], []
    for seed in range(12):
        run = record_run(
            model,
            lambda _: mean_log_loss(model, x, y),
            recipes=(recipe,),
            seed=seed,
            name=f"seed{seed}",
        )
        row = run.error("2#0:fwd", recipe)
        assert row.sampled_rows == 256
        estimates.append(row.impact_first_order)
        errors.append(row.impact_standard_error)
    estimate = torch.tensor(estimates, dtype=torch.double)
    error = torch.tensor(errors, dtype=torch.double)
    deviation = (estimate - measured) / error
    # 12 draws of a standard normal: |mean| < 4 / sqrt(12), and none beyond 5.
    assert abs(float(deviation.mean())) < 1.2
    assert float(deviation.abs().max()) < 5
    assert 0.4 < float(deviation.std()) < 1.8


def test_accumulator_is_part_of_a_sampled_impact(record_run, linear_effect):
    """Too many products for exhaustive emulation: the difference estimator must stay unbiased."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(1024, 64), nn.Tanh(), nn.Linear(64, 1))
    x, y = clicks(256, 1024)
    x = x.abs()  # products of one sign make truncation a bias
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.copy_(-(x @ model[0].weight.T).mean(0))
    run = record_run(
        model,
        lambda _: mean_log_loss(model, x, y),
        recipes=("e4m3/tensorwise/fast", "e4m3/tensorwise/fp32"),
    )
    fast, exact = run.error("0#0:fwd"), run.error("0#0:fwd", "e4m3/tensorwise/fp32")
    measured = linear_effect(model, "0", (x, y), mean_log_loss)
    without = linear_effect(model, "0", (x, y), mean_log_loss, "e4m3/tensorwise/fp32")
    assert exact.impact_first_order == pytest.approx(without, rel=1e-3)
    assert fast.impact_standard_error > 0
    assert abs(fast.impact_first_order - measured) < 4 * fast.impact_standard_error
    assert abs(measured - without) > 10 * fast.impact_standard_error, "the test shows nothing"


@pytest.mark.parametrize("kind", ["in-batch softmax", "all pairs", "several", "auxiliary"])
def test_no_guess_where_the_loss_is_not_separable(record_run, kind):
    torch.manual_seed(7)
    model = nn.ModuleDict({"user": nn.Linear(13, 8), "item": nn.Linear(13, 8)})
    users, items = torch.randn(9, 13), torch.randn(9, 13)
    y = (torch.rand(9) < 0.5).float()

    def loss(_: int) -> torch.Tensor:
        u, v = model["user"](users), model["item"](items)
        if kind == "in-batch softmax":
            return F.cross_entropy(u @ v.T, torch.arange(9))
        if kind == "all pairs":
            return F.binary_cross_entropy_with_logits(u @ v.T, torch.eye(9))
        score = F.binary_cross_entropy_with_logits((u * v).sum(-1), y)
        if kind == "several":
            return score + F.mse_loss(u, v)
        return score + 0.1 * (u.mean(0) - v.mean(0)).square().sum()

    coupled = kind in ("in-batch softmax", "all pairs")  # saying so does not make it separable
    said = {"examples": 9, "reduction": "mean"} if coupled else {}
    run = record_run(model, loss, said=said)
    forward = run.errors[run.errors.site.str.endswith("fwd")]
    assert set(forward.impact_status) == {"unknown"}
    assert forward.impact_first_order.isna().all() and forward.impact_second_order.isna().all()
    assert forward.impact_reason.notna().all()


def test_example_weights(record_run, linear_effect):
    model, (x, y) = click_model(), clicks(39)
    weight = torch.linspace(0.5, 2.0, 39)

    def weighted(m: nn.Module, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(m(x).squeeze(-1), y, weight=w.to(x.dtype))

    run = record_run(model, lambda _: weighted(model, x, y, weight))
    measured = linear_effect(model, "0", (x, y, weight), weighted)
    assert run.error("0#0:fwd").impact_first_order == pytest.approx(measured, rel=1e-3, abs=1e-8)

    def unreduced(_: int) -> torch.Tensor:
        terms = F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y, reduction="none")
        return (terms * weight).mean()

    unknown = record_run(model, unreduced, name="unreduced")
    assert unknown.error("0#0:fwd").impact_status == "unknown"
    assert "weighted" in unknown.error("0#0:fwd").impact_reason
    said = {"reduction": "mean", "loss_scale": 1.0}
    known = record_run(model, unreduced, said=said, name="said")
    row = known.error("0#0:fwd")
    assert row.impact_first_order == pytest.approx(measured, rel=1e-3, abs=1e-8)
    assert row.impact_second_order == pytest.approx(
        run.error("0#0:fwd").impact_second_order, rel=1e-3
    )


def test_contradictions_are_events_and_the_argument_wins(record_run):
    model, (x, y) = click_model(), clicks(39)
    with pytest.warns(UserWarning, match="says 13"):
        run = record_run(
            model,
            lambda _: mean_log_loss(model, x, y),
            said={"examples": 13, "reduction": "sum"},
        )
    assert run.steps.examples[0] == 13 and run.steps.reduction[0] == "sum"
    assert "contradiction" in run.events


def test_large_and_saturated_logits_are_beyond_validity(record_run):
    x, y = clicks(39)
    large = click_model()
    with torch.no_grad():
        large[4].weight.mul_(2000)
        large[4].bias.fill_(0.0)
    run = record_run(large, lambda _: 1.0 * mean_log_loss(large, x, y), name="large")
    row = run.error("2#0:fwd", "e5m2/tensorwise/fast")
    assert row.impact_status == "beyond-validity"


class Opaque(torch.autograd.Function):
    """A function with code of its own, which nobody may run twice."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.parametrize("opaque", [False, True])
def test_saturated_examples_are_followed_from_their_logits(record_run, linear_effect, opaque):
    """P is exactly 1 in float32: gradients vanish, on the wrong side too."""
    model, (x, y) = click_model(), clicks(39)
    with torch.no_grad():
        model[4].bias.fill_(21.0)

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = Opaque.apply(m(x)) if opaque and x.dtype == torch.float32 else m(x)
        return F.binary_cross_entropy(torch.sigmoid(z).squeeze(-1), y)

    gradients = []
    for recorded in (False, True):
        model.zero_grad()
        if recorded:
            run = record_run(model, lambda _: loss(model, x, y))
        else:
            loss(model, x, y).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    row = run.error("2#0:fwd")
    assert "saturated-examples" in run.events
    if opaque:
        assert row.impact_status == "beyond-validity" and "saturated" in row.impact_reason
        return
    # log(1 - p) has steps of 1e-7 here, so the difference must be a wide one.
    measured = linear_effect(model, "2", (x, y), loss, step=0.3)
    assert abs(measured) > 1e-6
    assert row.impact_first_order == pytest.approx(measured, rel=1e-3)
    assert row.impact_status == "ok"


def test_batch_normalization_mixes_examples(record_run, linear_effect):
    """The first order accounts for it; where examples are saturated nothing is claimed."""
    x, y = clicks(39)
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(13, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(torch.sigmoid(m(x)).squeeze(-1), y)

    run = record_run(model, lambda _: loss(model, x, y), name="plain")
    assert "examples-mix" in run.events
    measured = linear_effect(model, "0", (x, y), loss)
    row = run.error("0#0:fwd")
    assert row.impact_first_order == pytest.approx(measured, rel=1e-3, abs=1e-8)
    with torch.no_grad():
        model[3].weight.mul_(40)
    run = record_run(model, lambda _: loss(model, x, y), name="saturated")
    assert "saturated-examples" in run.events
    assert run.error("0#0:fwd").impact_status == "unknown"
    assert "rows alone" in run.error("0#0:fwd").impact_reason
    assert run.error("3#0:fwd").impact_status in ("ok", "beyond-validity")


def test_squared_error_has_its_exact_second_order(record_run, linear_effect):
    model, (x, y) = click_model(), clicks(39)

    def squared(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(m(x).squeeze(-1), y)

    run = record_run(model, lambda _: squared(model, x, y), recipes=("e5m2/tensorwise/fp32",))
    row = run.error("4#0:fwd", "e5m2/tensorwise/fp32")
    replaced = linear_effect(model, "4", (x, y), squared, "e5m2/tensorwise/fp32", whole=True)
    # The last layer's output is the prediction: first and second order are all there is.
    assert row.impact_first_order + row.impact_second_order == pytest.approx(replaced, rel=1e-4)
