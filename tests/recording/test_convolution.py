"""Convolutions as products: the geometry against PyTorch, the errors against direct convolution."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.recipes import parse_recipe
from loka_toolkit.recording import convolution_calls
from loka_toolkit.recording.convolution_calls import convolution_of

RECIPE = "e4m3/tensorwise/fp32"


@st.composite
def convolutions(draw):
    """An nn.ConvNd or nn.ConvTransposeNd of odd sizes, and an input for it."""
    dims = draw(st.integers(1, 3))
    is_transposed = draw(st.booleans())
    groups = draw(st.integers(1, 3))
    channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 3))
    kernel, stride, padding, dilation = (
        tuple(draw(st.integers(low, high)) for _ in range(dims))
        for low, high in ((1, 3), (1, 2), (0, 1), (1, 2))
    )
    kind = getattr(nn, f"Conv{'Transpose' if is_transposed else ''}{dims}d")
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if is_transposed:
        options["output_padding"] = tuple(draw(st.integers(0, s - 1)) for s in stride)
    torch.manual_seed(draw(st.integers(0, 99)))
    layer = kind(*channels, kernel, bias=False, **options).double()
    size = [draw(st.integers(5, 8)) for _ in range(dims)]
    return layer, torch.randn(draw(st.integers(1, 3)), channels[0], *size, dtype=torch.float64)


def call_of(layer: nn.Module, x: torch.Tensor):
    out = layer(x).detach()
    transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
    args = (x, layer.weight.detach(), None, layer.stride, layer.padding, layer.dilation)
    args = (*args, transposed, layer.output_padding, layer.groups)
    return convolution_of(torch.ops.aten.convolution.default, args, out), out


@given(convolutions())
@settings(max_examples=60, deadline=None)
def test_the_product_of_patches_is_the_convolution(pair):
    layer, x = pair
    call, out = call_of(layer, x)
    geometry = call.geometry
    w = geometry.weight(call.w)
    rows = geometry.plain_rows(x) if geometry.is_transposed else geometry.wide_rows(x)
    assert torch.allclose(geometry.as_output(rows @ w.mT), out, atol=1e-12)
    # The gradients that PyTorch computes, from the same matrices.
    g = torch.randn_like(out)
    x_gradient, w_gradient = torch.autograd.grad(layer(x.requires_grad_()), [x, layer.weight], g)
    wide_g, plain = (geometry.wide_rows, geometry.plain_rows)
    g_rows = wide_g(g) if geometry.is_transposed else plain(g)
    assert torch.allclose(geometry.weight(w_gradient), g_rows.mT @ rows, atol=1e-10)
    dgrad = g_rows @ w
    if geometry.is_transposed:
        back = geometry.plain_rows(x_gradient)
        assert torch.allclose(dgrad, back, atol=1e-10)


@given(convolutions(), st.data())
@settings(max_examples=40, deadline=None)
def test_parts_of_the_patches_are_those_of_all_of_them(pair, data):
    layer, x = pair
    call, out = call_of(layer, x)
    geometry = call.geometry
    wide = out if geometry.is_transposed else x
    whole = geometry.wide_rows(wide)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, geometry.tokens - 1), min_size=1)))
    columns = torch.tensor(data.draw(st.lists(st.integers(0, geometry.wide_width - 1), min_size=1)))
    assert torch.equal(geometry.wide_rows(wide, rows), whole[..., rows, :])
    assert torch.equal(geometry.wide_columns(wide, columns), whole[..., :, columns])
    row, column = geometry.largest(wide)
    assert whole[..., row, :].abs().max() == whole.abs().max()
    assert whole[..., :, column].abs().max() == whole.abs().max()


class Convolved(nn.Module):
    """Heavy tails into a convolution with groups, stride, padding and dilation."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(6, 4, 3, stride=2, padding=1, dilation=2, groups=groups)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolution(x).tanh().mean(-1)).squeeze(-1)


def loss_of(model, x, y):
    return F.binary_cross_entropy_with_logits(model(x), y)


@pytest.fixture
def heavy():
    torch.manual_seed(1)
    return torch.randn(39, 6, 13) ** 3, (torch.rand(39) < 0.3).float()


def decoded(x: torch.Tensor) -> torch.Tensor:
    """Cast to e4m3 with one scale and back, by multiplying with a unit matrix."""
    flat = x.reshape(1, -1)
    return emulate(flat.mT, torch.ones(1, 1), parse_recipe(RECIPE)).reshape(x.shape).double()


def test_errors_are_those_of_direct_convolutions(record_run, heavy):
    x, y = heavy
    x.requires_grad_()
    model = Convolved()
    run = record_run(model, lambda _: loss_of(model, x, y), recipes=(RECIPE,), max_rows=1000)
    sites = run.sites.set_index("site")
    dims = {
        role: tuple(sites.loc[f"convolution#0:{role}", ["batch", "m", "n", "k"]])
        for role in ("fwd", "dgrad", "wgrad")
    }
    tokens = 39 * 6
    assert dims == {
        "fwd": (2, tokens, 2, 9),
        "dgrad": (2, tokens, 9, 2),
        "wgrad": (2, 2, 9, tokens),
    }
    assert set(sites.loc[[f"convolution#0:{r}" for r in dims], "weight"]) == {"convolution.weight"}
    assert not sites.loc["convolution#0:fwd"].dispatchable
    assert "convolution" in sites.loc["convolution#0:fwd"].not_dispatchable_reason
    assert sites.loc["convolution#0:fwd"].flops == 2 * 2 * tokens * 2 * 9
    assert run.steps.gemm_flops_not_judged[0] == run.steps.gemm_flops_unseen[0] == 0

    w = model.convolution.weight.detach()
    options = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
    out = F.conv1d(x, w, model.convolution.bias, **options).detach().requires_grad_()
    F.binary_cross_entropy_with_logits(model.head(out.tanh().mean(-1)).squeeze(-1), y).backward()
    g = out.grad
    ones = torch.ones_like(w)
    (reached,) = torch.autograd.grad(F.conv1d(x, ones, **options).sum(), x)
    assert bool((reached == 0).any())  # the stride skips elements, which are in no patch
    read = torch.where(reached == 0, 0.0, x.detach())
    plain, low = ({"x": f(read), "w": f(w), "g": f(g)} for f in (torch.Tensor.double, decoded))

    def products(t):
        fwd = F.conv1d(t["x"], t["w"], **options)
        # The products of dgrad before overlapping patches are added up.
        g, w = t["g"].unflatten(1, (2, 2)), t["w"].unflatten(0, (2, 2))
        dgrad = torch.einsum("ngop,goik->gnpik", g, w)
        wgrad = torch.nn.grad.conv1d_weight(t["x"], w.flatten(0, 1).shape, t["g"], **options)
        return {"fwd": fwd, "dgrad": dgrad, "wgrad": wgrad}

    exact, rough = products(plain), products(low)
    for role, true in exact.items():
        expected = float((rough[role] - true).norm() / true.norm())
        row = run.error(f"convolution#0:{role}", RECIPE)
        assert row.relative_frobenius == pytest.approx(expected, rel=1e-3), role


def test_impact_of_a_convolution_is_the_derivative_of_the_loss(heavy):
    from loka_toolkit.recording import verify_impact

    for groups in (1, 2):
        checks = verify_impact(Convolved(groups), loss_of, heavy)
        chosen = [check for check in checks if check.site == "convolution#0:fwd"]
        assert all(check.status == "ok" and check.agrees for check in chosen)
        assert any(check.is_resolved for check in chosen)


class Upward(nn.Module):
    """A transposed convolution whose patches overlap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ConvTranspose1d(6, 4, 3, stride=2, padding=1)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(x).tanh().mean(-1)).squeeze(-1)


def test_impact_of_a_transposed_convolution(heavy):
    from loka_toolkit.recording import verify_impact

    checks = [c for c in verify_impact(Upward(), loss_of, heavy) if c.site == "up#0:fwd"]
    assert all(check.status == "ok" and check.agrees for check in checks)
    assert any(check.is_resolved for check in checks)


def test_large_convolutions_are_sampled_and_agree_with_whole_ones(record_run, heavy, monkeypatch):
    """Scales are those of the whole input even where few patches are made."""
    x, y = heavy
    x.requires_grad_()
    model = Convolved(groups=1)
    whole = record_run(model, lambda _: loss_of(model, x, y), recipes=(RECIPE,), name="whole")
    monkeypatch.setattr(convolution_calls, "UNFOLDED_ELEMENTS", 40 * 18)
    part = record_run(
        model, lambda _: loss_of(model, x, y), recipes=(RECIPE,), name="part", max_rows=8
    )
    for role in ("fwd", "dgrad", "wgrad"):
        one, other = (r.error(f"convolution#0:{role}", RECIPE) for r in (whole, part))
        assert other.scale_a == one.scale_a and other.scale_b == one.scale_b
        # A few dozen rows, or three columns, of an SQNR that varies by a decibel among them.
        assert other.sqnr_db == pytest.approx(one.sqnr_db, abs=2.5)
    amax = [
        r.operands.query("site == 'convolution#0:fwd' and operand == 'x'").amax.item()
        for r in (whole, part)
    ]
    assert amax[0] == amax[1]
    assert part.operands.query("operand == 'x'").numel.iloc[0] < 100 * 18
    assert part.error("convolution#0:fwd", RECIPE).impact_status == "ok"


def test_a_wgrad_over_too_many_patches_is_named_and_not_judged(record_run, heavy, monkeypatch):
    x, y = heavy
    model = Convolved(groups=1)
    monkeypatch.setattr(convolution_calls, "LARGEST_SAMPLE", 200)
    run = record_run(model, lambda _: loss_of(model, x, y), recipes=(RECIPE,))
    reasons = json.loads(run.steps.not_judged_reason[0])
    assert reasons == {convolution_calls.TOO_LARGE: 2.0 * 39 * 6 * 4 * 18}
    assert "convolution#0:wgrad" in set(run.sites.site) - set(run.errors.site)
    assert run.error("convolution#0:fwd", RECIPE).sampled_rows <= 200 // 18
