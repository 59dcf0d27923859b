from __future__ import annotations

import math

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from loka_toolkit.artifacts import trace as tr
from loka_toolkit.artifacts.map_facts import OperandScale
from loka_toolkit.artifacts.safety_map import Criterion, Posterior, SafetyMap
from loka_toolkit.artifacts.sites import Operand
from loka_toolkit.errors import ArtifactCorruptError
from loka_toolkit.numerics.posterior import share_limit_db, share_to_db
from loka_toolkit.numerics.recipes import parse_recipe
from loka_toolkit.reporting.calibration_view import BINS, calibration
from loka_toolkit.reporting.histogram_view import Histogram, factors, histogram
from loka_toolkit.reporting.series_view import (
    MOST_POINTS,
    Series,
    Unit,
    _share,
    criteria_shown,
    impact_series,
    predictive_quantile,
    series,
)

ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MAX = {"e4m3": 448.0, "e5m2": 57344.0}


@pytest.fixture
def cell(make_map):
    return make_map().cell("query_tower.2#0:fwd", "e4m3/tensorwise/fast")


def row_of(values: np.ndarray, step: int = 0, **changes):
    finite = np.where(np.isfinite(values), values, 0.0)
    magnitudes = np.abs(finite[finite != 0])
    counts, _ = np.histogram(np.log2(magnitudes), bins=np.linspace(-80, 48, 257))
    return {
        "step": step,
        "dtype": "float32",
        "amax": float(magnitudes.max()) if magnitudes.size else None,
        "zero_share": float((values == 0).mean()),
        "nonfinite_count": int((~np.isfinite(values)).sum()),
        "histogram_log2": counts.tolist(),
        "row_amax_quantiles": np.quantile(np.abs(finite).max(1), tr.AMAX_QUANTILES).tolist(),
        "column_amax_quantiles": np.quantile(np.abs(finite).max(0), tr.AMAX_QUANTILES).tolist(),
    } | changes


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
@pytest.mark.parametrize("spread", [1.0, 4.0, 9.0])
def test_what_is_flushed_and_clipped_agrees_with_real_casts(cell, form, spread):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((500, 117)) * rng.lognormal(0, spread, (500, 117))
    scale = float(np.quantile(np.abs(x), 0.98)) / MAX[form]
    recipe = parse_recipe(f"{form}/static/fast")
    static = OperandScale("l#0", "x", 1.0, 0.1, 1.0, {form: scale}, {form: 0.5}, 40)
    found = histogram(cell, "a", Operand.X, recipe, [row_of(x)], [], static)
    assert isinstance(found, Histogram)
    assert found.fates is not None
    scaled = x / scale
    stored = np.clip(scaled, -MAX[form], MAX[form]).astype(ML_DTYPES[form]).astype(np.float64)
    smallest_normal = float(ml_dtypes.finfo(ML_DTYPES[form]).smallest_normal)
    # Each limit falls into one half-octave bin, spread evenly: at most 1 % of these elements.
    assert found.fates.flushed == pytest.approx((stored == 0).mean(), abs=0.01)
    assert found.fates.clipped == pytest.approx((np.abs(scaled) > MAX[form]).mean(), abs=0.01)
    subnormal = ((stored != 0) & (np.abs(scaled) < smallest_normal)).mean()
    assert found.fates.subnormal == pytest.approx(subnormal, abs=0.01)


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_window_spans_the_values_of_the_format(cell, form):
    finfo = ml_dtypes.finfo(ML_DTYPES[form])
    values = np.full((2, 16), 3.0)
    found = histogram(
        cell,
        "a",
        Operand.X,
        parse_recipe(f"{form}/tensorwise/fast"),
        [row_of(values)],
        [0.25],
        None,
    )
    window = found.windows[0]
    assert (window.format, window.chosen) == (form, True)
    assert 2.0**window.top == pytest.approx(0.25 * float(finfo.max), rel=1e-12)
    assert 2.0**window.normal == pytest.approx(0.25 * float(finfo.smallest_normal), rel=1e-12)
    smallest = float(finfo.smallest_subnormal)
    assert 2.0**window.subnormal == pytest.approx(0.25 * smallest, rel=1e-12)
    assert 2.0**window.flushed == pytest.approx(0.125 * smallest, rel=1e-12)
    other = found.windows[1]
    assert other.top == window.top
    assert not other.chosen


def test_shares_drawn_are_those_of_the_elements(cell):
    rng = np.random.default_rng(2)
    steps = [row_of(rng.standard_cauchy((64, 39)), step) for step in range(5)]
    found = histogram(cell, "a", Operand.X, None, steps, [], None)
    total = np.sum([row["histogram_log2"] for row in steps], axis=0)
    drawn = {found.edges_from + 0.5 * i: share for i, share in enumerate(found.shares) if share > 0}
    expected = {-80 + i / 2: n / total.sum() for i, n in enumerate(total) if n}
    # One element in a million may lie in a tail that is not drawn; there are 12,480 here.
    assert drawn.keys() == expected.keys()
    assert all(math.isclose(drawn[edge], expected[edge], rel_tol=1e-5) for edge in drawn)
    assert "not an FP8 recipe" in found.caption


def test_rowwise_window_follows_the_amax_along_the_contraction(make_map):
    safety = make_map()
    values = np.outer(2.0 ** np.arange(8), np.full(5, 1.0)) * np.array([1, 2, 4, 8, 1024.0])
    row = row_of(values)
    recipe = parse_recipe("e4m3/rowwise/fast")
    forward = histogram(
        safety.cell("head#0:fwd", "e4m3/rowwise/fast"), "a", Operand.X, recipe, [row], [], None
    )
    assert forward.windows[0].top == pytest.approx(math.log2(np.median(np.abs(values).max(1))))
    assert "per row" in forward.caption
    wgrad = histogram(
        safety.cell("head#0:wgrad", "e4m3/rowwise/fast"), "b", Operand.X, recipe, [row], [], None
    )
    assert wgrad.windows[0].top == pytest.approx(math.log2(np.median(np.abs(values).max(0))))
    assert "per column" in wgrad.caption
    assert wgrad.top_spread[0] < wgrad.windows[0].top < wgrad.top_spread[1]
    assert forward.fates is None


def test_static_scale_of_a_gradient_is_in_units_of_the_loss_scale(cell):
    recipe = parse_recipe("e5m2/static/fast")
    static = OperandScale("l#0", "g", 1.0, 0.1, 8.0, {"e5m2": 2.0**-10}, {"e5m2": 0.0}, 40)
    row = row_of(np.full((4, 4), 1.0))
    args = ("a", Operand.G, recipe, [row], [], static)
    plain, scaled = histogram(cell, *args), histogram(cell, *args, loss_scale=1024.0)
    assert scaled.windows[0].top - plain.windows[0].top == pytest.approx(10)
    other = histogram(cell, "a", Operand.X, recipe, [row], [], static, 1024.0)
    assert other.windows[0].top == plain.windows[0].top


def test_nothing_to_draw_is_said(cell):
    recipe = parse_recipe("e4m3/tensorwise/fast")
    assert "no statistics" in histogram(cell, "a", Operand.X, recipe, [], [], None)
    zeros = row_of(np.zeros((4, 13)))
    assert "no non-zero" in histogram(cell, "a", Operand.X, recipe, [zeros], [], None)
    with pytest.raises(ArtifactCorruptError, match="3 bins"):
        bad = row_of(np.ones((4, 13)), histogram_log2=[1, 2, 3])
        histogram(cell, "a", Operand.X, recipe, [bad], [], None)


def test_unusable_scales_draw_no_window(cell):
    row = row_of(np.ones((4, 13)), row_amax_quantiles=[0.0] * 7, amax=None)
    for name in ("e4m3/rowwise/fast", "e4m3/static/fast", "e4m3/tensorwise/fast"):
        found = histogram(cell, "a", Operand.X, parse_recipe(name), [row], [math.inf, 0.0], None)
        assert found.windows == ()
        assert "No window is drawn" in found.caption


def test_nonfinite_elements_are_counted_in_the_caption(cell):
    values = np.ones((4, 13))
    values[0, :3] = [np.nan, np.inf, -np.inf]
    found = histogram(cell, "a", Operand.X, None, [row_of(values, nonfinite_count=3)], [], None)
    assert "3 Inf or NaN elements" in found.caption


def test_factors_follow_the_role(make_map):
    safety = make_map()
    one = safety.cells[0]
    assert factors(one) == (Operand.X, Operand.W)
    assert factors(msgspec.structs.replace(one, weight=None)) == (Operand.A, Operand.B)
    assert factors(msgspec.structs.replace(one, role="grad_b", weight=None)) == (
        Operand.A,
        Operand.G,
    )
    assert factors(msgspec.structs.replace(one, role="<odd>")) is None


posteriors = st.builds(
    Posterior,
    mu=st.floats(-20, 60),
    kappa=st.floats(0.5, 200),
    alpha=st.floats(2.5, 100),
    beta=st.floats(0.1, 100),
    steps=st.just(10.0),
    outlying_steps=st.just(0),
    limit=st.just(20.0),
)


@given(posteriors)
def test_predictive_is_symmetric_and_as_wide_as_its_variance(posterior):
    low, middle, high = (predictive_quantile(posterior, q) for q in (0.05, 0.5, 0.95))
    assert middle == pytest.approx(posterior.mu)
    assert high - middle == pytest.approx(middle - low)
    # The variance of the next value is E[sigma^2] (1 + 1/kappa) = beta/(alpha-1) (1 + 1/kappa).
    variance = posterior.beta / (posterior.alpha - 1) * (1 + 1 / posterior.kappa)
    freedom = 2 * posterior.alpha
    unit = stats.t.ppf(0.95, freedom) / math.sqrt(freedom / (freedom - 2))
    assert high - middle == pytest.approx(unit * math.sqrt(variance))


def test_predictive_agrees_with_draws_of_the_hierarchy():
    rng = np.random.default_rng(3)
    p = Posterior(mu=25.0, kappa=4.0, alpha=3.0, beta=6.0, steps=4.0, outlying_steps=0, limit=20.0)
    variance = stats.invgamma(p.alpha, scale=p.beta).rvs(400_000, random_state=rng)
    mean = rng.normal(p.mu, np.sqrt(variance / p.kappa))
    draws = rng.normal(mean, np.sqrt(variance))
    for q in (0.05, 0.25, 0.95):
        # Monte Carlo error of a quantile of 400,000 draws is about 0.01 dB here.
        assert predictive_quantile(p, q) == pytest.approx(np.quantile(draws, q), abs=0.05)


def error_rows(values, column="sqnr_db"):
    empty = {"sqnr_db": None, "row_sqnr_db_p05": None, "saturation_share": 0.0}
    empty["underflow_share_worst_group"] = 0.0
    return [empty | {"step": 10 * i, column: v} for i, v in enumerate(values)]


def test_series_counts_what_breaks_the_limit(cell):
    found = series(cell, Criterion.SQNR, error_rows([19.9, 20.0, 20.1, None, math.nan]))
    assert isinstance(found, Series)
    assert found.values == (19.9, 20.0, 20.1)
    caption = found.caption.replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert "2 of 4 sampled steps broke the limit of 20.0 dB" in caption
    assert "1 step held Inf or NaN" in caption
    assert "1 step had no value (0/0)" in caption
    assert found.band[0] < found.band[1] < found.band[2]


def test_shares_break_the_limit_from_above(cell):
    rows = error_rows([0.0, 0.2, 0.3, 1.0], "underflow_share_worst_group")
    found = series(cell, Criterion.UNDERFLOW, rows)
    assert found.unit is Unit.SHARE
    assert found.limit == pytest.approx(0.25, rel=1e-3)
    assert "2 of 4" in found.caption
    assert 0 < found.band[0] < found.band[2] <= 1


@given(st.floats(0, 1), st.floats(1e-6, 1))
def test_shares_come_back_from_the_scale_they_are_modelled_on(share, limit):
    posterior = Posterior(0.0, 1.0, 2.0, 1.0, 1.0, 0, share_limit_db(limit))
    back = _share(float(share_to_db(share, limit)), posterior)
    assert back == pytest.approx(share, rel=1e-9, abs=1e-12)
    assert _share(posterior.limit, posterior) == pytest.approx(limit)


def test_worst_rank_of_a_step_is_drawn(cell):
    rows = error_rows([30.0, 25.0]) + error_rows([22.0, 26.0])
    assert series(cell, Criterion.SQNR, rows).values == (22.0, 25.0)
    shares = error_rows([0.1, 0.0], "saturation_share") + error_rows([0.0, 0.2], "saturation_share")
    cell = msgspec.structs.replace(cell, posteriors={"saturation": cell.posteriors["underflow"]})
    assert series(cell, Criterion.SATURATION, shares).values == (0.1, 0.2)


def test_an_exact_product_does_not_stretch_the_axis(cell):
    found = series(cell, Criterion.SQNR, error_rows([200.0, 28.0, -1e9]))
    limit = cell.posteriors["sqnr"].limit
    assert found.values == (limit + 15.0, 28.0, -20.0)
    assert "2 steps outside" in found.caption.replace("\N{NARROW NO-BREAK SPACE}", " ")


def test_many_points_are_thinned_to_the_worst_of_each_group(cell):
    rng = np.random.default_rng(4)
    values = rng.normal(28, 1, 5 * MOST_POINTS + 7)
    values[777] = 3.0
    found = series(cell, Criterion.SQNR, error_rows(values.tolist()))
    assert len(found.steps) <= MOST_POINTS
    assert min(found.values) == 3.0
    assert found.steps[found.values.index(3.0)] == 7770
    assert "The worst of each group" in found.caption
    assert list(found.steps) == sorted(found.steps)


def test_series_without_data_is_said(cell):
    assert "no errors of this site" in series(cell, Criterion.SQNR, [])
    assert "no posterior" in series(cell, Criterion.SATURATION, error_rows([1.0]))
    assert "it is not a number at every" in series(cell, Criterion.SQNR, error_rows([math.nan]))
    zero = error_rows([0.0, 0.0], "underflow_share_worst_group")
    assert "it is 0 at every" in series(cell, Criterion.UNDERFLOW, zero)
    assert "it is null (0/0) at every" in series(cell, Criterion.SQNR, error_rows([None]))


def test_binding_criterion_is_shown_beside_the_sqnr(cell):
    replace = msgspec.structs.replace
    assert criteria_shown(cell) == (Criterion.SQNR,)
    assert criteria_shown(replace(cell, binding_criterion="underflow"))[1] is Criterion.UNDERFLOW
    assert criteria_shown(replace(cell, binding_criterion="<odd>")) == (Criterion.SQNR,)
    assert criteria_shown(replace(cell, binding_criterion=None)) == (Criterion.SQNR,)


def test_calibrated_steps_are_spread_evenly(artifacts):
    found = calibration(artifacts.safety, artifacts.trace)
    assert found.values == len(artifacts.safety.cells) * 40
    # 4,320 normal draws with the sd that the posteriors speak of: 0.8 % is two standard errors of
    # the coverage; the predictive is wider than the normal by a few per cent.
    assert found.inside_half == pytest.approx(0.5, abs=0.03)
    assert found.inside_most == pytest.approx(0.9, abs=0.025)
    assert sum(found.shares) == pytest.approx(1.0, abs=1e-4)
    assert max(found.shares) < 1.5 / BINS


@pytest.mark.parametrize(("factor", "inside"), [(16.0, (0.97, 1.0)), (1 / 16, (0.2, 0.5))])
def test_a_fit_of_the_wrong_width_shows(artifacts, factor, inside):
    def widened(cell):
        one = cell.posteriors["sqnr"]
        wide = msgspec.structs.replace(one, beta=one.beta * factor)
        return msgspec.structs.replace(cell, posteriors=cell.posteriors | {"sqnr": wide})

    safety = SafetyMap(tuple(map(widened, artifacts.safety.cells)), artifacts.safety.facts)
    found = calibration(safety, artifacts.trace)
    # Four times the sd: 90 % of the prediction is 6.6 sd of the steps; a quarter: 0.41 sd, 32 %.
    assert inside[0] < found.inside_most <= inside[1]


def test_no_calibration_is_said(artifacts, make_map):
    assert "none was given" in calibration(artifacts.safety, None)
    other = make_map(modules=(("elsewhere", "Linear", (13, 117, 39)),))
    assert "none of the map's cells" in calibration(other, artifacts.trace)


def impact_rows(pairs):
    return [
        {"step": i, "impact_first_order": first, "impact_second_order": second}
        for i, (first, second) in enumerate(pairs)
    ]


def test_impact_is_relative_to_the_loss_and_the_mean_over_ranks(cell):
    rows = impact_rows([(-2e-5, 1e-5), (None, 1e-5), (math.nan, 1.0)])
    rows += impact_rows([(6e-5, 1e-5)])
    found = impact_series(cell, rows, 0.5)
    assert (found.unit, found.steps) == (Unit.LOSS, (0,))
    assert found.values[0] == pytest.approx((-1e-5 + 7e-5) / 2 / 0.5)
    assert found.band == (cell.impact_lo, cell.impact, cell.impact_hi)
    assert found.limit == cell.impact_allotment


def test_unknown_impact_is_said_and_gradients_have_none(cell):
    replace = msgspec.structs.replace
    rows = impact_rows([(1e-5, 1e-5)])
    assert "it is not known" in impact_series(cell, rows, None)
    unknown = replace(cell, impact=None, impact_reason="in-batch softmax")
    assert impact_series(unknown, rows, 0.5).endswith("in-batch softmax.")
    assert "at any sampled step" in impact_series(cell, impact_rows([(None, None)]), 0.5)
    assert impact_series(replace(cell, role="dgrad"), rows, 0.5) is None
    assert impact_series(cell, [], 0.5) is None
