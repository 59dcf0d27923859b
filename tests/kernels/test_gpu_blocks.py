"""Block scales and hybrids on a GPU: what supports() accepts runs, and is right."""

from __future__ import annotations

import pytest
import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.environment import chip_of
from loka_toolkit.kernels import torch_blockwise, torch_hybrid
from loka_toolkit.kernels.contract import Chip, Problem, Side
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.metrics import product_error
from loka_toolkit.numerics.recipes import Scaling, parse_recipe

pytestmark = pytest.mark.gpu

SHAPES = [(13, 39, 5), (117, 117, 1), (1, 128, 16), (0, 32, 16), (1003, 2613, 260), (256, 8192, 64)]
HEAVY = 1.5


@pytest.fixture(scope="module")
def chip() -> Chip:
    return Chip(chip_of(), torch.cuda.get_device_capability())


def operands(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(m + 3 * k + 7 * n)
    a = torch.randn(m, k, device="cuda", generator=generator)
    spread = torch.exp(HEAVY * torch.randn(m, k, device="cuda", generator=generator))
    b = torch.randn(k, n, device="cuda", generator=generator) * 0.1
    return (a * spread).to(dtype), b.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("candidate", torch_blockwise.candidates(), ids=lambda c: c.name)
def test_block_scaled_products_are_right(
    candidate: torch_blockwise.TorchBlockwise, dtype: torch.dtype, chip: Chip
) -> None:
    """Against float64 on the operands it sees: 14-bit sums in blocks of 128, then float32."""
    role = Role.WGRAD if candidate.parameter is False else Role.FWD
    for m, k, n in SHAPES:
        reason = candidate.supports(Problem(role, 1, m, n, k, dtype), chip)
        if reason is not None:
            pytest.skip(reason)
        a, b = operands(m, k, n, dtype)
        left, right = candidate.prepare(a, Side.A), candidate.prepare(b, Side.B)
        out = candidate.run(left, right, dtype)
        assert out.shape == (m, n) and out.dtype == dtype
        found = product_error(left.dequantized() @ right.dequantized(), out).sqnr_db
        assert found is None if m == 0 else found is not None and found > 46.0, (m, k, n, found)
        # and of the originals it errs as the emulation does
        ours = product_error(a.double() @ b.double(), out).sqnr_db
        emulated = emulate(a, b, candidate.fp8, parameter=bool(candidate.parameter))
        theirs = product_error(a.double() @ b.double(), emulated.to(dtype)).sqnr_db
        assert m == 0 or ours == pytest.approx(theirs, abs=0.1), (m, k, n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("candidate", torch_hybrid.candidates(), ids=lambda c: c.name)
def test_hybrids_are_right(
    candidate: torch_hybrid.TorchHybrid, dtype: torch.dtype, chip: Chip
) -> None:
    """Float32 sums of exact products, rounded to the output once."""
    role = Role.WGRAD if candidate.parameter is False else Role.FWD
    for m, k, n in SHAPES:
        assert candidate.supports(Problem(role, 1, m, n, k, dtype), chip) is None
        a, b = operands(m, k, n, dtype)
        static = [
            torch.tensor(4.0, device="cuda") if s is Scaling.STATIC else None
            for s in candidate.hybrid.scalings
        ]
        left, right = (
            candidate.prepare(a, Side.A, static[0]),
            candidate.prepare(b, Side.B, static[1]),
        )
        out = candidate.run(left, right, dtype)
        found = product_error(left.dequantized() @ right.dequantized(), out).sqnr_db
        floor = 100.0 if dtype is torch.float32 else 48.0
        assert found is None if m == 0 else found is not None and found > floor, (m, k, n, found)
    batched = candidate.prepare(torch.ones(3, 5, 8, device="cuda"), Side.A, static[0])
    other = candidate.prepare(torch.ones(3, 8, 2, device="cuda"), Side.B, static[1])
    product = candidate.run(batched, other, torch.float32)
    assert product.shape == (3, 5, 2)
    torch.testing.assert_close(product.double(), batched.dequantized() @ other.dequantized())


def test_a_block_scaled_product_is_captured_in_a_graph(chip: Chip) -> None:
    candidate = torch_blockwise.TorchBlockwise(parse_recipe("e4m3/blockwise/promoted-128"), True)
    if candidate.supports(Problem(Role.FWD, 1, 64, 64, 256, torch.bfloat16), chip):
        pytest.skip("no block scales here")
    a, b = operands(64, 256, 64, torch.bfloat16)

    def product() -> torch.Tensor:
        return candidate.run(
            candidate.prepare(a, Side.A), candidate.prepare(b, Side.B), torch.bfloat16
        )

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = product()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product()
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "e4m3/blockwise/promoted-128",
        "e5m2-e4m3/blockwise/fp32",
        "e4m3/mxfp8/fp32",
        "e4m3fnuz/rowwise/fp32",
        "tf32",
    ],
)
def test_the_emulation_of_blocks_is_the_same_on_both_machines(name: str) -> None:
    a, b = operands(64, 300, 40, torch.float32)
    here = emulate(a.cpu(), b.cpu(), parse_recipe(name), parameter=True)
    there = emulate(a, b, parse_recipe(name), parameter=True).cpu()
    torch.testing.assert_close(there, here, rtol=2.0**-22, atol=0)
