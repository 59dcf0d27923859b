"""Drawn operands have the moments that were recorded.

Error rates: every statistical check is two-sided at 1e-4 per statistic, Bonferroni-corrected over
the entries compared, with fixed seeds; a right sampler fails one in ten thousand changes of seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from loka_toolkit.artifacts.sites import Operand
from loka_toolkit.artifacts.trace import AMAX_QUANTILES, Trace
from loka_toolkit.errors import ReplayError
from loka_toolkit.harness.features import FeatureMoments, pooled
from loka_toolkit.harness.inputs import InputDrawer
from loka_toolkit.harness.moments import MomentsOfTrace
from loka_toolkit.harness.normal import (
    NormalSampler,
    covariance_factor,
    last_interval_power,
    norm_at,
)
from loka_toolkit.harness.workloads import workloads_of

CPU = torch.device("cpu")
LEVEL = 1e-4


def moments(
    mean: np.ndarray, covariance: np.ndarray, zero_share: float = 0.0, norms: Any = ()
) -> FeatureMoments:
    return FeatureMoments(
        1000,
        np.asarray(mean, float),
        np.asarray(covariance, float),
        np.asarray(norms, float),
        zero_share,
    )


def sample(found: FeatureMoments, count: int, seed: int = 1, **options: Any) -> np.ndarray:
    options.setdefault("with_norms", False)
    sampler = NormalSampler.from_features(found, CPU, **options)
    generator = torch.Generator().manual_seed(seed)
    return sampler.sample(count, generator).numpy().astype(np.float64)


def random_covariance(width: int, rank: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(width, rank)) * np.exp(2 * rng.normal(size=(width, 1)))
    return mixing @ mixing.T


@pytest.mark.parametrize("width", [1, 13, 39, 117])
def test_normal_draws_have_mean_and_covariance(width: int) -> None:
    covariance = random_covariance(width, 2 * width, seed=width)
    mean = np.random.default_rng(0).normal(size=width) * np.sqrt(np.diag(covariance))
    count = 20_000
    rows = sample(moments(mean, covariance), count)
    # Whitened with the true moments, rows must be standard normal in every direction.
    white = np.linalg.solve(np.linalg.cholesky(covariance), (rows - mean).T).T
    z = np.sqrt(count) * white.mean(axis=0)
    limit = stats.norm.isf(LEVEL / (2 * width))
    assert np.abs(z).max() < limit
    # The sample covariance of standard normals has entries of variance 2/n and 1/n.
    error = white.T @ white / count - np.eye(width)
    scaled = np.sqrt(count) * error / np.sqrt(1 + np.eye(width))
    pairs = width * (width + 1) / 2
    # The diagonal is a chi-square, whose right tail is heavier than the normal's: 10 % of room.
    assert np.abs(scaled).max() < 1.1 * stats.norm.isf(LEVEL / (2 * pairs))
    assert stats.kstest(white.ravel(), "norm").pvalue > LEVEL


def test_rank_deficient_covariance_stays_on_its_subspace() -> None:
    width, rank = 39, 5
    covariance = random_covariance(width, rank, seed=3)
    stored = covariance.astype(np.float32).astype(np.float64)
    assert np.linalg.eigvalsh(stored).min() < 0  # rounding alone makes it indefinite
    rows = sample(moments(np.zeros(width), stored), 4_000)
    deviations = np.sqrt(np.diag(covariance))
    correlated = rows / deviations
    directions = np.linalg.svd(covariance / np.outer(deviations, deviations))[0]
    outside = correlated @ directions[:, rank:]
    # Eigenvectors of a matrix stored in float32 are off by about 1e-7 over the eigenvalue gap.
    assert np.abs(outside).max() < 1e-3
    # Variances are exact: a chi-square test on each feature.
    chi = (rows**2).sum(axis=0) / np.diag(covariance)
    p = 2 * np.minimum(stats.chi2.cdf(chi, 4_000), stats.chi2.sf(chi, 4_000))
    assert p.min() > LEVEL / width


def test_unlike_magnitudes_keep_their_digits() -> None:
    """Raw counts of deviation 1e5 beside embeddings of 1e-3, correlated at 0.6."""
    correlation = np.full((4, 4), 0.6) + 0.4 * np.eye(4)
    deviation = np.array([1e5, 1e5, 1e-3, 1e-3])
    covariance = correlation * np.outer(deviation, deviation)
    factor = covariance_factor(covariance, CPU).to(torch.float64).numpy()
    np.testing.assert_allclose(factor @ factor.T, covariance, rtol=1e-5)


def test_a_feature_without_variance_is_its_mean() -> None:
    covariance = np.diag([1.0, 0.0, 4.0])
    rows = sample(moments(np.array([0.0, 3.5, 1.0]), covariance), 100)
    assert (rows[:, 1] == 3.5).all()
    assert rows[:, 0].std() > 0.5


def test_a_diagonal_covariance_gives_independent_features() -> None:
    variance = np.array([1.0, 9.0, 1e-4])
    rows = sample(moments(np.zeros(3), variance), 10_000) / np.sqrt(variance)
    correlation = np.corrcoef(rows, rowvar=False)[np.triu_indices(3, 1)]
    assert np.abs(correlation).max() < stats.norm.isf(LEVEL / 6) / 100
    assert stats.kstest(rows.ravel(), "norm").pvalue > LEVEL


def test_zeros_are_reproduced_and_the_moments_kept() -> None:
    """ReLU of normals, and a feature that is never zero among them."""
    rng = np.random.default_rng(5)
    normal = rng.normal(size=(50_000, 12)) @ (np.eye(12) + 0.3 * rng.normal(size=(12, 12)))
    truth = np.maximum(normal, 0.0)
    truth[:, 4] = 2.0 + 0.01 * rng.normal(size=50_000)
    share = float((truth == 0).mean())
    found = moments(truth.mean(0), np.cov(truth, rowvar=False), share)
    rows = sample(found, 50_000)
    assert share > 0.4
    # Binomial error of the share, and standard errors of means and variances, at 1e-4 / 12.
    limit = stats.norm.isf(LEVEL / 24)
    assert abs((rows == 0).mean() - share) < limit * np.sqrt(share * (1 - share) / rows.size)
    assert (rows[:, 4] == 0).mean() < 0.01
    error = np.abs(rows.mean(0) - found.mean) / np.sqrt(found.variance / 50_000)
    assert error.max() < limit
    fourth = ((rows - rows.mean(0)) ** 4).mean(0)
    spread = np.sqrt((fourth - found.variance**2) / 50_000)
    assert (np.abs(rows.var(0) - found.variance) / spread).max() < limit
    # The Hermite series is cut after three terms, and the latent matrix made positive definite;
    # independent zeros would be off by 0.18 here.
    difference = np.corrcoef(rows, rowvar=False) - np.corrcoef(truth, rowvar=False)
    assert np.abs(difference).max() < 0.05
    # What is not zero is positive, as behind a ReLU.
    assert (np.delete(rows, 4, axis=1) >= -0.3).mean() > 0.999


def test_few_zeros_are_left_alone() -> None:
    rows = sample(moments(np.zeros(4), np.eye(4), zero_share=0.04), 1000)
    assert not (rows == 0).any()


@pytest.mark.parametrize("sigma", [0.2, 1.0, 2.0])
def test_gradient_rows_have_the_recorded_norms(sigma: float) -> None:
    """Log-normal row norms: quantiles and second moment come out as recorded."""
    rng = np.random.default_rng(11)
    width = 48
    norms = np.exp(sigma * rng.normal(size=20_000))
    direction = rng.normal(size=(20_000, width))
    rows = direction * (norms / np.linalg.norm(direction, axis=1))[:, None]
    quantiles = np.quantile(norms, AMAX_QUANTILES)
    found = moments(rows.mean(0), np.cov(rows, rowvar=False), 0.0, quantiles)
    drawn = np.linalg.norm(sample(found, 40_000, with_norms=True), axis=1)
    for level, value in zip(AMAX_QUANTILES[1:-1], quantiles[1:-1], strict=True):
        limit = stats.norm.isf(LEVEL / 10) * np.sqrt(level * (1 - level) / 40_000)
        # Norms are restored in float32: a value at the quantile may land on either side of it.
        assert (drawn <= value * (1 - 1e-6)).mean() - level < limit
        assert level - (drawn <= value * (1 + 1e-6)).mean() < limit
    assert drawn.max() <= quantiles[-1] * (1 + 1e-5)
    target = (norms**2).mean()
    error = (drawn**2).std() / np.sqrt(40_000)
    assert abs((drawn**2).mean() - target) < stats.norm.isf(LEVEL / 2) * error + 0.01 * target


def test_the_power_matches_the_second_moment() -> None:
    quantiles = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 50.0])
    for target in (12.0, 20.0, 40.0):
        power = last_interval_power(quantiles, target)
        grid = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 2_000_000
        values = norm_at(torch.from_numpy(quantiles), power, grid)
        # The exponent is found on a grid of 4,096 points per interval, by the midpoint rule.
        assert float((values**2).mean()) == pytest.approx(target, rel=1e-3)


def test_width_one_gradients_keep_both_signs() -> None:
    quantiles = np.array([0.1, 0.2, 0.4, 0.5, 0.6, 0.9, 2.0])
    rows = sample(moments(np.zeros(1), np.array([[0.35]]), 0.0, quantiles), 2000, with_norms=True)
    assert 0.05 < np.abs(rows).min() and np.abs(rows).max() <= 2.0
    assert abs((rows > 0).mean() - 0.5) < stats.norm.isf(LEVEL / 2) * 0.5 / np.sqrt(2000)


def test_pooling_ranks_equals_pooling_their_rows() -> None:
    rng = np.random.default_rng(2)
    parts = [rng.normal(i, 1 + i, size=(50 + 30 * i, 7)) for i in range(3)]
    each = [
        FeatureMoments(
            len(p),
            p.mean(0),
            np.cov(p, rowvar=False, bias=True),
            np.zeros(0),
            float((p == 0).mean()),
        )
        for p in parts
    ]
    whole = np.concatenate(parts)
    found = pooled(each)
    assert found.count == len(whole)
    np.testing.assert_allclose(found.mean, whole.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(whole, rowvar=False, bias=True), rtol=1e-10)


def test_orientation_layout_and_dtype_of_all_products(writer: Any) -> None:
    writer.linear("layer", tokens=117, width=39, outputs=13, dtype="bfloat16")
    for role, dims in {
        "fwd": (6, 10, 7, 5),
        "grad_a": (6, 10, 5, 7),
        "grad_b": (6, 5, 7, 10),
    }.items():
        writer.site("dot", role, dims, layout_a="column", layout_b="row")
    for operand, width in (("a", 5), ("b", 7)):
        writer.operand("dot#0:fwd", operand, writer.correlated(64, width))
    writer.operand("dot#0:grad_a", "g", writer.correlated(64, 7))
    trace = writer.write()
    drawer = InputDrawer(MomentsOfTrace(trace), CPU, seed=0)
    shapes = {}
    for workload in workloads_of(trace).workloads:
        draw = drawer.draw(workload, 0)
        assert draw.inputs == "moments"
        assert draw.amax_a is not None and draw.amax_b is not None
        shapes[str(workload.site)] = (tuple(draw.a.shape), tuple(draw.b.shape))
        p = workload.problem
        assert draw.a.dtype is workload.a.dtype
        assert draw.a.shape[-2:] == (p.m, p.k) and draw.b.shape[-2:] == (p.k, p.n)
        if workload.batched:
            assert draw.a.stride(-2) == 1 and draw.b.stride(-1) == 1
    assert shapes["layer#0:fwd"] == ((117, 39), (39, 13))
    assert shapes["layer#0:dgrad"] == ((117, 13), (13, 39))
    assert shapes["layer#0:wgrad"] == ((13, 117), (117, 39))
    assert shapes["dot#0:grad_b"] == ((6, 5, 10), (6, 10, 7))


def test_the_features_lie_along_the_right_dimension(writer: Any) -> None:
    """Feature i has mean 100 i: in every product it must stand where the convention says."""
    writer.site("l", "fwd", (1, 20, 4, 3), weight="l.weight")
    writer.site("l", "wgrad", (1, 4, 3, 20), weight="l.weight")
    rng = np.random.default_rng(0)
    for operand, site, width in (("x", "fwd", 3), ("w", "fwd", 3), ("g", "wgrad", 4)):
        writer.operand(f"l#0:{site}", operand, rng.normal(100 * np.arange(width), 1, (50, width)))
    trace = writer.write()
    drawer = InputDrawer(MomentsOfTrace(trace), CPU, seed=0)
    fwd, wgrad = (drawer.draw(w, 0) for w in workloads_of(trace).workloads)
    expected = 100 * torch.arange(4.0)
    assert (fwd.a - expected[:3]).abs().max() < 10
    assert (fwd.b.mT - expected[:3]).abs().max() < 10
    assert (wgrad.b - expected[:3]).abs().max() < 10
    # A gradient's rows have recorded norms; its direction still points to the last feature.
    assert (wgrad.a.mT.argmax(dim=1) == 3).all()


def test_draws_repeat_with_the_seed_and_differ_between_draws(linear_trace: Trace) -> None:
    found = MomentsOfTrace(linear_trace)
    workload = workloads_of(linear_trace).workloads[0]

    def draw(seed: int, index: int) -> torch.Tensor:
        return InputDrawer(found, CPU, seed).draw(workload, index).a

    assert torch.equal(draw(0, 0), draw(0, 0))
    for other in (draw(0, 1), draw(1, 0)):
        assert (draw(0, 0) != other).float().mean() > 0.99


def test_missing_moments_are_said(new_writer: Callable[[str, int], Any]) -> None:
    writer = new_writer("partly", 1)
    writer.linear("a", 32, 16, 8, without_moments=("g",))
    writer.site("b", "fwd", (1, 32, 8, 16), weight="b.weight")
    writer.operand("b#0:fwd", "x", writer.correlated(64, 24))
    trace = writer.write()
    drawer = InputDrawer(MomentsOfTrace(trace), CPU, seed=0)
    draws = {str(w.site): drawer.draw(w, 0) for w in workloads_of(trace).workloads}
    assert draws["a#0:fwd"].inputs == "moments"
    dgrad = draws["a#0:dgrad"]
    assert dgrad.inputs == "moments missing for g: normal with recorded mean and variance"
    recorded = MomentsOfTrace(trace).tensor("a#0", Operand.G)
    assert recorded is not None
    # Sample variance of 256 normals: relative standard error sqrt(2 / 255).
    ratio = float(dgrad.a.double().var()) / recorded.variance
    assert abs(ratio - 1) < stats.norm.isf(LEVEL / 2) * np.sqrt(2 / 255)
    assert draws["b#0:fwd"].inputs == (
        "moments of x recorded for width 24, not 16: normal with recorded mean and variance; "
        "moments missing for w and nothing else recorded of it: unit normal"
    )


def test_non_finite_moments_are_said(writer: Any) -> None:
    writer.linear("a", 32, 16, 8)
    writer.moments[0]["covariance"][0] = float("nan")
    trace = writer.write()
    draw = InputDrawer(MomentsOfTrace(trace), CPU, seed=0).draw(workloads_of(trace).workloads[0], 0)
    assert draw.inputs.startswith("moments of x hold Inf or NaN: normal with")
    assert torch.isfinite(draw.a).all()


def test_later_flushes_win_and_ranks_are_pooled(writer: Any) -> None:
    writer.linear("a", 32, 16, 8, roles=("fwd",))
    early, late, other = (
        writer.rng.normal(i, 1, size=(rows, 16)) for i, rows in ((0, 10), (1, 100), (5, 300))
    )
    writer.moments.clear()
    for rows, rank in ((early, 0), (late, 0), (other, 1)):
        writer.operand("a#0:fwd", "x", rows, rank=rank)
    found = MomentsOfTrace(writer.write()).features("a#0", Operand.X, 16)
    assert found is not None and found.count == 400
    truth = np.concatenate([late, other])
    # Means are stored as float32.
    np.testing.assert_allclose(found.mean, truth.mean(0), rtol=1e-5)


def test_a_trace_without_moments_is_refused_with_the_next_step(writer: Any) -> None:
    writer.linear("a", 32, 16, 8)
    writer.moments.clear()
    with pytest.raises(ReplayError, match=r"holds no moments.*record again"):
        MomentsOfTrace(writer.write())


def test_gradients_are_drawn_at_the_last_loss_scale(writer: Any) -> None:
    """Moments of g are relative to the loss scale, its statistics are as training saw them."""
    writer.linear("a", 64, 16, 8)
    unscaled = MomentsOfTrace(writer.write())
    g, x = (row for row in writer.operands if row["operand"] in "gx" and row["step"] == 0)
    g, x = (g, x) if g["operand"] == "g" else (x, g)
    writer.operands.append(g | {"step": 5})
    for row, scale in zip((g, writer.operands[-1]), (256.0, 1024.0), strict=True):
        row.update({name: row[name] * scale for name in ("mean", "amax", "smallest_nonzero")})
        row["variance"] *= scale**2
        writer.step(row["step"], scale)
    trace = writer.write()
    scaled = MomentsOfTrace(trace)
    for operand, factor in ((Operand.G, 1024.0), (Operand.X, 1.0)):
        width = 8 if operand is Operand.G else 16
        amax, before = (m.amax("a#0", operand) for m in (scaled, unscaled))
        assert amax is not None and before is not None
        assert amax == pytest.approx(factor * before)
        tensor, was = (m.tensor("a#0", operand) for m in (scaled, unscaled))
        assert tensor is not None and was is not None
        assert tensor.variance == pytest.approx(factor**2 * was.variance)
        found, then = (m.features("a#0", operand, width) for m in (scaled, unscaled))
        assert found is not None and then is not None
        np.testing.assert_allclose(found.covariance, factor**2 * then.covariance)
        np.testing.assert_allclose(found.row_norm_quantiles, factor * then.row_norm_quantiles)
    workload = workloads_of(trace).workloads[1]
    drawn = [InputDrawer(m, CPU, 0).draw(workload, 0).a for m in (scaled, unscaled)]
    torch.testing.assert_close(drawn[0], 1024 * drawn[1], rtol=1e-4, atol=0)
