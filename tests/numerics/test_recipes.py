"""Names of recipes, and which verdict holds for which."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from loka_toolkit.errors import UnknownNameError
from loka_toolkit.numerics.recipes import (
    BASELINE_RECIPES,
    DEFAULT_RECIPE_NAMES,
    Accumulation,
    Recipe,
    Scaling,
    all_recipes,
    parse_recipe,
)


def test_names_are_unique_and_parse_back() -> None:
    known = all_recipes()
    whole = 3 * 3  # scalings of A and B that are no blocks
    ocp = 2 * 2 * (whole * 3 + 2 + 1)  # every accumulation; blocks promoted or fp32; mxfp8 fp32
    fnuz = 2 * 2 * (whole + 1)  # fp32 only
    hybrids = 2 * 4 * 2 * 4  # wide format, FP8 format, which side, scaling
    assert len(known) == ocp + fnuz + hybrids + len(BASELINE_RECIPES)
    for name, recipe in known.items():
        assert parse_recipe(name) == recipe
        assert str(recipe) == recipe.name == name
    assert set(DEFAULT_RECIPE_NAMES) <= set(known)
    assert {name for name, recipe in known.items() if recipe.is_baseline} == set(BASELINE_RECIPES)


def test_a_mixed_recipe_names_both_formats_in_order() -> None:
    recipe = parse_recipe("e5m2-e4m3/tensorwise/fast")
    assert [f.name for f in recipe.formats] == ["e5m2", "e4m3"]
    scaling = Scaling.TENSORWISE
    assert recipe == Recipe("e5m2", "e4m3", scaling, scaling, Accumulation.FAST)


def test_recipes_survive_json() -> None:
    for recipe in all_recipes().values():
        assert msgspec.json.decode(msgspec.json.encode(recipe), type=Recipe) == recipe


def test_an_unknown_recipe_lists_near_misses() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean .*'e4m3/rowwise/fast'"):
        parse_recipe("e4m3/rowwise/quick")


def test_a_verdict_covers_more_exact_sums_and_nothing_else() -> None:
    order = [Accumulation.FAST, Accumulation.PROMOTED_128, Accumulation.FP32]
    for judged, kernel in itertools.product(all_recipes().values(), repeat=2):
        same_casts = (judged.formats, judged.scalings) == (kernel.formats, kernel.scalings)
        at_least = order.index(kernel.accumulation) >= order.index(judged.accumulation)
        assert judged.is_covered_by(kernel) == (same_casts and at_least)
