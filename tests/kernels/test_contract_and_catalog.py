"""The list of candidates, and what every one of them promises."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.errors import ConfigurationError, UnknownNameError
from loka_toolkit.kernels.catalog import catalog, find_candidate
from loka_toolkit.kernels.contract import Candidate, Chip, Prepared, Problem, Side
from loka_toolkit.numerics.recipes import BASELINE_RECIPES, all_recipes

CPU = Chip("cpu", None)
H200 = Chip("H200", (9, 0))
ON_CPU = [
    c for c in catalog() if c.supports(Problem(Role.WGRAD, 1, 8, 8, 8, torch.float32), CPU) is None
]
EVERY_CANDIDATE = pytest.mark.parametrize("candidate", catalog(), ids=lambda c: c.name)


def problem(role: Role = Role.FWD, dtype: torch.dtype = torch.float32, batch: int = 1) -> Problem:
    return Problem(role, batch, 13, 5, 39, dtype)


def test_every_recipe_has_a_candidate_and_names_are_unique() -> None:
    names = [c.name for c in catalog()]
    assert len(names) == len(set(names))
    for name, recipe in all_recipes().items():
        assert f"emulated/{name}" in names
        if recipe.is_hybrid:
            assert (f"torch.hybrid/{name}" in names) == ("fnuz" not in name)
        elif not recipe.is_baseline:
            assert f"torch.scaled_mm/{name}" in names
        if "blockwise" in name:
            assert f"emulated-1x128/{name}" in names
    for baseline in BASELINE_RECIPES:
        assert f"torch.matmul/{baseline}" in names
    assert "reference/fp64" in names


@EVERY_CANDIDATE
def test_a_candidate_keeps_the_contract(candidate: Candidate) -> None:
    assert isinstance(candidate, Candidate)
    assert find_candidate(candidate.name) is candidate
    assert candidate.name.endswith(candidate.recipe)
    assert candidate.version()
    assert candidate.abi >= 1
    assert Role.NORM not in candidate.roles
    reason = candidate.supports(problem(Role.NORM), H200)
    assert reason is not None and "norm" in reason


def test_a_cpu_has_float32_scaled_mm_every_emulation_and_every_baseline_but_tf32() -> None:
    families = [c.name.split("/")[0] for c in ON_CPU]
    assert {family: families.count(family) for family in set(families)} == {
        "reference": 1,
        "torch.matmul": 3,
        "torch.scaled_mm": 2 * 2 * 3 * 3,
        "torch.hybrid": 2 * 4 * 2 * 3 // 2,  # OCP formats; blockwise apart
        "torch.hybrid-1x128": 2 * 4 // 2 * 2 // 2 * 2,
        # WGRAD multiplies two activations: of blockwise recipes only the second candidate.
        "emulated": sum("blockwise" not in name for name in all_recipes()),
        "emulated-1x128": sum("blockwise" in name for name in all_recipes()),
    }


def test_only_real_kernels_are_not_emulated() -> None:
    real = {c.name.split("/")[0] for c in catalog() if not c.emulated}
    assert real == {
        "torch.matmul",
        "torch.scaled_mm",
        "torch.scaled_mm-1x128",
        "torch.hybrid",
        "torch.hybrid-1x128",
        "triton.scaled_mm",
    }


def test_an_unknown_candidate_lists_near_misses() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean .*torch.scaled_mm/e4m3/rowwise/fast"):
        find_candidate("torch.scaledmm/e4m3/rowwise/fast")


def is_representative(recipe: str) -> bool:
    """Whether a recipe is not one that differs from such a one by a format or a grain only."""
    known = all_recipes().get(recipe)
    mixed = known is not None and known.scaling is None and not known.is_hybrid
    return not mixed or recipe.startswith(("e4m3/static-rowwise", "e5m2-e4m3/rowwise-tensorwise"))


@pytest.mark.parametrize(
    "candidate", [c for c in ON_CPU if is_representative(c.recipe)], ids=lambda c: c.name
)
@pytest.mark.parametrize("shape", [(13, 39, 5), (1, 117, 1), (0, 16, 16), (32, 16, 48), (7, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_candidate_is_right_on_the_operands_it_sees(
    candidate: Candidate, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Against float64 on the de-quantized operands: only rounding of sums and output is left."""
    m, k, n = shape
    assert candidate.supports(Problem(Role.WGRAD, 1, m, n, k, dtype), CPU) is None
    generator = torch.Generator().manual_seed(m * 31 + k * 7 + n)
    a = (torch.randn(m, k, generator=generator) * 3).to(dtype)
    b = (torch.randn(k, n, generator=generator) * 0.2).to(dtype)
    recipe = all_recipes().get(candidate.recipe)
    scale_a, scale_b = (
        torch.tensor(0.05) if recipe is not None and scaling == "static" else None
        for scaling in (recipe.scalings if recipe is not None else ("", ""))
    )
    left, right = candidate.prepare(a, Side.A, scale_a), candidate.prepare(b, Side.B, scale_b)
    out = candidate.run(left, right, dtype)
    assert out.dtype == dtype and out.shape == (m, n)
    seen_a, seen_b = left.dequantized(), right.dequantized()
    assert seen_a.shape == (m, k) and seen_b.shape == (k, n)
    assert seen_a.dtype == torch.float64
    error = (out.double() - seen_a @ seen_b).abs()
    # float32 sums of K terms, the 14-bit accumulators, a float16 or bfloat16 product, the output
    sums = 2.0**-9 if candidate.recipe.endswith(("fast", "promoted-128")) else k * 2.0**-23
    arithmetic = {"torch.matmul/bf16": 2.0**-8, "torch.matmul/fp16": 2.0**-11}.get(
        candidate.name, 0.0
    )
    output = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-23
    bound = (sums + arithmetic + output) * (seen_a.abs() @ seen_b.abs())
    assert (error <= bound).all()


def test_lists_are_cheap_to_import() -> None:
    """No kernel library is imported before it is asked for."""
    code = (
        "import sys; import loka_toolkit.kernels.catalog as c; c.catalog(); "
        "bad = {'triton', 'torchao', 'fbgemm_gpu', 'pandas', 'pyarrow'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["reference/fp64", "torch.matmul/bf16"])
def test_a_scale_for_what_does_not_scale_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="does not scale"):
        find_candidate(name).prepare(torch.ones(2, 2), Side.A, torch.tensor(1.0))


def test_a_static_recipe_needs_its_scale() -> None:
    for family in ("emulated", "torch.scaled_mm"):
        with pytest.raises(ConfigurationError, match="static"):
            find_candidate(f"{family}/e4m3/static/fp32").prepare(torch.ones(2, 2), Side.A)


def test_the_emulation_of_a_huge_product_is_refused_on_a_cpu() -> None:
    huge = Problem(Role.FWD, 1, 16384, 4096, 4096, torch.float32)
    fast = find_candidate("emulated/e4m3/tensorwise/fast")
    reason = fast.supports(huge, CPU)
    assert reason is not None and "sub-sample" in reason
    assert fast.supports(huge, H200) is None
    assert find_candidate("emulated/e4m3/tensorwise/fp32").supports(huge, CPU) is None


def test_batches_go_where_they_can() -> None:
    a, b = torch.randn(4, 13, 39), torch.randn(4, 39, 5)
    exact = a.double() @ b.double()
    for name in ("reference/fp64", "torch.matmul/fp32", "emulated/e4m3/rowwise/fast"):
        candidate = find_candidate(name)
        assert candidate.supports(problem(batch=4), CPU) is None
        out = candidate.run(
            candidate.prepare(a, Side.A), candidate.prepare(b, Side.B), torch.float32
        )
        assert (out - exact).norm() / exact.norm() < 0.05


def test_flops_count_a_multiplication_and_an_addition() -> None:
    assert Problem(Role.FWD, 2, 3, 5, 7, torch.float32).flops == 2 * 2 * 3 * 5 * 7


def test_dequantized_drops_padding_and_widens() -> None:
    data = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 0.0]])
    prepared = Prepared(data, torch.tensor([[0.5], [2.0]]), torch.Size([2, 2]), Side.A)
    assert prepared.dequantized().tolist() == [[0.5, 1.0], [6.0, 8.0]]
    assert Prepared(data, None, torch.Size([1, 2]), Side.A).dequantized().tolist() == [[1.0, 2.0]]
