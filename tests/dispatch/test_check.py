"""The dry run, its messages, and the lean import."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from loka_toolkit.artifacts.dispatch_table import MissReason
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch import check_table
from loka_toolkit.dispatch.validate import Check, refuse_or_warn
from loka_toolkit.environment import current_environment
from loka_toolkit.errors import TableRefusedError


def model() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(16, 24), "b": nn.Linear(24, 1)})


def test_a_dry_run_changes_nothing_and_tells_every_site(made):
    net = model()
    table = made.table_of(
        made.entry("a", net["a"], Role.FWD), made.entry("a", net["a"], Role.WGRAD, candidate="x")
    )
    found = check_table(table, net)
    assert found.usable and not found.refusals and not found.warnings and found.chip == "cpu"
    assert type(net["a"]) is nn.Linear
    assert [(s.fqn, s.role, s.reason) for s in found.sites] == [
        ("a", "wgrad", MissReason.KERNEL_ABSENT),
        ("a", "fwd", None),
        ("b", "fwd", MissReason.INSUFFICIENT),
    ]
    msgspec.json.encode(found)


def test_mismatches_are_listed_and_not_raised(made):
    table = made.table_of(
        made.entry("aa", nn.Linear(16, 24), Role.FWD), made.entry("b", nn.Linear(25, 1), Role.FWD)
    )
    found = check_table(table, model())
    assert not found.usable
    assert "aa is not in the model; did you mean 'a'" in found.mismatches[0]
    assert "expected Linear(25, 1), actual Linear(24, 1)" in found.mismatches[1]


def test_without_a_model_the_machine_is_checked(made, tmp_path):
    net = model()
    path = made.full_table(net).save(tmp_path / "table.json")
    elsewhere = made.environment(
        chip="H100", capability="9.0", driver="1.2", libraries={"torch": "2.11.0"}
    )
    found = check_table(path, environment=elsewhere)
    assert found.refusals == ("chip: expected cpu, actual H100",)
    torch_version = current_environment().libraries["torch"]
    assert f"torch: expected {torch_version}, actual 2.11.0" in found.warnings
    assert not [line for line in found.warnings if "driver" in line]  # no driver below a CPU table
    assert not found.sites


def test_a_model_on_the_cpu_of_a_gpu_machine_is_on_a_cpu(made):
    net = model()
    elsewhere = made.environment(chip="H200", capability="9.0", driver="570", cuda="13.0")
    table = made.full_table(net)
    found = check_table(table, net, environment=elsewhere)
    assert found.chip == "cpu" and found.usable
    assert not [line for line in found.warnings if line.startswith(("driver", "cuda"))]
    assert check_table(table, environment=elsewhere).refusals
    with torch.device("meta"):
        assert check_table(table, model(), environment=elsewhere).chip == "H200"


def test_refusals_print_one_line_each_and_the_next_step(made):
    table = made.full_table(model())
    checks = [
        Check("chip", "H200", "cpu", True),
        Check("kernel_abi", "1", "2", True),
        Check("torch", "2.13.0", None, False),
    ]
    with pytest.raises(TableRefusedError) as refused:
        refuse_or_warn(table, checks, on_gpu=False, allow_unmeasured=False)
    assert str(refused.value).splitlines() == [
        "the table does not fit:",
        "  chip: expected H200, actual cpu",
        "  kernel_abi: expected 1, actual 2",
        "build it with the chip where the model's parameters are, or move the model first",
    ]
    with pytest.warns(UserWarning, match=r"torch: expected 2\.13\.0, actual none"):
        refuse_or_warn(table, checks[2:], on_gpu=False, allow_unmeasured=False)


def test_unmeasured_entries_need_permission_on_a_gpu_only(made):
    table = made.full_table(model(), numerics="none")
    refuse_or_warn(table, [], on_gpu=False, allow_unmeasured=False)
    refuse_or_warn(table, [], on_gpu=True, allow_unmeasured=True)
    refuse_or_warn(made.full_table(model()), [], on_gpu=True, allow_unmeasured=False)
    with pytest.raises(TableRefusedError, match="6 of 6 entries were not measured on cpu"):
        refuse_or_warn(table, [], on_gpu=True, allow_unmeasured=False)
    assert check_table(table).unmeasured == 6
