"""Nothing of a module changes but who computes its products; what cannot be wrapped says why."""

from __future__ import annotations

import copy
import io
import re

import msgspec
import pytest
import torch
from torch import nn

from loka_toolkit.artifacts.dispatch_table import MissReason
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.dispatch import check_table, install, uninstall
from loka_toolkit.dispatch.runtime import RoutedLinear
from loka_toolkit.dispatch.wrapping import RoutedModule
from loka_toolkit.errors import TableMismatchError
from loka_toolkit.recording import Schedule, record

REGISTRY: list[type] = []


class Registered(nn.Module):
    """A class that keeps a list of its subclasses, and state that a copy makes by itself."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        REGISTRY.append(cls)

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(13, 13) / 4)
        self.copies = 0

    def __getstate__(self):
        return {**self.__dict__, "copies": self.copies + 1}

    def forward(self, x):
        return x @ self.w


class Net(nn.Module):
    """Raw parameters in an inner module, one of them shared with the net, and a layer."""

    def __init__(self):
        super().__init__()
        self.inner = Registered()
        self.shared = self.inner.w
        self.layer = nn.Linear(13, 13)
        self.norm = nn.LayerNorm(13)

    def forward(self, x):
        return self.norm(self.layer(self.inner(x))) @ self.shared.t()


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


X = torch.randn(39, 13, generator=torch.Generator().manual_seed(1))


def table_for(made, walk, model):
    """Route the raw products and the layer; the recorder names the shared parameter once."""
    entries = (
        *walk.entries("inner", "inner.w", (13, 13)),
        *walk.entries("(root)", "inner.w", (13, 13)),
        *(made.entry("layer", model.layer, role) for role in walk.LINEAR_ROLES),
    )
    return made.table_of(*entries)


def test_keys_parameters_hooks_and_types_stay(made, walk):
    model, fired = net(), []
    model.inner.register_forward_hook(lambda *_: fired.append("hook"))
    before = [(type(m), dict(m.__dict__)) for m in model.modules()]
    parameters = {name: id(p) for name, p in model.named_parameters()}
    keys, shown = list(model.state_dict()), repr(model)
    subclasses = list(REGISTRY)
    with install(model, table_for(made, walk, model)) as installation:
        assert {name: id(p) for name, p in model.named_parameters()} == parameters
        assert list(model.state_dict()) == keys and model.shared is model.inner.w
        assert isinstance(model.inner, Registered) and type(model.inner).__name__ == "Registered"
        assert "routed=3 entries" in repr(model.inner)
        assert type(model.layer) is RoutedLinear and type(model.norm) is nn.LayerNorm
        model(X).sum().backward()
        counts = installation.counts()
    assert counts.hits == {"fwd": 3, "dgrad": 2, "wgrad": 3} and not counts.misses
    assert fired == ["hook"] and subclasses == REGISTRY
    assert [(type(m), dict(m.__dict__)) for m in model.modules()] == before
    assert repr(model) == shown


def test_a_copy_is_routed_by_its_own_parameters(made, walk):
    model = net()
    with install(model, table_for(made, walk, model)) as installation:
        copied = copy.deepcopy(model)
        alone = copy.deepcopy(model.inner)
        assert copied.inner.w is copied.shared and copied.inner.w is not model.inner.w
        assert copied.inner.copies == 1 and model.inner.copies == 0
        with torch.no_grad():
            assert torch.equal(copied(X), model(X)) and torch.equal(alone(X), model.inner(X))
            assert installation.counts().hits["fwd"] == 8
            copied.inner.w.mul_(2)
            assert not torch.equal(copied(X), model(X))
            assert not installation.counts().misses
        uninstall(copied)
        assert type(copied.inner) is Registered and type(model.inner) is not Registered
    assert copied.inner.__dict__.keys() == model.inner.__dict__.keys()


def test_a_pickle_holds_the_plain_model(made, walk):
    model = net()
    with install(model, table_for(made, walk, model)):
        file = io.BytesIO()
        torch.save(model, file)
        shallow = copy.copy(model.inner)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert not any(isinstance(m, RoutedModule | RoutedLinear) for m in loaded.modules())
    assert type(shallow) is Registered and shallow.w is model.inner.w
    assert loaded.shared is loaded.inner.w and torch.equal(loaded(X), model(X))


def test_pause_and_uninstall_run_the_original_precision(made, walk, tmp_path):
    model, plain = net(), net()
    with install(model, table_for(made, walk, model)) as installation:
        routed = model(X)
        counts = installation.counts()
        with installation.paused():
            assert type(model.inner) is Registered and torch.equal(model(X), plain(X))
            with record(model, tmp_path / "run", schedule=Schedule.always()) as recorder:
                model(X).sum().backward()
                recorder.step(examples=39)
        assert installation.counts() == counts
        assert torch.equal(model(X), routed) and not torch.equal(routed, plain(X))
    names = {
        (row["fqn"], row["module_type"]) for row in Trace.open(tmp_path / "run").sites.to_pylist()
    }
    assert ("inner", "Registered") in names and ("(root)", "Net") in names


def test_a_wrapped_model_routes_the_products_of_its_root(made, walk):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    model = net()
    wrapped = Wrapper(model)
    with install(wrapped, table_for(made, walk, model)) as installation:
        wrapped(X).sum().backward()
        assert installation.counts().hits == {"fwd": 3, "dgrad": 2, "wgrad": 3}
    assert type(wrapped) is Wrapper


def test_a_module_with_two_names_is_routed_under_either(made, walk):
    shared = Registered()
    model = nn.ModuleDict({"one": shared, "other": shared})
    for name in ("one", "other"):
        table = made.table_of(*walk.entries(name, f"{name}.w", (13, 13)))
        with install(model, table) as installation:
            shared(X).sum().backward()
            assert installation.counts().hits == {"fwd": 1, "dgrad": 0, "wgrad": 1}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_run_the_original_precision_and_are_counted(made, walk, backend):
    torch._dynamo.reset()
    model, plain = net(), net()
    with install(model, table_for(made, walk, model)) as installation:
        only_raw = [e for e in installation.table.entries if e.weight is not None]
    with install(model, made.table_of(*only_raw)) as installation:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            out = walk.run_step(compiled, (X,))
        counts = installation.counts()
        assert all(
            "compiled call of the module as an env miss" in s.detail
            for s in installation.sites()
            if s.candidate
        )
    expected = walk.run_step(torch.compile(plain, backend=backend, fullgraph=True), (X,))
    names = {f"_orig_mod.{n}" if n != "out" and not n.startswith("input") else n for n in out}
    assert len(names) == len(out)
    assert all(torch.equal(out[key], expected[key]) for key in expected)
    assert not any(counts.hits.values())
    assert counts.misses == {"env": {"fwd": 4, "dgrad": 4, "wgrad": 4}}
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_product_is_counted_once_though_several_modules_may_catch_it(made, walk):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(12, 2)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    torch._dynamo.reset()
    model = nn.Sequential(Attention())
    entries = (
        *walk.entries("0.attention", "0.attention.in_proj_weight", (36, 12)),
        *walk.entries("0.attention.out_proj", "0.attention.out_proj.weight", (12, 12)),
    )
    x = torch.randn(7, 3, 12)
    with install(model, made.table_of(*entries)) as installation:
        model(x)
        assert installation.counts().hits["fwd"] == 2
        torch.compile(model, backend="eager")(x)
        counts = installation.counts()
    assert counts.misses["env"] == dict.fromkeys(("fwd", "dgrad", "wgrad"), 2)
    assert counts.hits["fwd"] == 2
    assert counts.misses["shape"] == {"fwd": 2}, "two products of activations are in no table"
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo reads it
def test_a_compiled_module_inside_of_an_eager_one_is_not_caught(made, walk):
    torch._dynamo.reset()
    model = net()
    model.inner = torch.compile(model.inner, backend="eager")
    model.layer.compile(backend="eager")
    table = made.table_of(
        *walk.entries("inner", "inner.w", (13, 13)), *walk.entries("(root)", "inner.w", (13, 13))
    )
    with install(model, table) as installation:
        model(X)
        counts = installation.counts()
    assert counts.hits["fwd"] == 1 and counts.misses == {"env": {"fwd": 1, "dgrad": 1, "wgrad": 1}}
    torch._dynamo.reset()


class Sealed(type):
    """A metaclass that allows no subclass."""

    def __new__(mcs, name, bases, names):
        if any(isinstance(base, Sealed) for base in bases):
            raise TypeError("a sealed class has no subclasses")
        return super().__new__(mcs, name, bases, names)


class SealedModule(Registered, metaclass=Sealed):
    """A module that cannot be wrapped."""


class Odd(nn.Module):
    """A module around one that cannot be wrapped."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return torch.mm(x, x.t()) + self.inside(x).sum()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*deprecated:DeprecationWarning")
def test_what_cannot_be_wrapped_is_a_miss_with_its_reason(made, walk):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(13, 13)))
    model = nn.ModuleDict(
        {"sealed": SealedModule(), "around": Odd(SealedModule()), "script": Odd(scripted)}
    )
    table = made.table_of(
        *walk.entries("sealed", "sealed.w", (13, 13), roles=("fwd",)),
        *walk.entries("around", None, (39, 39, 13), roles=("fwd",)),
        *walk.entries("script", None, (39, 39, 13), roles=("fwd",)),
        *walk.entries("script.inside.0", "script.inside.0.weight", (13, 13), roles=("fwd",)),
    )
    with install(model, table) as installation:
        found = {s.fqn: (s.reason, s.detail) for s in installation.sites()}
        model["around"](X), model["script"](X)
        assert installation.counts().hits == {"fwd": 1}
        assert installation.counts().sites_missed == {"not-replaceable": {"fwd": 3}}
    assert found["script"][0] is None
    for fqn, why in (
        ("sealed", "a sealed class has no subclasses"),
        ("around", "could not be told from its own: its class SealedModule"),
        ("script.inside.0", "compiled by TorchScript"),
    ):
        assert found[fqn][0] is MissReason.NOT_REPLACEABLE and why in found[fqn][1]
    assert check_table(table, model).sites == installation.sites()


def test_entries_of_another_model_are_an_error(made, walk):
    model = net()
    for weight, sizes, said in (
        ("inner.v", (13, 13), r"inner: parameter inner.v is not in the model; did you mean"),
        ("inner.w", (12, 13), r"expected inner.w to hold matrices of 12x13, actual shape \(13, 13"),
    ):
        table = made.table_of(*walk.entries("inner", weight, sizes))
        with pytest.raises(TableMismatchError, match=said):
            install(model, table)
    assert type(model.inner) is Registered


def test_a_table_of_version_1_names_no_parameter_and_says_so(made, walk):
    entries = walk.entries("inner", "inner.w", (13, 13))
    old = [msgspec.structs.replace(entry, weight=None, call="*") for entry in entries]
    with install(net(), made.table_of(*old)) as installation:
        assert {s.reason for s in installation.sites()} >= {MissReason.NOT_REPLACEABLE}
        details = [s.detail for s in installation.sites() if s.fqn == "inner"]
    assert all(re.search("does not name the parameter.*build the table again", d) for d in details)
