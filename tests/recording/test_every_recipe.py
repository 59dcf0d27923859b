"""One trace answers for every recipe: against emulation of the full product, element by element."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Operand, Role
from loka_toolkit.numerics.blocks import contraction_block, spread
from loka_toolkit.numerics.casting import cast_events
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.recipes import Scaling, all_recipes, parse_recipe
from loka_toolkit.numerics.scaling import decode_scale, finite_amax, operand_scale
from loka_toolkit.recording.products import Factors
from loka_toolkit.recording.whatif import Sample, ScaleBook, recipe_errors

FAMILIES = (
    "e4m3/tensorwise/fast",
    "e4m3/static-rowwise/promoted-128",
    "e5m2-e4m3/rowwise-tensorwise/fast",
    "e4m3/blockwise/promoted-128",
    "e5m2-e4m3/blockwise/fp32",
    "e4m3/mxfp8/fp32",
    "e5m2-e4m3/mxfp8/fp32",
    "e4m3fnuz/rowwise/fp32",
    "e5m2fnuz-e4m3fnuz/blockwise/fp32",
    "bf16-e4m3/rowwise/fp32",
    "e5m2-fp16/static/fp32",
    "bf16-e4m3/blockwise/fp32",
    "bf16",
    "fp16",
    "tf32",
    "fp32",
)
T, I, O = 300, 140, 133  # noqa: E741  # every contraction and every output spans two ragged blocks
HEADROOM = 8.0


@functools.cache
def operands() -> dict[Operand, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def heavy(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * torch.exp(
            1.5 * torch.randn(shape, generator=generator)
        )

    return {Operand.X: heavy(T, I), Operand.W: heavy(O, I) * 0.05, Operand.G: heavy(T, O) * 1e-5}


def factors_of(role: Role) -> Factors:
    x, w, g = (operands()[o] for o in (Operand.X, Operand.W, Operand.G))
    a, b, left, right = {
        Role.FWD: (x, w.mT, False, True),
        Role.DGRAD: (g, w, False, False),
        Role.WGRAD: (g.mT, x, True, False),
    }[role]
    return Factors(role, GEMM_OPERANDS[role, True], a, b, left, right)


def book() -> ScaleBook:
    return ScaleBook({str(o): float(x.abs().max()) for o, x in operands().items()}, HEADROOM)


def full_scales(role: Role, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of the canonical factors, computed without the recorder."""
    factors, recipe = factors_of(role), parse_recipe(name)
    found = []
    for side, x, fmt, scaling in zip(
        ("a", "b"), (factors.a, factors.b), recipe.formats, recipe.scalings, strict=True
    ):
        static = decode_scale(finite_amax(x), fmt, headroom=HEADROOM)
        is_weight = side == "b" and role is not Role.WGRAD
        found.append(operand_scale(x, fmt, scaling, side, static, parameter=is_weight))  # type: ignore[arg-type]
    return found[0], found[1]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("role", [Role.FWD, Role.DGRAD, Role.WGRAD])
def test_sampled_rows_and_columns_have_the_errors_of_the_full_product(
    role: Role, name: str
) -> None:
    """Scales come from the full tensors, blocks of 128 columns of which a few are sampled too."""
    factors, recipe = factors_of(role), parse_recipe(name)
    rows, columns = torch.tensor([0, 3, 77, 127, 128, 131]), torch.tensor([1, 64, 126, 129])
    sample = Sample.of(factors, rows=rows, columns=columns, batch=None)
    (found,) = recipe_errors(factors, sample, (recipe,), book(), exhaustive=1 << 40)
    scale_a, scale_b = full_scales(role, name)
    full = emulate(factors.a, factors.b, recipe, scale_a=scale_a, scale_b=scale_b).double()
    exact = factors.a.double() @ factors.b.double()
    expected = (full - exact)[rows][:, columns]
    # The recorder sums exact accumulations in float32, the emulation in float64.
    size = (factors.a.double().abs() @ factors.b.double().abs())[rows][:, columns]
    slack = factors.a.shape[-1] * 2.0**-24
    assert ((found.error.double() - expected).abs() <= slack * size).all()
    assert found.probe_error is None
    if name != "fp32":
        assert expected.norm() > 20 * (slack * size).norm() / factors.a.shape[-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_of_products_of_activations(name: str) -> None:
    """Attention: neither factor is a parameter, so blocks are 1x128 on both sides."""
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(5, 40, 150, generator=generator).exp()
    b = torch.randn(5, 150, 130, generator=generator)
    factors = Factors(Role.FWD, GEMM_OPERANDS[Role.FWD, False], a, b)
    recipe = parse_recipe(name)
    which, rows = torch.tensor([1, 4]), torch.tensor([0, 39])
    sample = Sample.of(factors, rows=rows, columns=None, batch=which)
    static = {"a": float(a.abs().max()), "b": float(b.abs().max())}
    ours = recipe_errors(factors, sample, (recipe,), ScaleBook(static, HEADROOM), 1 << 40)[0]
    scales = [
        operand_scale(x, fmt, scaling, side, decode_scale(finite_amax(x), fmt, headroom=HEADROOM))
        for x, fmt, scaling, side in zip(
            (a, b), recipe.formats, recipe.scalings, ("a", "b"), strict=True
        )
    ]
    full = emulate(a, b, recipe, scale_a=scales[0], scale_b=scales[1]).double()
    expected = (full - a.double() @ b.double())[which][:, rows].reshape(-1, 130)
    size = (a.double().abs() @ b.double().abs())[which][:, rows].reshape(-1, 130)
    assert ((ours.error.double() - expected).abs() <= 150 * 2.0**-24 * size).all()


@pytest.mark.parametrize("name", [n for n in FAMILIES if not n.endswith("fp32") and "/" in n])
def test_probe_rows_correct_for_the_accumulator_of_blocks_too(name: str) -> None:
    """Where a sample is large, the accumulator is emulated on some rows only."""
    factors, recipe = factors_of(Role.FWD), parse_recipe(name)
    sample = Sample.of(factors, rows=None, columns=None, batch=None)
    whole = recipe_errors(factors, sample, (recipe,), book(), 1 << 40)[0]
    probed = recipe_errors(factors, sample, (recipe,), book(), 0)[0]
    assert probed.probe_rows is not None and whole.probe_rows is None
    assert probed.metrics.sqnr_db == pytest.approx(whole.metrics.sqnr_db, abs=0.1)


def test_a_run_records_them_all(record_run) -> None:  # type: ignore[no-untyped-def]
    """Every family in one recording, with scales, events and errors in their columns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(I, O), nn.Tanh(), nn.Linear(O, 1))
    x = torch.exp(2 * torch.randn(T, I))
    x[:, 128:] *= 1e-6  # beside raw counts, another block
    y = torch.rand(T, 1).round()

    def loss(_step: int) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(x), y)

    run = record_run(model, loss, steps=2, recipes=FAMILIES)
    w = model[0].weight.detach()
    exact = x.double() @ w.double().T
    for name in FAMILIES:
        recipe = parse_recipe(name)
        row = run.error("0#0:fwd", name, step=1)
        assert row.sqnr_db > (15 if recipe.format_a != "fp32" else 120)
        for column, scaling in zip(("scale_a", "scale_b"), recipe.scalings, strict=True):
            assert (row[column] == row[column]) == scaling.is_per_tensor, (name, column)
        if recipe.has_static_scale:
            continue
        scales = [
            operand_scale(v, f, s, side, parameter=side == "b")  # type: ignore[arg-type]
            for v, f, s, side in zip(
                (x, w.T), recipe.formats, recipe.scalings, ("a", "b"), strict=True
            )
        ]
        error = emulate(x, w.T, recipe, scale_a=scales[0], scale_b=scales[1]).double() - exact
        # The product is small enough to be judged whole; an accumulator's part comes from a sample.
        relative = float(error.norm() / exact.norm())
        slack = 1e-3 if name.endswith(("fast", "promoted-128")) else 1e-5
        if name != "fp32":  # whose whole error is the order of its float32 sums
            assert row.relative_frobenius == pytest.approx(relative, rel=slack), name
        events, turned = [], (scales[0], scales[1].mT if scales[1].ndim else scales[1])
        for v, f, s, scale, side in zip(
            (x, w), recipe.formats, recipe.scalings, turned, "aa", strict=True
        ):
            block = contraction_block(s, side)  # type: ignore[arg-type]
            by_element = scale if block is None else spread(scale, block, v.shape)
            events.append(cast_events(v, f, by_element))
        lost = sum(e.underflowed for e in events) / sum(e.nonzero for e in events)
        assert row.underflow_share == pytest.approx(lost)
        if recipe.scaling is not Scaling.MXFP8:
            assert row.saturation_share == max(e.saturation_share for e in events)
    flushed = run.error("0#0:fwd", "e4m3/tensorwise/fast", step=1).underflow_share_worst_group
    blocks = run.error("0#0:fwd", "e4m3/blockwise/promoted-128", step=1)
    assert flushed > 0.4 and blocks.underflow_share_worst_group < 0.1
    assert set(run.errors.recipe) == set(FAMILIES)
    assert set(FAMILIES) <= set(all_recipes())
