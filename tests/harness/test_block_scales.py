"""Block scales in replay: sampled like whole operands, and judged by an emulation of their own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loka_toolkit.harness.judge import judge
from loka_toolkit.harness.sampling import OutputSample
from loka_toolkit.harness.trial import Trial
from loka_toolkit.kernels import torch_blockwise
from loka_toolkit.kernels.catalog import find_candidate
from loka_toolkit.kernels.contract import Candidate, Prepared, Side

BLOCKS = torch_blockwise.candidates()


def operands(m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(m + k + n)
    a = rng.standard_t(3, size=(m, k)) * np.exp(rng.normal(size=(m, 1)))
    b = rng.normal(size=(k, n)) * np.exp(rng.normal(size=(k, 1)))
    return torch.from_numpy(a).float(), torch.from_numpy(b).float()


@pytest.mark.parametrize("candidate", BLOCKS, ids=lambda c: c.name)
@pytest.mark.parametrize("shape", [(300, 140, 270), (13, 2613, 5), (600, 39, 1)])
def test_sampled_rows_and_columns_keep_their_blocks(
    candidate: torch_blockwise.TorchBlockwise, shape: tuple[int, int, int]
) -> None:
    a, b = operands(*shape)
    sample = OutputSample.of(a, b)
    left, right = candidate.prepare(a, Side.A), candidate.prepare(b, Side.B)
    rows, columns = sample.seen(left, right)
    assert torch.equal(rows, left.dequantized()[sample.row])
    assert torch.equal(columns, right.dequantized()[:, sample.column])


def test_sampled_products_of_a_batch_keep_their_blocks() -> None:
    a, b = torch.randn(40, 300, 150).exp(), torch.randn(40, 150, 290)
    candidate = find_candidate("emulated-1x128/e4m3/blockwise/promoted-128")
    left, right = candidate.prepare(a, Side.A), candidate.prepare(b, Side.B)
    sample = dataclasses.replace(
        OutputSample.of(a, b),
        batch=torch.tensor([0, 17, 39]),
        row=torch.tensor([0, 128, 299]),
        column=torch.tensor([1, 127, 128, 289]),
    )
    rows, columns = sample.seen(left, right)
    assert torch.equal(rows, left.dequantized()[[0, 17, 39]][:, [0, 128, 299]])
    assert torch.equal(columns, right.dequantized()[[0, 17, 39]][:, :, [1, 127, 128, 289]])


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("emulated/e4m3/blockwise/promoted-128", True),
        ("emulated-1x128/e4m3/blockwise/promoted-128", False),
        ("emulated/e4m3/mxfp8/fp32", False),
        ("emulated/e4m3/static-rowwise/fast", True),
        ("emulated/e4m3fnuz/rowwise/fp32", False),
        ("torch.hybrid/bf16-e4m3/rowwise/fp32", True),
        ("torch.hybrid/bf16-e4m3/blockwise/fp32", True),
        ("torch.hybrid-1x128/e4m3-fp16/blockwise/fp32", False),
        ("torch.scaled_mm/e4m3/tensorwise-rowwise/fp32", True),
    ],
)
def test_candidates_of_every_family_pass_the_judge(name: str, parameter: bool) -> None:
    trial = Trial(*operands(200, 300, 150), torch.float32, parameter=parameter)
    found = judge(find_candidate(name), trial)
    assert found.fault is None, found.fault
    assert found.emulation is not None and found.total is not None
    assert found.total == pytest.approx(found.emulation, rel=0.02)


@dataclasses.dataclass(frozen=True)
class _Shifted:
    """A kernel that reads the scale of the block beside."""

    inner: Candidate

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        assert a.scale is not None
        moved = dataclasses.replace(a, scale=a.scale.roll(1, dims=-1))
        return self.inner.run(moved, b, out_dtype)


@pytest.mark.parametrize("recipe", ["e4m3/blockwise/promoted-128", "e4m3/mxfp8/fp32"])
def test_a_kernel_that_mixes_up_its_blocks_is_caught(recipe: str) -> None:
    trial = Trial(*operands(64, 512, 48), torch.float32, parameter=True)
    found = judge(_Shifted(find_candidate(f"emulated/{recipe}")), trial)  # type: ignore[arg-type]
    assert found.fault is not None
