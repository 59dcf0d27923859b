"""What only a GPU runs: its fused operators, and backward on a thread of the engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def roles(run, fqn: str) -> dict[str, tuple[int, int]]:
    rows = run.sites[run.sites.fqn == fqn]
    return {f"#{r.call}:{r.role}": (r.executions, r.recompute) for r in rows.itertuples()}


class Blocks(nn.Module):
    """One block three times, each in a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(13, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(3):
            if self.reentrant is None:
                h = self.block(h)
            else:
                h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        return h


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recomputed_on_a_thread_of_the_engine(record_run, reentrant):
    """Sequence numbers begin anew there; every gradient must still reach its own call."""
    model = Blocks().cuda()
    x = torch.randn(5, 13, device="cuda")
    plain = record_run(model, lambda _: model(x).square().mean(), name="plain")
    model.reentrant = reentrant
    run = record_run(model, lambda _: model(x).square().mean(), name="again")
    assert sorted(run.sites.site) == sorted(plain.sites.site)
    assert run.steps.gemm_flops_unseen[0] == 0
    expected = {f"#{call}:fwd": (2, 1) for call in range(3)}
    expected |= {f"#{call}:{r}": (1, 0) for call in range(3) for r in ("dgrad", "wgrad")}
    assert roles(run, "block.0") == expected
    for operand in "xg":
        one, other = (
            r.operands[r.operands.operand == operand].set_index("site").variance.to_dict()
            for r in (run, plain)
        )
        assert one == pytest.approx(other, rel=1e-4)


class Attention(nn.Module):
    """Attention by one backend."""

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.inner, self.backend = nn.Linear(64, 64), backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        with sdpa_kernel([self.backend]):
            return F.scaled_dot_product_attention(h, h, h, is_causal=True)


@pytest.mark.parametrize(
    "name", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"]
)
def test_every_backend_of_attention(record_run, name):
    model = Attention(getattr(SDPBackend, name)).cuda().bfloat16()
    x = torch.randn(2, 3, 128, 64, device="cuda", dtype=torch.bfloat16)
    run = record_run(model, lambda _: model(x).float().square().mean())
    assert run.steps.gemm_flops_unseen[0] == 0
    found = set(run.sites[run.sites.fqn == "(root)"].role)
    if name == "MATH":
        assert found == {"fwd", "grad_a", "grad_b"}
        return
    assert found == {"fwd", "bwd"}
    rows = run.sites.set_index("site")
    each = 2.0 * 6 * 128 * 128 * 64
    assert rows.flops["(root)#0:fwd"] == 2 * each and rows.flops["(root)#0:bwd"] == 5 * each
    assert tuple(rows.loc["(root)#0:fwd", ["batch", "m", "n", "k"]]) == (6, 128, 128, 64)
    assert not rows.dispatchable["(root)#0:fwd"]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_are_one_operator_each_way(record_run, kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = getattr(nn, kind)(8, 16, num_layers=2, bidirectional=True)

        def forward(self, x):
            return self.rnn(x)[0]

    model = Recurrent().cuda()
    x = torch.randn(4, 3, 8, device="cuda")
    run = record_run(model, lambda _: model(x).square().mean())
    assert run.steps.gemm_flops_unseen[0] == 0
    rows = run.sites.set_index("site")
    assert set(rows.index) == {"rnn#0:fwd", "rnn#0:bwd"}
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert rows.flops["rnn#0:fwd"] == 2.0 * 12 * matrices
    assert rows.flops["rnn#0:bwd"] == 4.0 * 12 * matrices
    assert rows.weight["rnn#0:fwd"] == "rnn.weight_ih_l0"


def test_convolutions_by_cudnn(record_run):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)).cuda()
    x = torch.randn(2, 3, 16, 16, device="cuda")
    run = record_run(model, lambda _: model(x).square().mean())
    assert run.steps.gemm_flops_unseen[0] == run.steps.gemm_flops_not_judged[0] == 0
    assert set(run.sites.site) == {
        "0#0:fwd",
        "0#0:wgrad",
        "2#0:fwd",
        "2#0:dgrad",
        "2#0:wgrad",
    }
    assert set(run.sites.op) == {"aten.convolution.default", "aten.convolution_backward.default"}
