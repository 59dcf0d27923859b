"""Statistics and moments against NumPy in float64."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from loka_toolkit.artifacts.trace import (
    AMAX_QUANTILES,
    HISTOGRAM_BINS,
    HISTOGRAM_LOG2_MIN,
)
from loka_toolkit.recording.gradients import example_gradient_squares, gradient_columns, noise_ratio
from loka_toolkit.recording.moments import BatchMoments, RunningMoments
from loka_toolkit.recording.products import (
    ForwardOperands,
    Product,
    forward_factors,
    gradient_factors,
    match_gradient,
)
from loka_toolkit.recording.sampling import RowLayout, Sampler, find_layout
from loka_toolkit.recording.statistics import operand_statistics
from loka_toolkit.recording.trails import plain, regroup
from loka_toolkit.recording.whatif import Sample


def heavy_tailed(*shape: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator)
    x = x * torch.exp(4 * torch.randn(*shape, generator=generator))
    return torch.where(torch.rand(*shape, generator=generator) < 0.2, 0.0, x).to(dtype)


def histogram_by_log(values: np.ndarray) -> np.ndarray:
    logs = np.log2(np.abs(values[(values != 0) & np.isfinite(values)]))
    bins = np.clip(np.floor(2 * (logs - HISTOGRAM_LOG2_MIN)), 0, HISTOGRAM_BINS - 1)
    return np.bincount(bins.astype(int), minlength=HISTOGRAM_BINS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(13, 39), (117, 130), (3, 5, 13), (1, 1)])
def test_statistics_are_those_of_numpy(dtype, shape):
    x = heavy_tailed(*shape, dtype=dtype)
    x = torch.where(x == 0, x, x.clamp(-3e4, 3e4))
    found, truth = operand_statistics(x), x.double().numpy()
    flat = truth.reshape(-1, shape[-1])
    nonzero = np.abs(truth[truth != 0])
    assert found.mean == pytest.approx(truth.mean(), rel=1e-9, abs=1e-30)
    assert found.variance == pytest.approx(truth.var(), rel=1e-9, abs=1e-30)
    assert found.amax == np.abs(truth).max()
    assert found.smallest_nonzero == (nonzero.min() if nonzero.size else None)
    assert found.zero_share == pytest.approx((truth == 0).mean())
    assert found.histogram_log2 == histogram_by_log(truth).tolist()
    rows = np.quantile(np.abs(flat).max(1), AMAX_QUANTILES)
    columns = np.quantile(np.abs(flat).max(0), AMAX_QUANTILES)
    assert found.row_amax_quantiles == pytest.approx(rows.tolist())
    assert found.column_amax_quantiles == pytest.approx(columns.tolist())
    blocks = [np.abs(flat[:, i : i + 128]).max(1) for i in range(0, flat.shape[1], 128)]
    assert found.block128_amax_quantiles == pytest.approx(
        np.quantile(np.concatenate(blocks), AMAX_QUANTILES).tolist()
    )


def test_poison_is_counted_and_left_out():
    x = heavy_tailed(13, 39)
    clean = x.clone()
    x[2, 3], x[4, 5], x[6, 7] = float("nan"), float("inf"), -float("inf")
    found = operand_statistics(x)
    kept = clean[torch.isfinite(x)].double().numpy()
    assert found.nonfinite_count == 3
    assert found.mean == pytest.approx(kept.mean()) and found.variance == pytest.approx(kept.var())
    assert found.histogram_log2 == histogram_by_log(kept).tolist()
    nothing = operand_statistics(torch.full((2, 3), float("nan")))
    assert (nothing.mean, nothing.amax, nothing.smallest_nonzero) == (None, None, None)
    assert nothing.nonfinite_count == 6 and sum(nothing.histogram_log2) == 0


def test_zeros_subnormals_and_extremes_fall_into_the_right_bins():
    x = torch.tensor([[0.0, -0.0, 1e-45, 2.0**-80, 2.0**-79.5, 1.0, 2.0**0.5, 3e38]])
    found = operand_statistics(x)
    assert found.zero_share == 2 / 8
    assert found.smallest_nonzero == pytest.approx(1e-45, rel=0.5)
    counts = {i: c for i, c in enumerate(found.histogram_log2) if c}
    one = int(-2 * HISTOGRAM_LOG2_MIN)
    # float32 holds 2^0.5 and 2^-79.5 rounded down, so they lie below the half-octave's edge
    assert counts == {0: 3, one: 2, HISTOGRAM_BINS - 1: 1}
    edge = operand_statistics(torch.tensor([[math.nextafter(2**0.5, 2)]], dtype=torch.float64))
    assert edge.histogram_log2[one + 1] == 1


def test_more_than_2_to_the_24_elements_and_strides():
    x = torch.ones(1, 1).expand(4100, 4096).clone()
    x[17, 5] = 3.0
    found = operand_statistics(x.mT)
    assert found.numel == 4100 * 4096 > 2**24
    assert found.amax == 3.0 and found.width == 4100
    assert found.mean == pytest.approx(1 + 2 / x.numel(), rel=1e-12)
    assert found.variance == pytest.approx(4 / x.numel() * (1 - 1 / x.numel()), rel=1e-6)


@hypothesis.given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
@hypothesis.settings(deadline=None, max_examples=40)
def test_merged_moments_are_those_of_all_rows(sizes, full):
    generator = torch.Generator().manual_seed(sum(sizes))
    parts = [torch.randn(n, 5, generator=generator) * 10 + 1000 for n in sizes]
    batches = [BatchMoments.of(part, 16 if full else 0) for part in parts]
    running = RunningMoments(batches[0])
    for batch in batches[1:]:
        running.merge(batch)
    rows = torch.cat(parts).double().numpy()
    covariance = np.cov(rows.T, bias=True) if len(rows) > 1 else np.zeros((5, 5))
    assert running.count == len(rows) and running.steps == len(sizes)
    np.testing.assert_allclose(running.mean.numpy(), rows.mean(0), rtol=1e-12)
    expected = covariance if full else np.diag(covariance)
    # The rows lie at 1000 with spread 10: float64 leaves 1e-16 * 1000^2 of the squares.
    np.testing.assert_allclose(running.covariance.numpy(), expected, rtol=1e-9, atol=1e-9)
    norms = np.quantile(np.linalg.norm(rows, axis=1), AMAX_QUANTILES)
    assert running.row_norm_quantiles() == pytest.approx(norms.tolist())


@pytest.mark.parametrize("tokens", [1, 3])
def test_noise_ratio_against_gradients_computed_one_by_one(tokens):
    torch.manual_seed(0)
    g, x = torch.randn(7 * tokens, 4), torch.randn(7 * tokens, 5)
    w = torch.randn(4, 5)
    forward = ForwardOperands(1, 2, 7 * tokens, 4, 5, "b", False)
    out = g.T @ x
    product = Product("aten.mm.default", g.T, x, out, 1.0, False)
    match = match_gradient(forward, g.T.shape, x.shape, 9, 1, already_seen=set())
    assert match is not None
    factors, _ = gradient_factors(product, forward, match)
    assert factors.role == "wgrad" and w.shape == out.shape
    sample = Sample.of(factors, rows=None, columns=None, batch=None)
    columns = gradient_columns(sample, [])
    columns.error_squares["r"] = 1.0
    layout = find_layout((7, tokens), 7, assume_consecutive=False)
    assert isinstance(layout, RowLayout)
    example_gradient_squares(columns, factors, sample, layout)
    parts = [
        g[i : i + tokens].double().T @ x[i : i + tokens].double()
        for i in range(0, 7 * tokens, tokens)
    ]
    stacked = torch.stack(parts).reshape(7, -1)
    # The minibatch gradient is a sum of 7 draws: 7 times the variance of one.
    trace = 7 * float(stacked.var(0, correction=1).sum())
    assert noise_ratio(columns, "r") == pytest.approx(1 / trace, rel=1e-5)


@pytest.mark.parametrize("side", ["a", "b", None])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("of", ["a", "b"])
def test_canonical_products_give_the_right_gradients(side, transposed, of):
    """Whatever aten multiplied, the factors' product is the gradient of the logical operand."""
    torch.manual_seed(0)
    a, b, g = torch.randn(3, 5), torch.randn(5, 7), torch.randn(3, 7)
    left, right = (g, b.T) if of == "a" else (a.T, g)
    if transposed:
        left, right = right.T, left.T
    forward = ForwardOperands(1, 2, 3, 7, 5, side, False)
    other = 2 if of == "a" else 1
    storages = (other, 9) if (of == "a") == transposed else (9, other)
    match = match_gradient(forward, left.shape, right.shape, *storages, already_seen=set())
    assert match is not None and (match.of, match.transposed) == (of, transposed)
    product = Product("aten.mm.default", left, right, left @ right, 1.0, False)
    factors, gradient = gradient_factors(product, forward, match)
    torch.testing.assert_close(gradient, g)
    expected = g @ b.T if of == "a" else a.T @ g
    if side == "a":  # x is b transposed and w is a: dgrad is of x
        expected = expected if of == "a" else expected.T
    elif side == "b":  # w is b transposed
        expected = expected if of == "a" else expected.T
    torch.testing.assert_close(factors.a @ factors.b, expected)
    parts = {
        str(o): t for o, t in zip(factors.operands, (factors.left, factors.right), strict=True)
    }
    if side is not None:
        logical = {"x": a, "w": b.T, "g": g} if side == "b" else {"x": b.T, "w": a, "g": g.T}
    else:
        logical = {"a": a, "b": b, "g": g}
    for name, tensor in parts.items():
        torch.testing.assert_close(tensor, logical[name])
    whole = Product("aten.mm.default", a, b, a @ b, 1.0, False)
    fwd = forward_factors(whole, side)
    torch.testing.assert_close(fwd.a @ fwd.b, (a @ b).T if side == "a" else a @ b)


def test_shapes_that_fit_no_gradient_match_nothing():
    forward = ForwardOperands(1, 2, 3, 7, 5, "b", False)
    size = torch.Size
    assert match_gradient(forward, size((2, 2)), size((2, 2)), 1, 2, already_seen=set()) is None


@pytest.mark.parametrize(
    ("factors", "shape", "expected"),
    [
        (((4,), (2,), (8,)), (4, 16), ((4,), (2, 8))),
        (((5,), (11,), (8,)), (55, 8), ((5, 11), (8,))),
        (((5,), (11, 2), (8,)), (5, 22, 8), ((5,), (11, 2), (8,))),
        (((6,), (4,)), (3, 8), ((3,), (2, 4))),
        (((6,), (5,)), (10, 3), None),
    ],
)
def test_views_regroup_sizes(factors, shape, expected):
    assert regroup(factors, shape) == expected


def test_layouts_of_examples():
    assert find_layout((11, 5), 11, assume_consecutive=False) == RowLayout(11, 1, 5)
    assert find_layout((5, 11), 11, assume_consecutive=False) == RowLayout(11, 5, 1)
    assert find_layout((2, 11, 3), 11, assume_consecutive=False) == RowLayout(11, 2, 3)
    assert find_layout((55,), 11, assume_consecutive=True) == RowLayout(11, 1, 5)
    for leading, word in (((55,), "examples="), ((11, 11), "more than one"), ((13,), "divide")):
        reason = find_layout(leading, 11, assume_consecutive=False)
        assert isinstance(reason, str) and word in reason
    rows = RowLayout(11, 5, 1).rows_of(torch.tensor([0, 10]))
    assert rows.tolist() == [[0, 11, 22, 33, 44], [10, 21, 32, 43, 54]]


def test_samples_are_whole_examples_and_repeatable():
    sampler = Sampler(seed=3, max_rows=64, max_columns=16)
    for layout in (RowLayout(500, 1, 7), RowLayout(500, 7, 1), RowLayout(3, 1, 700)):
        taken = sampler.forward(1, layout.rows, 2000, layout, step=4, name="s")
        again = sampler.forward(1, layout.rows, 2000, layout, step=4, name="s")
        other = sampler.forward(1, layout.rows, 2000, layout, step=5, name="s")
        if layout.examples < 8:
            assert taken.is_complete
            continue
        flat = taken.flat(1, layout.rows)
        assert torch.equal(flat, again.flat(1, layout.rows))
        assert not torch.equal(flat, other.flat(1, layout.rows))
        counts = torch.bincount((flat // layout.inner) % layout.examples, minlength=500)
        assert set(counts.tolist()) == {0, 7} and int((counts > 0).sum()) >= 8


def test_plain_factors_leave_ones_out():
    assert plain((3, 1, 5)) == ((3,), (), (5,))
