"""Installing and uninstalling: nothing of the model changes but which kernels multiply."""

from __future__ import annotations

import copy
import io
import re
import warnings

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka_toolkit.artifacts.dispatch_table import Miss, MissReason
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch import install, uninstall
from loka_toolkit.dispatch.runtime import RoutedLinear
from loka_toolkit.errors import (
    TableError,
    TableMismatchError,
    TableRefusedError,
    UnknownNameError,
)

ROLES = (Role.FWD, Role.DGRAD, Role.WGRAD)


class Tower(nn.Module):
    """An MLP with a shared layer, a tied weight, a norm, and a product that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(13, 16)
        self.twice = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.twice.weight
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.inner(x))
        x = torch.relu(self.twice(x))
        x = torch.relu(self.twice(x))
        return self.head(self.norm(self.tied(x)))


def tower(seed: int = 0) -> Tower:
    torch.manual_seed(seed)
    return Tower()


def train(model: nn.Module, steps: int = 4, optimizer=None) -> list[torch.Tensor]:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(39, 13, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()] + [
        p.grad.clone() for p in model.parameters()
    ]


def all_equal(one, other) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def test_a_table_without_entries_changes_no_bit(made):
    model, plain = tower(), tower()
    miss = Miss("inner", 0, "fwd", MissReason.UNSAFE, "e4m3 is unsafe")
    with install(model, made.table_of(misses=(miss,))) as installation:
        assert all_equal(train(model), train(plain))
        assert not any(isinstance(m, RoutedLinear) for m in model.modules())
        counts = installation.counts()
    assert counts.hits == {} and counts.misses == {}
    assert counts.sites_missed["unsafe"] == {"fwd": 1}


def test_entries_that_all_miss_change_no_bit(made):
    model, plain = tower(), tower()
    table = made.full_table(model, tokens=10**6)  # wgrad: too few tokens; fwd, dgrad: another dtype
    other = made.full_table(model, dtype="bfloat16")
    for wrong in (other, msgspec.structs.replace(table, entries=table.entries[2::3])):
        with install(model, wrong) as installation:
            assert all_equal(train(model), train(plain))
            counts, sites = installation.counts(), installation.sites()
        assert not any(counts.hits.values())
        reason, said = ("layout", "dtype") if wrong is other else ("shape", "token count")
        assert set(counts.misses) == {reason}
        routed = [site.detail for site in sites if site.candidate]
        assert routed and all(re.search(f"another {said} .*{reason} miss", d) for d in routed)


def test_uninstall_restores_class_and_behavior(made):
    model, plain = tower(), tower()
    before = [type(m) for m in model.modules()]
    attributes = [set(m.__dict__) for m in model.modules()]
    installation = install(model, made.full_table(model))
    assert sum(isinstance(m, RoutedLinear) for m in model.modules()) == 4
    installation.uninstall()
    installation.uninstall()
    assert [type(m) for m in model.modules()] == before
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert all_equal(train(model), train(plain))
    install(model, made.full_table(model))
    uninstall(model)
    assert [type(m) for m in model.modules()] == before


def test_a_paused_installation_runs_the_original_precision_uncounted(made):
    model, plain = tower(), tower()
    x = torch.randn(39, 13)
    with install(model, made.full_table(model)) as installation:
        routed = model(x)
        counts = installation.counts()
        with installation.paused():
            assert torch.equal(model(x), plain(x))
        with pytest.raises(ZeroDivisionError), installation.paused():
            raise ZeroDivisionError
        assert installation.counts() == counts
        assert torch.equal(model(x), routed) and not torch.equal(routed, plain(x))


def test_parameters_keys_tying_hooks_and_optimizer_state_stay(made):
    model = tower()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer=optimizer)
    fired = []
    model.twice.register_forward_hook(lambda *_: fired.append("hook"))
    parameters = {name: id(p) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    buffers = list(model.named_buffers())
    state = {id(p) for p in optimizer.state}
    with install(model, made.full_table(model)):
        assert {name: id(p) for name, p in model.named_parameters()} == parameters
        assert list(model.state_dict()) == keys and list(model.named_buffers()) == buffers
        assert model.tied.weight is model.twice.weight
        train(model, steps=1, optimizer=optimizer)
        assert {id(p) for p in optimizer.state} == state
        assert fired == ["hook", "hook"]
        assert isinstance(model.twice, nn.Linear) and "routed=fwd+dgrad+wgrad" in repr(model.twice)


def test_a_layer_called_twice_and_a_tied_weight_accumulate(made):
    model, plain = tower(), tower()
    with install(model, made.full_table(model, tokens=39)) as installation:
        train(model, steps=2)
        rows = {(s.fqn, s.role): s.hits for s in installation.counts_by_site()}
    train(plain, steps=2)
    assert rows[("twice", "fwd")] == rows[("twice", "dgrad")] == rows[("twice", "wgrad")] == 4
    assert rows[("tied", "wgrad")] == 2 and rows[("inner", "dgrad")] == 0
    # 20 dB is what a safe site has to reach; the gradient of the tied weight adds three products.
    error = (model.twice.weight.grad - plain.twice.weight.grad).norm()
    assert error < 0.5 * plain.twice.weight.grad.norm()


def test_gradient_accumulation_adds(made):
    model = nn.Sequential(nn.Linear(13, 16))
    x = torch.randn(39, 13)
    with install(model, made.full_table(model, tokens=39)):
        model(x).sum().backward()
        once = model[0].weight.grad.clone()
        model(x).sum().backward()
        assert torch.equal(model[0].weight.grad, once + once)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(made, reentrant):
    model = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 1))
    x = torch.randn(39, 13, requires_grad=True)
    with install(model, made.full_table(model, tokens=39)) as installation:
        model(x).sum().backward()
        expected = [p.grad.clone() for p in model.parameters()] + [x.grad.clone()]
        model.zero_grad()
        x.grad = None
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        assert all_equal([p.grad for p in model.parameters()] + [x.grad], expected)
        hits = installation.counts().hits
    # Recomputing runs the forward kernels once more, except that the engine may stop early.
    assert hits["dgrad"] == hits["wgrad"] == 4 and hits["fwd"] == 6


def test_a_gradient_scaler_finds_the_infinity(made):
    model = nn.Sequential(nn.Linear(13, 16), nn.Linear(16, 1))
    with install(model, made.full_table(model, tokens=39)):
        loss = model(torch.randn(39, 13)).mean()
        (loss * torch.tensor(float("inf"))).backward()
        assert not torch.isfinite(model[0].weight.grad).any()


def test_a_copy_is_routed_and_counts_into_the_same_installation(made):
    model = tower()
    with install(model, made.full_table(model)) as installation:
        copied = copy.deepcopy(model)
        assert copied.tied.weight is copied.twice.weight
        assert copied.inner.weight is not model.inner.weight
        x = torch.randn(39, 13)
        assert torch.equal(copied(x), model(x))
        assert installation.counts().hits["fwd"] == 10
        uninstall(copied)
        assert type(copied.inner) is nn.Linear and type(model.inner) is RoutedLinear


def test_state_dicts_and_whole_models_are_saved_as_the_plain_model(made):
    model, fresh = tower(), tower(seed=5)
    with install(model, made.full_table(model)):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        fresh.load_state_dict(torch.load(file, weights_only=True))
        whole = io.BytesIO()
        torch.save(model, whole)
        whole.seek(0)
        loaded = torch.load(whole, weights_only=False)
        model.load_state_dict(fresh.state_dict())
    assert type(loaded.inner) is nn.Linear and loaded.tied.weight is loaded.twice.weight
    x = torch.randn(5, 13)
    assert torch.equal(loaded(x), model(x)) and torch.equal(fresh(x), model(x))


def test_wrapper_prefixes_are_canonical(made):
    model = tower()
    table = made.full_table(model)

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    wrapped = Wrapper(torch.compile(model, backend="eager"))
    with install(wrapped, table) as installation:
        assert all(s.candidate for s in installation.sites())
    assert type(model.inner) is nn.Linear


def test_installing_twice_names_the_next_step(made):
    model = tower()
    table = made.full_table(model)
    with install(model, table), pytest.raises(TableError, match=r"call uninstall\(model\) first"):
        install(model, table)


def test_another_chip_is_refused_with_expected_and_actual(made):
    model = tower()
    validators = tuple(
        msgspec.structs.replace(v, expected="H200") if v.name == "chip" else v
        for v in made.full_table(model).validators
    )
    table = msgspec.structs.replace(made.full_table(model), chip="H200", validators=validators)
    with pytest.raises(TableRefusedError, match="chip: expected H200, actual cpu"):
        install(model, table)
    assert not any(isinstance(m, RoutedLinear) for m in model.modules())


@pytest.mark.parametrize("name", ["kernel_abi", "kernel_abi/torch.scaled_mm/e4m3/tensorwise/fp32"])
def test_another_kernel_abi_is_refused(made, name):
    model = tower()
    table = made.full_table(model)
    assert name in {v.name for v in table.validators}
    validators = tuple(
        msgspec.structs.replace(v, expected="0") if v.name == name else v for v in table.validators
    )
    with pytest.raises(TableRefusedError, match=f"{name}: expected 0, actual 1"):
        install(model, msgspec.structs.replace(table, validators=validators))


def test_a_soft_difference_warns_and_installs(made):
    model = tower()
    table = made.full_table(model)
    validators = tuple(
        msgspec.structs.replace(v, expected="0.1") if v.name == "torch" else v
        for v in table.validators
    )
    with pytest.warns(UserWarning, match=r"torch: expected 0\.1, actual 2"):
        installation = install(model, msgspec.structs.replace(table, validators=validators))
    with installation:
        train(model, steps=1)
        assert installation.counts().hits["fwd"] == 5


def test_layers_that_are_not_in_the_model_are_an_error_with_near_misses(made):
    model = tower()
    table = made.table_of(made.entry("iner", model.inner, Role.FWD))
    with pytest.raises(TableMismatchError, match=r"iner is not in the model; did you mean 'inner'"):
        install(model, table)


@pytest.mark.parametrize("role", ROLES)
def test_layers_of_another_size_are_an_error(made, role):
    model = tower()
    table = made.table_of(made.entry("inner", nn.Linear(14, 16), role))
    with pytest.raises(
        TableMismatchError, match=r"expected Linear\(14, 16\), actual Linear\(13, 16\)"
    ):
        install(model, table)


def test_what_cannot_be_replaced_is_a_miss_with_its_reason(made):
    class Odd(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "subclass": Odd(16, 24),
            "absent": nn.Linear(16, 24),
            "uninstalled": nn.Linear(16, 24),
            "shape": nn.Linear(16, 24),
            "call": nn.Linear(16, 24),
            "unknown": nn.Linear(16, 24),
            "patched": nn.Linear(16, 24),
        }
    )
    model["patched"].forward = model["patched"].forward
    gone = made.FakeCandidate("e4m3/tensorwise/fp32", library="gone", installed=None)
    picky = made.FakeCandidate("e4m3/tensorwise/fp32", library="picky", refusal="needs SM90")
    table = made.table_of(
        made.entry("subclass", model["subclass"], Role.FWD),
        made.entry("absent", model["absent"], Role.FWD, candidate="nowhere.gemm/e4m3"),
        made.entry("uninstalled", model["uninstalled"], Role.FWD, candidate=gone.name),
        made.entry("shape", model["shape"], Role.FWD, candidate=picky.name),
        made.entry("call", model["call"], Role.FWD, call=1),
        made.entry("patched", model["patched"], Role.FWD),
    )
    from loka_toolkit.kernels.catalog import catalog

    with install(model, table, candidates=(*catalog(), gone, picky)) as installation:
        reasons = {site.fqn: site.reason for site in installation.sites()}
        assert all(site.detail for site in installation.sites())
        missed = installation.counts().sites_missed
    assert reasons == {
        "subclass": MissReason.NOT_REPLACEABLE,
        "absent": MissReason.KERNEL_ABSENT,
        "uninstalled": MissReason.KERNEL_ABSENT,
        "shape": MissReason.SHAPE,
        "call": MissReason.NOT_REPLACEABLE,
        "unknown": MissReason.INSUFFICIENT,
        "patched": MissReason.NOT_REPLACEABLE,
    }
    assert missed["not-replaceable"] == {"fwd": 3} and missed["kernel-absent"] == {"fwd": 2}


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        (
            {"role": "grad_a", "token_axis": "batch", "m": 64},
            MissReason.NOT_REPLACEABLE,
            "no product of nn.Linear",
        ),
        ({"batch": 2}, MissReason.NOT_REPLACEABLE, "batch of 2"),
    ],
)
def test_an_entry_that_cannot_run_is_a_miss(made, changes, reason, detail):
    model = nn.Sequential(nn.Linear(16, 16))
    entry = msgspec.structs.replace(made.entry("0", model[0], Role.FWD), **changes)
    with install(model, made.table_of(entry)) as handle:
        (site,) = handle.sites()
        assert site.reason is reason and detail in site.detail
        assert type(model[0]) is nn.Linear


def test_names_that_do_not_exist_are_errors(made):
    model = nn.Sequential(nn.Linear(16, 16))
    entry = msgspec.structs.replace(made.entry("0", model[0], Role.FWD), role="fwdd")
    with pytest.raises(TableMismatchError, match="unknown role 'fwdd'; did you mean 'fwd'"):
        install(model, made.table_of(entry))
    with pytest.raises(UnknownNameError, match="unknown dtype 'float23'; did you mean 'float32'"):
        install(model, made.table_of(made.entry("0", model[0], Role.FWD, dtype="float23")))


def test_a_module_with_two_names_takes_an_entry_under_either(made):
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"one": shared, "other": shared})
    table = made.table_of(made.entry("other", shared, Role.FWD))
    with install(model, table) as installation:
        assert [s.candidate is not None for s in installation.sites()] == [True]
    agreeing = made.table_of(made.entry("one", shared, Role.FWD), *table.entries)
    with install(model, agreeing) as installation:
        assert [s.candidate is not None for s in installation.sites()] == [True, True]
    differing = made.table_of(
        made.entry("one", shared, Role.FWD, recipe="e4m3/rowwise/fp32"), *table.entries
    )
    with install(model, differing) as installation:
        assert {s.reason for s in installation.sites()} == {MissReason.CONFLICT}


def test_a_table_is_read_from_its_file_and_ranks_agree(made, tmp_path):
    model = tower()
    path = made.full_table(model).save(tmp_path / "table.json")
    with install(model, path) as one:
        first = one.sites()
    with install(tower(seed=9), path) as other:
        assert other.sites() == first


def test_nothing_is_warned_of_where_everything_fits(made):
    model = tower()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installation = install(model, made.full_table(model))
    assert all(site.candidate for site in installation.sites())
    installation.uninstall()


def test_an_exception_inside_uninstalls(made):
    model = tower()
    with pytest.raises(ZeroDivisionError), install(model, made.full_table(model)):
        raise ZeroDivisionError
    assert type(model.inner) is nn.Linear
