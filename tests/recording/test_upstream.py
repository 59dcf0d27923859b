"""Errors of activations' gradients followed upstream, against float64 autograd per example."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.recipes import parse_recipe

RECIPES = ("e4m3/tensorwise/fp32", "e5m2/rowwise/fp32")
ROWS, TOKENS, WIDTH = 23, 5, 13


class Everything(nn.Module):
    """Tables, bags, tokens, products of activations and a parameter on the left."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(31)
        self.table = nn.Embedding(40, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(30, WIDTH, mode="mean")
        self.inner, self.other = nn.Linear(WIDTH, 11), nn.Linear(WIDTH, 11)
        self.left = nn.Parameter(0.4 * torch.randn(7, 11))
        self.head = nn.Linear(7, 1)
        with torch.no_grad():
            self.head.weight.mul_(3)
        self.kept: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def _keep(self, name: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self.kept[name] = (a, b, out)
        return out

    def forward(self, ids: torch.Tensor, bags: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.bag(bags, starts).unsqueeze(1)
        h = torch.tanh(self._keep("inner#0", x, self.inner.weight, self.inner(x)))
        k = F.silu(self._keep("other#0", x, self.other.weight, self.other(x)))
        turned = k.transpose(1, 2)
        scores = self._keep("(root)#0", h, turned, torch.matmul(h, turned))
        weights = torch.softmax(scores, -1)
        mixed = self._keep("(root)#1", weights, h, torch.matmul(weights, h))
        flat = mixed.reshape(-1, 11).t()
        y = self._keep("(root)#2", flat, self.left, self.left @ flat)
        y = torch.relu(y.t().reshape(-1, TOKENS, 7).mean(1))
        return self._keep("head#0", y, self.head.weight, self.head(y)).squeeze(-1)


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(32)
    ids = torch.randint(0, 40, (ROWS, TOKENS), generator=generator)
    counts = torch.randint(1, 4, (ROWS,), generator=generator)
    bags = torch.randint(0, 30, (int(counts.sum()),), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)[:-1]])
    y = (torch.rand(ROWS, generator=generator) < 0.4).float()
    return ids, bags, starts, y


def losses(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    *inputs, y = batch
    z = model(*inputs)
    return F.binary_cross_entropy_with_logits(z, y.to(z.dtype), reduction="none")


def product_error(site: str, g: torch.Tensor, a: torch.Tensor, b: torch.Tensor, recipe: str):
    """Return the error of the gradient of a factor, in that factor's shape, and which it is."""
    layer, role = site.rsplit(":", 1)
    if role == "grad_a":
        left, right, shape, which = g, b.mT, a.shape, 0
    elif role == "grad_b":
        left, right, shape, which = a.mT, g, b.shape, 1
    elif layer == "(root)#2":
        left, right, shape, which = g.t(), b, a.t().shape, 0
    else:
        left, right, shape, which = g.reshape(-1, g.shape[-1]), b, a.shape, 0
    error = emulate(left, right, parse_recipe(recipe)).double() - left.double() @ right.double()
    error = error.reshape(shape)
    return (error.t() if layer == "(root)#2" else error), which


def expected(site: str, recipe: str, batch: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Return bias and noise ratio from float64 autograd and one backward per example."""
    single = Everything()
    loss = losses(single, batch).mean()
    layer = site.rsplit(":", 1)[0]
    a, b, out = single.kept[layer]
    (g,) = torch.autograd.grad(loss, out, retain_graph=True)
    error, which = product_error(site, g, a.detach(), b.detach(), recipe)
    double = Everything().double()
    each = losses(double, batch)
    source = double.kept[layer][which]
    weights = [double.table.weight, double.bag.weight, double.left]
    weights += [double.inner.weight, double.other.weight, double.head.weight]
    change = torch.autograd.grad(
        source, weights, grad_outputs=error, retain_graph=True, allow_unused=True
    )
    reached = [i for i, c in enumerate(change) if c is not None]
    parts = [weights[i] for i in reached]
    delta = torch.cat([change[i].reshape(-1) for i in reached])
    examples = torch.stack(
        [
            torch.cat([g.reshape(-1) for g in torch.autograd.grad(term, parts, retain_graph=True)])
            for term in each / ROWS
        ]
    )
    total = examples.sum(0)
    trace = ROWS / (ROWS - 1) * float((examples - total / ROWS).square().sum())
    bias = float((delta * total).sum()) / float(total.square().sum())
    return bias, float(delta.square().sum()) / trace


SITES = (
    "inner#0:dgrad",
    "other#0:dgrad",
    "(root)#0:grad_a",
    "(root)#0:grad_b",
    "(root)#1:grad_a",
    "(root)#1:grad_b",
    "(root)#2:dgrad",
    "head#0:dgrad",
)


def test_bias_and_noise_are_those_of_float64_autograd(record_run, batch):
    model = Everything()
    run = record_run(
        model, lambda _: losses(model, batch).mean(), recipes=RECIPES, upstream_cells=99
    )
    for site in SITES:
        for recipe in RECIPES:
            bias, noise = expected(site, recipe, batch)
            row = run.error(site, recipe)
            assert pd.isna(row.gradient_reason), (site, row.gradient_reason)
            # Gradients in float32: some 1e-6 of the gradient, beside an error of 1e-2 of it.
            assert row.gradient_bias == pytest.approx(bias, rel=1e-3, abs=2e-6), (site, recipe)
            assert row.gradient_noise_ratio == pytest.approx(noise, rel=2e-3, abs=1e-12), site


def test_no_unit_of_the_loss_changes_them(record_run, batch):
    found = []
    for name, factor in (("mean", 1.0), ("scaled", 4096.0), ("micro", 0.25)):
        model = Everything()
        run = record_run(
            model,
            lambda _, m=model, f=factor: f * losses(m, batch).mean() + m.left.square().sum(),
            recipes=RECIPES,
            upstream_cells=99,
            name=name,
        )
        rows = run.errors[run.errors.site.isin(SITES)]
        found.append([*rows.gradient_bias, *rows.gradient_noise_ratio])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-9)


def test_float16_carries_errors_that_are_small(record_run, batch):
    """A gradient of 1e-6 has an error that float16 would flush; passes bring it near 1."""
    found = []
    for name, factor in (("single", 1.0), ("half", 1e-2)):
        model = Everything()

        def loss(_: int, m: nn.Module = model, n: str = name, f: float = factor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.float16, enabled=n == "half"):
                each = losses(m, batch)
            return f * each.float().mean()

        run = record_run(model, loss, recipes=RECIPES[:1], upstream_cells=99, name=name)
        rows = run.errors[run.errors.site.isin(SITES)]
        assert rows.gradient_noise_ratio.notna().all(), rows.gradient_reason.unique()
        found.append(rows.gradient_noise_ratio.to_numpy())
    # Operands in float16 round to other FP8 values here and there.
    assert ((found[1] / found[0] > 0.5) & (found[1] / found[0] < 2.0)).all()


def test_cells_take_turns(record_run, batch):
    model = Everything()
    run = record_run(
        model, lambda _: losses(model, batch).mean(), recipes=RECIPES, upstream_cells=6, steps=8
    )
    rows = run.errors[run.errors.site.isin(SITES)]
    followed = rows[rows.gradient_bias.notna()]
    assert set(followed.groupby("step").size()) == {6}
    assert set(followed.groupby(["site", "recipe"]).size()) == {3}  # 8 x 6 over 16 cells
    left_out = rows[rows.gradient_bias.isna()]
    assert left_out.gradient_reason.str.contains("turns").all()


def test_training_is_left_as_it_is(record_run, batch):
    gradients = []
    calls = []
    for cells in (0, 99):
        model = Everything()
        run = record_run(
            model,
            lambda _, m=model: losses(m, batch).mean(),
            recipes=RECIPES,
            upstream_cells=cells,
            name=f"cells{cells}",
        )
        gradients.append([p.grad for p in model.parameters()])
        calls.append(run.errors[run.errors.site.isin(SITES)].gradient_reason)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert calls[0].str.contains("upstream_cells").all() and calls[1].isna().all()


class Doubled(torch.autograd.Function):
    """Code of its own, which nobody may run twice."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def test_reasons(record_run, batch):
    model = Everything()
    run = record_run(model, lambda _: Doubled.apply(losses(model, batch)).mean(), recipes=RECIPES)
    assert run.error("head#0:dgrad", RECIPES[0]).gradient_reason.startswith("the graph holds")
    assert run.error("head#0:wgrad", RECIPES[0]).gradient_bias is not None

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.out = nn.Parameter(torch.ones(13)), nn.Linear(13, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x * self.gain).squeeze(-1)

    gained = Scaled()
    y = batch[-1]
    run = record_run(
        gained,
        lambda _: F.binary_cross_entropy_with_logits(gained(torch.ones(ROWS, 13)), y),
        recipes=RECIPES,
        name="gain",
    )
    assert "reaches no weight" in run.error("out#0:dgrad", RECIPES[0]).gradient_reason


def test_static_scales_are_those_of_the_loss_scale(record_run, batch):
    """The first recorded step knows no amax; the second one's scale of g follows the loss scale."""
    model = Everything()
    factors = (1.0, 1024.0)
    run = record_run(
        model,
        lambda step: factors[step] * losses(model, batch).mean(),
        recipes=("e4m3/static/fp32", "e4m3/tensorwise/fp32"),
        upstream_cells=99,
        steps=2,
    )
    for site in SITES:
        static = run.error(site, "e4m3/static/fp32", step=1)
        dynamic = run.error(site, "e4m3/tensorwise/fp32", step=1)
        # The same data: the scale is the dynamic one times the headroom, a power of two.
        assert static.gradient_noise_ratio == pytest.approx(
            dynamic.gradient_noise_ratio, rel=0.2, abs=1e-12
        ), site
        assert static.saturation_share == 0


def test_a_summed_loss_is_followed_alike(record_run, batch):
    model = Everything()
    run = record_run(model, lambda _: losses(model, batch).sum(), recipes=RECIPES[:1])
    row = run.error("other#0:dgrad", RECIPES[0])
    bias, noise = expected("other#0:dgrad", RECIPES[0], batch)
    assert row.gradient_bias == pytest.approx(bias, rel=1e-3, abs=2e-6)
    assert row.gradient_noise_ratio == pytest.approx(noise, rel=2e-3)


def test_noise_behind_a_batch_normalization_is_null(record_run, batch):
    torch.manual_seed(33)
    model = nn.Sequential(
        nn.Linear(WIDTH, 9), nn.Linear(9, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 1)
    )
    x = torch.randn(ROWS, WIDTH)

    def loss(_: int) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(x).squeeze(-1), batch[-1])

    run = record_run(model, loss, recipes=RECIPES, upstream_cells=99, name="training")
    for site in ("1#0:dgrad", "0#0:wgrad", "1#0:wgrad", "4#0:dgrad"):
        row = run.error(site, RECIPES[0])
        assert pd.notna(row.gradient_bias) and pd.isna(row.gradient_noise_ratio), site
        assert "batch normalization" in row.gradient_reason
    assert pd.notna(run.error("4#0:wgrad", RECIPES[0]).gradient_noise_ratio)
    model.eval()
    run = record_run(model, loss, recipes=RECIPES, upstream_cells=99, name="evaluation")
    assert run.errors[~run.errors.site.str.endswith("fwd")].gradient_noise_ratio.notna().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_follows_as_the_cpu_does(record_run, batch):
    found = []
    for device in ("cpu", "cuda"):
        model = Everything().to(device)
        moved = tuple(part.to(device) for part in batch)
        run = record_run(
            model,
            lambda _, m=model, b=moved: losses(m, b).mean(),
            recipes=RECIPES,
            upstream_cells=99,
            name=device,
        )
        rows = run.errors[run.errors.site.isin(SITES)]
        assert rows.gradient_noise_ratio.notna().all(), rows.gradient_reason.unique()
        found.append(rows.gradient_noise_ratio.to_numpy())
    # TF32 is off by default; other sums round operands to other FP8 values here and there.
    assert found[1] == pytest.approx(found[0], rel=0.05, abs=1e-12)
