"""Emulated recipes: the known floors, sub-sampling, and the errors that scaling makes."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.emulation import emulate, scaled_back
from loka_toolkit.numerics.metrics import product_error
from loka_toolkit.numerics.recipes import Scaling, all_recipes, parse_recipe
from loka_toolkit.numerics.scaling import decode_scale, finite_amax, operand_scale

Draw = Callable[..., torch.Tensor]
EVERY_RECIPE = pytest.mark.parametrize("name", list(all_recipes()))
PEERS: dict[str, type] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
}
WHOLE = [name for name, recipe in all_recipes().items() if recipe.block_length is None]


def sqnr_db(a: torch.Tensor, b: torch.Tensor, name: str) -> float:
    error = product_error(a.double() @ b.double(), emulate(a, b, parse_recipe(name)))
    assert error.sqnr_db is not None
    return error.sqnr_db


@pytest.mark.parametrize(("fmt", "floor"), [("e4m3", 28.6), ("e5m2", 22.6)])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("k", [64, 512])
def test_normal_operands_reach_the_known_floor(
    fmt: str, floor: float, scaling: str, k: int, normal: Draw
) -> None:
    """28.6 and 22.6 dB: i.i.d. normal operands, exact sums, nearly whatever K is.

    96 x 80 outputs scatter by less than 0.2 dB, and where the scale falls within a binade moves the
    figure by up to 0.2 dB. A dynamic scale casts the largest element exactly; of a row of 64
    normals it holds 9 % of the energy, on either side, which is worth up to 0.4 dB more.
    """
    a, b = normal(96, k), normal(k, 80)
    exact_amax = 0.4 if (scaling, k) == ("rowwise", 64) else 0.0
    assert floor - 0.4 < sqnr_db(a, b, f"{fmt}/{scaling}/fp32") < floor + 0.4 + exact_amax


def test_rowwise_keeps_the_floor_in_small_rows_and_tensorwise_does_not(normal: Draw) -> None:
    """Rows 2**16 smaller than the rest: subnormal in E4M3, still normal in E5M2's wider range."""
    a, b = normal(96, 128), normal(128, 80)
    a[:10] *= 2.0**-16
    found = {}
    for name in ("e4m3/rowwise/fp32", "e4m3/tensorwise/fp32", "e5m2/tensorwise/fp32"):
        product = emulate(a, b, parse_recipe(name))
        small = product_error((a.double() @ b.double())[:10], product[:10]).sqnr_db
        assert small is not None
        found[name] = small
    assert found["e4m3/rowwise/fp32"] == pytest.approx(28.6, abs=0.8)
    assert found["e5m2/tensorwise/fp32"] == pytest.approx(22.6, abs=0.8)
    assert found["e4m3/tensorwise/fp32"] < 15
    assert sqnr_db(a, b, "e4m3/tensorwise/fp32") > 28  # which the tensor's own figure hides


@pytest.mark.parametrize(("fmt", "floor"), [("e4m3", 28.6), ("e5m2", 22.6)])
def test_rowwise_holds_the_floor_on_rows_of_heavy_tailed_size(
    fmt: str, floor: float, normal: Draw, heavy_tailed: Draw
) -> None:
    """One row dominates the tensor, so its own scatter shows: 80 outputs, 0.7 dB."""
    a, b = normal(96, 128) * heavy_tailed(96, 1) * 10, normal(128, 80)
    assert sqnr_db(a, b, f"{fmt}/rowwise/fp32") == pytest.approx(floor, abs=0.8)


def test_heavy_tailed_elements_keep_the_floor_and_raw_counts_break_it(
    normal: Draw, heavy_tailed: Draw
) -> None:
    a, b = heavy_tailed(96, 256), normal(256, 80)
    assert sqnr_db(a, b, "e4m3/tensorwise/fp32") > 25  # large elements carry product and precision
    a[:, 13:] *= 1e-7  # an embedding beside raw counts
    embedding = torch.zeros_like(a)
    embedding[:, 13:] = a[:, 13:]
    scale = operand_scale(
        a, parse_recipe("e4m3/tensorwise/fp32").formats[0], Scaling.TENSORWISE, "a"
    )
    lost = emulate(embedding, b, parse_recipe("e4m3/tensorwise/fp32"), scale_a=scale)
    assert (lost == 0).all()
    assert sqnr_db(a, b, "e4m3/tensorwise/fp32") > 25  # and the whole tensor looks healthy


@pytest.mark.parametrize("name", WHOLE)
def test_emulation_is_cast_multiply_and_scale_back(name: str, normal: Draw) -> None:
    """Against NumPy in float64 with ml_dtypes' casts; 2**-9 covers the 14-bit accumulators."""
    recipe = parse_recipe(name)
    a, b = normal(13, 39) * 30, normal(39, 7) * 0.01
    known = (0.25, 2.0**-14)
    at_a, at_b = (s if f.is_fp8 else 1.0 for s, f in zip(known, recipe.formats, strict=True))
    scale_a, scale_b = torch.tensor(at_a), torch.tensor(at_b)
    ours = emulate(a, b, recipe, scale_a=scale_a, scale_b=scale_b).double().numpy()
    left = _stored(a, at_a, recipe.format_a)
    right = _stored(b, at_b, recipe.format_b)
    theirs = (left @ right) * at_a * at_b
    bound = 2.0**-9 if name.endswith(("fast", "promoted-128")) else 2.0**-22
    size = (np.abs(left) @ np.abs(right)) * at_a * at_b
    assert (np.abs(ours - theirs) <= bound * size).all()


def _stored(x: torch.Tensor, scale: float, fmt: str) -> npt.NDArray[np.float64]:
    if fmt == "tf32":  # float32 without its last 13 bits, rounded half to even on integers
        bits = x.numpy().view(np.uint32).astype(np.uint64)
        bits = (bits + 0xFFF + ((bits >> np.uint64(13)) & np.uint64(1))) & np.uint64(0xFFFFE000)
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    limit = float(ml_dtypes.finfo(PEERS[fmt]).max)
    return np.clip(x.numpy() / scale, -limit, limit).astype(PEERS[fmt]).astype(np.float64)


@EVERY_RECIPE
def test_sub_sampled_outputs_are_those_of_the_full_product(name: str, heavy_tailed: Draw) -> None:
    recipe = parse_recipe(name)
    a, b = heavy_tailed(117, 130), heavy_tailed(130, 90)
    static = {
        side: decode_scale(finite_amax(x), fmt, headroom=8.0)
        for side, x, fmt in zip("ab", (a, b), recipe.formats, strict=True)
    }
    scale_a = operand_scale(a, recipe.formats[0], recipe.scaling_a, "a", static["a"])
    scale_b = operand_scale(
        b, recipe.formats[1], recipe.scaling_b, "b", static["b"], parameter=True
    )
    full = emulate(a, b, recipe, scale_a=scale_a, scale_b=scale_b)
    if not recipe.has_static_scale:
        torch.testing.assert_close(emulate(a, b, recipe, parameter=True), full, rtol=0, atol=0)
    rows, columns = [3, 116, 50], [89, 0]
    part = emulate(
        a[rows],
        b[:, columns],
        recipe,
        scale_a=scale_a[rows] if scale_a.ndim else scale_a,
        scale_b=scale_b[:, columns] if scale_b.ndim else scale_b,
    )
    torch.testing.assert_close(part, full[rows][:, columns], rtol=0, atol=0)


@EVERY_RECIPE
def test_powers_of_two_pass_through_dynamic_scales(name: str, heavy_tailed: Draw) -> None:
    recipe = parse_recipe(name)
    if recipe.has_static_scale:
        with pytest.raises(ConfigurationError, match="static_scale"):
            emulate(heavy_tailed(3, 5), heavy_tailed(5, 2), recipe)
        return
    a, b = heavy_tailed(13, 39), heavy_tailed(39, 4)
    up, down = (30, -20) if "fp16" not in name else (2, 3)  # fp16 has no scale to absorb more
    scaled = emulate(a * 2.0**up, b * 2.0**down, recipe)
    torch.testing.assert_close(scaled, emulate(a, b, recipe) * 2.0 ** (up + down), rtol=0, atol=0)


def test_shapes_dtypes_and_strides(normal: Draw) -> None:
    recipe = parse_recipe("e4m3/rowwise/fast")
    for m, n, k in ((1, 1, 1), (0, 4, 8), (13, 1, 117), (5, 3, 0)):
        assert emulate(normal(m, k), normal(k, n), recipe).shape == (m, n)
    a, b = normal(2, 13, 39), normal(2, 39, 5)
    batched = emulate(a, b, recipe)
    torch.testing.assert_close(batched[1], emulate(a[1], b[1], recipe), rtol=0, atol=0)
    half = a.bfloat16()
    torch.testing.assert_close(
        emulate(half, b, recipe), emulate(half.float(), b, recipe), rtol=0, atol=0
    )
    transposed = a[0].mT.contiguous().mT
    torch.testing.assert_close(emulate(transposed, b[0], recipe), batched[0], rtol=0, atol=0)


def test_zero_and_tiny_operands_give_finite_products(normal: Draw) -> None:
    recipe = parse_recipe("e4m3/tensorwise/fast")
    assert (emulate(torch.zeros(3, 8), normal(8, 2), recipe) == 0).all()
    tiny = emulate(torch.full((3, 8), 1e-40), normal(8, 2) * 1e30, recipe)
    assert torch.isfinite(tiny).all()


def test_an_infinite_operand_is_seen_in_the_product(normal: Draw) -> None:
    a, b = normal(4, 8), normal(8, 3)
    a[1, 2] = math.inf
    for name in ("e4m3/tensorwise/fast", "e5m2/rowwise/fp32"):
        product = emulate(a, b, parse_recipe(name))
        assert not torch.isfinite(product[1]).any()
        assert torch.isfinite(product[[0, 2, 3]]).all()


def test_two_tiny_scales_do_not_vanish_before_the_product_meets_them() -> None:
    tiny, huge = torch.tensor(1e-30), torch.tensor([[1e30], [1e25]])
    product = torch.full((2, 3), 5.0)
    expected = torch.tensor([[5.0] * 3, [5e-5] * 3])
    torch.testing.assert_close(scaled_back(product, tiny, huge), expected)
    torch.testing.assert_close(scaled_back(product * 1e30, tiny, tiny), product * 1e-30)
    large = torch.tensor(1e25)  # product * large leaves float32, product * large * small does not
    torch.testing.assert_close(scaled_back(product * 1e20, large, 1 / large), product * 1e20)
