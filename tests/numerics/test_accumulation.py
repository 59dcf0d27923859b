"""The accumulator models against slow exact arithmetic on rational numbers, and their limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.accumulation import accumulate
from loka_toolkit.numerics.formats import E4M3, E5M2
from loka_toolkit.numerics.recipes import Accumulation

Draw = Callable[..., torch.Tensor]
FAST, PROMOTED, FP32 = Accumulation.FAST, Accumulation.PROMOTED_128, Accumulation.FP32


def fp8(x: torch.Tensor, fmt: torch.dtype = E4M3.torch_dtype) -> torch.Tensor:
    return x.to(fmt).float()


def exponent_of(value: Fraction) -> int:
    """floor(log2 |value|), exactly."""
    size = abs(value)
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if Fraction(2) ** guess <= size else guess - 1


def truncated(value: Fraction, quantum: Fraction) -> Fraction:
    return math.trunc(value / quantum) * quantum


def slow_step(register: Fraction, pairs: list[tuple[Fraction, Fraction]]) -> Fraction:
    """One tensor-core step: align 32 products and the register, truncate, add, truncate."""
    exponents = [exponent_of(a) + exponent_of(b) for a, b in pairs if a and b]
    if register:
        exponents.append(exponent_of(register))
    if not exponents:
        return Fraction(0)
    quantum = Fraction(2) ** (max(exponents) - 13)
    total = sum((truncated(a * b, quantum) for a, b in pairs), truncated(register, quantum))
    return truncated(total, Fraction(2) ** (exponent_of(total) - 13)) if total else Fraction(0)


def slow_dot(a: list[float], b: list[float], accumulation: Accumulation) -> float:
    register, promoted = Fraction(0), torch.zeros((), dtype=torch.float32)
    pairs = [(Fraction(x), Fraction(y)) for x, y in zip(a, b, strict=True)]
    for start in range(0, len(pairs), 32):
        register = slow_step(register, pairs[start : start + 32])
        if accumulation is PROMOTED and start % 128 == 96:
            promoted, register = promoted + float(register), Fraction(0)
    return float(promoted + float(register))


@pytest.mark.parametrize("k", [1, 13, 32, 39, 117, 128, 160, 300])
@pytest.mark.parametrize("accumulation", [FAST, PROMOTED])
@pytest.mark.parametrize("kind", ["normal", "heavy_tailed", "positive"])
def test_models_match_rational_arithmetic_bit_by_bit(
    k: int, accumulation: Accumulation, kind: str, normal: Draw, heavy_tailed: Draw
) -> None:
    draw = {"normal": normal, "heavy_tailed": heavy_tailed, "positive": lambda *s: normal(*s).abs()}
    a, b = fp8(draw[kind](3, k) * 10), fp8(draw[kind](k, 2))
    ours = accumulate(a, b, accumulation)
    theirs = [[slow_dot(row, col, accumulation) for col in b.T.tolist()] for row in a.tolist()]
    torch.testing.assert_close(ours, torch.tensor(theirs), rtol=0, atol=0)


def test_mixed_formats_match_rational_arithmetic(heavy_tailed: Draw) -> None:
    a, b = fp8(heavy_tailed(4, 70), E5M2.torch_dtype), fp8(heavy_tailed(70, 3) * 1e-3)
    theirs = [[slow_dot(row, col, FAST) for col in b.T.tolist()] for row in a.tolist()]
    torch.testing.assert_close(accumulate(a, b, FAST), torch.tensor(theirs), rtol=0, atol=0)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)])
def test_fp32_is_within_half_an_ulp_of_the_exact_sum(
    formats: tuple[object, object], heavy_tailed: Draw
) -> None:
    a = fp8(heavy_tailed(3, 117), formats[0].torch_dtype)  # type: ignore[attr-defined]
    b = fp8(heavy_tailed(117, 2), formats[1].torch_dtype)  # type: ignore[attr-defined]
    exact = torch.tensor(
        [
            [
                float(sum(Fraction(x) * Fraction(y) for x, y in zip(r, c, strict=True)))
                for c in b.T.tolist()
            ]
            for r in a.tolist()
        ],
        dtype=torch.float64,
    )
    error = (accumulate(a, b, FP32).double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-24).all()


@pytest.mark.parametrize("accumulation", list(Accumulation))
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_rows_and_columns_are_those_of_the_full_product(
    accumulation: Accumulation, fmt: object, heavy_tailed: Draw
) -> None:
    a = fp8(heavy_tailed(257, 200), fmt.torch_dtype)  # type: ignore[attr-defined]
    b = fp8(heavy_tailed(200, 131), fmt.torch_dtype)  # type: ignore[attr-defined]
    full = accumulate(a, b, accumulation)
    rows, columns = torch.tensor([0, 5, 255, 256]), torch.tensor([130, 2, 77])
    part = accumulate(a[rows], b[:, columns], accumulation)
    torch.testing.assert_close(part, full[rows][:, columns], rtol=0, atol=0)
    one = accumulate(a[:1], b[:, :1], accumulation)
    torch.testing.assert_close(one, full[:1, :1], rtol=0, atol=0)


@pytest.mark.parametrize("accumulation", list(Accumulation))
def test_batches_are_products_one_by_one(accumulation: Accumulation, normal: Draw) -> None:
    a, b = fp8(normal(3, 2, 13, 39)), fp8(normal(3, 2, 39, 5))
    whole = accumulate(a, b, accumulation)
    for i in range(3):
        for j in range(2):
            single = accumulate(a[i, j], b[i, j], accumulation)
            torch.testing.assert_close(whole[i, j], single, rtol=0, atol=0)
    many = accumulate(a[:, :1].expand(3, 700, 13, 39), b[:, :1].expand(3, 700, 39, 5), accumulation)
    torch.testing.assert_close(many[:, 699], whole[:, 0], rtol=0, atol=0)


def test_fast_stops_counting_where_a_small_addend_falls_off() -> None:
    """Ones added 2**14 deep: the register's step is then 2, and nothing more is added."""
    k = 2**16
    ones_a, ones_b = torch.ones(1, k), torch.ones(k, 1)
    assert accumulate(ones_a, ones_b, FP32).item() == k
    assert accumulate(ones_a, ones_b, FAST).item() == 2**14
    assert accumulate(ones_a, ones_b, PROMOTED).item() == k


def test_fast_keeps_about_fourteen_bits_on_zero_mean_data(normal: Draw) -> None:
    """Source: DeepSeek-V3 reports a maximum relative error near 2 % at K = 4096."""
    a, b = fp8(normal(48, 4096)), fp8(normal(4096, 48))
    exact = a.double() @ b.double()
    error = (accumulate(a, b, FAST).double() - exact).norm() / exact.norm()
    promoted = (accumulate(a, b, PROMOTED).double() - exact).norm() / exact.norm()
    assert 2.0**-13 < error < 0.02
    assert promoted < error / 3


@pytest.mark.parametrize("accumulation", list(Accumulation))
def test_nothing_to_sum(accumulation: Accumulation) -> None:
    assert accumulate(torch.ones(0, 39), torch.ones(39, 4), accumulation).shape == (0, 4)
    assert accumulate(torch.ones(2, 0), torch.ones(0, 4), accumulation).tolist() == [[0.0] * 4] * 2
    zeros = accumulate(torch.zeros(3, 40), torch.zeros(40, 2), accumulation)
    assert zeros.tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("accumulation", list(Accumulation))
def test_poison_reaches_its_row_and_column_and_nothing_else(
    accumulation: Accumulation, normal: Draw
) -> None:
    a, b = fp8(normal(6, 50)), fp8(normal(50, 5))
    clean = accumulate(a, b, accumulation)
    a[2, 7], b[9, 3], a[4, 0] = math.nan, math.inf, -math.inf
    poisoned = accumulate(a, b, accumulation)
    assert poisoned[2].isnan().all()
    assert not torch.isfinite(poisoned[4]).any()
    assert not torch.isfinite(poisoned[:, 3]).any()
    keep = torch.ones(6, 5, dtype=torch.bool)
    keep[[2, 4]] = False
    keep[:, 3] = False
    torch.testing.assert_close(poisoned[keep], clean[keep], rtol=0, atol=0)


def test_shapes_that_do_not_multiply_are_refused() -> None:
    for a, b in ((torch.ones(2, 3), torch.ones(4, 2)), (torch.ones(2, 2, 3), torch.ones(3, 2))):
        with pytest.raises(ConfigurationError, match="cannot multiply"):
            accumulate(a, b, FAST)
