"""Block scales as cuBLASLt wants them, hybrids, and what is told of both without their chips."""

from __future__ import annotations

import math

import pytest
import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.kernels import torch_blockwise, torch_hybrid
from loka_toolkit.kernels.catalog import find_candidate
from loka_toolkit.kernels.contract import Chip, Prepared, Problem, Side
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.formats import E8M0
from loka_toolkit.numerics.recipes import Scaling, parse_recipe

CPU, H200 = Chip("cpu", None), Chip("H200", (9, 0))
L40, B200 = Chip("L40", (8, 9)), Chip("B200", (10, 0))
SHAPES = [(13, 39, 5), (1, 117, 1), (0, 16, 16), (130, 300, 260), (7, 0, 3), (33, 2613, 17)]


@pytest.mark.parametrize(
    ("name", "role", "chip", "expected"),
    [
        ("torch.scaled_mm/e4m3/blockwise/promoted-128", Role.FWD, H200, None),
        ("torch.scaled_mm/e4m3/blockwise/promoted-128", Role.DGRAD, H200, None),
        ("torch.scaled_mm/e4m3/blockwise/promoted-128", Role.WGRAD, H200, "no parameter"),
        ("torch.scaled_mm-1x128/e4m3/blockwise/promoted-128", Role.WGRAD, H200, None),
        ("torch.scaled_mm-1x128/e4m3/blockwise/promoted-128", Role.FWD, H200, "128x128"),
        ("torch.scaled_mm/e4m3/blockwise/promoted-128", Role.FWD, L40, "9.0 only and L40 has 8.9"),
        ("torch.scaled_mm/e4m3/blockwise/promoted-128", Role.FWD, B200, "9.0 only and B200"),
        ("torch.scaled_mm/e4m3/blockwise/promoted-128", Role.FWD, CPU, "on a CPU"),
        ("torch.scaled_mm/e4m3/blockwise/fp32", Role.FWD, H200, "promoted-128"),
        ("torch.scaled_mm/e5m2-e4m3/blockwise/promoted-128", Role.FWD, H200, "e4m3 only"),
        ("torch.scaled_mm/e4m3/mxfp8/fp32", Role.WGRAD, H200, "SM100"),
        ("torch.scaled_mm/e4m3/mxfp8/fp32", Role.WGRAD, B200, None),
        ("torch.scaled_mm/e4m3fnuz/blockwise/fp32", Role.FWD, H200, "gfx942"),
        ("torch.scaled_mm/e4m3fnuz/rowwise/fp32", Role.FWD, CPU, "gfx942"),
        ("torch.hybrid/bf16-e4m3/tensorwise/fp32", Role.FWD, CPU, None),
        ("torch.hybrid/bf16-e4m3/tensorwise/fp32", Role.FWD, Chip("V100", (7, 0)), "8.0 and V100"),
        ("torch.hybrid/fp16-e4m3/tensorwise/fp32", Role.FWD, Chip("V100", (7, 0)), None),
        ("torch.hybrid/bf16-e4m3/blockwise/fp32", Role.WGRAD, H200, "no parameter"),
        ("emulated/e4m3/blockwise/promoted-128", Role.GRAD_A, CPU, "no parameter"),
        ("emulated-1x128/e4m3/blockwise/promoted-128", Role.GRAD_A, CPU, None),
    ],
)
def test_support_is_told_from_chip_data_alone(
    name: str, role: Role, chip: Chip, expected: str | None
) -> None:
    reason = find_candidate(name).supports(Problem(role, 1, 64, 32, 256, torch.bfloat16), chip)
    if expected is None:
        assert reason is None
    else:
        assert reason is not None and expected in reason


def test_a_forward_product_of_activations_says_so() -> None:
    problem = Problem(Role.FWD, 1, 64, 32, 256, torch.bfloat16, parameter=False)
    weights = find_candidate("torch.scaled_mm/e4m3/blockwise/promoted-128")
    assert "no parameter" in str(weights.supports(problem, H200))
    both = find_candidate("torch.scaled_mm-1x128/e4m3/blockwise/promoted-128")
    assert both.supports(problem, H200) is None


@pytest.mark.parametrize(("cuda", "refused"), [("12.8", True), ("12.9", False), (None, False)])
def test_blocks_need_a_recent_cuda(
    cuda: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    problem = Problem(Role.FWD, 1, 64, 16, 128, torch.bfloat16)
    reason = find_candidate("torch.scaled_mm/e4m3/blockwise/promoted-128").supports(problem, H200)
    assert (reason is not None and "built for 12.8" in reason) is refused


@pytest.mark.parametrize("candidate", torch_blockwise.candidates(), ids=lambda c: c.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_prepared_blocks_are_those_of_the_emulation(
    candidate: torch_blockwise.TorchBlockwise, shape: tuple[int, int, int]
) -> None:
    """Padded and laid out for cuBLASLt, and still the operands that were emulated, bit by bit."""
    m, k, n = shape
    generator = torch.Generator().manual_seed(m + k + n)
    a = torch.randn(m, k, generator=generator).exp() * 100
    b = torch.randn(k, n, generator=generator)
    left, right = candidate.prepare(a, Side.A), candidate.prepare(b, Side.B)
    twin = find_candidate(candidate.name.replace("torch.scaled_mm", "emulated"))
    assert torch.equal(left.dequantized(), twin.prepare(a, Side.A).dequantized())
    assert torch.equal(right.dequantized(), twin.prepare(b, Side.B).dequantized())
    assert left.data.shape[0] % 16 == left.data.shape[1] % 128 == 0
    assert right.data.shape[0] % 128 == right.data.shape[1] % 16 == 0
    if m and k:
        assert left.data.stride(-1) == 1 and right.data.stride(-2) == 1
    assert left.scale is not None and right.scale is not None
    for prepared in (left, right):
        assert prepared.block is not None and prepared.scale is not None
        blocks = (
            math.ceil(d / b) for d, b in zip(prepared.data.shape, prepared.block, strict=True)
        )
        assert prepared.scale.shape == tuple(blocks)
        expected = E8M0.torch_dtype if "mxfp8" in candidate.recipe else torch.float32
        assert prepared.scale.dtype is expected
    if 0 in shape:
        out = candidate.run(left, right, torch.bfloat16)
        assert out.shape == (m, n) and (out == 0).all()


def test_scales_of_a_weight_have_k_innermost_and_whole_fours() -> None:
    scale = torch.arange(1.0, 7.0).reshape(3, 2)  # 3 blocks along K, 2 along N
    laid_out = torch_blockwise._weight_scale(scale)
    assert laid_out.shape == (4, 2) and laid_out.stride() == (1, 4)
    assert torch.equal(laid_out[:3], scale) and (laid_out[3] == 1).all()


@pytest.mark.parametrize("shape", [(128, 4), (200, 7), (1, 1), (300, 13)])
def test_mx_scales_lie_where_the_documentation_of_cublas_says(shape: tuple[int, int]) -> None:
    """Offset of row r and block c within a tile: (r mod 32) * 16 + (r div 32) * 4 + c."""
    codes = torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(0))
    codes = codes.to(torch.uint8)
    found = torch_blockwise.swizzled(codes.view(E8M0.torch_dtype)).view(torch.uint8)
    tiles = math.ceil(shape[1] / 4)
    assert found.numel() == math.ceil(shape[0] / 128) * tiles * 512
    for r in range(shape[0]):
        for c in range(shape[1]):
            tile = (r // 128) * tiles + c // 4
            assert found[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] == codes[r, c]


def test_what_blocks_cannot_take_is_refused() -> None:
    candidate = find_candidate("torch.scaled_mm/e4m3/blockwise/promoted-128")
    with pytest.raises(ConfigurationError, match="multiplies matrices"):
        candidate.prepare(torch.ones(2, 3, 4), Side.A)
    with pytest.raises(ConfigurationError, match="computes its scales"):
        candidate.prepare(torch.ones(3, 4), Side.A, torch.tensor(1.0))
    bare = find_candidate("torch.matmul/fp32").prepare(torch.ones(16, 16), Side.A)
    with pytest.raises(ConfigurationError, match="block scales"):
        candidate.run(bare, bare, torch.float32)


@pytest.mark.parametrize("candidate", torch_hybrid.candidates(), ids=lambda c: c.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_hybrids_agree_with_the_emulation(
    candidate: torch_hybrid.TorchHybrid, shape: tuple[int, int, int]
) -> None:
    """Float32 sums; with blocks the FP8 factor is rounded to 16 bits once more."""
    m, k, n = shape
    generator = torch.Generator().manual_seed(m * 3 + k + n)
    a = torch.randn(m, k, generator=generator) * 3
    b = torch.randn(k, n, generator=generator) * 0.1
    static = [
        torch.tensor(0.125) if s is Scaling.STATIC else None for s in candidate.hybrid.scalings
    ]
    left, right = candidate.prepare(a, Side.A, static[0]), candidate.prepare(b, Side.B, static[1])
    out = candidate.run(left, right, torch.float32)
    theirs = emulate(
        a,
        b,
        candidate.hybrid,
        scale_a=static[0],
        scale_b=static[1],
        parameter=bool(candidate.parameter),
    )
    size = left.dequantized().abs() @ right.dequantized().abs()
    wide = 2.0**-8 if "bf16" in candidate.recipe else 2.0**-11
    rounding = wide if "blockwise" in candidate.recipe else 0.0
    assert out.shape == (m, n)
    assert ((out - theirs).abs() <= (k * 2.0**-23 + rounding) * size).all()
    assert candidate.run(left, right, torch.bfloat16).dtype is torch.bfloat16


def test_a_hybrid_does_not_overflow_before_it_is_scaled() -> None:
    """FP16 times stored E4M3 values up to 448: the sum leaves float16, the product does not."""
    candidate = find_candidate("torch.hybrid/fp16-e4m3/tensorwise/fp32")
    a, b = torch.full((2, 64), 100.0), torch.full((64, 3), 0.01)
    out = candidate.run(candidate.prepare(a, Side.A), candidate.prepare(b, Side.B), torch.float16)
    torch.testing.assert_close(out, torch.full((2, 3), 64.0, dtype=torch.float16))


def test_the_16_bit_factor_of_a_hybrid_has_no_scale() -> None:
    for family in ("torch.hybrid", "emulated"):
        candidate = find_candidate(f"{family}/bf16-e4m3/static/fp32")
        with pytest.raises(ConfigurationError, match="does not scale"):
            candidate.prepare(torch.ones(3, 4), Side.A, torch.tensor(1.0))
        with pytest.raises(ConfigurationError, match="static"):
            candidate.prepare(torch.ones(3, 4), Side.B)


@pytest.mark.parametrize(
    ("block", "scale_shape"), [((1, 128), (5, 3)), ((128, 128), (1, 3)), ((1, 32), (5, 10))]
)
def test_dequantized_blocks_may_be_ragged_and_padded(
    block: tuple[int, int], scale_shape: tuple[int, int]
) -> None:
    scale = 2.0 ** torch.arange(math.prod(scale_shape)).reshape(scale_shape).float()
    data = torch.randn(8, 320)
    prepared = Prepared(data, scale, torch.Size((5, 300)), Side.A, block)
    value = prepared.dequantized()
    assert value.shape == (5, 300) and value.dtype == torch.float64
    for i in (0, 4):
        for j in (0, 31, 32, 127, 128, 299):
            expected = data[i, j].double() * scale[i // block[0], j // block[1]].double()
            assert value[i, j] == expected


def test_recipes_of_both_files_parse_back() -> None:
    for candidate in (*torch_blockwise.candidates(), *torch_hybrid.candidates()):
        assert parse_recipe(candidate.recipe).name == candidate.recipe
