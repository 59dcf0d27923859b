"""The candidates under the interpreter or on a GPU: the contract, and what the judge says."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("scipy")
pytest.importorskip("pyarrow")

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.harness.judge import judge
from loka_toolkit.harness.run import choose_candidates
from loka_toolkit.harness.trial import Trial
from loka_toolkit.kernels.catalog import catalog, find_candidate
from loka_toolkit.kernels.contract import Chip, Problem, Side
from loka_toolkit.kernels.triton_cast import interpreted
from loka_toolkit.kernels.triton_scaled_mm import TritonScaledMM
from loka_toolkit.numerics.casting import cast
from loka_toolkit.numerics.recipes import parse_recipe
from loka_toolkit.numerics.scaling import operand_scale

INTERPRETED = interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"
CHIP = Chip("cpu", None) if INTERPRETED else Chip("H200", (9, 0))
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

RECIPES = [
    "e4m3/tensorwise/fast",
    "e4m3/rowwise/promoted-128",
    "e5m2-e4m3/tensorwise/promoted-128",
    "e5m2/rowwise/fast",
    "e4m3/static/fast",
    "e4m3/static-rowwise/fast",
    "e4m3-e5m2/rowwise-tensorwise/fast",
]


def draw(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(
        torch.randn(*shape[:-1], 1, generator=generator)
    )
    return x.to(dtype).to(DEVICE)


def triton(recipe: str) -> TritonScaledMM:
    return TritonScaledMM(parse_recipe(recipe))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 33, 39, 17), torch.float32),
        ((1, 64, 117, 1), torch.bfloat16),
        ((1, 1, 13, 5), torch.float16),
        ((3, 20, 50, 30), torch.bfloat16),
    ],
)
def test_the_judge_finds_no_fault(
    recipe: str, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Against float64 on what the kernel saw, and against the recipe's emulation on the draw."""
    batch, m, k, n = shape
    candidate = triton(recipe)
    assert candidate.supports(Problem(Role.FWD, batch, m, n, k, dtype), CHIP) is None
    leading = (batch,) if batch > 1 else ()
    a = draw(*leading, m, k, seed=k, dtype=dtype)
    b = draw(*leading, n, k, seed=n, dtype=dtype).mT
    found = judge(candidate, Trial(a, b, dtype, (30.0, 30.0)))
    assert found.fault is None
    assert found.total is not None and found.emulation is not None
    assert found.total < 1.1 * found.emulation + 2.0**-8


@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_are_cast_as_numerics_casts_them(recipe: str) -> None:
    candidate = triton(recipe)
    for side, x in (
        (Side.A, draw(13, 39, seed=1, dtype=torch.bfloat16)),
        (Side.B, draw(39, 21, seed=2, dtype=torch.bfloat16)),
    ):
        which = 0 if side is Side.A else 1
        fmt, scaling = candidate.fp8.formats[which], candidate.fp8.scalings[which]
        given = torch.tensor(0.05, device=DEVICE) if scaling.value == "static" else None
        found = candidate.prepare(x, side, given)
        scale = operand_scale(
            x.cpu(), fmt, scaling, side.value, None if given is None else given.cpu()
        )
        expected = cast(x.cpu(), fmt, scale).to(torch.float64) * scale.to(torch.float64)
        assert torch.equal(found.dequantized().cpu(), expected)
        contiguous = found.data if side is Side.A else found.data.mT
        assert contiguous.is_contiguous() and contiguous.shape[-1] == 48
        assert found.shape == x.shape and found.side is side


def test_poison_is_not_hidden() -> None:
    candidate = triton("e4m3/tensorwise/fast")
    a, b = draw(5, 20, seed=1, dtype=torch.float32), draw(20, 3, seed=2, dtype=torch.float32)
    a[2, 3] = math.inf
    out = candidate.run(candidate.prepare(a, Side.A), candidate.prepare(b, Side.B), torch.float32)
    assert not torch.isfinite(out[2]).any()
    assert torch.isfinite(out[[0, 1, 3, 4]]).all()


@pytest.mark.parametrize("shape", [(0, 16, 16), (7, 0, 3), (7, 3, 0)])
def test_empty_products(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = torch.randn(m, k, device=DEVICE), torch.randn(k, n, device=DEVICE)
    for recipe in ("e4m3/tensorwise/fast", "e4m3/rowwise/fast"):
        candidate = triton(recipe)
        left, right = candidate.prepare(a, Side.A), candidate.prepare(b, Side.B)
        assert left.dequantized().shape == (m, k) and right.dequantized().shape == (k, n)
        out = candidate.run(left, right, torch.float32)
        assert out.shape == (m, n) and (out == 0).all()


def test_under_the_interpreter_it_is_emulated_and_on_a_gpu_it_is_not() -> None:
    candidate = find_candidate("triton.scaled_mm/e4m3/tensorwise/fast")
    assert candidate.emulated is INTERPRETED
    huge = Problem(Role.FWD, 1, 16384, 4096, 4096, torch.float32)
    assert (candidate.supports(huge, CHIP) is None) is not INTERPRETED


def test_what_it_cannot_take_is_refused() -> None:
    x = torch.ones(4, 4, device=DEVICE)
    with pytest.raises(ConfigurationError, match="static scaling needs the scale"):
        triton("e4m3/static/fast").prepare(x, Side.A)
    candidate = triton("e4m3/tensorwise/fast")
    with pytest.raises(ConfigurationError, match="float64"):
        candidate.prepare(x.double(), Side.A)
    bare = find_candidate("torch.matmul/fp32").prepare(x, Side.A)
    with pytest.raises(ConfigurationError, match="scaled operands"):
        candidate.run(bare, bare, torch.float32)


def test_what_is_interpreted_is_not_replayed_unless_named() -> None:
    """An emulated candidate is not timed, and neither choose nor install takes it."""
    chosen = choose_candidates(catalog(), None, ["e4m3/tensorwise/fast"])
    assert ("triton.scaled_mm/e4m3/tensorwise/fast" in chosen) is not INTERPRETED
    assert "torch.scaled_mm/e4m3/tensorwise/fast" in chosen
