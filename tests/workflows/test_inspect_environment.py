"""What ``loka env`` says of candidates, on this machine and on chips that are not here."""

from __future__ import annotations

import msgspec
import pytest

from loka_toolkit.environment import current_environment
from loka_toolkit.kernels import torch_blockwise, torch_scaled_mm
from loka_toolkit.workflows import inspect_environment
from loka_toolkit.workflows.inspect_environment import describe_environment
from loka_toolkit.workflows.lines import environment_lines


@pytest.fixture
def refusals(monkeypatch):
    def described(chip: str, capability: str | None) -> dict[str, str | None]:
        there = msgspec.structs.replace(current_environment(), chip=chip, capability=capability)
        monkeypatch.setattr(inspect_environment, "current_environment", lambda: there)
        for module in (torch_blockwise, torch_scaled_mm):
            monkeypatch.setattr(module, "cuda_version", lambda: (13, 0))
        return {state.name: state.refusal for state in describe_environment().candidates}

    return described


def test_a_candidate_for_two_activations_is_asked_for_those(refusals):
    found = refusals("cpu", None)
    assert found["torch.hybrid-1x128/bf16-e4m3/blockwise/fp32"] is None
    assert found["torch.hybrid/bf16-e4m3/blockwise/fp32"] is None
    refusal = found["torch.scaled_mm-1x128/e4m3/blockwise/promoted-128"]
    assert refusal == found["torch.scaled_mm/e4m3/blockwise/promoted-128"]
    assert "on a CPU" in refusal


@pytest.mark.parametrize(
    ("chip", "capability", "name", "runs"),
    [
        ("A100", "8.0", "torch.scaled_mm/e4m3/tensorwise/fast", False),
        ("A100", "8.0", "torch.hybrid/bf16-e4m3/rowwise/fp32", True),
        ("L40S", "8.9", "torch.scaled_mm/e4m3/tensorwise/fast", True),
        ("L40S", "8.9", "torch.scaled_mm/e4m3/blockwise/promoted-128", False),
        ("H200", "9.0", "torch.scaled_mm/e4m3/blockwise/promoted-128", True),
        ("H200", "9.0", "torch.scaled_mm-1x128/e4m3/blockwise/promoted-128", True),
        ("H200", "9.0", "torch.scaled_mm/e4m3/mxfp8/fp32", False),
        ("H200", "9.0", "torch.scaled_mm/e5m2/rowwise/fast", False),
        ("B200", "10.0", "torch.scaled_mm/e4m3/mxfp8/fp32", True),
        ("B200", "10.0", "torch.scaled_mm/e4m3/blockwise/promoted-128", False),
        ("H200", "9.0", "torch.scaled_mm/e4m3fnuz/rowwise/fp32", False),
    ],
)
def test_chips_run_what_docs_recipes_says(refusals, chip, capability, name, runs):
    assert (refusals(chip, capability)[name] is None) == runs


def test_a_family_that_cannot_run_says_the_commonest_reason(refusals):
    refusals("cpu", None)
    lines = environment_lines(describe_environment())
    (line,) = [line for line in lines if line.startswith("torch.scaled_mm-1x128")]
    assert "0 of 12 (scaled_mm has no block scales on a CPU)" in line
