"""The routed products against a float64 truth of their own, and against the unmodified layer."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch import install, uninstall

ROLES = (Role.FWD, Role.DGRAD, Role.WGRAD)

# torch's CPU kernel sums products of FP8 values in float32 and scales at the end: with K <= 256
# terms the error against float64 stays below 256 * 2**-24 of sum |a||b|, here of the largest row.
RTOL = 1e-5


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, generator=generator)
    return normal * torch.exp(1.5 * torch.randn(*shape, generator=generator))


def run(layer: nn.Linear, x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad(set_to_none=True)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    y.backward(g)
    found = {"y": y.detach(), "x": x.grad, "w": layer.weight.grad}
    if layer.bias is not None:
        found["b"] = layer.bias.grad
    return found


def assert_close(actual: torch.Tensor, expected: np.ndarray) -> None:
    scale = np.abs(expected).max() if expected.size else 0.0
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=0, atol=RTOL * scale + 1e-30)


@pytest.mark.parametrize(("tokens", "width", "height"), [(39, 13, 117), (13, 39, 1), (1, 117, 13)])
@pytest.mark.parametrize("bias", [True, False])
def test_every_product_is_that_of_operands_cast_by_ml_dtypes(made, tokens, width, height, bias):
    torch.manual_seed(0)
    layer = nn.Linear(width, height, bias=bias)
    x, g = heavy_tailed(tokens, width), heavy_tailed(tokens, height, seed=1) * 1e-4
    w = layer.weight.detach()
    truth = {
        "y": made.ml_product(x, w.t()) + (layer.bias.detach().double().numpy() if bias else 0.0),
        "x": made.ml_product(g, w),
        "w": made.ml_product(g.t(), x),
    }
    plain = run(layer, x, g)
    model = nn.Sequential(layer)
    with install(model, made.full_table(model, tokens=tokens)) as installation:
        routed = run(layer, x, g)
        assert installation.counts().hits == {"fwd": 1, "dgrad": 1, "wgrad": 1}
    for name, expected in truth.items():
        assert_close(routed[name], expected)
    if tokens > 1:
        assert all(not torch.equal(routed[n], plain[n]) for n in truth), "FP8 left no trace"
    if bias:
        assert torch.equal(routed["b"], plain["b"])


def test_rowwise_and_mixed_recipes_are_those_of_the_entry(made):
    layer = nn.Linear(39, 26)
    x, g = heavy_tailed(52, 39), heavy_tailed(52, 26, seed=1)
    model = nn.Sequential(layer)
    table = made.table_of(
        made.entry("0", layer, Role.FWD, recipe="e4m3/rowwise/fp32"),
        made.entry("0", layer, Role.DGRAD, recipe="e5m2-e4m3/tensorwise/fp32"),
        made.entry("0", layer, Role.WGRAD, recipe="e5m2-e4m3/rowwise/fp32"),
    )
    with install(model, table):
        routed = run(layer, x, g)
    w, b = layer.weight.detach(), layer.bias.detach().double().numpy()
    assert_close(routed["y"], made.ml_product(x, w.t(), rowwise=True) + b)
    assert_close(routed["x"], made.ml_product(g, w, ("e5m2", "e4m3")))
    assert_close(routed["w"], made.ml_product(g.t(), x, ("e5m2", "e4m3"), rowwise=True))


def test_static_scales_saturate_and_follow_the_loss_scale(made):
    layer = nn.Linear(16, 24, bias=False)
    x, g = heavy_tailed(32, 16), heavy_tailed(32, 24, seed=1)
    scale_x, scale_w, scale_g = float(x.abs().max()) / 448 / 4, 2.0**-9, 2.0**-6
    recipe = "e4m3/static/fp32"
    model = nn.Sequential(layer)
    table = made.table_of(
        made.entry("0", layer, Role.FWD, recipe=recipe, scales=(scale_x, scale_w)),
        made.entry("0", layer, Role.DGRAD, recipe=recipe, scales=(scale_g, scale_w)),
        made.entry("0", layer, Role.WGRAD, recipe=recipe, scales=(scale_g, scale_x)),
    )
    w = layer.weight.detach()
    with install(model, table) as installation:
        for loss_scale in (1.0, 1024.0):
            given_as = loss_scale if loss_scale == 1.0 else torch.tensor([loss_scale])
            installation.set_loss_scale(given_as)
            routed = run(layer, x, g * loss_scale)
            scaled = scale_g * loss_scale
            assert_close(routed["y"], made.ml_product(x, w.t(), scales=(scale_x, scale_w)))
            assert_close(routed["x"], made.ml_product(g * loss_scale, w, scales=(scaled, scale_w)))
            assert_close(
                routed["w"], made.ml_product(g.t() * loss_scale, x, scales=(scaled, scale_x))
            )


@pytest.mark.parametrize("role", ROLES)
def test_one_routed_role_leaves_the_others_bit_identical(made, role):
    torch.manual_seed(0)
    layer = nn.Linear(39, 26)
    model = nn.Sequential(layer)
    output = {Role.FWD: "y", Role.DGRAD: "x", Role.WGRAD: "w"}[role]
    inputs = {
        "rows": heavy_tailed(52, 39),
        "columns": heavy_tailed(39, 52).t(),
        "three dimensions": heavy_tailed(4, 13, 39),
        "a vector": heavy_tailed(39),
    }
    for name, x in inputs.items():
        g = heavy_tailed(*x.shape[:-1], 26, seed=1)
        plain = run(layer, x, g)
        tokens = x.numel() // 39
        with install(model, made.full_table(model, (role,), tokens=tokens)) as installation:
            routed = run(layer, x, g)
            assert installation.counts().hits == {role.value: 1}
        for key in plain:
            same = torch.equal(routed[key], plain[key])
            assert same == (key != output), (name, key)


def test_unrouted_dgrad_of_a_column_major_input_keeps_the_order_of_autograd(made):
    """In bfloat16 at this size g w and (w^T g^T)^T round differently on a CPU."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 2048).bfloat16()
    model = nn.Sequential(layer)
    x, g = torch.randn(16, 64).bfloat16().t(), torch.randn(64, 2048).bfloat16()
    plain = run(layer, x, g)
    with install(model, made.full_table(model, (Role.WGRAD,), dtype="bfloat16")) as installation:
        routed = run(layer, x, g)
        assert installation.counts().hits == {"wgrad": 1}
    assert torch.equal(routed["x"], plain["x"]) and torch.equal(routed["y"], plain["y"])
    with install(model, made.full_table(model, dtype="float16")) as installation:
        missed = run(layer, x, g)
        assert not any(installation.counts().hits.values())
    assert all(torch.equal(missed[name], plain[name]) for name in plain)


class Overloads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("role", ROLES)
def test_fp8_on_a_cpu_means_that_scaled_mm_of_torch_ran(made, role):
    layer = nn.Linear(32, 48)
    model = nn.Sequential(layer)
    x = torch.randn(64, 32, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as before:
        layer(x).sum().backward()
    with (
        install(model, made.full_table(model, (role,))),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        layer(x).sum().backward()

    def calls(found, name):
        return sum(event.count for event in found.key_averages() if event.key == name)

    assert calls(profile, "aten::_scaled_mm") == 1
    assert calls(profile, "loka::gemm") == 1
    assert calls(before, "aten::_scaled_mm") == 0


def test_a_dispatch_mode_sees_the_toolkits_own_ops(made):
    layer = nn.Linear(32, 48)
    model = nn.Sequential(layer)
    with install(model, made.full_table(model)), Overloads() as mode:
        layer(torch.randn(64, 32, requires_grad=True)).sum().backward()
    assert mode.seen.count("loka.gemm.default") == 3


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_inf_and_nan_propagate(made, value):
    layer = nn.Linear(16, 24)
    model = nn.Sequential(layer)
    x, g = torch.randn(32, 16), torch.randn(32, 24)
    x[3, 5] = value
    g[7, 2] = -value
    with install(model, made.full_table(model)):
        routed = run(layer, x, g)
    assert not torch.isfinite(routed["y"][3]).any()
    assert not torch.isfinite(routed["x"][7]).any()
    assert not torch.isfinite(routed["w"][:, 5]).any() and not torch.isfinite(routed["w"][2]).any()
    rows = [i for i in range(32) if i not in (3, 7)]
    assert torch.isfinite(routed["y"][rows]).all() and torch.isfinite(routed["x"][rows]).all()


@pytest.mark.parametrize("factor", [0.0, 1e-40, 1e-30, 1e30])
def test_zero_tiny_and_huge_operands_stay_finite(made, factor):
    layer = nn.Linear(16, 24, bias=False)
    model = nn.Sequential(layer)
    x, g = torch.randn(32, 16) * factor, torch.randn(32, 24)
    with install(model, made.full_table(model)):
        routed = run(layer, x, g)
    assert all(torch.isfinite(found).all() for found in routed.values())
    if factor == 0.0:
        assert not routed["y"].any()
    elif factor == 1e-40:
        # A scale cannot fall below 2**-126, so what is left of 1e-40 is at most that large.
        assert routed["y"].abs().max() <= 16 * x.abs().max() * layer.weight.abs().max()
    else:
        assert_close(routed["y"], made.ml_product(x, layer.weight.t()))


def test_autocast_computes_in_its_own_dtype_and_returns_gradients_in_the_parameters(made):
    torch.manual_seed(0)
    layer = nn.Linear(32, 48)
    model = nn.Sequential(layer)
    x, g = torch.randn(64, 32), torch.randn(64, 48).bfloat16()

    def under_autocast(x):
        x = x.clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        y.backward(g)
        return y.detach(), x.grad, layer.weight.grad, layer.bias.grad

    plain = under_autocast(x)
    with install(model, made.full_table(model, dtype="bfloat16")) as installation:
        routed = under_autocast(x)
        assert installation.counts().hits == {"fwd": 1, "dgrad": 1, "wgrad": 1}
    assert [t.dtype for t in routed] == [t.dtype for t in plain]
    xb, wb = x.bfloat16().float(), layer.weight.detach().bfloat16().float()
    truth = made.ml_product(xb, wb.t()) + layer.bias.detach().bfloat16().double().numpy()
    # A rounding to bfloat16 is at most 2**-8 relative: the product is rounded once, its sum with
    # the bias again, and values below 4 lose at most 4 * 2**-8 where the sum cancels.
    np.testing.assert_allclose(routed[0].double().numpy(), truth, rtol=2**-8, atol=2**-6)
    np.testing.assert_allclose(
        routed[2].double().numpy(), made.ml_product(g.float().t(), xb), rtol=1.01 * 2**-8, atol=1e-5
    )
    assert torch.equal(routed[3], plain[3])
    with install(model, made.full_table(model)) as installation:  # a table for float32
        missed = under_autocast(x)
        assert installation.counts().misses == {"layout": {"fwd": 1, "dgrad": 1, "wgrad": 1}}
    assert all(torch.equal(a, b) for a, b in zip(missed, plain, strict=True))


def test_float64_is_left_alone_by_autocast_as_by_the_layer(made):
    layer = nn.Linear(32, 48).double()
    model = nn.Sequential(layer)
    x = torch.randn(64, 32, dtype=torch.float64)
    with install(model, made.full_table(model)), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.float64


@given(
    shape=st.sampled_from([(13,), (0,), (1,), (3, 13), (2, 0), (2, 3, 4), (), (39,), (117,)]),
    width=st.sampled_from([1, 13, 39]),
    height=st.sampled_from([1, 13, 117]),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    layout=st.sampled_from(["contiguous", "strided", "expanded"]),
)
@settings(max_examples=60)
def test_any_shape_has_the_shapes_counts_and_gradients_of_the_layer(
    made, shape, width, height, needs, layout
):
    needs_x, needs_w, needs_b = needs
    layer = nn.Linear(width, height)
    layer.weight.requires_grad_(needs_w)
    layer.bias.requires_grad_(needs_b)
    plain = copy.deepcopy(layer)
    x = torch.randn(*shape, width)
    if layout == "strided":
        x = torch.randn(*shape, 2 * width)[..., ::2]
    elif layout == "expanded":
        x = torch.randn(width).expand(*shape, width)
    tokens = x.numel() // width
    model = nn.Sequential(layer)
    results = []
    with install(model, made.full_table(model, tokens=max(tokens, 1))) as installation:
        for module in (layer, plain):
            leaf = x.clone().requires_grad_(needs_x)
            y = module(leaf)
            if any(needs):
                y.sum().backward()
            results.append((y, leaf.grad, module.weight.grad, module.bias.grad))
        counts = installation.counts()
    for routed, expected in zip(*results, strict=True):
        assert (routed is None) == (expected is None)
        if routed is not None:
            assert routed.shape == expected.shape and routed.dtype == expected.dtype
    y, grad_x, grad_w, grad_b = results[0]
    rows, ones = x.reshape(tokens, width), torch.ones(tokens, height)
    if tokens:
        product = made.ml_product(rows, layer.weight.t())
        assert_close(
            y.detach().reshape(tokens, height), product + layer.bias.detach().double().numpy()
        )
    if tokens and needs_x:
        assert_close(grad_x.reshape(tokens, width), made.ml_product(ones, layer.weight))
    if needs_w:
        assert_close(
            grad_w, made.ml_product(ones.t(), rows) if tokens else np.zeros((height, width))
        )
    if needs_b:
        assert torch.equal(grad_b, results[1][3])
    ran = {"fwd": 1, "dgrad": int(needs_x), "wgrad": int(needs_w)}
    if tokens:
        assert counts.hits == ran and not counts.misses
    else:
        assert not any(counts.hits.values())
        assert counts.misses == {"shape": {role: 1 for role, n in ran.items() if n}}


def test_a_ragged_batch_outside_the_interval_is_a_counted_miss(made):
    layer = nn.Linear(16, 24)
    model = nn.Sequential(layer)
    plain = copy.deepcopy(layer)
    with install(model, made.full_table(model, tokens=64)) as installation:
        for tokens, hits, misses in (
            (64, {"fwd": 1, "dgrad": 1, "wgrad": 1}, {}),
            (31, {"fwd": 2, "dgrad": 2, "wgrad": 1}, {"shape": {"wgrad": 1}}),
            (
                129,
                {"fwd": 2, "dgrad": 2, "wgrad": 1},
                {"shape": {"wgrad": 2, "fwd": 1, "dgrad": 1}},
            ),
        ):
            x = torch.randn(tokens, 16, requires_grad=True)
            y = layer(x)
            y.sum().backward()
            counts = installation.counts()
            assert counts.hits == hits and counts.misses == misses
        assert torch.equal(y, plain(x))


def test_a_kernel_that_needs_multiples_misses_other_token_counts(made):
    import dataclasses

    from loka_toolkit.kernels.torch_scaled_mm import TorchScaledMM
    from loka_toolkit.numerics.recipes import parse_recipe

    @dataclasses.dataclass(frozen=True)
    class Picky(TorchScaledMM):
        def supports(self, problem, chip):
            return None if problem.m % 16 == 0 else "M must be a multiple of 16"

    model = nn.Sequential(nn.Linear(13, 16))
    table = made.full_table(model, (Role.FWD,))
    with install(
        model, table, candidates=[Picky(parse_recipe("e4m3/tensorwise/fp32"))]
    ) as installation:
        assert "multiples of 16" in installation.sites()[0].detail
        for tokens in (32, 40, 48):
            model(torch.randn(tokens, 13))
        counts = installation.counts()
    assert counts.hits == {"fwd": 2} and counts.misses == {"shape": {"fwd": 1}}


def test_double_backward_is_refused_and_not_wrong(made):
    layer = nn.Linear(16, 24)
    model = nn.Sequential(layer)
    with install(model, made.full_table(model)):
        x = torch.randn(64, 16, requires_grad=True)
        (grad,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()


@pytest.mark.parametrize("wrong", ["width", "dtype"])
def test_bad_input_raises_what_the_layer_raises(made, wrong):
    layer = nn.Linear(16, 24)
    model = nn.Sequential(layer)
    x = torch.randn(8, 17) if wrong == "width" else torch.randn(8, 16, dtype=torch.float64)
    with pytest.raises(RuntimeError) as expected:
        layer(x)
    with install(model, made.full_table(model)), pytest.raises(RuntimeError) as actual:
        layer(x)
    assert str(actual.value) == str(expected.value)


def test_functional_use_of_the_weight_is_untouched(made):
    layer = nn.Linear(16, 24)
    model = nn.Sequential(layer)
    x = torch.randn(8, 16)
    expected = F.linear(x, layer.weight, layer.bias)
    with install(model, made.full_table(model)) as installation:
        assert torch.equal(F.linear(x, layer.weight, layer.bias), expected)
        assert not any(installation.counts().hits.values())
    uninstall_twice = pytest.raises(Exception, match="no routed module")
    with uninstall_twice:
        uninstall(model)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(39, 16), (3, 13, 16)])
def test_an_activation_in_place_may_follow(made, shape, bias):
    torch.manual_seed(0)
    in_place = nn.Sequential(nn.Linear(16, 26, bias=bias), nn.ReLU(inplace=True))
    beside = copy.deepcopy(in_place)
    beside[1].inplace = False
    x = heavy_tailed(*shape)
    found = []
    for model in (in_place, beside):
        with install(model, made.full_table(model, tokens=39)) as installation:
            y = model(x)
            y.square().sum().backward()
            assert installation.counts().hits == {"fwd": 1, "dgrad": 0, "wgrad": 1}
        found.append((y.detach(), model[0].weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
