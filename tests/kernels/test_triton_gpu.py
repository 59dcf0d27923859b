"""What only a GPU can prove of the Triton kernels: tensor cores, capture, no waiting, races."""

from __future__ import annotations

import warnings

import pytest
import torch

from loka_toolkit.kernels.contract import Side
from loka_toolkit.kernels.triton_scaled_mm import TritonScaledMM, candidates
from loka_toolkit.numerics.accumulation import accumulate
from loka_toolkit.numerics.casting import cast
from loka_toolkit.numerics.formats import E4M3
from loka_toolkit.numerics.recipes import Accumulation, Scaling, parse_recipe
from loka_toolkit.numerics.scaling import operand_scale

pytest.importorskip("triton")

from loka_toolkit.kernels.triton_cast import Layout, cast_by_line, cast_with_scale, interpreted
from loka_toolkit.kernels.triton_gemm import scaled_product, tile_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(interpreted(), reason="the interpreter proves nothing about a GPU"),
]


def operands(m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(m + 3 * k + 7 * n)
    a = torch.randn(m, k, device="cuda", generator=generator)
    b = torch.randn(k, n, device="cuda", generator=generator)
    return a, b


@pytest.mark.parametrize("sign", ["mixed", "positive"])
@pytest.mark.parametrize("k", [512, 4096, 16384])
@pytest.mark.parametrize("accumulation", [Accumulation.FAST, Accumulation.PROMOTED_128])
def test_each_accumulation_errs_like_its_model(
    accumulation: Accumulation, k: int, sign: str
) -> None:
    """Hopper: promotion is real, and ``fast`` is what it says; 5 % as for torch's scaled_mm."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the model of both accumulations describes compute capability 9.0")
    a, b = operands(512, k, 512)
    if sign == "positive":
        a, b = a.abs(), b.abs()
    left = cast_with_scale(a, E4M3).data(Layout.ROW)
    right = cast_with_scale(b, E4M3, None, (Layout.COLUMN,)).data(Layout.COLUMN)
    one = torch.ones((), device="cuda")
    found = scaled_product(left, right, one, one, accumulation, torch.float32)
    found = found[:64, :64].double()
    exact = left[:64].double() @ right[:, :64].double()
    model = accumulate(left[:64], right[:, :64], accumulation).double()
    hardware_error = float((found - exact).norm() / exact.norm())
    assert float((model - exact).norm() / exact.norm()) == pytest.approx(hardware_error, rel=0.05)


@pytest.mark.parametrize("recipe", ["e4m3/tensorwise/fast", "e5m2-e4m3/rowwise/fast"])
def test_casts_and_products_are_captured_in_a_graph(recipe: str) -> None:
    """And replayed on new values: no size, scale or pointer is baked in."""
    candidate = TritonScaledMM(parse_recipe(recipe))
    a, b = operands(300, 208, 130)

    def product() -> torch.Tensor:
        return candidate.run(
            candidate.prepare(a, Side.A), candidate.prepare(b, Side.B), torch.float32
        )

    product()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product()
    a.mul_(-7)
    expected = product()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


def test_nothing_waits_for_the_device() -> None:
    a, b = operands(256, 512, 128)
    static = torch.tensor(0.05, device="cuda")
    chosen = [
        c
        for c in candidates()
        if c.fp8.accumulation is Accumulation.FAST and c.fp8.format_a == c.fp8.format_b
    ]

    def run() -> None:
        for candidate in chosen:
            given = [static if s.value == "static" else None for s in candidate.fp8.scalings]
            left = candidate.prepare(a, Side.A, given[0])
            right = candidate.prepare(b, Side.B, given[1])
            candidate.run(left, right, torch.bfloat16)

    run()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that not every wait is detected
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(8192, 1003, 257), (257, 8192, 1003), (2048, 768, 256)], ids=str)
def test_large_products_repeat_bit_for_bit(shape: tuple[int, int, int]) -> None:
    a, b = operands(*shape)
    for recipe in ("e4m3/tensorwise/promoted-128", "e5m2/rowwise/fast"):
        candidate = TritonScaledMM(parse_recipe(recipe))
        left, right = candidate.prepare(a, Side.A), candidate.prepare(b, Side.B)
        first = candidate.run(left, right, torch.bfloat16)
        exact = left.dequantized() @ right.dequantized()
        assert float((first.double() - exact).norm() / exact.norm()) < 0.02
        for _ in range(30):
            again = candidate.prepare(a, Side.A)
            assert torch.equal(again.data.view(torch.uint8), left.data.view(torch.uint8))
            assert torch.equal(candidate.run(again, right, torch.bfloat16), first)


def test_more_than_2_31_elements() -> None:
    """Offsets are 64 bits wide: the last rows of a huge operand are cast and multiplied right."""
    rows, columns = 2**17 + 16, 2**14 + 16
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-64:] = torch.randn(64, columns, device="cuda")
    found = cast_by_line(x, E4M3, -1)
    tail = x[-64:]
    expected = cast(tail, E4M3, operand_scale(tail, E4M3, Scaling.ROWWISE, "a"))
    last = found.data(Layout.ROW)[-64:]
    assert torch.equal(last.view(torch.uint8), expected.view(torch.uint8))
    b = torch.randn(64, columns, device="cuda")
    right = cast_by_line(b.mT, E4M3, -2, Layout.COLUMN)
    out = scaled_product(
        found.data(Layout.ROW),
        right.data(Layout.COLUMN),
        found.scale,
        right.scale,
        Accumulation.PROMOTED_128,
        torch.float32,
    )
    exact = (last.double() * found.scale[-64:].double()) @ (
        right.data(Layout.COLUMN).double() * right.scale.double()
    )
    assert float((out[-64:].double() - exact).norm() / exact.norm()) < 2e-3


def test_the_default_tile_of_every_anchor_shape_compiles_and_runs() -> None:
    """Shared memory and registers suffice; the chip decides, not a table."""
    seen = set()
    for m, n, k in ((2048, 768, 256), (8192, 1024, 1024), (16384, 4096, 512), (1, 1, 13)):
        tile = tile_for(m, n, k)
        seen.add(tile)
        a, b = operands(m, k, n)
        for recipe in ("e4m3/tensorwise/fast", "e5m2/tensorwise/promoted-128"):
            candidate = TritonScaledMM(parse_recipe(recipe))
            left, right = candidate.prepare(a, Side.A), candidate.prepare(b, Side.B)
            out = candidate.run(left, right, torch.bfloat16)[:128]
            exact = left.dequantized()[:128] @ right.dequantized()
            assert float((out.double() - exact).norm() / exact.norm().clamp(min=1e-30)) < 0.02
    assert len(seen) >= 3
