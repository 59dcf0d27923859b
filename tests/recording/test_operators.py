"""GEMM-like operators beyond mm and bmm: what becomes of each in the trace."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.recipes import parse_recipe
from loka_toolkit.recording.composites import composite_of

RECIPE = "e4m3/rowwise/fp32"


def dims(run) -> dict[str, tuple[int, int, int, int]]:
    return {r.site: (r.batch, r.m, r.n, r.k) for r in run.sites.itertuples() if r.role != "norm"}


def not_judged(run) -> dict[str, float]:
    text = run.steps.not_judged_reason[0]
    return json.loads(text) if isinstance(text, str) else {}


def squares(model, *inputs):
    return lambda _: model(*inputs).square().mean()


class Vector(nn.Module):
    """A parameter on either side of a product with one column."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.weight = nn.Parameter(torch.randn((13,) if form != "left" else (7, 13)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "right":
            return x @ self.weight
        if self.form == "left":
            return self.weight @ x
        return torch.addmv(x.new_ones(len(x)), x, self.weight, alpha=2.0)


@pytest.mark.parametrize("form", ["right", "addmv", "left"])
def test_a_product_with_a_vector_is_one_with_a_single_column(record_run, form):
    torch.manual_seed(1)
    x = (torch.randn(13) if form == "left" else torch.randn(11, 13)) ** 3
    x.requires_grad_()
    model = Vector(form)
    run = record_run(model, squares(model, x), recipes=(RECIPE,))
    if form == "left":
        # The gradient of the matrix is an outer product, which contracts over nothing.
        expected = {"fwd": (1, 1, 7, 13), "dgrad": (1, 1, 13, 7)}
    else:
        expected = {"fwd": (1, 11, 1, 13), "wgrad": (1, 1, 13, 11)}
    assert dims(run) == {f"(root)#0:{role}": shape for role, shape in expected.items()}
    assert set(run.sites.weight) == {"weight"}
    assert run.sites.dispatchable.all()
    assert run.steps.gemm_flops_unseen[0] == 0
    w = model.weight.detach()
    out = model(x).detach()
    g = 2 * out / out.numel()
    left, right = (x.detach(), w.unsqueeze(1)) if form != "left" else (x.detach()[None], w.mT)
    back = (g[None], x.detach()) if form != "left" else (g[None], w)
    if form == "addmv":
        back = (2 * back[0], back[1])
    for role, (a, b) in zip(expected, ((left, right), back), strict=True):
        exact = a.double() @ b.double()
        error = emulate(a, b, parse_recipe(RECIPE)).double() - exact
        row = run.error(f"(root)#0:{role}", RECIPE)
        assert row.relative_frobenius == pytest.approx(float(error.norm() / exact.norm()), rel=1e-4)


def test_impact_of_a_product_with_a_vector(record_run):
    from loka_toolkit.recording import verify_impact

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.vector = nn.Linear(13, 7), nn.Parameter(torch.randn(7))

        def forward(self, x):
            return self.inner(x).tanh() @ self.vector

    x, y = torch.randn(39, 13), torch.ones(39)
    checks = verify_impact(Model(), lambda m, x, y: F.mse_loss(m(x), y), (x, y))
    chosen = [check for check in checks if check.site == "(root)#0:fwd"]
    assert all(check.status == "ok" and check.agrees for check in chosen)
    assert any(check.is_resolved for check in chosen)


def test_a_dot_product(record_run):
    class Dot(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(13))

        def forward(self, x):
            return torch.dot(x, self.weight)

    model = Dot()
    run = record_run(model, lambda _: model(torch.randn(13)))
    assert dims(run) == {"(root)#0:fwd": (1, 1, 1, 13)}
    assert run.sites.weight.item() == "weight"


def test_a_result_written_into_a_given_tensor(record_run):
    class Out(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(13, 7)

        def forward(self, x):
            h = self.inner(x)
            with torch.no_grad():
                torch.mm(x, self.inner.weight.t(), out=h.new_empty(5, 7))
                h.detach().clone().addmm_(x, self.inner.weight.t())
            return h

    model = Out()
    run = record_run(model, squares(model, torch.randn(5, 13)))
    assert {"inner#0:fwd", "inner#1:fwd", "inner#2:fwd"} <= set(run.sites.site)
    ops = dict(zip(run.sites.site, run.sites.op, strict=True))
    assert ops["inner#1:fwd"] == "aten.mm.out" and ops["inner#2:fwd"] == "aten.addmm_.default"


class Attention(nn.Module):
    """Self-attention over [N, H, L, D]."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.inner, self.options = nn.Linear(8, 8), options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        return F.scaled_dot_product_attention(h, h[:, :, :3], h[:, :, :3], **self.options)


def test_fused_attention_is_a_site_that_is_not_judged(record_run):
    model = Attention()
    x = torch.randn(2, 3, 5, 8)
    run = record_run(model, squares(model, x))
    sites = run.sites.set_index("site")
    assert dims(run)["(root)#0:fwd"] == dims(run)["(root)#0:bwd"] == (6, 5, 3, 8)
    # Forward two products, backward five, of 2 x 3 heads.
    each = 2.0 * 6 * 5 * 3 * 8
    assert (sites.flops["(root)#0:fwd"], sites.flops["(root)#0:bwd"]) == (2 * each, 5 * each)
    assert not sites.dispatchable["(root)#0:fwd"]
    reason = sites.not_dispatchable_reason["(root)#0:fwd"]
    assert "attention" in reason
    assert not_judged(run) == {reason: 7 * each}
    assert set(run.errors.site) == {"inner#0:fwd", "inner#0:wgrad"}


def test_attention_that_is_not_fused_is_plain_products(record_run):
    """With dropout the CPU computes it in parts."""
    model = Attention(dropout_p=0.5)
    run = record_run(model, squares(model, torch.randn(2, 3, 5, 8)))
    roles = {"fwd", "grad_a", "grad_b"}
    assert {f"(root)#{i}:{role}" for i in (0, 1) for role in roles} <= set(run.errors.site)
    assert not_judged(run) == {}


CUDA_ONLY = {
    "_scaled_dot_product_flash_attention": (False, 0),
    "_scaled_dot_product_flash_attention_backward": (True, 0),
    "_scaled_dot_product_efficient_attention": (False, 0),
    "_scaled_dot_product_efficient_attention_backward": (True, 0),
    "_scaled_dot_product_cudnn_attention": (False, 0),
    "_scaled_dot_product_cudnn_attention_backward": (True, 0),
    "_scaled_dot_product_fused_attention_overrideable": (False, 0),
    "_scaled_dot_product_fused_attention_overrideable_backward": (True, 0),
    "_flash_attention_forward": (False, 1),
    "_flash_attention_backward": (True, 1),
    "_efficient_attention_forward": (False, 1),
    "_efficient_attention_backward": (True, 1),
}


@pytest.mark.parametrize("name", CUDA_ONLY)
def test_attention_of_a_gpu_is_read_from_its_arguments(name):
    """FLOPs as torch.utils.flop_counter has them, where it knows the operator."""
    is_backward, is_length_first = CUDA_ONLY[name]
    if not hasattr(torch.ops.aten, name):
        pytest.skip(f"torch {torch.__version__} has no aten.{name}")
    func = getattr(torch.ops.aten, name).default

    def of(length, width):
        return torch.randn((2, length, 3, width) if is_length_first else (2, 3, length, width))

    q, k, v = of(5, 8), of(7, 8), of(7, 4)
    g = of(5, 4)
    rest = [None] * (len(func._schema.arguments) - 4)
    args = (g, q, k, v, *rest) if is_backward else (q, k, v, *rest)
    out = (q, k, v) if is_backward else (g,)
    found = composite_of(func, args, {}, out)
    assert found is not None
    assert found.shape.dims == (6, 5, 7, 8)
    assert found.flops == 2.0 * 6 * 5 * 7 * ((3 * 8 + 2 * 4) if is_backward else 8 + 4)
    from torch.utils.flop_counter import flop_registry

    known = flop_registry.get(func.overloadpacket)
    if known is not None and not is_length_first:
        assert found.flops == known(*args, out_val=out)


def test_packed_attention_counts_the_longest_keys():
    func = torch.ops.aten._flash_attention_forward.default
    q = torch.randn(12, 3, 8)
    offsets = torch.tensor([0, 5, 12])
    found = composite_of(func, (q, q, q, offsets, offsets, 7, 7, 0.0, False, False), {}, (q,))
    assert found is not None and found.shape.dims == (3, 12, 7, 8)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(record_run, kind):
    """The CPU fuses an LSTM and computes the others by products, hidden state by hidden state."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rnn = getattr(nn, kind)(8, 5, num_layers=2, bidirectional=True)

        def forward(self, x):
            return self.rnn(x)[0]

    model = Recurrent()
    run = record_run(model, squares(model, torch.randn(4, 3, 8)))
    assert set(run.sites.fqn) == {"rnn"}
    assert run.steps.gemm_flops_unseen[0] == 0
    weights = sum(p.numel() for n, p in model.named_parameters() if "weight" in n)
    forward = run.sites[run.sites.role == "fwd"]
    assert (forward.flops * forward.executions).sum() == 2.0 * 4 * 3 * weights
    assert set(forward.weight) <= {f"rnn.{name}" for name, _ in model.rnn.named_parameters()}
    if kind == "LSTM":
        assert sorted(run.sites.role) == ["bwd"] * 4 + ["fwd"] * 4
        assert set(run.sites.not_dispatchable_reason) == set(not_judged(run))
        backward = run.sites[run.sites.role == "bwd"]
        assert backward.flops.sum() == 2 * forward.flops.sum()
        assert (forward.k == [8 + 5, 8 + 5, 10 + 5, 10 + 5]).all() and (forward.m == 12).all()
        assert run.errors.empty
    else:
        assert not_judged(run) == {}
        assert set(run.errors.site) == set(run.sites.site)


def test_recurrent_layers_of_a_gpu_are_read_from_their_arguments():
    lstm = nn.LSTM(8, 5, num_layers=2, bidirectional=True, proj_size=3)
    x = torch.randn(4, 3, 8)
    weights = [p.detach() for p in lstm.parameters()]
    matrices = sum(w.numel() for w in weights if w.ndim == 2)
    func = torch.ops.aten._cudnn_rnn.default
    found = composite_of(func, (x, weights, 5, None, None), {}, (x,))
    assert found is not None and found.flops == 2.0 * 12 * matrices
    assert found.shape.dims == (1, 12, 20, 8 + 3)
    func = torch.ops.aten._cudnn_rnn_backward.default
    back = composite_of(func, (x, weights, 5, None, None), {}, (x,))
    assert back is not None and back.flops == 2 * found.flops and str(back.role) == "bwd"


def test_a_bilinear_form(record_run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.form = nn.Linear(4, 7), nn.Bilinear(7, 5, 3)

        def forward(self, x, y):
            return self.form(self.left(x), y)

    model = Model()
    y = torch.randn(11, 5, requires_grad=True)
    run = record_run(model, squares(model, torch.randn(11, 4), y))
    rows = run.sites.set_index("site")
    # The gradients of either vector and of the weight, all as costly as forward.
    roles = {"fwd", "grad_a", "wgrad", "grad_b"}
    assert set(rows.index) == {f"form#0:{role}" for role in roles} | {"left#0:fwd", "left#0:wgrad"}
    assert {rows.flops[f"form#0:{role}"] for role in roles} == {2.0 * 11 * 3 * 7 * 5}
    assert tuple(rows.loc["form#0:fwd", ["m", "n", "k"]]) == (11, 3, 35)
    assert rows.weight["form#0:fwd"] == "form.weight"
    assert set(not_judged(run)) == {rows.not_dispatchable_reason["form#0:fwd"]}


def test_a_sum_over_a_batch_of_products(record_run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 7)

        def forward(self, x):
            h = self.inner(x)
            return torch.addbmm(h.new_zeros(5, 5), h, h.mT)

    model = Model()
    run = record_run(model, squares(model, torch.randn(3, 5, 4)))
    assert dims(run)["(root)#0:fwd"] == (1, 5, 5, 3 * 7)
    assert dims(run)["(root)#0:grad_a"] == (3, 5, 7, 5)
    assert dims(run)["(root)#0:grad_b"] == (3, 7, 5, 5)
    assert run.steps.gemm_flops_unseen[0] == 0
    assert sum(not_judged(run).values()) == 3 * 2.0 * 3 * 5 * 5 * 7


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["coo", "coo-call", "csr"])
def test_a_sparse_factor(record_run, kind):
    """Graph convolutions multiply by an adjacency matrix; its entries are what counts."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.items = nn.Parameter(torch.randn(13, 7))
            dense = torch.zeros(13, 13)
            dense[torch.arange(13), torch.arange(13).flip(0)] = 0.5
            self.links = dense.to_sparse_csr() if kind == "csr" else dense.to_sparse()

        def forward(self):
            if kind == "coo-call":
                return torch.sparse.mm(self.links, self.items)
            return self.links @ self.items

    model = Graph()
    with pytest.warns(UserWarning, match="no product"):
        run = record_run(model, squares(model))
    assert set(run.sites.role) == {"fwd", "wgrad"}
    assert set(run.sites.weight) == {"items"}
    assert (run.sites.flops == 2.0 * 13 * 7).all()
    assert not_judged(run) == {"a factor is sparse": 2 * 2.0 * 13 * 7}
    assert run.sites.not_dispatchable_reason.notna().all()


def test_products_of_ragged_groups(record_run):
    grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.randn(3, 16, 8).bfloat16())
            self.inner = nn.Linear(16, 16, dtype=torch.bfloat16)

        def forward(self, x, ends):
            return grouped(self.inner(x), self.experts, offs=ends)

    model = Experts()
    x, ends = torch.randn(10, 16).bfloat16(), torch.tensor([2, 5, 10], dtype=torch.int32)
    target = torch.randn(10, 8).bfloat16()
    run = record_run(model, lambda _: F.mse_loss(model(x, ends), target))
    rows = run.sites.set_index("site")
    assert dims(run)["(root)#0:fwd"] == (1, 10, 8, 16)
    assert dims(run)["(root)#0:dgrad"] == (1, 10, 16, 8)
    assert dims(run)["(root)#0:wgrad"] in {(1, 16, 8, 10), (1, 8, 16, 10)}
    assert rows.weight["(root)#0:fwd"] == "experts"
    assert set(not_judged(run).values()) == {3 * 2.0 * 10 * 8 * 16}


def test_integer_products_have_no_precision_to_lose(record_run):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(13, 7)

        def forward(self, x):
            seen = (x > 0).long()
            return self.inner(x) * (seen @ seen.t()).sum()

    model = Counting()
    run = record_run(model, squares(model, torch.randn(5, 13)))
    assert not_judged(run) == {"a factor of dtype int64 has no precision to lose": 2.0 * 5 * 5 * 13}
