"""Moments against NumPy and SciPy: merging, sketches, marginals, spectra, cross moments, memory."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from scipy import stats

from loka_toolkit.artifacts.trace import MARGINAL_BINS, MARGINAL_OCTAVES, NORM_LEVELS
from loka_toolkit.recording.cross import CROSS_RANK, CrossMoments, cross_bytes
from loka_toolkit.recording.marginals import Marginals, bins_of
from loka_toolkit.recording.memory import step_decay
from loka_toolkit.recording.moments import BatchMoments, RunningMoments, moments_bytes
from loka_toolkit.recording.norms import NormCounts
from loka_toolkit.recording.sketch import SKETCH_RANK, merged_factors, top_factors
from loka_toolkit.recording.spectrum import SPECTRUM_RANK, Spectrum


def rows_of(count: int, width: int, rank: int, seed: int) -> torch.Tensor:
    """Return rows of a given rank around a mean, features of unlike size, in float32."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(rank, width)) * np.exp(rng.normal(size=width))
    rows = rng.standard_t(5, size=(count, rank)) @ mixing + rng.normal(size=width)
    return torch.from_numpy(rows.astype(np.float32))


def merged(parts: list[torch.Tensor], full_width: int, decay: float = 1.0) -> RunningMoments:
    batches = [BatchMoments.of(part, full_width, with_marginals=True) for part in parts]
    running = RunningMoments(batches[0])
    for batch in batches[1:]:
        running.merge(batch, decay)
    return running


@hypothesis.given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    width=st.sampled_from([1, 13, 39, 117]),
    rank=st.integers(1, 90),
    seed=st.integers(0, 99),
)
@hypothesis.settings(deadline=None, max_examples=30)
def test_a_sketch_keeps_its_bound_and_is_exact_where_the_rank_suffices(sizes, width, rank, seed):
    parts = [rows_of(size, width, rank, seed + i) for i, size in enumerate(sizes)]
    running = merged(parts, full_width=1) if width > 1 else merged(parts, full_width=0)
    rows = torch.cat(parts).double().numpy()
    covariance = np.cov(rows.T, bias=True).reshape(width, width) if len(rows) > 1 else None
    if covariance is None:
        covariance = np.zeros((width, width))
    size = max(np.trace(covariance), 1e-12)
    assert running.count == len(rows)
    np.testing.assert_allclose(running.mean.numpy(), rows.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(running.covariance.numpy(), np.diag(covariance), rtol=1e-9, atol=0)
    factors = running.covariance_factors
    if width == 1:
        assert factors is None
        return
    assert factors is not None and factors.shape[0] <= SKETCH_RANK
    sketch = (factors.double().mT @ factors.double()).numpy()
    missing = covariance - sketch
    # Factors are float32: 1e-5 of the trace bounds their rounding over a few merges.
    assert np.linalg.eigvalsh(missing).min() > -1e-5 * size
    assert np.linalg.norm(missing, 2) <= np.trace(covariance) - np.trace(sketch) + 1e-5 * size
    if min(rank * len(parts) + len(parts), len(rows), width) <= SKETCH_RANK:
        assert np.abs(missing).max() < 1e-5 * size


@pytest.mark.parametrize("count", [150, 400])
def test_a_very_wide_operand_is_sketched_by_its_largest_directions(count):
    """2613 features, a spectrum that falls: the randomized sketch is close to the best one."""
    rng = np.random.default_rng(0)
    scale = 10.0 * 0.9 ** np.arange(200)
    directions = np.linalg.qr(rng.normal(size=(2613, 200)))[0].T
    rows = (rng.normal(size=(count, 200)) * scale) @ directions
    running = merged([torch.from_numpy(rows.astype(np.float32))], full_width=1024)
    factors = running.covariance_factors
    assert factors is not None and factors.shape == (SKETCH_RANK, 2613)
    centered = rows - rows.mean(0)
    best = np.linalg.svd(centered, compute_uv=False)[:SKETCH_RANK] ** 2 / count
    found = np.sort((factors.double() ** 2).sum(1).numpy())[::-1]
    # Halko et al.: two power steps with 8 extra directions lose little where the spectrum falls.
    np.testing.assert_allclose(found[:32], best[:32], rtol=1e-3)
    assert found.sum() > 0.999 * best.sum()


def test_factors_of_degenerate_rows():
    assert top_factors(torch.zeros(5, 3)).shape == (0, 3)
    assert top_factors(torch.zeros(0, 3)).shape == (0, 3)
    one = top_factors(torch.tensor([[3.0, 4.0]]))
    assert one.shape == (1, 2) and float(one.norm()) == pytest.approx(5.0)
    both = merged_factors(torch.zeros(0, 2), one)
    torch.testing.assert_close(both.mT @ both, one.mT @ one)


@pytest.mark.parametrize("full_width", [0, 8, 100])
def test_later_steps_weigh_more(full_width):
    parts = [rows_of(50, 13, 13, seed) * (seed + 1) for seed in range(4)]
    running = merged(parts, full_width, decay=0.5)
    weights = np.repeat([0.125, 0.25, 0.5, 1.0], 50)
    rows = torch.cat(parts).double().numpy()
    mean = np.average(rows, axis=0, weights=weights)
    covariance = np.cov(rows.T, aweights=weights, bias=True)
    np.testing.assert_allclose(running.mean.numpy(), mean, rtol=1e-9)
    expected = covariance if full_width == 100 else np.diag(covariance)
    np.testing.assert_allclose(running.covariance.numpy(), expected, rtol=1e-9, atol=1e-9)
    if full_width == 8:
        factors = running.covariance_factors.double()
        difference = (factors.mT @ factors).numpy() - covariance
        assert np.abs(difference).max() < 1e-5 * np.trace(covariance)
    assert running.count == 200


def test_decay_is_the_square_of_the_steps_number():
    assert step_decay(9, 19) == pytest.approx(0.25)
    assert step_decay(5, 5) == 1.0
    # Twenty early steps and two late ones: the late ones are the trained model.
    weights = [1.0]
    for last, step in [*zip(range(19), range(1, 20), strict=True), (19, 1019), (1019, 2019)]:
        weights = [w * step_decay(last, step) for w in weights] + [1.0]
    assert sum(weights[:20]) / sum(weights) < 0.001


@hypothesis.given(
    values=st.lists(
        st.floats(-(2.0**60), 2.0**60, width=32)
        | st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 2.0**-40, 2.0**-41, -(2.0**-40), 2.0**40]),
        min_size=1,
        max_size=40,
    )
)
@hypothesis.settings(deadline=None, max_examples=100)
def test_every_value_falls_into_the_bin_that_its_logarithm_names(values):
    found = bins_of(torch.tensor(values, dtype=torch.float32)).tolist()
    middle = MARGINAL_BINS // 2
    for value, at in zip(values, found, strict=True):
        magnitude = abs(np.float32(value))
        if magnitude < 2.0 ** MARGINAL_OCTAVES[0]:
            assert at == middle
            continue
        exponent = int(np.frexp(magnitude)[1]) - 1
        upper_half = magnitude >= 1.5 * 2.0**exponent
        place = 2 * (exponent - MARGINAL_OCTAVES[0]) + upper_half + 1
        place = min(place, middle)
        assert at == (middle + place if value > 0 else middle - place)


def test_merged_marginals_are_those_of_all_rows():
    parts = [rows_of(n, 7, 7, n) * 100 for n in (1, 30, 200)]
    running = Marginals.of(parts[0])
    for part in parts[1:]:
        running.merge(Marginals.of(part), 1.0)
    rows = torch.cat(parts)
    whole = Marginals.of(rows)
    assert torch.equal(running.counts, whole.counts)
    assert running.counts.sum(1).tolist() == [len(rows)] * 7
    assert torch.equal(running.least, rows.amin(0)) and torch.equal(running.largest, rows.amax(0))


def test_marginals_of_a_large_operand_are_those_of_some_rows_and_all_extremes():
    x = torch.ones(70_000, 64)
    x[123, 5] = 40.0  # no multiple of the stride
    found = Marginals.of(x)
    assert float(found.largest[5]) == 40.0
    assert found.counts.sum(1).tolist() == pytest.approx([70_000] * 64)


@hypothesis.given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4), sigma=st.sampled_from([0.1, 3.0])
)
@hypothesis.settings(deadline=None, max_examples=25)
def test_norm_quantiles_are_those_of_all_rows_within_a_bin(sizes, sigma):
    rng = np.random.default_rng(sum(sizes))
    parts = [np.exp(sigma * rng.normal(size=size)) for size in sizes]
    running = NormCounts(torch.from_numpy(parts[0]))
    for part in parts[1:]:
        running.merge(NormCounts(torch.from_numpy(part)), 1.0)
    norms = np.concatenate(parts)
    found = running.quantiles()
    # Between the order statistics around each level, widened by a bin of 1/16.
    low = np.quantile(norms, NORM_LEVELS, method="lower")
    high = np.quantile(norms, NORM_LEVELS, method="higher")
    slack = np.sort(norms)[
        np.minimum(np.searchsorted(np.sort(norms), high, "right"), len(norms) - 1)
    ]
    below = np.sort(norms)[np.maximum(np.searchsorted(np.sort(norms), low) - 1, 0)]
    assert (found >= below / (1 + 1 / 16) - 1e-12).all()
    assert (found <= slack * (1 + 1 / 16) + 1e-12).all()
    assert found[0] == pytest.approx(norms.min()) and found[-1] == pytest.approx(norms.max())


def test_norms_of_zero_rows():
    found = NormCounts(torch.tensor([0.0, 0.0, 2.0, 2.0])).quantiles()
    assert found[0] == 0.0 and found[-1] == 2.0
    assert NormCounts(torch.zeros(3)).quantiles().max() == 0.0


@pytest.mark.parametrize("shape", [(1, 64), (13, 39), (39, 13), (117, 1), (200, 230), (1, 1)])
def test_a_spectrum_has_both_second_moments_of_the_weight_and_not_the_weight(shape):
    weight = rows_of(*shape, rank=max(shape), seed=3)
    found = Spectrum.of(weight, seed=1)
    left, right = found.factors[:, : shape[0]], found.factors[:, shape[0] :]
    lengths = (left**2).sum(1)
    torch.testing.assert_close(
        lengths, (right**2).sum(1), rtol=1e-4, atol=1e-6 * float(lengths.max())
    )
    for vectors, gram in ((left, weight @ weight.mT), (right, weight.mT @ weight)):
        # Either side carries the root of the singular value.
        again = (vectors * lengths.unsqueeze(1)).mT @ vectors
        assert float((again - gram).norm() / gram.norm()) < 1e-5
    assert float(found.row_squares.max()) < 1e-10 * float(weight.square().max())
    if min(shape) > 12:
        rebuilt = left.mT @ right
        assert float((rebuilt - weight).norm() / weight.norm()) > 0.3


def test_what_a_spectrum_leaves_is_told_by_row_and_column():
    torch.manual_seed(0)
    strong = torch.randn(600, 20) @ torch.randn(20, 700)
    noise = torch.randn(600, 700) * torch.linspace(0.2, 2, 700)
    weight = strong + noise
    found = Spectrum.of(weight, seed=0)
    assert found.factors.shape == (SPECTRUM_RANK, 1300)
    energy = float(weight.square().sum())
    kept = float(found.factors[:, :600].square().sum(1).square().sum())
    rest = float(found.row_squares.sum() * 700)
    assert kept + rest == pytest.approx(energy, rel=1e-3)
    assert rest == pytest.approx(float(found.column_squares.sum() * 600), rel=1e-4)
    # The randomized range finder against the best rank-256 approximation.
    best = float(torch.linalg.svdvals(weight)[:SPECTRUM_RANK].square().sum())
    assert 0.98 * best < kept <= best * (1 + 1e-5)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 64), (13, 39), (64, 1), (48, 117)])
def test_cross_moments_are_those_of_the_product(outputs, inputs):
    torch.manual_seed(outputs)
    x = torch.randn(300, inputs)
    g = x[:, :1] * torch.randn(outputs) + 0.1 * torch.randn(300, outputs)
    found = CrossMoments.of(g, x)
    assert found is not None
    mean = (g.double().mT @ x.double()) / 300
    best = torch.linalg.svdvals(mean)[CROSS_RANK:].square().sum().sqrt()
    error = (found.left.double().mT @ found.right.double() - mean).norm()
    assert float(error) <= float(best) * 1.05 + 1e-5 * float(mean.norm())
    assert found.product_square == pytest.approx(float(mean.square().sum()), rel=1e-5)
    norms = [t.double().norm(dim=1) for t in (g, x)]
    assert found.norm_product == pytest.approx(
        float((norms[0] * norms[1]).square().mean()), rel=1e-5
    )
    expected = stats.spearmanr(*[n.numpy() for n in norms]).statistic
    assert found.norm_correlation == pytest.approx(expected, abs=1e-6)
    scaled = CrossMoments.of(1024 * g, x).divided_by(1024)
    torch.testing.assert_close(
        scaled.left.mT @ scaled.right, found.left.mT @ found.right, rtol=1e-4, atol=1e-6
    )
    assert scaled.norm_product == pytest.approx(found.norm_product, rel=1e-5)


def test_gradients_that_change_sign_do_not_cancel():
    torch.manual_seed(0)
    x, u = torch.randn(200, 30), torch.randn(8)
    steps = []
    for sign in (1.0, -1.0, 1.0, -1.0):
        g = sign * x[:, :1] * u + 0.01 * torch.randn(200, 8)
        steps.append(CrossMoments.of(g, x))
    running = steps[0]
    for index, later in enumerate(steps[1:], start=2):
        running = running.mixed_with(later, 1 / index)
    size = float((running.left.mT @ running.right).norm())
    assert size == pytest.approx(running.product_square**0.5, rel=0.02)
    with pytest.raises(ValueError, match="do not merge"):
        running.mixed_with(CrossMoments.of(torch.randn(9, 7), torch.randn(9, 30)), 0.5)


def test_cross_moments_of_constant_norms_and_overflow():
    ones = CrossMoments.of(torch.ones(5, 1), torch.randn(5, 3))
    assert ones.as_row()["norm_correlation"] is None
    huge = torch.full((5, 2), 3e38)
    assert CrossMoments.of(huge, huge) is None


def samples_with_equal_rows(shares: list[float], seed: int) -> np.ndarray:
    """Return samples [200, rows, 7], of whose rows these shares are constant, half of it zero."""
    rng = np.random.default_rng(seed)
    samples = rng.lognormal(size=(200, len(shares), 7)).astype(np.float32)
    for row, share in enumerate(shares):
        chosen = rng.random(200) < share
        samples[chosen, row] = samples[chosen, row, :1] * rng.integers(0, 2, (chosen.sum(), 1))
    return samples


@pytest.mark.parametrize("decay", [1.0, 0.25])
def test_constant_rows_are_counted_and_rows_of_zeros_are_not(decay):
    """Against a count in NumPy of both steps, the earlier one weighing less."""
    steps = [samples_with_equal_rows([0.0, 0.3, 0.9], seed) for seed in (0, 1)]
    running = None
    for samples in steps:
        flat = torch.from_numpy(samples.reshape(200, -1))
        batch = BatchMoments.of(flat, 64, sample_rows=3)
        if running is None:
            running = RunningMoments(batch)
        else:
            running.merge(batch, decay)
    truth = [
        [sum(len(set(row)) == 1 and row[0] != 0 for row in samples[:, at]) for at in range(3)]
        for samples in steps
    ]
    expected = (decay * np.array(truth[0]) + truth[1]) / (decay * 200 + 200)
    assert expected[0] == 0 and expected[1:].min() > 0.1
    np.testing.assert_allclose(running.as_row()["equal_row_shares"], expected, rtol=1e-6)


@pytest.mark.parametrize(("width", "rows"), [(1, 1), (3, 3)])
def test_a_row_of_one_element_is_not_called_constant(width, rows):
    batch = BatchMoments.of(torch.ones(5, width), 64, sample_rows=rows)
    assert batch.equal_rows.tolist() == [0.0] * rows


@pytest.mark.parametrize("width", [1, 39, 1024, 2613])
@pytest.mark.parametrize("with_marginals", [False, True])
def test_memory_is_what_the_formula_says(width, with_marginals):
    """Bytes of every tensor kept, after enough steps for every list to be full."""
    running = None
    for step in range(3):
        batch = BatchMoments.of(rows_of(1100, width, 3, step), 1024, with_marginals=with_marginals)
        if running is None:
            running = RunningMoments(batch)
            continue
        for _ in range(12):
            running.merge(batch)
    held = 0
    pending = list(vars(running).values())
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            held += value.untyped_storage().nbytes()
        elif isinstance(value, list):
            pending += value
        elif hasattr(value, "__dict__"):
            pending += vars(value).values()
    stated = moments_bytes(width, 1024, with_marginals=with_marginals)
    assert held <= stated
    assert held > 0.3 * stated  # the formula is no idle upper bound


def test_memory_of_a_cross_moment():
    torch.manual_seed(0)
    found = CrossMoments.of(torch.randn(64, 39), torch.randn(64, 117))
    running = found
    for _ in range(3):
        running = running.mixed_with(found, 0.3)
    held = 4 * (running.left.numel() + running.right.numel())
    assert held <= cross_bytes(39, 117)
