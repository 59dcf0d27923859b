"""What is caught, what is left alone, and that an entry never reaches another product."""

from __future__ import annotations

import contextlib
import copy
import threading

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka_toolkit.artifacts.dispatch_table import Miss, MissReason
from loka_toolkit.dispatch import install

NO_LAYER = torch.overrides._get_current_function_mode


class Pair(nn.Module):
    """Two products of one size, in an order and a number that the caller chooses."""

    def __init__(self, order="uv"):
        super().__init__()
        self.u = nn.Parameter(torch.randn(13, 13) / 4)
        self.v = nn.Parameter(torch.randn(13, 13) / 4)
        self.order = order

    def forward(self, x):
        for name in self.order:
            x = (x @ getattr(self, name)).tanh()
        return x


def pair(order="uv"):
    torch.manual_seed(0)
    return Pair(order)


def rows(count=39, width=13, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def hits(installation):
    return {(s.fqn, s.role, s.calls): s.hits for s in installation.counts_by_site() if s.calls}


@pytest.mark.parametrize("order", ["uv", "vu", "v", "vvu", "uvu", ""])
def test_an_entry_follows_its_parameter_whatever_the_order(made, walk, order):
    """Of two parameters of a size u has entries and v is unsafe: no branch may mix them up."""
    miss = Miss("(root)", 1, "fwd", MissReason.UNSAFE, "v", weight="v", batch=1, m=39, n=13, k=13)
    table = made.table_of(*walk.entries("(root)", "u", (13, 13)), misses=(miss,))
    model, x = pair(order), rows()
    expected = x
    for name in order:
        w = getattr(model, name).detach()
        product = torch.from_numpy(made.ml_product(expected, w)).float() if name == "u" else None
        expected = (expected @ w if product is None else product).tanh()
    with install(model, table) as installation, torch.no_grad():
        out = model(x)
        counts = installation.counts()
    assert counts.hits["fwd"] == order.count("u") and not counts.misses
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert ("u" in order) or torch.equal(out, expected)


def test_a_product_that_the_table_does_not_know_is_a_counted_miss(made, walk):
    model, x = pair("uv"), rows()
    table = made.table_of(*walk.entries("(root)", "u", (13, 13)))
    with install(model, table) as installation:
        model(x).sum().backward()
        counts = installation.counts()
        (unknown,) = [s for s in installation.counts_by_site() if not s.calls]
    assert counts.hits == {"fwd": 1, "dgrad": 0, "wgrad": 1}
    assert counts.misses == {"shape": {"fwd": 1}}
    assert (unknown.fqn, unknown.misses) == ("(root)", {"shape": 1})


class Interaction(nn.Module):
    """A product of two activations whose batch is that of the examples."""

    def forward(self, fields):
        return torch.bmm(fields, fields.mT)


@pytest.mark.parametrize(
    ("shape", "outcome"),
    [
        ((8, 5, 7), {}),
        ((1, 5, 7), {}),
        ((16, 5, 7), {}),
        ((17, 5, 7), {"shape": {"fwd": 1, "grad_a": 1, "grad_b": 1}}),
        ((8, 6, 7), {"shape": {"fwd": 1}}),
        ((8, 5, 9), {"shape": {"fwd": 1}}),
    ],
)
def test_activations_are_known_by_their_sizes(made, walk, shape, outcome):
    table = made.table_of(*walk.entries("1", None, (5, 5, 7), batch=8, tokens=8))
    model = nn.Sequential(nn.Tanh(), Interaction())
    x = rows(shape[0] * shape[1], shape[2]).view(shape)
    with install(model, table) as installation:
        out = walk.run_step(model, (x,))
        counts = installation.counts()
    assert counts.misses == outcome
    assert counts.hits == dict.fromkeys(("fwd", "grad_a", "grad_b"), 0 if outcome else 1)
    plain = nn.Sequential(nn.Tanh(), Interaction())
    with contextlib.nullcontext() if outcome else walk.emulated():
        expected = walk.run_step(plain, (x,))
    for key, value in expected.items():
        assert (out[key] - value).norm() <= (0 if outcome else 1e-5) * value.norm()


def test_a_parameter_is_no_activation_though_its_sizes_are_those(made, walk):
    """The table knows two activations of this size; here one of them is a weight."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(1, 7, 5))

        def forward(self, x):
            forms = (self.w, self.w.detach(), self.w.data, self.w.view(7, 5)[None], self.w.clone())
            return sum(torch.bmm(x, form) for form in forms)

    model, x = Module(), rows(5, 7)[None]
    table = made.table_of(*walk.entries("(root)", None, (5, 5, 7)))
    with install(model, table) as installation:
        model(x)
        counts = installation.counts()
    assert not any(counts.hits.values()) and counts.misses == {"shape": {"fwd": 5}}


def test_calls_of_one_signature_must_agree(made, walk):
    model = pair()
    one = walk.entries("(root)", "u", (13, 13), call=0)
    other = walk.entries("(root)", "u", (13, 13), call=2, recipe="e4m3/rowwise/fp32")
    with install(model, made.table_of(*one, *other)) as installation:
        assert {s.reason for s in installation.sites()} == {MissReason.CONFLICT}
        assert all("cannot be told apart" in s.detail for s in installation.sites())
    agreeing = walk.entries("(root)", "u", (13, 13), call=2)
    with install(model, made.table_of(*one, *agreeing)) as installation:
        model(rows()).sum().backward()
        assert hits(installation)[("(root)", "fwd", (0, 2))] == 1


def test_what_runs_inside_belongs_to_itself(made, walk):
    """The parent has an entry for two activations, and its child multiplies some of that size."""

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = Interaction()
            self.outside = [Interaction()]

        def forward(self, x):
            return self.child(x), self.child.forward(x), self.outside[0](x), torch.bmm(x, x.mT)

    model, x = Parent(), rows(10, 7).view(2, 5, 7)
    with install(model, made.table_of(*walk.entries("(root)", None, (5, 5, 7)))) as installation:
        called, forwarded, *own = model(x)
        assert installation.counts().hits["fwd"] == 2
    assert all(torch.equal(theirs, torch.bmm(x, x.mT)) for theirs in (called, forwarded))
    assert torch.equal(*own) and not torch.equal(own[0], called)
    with install(model, made.table_of(*walk.entries("child", None, (5, 5, 7)))) as installation:
        called, forwarded, *own = model(x)
        assert installation.counts().hits["fwd"] == 2
    assert all(torch.equal(torch.bmm(x, x.mT), other) for other in own)
    assert torch.equal(called, forwarded) and not torch.equal(own[0], called)
    assert NO_LAYER() is None


def test_autocast_and_casts_by_hand_keep_the_parameter(made, walk):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(7, 13) / 4)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                one = F.linear(x, self.w) + torch.einsum("bi,oi->bo", x, self.w)
            other = x.bfloat16() @ self.w.to(torch.bfloat16).t()
            return one.float() + other.float()

    model, x = Module(), rows()
    plain = copy.deepcopy(model)
    entries = walk.entries("(root)", "w", (7, 13), dtype="bfloat16")
    with install(model, made.table_of(*entries)) as installation:
        routed = walk.run_step(model, (x,))
        counts = installation.counts()
    assert counts.hits == {"fwd": 3, "dgrad": 3, "wgrad": 3} and not counts.misses
    with walk.emulated():
        truth = walk.run_step(plain, (x,))
    for key, value in truth.items():
        assert routed[key].dtype == value.dtype
        # Each of three products is rounded to bfloat16, by 2**-9 of it.
        assert (routed[key] - value).norm() <= 2**-8 * value.norm()
    in_float32 = made.table_of(*walk.entries("(root)", "w", (7, 13)))
    with install(model, in_float32) as installation:
        missed = walk.run_step(model, (x,))
        assert installation.counts().misses == {"layout": {"fwd": 3, "dgrad": 3, "wgrad": 3}}
    expected = walk.run_step(plain, (x,))
    assert all(torch.equal(missed[key], expected[key]) for key in expected)


def test_gradients_accumulate_and_evaluation_runs_forward_only(made, walk):
    model, x = pair(), rows()
    entries = [e for w in "uv" for e in walk.entries("(root)", w, (13, 13), call="uv".index(w))]
    with install(model, made.table_of(*entries)) as installation:
        model(x).sum().backward()
        once = {n: p.grad.clone() for n, p in model.named_parameters()}
        model(x).sum().backward()
        assert all(torch.equal(p.grad, 2 * once[n]) for n, p in model.named_parameters())
        trained = installation.counts().hits
        for evaluation in (torch.no_grad, torch.inference_mode):
            with evaluation():
                assert torch.equal(model.eval()(x), model.train()(x))
        counts = installation.counts()
    assert trained == {"fwd": 4, "dgrad": 2, "wgrad": 4}
    assert counts.hits == {"fwd": 12, "dgrad": 2, "wgrad": 4} and not counts.misses


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_module_gives_the_same_gradients(made, walk, reentrant):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.is_on = pair(), False

        def forward(self, x):
            if self.is_on:
                return checkpoint(self.inner, x, use_reentrant=reentrant)
            return self.inner(x)

    model, x = Outer(), rows()
    entries = [e for w in "uv" for e in walk.entries("inner", f"inner.{w}", (13, 13))]
    entries = [msgspec.structs.replace(e, call=int(e.weight[-1] == "v")) for e in entries]
    with install(model, made.table_of(*entries)) as installation:
        expected = walk.run_step(model, (x,))
        model.is_on = True
        found = walk.run_step(model, (x,))
        counts = installation.counts()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert counts.hits == {"fwd": 6, "dgrad": 4, "wgrad": 4} and not counts.misses


def test_a_checkpoint_around_a_part_of_a_forward_runs_in_the_original_precision(made, walk):
    """It is computed again in backward when no module runs, and would save other tensors then."""

    class Part(Pair):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False) + x @ self.u

    torch.manual_seed(0)
    model, x = Part(), rows()
    table = made.table_of(*walk.entries("(root)", "u", (13, 13), roles=("fwd", "wgrad")))
    with install(model, table) as installation:
        walk.run_step(model, (x,))
        counts = installation.counts()
    assert counts.hits == {"fwd": 1, "wgrad": 1} and counts.misses == {"layout": {"fwd": 2}}


def test_second_derivatives_are_refused(made, walk):
    model, x = pair("u"), rows().requires_grad_()
    with install(model, made.table_of(*walk.entries("(root)", "u", (13, 13)))):
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()


def test_in_place_operators_may_follow(made, walk):
    class Module(Pair):
        def forward(self, x):
            return torch.matmul(x, self.u).add_(1).mul_(2).relu_()

    model, x = Module(), rows(24).view(2, 12, 13)
    plain = copy.deepcopy(model)
    with install(model, made.table_of(*walk.entries("(root)", "u", (13, 13), tokens=24))):
        routed = walk.run_step(model, (x,))
    with walk.emulated():
        truth = walk.run_step(plain, (x,))
    assert all((routed[k] - v).norm() <= 1e-5 * v.norm() for k, v in truth.items())


def test_what_is_not_caught_runs_as_it_did(made, walk):
    class Module(Pair):
        def forward(self, x):
            out = torch.empty(x.shape[0], 13)
            with torch.no_grad():
                torch.mm(x, self.u, out=out)
            y = F.bilinear(x, x, self.u[None])[:, 0]
            per_row = torch.func.vmap(lambda row: (row[None] @ self.u)[0])(x)
            return (y[:, None] + per_row + out).addmm_(x, self.u)

    model, x = Module(), rows()
    plain = copy.deepcopy(model)
    with install(model, made.table_of(*walk.entries("(root)", "u", (13, 13)))) as installation:
        assert torch.equal(model(x), plain(x))
        counts = installation.counts()
    # vmap, out= and in place; what F.bilinear multiplies is no product of matrices to anybody.
    assert not any(counts.hits.values()) and counts.misses == {"layout": {"fwd": 3}}


def test_an_error_inside_leaves_nothing_behind(made, walk):
    model = pair()
    with install(model, made.table_of(*walk.entries("(root)", "u", (13, 13)))):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            model(rows(width=12))
        assert NO_LAYER() is None
        with torch.device("cpu"):
            model(rows())
            assert type(NO_LAYER()).__name__ == "DeviceContext"
    assert NO_LAYER() is None


def test_a_mode_of_the_model_itself_may_stand_above(made, walk):
    class Module(Pair):
        def __init__(self):
            super().__init__()
            self.inner = pair("v")

        def forward(self, x):
            with torch.device("cpu"):
                return self.inner(x @ self.u)

    model = Module()
    table = made.table_of(*walk.entries("(root)", "u", (13, 13)))
    with install(model, table) as installation:
        model(rows())
        assert installation.counts().hits["fwd"] == 1 and not installation.counts().misses
    assert NO_LAYER() is None


def test_threads_do_not_see_each_others_frames(made, walk):
    model, x = pair("uu"), rows()
    results = []
    with install(model, made.table_of(*walk.entries("(root)", "u", (13, 13)))) as installation:
        with torch.no_grad():
            expected = model(x)

        def work():
            with torch.no_grad():
                results.append(model(x))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert installation.counts().hits["fwd"] == 8
    assert len(results) == 3 and all(torch.equal(r, expected) for r in results)


def test_static_scales_of_gradients_follow_the_loss_scale_on_either_side(made, walk):
    x = rows(10, 7).view(2, 5, 7)
    model = nn.Sequential(Interaction())
    scales = {"fwd": (0.01, 0.01), "grad_a": (2.0**-9, 0.01), "grad_b": (0.01, 2.0**-9)}
    entries = [
        entry
        for role, pair_of in scales.items()
        for entry in walk.entries(
            "0", None, (5, 5, 7), roles=(role,), recipe="e4m3/static/fp32", scales=pair_of
        )
    ]
    g = rows(10, 5, seed=1).view(2, 5, 5)
    with install(model, made.table_of(*entries)) as installation:
        installation.set_loss_scale(1024.0)
        leaf = x.clone().requires_grad_()
        model(leaf).backward(1024 * g)
        assert installation.counts().hits == {"fwd": 1, "grad_a": 1, "grad_b": 1}
    for item in range(2):
        a, grad = x[item], 1024 * g[item]
        of_a = made.ml_product(grad, a, scales=(2.0, 0.01))
        of_b = made.ml_product(a.t(), grad, scales=(0.01, 2.0)).T
        expected = torch.from_numpy(of_a + of_b).float()
        torch.testing.assert_close(leaf.grad[item], expected, rtol=1e-5, atol=1e-2)
