"""What is seen: names, roles, shapes, and what is counted as unseen."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.recording import Schedule, record


def shapes(run):
    return {r.site: (r.batch, r.m, r.n, r.k) for r in run.sites.itertuples() if r.role != "norm"}


def unseen(run, step: int = 0) -> dict[str, float]:
    text = run.steps.unseen_reason[step]
    return json.loads(text) if isinstance(text, str) else {}


def flops(run, role: str | None = None) -> float:
    chosen = run.sites[run.sites.role != "norm"]
    return float((2 * chosen.batch * chosen.m * chosen.n * chosen.k).sum())


def squares(model, *inputs):
    return lambda _: model(*inputs).square().mean()


def test_a_linear_layer_is_three_sites_in_canonical_orientation(record_run):
    model = nn.Sequential(nn.Linear(13, 39), nn.Linear(39, 1, bias=False))
    run = record_run(model, squares(model, torch.randn(2, 5, 13)))
    assert shapes(run) == {
        "0#0:fwd": (1, 10, 39, 13),
        "0#0:wgrad": (1, 39, 13, 10),
        "1#0:fwd": (1, 10, 1, 39),
        "1#0:dgrad": (1, 10, 39, 1),
        "1#0:wgrad": (1, 1, 39, 10),
    }
    assert flops(run) == run.steps.gemm_flops_seen[0]
    assert run.steps.gemm_flops_unseen[0] == 0
    assert set(run.sites.weight.dropna()) == {"0.weight", "1.weight"}
    assert set(run.operands.query("operand == 'g'").site) == {"0#0:wgrad", "1#0:dgrad"}


class RawParameter(nn.Module):
    """A parameter multiplied on either side, without any submodule."""

    def __init__(self, side: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.side = side
        self.kernel = nn.Parameter(torch.randn(7, 13) if side == "a" else torch.randn(13, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.kernel @ x.T).T if self.side == "a" else x @ self.kernel


def test_a_raw_parameter_on_either_side_is_the_same_layer(record_run):
    runs = {}
    torch.manual_seed(1)
    x = torch.randn(11, 13, requires_grad=True)
    for side in "ab":
        model = RawParameter(side)
        if side == "b":
            with torch.no_grad():
                model.kernel.copy_(RawParameter("a").kernel.T)
        runs[side] = record_run(model, squares(model, x), name=side)
        assert shapes(runs[side]) == {
            "(root)#0:fwd": (1, 11, 7, 13),
            "(root)#0:dgrad": (1, 11, 13, 7),
            "(root)#0:wgrad": (1, 7, 13, 11),
        }
        assert set(runs[side].sites.weight) == {"kernel"}
    for column in ("relative_frobenius", "underflow_share", "gradient_bias"):
        one, other = (
            runs[s].errors.set_index(["site", "recipe"])[column].sort_index() for s in "ab"
        )
        # Either side sums in another order, and a bias is a small difference of large sums.
        assert one.to_list() == pytest.approx(other.to_list(), rel=1e-3, nan_ok=True)
    for operand in "xwg":
        one, other = (runs[s].operands.set_index("operand").loc[operand].squeeze() for s in "ab")
        assert (one.site, one.width) == (other.site, other.width)
        assert one.variance == pytest.approx(other.variance)


def test_f_linear_and_tied_weights_are_named_after_the_module(record_run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(13, 13), nn.Linear(13, 13)
            self.decoder.weight = self.encoder.weight
            self.by_passed = nn.Linear(13, 2)

        def forward(self, x):
            return F.linear(self.decoder(self.encoder(x)), self.by_passed.weight)

    model = Model()
    run = record_run(model, squares(model, torch.randn(5, 13)))
    assert run.site_names("fwd") == ["encoder#0:fwd", "decoder#0:fwd", "by_passed#0:fwd"]
    weights = dict(zip(run.sites.site, run.sites.weight, strict=True))
    assert weights["decoder#0:fwd"] == weights["encoder#0:fwd"] == "encoder.weight"


def test_a_module_called_twice_has_two_calls_in_every_step(record_run):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(13, 13), nn.ReLU(inplace=True))

        def forward(self, x):
            return self.tower(self.tower(x))

    model = Twice()
    run = record_run(model, squares(model, torch.randn(5, 13)), steps=3, learning_rate=0.1)
    assert run.site_names("fwd") == ["tower.0#0:fwd", "tower.0#1:fwd"]
    assert (run.errors.groupby(["step", "recipe"]).site.nunique().loc[1] == 5).all()
    # An in-place ReLU behind the product must not change what was recorded of its output.
    first = run.errors.query("site == 'tower.0#0:fwd' and step == 0")
    assert (first.sqnr_db > 15).all()


@pytest.mark.parametrize("square", [False, True])
def test_products_of_activations(record_run, square):
    """Attention scores; with square shapes only storages and order tell the gradients apart."""
    size = 6 if square else 4
    torch.manual_seed(0)

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(13, 6), nn.Linear(13, 6)

        def forward(self, x):
            return torch.bmm(self.q(x), self.k(x).transpose(1, 2))

    model = Scores()
    x = torch.randn(3, size, 13)
    run = record_run(model, squares(model, x), recipes=("e4m3/tensorwise/fp32",))
    found = shapes(run)
    assert found["(root)#0:fwd"] == (3, size, size, 6)
    assert found["(root)#0:grad_a"] == (3, size, 6, size)
    assert found["(root)#0:grad_b"] == (3, 6, size, size)
    # The recorded operands must be those that each gradient multiplies.
    q, k = model.q(x).detach(), model.k(x).detach()
    g = 2 * (q @ k.mT) / (3 * size * size)
    for operand, truth in (("a", q), ("b", k.mT), ("g", g)):
        row = run.operands[run.operands.operand == operand].iloc[0]
        assert row.variance == pytest.approx(float(truth.double().var(correction=0)), rel=1e-4)
    from loka_toolkit.numerics.emulation import emulate
    from loka_toolkit.numerics.recipes import parse_recipe

    recipe = parse_recipe("e4m3/tensorwise/fp32")
    for role, a, b in (("grad_a", g, k), ("grad_b", q.mT, g)):
        exact = a.double() @ b.double()
        error = emulate(a, b, recipe).double() - exact
        row = run.error(f"(root)#0:{role}", recipe.name)
        expected = float(error.norm() / exact.norm())
        assert row.relative_frobenius == pytest.approx(expected, rel=1e-2)


def test_gram_matrix_of_one_tensor(record_run):
    class Gram(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(13, 7)

        def forward(self, x):
            h = self.inner(x)
            return h @ h.mT

    model = Gram()
    for rows, name in ((5, "oblong"), (7, "square")):
        run = record_run(model, squares(model, torch.randn(rows, 13)), name=name)
        assert {"(root)#0:grad_a", "(root)#0:grad_b"} <= set(run.sites.site)
        assert run.steps.gemm_flops_unseen[0] == 0


def test_multihead_attention_whose_projection_is_never_called(record_run):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    model = Attention()
    run = record_run(model, squares(model, torch.randn(3, 5, 8)))
    forward = run.site_names("fwd")
    assert "attention.out_proj#0:fwd" in forward and "attention#0:fwd" in forward
    assert run.steps.gemm_flops_unseen[0] == 0


def test_frozen_layers_and_layers_without_input_gradient(record_run):
    model = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 7), nn.Linear(7, 1))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    run = record_run(model, squares(model, torch.randn(5, 13)))
    assert sorted(run.sites.site) == ["0#0:fwd", "1#0:fwd", "2#0:fwd", "2#0:wgrad"]
    reason = run.error("0#0:fwd").impact_reason
    assert "no gradient" in reason or "MseLoss" in reason or "loss" in reason


def test_bf16_autocast_finds_the_parameter_behind_the_cast(record_run):
    model = nn.Sequential(nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 1))
    x, y = torch.randn(5, 13), torch.ones(5)

    def loss(_):
        with torch.autocast("cpu", torch.bfloat16):
            z = model(x).squeeze(-1)
        return F.binary_cross_entropy_with_logits(z.float(), y)

    run = record_run(model, loss)
    assert set(run.sites.weight) == {"0.weight", "2.weight"}
    assert set(run.sites.dtype_a) == {"bfloat16"}
    assert run.error("2#0:fwd").impact_status == "ok"
    assert set(run.operands.dtype) == {"bfloat16"}


def test_norms_are_sites_and_known_to_the_product_before_them(record_run):
    class RMS(nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    class OwnNorm(RMS):
        pass

    model = nn.Sequential(
        nn.Linear(13, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.BatchNorm1d(8),
        nn.Linear(8, 8),
        nn.RMSNorm(8),
        nn.Linear(8, 8),
        OwnNorm(),
    )
    run = record_run(model, squares(model, torch.randn(5, 13)))
    norms = run.sites.query("role == 'norm'")
    assert norms.fqn.tolist() == ["1", "4", "6", "8"]
    assert (norms[["m", "n"]].to_numpy() == [5, 8]).all()
    after = dict(zip(run.sites.site, run.sites.norm_after, strict=True))
    assert [after[f"{i}#0:fwd"] for i in (0, 2, 5, 7)] == ["1", "4", "6", "8"]
    rows = run.operands[run.operands.site == "1#0:norm"].set_index("operand")
    assert rows.loc["output"].variance == pytest.approx(1, rel=1e-3)


def test_wrappers_do_not_change_names(record_run):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    inner = nn.Sequential(nn.Linear(13, 7), nn.LayerNorm(7))
    model = Wrapper(inner)
    run = record_run(model, squares(model, torch.randn(5, 13)), include=("0",))
    assert set(run.sites.site) == {"0#0:fwd", "0#0:wgrad"}
    assert set(run.sites.weight) == {"0.weight"}
    assert unseen(run) == {}


def test_include_and_exclude_select_sites_and_count_the_rest(record_run):
    model = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 7), nn.Linear(7, 1))
    run = record_run(model, squares(model, torch.randn(5, 13)), include=("[01]",), exclude=("1",))
    assert set(run.sites.fqn) == {"0"}
    # Forward, dgrad and wgrad of the 7 x 7 and of the 7 x 1 layer.
    assert unseen(run) == {"excluded by include/exclude": 3 * 2 * 5 * 7 * (7 + 1)}


def test_empty_batches_and_single_outputs(record_run):
    model = nn.Linear(13, 1)
    run = record_run(model, squares(model, torch.randn(1, 13)), name="one")
    assert shapes(run)["(root)#0:fwd"] == (1, 1, 1, 13)
    with pytest.warns(UserWarning, match="no product"):
        empty = record_run(model, lambda _: model(torch.randn(0, 13)).sum(), name="none")
    assert empty.sites.empty
    assert unseen(empty) == {"empty product": 0.0}


def test_training_is_left_as_it_was(tmp_path):
    """Bit-identical gradients, no hooks, no mode, no patch, no change of the random state."""

    def train(recorded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(13, 39), nn.Dropout(0.5), nn.LayerNorm(39), nn.Linear(39, 1)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        recorder = record(model, tmp_path / "run", schedule=Schedule(warm_steps=2, every=2))
        with recorder if recorded else contextlib.nullcontext():
            for _ in range(6):
                x = torch.randn(7, 13)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if recorded:
                    recorder.step()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        return [p.detach().clone() for p in model.parameters()] + [torch.randn(3)]

    original = torch.autograd.backward
    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))
    assert torch.autograd.backward is original
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_the_same_run_gives_the_same_rows(record_run):
    def once(name):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 39), nn.ReLU(), nn.Linear(39, 1))
        x, y = torch.randn(600, 64), torch.ones(600)

        def loss(_):
            return F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)

        return record_run(model, loss, steps=3, learning_rate=0.1, name=name, max_rows=64)

    one, other = once("one"), once("other")
    for table in ("sites", "operands", "errors", "moments"):
        assert getattr(one, table).astype(str).equals(getattr(other, table).astype(str)), table
    assert (one.errors.query("site == '0#0:fwd'").sampled_rows == 64).all()
