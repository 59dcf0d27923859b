"""The baselines: the precision named is the precision used, whatever the user has set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.kernels.catalog import find_candidate
from loka_toolkit.kernels.contract import Chip, Problem, Side


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def product(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    candidate = find_candidate(name)
    return candidate.run(candidate.prepare(a, Side.A), candidate.prepare(b, Side.B), torch.float32)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("torch.matmul/fp32", 120, 200), ("torch.matmul/bf16", 45, 60), ("torch.matmul/fp16", 60, 80)],
)
@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
@pytest.mark.usefixtures("matmul_precision")
def test_precision_does_not_depend_on_the_users_setting(
    name: str, low: float, high: float, setting: str
) -> None:
    """Output in float32: BF16's 8 and FP16's 11 bits give 51 and 69 dB after operand rounding."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(64, 128, generator=generator)
    b = torch.randn(128, 48, generator=generator)
    torch.set_float32_matmul_precision(setting)
    exact = a.double() @ b.double()
    error = (product(name, a, b).double() - exact).norm() / exact.norm()
    assert low < -20 * float(error.log10()) < high


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
@pytest.mark.usefixtures("matmul_precision")
def test_the_users_setting_is_restored(setting: str) -> None:
    torch.set_float32_matmul_precision(setting)
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    product("torch.matmul/fp32", torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(RuntimeError):
        product("torch.matmul/fp32", torch.ones(2, 3), torch.ones(2, 3))
    after = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    assert after == before
    assert torch.get_float32_matmul_precision() == setting


@pytest.mark.parametrize(("name", "cuda"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")])
@pytest.mark.usefixtures("matmul_precision")
def test_backends_are_told_the_precision_while_it_multiplies(
    name: str, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU, or a CPU with BF16 tiles, would read; most CPUs ignore it."""
    seen = []
    multiply = torch.matmul

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
        seen.append(tuple(backend.fp32_precision for backend in backends))
        return multiply(a, b)

    torch.set_float32_matmul_precision("medium")
    monkeypatch.setattr(torch, "matmul", watched)
    product(f"torch.matmul/{name}", torch.ones(2, 3), torch.ones(3, 2))
    assert seen == [(cuda, "ieee")]


def test_autocast_does_not_change_what_is_computed() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    plain = product("torch.matmul/fp32", a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(product("torch.matmul/fp32", a, b), plain, rtol=0, atol=0)


def test_support_follows_the_chip() -> None:
    problem = Problem(Role.FWD, 1, 8, 8, 8, torch.float32)
    tf32, bf16 = find_candidate("torch.matmul/tf32"), find_candidate("torch.matmul/bf16")
    assert "CPU" in str(tf32.supports(problem, Chip("cpu", None)))
    assert tf32.supports(problem, Chip("H200", (9, 0))) is None
    assert "T4 has 7.5" in str(tf32.supports(problem, Chip("T4", (7, 5))))
    assert "T4 has 7.5" in str(bf16.supports(problem, Chip("T4", (7, 5))))
    assert bf16.supports(problem, Chip("cpu", None)) is None
