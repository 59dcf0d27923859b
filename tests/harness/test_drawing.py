"""Samplers give back what was recorded: marginals, covariances, norms, Grams, cross moments.

Error rates as in ``test_inputs``: two-sided at 1e-4 per statistic, Bonferroni-corrected, fixed
seeds; where a method is approximate, the tolerance says how far.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from loka_toolkit.harness.cross import CrossMoments, CrossSampler, inverse_second_moment
from loka_toolkit.harness.directions import DirectionSampler, direction_scales
from loka_toolkit.harness.features import FeatureMoments, decode, pooled
from loka_toolkit.harness.marginals import CopulaSampler, bin_edges, latent_correlation
from loka_toolkit.harness.spectra import SpectrumMoments, SpectrumSampler
from loka_toolkit.recording.cross import CrossMoments as RecordedCross
from loka_toolkit.recording.marginals import bins_of
from loka_toolkit.recording.moments import BatchMoments, RunningMoments
from loka_toolkit.recording.spectrum import Spectrum

CPU = torch.device("cpu")
LEVEL = 1e-4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def recorded(
    rows: np.ndarray,
    full_width: int = 1024,
    *,
    with_marginals: bool = True,
    sample_rows: int = 1,
) -> FeatureMoments:
    """Return what a trace would say of samples, as it would say it."""
    x = torch.from_numpy(np.asarray(rows, np.float32))
    running = RunningMoments(
        BatchMoments.of(x, full_width, with_marginals=with_marginals, sample_rows=sample_rows)
    )
    shape = {"sample_rows": sample_rows, "width": x.shape[1] // sample_rows}
    return decode({"operand": "x", "site": "s", **running.as_row(), **shape})


def rows_like_a_click_log(count: int, width: int, seed: int) -> np.ndarray:
    """Return embeddings, counts, ReLU outputs and constants, correlated, side by side."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(count, 1))
    z = 0.6 * common + 0.8 * rng.normal(size=(count, width))
    kinds = np.arange(width) % 4
    rows = 0.1 * z
    rows[:, kinds == 1] = np.floor(np.exp(1.5 * z[:, kinds == 1] + 1.0))
    rows[:, kinds == 2] = np.maximum(z[:, kinds == 2] - 0.3, 0.0)
    rows[:, kinds == 3] *= 1e-3
    rows[:, width - 1] = 3.5
    return rows.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("width", [1, 13, 39, 117])
def test_every_feature_is_distributed_as_recorded(width: int) -> None:
    count = 20_000
    truth = rows_like_a_click_log(count, width, seed=width)
    drawn = CopulaSampler(recorded(truth), CPU).sample(count, generator()).double().numpy()
    assert (drawn[:, width - 1] == 3.5).all()
    for feature in range(width - 1):
        ours, theirs = drawn[:, feature], truth[:, feature]
        assert ours.min() >= theirs.min() * (1 + 0.02 * np.sign(-theirs.min())) - 1e-9
        # Zeros: two binomial samples.
        share = (theirs == 0).mean()
        room = stats.norm.isf(LEVEL / width) * math.sqrt(2 * share * (1 - share) / count)
        # The grid of z has steps of 0.025: 1 % of the density at an edge.
        assert abs((ours == 0).mean() - share) <= room + 0.006
        # Quantiles of magnitudes within a third of a half octave, where values are not integers.
        if feature % 4 != 1:
            levels = [0.02, 0.25, 0.5, 0.75, 0.98]
            spread = np.quantile(theirs, 0.98) - np.quantile(theirs, 0.02)
            error = np.quantile(ours, levels) - np.quantile(theirs, levels)
            assert np.abs(error).max() < 0.06 * spread
        # Second moments decide errors; the heavy ones have sampling errors of their own.
        fourth = max(np.mean(theirs**4), np.mean(ours**4))
        noise = math.sqrt(2 * fourth / count) * stats.norm.isf(LEVEL / width)
        assert abs(np.mean(ours**2) - np.mean(theirs**2)) < noise + 0.01 * np.mean(theirs**2)
    if width > 3:
        kept = [f for f in range(width - 1)]
        difference = np.corrcoef(drawn[:, kept].T) - np.corrcoef(truth[:, kept].T)
        # Log-normal tails make sample correlations noisy; independence would be off by 0.36.
        assert np.abs(difference).max() < 0.1


def test_tails_are_those_of_the_record() -> None:
    rng = np.random.default_rng(0)
    truth = np.exp(2.2 * rng.normal(size=(50_000, 6)))
    drawn = CopulaSampler(recorded(truth), CPU).sample(50_000, generator()).double().numpy()
    levels = [0.9, 0.99, 0.999]
    ratio = np.quantile(drawn, levels, axis=0) / np.quantile(truth, levels, axis=0)
    # Order statistics of a log-normal at 0.999 of 50,000: standard error 2.2 * 1/phi * ... ~ 9 %.
    assert np.abs(np.log(ratio)).max() < 0.35
    assert drawn.max() <= truth.max() * 1.05
    assert drawn.max() >= truth.max() / 8  # a normal's largest would be 200 times smaller


def test_rows_are_constant_as_often_as_recorded_and_zero_rows_stay() -> None:
    """Softmax of scores that are all equal where a count is zero, row by row of a matrix."""
    rng = np.random.default_rng(0)
    shares = np.array([0.0, 0.2, 0.7, 1.0])
    scores = rng.normal(size=(20_000, 4, 6)) * (rng.random((20_000, 4, 1)) >= shares[:, None])
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    weights[rng.random(20_000) < 0.1] = 0.0
    moments = recorded(weights.reshape(20_000, -1), sample_rows=4)
    whole = slice(0, 24)
    sampler = CopulaSampler(moments, CPU)
    sampler.with_norms([(whole, moments.norm_quantiles)])
    before = sampler.sample(4000, generator()).unflatten(1, (4, 6))
    sampler.with_equal_rows([(whole, moments.equal_row_shares)])
    drawn = sampler.sample(4000, generator()).unflatten(1, (4, 6))
    equal = (drawn == drawn[..., :1]).all(-1) & (drawn[..., 0] != 0)
    # The threshold is itself estimated from 8,192 draws.
    error = np.sqrt(shares * (1 - shares) * 0.9 * (1 / 4000 + 1 / 8192 + 1 / 20_000))
    limit = stats.norm.isf(LEVEL / 2 / 4) * error + 0.03
    assert (np.abs(equal.double().mean(0).numpy() - 0.9 * shares) < limit).all()
    torch.testing.assert_close(drawn.mean(2), before.mean(2))
    assert torch.equal(drawn[~equal], before[~equal])


def test_no_row_becomes_constant_unless_recorded() -> None:
    rows = rows_like_a_click_log(2000, 13, seed=1)
    moments = recorded(rows)
    assert moments.equal_row_shares.tolist() == [0.0]
    plain = CopulaSampler(moments, CPU)
    told = CopulaSampler(moments, CPU).with_equal_rows([(slice(0, 13), np.zeros(1))])
    assert torch.equal(plain.sample(64, generator()), told.sample(64, generator()))


def test_a_sketched_covariance_is_drawn() -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=(4000, 5)) @ rng.normal(size=(5, 200)) + 0.5 * rng.normal(
        size=(4000, 200)
    )
    moments = recorded(truth, full_width=64)
    assert moments.covariance.ndim == 1 and moments.factors is not None
    drawn = CopulaSampler(moments, CPU).sample(20_000, generator()).double().numpy()
    found, expected = np.corrcoef(drawn.T), np.corrcoef(truth.T)
    # Standard errors of 1/sqrt(20000) and 1/sqrt(4000), 20,000 pairs; 0.03 for the sketch.
    assert (
        np.abs(found - expected).max() < 4.5 * (1 / math.sqrt(20_000) + 1 / math.sqrt(4000)) + 0.03
    )
    np.testing.assert_allclose(drawn.var(0), truth.var(0), rtol=0.12)


def test_edges_agree_with_the_recorder() -> None:
    edges = bin_edges()
    for index in (0, 5, 158, 162, 200, len(edges) - 2):
        middle = (edges[index] + edges[index + 1]) / 2
        if 0 < index < len(edges) - 2:
            assert int(bins_of(torch.tensor([middle], dtype=torch.float32))[0]) == index
    assert (np.diff(edges) >= 0).all() and edges[len(edges) // 2] == 0


def test_latent_correlations_against_closed_forms() -> None:
    """Normals: the same; log-normals of sigma s: cov = exp(s^2) (exp(s^2 rho) - 1)."""
    rng = np.random.default_rng(0)
    normal = recorded(rng.normal(size=(200_000, 2)))
    from loka_toolkit.harness.marginals import QuantileTables

    coefficients = QuantileTables(normal).coefficients()
    for rho in (-0.9, -0.3, 0.5, 0.95):
        covariance = np.array([[1.0, rho], [rho, 1.0]])
        assert latent_correlation(covariance, coefficients)[0, 1] == pytest.approx(rho, abs=0.02)
    sigma = 0.8
    skewed = recorded(np.exp(sigma * rng.normal(size=(200_000, 2))))
    coefficients = QuantileTables(skewed).coefficients()
    for rho in (-0.5, 0.4, 0.9):
        off = math.exp(sigma**2) * (math.exp(sigma**2 * rho) - 1)
        on = math.exp(sigma**2) * (math.exp(sigma**2) - 1)
        covariance = np.array([[on, off], [off, on]])
        assert latent_correlation(covariance, coefficients)[0, 1] == pytest.approx(rho, abs=0.04)


@pytest.mark.parametrize("rank", [1, 2, 40])
def test_gradients_have_the_recorded_second_moment_and_norms(rank: int) -> None:
    """Even where one direction holds nearly all of it, which plain normalizing flattens."""
    rng = np.random.default_rng(rank)
    width, count = 48, 20_000
    scale = np.concatenate([[10.0], np.full(rank - 1, 1.0), np.full(width - rank, 0.05)])
    directions = np.linalg.qr(rng.normal(size=(width, width)))[0]
    unit = rng.normal(size=(count, width)) * scale
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    norms = np.exp(0.5 * rng.normal(size=count)) * 1e-5
    truth = (unit @ directions) * norms[:, None]
    moments = recorded(truth, with_marginals=False)
    assert moments.marginal_counts is None
    drawn = DirectionSampler(moments, CPU).sample(count, generator()).double().numpy()
    assert stats.ks_2samp(np.linalg.norm(drawn, axis=1), norms).pvalue > LEVEL

    def second(rows: np.ndarray) -> np.ndarray:
        turned = rows @ directions.T
        return np.diag(turned.T @ turned) / np.sum(rows**2)

    found, wanted = second(drawn), second(truth)
    # Shares of the second moment. Squared norms have a kurtosis that leaves 7,000 rows of each
    # sample: standard errors of 2 % for a share of one half; the fit itself is within 1 %.
    np.testing.assert_allclose(found[:rank], wanted[:rank], rtol=0.1, atol=0.003)
    assert abs(found[rank:].sum() - wanted[rank:].sum()) < 0.1 * wanted[rank:].sum() + 0.002


def test_direction_scales_are_a_fixed_point() -> None:
    wanted = np.array([0.7, 0.2, 0.05, 0.05])
    scales, rest = direction_scales(wanted, 0.0)
    assert rest == 0.0
    z = np.random.default_rng(99).normal(size=(400_000, 4)) * np.sqrt(scales)
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    # 8192 fixed draws: standard errors of up to 0.5 %.
    np.testing.assert_allclose((unit**2).mean(0), wanted, atol=0.01)
    assert scales[0] > 1.2 * wanted[0] / wanted.sum() or scales[0] > 0.8


def test_gradients_of_one_output_keep_norms_and_signs() -> None:
    truth = np.random.default_rng(0).standard_t(3, size=(4000, 1)) * 1e-4
    moments = recorded(truth, with_marginals=False)
    drawn = DirectionSampler(moments, CPU).sample(4000, generator()).double().numpy()
    assert stats.ks_2samp(np.abs(drawn[:, 0]), np.abs(truth[:, 0])).pvalue > LEVEL
    assert abs((drawn > 0).mean() - 0.5) < stats.norm.isf(LEVEL / 2) * 0.5 / math.sqrt(4000)


def test_zero_gradients_stay_zero() -> None:
    moments = recorded(np.zeros((100, 7)), with_marginals=False)
    drawn = DirectionSampler(moments, CPU).sample(10, generator())
    assert (drawn == 0).all() and drawn.shape == (10, 7)
    some = np.zeros((1000, 3))
    some[:300] = np.random.default_rng(0).normal(size=(300, 3))
    drawn = DirectionSampler(recorded(some, with_marginals=False), CPU).sample(5000, generator())
    share = float((drawn.norm(dim=1) < 1e-6).double().mean())
    assert abs(share - 0.7) < 0.03


@pytest.mark.parametrize("shape", [(1, 64), (13, 39), (64, 13), (117, 1)])
def test_weights_have_both_recorded_grams(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape) * torch.exp(torch.randn(shape[1]))
    found = Spectrum.of(weight, seed=0)
    moments = SpectrumMoments(
        found.factors[:, : shape[0]].double().numpy(),
        found.factors[:, shape[0] :].double().numpy(),
        found.row_squares.double().numpy(),
        found.column_squares.double().numpy(),
    )
    sampler = SpectrumSampler(moments, CPU)
    first, second = (sampler.sample(shape[0], generator(seed)) for seed in (0, 1))
    for drawn in (first, second):
        for gram in (lambda w: w @ w.mT, lambda w: w.mT @ w):
            error = (gram(drawn) - gram(weight)).norm() / gram(weight).norm()
            assert float(error) < 1e-4
    if min(shape) > 4:
        assert float((first - second).norm() / weight.norm()) > 0.1
    with pytest.raises(ValueError, match="rows of a weight"):
        sampler.sample(shape[0] + 1, generator())


@pytest.mark.parametrize(
    ("outputs", "inputs", "full_width"), [(1, 24, 64), (12, 24, 64), (8, 90, 32)]
)
def test_the_cross_moment_is_put_back(outputs: int, inputs: int, full_width: int) -> None:
    rng = np.random.default_rng(outputs)
    count = 4000
    x = rng.normal(size=(count, 3)) @ rng.normal(size=(3, inputs)) + rng.normal(
        size=(count, inputs)
    )
    direction = rng.normal(size=inputs) / math.sqrt(inputs)
    g = 0.3 * (x @ direction)[:, None] * rng.normal(size=outputs) + rng.normal(
        size=(count, outputs)
    )
    g *= np.exp(-0.5 * np.abs(x[:, :1]))
    cross = RecordedCross.of(*(torch.from_numpy(v.astype(np.float32)) for v in (g, x)))
    assert cross is not None
    row = {"site": "s", **cross.as_row()}
    moments = CrossMoments.decode(row, outputs)
    of_x, of_g = recorded(x, full_width), recorded(g, full_width, with_marginals=False)
    sampler = CrossSampler(moments, of_x, of_g, DirectionSampler(of_g, CPU), CPU)
    products, noise = [], []
    for index in range(40):
        drawn_x = CopulaSampler(of_x, CPU).sample(count, generator(index))
        drawn_g = sampler.sample(drawn_x, generator(100 + index))
        products.append((drawn_g.mT @ drawn_x / count).double().numpy())
        noise.append(float((drawn_g.norm(dim=1) * drawn_x.norm(dim=1)).square().mean()))
    wanted = g.T @ x / count
    # The sign is drawn: the second moment along the recorded product, and not the mean, is kept.
    along = [float(np.sum(p * wanted) / np.sum(wanted**2)) for p in products]
    assert np.mean(np.square(along)) == pytest.approx(1.0, abs=0.6)  # chi-square, 40 degrees
    assert min(along) < 0 < max(along)
    assert np.mean(noise) == pytest.approx(cross.norm_product, rel=0.1)


def test_the_inverse_second_moment_of_a_sketch_is_that_of_the_matrix() -> None:
    rng = np.random.default_rng(0)
    x = (
        rng.normal(size=(3000, 4)) @ rng.normal(size=(4, 60))
        + 0.3 * rng.normal(size=(3000, 60))
        + 1.0
    )
    columns = rng.normal(size=(60, 2))
    full, sketch = (inverse_second_moment(recorded(x, width), columns) for width in (100, 16))
    assert np.linalg.norm(full - sketch) < 0.15 * np.linalg.norm(full)


def test_pooling_ranks_pools_all_that_was_recorded() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(i, 1 + i, size=(400, 40)) for i in range(3)]
    whole = recorded(np.concatenate(parts), full_width=16)
    found = pooled([recorded(part, full_width=16) for part in parts])
    assert found.count == 1200 and found.factors is not None and whole.factors is not None
    np.testing.assert_allclose(found.mean, whole.mean, rtol=1e-5)
    np.testing.assert_allclose(found.variance, whole.variance, rtol=1e-5)
    np.testing.assert_array_equal(found.marginal_counts, whole.marginal_counts)
    np.testing.assert_array_equal(found.marginal_extremes, whole.marginal_extremes)
    grams = [f.T @ f for f in (found.factors, whole.factors)]
    assert np.linalg.norm(grams[0] - grams[1], 2) < 0.02 * np.linalg.norm(grams[1], 2)


@pytest.mark.gpu
def test_draws_on_a_gpu_are_those_of_the_record() -> None:
    truth = rows_like_a_click_log(20_000, 39, seed=0)
    where = torch.device("cuda")
    source = torch.Generator(where).manual_seed(0)
    drawn = CopulaSampler(recorded(truth), where).sample(20_000, source)
    assert drawn.is_cuda
    ours = drawn.cpu().double().numpy()
    np.testing.assert_allclose((ours == 0).mean(0), (truth == 0).mean(0), atol=0.03)
    moments = recorded(truth * 1e-5, with_marginals=False)
    gradients = DirectionSampler(moments, where).sample(20_000, source).cpu().double().numpy()
    norms = [np.linalg.norm(v, axis=1) for v in (gradients, truth * 1e-5)]
    assert stats.ks_2samp(*norms).pvalue > LEVEL
