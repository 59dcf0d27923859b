"""The most that FP8 could gain, against sums written by hand and an enumeration of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.harness import Ceiling, estimate
from loka_toolkit.numerics.chips import H200, MI300X
from loka_toolkit.numerics.recipes import Scaling
from loka_toolkit.numerics.roofline import cast_time_us, gemm_time_us, stream_time_us

STATIC = "e4m3/static/fast"
TOKENS, WIDTH, OUTPUTS = 16384, 2048, 1024


def ceiling_of(trace: Trace, **options: Any) -> Ceiling:
    return estimate(trace, **({"chip": "H200", "recipes": [STATIC]} | options)).ceiling


def static_cast(rows: int, columns: int, copies: int) -> float:
    return cast_time_us(rows, columns, Scaling.STATIC, H200, copies=copies)


def best_time(*, x_free: bool, g_free: bool) -> tuple[float, float]:
    """Return 16-bit time and least time of a layer, all three roles, static E4M3 or not each."""
    dims = {
        Role.FWD: (TOKENS, OUTPUTS, WIDTH),
        Role.DGRAD: (TOKENS, WIDTH, OUTPUTS),
        Role.WGRAD: (OUTPUTS, WIDTH, TOKENS),
    }
    users = {
        "x": (Role.FWD, Role.WGRAD),
        "w": (Role.FWD, Role.DGRAD),
        "g": (Role.DGRAD, Role.WGRAD),
    }
    sizes = {"x": (TOKENS, WIDTH), "w": (OUTPUTS, WIDTH), "g": (TOKENS, OUTPUTS)}
    free = {"x": x_free, "g": g_free, "w": False}
    found = []
    for fp8 in itertools.product((False, True), repeat=3):
        routed = {role for role, yes in zip(dims, fp8, strict=True) if yes}
        time = sum(
            gemm_time_us(1, *dims[role], STATIC if role in routed else "bf16", H200)
            for role in dims
        )
        for operand, roles in users.items():
            copies = len(routed & set(roles))
            if copies and not free[operand]:
                time += static_cast(*sizes[operand], copies)
        found.append(time)
    return found[0], min(found)


@pytest.fixture
def large_trace(writer: Any) -> Trace:
    writer.linear("first", TOKENS, 64, 64, roles=("fwd", "wgrad"))
    writer.linear("large", TOKENS, 64, 64)
    for site in writer.sites:
        dims = {
            "fwd": (TOKENS, OUTPUTS, WIDTH),
            "dgrad": (TOKENS, WIDTH, OUTPUTS),
            "wgrad": (OUTPUTS, WIDTH, TOKENS),
        }[site["role"]]
        site.update(dict(zip("mnk", dims, strict=True)))
    return writer.write()


def test_a_layer_takes_the_roles_that_save_most_with_each_cast_charged_once(
    large_trace: Trace,
) -> None:
    layers = {layer.layer: layer for layer in ceiling_of(large_trace).layers}
    base, alone = best_time(x_free=False, g_free=False)
    _, fused = best_time(x_free=True, g_free=True)
    found = layers["large#0"]
    assert found.baseline_us == pytest.approx(base)
    assert found.standalone_us == pytest.approx(alone)
    assert found.fused_us == pytest.approx(fused)
    assert base > 1.2 * alone > 1.2 * fused
    assert found.fused == {"fwd": STATIC, "dgrad": STATIC, "wgrad": STATIC}
    assert found.roles["fwd"] == f"1x{TOKENS}x{OUTPUTS}x{WIDTH}"


def test_the_input_of_a_first_layer_is_cast_stand_alone(large_trace: Trace) -> None:
    layers = {layer.layer: layer for layer in ceiling_of(large_trace).layers}
    fwd = gemm_time_us(1, TOKENS, OUTPUTS, WIDTH, STATIC, H200)
    wgrad = gemm_time_us(1, OUTPUTS, WIDTH, TOKENS, STATIC, H200)
    casts = static_cast(TOKENS, WIDTH, 2) + static_cast(OUTPUTS, WIDTH, 1)
    found = layers["first#0"]
    assert found.fused == {"fwd": STATIC, "wgrad": STATIC}
    assert found.fused_us == pytest.approx(fwd + wgrad + casts)
    assert found.standalone_us == pytest.approx(
        fwd + wgrad + casts + static_cast(TOKENS, OUTPUTS, 1)
    )


def test_scales_per_row_are_cast_for_each_layout_and_never_fused(large_trace: Trace) -> None:
    name = "e4m3/rowwise/fast"
    layers = {layer.layer: layer for layer in ceiling_of(large_trace, recipes=[name]).layers}
    found = layers["large#0"]
    assert found.fused_us == found.standalone_us < found.baseline_us
    assert set(found.fused) == {"fwd", "dgrad"}  # wgrad would need two casts more
    casts = sum(
        cast_time_us(rows, columns, Scaling.ROWWISE, H200)
        for rows, columns in (
            (TOKENS, WIDTH),
            (OUTPUTS, WIDTH),
            (OUTPUTS, WIDTH),
            (TOKENS, OUTPUTS),
        )
    )
    products = sum(
        gemm_time_us(1, *map(int, dims.split("x")[1:]), found.fused.get(role, "bf16"), H200)
        for role, dims in found.roles.items()
    )
    assert found.standalone_us == pytest.approx(products + casts)


def test_executions_norms_and_biases(writer: Any) -> None:
    """Twice in forward (recomputed), once in backward; a norm behind it and a bias."""
    writer.linear("l", 512, 64, 64)
    writer.sites[0].update(executions=2, norm_after="norm", op="aten.addmm.default")
    (found,) = ceiling_of(writer.write()).layers
    products = [gemm_time_us(1, *dims, "bf16", H200) for dims in ((512, 64, 64), (64, 64, 512))]
    assert found.baseline_us == pytest.approx(3 * products[0] + products[1])
    size = 2 * 512 * 64
    passes = stream_time_us(size, size, H200) + stream_time_us(size, 0, H200)
    assert found.removed_us == pytest.approx(2 * passes)


def test_small_layers_stay_as_they_are_and_empty_ones_take_no_time(
    new_writer: Callable[[str, int], Any],
) -> None:
    writer = new_writer("small", 1)
    writer.linear("head", 512, 64, 1)
    (found,) = ceiling_of(writer.write()).layers
    assert found.standalone == {} and found.standalone_us == found.baseline_us
    writer = new_writer("empty", 2)
    writer.linear("none", 0, 8, 8, roles=("fwd", "dgrad"))
    empty = ceiling_of(writer.write())
    assert empty.baseline_us == 0.0
    assert [gain.gemms for gain in empty.gains().values()] == [1.0, 1.0, 1.0]


def test_the_whole_step_obeys_amdahl(large_trace: Trace) -> None:
    gains = ceiling_of(large_trace, step_ms=10.0).gains()
    for gain in gains.values():
        assert gain.step == pytest.approx(1 / (1 - gain.saved_us / 1e3 / 10.0))
    assert 1 < gains["stand-alone casts"].step < gains["fused casts"].step < 1.2
    assert all(gain.step is None for gain in ceiling_of(large_trace).gains().values())


@pytest.mark.parametrize("step_ms", [0.0, -1.0, 0.1, float("nan")])
def test_a_step_shorter_than_its_products_is_refused(large_trace: Trace, step_ms: float) -> None:
    with pytest.raises(ConfigurationError, match=r"step of .* ms .* H200"):
        ceiling_of(large_trace, step_ms=step_ms)


def test_an_amd_chip_takes_the_twins_and_others_say_what_they_lack(large_trace: Trace) -> None:
    forecast = estimate(large_trace, chip="MI300X", recipes=[STATIC, "e4m3/mxfp8/fp32"])
    assert forecast.ceiling.recipes == ("e4m3fnuz/static/fp32",)
    reasons = {row.recipe: row.reason for row in forecast.sites}
    assert reasons["e4m3fnuz/static/fp32"] is None and "fnuz" in str(reasons["e4m3/mxfp8/fp32"])
    assert forecast.ceiling.chip == MI300X.name and not forecast.ceiling.measured
    nothing = ceiling_of(large_trace, recipes=["e4m3/mxfp8/fp32", "bf16"])
    assert nothing.recipes == ()
    assert [gain.saved_us for gain in nothing.gains().values()][:2] == [0.0, 0.0]


def test_a_product_of_activations_is_counted(writer: Any) -> None:
    for role, dims in (("fwd", (64, 512, 512, 64)), ("grad_a", (64, 512, 64, 512))):
        writer.site("dot", role, dims)
    (found,) = ceiling_of(writer.write()).layers
    products = [gemm_time_us(64, *d, "bf16", H200) for d in ((512, 512, 64), (512, 64, 512))]
    assert found.baseline_us == pytest.approx(sum(products))
    fp8 = [gemm_time_us(64, *d, STATIC, H200) for d in ((512, 512, 64), (512, 64, 512))]
    assert found.fused_us == pytest.approx(sum(fp8))  # a, b and g are all produced by the model


def test_a_forecast_is_json(large_trace: Trace) -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(estimate(large_trace, chip="H200")))
    assert {layer["layer"] for layer in decoded["ceiling"]["layers"]} == {"first#0", "large#0"}
