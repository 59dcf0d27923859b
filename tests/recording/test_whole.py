"""Errors of whole products from samples drawn by size: unbiased, and right for uneven energy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Role
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.metrics import product_error
from loka_toolkit.numerics.recipes import parse_recipe
from loka_toolkit.recording.products import Factors
from loka_toolkit.recording.samples import Sample
from loka_toolkit.recording.sampling import draw_by_size
from loka_toolkit.recording.scalebook import ScaleBook
from loka_toolkit.recording.whatif import PROBE_PRODUCTS, recipe_errors
from loka_toolkit.recording.whole import Shares, WholeSample, chance_correlation


def heavy(*shape: int, seed: int, sd: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(sd * torch.randn(shape, generator=generator))
    return torch.randn(shape, generator=generator) * size


def test_weighted_sums_are_unbiased_and_the_largest_are_sure() -> None:
    """Horvitz and Thompson: the mean over many draws is the sum, here within 4 standard errors."""
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(0, 2, 200)
    values = sizes * rng.uniform(0.5, 1.5, 200)
    estimates = []
    for _ in range(2000):
        chosen, weights = draw_by_size(rng, sizes, 40)
        assert chosen is not None and len(chosen) == 40 == len(set(chosen.tolist()))
        assert (np.diff(chosen.numpy()) > 0).all() and (weights >= 1).all()
        assert sizes.argmax() in chosen.tolist()
        estimates.append((values[chosen.numpy()] * weights).sum())
    error = np.mean(estimates) - values.sum()
    assert abs(error) < 4 * np.std(estimates) / np.sqrt(2000)
    even = rng.choice(values, (2000, 40)).mean(1) * 200
    assert np.std(estimates) < 0.3 * np.std(even)


@pytest.mark.parametrize("sizes", [np.zeros(50), np.full(50, np.inf), np.full(50, np.nan)])
def test_sizes_that_say_nothing_draw_evenly(sizes: np.ndarray) -> None:  # type: ignore[type-arg]
    chosen, weights = draw_by_size(np.random.default_rng(1), sizes, 10)
    assert chosen is not None and len(chosen) == 10
    np.testing.assert_allclose(weights, 5.0)
    assert draw_by_size(np.random.default_rng(1), sizes, 50)[0] is None


def test_one_size_above_all_leaves_room_for_the_rest() -> None:
    sizes = np.array([1e12, *np.ones(99)])
    chosen, weights = draw_by_size(np.random.default_rng(2), sizes, 12)
    assert chosen is not None and chosen[0] == 0 and weights[0] == 1.0
    np.testing.assert_allclose(weights[1:], 99 / 11)


def factors_of(a: torch.Tensor, b: torch.Tensor) -> Factors:
    return Factors(Role.WGRAD, GEMM_OPERANDS[Role.WGRAD, True], a, b, left_transposed=True)


@pytest.mark.parametrize(
    ("m", "n", "k", "name", "limit"),
    [
        (6000, 96, 160, "e4m3/tensorwise/fp32", 0.03),
        (6000, 96, 160, "e4m3/rowwise/fast", 0.03),
        (300, 280, 2613, "e4m3/blockwise/promoted-128", 0.12),
        (300, 280, 2613, "e5m2-e4m3/tensorwise/fast", 0.12),
        (300, 280, 2613, "e4m3/mxfp8/fp32", 0.12),
    ],
)
def test_a_drawn_sample_shows_the_error_of_the_whole(
    m: int, n: int, k: int, name: str, limit: float
) -> None:
    """A uniform sample of rows of such unequal size is off by tens of percent."""
    a = heavy(m, k, seed=m) * heavy(m, 1, seed=1)
    b = heavy(k, n, seed=n) * heavy(1, n, seed=2)
    recipe = parse_recipe(name)
    factors = factors_of(a, b)
    rows = torch.linspace(0, m - 1, 128).long()
    sample = Sample.of(factors, rows=rows, columns=None, batch=None)
    whole = WholeSample.of(factors, np.random.default_rng(3), None)
    assert whole.probe is not None and whole.sample.exact.numel() < m * n
    found = recipe_errors(factors, sample, (recipe,), ScaleBook({}, 8.0), PROBE_PRODUCTS, whole)
    full = product_error(a.double() @ b.double(), emulate(a, b, recipe)).relative_frobenius
    assert full is not None
    assert found[0].metrics.relative_frobenius == pytest.approx(full, rel=limit)


def test_a_batch_is_drawn_by_the_size_of_its_products() -> None:
    a = heavy(3000, 12, 40, seed=5) * heavy(3000, 1, 1, seed=6)
    b = heavy(3000, 40, 60, seed=7)
    factors = Factors(Role.FWD, GEMM_OPERANDS[Role.FWD, False], a, b)
    recipe = parse_recipe("e4m3/rowwise/fp32")
    some = Sample.of(factors, rows=None, columns=None, batch=torch.arange(0, 3000, 100))
    whole = WholeSample.of(factors, np.random.default_rng(4), None)
    assert whole.sample.batch is not None and whole.sample.rows is None
    found = recipe_errors(factors, some, (recipe,), ScaleBook({}, 8.0), 0, whole)
    full = product_error(a.double() @ b.double(), emulate(a, b, recipe)).relative_frobenius
    assert full is not None
    assert found[0].metrics.relative_frobenius == pytest.approx(full, rel=0.03)


def test_a_small_product_is_taken_whole() -> None:
    a, b = heavy(64, 40, seed=1), heavy(40, 30, seed=2)
    whole = WholeSample.of(factors_of(a, b), np.random.default_rng(0), None)
    assert whole.weights is None and whole.probe is None
    torch.testing.assert_close(whole.sample.exact, a.double() @ b.double(), rtol=0, atol=0)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (5, 0, 7), (5, 3, 0)])
def test_nothing_is_drawn_from_nothing(m: int, n: int, k: int) -> None:
    whole = WholeSample.of(
        factors_of(torch.ones(m, k), torch.ones(k, n)), np.random.default_rng(0), None
    )
    assert whole.sample.exact.shape == (m, n)
    assert whole.shares(torch.zeros(m, n, dtype=torch.float64)).square is None


def test_shares_of_a_sum_of_errors() -> None:
    """Independent noise adds in energy; what both have of the product adds before it is squared."""
    y = heavy(200, 100, seed=1).double()
    one = 0.03 * y + 0.02 * heavy(200, 100, seed=2).double()
    two = -0.01 * y + 0.01 * heavy(200, 100, seed=3).double()
    summed = Shares.of(y, one).plus(Shares.of(y, two))
    direct = Shares.of(y, one + two)
    assert summed.bias == pytest.approx(direct.bias, rel=1e-9)
    chance = chance_correlation(y, one, two, y.numel())
    assert Shares.of(y, one).plus(Shares.of(y, two), chance).square == pytest.approx(
        direct.square, rel=1e-9
    )
    half = chance_correlation(y[:100], one[:100], two[:100], y.numel())
    whole = chance_correlation(y[:100], one[:100], two[:100], y[:100].numel())
    assert half == pytest.approx(whole / 2)
    # What is left out is the correlation of two independent draws, a chance of 1 / sqrt(2e4).
    assert summed.square == pytest.approx(direct.square, rel=0.03)
