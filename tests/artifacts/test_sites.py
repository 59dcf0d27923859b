from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_toolkit.artifacts.sites import (
    GEMM_OPERANDS,
    ROOT_FQN,
    Role,
    SiteKey,
    canonical_fqn,
    select_sites,
    token_axis,
)
from loka_toolkit.errors import ConfigurationError, NoMatchError

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=40)


@given(fqn=names, call=st.integers(0, 10**6), role=st.sampled_from(list(Role)))
def test_site_names_can_be_read_back_whatever_the_module_is_called(fqn, call, role):
    key = SiteKey(fqn=fqn, call=call, role=role)
    assert SiteKey.parse(str(key)) == key
    assert str(key).startswith(key.layer)


@pytest.mark.parametrize("bad", ["", "a", "a#0", "a#x:fwd", "a#0:backward", "#0:fwd", "a#-1:fwd"])
def test_what_is_not_a_site_name_is_refused(bad):
    with pytest.raises(ConfigurationError, match="not a site name"):
        SiteKey.parse(bad)


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("module.tower.0", "tower.0"),
        ("_orig_mod.module.tower.0", "tower.0"),
        ("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b", "a.b"),
        ("", ROOT_FQN),
        ("module", ROOT_FQN),
        ("submodule.x", "submodule.x"),
    ],
)
def test_wrapper_prefixes_do_not_change_a_name(wrapped, plain):
    assert canonical_fqn(wrapped) == plain


def test_every_role_of_a_product_has_its_operands_and_its_token_axis():
    with_parameter = {role for role, flag in GEMM_OPERANDS if flag}
    without = {role for role, flag in GEMM_OPERANDS if not flag}
    assert with_parameter == {Role.FWD, Role.DGRAD, Role.WGRAD}
    assert without == {Role.FWD, Role.GRAD_A, Role.GRAD_B}
    assert [token_axis(r) for r in (Role.FWD, Role.DGRAD, Role.WGRAD)] == ["m", "m", "k"]
    assert token_axis(Role.NORM) is None


NAMES = ("tower.0#0:fwd", "tower.0#0:wgrad", "tower.1#0:fwd", "head#0:fwd")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), NAMES),
        (("tower.*",), (), NAMES[:3]),
        (("tower.0",), (), NAMES[:2]),
        (("*:fwd",), ("head",), (NAMES[0], NAMES[2])),
        ((), ("*:wgrad", "tower.1#0:fwd"), (NAMES[0], NAMES[3])),
    ],
)
def test_globs_choose_sites(include, exclude, expected) -> None:
    assert select_sites(NAMES, include, exclude) == expected


@pytest.mark.parametrize(
    ("include", "exclude"), [(("towr.0",), ()), ((), ("nothing*",)), (("head",), ("head",))]
)
def test_globs_that_leave_nothing_are_errors(include, exclude) -> None:
    with pytest.raises(NoMatchError, match="site"):
        select_sites(NAMES, include, exclude)


def test_nothing_left_can_be_right_but_a_glob_without_a_match_never_is():
    assert select_sites(NAMES, ("head",), ("head",), may_be_empty=True) == ()
    with pytest.raises(NoMatchError, match=r"did you mean 'tower\.0'"):
        select_sites(NAMES, ("towr.0",), may_be_empty=True)
