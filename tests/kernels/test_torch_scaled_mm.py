"""torch's scaled_mm: constraints told without the chip, padding, layouts, and what really runs."""

from __future__ import annotations

import math

import pytest
import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.kernels.catalog import find_candidate
from loka_toolkit.kernels.contract import Chip, Problem, Side
from loka_toolkit.kernels.torch_scaled_mm import TorchScaledMM, candidates
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.recipes import Accumulation, Scaling, parse_recipe

CPU = Chip("cpu", None)
H200 = Chip("H200", (9, 0))
L40 = Chip("L40", (8, 9))
A100 = Chip("A100", (8, 0))
ON_CPU = [
    c
    for c in candidates()
    if c.fp8.accumulation is Accumulation.FP32 and "fnuz" not in c.fp8.format_a
]


def known_scales(candidate: TorchScaledMM) -> list[torch.Tensor | None]:
    return [torch.tensor(0.125) if s is Scaling.STATIC else None for s in candidate.fp8.scalings]


def scaled_mm(recipe: str) -> TorchScaledMM:
    return TorchScaledMM(parse_recipe(recipe))


@pytest.mark.parametrize(
    ("recipe", "chip", "dtype", "batch", "expected"),
    [
        ("e4m3/tensorwise/fast", H200, torch.float32, 1, None),
        ("e4m3/tensorwise/fast", H200, torch.bfloat16, 1, None),
        ("e4m3/static/promoted-128", H200, torch.float16, 1, None),
        ("e5m2-e4m3/tensorwise/fast", L40, torch.bfloat16, 1, None),
        ("e4m3-e5m2/rowwise/fast", H200, torch.bfloat16, 1, None),
        ("e4m3/tensorwise/fp32", CPU, torch.float32, 1, None),
        ("e5m2/rowwise/fp32", CPU, torch.bfloat16, 1, None),
        ("e4m3/tensorwise/fast", CPU, torch.float32, 1, "a CPU sums fp32"),
        ("e4m3/tensorwise/fp32", H200, torch.float32, 1, "promoted-128"),
        ("e4m3/tensorwise/fast", A100, torch.bfloat16, 1, "8.9 and A100 has 8.0"),
        ("e5m2/tensorwise/fast", H200, torch.bfloat16, 1, "one factor must be e4m3"),
        ("e4m3/rowwise/fast", L40, torch.bfloat16, 1, None),
        ("e4m3/rowwise/fast", L40, torch.float32, 1, "9.0 only and L40 has 8.9"),
        ("e4m3/tensorwise/fast", H200, torch.bfloat16, 16, None),
        ("e4m3/tensorwise/fast", H200, torch.bfloat16, 17, "17 calls are too many (limit 16)"),
        ("e4m3/tensorwise/fp32", CPU, torch.float32, 1024, None),
        ("e4m3/tensorwise/fp32", CPU, torch.float32, 1025, "too many (limit 1024)"),
        ("e4m3fnuz/tensorwise/fp32", H200, torch.bfloat16, 1, "gfx942"),
        ("e4m3/tensorwise-rowwise/fast", H200, torch.float32, 1, None),
        ("e4m3/tensorwise-rowwise/fast", L40, torch.float32, 1, "9.0 only and L40 has 8.9"),
        ("e4m3/tensorwise/fp32", CPU, torch.float64, 1, "does not write torch.float64"),
    ],
)
def test_support_is_told_from_chip_data_alone(
    recipe: str, chip: Chip, dtype: torch.dtype, batch: int, expected: str | None
) -> None:
    reason = scaled_mm(recipe).supports(Problem(Role.DGRAD, batch, 64, 1, 39, dtype), chip)
    if expected is None:
        assert reason is None
    else:
        assert reason is not None and expected in reason


@pytest.mark.parametrize(
    ("cuda", "refused"), [("12.8", True), ("12.9", False), ("13.0", False), (None, False)]
)
def test_rowwise_float32_output_depends_on_the_cuda_version(
    cuda: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CUDA in this torch, the target is assumed to have today's wheels."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    problem = Problem(Role.FWD, 1, 64, 16, 32, torch.float32)
    reason = scaled_mm("e4m3/rowwise/fast").supports(problem, H200)
    assert (reason is not None and "built for 12.8" in reason) is refused
    assert scaled_mm("e4m3/tensorwise/fast").supports(problem, H200) is None


@pytest.mark.parametrize("candidate", ON_CPU, ids=lambda c: c.name)
@pytest.mark.parametrize("shape", [(13, 39, 5), (13, 117, 1), (1, 16, 16), (64, 200, 33)])
def test_it_agrees_with_the_emulation_to_float32_rounding(
    candidate: TorchScaledMM, shape: tuple[int, int, int]
) -> None:
    """Same casts, float32 sums: what is left is the order of K float32 additions."""
    m, k, n = shape
    generator = torch.Generator().manual_seed(m + k + n)
    a = torch.randn(m, k, generator=generator).exp() * 10  # log-normal, one sign
    b = torch.randn(k, n, generator=generator)
    scale_a, scale_b = known_scales(candidate)
    left, right = candidate.prepare(a, Side.A, scale_a), candidate.prepare(b, Side.B, scale_b)
    ours = candidate.run(left, right, torch.float32)
    theirs = emulate(a, b, candidate.fp8, scale_a=scale_a, scale_b=scale_b)
    size = left.dequantized().abs() @ right.dequantized().abs()
    assert ((ours - theirs).abs() <= k * 2.0**-23 * size).all()


@pytest.mark.parametrize("candidate", ON_CPU, ids=lambda c: c.name)
@pytest.mark.parametrize("shape", [(3, 7, 5, 13), (1, 1, 1, 39), (0, 4, 5, 6), (2, 0, 3, 4)])
def test_a_batch_is_the_products_of_it_under_one_scale(
    candidate: TorchScaledMM, shape: tuple[int, int, int, int]
) -> None:
    """Tensorwise means one scale for the whole batch, as the emulation and the recorder mean it."""
    batch, m, n, k = shape
    generator = torch.Generator().manual_seed(sum(shape))
    a = torch.randn(batch, k, m, generator=generator).exp().mT
    b = torch.randn(batch, k, n, generator=generator)
    scale_a, scale_b = known_scales(candidate)
    left, right = candidate.prepare(a, Side.A, scale_a), candidate.prepare(b, Side.B, scale_b)
    ours = candidate.run(left, right, torch.float32)
    assert ours.shape == (batch, m, n)
    size = left.dequantized().abs() @ right.dequantized().abs()
    for item in range(batch):
        exact = left.dequantized()[item] @ right.dequantized()[item]
        assert ((ours[item] - exact).abs() <= k * 2.0**-23 * size[item]).all()
    if batch and m:
        theirs = emulate(a, b, candidate.fp8, scale_a=scale_a, scale_b=scale_b)
        assert ((ours - theirs).abs() <= k * 2.0**-23 * size).all()


@pytest.mark.parametrize("recipe", ["e4m3/tensorwise/fp32", "e4m3/rowwise/fp32"])
def test_operands_are_laid_out_and_padded_as_cuda_wants_them(recipe: str) -> None:
    """K and N to multiples of 16, A row-major, B column-major, zeros, scales of one."""
    candidate = scaled_mm(recipe)
    a, b = torch.randn(7, 39), torch.randn(39, 1)
    left, right = candidate.prepare(a, Side.A), candidate.prepare(b, Side.B)
    assert (left.data.shape, left.data.stride()) == ((7, 48), (48, 1))
    assert (right.data.shape, right.data.stride()) == ((48, 16), (1, 48))
    assert (left.data[:, 39:].float() == 0).all()
    assert (right.data.float()[39:] == 0).all() and (right.data.float()[:, 1:] == 0).all()
    assert left.scale is not None and right.scale is not None
    assert left.scale.dtype == right.scale.dtype == torch.float32
    if "rowwise" in recipe:
        assert left.scale.shape == (7, 1) and right.scale.shape == (1, 16)
        assert left.scale.is_contiguous() and right.scale.is_contiguous()
        assert (right.scale[0, 1:] == 1).all()
    else:
        assert left.scale.shape == right.scale.shape == ()


def test_a_batch_that_is_no_multiple_of_16_is_padded_in_wgrad() -> None:
    """In wgrad the batch is the contraction: zeros add nothing."""
    candidate = scaled_mm("e5m2-e4m3/tensorwise/fp32")
    g, x = torch.randn(1003, 24), torch.randn(1003, 39)
    left, right = candidate.prepare(g.mT, Side.A), candidate.prepare(x, Side.B)
    assert left.data.shape == (24, 1008) and right.data.shape == (1008, 48)
    out = candidate.run(left, right, torch.float32)
    exact = left.dequantized() @ right.dequantized()
    # float32 sums of 1,003 terms drift by sqrt(1003) * 2**-24 of sum |a||b|, about 640 here: 1e-3.
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("recipe", ["e4m3/tensorwise/fp32", "e5m2-e4m3/rowwise/fp32"])
def test_poison_is_not_hidden(recipe: str) -> None:
    candidate = scaled_mm(recipe)
    a, b = torch.randn(5, 20), torch.randn(20, 3)
    a[2, 3] = math.inf
    out = candidate.run(candidate.prepare(a, Side.A), candidate.prepare(b, Side.B), torch.float32)
    assert not torch.isfinite(out[2]).any()
    assert torch.isfinite(out[[0, 1, 3, 4]]).all()


def test_zeros_stay_zeros_and_inputs_stay_as_they_were() -> None:
    candidate = scaled_mm("e4m3/rowwise/fp32")
    a, b = torch.zeros(4, 8), torch.randn(8, 2)
    b_before = b.clone()
    out = candidate.run(candidate.prepare(a, Side.A), candidate.prepare(b, Side.B), torch.float32)
    assert (out == 0).all()
    assert torch.equal(b, b_before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_strided_operands_of_any_dtype(dtype: torch.dtype) -> None:
    candidate = scaled_mm("e4m3/rowwise/fp32")
    base = torch.randn(39, 26).to(dtype)
    a, b = base.mT[::2], base[:, 5:9]
    out = candidate.run(candidate.prepare(a, Side.A), candidate.prepare(b, Side.B), dtype)
    tight = candidate.run(
        candidate.prepare(a.contiguous(), Side.A), candidate.prepare(b.contiguous(), Side.B), dtype
    )
    torch.testing.assert_close(out, tight, rtol=0, atol=0)
    assert out.dtype == dtype


def test_what_is_called_is_said() -> None:
    assert scaled_mm("e4m3/tensorwise/fast").operator.endswith("use_fast_accum=True)")
    assert scaled_mm("e4m3/tensorwise/promoted-128").operator.endswith("use_fast_accum=False)")
    candidate = scaled_mm("e4m3/tensorwise/fp32")
    a = candidate.prepare(torch.randn(32, 32), Side.A)
    b = candidate.prepare(torch.randn(32, 16), Side.B)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        candidate.run(a, b, torch.float32)
    assert candidate.operator in {event.key for event in profile.key_averages()}


def test_what_it_cannot_take_is_refused() -> None:
    candidate = scaled_mm("e4m3/tensorwise/fp32")
    with pytest.raises(ConfigurationError, match="multiplies matrices"):
        candidate.prepare(torch.ones(2, 2, 3, 4), Side.A)
    bare = find_candidate("torch.matmul/fp32").prepare(torch.ones(16, 16), Side.A)
    with pytest.raises(ConfigurationError, match="scaled operands"):
        candidate.run(bare, bare, torch.float32)
