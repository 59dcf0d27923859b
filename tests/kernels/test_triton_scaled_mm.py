"""The Triton candidates where no kernel runs: constraints, absence, and what is never emulated."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest
import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.kernels.contract import Chip, Problem
from loka_toolkit.kernels.triton_scaled_mm import TritonScaledMM, candidates
from loka_toolkit.numerics.recipes import parse_recipe

CPU = Chip("cpu", None)
H200 = Chip("H200", (9, 0))
L40 = Chip("L40", (8, 9))
A100 = Chip("A100", (8, 0))


def triton(recipe: str) -> TritonScaledMM:
    return TritonScaledMM(parse_recipe(recipe))


@pytest.mark.parametrize(
    ("recipe", "chip", "dtype", "batch", "expected"),
    [
        ("e4m3/tensorwise/fast", H200, torch.float32, 1, None),
        ("e4m3/rowwise/promoted-128", H200, torch.float16, 1, None),
        ("e5m2/rowwise/fast", H200, torch.bfloat16, 8, None),
        ("e4m3/static-rowwise/fast", L40, torch.bfloat16, 1, None),
        ("e4m3/tensorwise/promoted-128", L40, torch.bfloat16, 1, "9.0 only and L40 has 8.9"),
        ("e4m3/tensorwise/fast", A100, torch.bfloat16, 1, "8.9 and A100 has 8.0"),
        ("e4m3/tensorwise/fast", H200, torch.float64, 1, "not torch.float64"),
        ("e4m3/tensorwise/fast", CPU, torch.float32, 1, "no CPU backend"),
    ],
)
def test_support_is_told_from_chip_data_alone(
    recipe: str, chip: Chip, dtype: torch.dtype, batch: int, expected: str | None
) -> None:
    reason = triton(recipe).supports(Problem(Role.DGRAD, batch, 64, 1, 39, dtype), chip)
    if expected is None:
        assert reason is None
    else:
        assert reason is not None and expected in reason


def test_there_is_one_per_recipe_that_the_kernels_compute() -> None:
    names = {candidate.recipe for candidate in candidates()}
    assert len(names) == 4 * 9 * 2  # pairs of formats, pairs of scalings, accumulations
    assert {"e5m2/tensorwise/fast", "e4m3-e5m2/static-rowwise/promoted-128"} <= names
    assert not {n for n in names if n.endswith("/fp32") or "fnuz" in n or "block" in n}


def test_without_triton_it_is_absent_and_everything_else_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert triton("e4m3/tensorwise/fast").version() is None


def in_a_new_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("value", "emulated"), [("1", "True"), ("on", "True"), ("0", "False")])
def test_the_variable_decides_before_triton_is_imported(value: str, emulated: str) -> None:
    """What is emulated is never timed and never enters a table; see the harness and dispatch."""
    pytest.importorskip("triton")
    code = (
        "import sys; from loka_toolkit.kernels import catalog; "
        "c = catalog.find_candidate('triton.scaled_mm/e4m3/tensorwise/fast'); "
        "before = c.emulated; assert 'triton' not in sys.modules; "
        "from loka_toolkit.kernels import triton_cast; "
        "assert c.emulated == before == triton_cast.interpreted(); print(c.emulated)"
    )
    assert in_a_new_process(code, TRITON_INTERPRET=value) == emulated


def test_the_package_works_where_triton_is_blocked() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch; "
        "from loka_toolkit.kernels import catalog, contract; "
        "c = catalog.find_candidate('torch.matmul/fp32'); "
        "x = c.prepare(torch.ones(2, 2), contract.Side.A); print(c.run(x, x, torch.float32).sum())"
    )
    assert "8" in in_a_new_process(code)
