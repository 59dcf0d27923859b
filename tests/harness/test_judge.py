"""The two judgements, against float64 NumPy and candidates whose error is known by construction."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.harness.judge import EXCESS_LIMIT, judge
from loka_toolkit.harness.sampling import OutputSample
from loka_toolkit.harness.trial import Trial
from loka_toolkit.kernels.catalog import find_candidate
from loka_toolkit.kernels.contract import Candidate, Chip, Prepared, Problem, Side
from loka_toolkit.numerics.accumulation import accumulate
from loka_toolkit.numerics.recipes import Accumulation, Scaling, parse_recipe

GOOD = "torch.scaled_mm/e4m3/tensorwise/fp32"


@dataclasses.dataclass(frozen=True)
class Off:
    """The right kernel, but its output is off by a known relative error, uncorrelated with it."""

    inner: Candidate
    relative: float
    recipe: str = "e4m3/tensorwise/fp32"
    name: str = "off"
    library: str = "torch"
    roles: frozenset[Role] = frozenset(Role)
    emulated: bool = False
    abi: int = 1
    operator: str = "off"

    def version(self) -> str | None:
        return "1"

    def supports(self, problem: Problem, chip: Chip) -> str | None:
        return None

    def prepare(
        self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
    ) -> Prepared:
        return self.inner.prepare(operand, side, scale)

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        exact = a.dequantized() @ b.dequantized()
        noise = torch.randn(
            exact.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
        )
        return (exact + self.relative * noise * exact.norm() / noise.norm()).to(out_dtype)


def operands(
    m: int, k: int, n: int, seed: int = 0, batch: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Heavy-tailed left, correlated right, neither centered."""
    rng = np.random.default_rng(seed)
    lead = () if batch is None else (batch,)
    a = rng.standard_t(3, size=(*lead, m, k)) + 0.3
    b = rng.normal(size=(*lead, k, n)) * np.exp(rng.normal(size=(*lead, k, 1))) + 0.1
    return torch.from_numpy(a).float(), torch.from_numpy(b).float()


def relative(reference: np.ndarray, value: np.ndarray) -> float:
    return float(np.linalg.norm(value - reference) / np.linalg.norm(reference))


def test_both_judgements_equal_numpy() -> None:
    a, b = operands(60, 130, 50)
    candidate = find_candidate(GOOD)
    trial = Trial(a, b, torch.float32)
    found = judge(candidate, trial)
    out = (
        candidate.run(candidate.prepare(a, Side.A), candidate.prepare(b, Side.B), torch.float32)
        .double()
        .numpy()
    )
    seen = [candidate.prepare(x, s).dequantized().numpy() for x, s in ((a, Side.A), (b, Side.B))]
    originals = a.double().numpy() @ b.double().numpy()
    assert found.fault is None
    assert found.kernel == pytest.approx(relative(seen[0] @ seen[1], out), rel=1e-9)
    assert found.total == pytest.approx(relative(originals, out), rel=1e-9)
    emulated = find_candidate("emulated/e4m3/tensorwise/fp32")
    product = (
        emulated.run(emulated.prepare(a, Side.A), emulated.prepare(b, Side.B), torch.float32)
        .double()
        .numpy()
    )
    assert found.emulation == pytest.approx(relative(originals, product), rel=1e-9)


@pytest.mark.parametrize("size", [1e-7, 1e-6, 1e-3, 0.3])
def test_a_known_error_is_measured_and_judged(size: float) -> None:
    trial = Trial(*operands(64, 256, 64), torch.float32)
    found = judge(Off(find_candidate(GOOD), size), trial)
    assert found.kernel is not None
    # Rounding the float64 product to float32 adds at most 2**-24.
    assert found.kernel == pytest.approx(size, abs=2**-24)
    # float32 sums of 256 terms explain about 1e-6 (12 dB of room included); a thousandth is wrong.
    assert (found.fault is None) == (size < 1e-5), found.fault


def test_a_coarser_accumulator_than_claimed_is_caught() -> None:
    """A kernel that sums in the tensor core's accumulator while its recipe says fp32."""
    fast = find_candidate("emulated/e4m3/tensorwise/fast")
    a, b = operands(64, 2048, 64)
    honest = judge(fast, Trial(a, b, torch.float32))
    assert honest.fault is None
    lying = Off(fast, 0.0)

    @dataclasses.dataclass(frozen=True)
    class Lying(Off):
        def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
            return self.inner.run(a, b, out_dtype)

    found = judge(Lying(lying.inner, 0.0), Trial(a, b, torch.float32))
    assert found.fault is not None and "kernel error" in found.fault


@pytest.mark.parametrize("accumulation", list(Accumulation))
@pytest.mark.parametrize("k", [13, 39, 128, 1024, 4096])
@pytest.mark.parametrize("kind", ["centered", "positive", "heavy", "one-big"])
def test_the_limit_leaves_room_for_every_right_accumulator(
    accumulation: Accumulation, k: int, kind: str
) -> None:
    """The emulated accumulators, permuted orders of summation and split contractions all pass."""
    rng = np.random.default_rng(k)
    make = {
        "centered": lambda shape: rng.normal(size=shape),
        "positive": lambda shape: rng.exponential(size=shape),
        "heavy": lambda shape: rng.standard_t(2.1, size=shape),
        "one-big": lambda shape: rng.normal(size=shape) + 300.0 * (rng.random(shape) < 1 / k),
    }[kind]
    a = torch.from_numpy(make((48, k))).float()
    b = torch.from_numpy(make((k, 32))).float()
    candidate = find_candidate(f"emulated/e4m3/tensorwise/{accumulation}")

    @dataclasses.dataclass(frozen=True)
    class Reordered(Off):
        split: int = 1

        def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
            order = torch.randperm(k, generator=torch.Generator().manual_seed(4))
            left, right = a.data.float()[:, order], b.data.float()[order]
            parts = [
                accumulate(x, y, accumulation)
                for x, y in zip(
                    left.tensor_split(self.split, 1), right.tensor_split(self.split, 0), strict=True
                )
            ]
            assert a.scale is not None and b.scale is not None
            out = torch.stack(parts).sum(0) * a.scale * b.scale
            return out.to(out_dtype)

    for out_dtype in (torch.float32, torch.bfloat16):
        trial = Trial(a, b, out_dtype)
        assert judge(candidate, trial).fault is None
        for split in (1, 4):
            other = Reordered(candidate, 0.0, recipe=candidate.recipe, split=split)
            assert judge(other, trial).fault is None


def test_excess_is_one_for_the_same_arithmetic() -> None:
    for name in ("e4m3/rowwise/fp32", "e5m2/tensorwise/fp32"):
        honest = judge(
            find_candidate(f"torch.scaled_mm/{name}"), Trial(*operands(80, 64, 48), torch.float32)
        )
        assert honest.fault is None
        assert honest.total is not None and honest.emulation is not None
        # Only float32 sums differ, 1e-7 beside errors of 4 %.
        assert honest.total / honest.emulation == pytest.approx(1.0, abs=1e-4)


def test_another_format_than_the_recipe_says_is_caught() -> None:
    inner = find_candidate("torch.scaled_mm/e5m2/rowwise/fp32")
    found = judge(Off(inner, 0.0, "e4m3/rowwise/fp32"), Trial(*operands(80, 64, 48), torch.float32))
    assert found.total is not None and found.emulation is not None
    assert found.total / found.emulation > EXCESS_LIMIT
    assert found.fault is not None and "total error of the product" in found.fault


def test_a_coarser_grain_than_the_recipe_says_is_caught() -> None:
    """Tensorwise under a rowwise name: visible in the small rows only, not in the whole product."""
    a, b = operands(128, 64, 48)
    a[64:] *= 1e-5
    inner = find_candidate("torch.scaled_mm/e4m3/tensorwise/fp32")
    found = judge(Off(inner, 0.0, "e4m3/rowwise/fp32"), Trial(a, b, torch.float32))
    assert found.total is not None and found.emulation is not None
    assert found.total / found.emulation < EXCESS_LIMIT
    assert found.fault is not None and "total error of the worst tile" in found.fault


def test_a_scale_rounded_to_a_power_of_two_is_legitimate() -> None:
    @dataclasses.dataclass(frozen=True)
    class PowerOfTwo(Off):
        def prepare(
            self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
        ) -> Prepared:
            exact = self.inner.prepare(operand, side).scale
            assert exact is not None
            return self.inner.prepare(operand, side, torch.exp2(torch.log2(exact).ceil()))

        def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
            return self.inner.run(a, b, out_dtype)

    for seed in range(5):
        trial = Trial(*operands(128, 256, 96, seed), torch.float32)
        found = judge(PowerOfTwo(find_candidate(GOOD), 0.0), trial)
        assert found.fault is None, found.fault


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_baselines_are_right(recipe: str, dtype: torch.dtype) -> None:
    a, b = (x.to(dtype) for x in operands(70, 300, 30))
    found = judge(find_candidate(f"torch.matmul/{recipe}"), Trial(a, b, dtype))
    assert found.fault is None, found.fault
    assert found.total is not None
    # Rounding to p bits: at most 2**-p per operand and output; and sums of 300 terms in float32.
    bits = min({"fp32": 24, "bf16": 8, "fp16": 11}[recipe], 24 if dtype is torch.float32 else 8)
    assert found.total < 2**-bits * 3 + 2**-24 * math.sqrt(300)


def test_an_overflow_of_the_recipe_is_a_fault() -> None:
    a, b = operands(16, 32, 16)
    found = judge(find_candidate("torch.matmul/fp16"), Trial(a * 1e5, b * 1e-5, torch.float32))
    assert found.fault is not None and "Inf or NaN where the reference is finite" in found.fault


def test_non_finite_operands_must_show_in_the_output() -> None:
    a, b = operands(32, 64, 32)
    a[3, 5] = torch.nan
    b[7, 2] = torch.inf
    honest = judge(find_candidate(GOOD), Trial(a, b, torch.float32))
    assert honest.fault is None, honest.fault
    assert honest.total is None  # there is no finite reference for the whole product

    @dataclasses.dataclass(frozen=True)
    class Hiding(Off):
        def prepare(
            self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
        ) -> Prepared:
            return self.inner.prepare(operand.nan_to_num(0.0, 1.0, -1.0), side, scale)

    found = judge(Hiding(find_candidate(GOOD), 0.0), Trial(a, b, torch.float32))
    # Row 3 and column 2 of a 32 x 32 output.
    assert found.fault == "63 outputs are finite although an operand holds Inf or NaN there"


@pytest.mark.parametrize(
    ("m", "k", "n"), [(0, 16, 8), (8, 16, 0), (5, 0, 3), (1, 1, 1), (13, 39, 1), (1, 117, 13)]
)
@pytest.mark.parametrize("name", [GOOD, "torch.matmul/bf16", "emulated/e4m3/rowwise/fast"])
def test_awkward_shapes(m: int, k: int, n: int, name: str) -> None:
    a, b = torch.randn(m, k), torch.randn(k, n)
    found = judge(find_candidate(name), Trial(a, b, torch.float32))
    assert found.fault is None, found.fault
    if m * n == 0 or k == 0:
        assert found.kernel is None and found.total is None
    else:
        assert found.total is not None and found.total < 0.2


def test_batches() -> None:
    a, b = operands(20, 24, 17, batch=6)
    name = "emulated/e4m3/rowwise/fp32"
    found = judge(find_candidate(name), Trial(a, b, torch.float32))
    assert found.fault is None
    assert found.total is not None and 0.01 < found.total < 0.06


def test_zero_operands_are_exact() -> None:
    found = judge(
        find_candidate(GOOD), Trial(torch.zeros(32, 32), torch.randn(32, 16), torch.float32)
    )
    assert found.fault is None
    assert found.kernel is None and found.total is None


def test_static_scales_use_recorded_and_drawn_amax() -> None:
    a, b = operands(16, 32, 16)
    trial = Trial(a, b, torch.float32, (1e4, None))
    scale_a, scale_b = trial.static_scales(parse_recipe("e4m3/static/fp32"))
    assert scale_a is not None and scale_b is not None
    assert float(scale_a) == pytest.approx(8 * 1e4 / 448)
    assert float(scale_b) == pytest.approx(8 * float(b.abs().max()) / 448)
    assert trial.static_scales(parse_recipe("e4m3/tensorwise/fp32")) == (None, None)
    assert Scaling.STATIC.value == "static"
    found = judge(find_candidate("torch.scaled_mm/e4m3/static/fp32"), trial)
    assert found.fault is None
    # A thousandfold too wide a scale puts elements among the subnormals, in kernel and emulation.
    assert found.total == pytest.approx(found.emulation, rel=1e-3)


@given(
    m=st.integers(1, 40_000),
    n=st.integers(1, 5_000),
    k=st.integers(1, 100_000),
    batch=st.integers(1, 5_000),
)
@settings(max_examples=60)
def test_samples_are_bounded_and_hold_the_edges(m: int, n: int, k: int, batch: int) -> None:
    a = torch.empty(1).expand(batch, m, k)
    b = torch.empty(1).expand(batch, k, n)
    sample = OutputSample.of(a, b)
    for index, length in ((sample.row, m), (sample.column, n), (sample.batch, batch)):
        assert index is not None
        assert int(index[0]) == 0
        assert len(set(index.tolist())) == len(index) <= length
        assert index is sample.batch or int(index[-1]) == length - 1
        if len(index) > 1:
            # No gap is more than twice the mean gap: every large enough tile is hit.
            assert int(index.diff().max()) <= 2 * math.ceil(length / len(index))
    assert sample.batch is not None
    count = len(sample.row) * len(sample.column) * len(sample.batch)
    assert count * k <= max(2**26, 32 * 32 * k) * 4


def test_sampled_parts_equal_parts_of_the_whole() -> None:
    a, b = torch.randn(3, 700, 20), torch.randn(3, 20, 600)
    sample = OutputSample.of(a, b)
    assert sample.batch is not None
    index = torch.meshgrid(sample.batch, sample.row, sample.column, indexing="ij")
    whole = a.double() @ b.double()
    torch.testing.assert_close(
        sample.rows(a).double() @ sample.columns(b).double(), whole[index], rtol=0, atol=1e-12
    )
    assert torch.equal(sample.output(whole), whole[index])
    for name in ("emulated/e4m3/rowwise/fp32", "emulated/e4m3/tensorwise/fp32"):
        candidate = find_candidate(name)
        prepared = candidate.prepare(a, Side.A), candidate.prepare(b, Side.B)
        seen_a, seen_b = sample.seen(*prepared)
        assert torch.equal(seen_a, sample.rows(prepared[0].dequantized()))
        assert torch.equal(seen_b, sample.columns(prepared[1].dequantized()))
    padded = find_candidate("torch.scaled_mm/e4m3/rowwise/fp32")
    a2, b2 = torch.randn(700, 13), torch.randn(13, 601)
    sample = OutputSample.of(a2, b2)
    prepared = padded.prepare(a2, Side.A), padded.prepare(b2, Side.B)
    seen_a, seen_b = sample.seen(*prepared)
    assert torch.equal(seen_a, sample.rows(prepared[0].dequantized()))
    assert torch.equal(seen_b, sample.columns(prepared[1].dequantized()))
