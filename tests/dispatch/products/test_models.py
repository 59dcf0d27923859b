"""From a record of a model to FP8: every product is found, named and computed right."""

from __future__ import annotations

import copy

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loka_toolkit.dispatch import install
from loka_toolkit.dispatch.runtime import RoutedLinear


class LeftWeight(nn.Module):
    """A weight on the left, F.linear of raw parameters, and a subclass of nn.Linear."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * F.linear(x, self.weight, self.bias)

    def __init__(self):
        super().__init__()
        self.left = nn.Parameter(torch.randn(26, 13) / 4)
        self.raw = nn.Parameter(torch.randn(17, 26) / 5)
        self.bias = nn.Parameter(torch.randn(17))
        self.head = self.Scaled(17, 5)

    def forward(self, x):
        hidden = (self.left @ x.t()).t().relu()
        return self.head(F.linear(hidden, self.raw, self.bias))


class Attention(nn.Module):
    """Attention written out, with a mask that is added, and heads in a fourth dimension."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(12, 36)

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.project(x).view(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mask = torch.full((length, length), -1e4).triu(1)
        flat = [t.reshape(2 * n, length, -1) for t in (q, k)]
        scores = torch.baddbmm(mask, flat[0], flat[1].mT, beta=0.5, alpha=0.3)
        return (scores.softmax(-1).view(n, 2, length, length) @ v).transpose(1, 2).flatten(2)


class Einsums(nn.Module):
    """Contractions written as einsum, tensordot and inner, with parameters on either side."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 13, 6) / 4)
        self.v = nn.Parameter(torch.randn(6, 4, 9) / 5)
        self.u = nn.ParameterList([nn.Parameter(torch.randn(9, 9) / 3) for _ in range(2)])

    def forward(self, x):
        h = torch.einsum("bi,fio->bfo", x, self.w)
        crossed = torch.einsum("bfo,bgo->bfg", h, h)
        h = torch.einsum("bfg,bgo->bfo", crossed, h)
        y = torch.tensordot(h, self.v, dims=([2, 1], [0, 1]))
        for u in self.u:
            y = y + torch.inner(y, u).tanh()
        return y


class Vectors(nn.Module):
    """Matrices times vectors, with a parameter as either, and a product of two vectors."""

    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.randn(13))
        self.w = nn.Parameter(torch.randn(6, 13) / 3)
        self.b = nn.Parameter(torch.randn(6))

    def forward(self, x):
        scores = (x @ self.v).softmax(0)
        pooled = x.t() @ scores
        hidden = torch.addmv(self.b, self.w, pooled, beta=0.5, alpha=2)
        return (x[:, None] @ self.v) * torch.dot(hidden, hidden) + hidden.sum()


class Tied(nn.Module):
    """The weight of an embedding and that of a layer, multiplied by the module around them."""

    class Scorer(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, h):
            return torch.mm(h, self.weight.t())

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(21, 8)
        self.layer = nn.Linear(8, 8)
        self.scorer = self.Scorer(self.items.weight)

    def forward(self, index):
        h = self.items(index)
        h = h + F.linear(self.layer(h).tanh(), self.layer.weight)
        return h @ self.items.weight.t() + self.scorer(h)


class Transformer(nn.Module):
    """torch's own attention, whose layers are called by functions and never by themselves."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True, **options)
        self.options = options

    def forward(self, x):
        if "kdim" in self.options:
            return self.attention(x, x[..., :5], x[..., :7])[0]
        return self.attention(x, x, x, need_weights=True)[0]


def cross(kind):
    from deepctr_torch.layers.interaction import CrossNet

    return CrossNet(13, layer_num=3, parameterization=kind)


def cross_mix():
    from deepctr_torch.layers.interaction import CrossNetMix

    return CrossNetMix(13, low_rank=5, num_experts=2, layer_num=2)


def hstu():
    from torch_rechub.basic.layers import HSTULayer

    return HSTULayer(d_model=12, n_heads=2, dqk=5, dv=7, dropout=0.0, max_seq_len=9)


ROWS = torch.Generator().manual_seed(3)
MODELS = {
    "left weight": (LeftWeight, (torch.randn(39, 13, generator=ROWS),)),
    "attention": (Attention, (torch.randn(3, 7, 12, generator=ROWS),)),
    "einsum": (Einsums, (torch.randn(17, 13, generator=ROWS),)),
    "vectors": (Vectors, (torch.randn(39, 13, generator=ROWS),)),
    "tied": (Tied, (torch.arange(11),)),
    "MultiheadAttention": (Transformer, (torch.randn(3, 7, 12, generator=ROWS),)),
    "MultiheadAttention, widths": (
        lambda: Transformer(kdim=5, vdim=7, bias=False),
        (torch.randn(3, 7, 12, generator=ROWS),),
    ),
    "DCN vector": (lambda: cross("vector"), (torch.randn(19, 13, generator=ROWS),)),
    "DCN matrix": (lambda: cross("matrix"), (torch.randn(19, 13, generator=ROWS),)),
    "DCN mix": (cross_mix, (torch.randn(19, 13, generator=ROWS),)),
    "HSTU": (hstu, (torch.randn(3, 7, 12, generator=ROWS),)),
}


def made_model(name):
    torch.manual_seed(0)
    maker, inputs = MODELS[name]
    return maker(), inputs


@pytest.mark.parametrize("name", MODELS)
def test_every_recorded_product_runs_in_fp8_and_is_right(walk, name, tmp_path):
    model, inputs = made_model(name)
    plain = copy.deepcopy(model)
    table = walk.table_from_record(model, inputs, tmp_path / "run")
    with walk.Products() as counted:
        expected = walk.run_step(plain, inputs)
    with install(model, table) as installation:
        unrouted = [s for s in installation.sites() if s.candidate is None]
        assert not unrouted
        with walk.Products() as left:
            routed = walk.run_step(model, inputs)
        counts = installation.counts()
    assert not left.forward and not left.backward, "a product ran in its original precision"
    assert counts.hits["fwd"] == len(counted.forward) and not counts.misses
    assert sum(counts.hits.values()) == len(counted.forward) + len(counted.backward)
    with walk.emulated():
        truth = walk.run_step(plain, inputs)
    assert routed.keys() == truth.keys() == expected.keys()
    assert not torch.equal(routed["out"], expected["out"])
    for key, value in truth.items():
        assert routed[key].shape == value.shape and routed[key].dtype == value.dtype
        # What is left is the float32 sum of scaled_mm against a float64 one, and an element that
        # such a difference moves to the next FP8 value later on: one of hundreds, by 1/16 of it.
        assert (routed[key] - value).norm() <= 5e-3 * value.norm(), key


@pytest.mark.parametrize("name", MODELS)
def test_a_table_whose_entries_all_miss_changes_no_bit(walk, name, tmp_path):
    model, inputs = made_model(name)
    plain = copy.deepcopy(model)
    table = walk.table_from_record(model, inputs, tmp_path / "run", dtype="bfloat16")
    with install(model, table) as installation:
        routed = walk.run_step(model, inputs)
        counts = installation.counts()
    expected = walk.run_step(plain, inputs)
    assert not any(counts.hits.values()) and set(counts.misses) == {"layout"}
    assert all(torch.equal(routed[key], expected[key]) for key in expected)


ROLES = {
    "left weight": ("fwd", "dgrad", "wgrad"),
    "attention": ("fwd", "grad_a", "grad_b"),
    "einsum": ("fwd", "dgrad", "wgrad", "grad_a", "grad_b"),
    "vectors": ("fwd", "dgrad", "wgrad", "grad_b"),
}


@pytest.mark.parametrize(
    ("name", "role"), [(n, role) for n, roles in ROLES.items() for role in roles]
)
def test_roles_without_an_entry_run_the_operator_of_autograd(walk, name, role, tmp_path):
    model, inputs = made_model(name)
    table = walk.table_from_record(model, inputs, tmp_path / "run")
    kept = tuple(entry for entry in table.entries if entry.role == role)
    plain = copy.deepcopy(model)
    with walk.Products() as counted:
        expected = walk.run_step(plain, inputs)
    with install(model, msgspec.structs.replace(table, entries=kept)) as installation:
        with walk.Products() as left:
            routed = walk.run_step(model, inputs)
        hits = installation.counts().hits
    assert set(hits) == {role} and hits[role] >= 1
    total = len(counted.forward) + len(counted.backward)
    assert len(left.forward) + len(left.backward) + hits[role] == total
    if role != "fwd":
        assert torch.equal(routed["out"], expected["out"])


def test_products_of_layers_inside_are_theirs(walk, tmp_path):
    model, inputs = made_model("HSTU")
    table = walk.table_from_record(model, inputs, tmp_path / "run")
    with install(model, table) as installation:
        assert type(model.proj1) is RoutedLinear
        walk.run_step(model, inputs)
        rows = {(s.fqn, s.role, s.calls): s.hits for s in installation.counts_by_site()}
    assert rows[("proj1", "fwd", ("*",))] == 1 and rows[("proj2", "wgrad", ("*",))] == 1
    assert rows[("(root)", "fwd", (0,))] == 1 and rows[("(root)", "fwd", (1,))] == 1
