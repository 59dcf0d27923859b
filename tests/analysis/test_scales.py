"""Static scales and their overflow."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from loka_toolkit.analysis.scales import (
    HEADROOMS,
    AmaxSeries,
    amax_series,
    static_scales,
)
from loka_toolkit.artifacts.sites import Operand
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.numerics.formats import E4M3, E5M2
from loka_toolkit.numerics.scaling import SMALLEST_SCALE


def series(log2: np.ndarray, operand: Operand = Operand.X, layer: str = "layer#0") -> AmaxSeries:
    return AmaxSeries(layer, operand, np.arange(len(log2)) * 100.0, log2)


def test_scale_leaves_the_headroom_it_says() -> None:
    log2 = 3.0 + 0.2 * np.random.default_rng(0).normal(size=20)
    (scale,) = static_scales((series(log2),))
    assert scale.headroom == HEADROOMS[0] == 8.0
    assert scale.amax == pytest.approx(2.0 ** log2.mean())
    for fmt in (E4M3, E5M2):
        assert scale.scale[fmt.name] * fmt.max == pytest.approx(8.0 * scale.amax)
        assert scale.overflow_probability[fmt.name] < 1e-6


def test_overflow_probability_is_that_of_a_future_step() -> None:
    """Over operands that differ in their spread, as many steps overflow as were predicted."""
    rng = np.random.default_rng(0)
    sd = np.exp(0.3 * rng.normal(size=2000)) * 2.0
    every = tuple(
        series(rng.normal(0.0, s, size=12), layer=f"layer{i}#0") for i, s in enumerate(sd)
    )
    found = static_scales(every)
    reach = np.array([np.log2(scale.amax * scale.headroom) for scale in found])
    predicted = np.mean([scale.overflow_probability["e4m3"] for scale in found])
    happens = stats.norm.sf(reach, 0.0, sd).mean()
    # The Student-t keeps a margin for spreads that vary more widely than these.
    assert happens <= predicted < 2.5 * happens


def test_wider_swings_get_more_headroom() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=30)
    found = [static_scales((series(sd * noise),))[0].headroom for sd in (0.1, 1.0, 2.0)]
    assert found == sorted(found) and found[0] < found[-1]


def test_one_step_borrows_the_spread_of_its_kind() -> None:
    rng = np.random.default_rng(0)
    others = tuple(series(rng.normal(0, 0.1, 20), layer=f"layer{i}#0") for i in range(10))
    lone = static_scales((*others, series(np.array([4.0]))))[-1]
    alone = static_scales((series(np.array([4.0])),))[0]
    assert lone.steps == alone.steps == 1
    assert lone.log2_amax_sd < alone.log2_amax_sd
    assert 0 < lone.overflow_probability["e4m3"] < alone.overflow_probability["e4m3"] < 0.5


def test_tiny_operands_get_a_scale_that_float32_holds() -> None:
    (scale,) = static_scales((series(np.full(5, -140.0)),))
    assert min(scale.scale.values()) == SMALLEST_SCALE


def test_series_follow_the_loss_scale_and_skip_what_is_not_there(simulator, tmp_path) -> None:
    site = simulator.SimulatedSite.named
    operands = {
        "step": [0, 100, 0, 100, 0, 100, 0, 0],
        "site": ["a#0:dgrad"] * 2 + ["a#0:fwd"] * 4 + ["n#0:norm", "other#0:fwd"],
        "operand": ["g", "g", "x", "x", "w", "w", "input", "x"],
        "amax": [1024.0, 4096.0, 0.0, 2.0, None, None, 7.0, 5.0],
    }
    trace = Trace.open(
        simulator.write_trace(
            tmp_path / "trace",
            [site("a#0:fwd"), site("a#0:dgrad"), site("other#0:fwd")],
            {"step": [0], "site": ["a#0:fwd"], "recipe": ["e4m3/tensorwise/fast"]},
            operands=operands,
        )
    )
    scales = {(0, 0): 1024.0, (100, 0): 2048.0}
    found = {s.operand: s for s in amax_series(trace.operands, scales, {"a#0"})}
    assert set(found) == {Operand.G, Operand.X}
    np.testing.assert_array_equal(found[Operand.G].log2_amax, [0.0, 1.0])
    np.testing.assert_array_equal(found[Operand.X].log2_amax, [1.0])


def test_a_drifting_amax_has_a_slope() -> None:
    log2 = 0.003 * np.arange(20) * 100 + 0.05 * np.random.default_rng(0).normal(size=20)
    found = series(log2)
    assert found.per_step == pytest.approx(0.003, rel=0.05)
    assert found.slope_deviations > 10
    assert series(np.array([1.0, 2.0])).slope_deviations == 0.0
